//! The cached blocks in the order in which they are evicted.
//!
//! One list for each priority class, oldest first, and a bitmap of the lists that are not empty:
//! the next to go is the oldest block of the lowest class, found in a few instructions however
//! many blocks there are. The lists run through the block records, so nothing allocates.
//!
//! Within a class a child is always older than its parent, because a sequence gives its blocks
//! back from the last to the first; and a parent's class is never below its children's. So the
//! first block of the lowest list never has a child that is still cached (leaf first).

use super::record::Record;
use crate::plan::NO_BLOCK;

/// The largest priority; 0 is evicted first.
pub const MAX_PRIORITY: u8 = 100;

/// The priority of blocks that nobody gave another.
pub const DEFAULT_PRIORITY: u8 = 35;

const CLASSES: usize = MAX_PRIORITY as usize + 1;

/// Heads and tails of the lists.
#[derive(Debug)]
pub(super) struct ClassLists {
    oldest: [u32; CLASSES],
    youngest: [u32; CLASSES],
    /// Bit c: class c is not empty.
    nonempty: u128,
}

impl ClassLists {
    pub(super) const fn new() -> Self {
        Self { oldest: [NO_BLOCK; CLASSES], youngest: [NO_BLOCK; CLASSES], nonempty: 0 }
    }

    /// The block that is evicted next.
    pub(super) fn first(&self) -> Option<u32> {
        let class = self.nonempty.trailing_zeros() as usize;
        self.oldest.get(class).copied()
    }

    /// The oldest block of each class that is not empty, lowest class first.
    pub(super) fn heads(&self) -> impl Iterator<Item = u32> + '_ {
        self.oldest.iter().copied().filter(|block| *block != NO_BLOCK)
    }

    /// Puts a block at the young end of its class.
    pub(super) fn push(&mut self, records: &mut [Record], block: u32) {
        let class = records[block as usize].class;
        let older = self.youngest[usize::from(class)];
        records[block as usize].prev = older;
        records[block as usize].next = NO_BLOCK;
        self.link(records, block);
    }

    /// Puts a block at the old end of its class.
    pub(super) fn push_oldest(&mut self, records: &mut [Record], block: u32) {
        let class = records[block as usize].class;
        let younger = self.oldest[usize::from(class)];
        records[block as usize].prev = NO_BLOCK;
        records[block as usize].next = younger;
        self.link(records, block);
    }

    /// The youngest block of each class that is not empty, highest class first.
    pub(super) fn tails(&self) -> impl Iterator<Item = u32> + '_ {
        self.youngest.iter().rev().copied().filter(|block| *block != NO_BLOCK)
    }

    /// Takes a block out. Its own links stay as they are, so that [`ClassLists::link`] can put it
    /// back where it was, as long as every later change of the lists is undone first.
    #[inline]
    pub(super) fn unlink(&mut self, records: &mut [Record], block: u32) {
        let Record { next, prev, class, .. } = records[block as usize];
        let class = usize::from(class);
        match records.get_mut(prev as usize) {
            Some(older) => older.next = next,
            None => self.oldest[class] = next,
        }
        match records.get_mut(next as usize) {
            Some(younger) => younger.prev = prev,
            None => self.youngest[class] = prev,
        }
        if self.oldest[class] == NO_BLOCK {
            self.nonempty &= !(1 << class);
        }
    }

    /// Puts a block between the neighbours that its record names.
    pub(super) fn link(&mut self, records: &mut [Record], block: u32) {
        let Record { next, prev, class, .. } = records[block as usize];
        let class = usize::from(class);
        match records.get_mut(prev as usize) {
            Some(older) => older.next = block,
            None => self.oldest[class] = block,
        }
        match records.get_mut(next as usize) {
            Some(younger) => younger.prev = block,
            None => self.youngest[class] = block,
        }
        self.nonempty |= 1 << class;
    }
}
