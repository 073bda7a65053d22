//! The pool at its fullest moment, in at most as many cells as a picture has room for.

use serde::{Deserialize, Serialize};

use crate::cache::Cache;
use crate::plan::GroupKind;
use crate::pool::BlockState;
use crate::units::{BlockId, GroupIdx};

/// The most cells.
const MAX_CELLS: usize = 2048;

/// The pool at one moment. Each cell stands for some units in the order in which they lie in the
/// pool, and has a digit from 0 to 9 for how full it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Picture {
    /// The moment, in microseconds from the start.
    pub at_us: u64,
    /// What the units are: `block`, `slot` or `byte`.
    pub unit: String,
    /// How many units a cell stands for; the last may have fewer.
    pub units_per_cell: u64,
    /// How many units there are.
    pub units: u64,
    /// How much of each cell sequences hold.
    pub held: String,
    /// How much of each cell has tokens.
    pub used: String,
    /// How much of each cell is kept for reuse.
    pub cached: String,
}

/// One cell: what is held, used and cached of it, in the same measure as `total`.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Cell {
    pub(super) total: u64,
    pub(super) held: u64,
    pub(super) used: u64,
    pub(super) cached: u64,
}

/// Keeps the fullest moment so far. Allocates nothing after it was made.
#[derive(Debug)]
pub(super) struct Album {
    unit: &'static str,
    units: u64,
    units_per_cell: u64,
    cells: Vec<Cell>,
    at_us: u64,
    held_bytes: u64,
}

impl Album {
    /// An album of so many units.
    pub(super) fn new(unit: &'static str, units: u64) -> Self {
        let units_per_cell = units.div_ceil(MAX_CELLS as u64).max(1);
        let cells = usize::try_from(units.div_ceil(units_per_cell)).unwrap_or(MAX_CELLS);
        let cells = vec![Cell::default(); cells];
        Self { unit, units, units_per_cell, cells, at_us: 0, held_bytes: 0 }
    }

    /// An album of the cache's leading group: the first that is paged, or else the first.
    pub(super) fn of(cache: &Cache) -> Self {
        let (group, unit) = lead(cache);
        let plan = cache.plan();
        let units = plan.groups.get(group.index()).map_or(0, |group| group.layout.units);
        Self::new(unit, u64::from(units))
    }

    /// Whether this is the fullest moment so far, by a twentieth at least: drawing takes time.
    pub(super) fn is_fuller(&self, held_bytes: u64) -> bool {
        held_bytes > self.held_bytes.saturating_add(self.held_bytes / 20)
    }

    /// Begins a new picture: `draw` adds to the cells.
    pub(super) fn take(
        &mut self,
        at_ns: u64,
        held_bytes: u64,
        draw: impl FnOnce(&mut [Cell], u64),
    ) {
        self.at_us = at_ns / 1000;
        self.held_bytes = held_bytes;
        self.cells.fill(Cell::default());
        draw(&mut self.cells, self.units_per_cell);
    }

    /// Draws the cache.
    pub(super) fn draw(&mut self, at_ns: u64, held_bytes: u64, cache: &Cache) {
        let (group, _) = lead(cache);
        let Some(of_group) = cache.plan().groups.get(group.index()) else { return };
        let (units, kind) = (of_group.layout.units, of_group.kind);
        let unit_tokens = of_group.layout.unit_tokens;
        self.take(at_ns, held_bytes, |cells, per_cell| {
            for unit in 0..units {
                let place = usize::try_from(u64::from(unit) / per_cell).unwrap_or(usize::MAX);
                let Some(cell) = cells.get_mut(place) else { break };
                match kind {
                    GroupKind::Paged => {
                        let state = cache.block_state(group, BlockId(unit));
                        cell.total += 1;
                        cell.held += u64::from(state == Some(BlockState::Active));
                        cell.used += u64::from(state == Some(BlockState::Active));
                        cell.cached += u64::from(state == Some(BlockState::Cached));
                    }
                    GroupKind::Contiguous => {
                        let len = cache.slot_len(unit);
                        let tokens = u64::from(unit_tokens);
                        cell.total += tokens;
                        cell.held += len.map_or(0, |_| tokens);
                        cell.used += len.map_or(0, |len| u64::from(len).min(tokens));
                    }
                }
            }
        });
    }

    /// The picture; `None` when nothing was ever held.
    pub(super) fn finish(&self) -> Option<Picture> {
        if self.held_bytes == 0 {
            return None;
        }
        let digits = |part: fn(&Cell) -> u64| {
            let digit = |cell: &Cell| {
                let tenths = u128::from(part(cell)) * 9;
                let rounded =
                    (2 * tenths + u128::from(cell.total)) / (2 * u128::from(cell.total.max(1)));
                char::from_digit(u32::try_from(rounded.min(9)).unwrap_or(9), 10).unwrap_or('9')
            };
            self.cells.iter().map(digit).collect()
        };
        Some(Picture {
            at_us: self.at_us,
            unit: self.unit.to_owned(),
            units_per_cell: self.units_per_cell,
            units: self.units,
            held: digits(|cell| cell.held),
            used: digits(|cell| cell.used),
            cached: digits(|cell| cell.cached),
        })
    }
}

/// The group that is drawn.
fn lead(cache: &Cache) -> (GroupIdx, &'static str) {
    let groups = (0..).zip(&cache.plan().groups);
    let paged = groups.into_iter().find(|(_, group)| group.kind == GroupKind::Paged);
    paged.map_or((GroupIdx(0), "slot"), |(group, _)| (GroupIdx(group), "block"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_are_digits() {
        let mut album = Album::new("byte", 10_000);
        assert_eq!((album.units_per_cell, album.cells.len()), (5, 2000));
        assert_eq!(album.finish(), None);
        assert!(album.is_fuller(1) && !album.is_fuller(0));
        album.take(7_000, 100, |cells, per_cell| {
            assert_eq!(per_cell, 5);
            for (held, cell) in [0, 1, 3, 5].into_iter().zip(cells) {
                *cell = Cell { total: 5, held, used: held / 2, cached: 5 - held };
            }
        });
        let picture = album.finish().expect("something is held");
        assert_eq!(
            (&picture.held[..5], &picture.used[..4], &picture.cached[..4]),
            ("02590", "0024", "9740")
        );
        assert_eq!((picture.at_us, picture.units), (7, 10_000));
        assert!(album.is_fuller(106) && !album.is_fuller(105));
    }
}
