//! The memory and the blocks: what exists, who holds it, what is free.
//!
//! The pool owns the device's one allocation and, for every paged layer group, a [`BlockStore`].
//! It knows nothing of tokens; the meaning of a block is the cache's.

mod audit;
mod block;
mod block_store;
mod lru;
mod record;
mod stats;

pub use block::{BlockCounts, BlockHandle, BlockState};
pub use block_store::BlockStore;
pub use lru::{DEFAULT_PRIORITY, MAX_PRIORITY};
pub use record::Debts;
pub use stats::{GroupStats, Stats};

use crate::config::Admission;
use crate::device::{Device, all_of};
use crate::error::DeviceError;
use crate::plan::{BLOCK_LISTS_BYTES, GroupKind, Plan};
use crate::units::{Bytes, GroupIdx};

const _: () = assert!(size_of::<Option<BlockStore>>() as u64 == BLOCK_LISTS_BYTES);

/// The device's memory and the blocks that it is divided into.
#[derive(Debug)]
pub struct Pool {
    pub(crate) device: Box<dyn Device>,
    /// One for each layer group; `None` for contiguous ones. `[num_groups]`
    stores: Vec<Option<BlockStore>>,
}

impl Pool {
    /// All blocks of the plan, free, in the memory of a device opened with the same plan.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`], for the tables.
    pub fn new(plan: &Plan, device: Box<dyn Device>) -> Result<Self, DeviceError> {
        let stores = all_of(plan.groups.iter().enumerate().map(|(g, group)| {
            // A sequence and a pin hold a block at most once each.
            let refs = plan.seq_slots + plan.max_pins();
            let debts = match (plan.admission, group.window) {
                (Admission::MaxUtilization, _) => Debts::None,
                (_, None) => Debts::Tails,
                (_, Some(_)) => Debts::Window,
            };
            let units = group.layout.units;
            let store = || {
                BlockStore::with_debts(
                    GroupIdx(u32::try_from(g).unwrap_or(u32::MAX)),
                    units,
                    refs,
                    debts,
                )
            };
            (group.kind == GroupKind::Paged).then(store).transpose()
        }))?;
        Ok(Self { device, stores })
    }

    /// The blocks of a group; `None` for a contiguous one.
    #[must_use]
    pub fn store(&self, group: usize) -> Option<&BlockStore> {
        self.stores.get(group)?.as_ref()
    }

    /// The blocks of a group, to change.
    pub(crate) fn store_mut(&mut self, group: usize) -> Option<&mut BlockStore> {
        self.stores.get_mut(group)?.as_mut()
    }

    /// Bytes of all active blocks, of all promised ones, and of all cached ones.
    pub(crate) fn block_bytes(&self, plan: &Plan) -> (Bytes, Bytes, Bytes) {
        let mut active = 0;
        let mut promised = 0;
        let mut cached = 0;
        for (store, group) in self.stores.iter().zip(&plan.groups) {
            if let Some(store) = store {
                let counts = store.counts();
                active += u64::from(counts.active) * group.layout.unit_bytes;
                promised += u64::from(counts.promised) * group.layout.unit_bytes;
                cached += u64::from(counts.cached) * group.layout.unit_bytes;
            }
        }
        (Bytes(active), Bytes(promised), Bytes(cached))
    }
}
