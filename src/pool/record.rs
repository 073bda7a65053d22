//! One block's record, and what a shared block owes.
//!
//! # What sharing owes
//!
//! Under guaranteed admission every sequence is promised the blocks that it lacks for its whole
//! length. A block that several sequences hold counts as held by each, though it is there once, so
//! some of them may need another in its place later. What a block owes is promised too, by
//! [`Debts`]:
//!
//! - Without a window a full block is shared for good. A partial one is not: of the sequences whose
//!   last block it is (`tails`), each copies it when it appends, but for the last one, if nobody
//!   else holds it. So it owes `tails`, less one if all its holders are tails.
//! - With a window every holder drops the block in time and needs another then; the block itself
//!   comes back once. So it owes one less than the sequences that hold it (and one for each of
//!   them while it is pinned, since it does not come back then).
//!
//! With these debts, what is free or cached always covers what has been promised, whatever the
//! sequences do next.

use super::block::BlockState;
use super::lru::DEFAULT_PRIORITY;
use crate::plan::{BLOCK_RECORD_BYTES, NO_BLOCK};

/// One block's record. Half a cache line.
#[derive(Clone, Copy, Debug)]
pub(super) struct Record {
    /// Raised each time nobody holds the block any more, or tokens that it kept for others are about
    /// to be written over.
    pub(super) generation: u64,
    /// References: of rows, of pins, and those that a step holds until it commits.
    pub(super) refs: u32,
    /// Free list: the next free block. Cached list: the next younger one.
    pub(super) next: u32,
    /// Cached list: the next older one. Free list: [`DIRTY`] where tokens may still be in it.
    pub(super) prev: u32,
    /// Of the references, rows in which it is the last block and not full.
    pub(super) tails: u32,
    /// Of the references, those that a step holds of blocks that it copied.
    pub(super) holds: u32,
    /// Of the references, pins.
    pub(super) pins: u16,
    pub(super) state: BlockState,
    /// The list that it is on, or will be on, when it is cached.
    pub(super) class: u8,
}

/// Stands in [`Record::prev`] of a free block that was given back and not zeroed since.
pub(super) const DIRTY: u32 = NO_BLOCK - 1;

const _: () = assert!(size_of::<Record>() as u64 == BLOCK_RECORD_BYTES);

impl Record {
    /// Rows that hold it full, beyond the first.
    pub(super) const fn shared_rows(&self) -> u32 {
        (self.refs - self.holds - self.pins as u32 - self.tails).saturating_sub(1)
    }
}

/// What shared blocks owe their holders (see the module's documentation).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Debts {
    /// Nothing: nothing is promised.
    None,
    /// The blocks of a group without a window.
    Tails,
    /// The blocks of a group with a window.
    Window,
}

impl Debts {
    /// What one block owes.
    pub(super) const fn of(self, record: &Record) -> u32 {
        match self {
            Self::None => 0,
            Self::Tails if record.tails == 0 => 0,
            Self::Tails => record.tails - (record.refs - record.holds == record.tails) as u32,
            Self::Window => {
                let sequences = record.refs - record.holds - record.pins as u32;
                if sequences == 0 { 0 } else { sequences - (record.pins == 0) as u32 }
            }
        }
    }
}

/// The record of a free block of a new store.
pub(super) fn fresh(id: usize, total: u32, generation: u64) -> Record {
    // Ids are below `total`, a u32.
    let next = u32::try_from(id).unwrap_or(u32::MAX).saturating_add(1);
    Record {
        generation,
        refs: 0,
        next: if next < total { next } else { NO_BLOCK },
        prev: NO_BLOCK,
        tails: 0,
        holds: 0,
        pins: 0,
        state: BlockState::Free,
        class: DEFAULT_PRIORITY,
    }
}
