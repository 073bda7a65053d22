//! Preemption: the youngest gives way.

use super::{Cache, SeqHandle};
use crate::config::Admission;

/// A sequence that was preempted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Preempted {
    /// Its handle, stale now.
    pub sequence: SeqHandle,
    /// The engine's name for it.
    pub key: Option<u64>,
    /// Whether it was a reservation: [`Cache::begin_reserved`] says that it was cancelled.
    pub reserved: bool,
    /// Tokens that it had. Those of its full blocks are cached until they are evicted, so
    /// beginning it again may find them.
    pub len: u32,
}

impl Cache {
    /// Under max-utilization, when a step finds too few blocks: cancels the youngest reservation,
    /// or, where there is none, releases the youngest sequence, to be begun again with all its
    /// tokens. Never the only one that runs, so the oldest always ends.
    ///
    /// From then on until a sequence is released, `begin` leaves a block free for each sequence
    /// that runs: what comes back is not the next to go, so that preemption cannot ping-pong.
    ///
    /// `None` when there is nobody to preempt, or when admission promised the blocks.
    pub fn preempt_youngest(&mut self) -> Option<Preempted> {
        self.abandon_step();
        if self.plan.admission != Admission::MaxUtilization {
            return None;
        }
        let alive = || (0..self.plan.seq_slots).filter(|slot| self.seqs.record(*slot).alive);
        if alive().count() < 2 || alive().all(|slot| self.seqs.record(slot).reserved) {
            return None;
        }
        let slot = alive().max_by_key(|slot| {
            let record = self.seqs.record(*slot);
            (record.reserved, record.begun)
        })?;
        let record = *self.seqs.record(slot);
        let sequence = self.seqs.handle(slot);
        self.release_slot(slot);
        self.preempted = true;
        self.counters.preemptions += 1;
        let (key, reserved) = (record.key, record.reserved);
        Some(Preempted { sequence, key, reserved, len: record.len })
    }
}
