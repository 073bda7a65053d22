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
        // The first row sees farthest back, the last one farthest ahead; sinks come before all.
        let [sinks, first] = tile.seen_by(task, self.first);
        let [_, last] = tile.seen_by(task, self.first + self.rows - 1);
        let from = if sinks.0 < sinks.1 {
            sinks.0
        } else if first.0 < first.1 {
            first.0
        } else {
            // What the first row sees ends before the tile, or begins behind it.
            0
        };
        (from, last.1.max(first.1).max(sinks.1))
    }
}
