//! Blocks taken from a store and given back.

use std::hint::black_box;

use super::{ManagerError, Sample, Work, expect};
use crate::pool::BlockStore;
use crate::units::{BlockId, GroupIdx};

/// Blocks that one turn takes and gives back.
const BLOCKS_PER_TURN: u32 = 16_384;

/// A store of free blocks.
pub(super) struct AllocFree {
    store: BlockStore,
    /// The blocks that are held at once.
    held: Vec<BlockId>,
    at_once: u32,
}

impl AllocFree {
    pub(super) fn new(at_once: u32, pool: u32) -> Self {
        let store = BlockStore::new(GroupIdx(0), pool.max(at_once), 1);
        Self { store, held: Vec::with_capacity(at_once as usize), at_once }
    }
}

impl Work for AllocFree {
    fn turn(&mut self) -> Result<Sample, ManagerError> {
        let Self { store, held, at_once } = self;
        let times = BLOCKS_PER_TURN / *at_once;
        let mut taken = 0;
        let sample = Sample::of(u64::from(times * *at_once), || {
            for _ in 0..times {
                held.clear();
                held.extend((0..*at_once).map_while(|_| store.take()));
                taken += black_box(&*held).len() as u64;
                for block in held.iter().rev() {
                    store.drop_ref(*block)?;
                }
            }
            Ok::<_, ManagerError>(())
        })?;
        expect("blocks taken", sample.units, taken)?;
        expect("blocks available", u64::from(store.total()), u64::from(store.available()))?;
        Ok(sample)
    }
}
