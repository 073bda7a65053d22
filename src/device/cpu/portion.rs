//! Some of the rows that are computed at once: few enough that their scores and weights stay in the
//! nearest cache beside a tile's keys and values.

use super::task::Task;
use super::tile::{Keys, Tile};

/// Query heads of a portion, unless a single row has more.
const PORTION: usize = 32;

/// Consecutive rows of a task.
#[derive(Clone, Copy, Debug)]
pub(super) struct Portion {
    /// The first row.
    pub(super) first: usize,
    /// Rows.
    pub(super) rows: usize,
}

impl Portion {
    /// All rows of a task.
    pub(super) fn all(task: &Task<'_>) -> Self {
        Self { first: 0, rows: task.rows }
    }

    /// The portions of a task, in order.
    pub(super) fn of(task: &Task<'_>) -> impl Iterator<Item = Self> {
        let (most, all) = ((PORTION / task.group.max(1)).max(1), task.rows);
        (0..all).step_by(most).map(move |first| Self { first, rows: most.min(all - first) })
    }

    /// Its query heads among those of the task, the end excluded.
    pub(super) fn heads(self, task: &Task<'_>) -> std::ops::Range<usize> {
        self.first * task.group..(self.first + self.rows) * task.group
    }

    /// The keys of a tile that any of its rows sees, and some that none does: one range.
    pub(super) fn keys(self, task: &Task<'_>, tile: &Tile<'_>) -> Keys {
        // As positions: of this tile the first and the last row may see nothing, and one between
        // them something.
        let last = self.first + self.rows - 1;
        let [sinks, rest] = tile.cut(task.seen_by_rows(self.first, last));
        match (sinks.0 < sinks.1, rest.0 < rest.1) {
            (true, true) => (sinks.0, rest.1),
            (true, false) => sinks,
            (false, _) => rest,
        }
    }
}
