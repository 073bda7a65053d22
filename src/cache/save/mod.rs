//! Save and restore: a sequence, or everything that is cached for reuse, in a file.
//!
//! The file knows tokens, layers and heads, no groups, modes or pools: any plan of the same
//! geometry and format can take it, whatever its mode and block size (`docs/save-format.md`).
//!
//! - `format.rs`: the bytes. `file.rs`: the file, whole or not there. `fault.rs`: for tests.
//! - `write.rs`, `prefixes.rs`: what is written, and in which order.
//! - `read.rs`: what is read, and that all of it is right before anything changes.
//! - `restore.rs`, `slots.rs`, `chain.rs`: prefixes into the index, and into slots of contiguous
//!   groups.
//! - `sequence.rs`: one sequence.
//!
//! **Memory.** These verbs are the exception to "nothing is allocated after open": they allocate
//! buffers of at most [`Plan::save_bytes`], whatever the size of the file, before anything changes,
//! and give them back. They are called when a service starts or ends; kept from open on, the
//! buffers would be idle memory all the time between.

mod chain;
mod fault;
mod file;
mod format;
mod prefixes;
mod read;
mod restore;
mod sequence;
mod slots;
mod write;

#[doc(hidden)]
pub use fault::{FileCalls, Point, disturb_files, fail_saves};

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use format::Holds;
use prefixes::Policy;
use read::{Loader, Room, Table};
use write::Saver;

use super::Cache;
use super::prefix::KeyPart;
use crate::error::{CacheError, SaveError};
use crate::units::Bytes;

/// How a save is made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SaveOptions {
    /// What computes K and V: a name or digest of the weights. A restore must give the same, so
    /// that K and V of other weights are never taken for these. Absent is an id of its own.
    pub model: Option<KeyPart>,
    /// Leaves out what has a salt, from its salt on: the file then holds nothing that was private.
    /// A sequence is saved whole or, where it has a salt or the cache does not know, not at all.
    pub unsalted_only: bool,
}

/// How a save is restored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RestoreOptions {
    /// [`SaveOptions::model`] of the save.
    pub model: Option<KeyPart>,
    /// For a sequence: as [`BeginOptions::key`](super::BeginOptions::key).
    pub key: Option<u64>,
    /// For a sequence: tokens that it may come to, look-ahead aside. Default: its old limit.
    pub max_len: Option<u32>,
}

/// What was saved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Saved {
    /// Bytes of the file.
    pub bytes: Bytes,
    /// Blocks in it, of the plan's `tokens_per_block`, the last of a chain maybe less.
    pub blocks: u64,
    /// Their tokens.
    pub tokens: u64,
}

/// What became of the prefixes of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Restored {
    /// Tokens of the file's blocks.
    pub file_tokens: u64,
    /// Of these, tokens that are not cached now: no block or slot was free for them, they do not
    /// fill a block, this plan needs more of them than the file has, or too many chains before them
    /// could not be used.
    pub dropped_tokens: u64,
    /// Blocks of this plan that were restored,
    pub blocks: u64,
    /// and that were cached before.
    pub blocks_present: u64,
    /// Slots of contiguous layers that were filled.
    pub slots: u64,
}

/// What was saved since the cache was opened: a save changes nothing else of it.
#[derive(Debug, Default)]
pub(super) struct SaveCounts {
    files: AtomicU64,
    tokens: AtomicU64,
}

impl SaveCounts {
    fn counted(&self, saved: Saved) -> Saved {
        self.files.fetch_add(1, Ordering::Relaxed);
        self.tokens.fetch_add(saved.tokens, Ordering::Relaxed);
        saved
    }

    pub(super) fn files(&self) -> u64 {
        self.files.load(Ordering::Relaxed)
    }

    pub(super) fn tokens(&self) -> u64 {
        self.tokens.load(Ordering::Relaxed)
    }
}

impl Cache {
    /// Writes everything that is cached for reuse to a file: the blocks of the index and what
    /// belongs to them in windowed layers, and the tokens that slots of contiguous layers keep;
    /// also what sequences hold that are alive, as far as it is shareable. With tokens, salts,
    /// adapters, models, priorities, and the order of eviction. Only the present epoch. Changes
    /// nothing. The file of that name is replaced when the new one is whole and on the disk.
    ///
    /// The file can be read by whoever may read it: prompts and salts are in it as they are.
    /// ([`SaveOptions::unsalted_only`].) It gets no rights but the owner's.
    ///
    /// Kernels of an engine's own in other streams must have ended. Allocates buffers of
    /// [`Plan::save_bytes`](crate::plan::Plan::save_bytes) at most, and gives them back.
    ///
    /// # Errors
    /// [`SaveError::Cache`]: the plan shares nothing, or the device failed; [`SaveError::Io`],
    /// [`SaveError::UnderWay`], [`SaveError::OutOfMemory`]. The old file is as it was, unless the
    /// error says that the new one is in its place.
    pub fn save_prefixes(&self, path: &Path, options: &SaveOptions) -> Result<Saved, SaveError> {
        if self.reuse.is_none() {
            return Err(CacheError::ReuseOff.into());
        }
        let mut saver = Saver::create(self, path, options, Holds::Prefixes, 0)?;
        self.write_prefixes(&mut saver, Policy { unsalted_only: options.unsalted_only })?;
        Ok(self.saves.counted(saver.finish()?))
    }

    /// Takes the prefixes of a file: they are cached, and found as if they had been computed here.
    /// Nothing is evicted for them, and they are evicted before everything that is cached already,
    /// in their old order; what has no free block, or slot, is dropped, the least recently used
    /// first. What is cached already stays as it is, so that a second restore changes nothing.
    ///
    /// Blocks of another size are made of the file's tokens: those that fill none are dropped.
    /// Where a salt began within a block of this plan, all of the block is salted.
    ///
    /// The whole file is checked before anything changes. Buffers as [`Cache::save_prefixes`]. A
    /// [`Prober`](super::Prober) may see a part of it meanwhile.
    ///
    /// # Errors
    /// What is wrong with the file, or what this plan has otherwise ([`SaveError`]); the plan
    /// shares nothing; the device failed. Nothing changes then.
    pub fn restore_prefixes(
        &mut self,
        path: &Path,
        options: &RestoreOptions,
    ) -> Result<Restored, SaveError> {
        self.abandon_step();
        let epoch = Some(self.reuse.as_ref().ok_or(CacheError::ReuseOff)?.epoch);
        let (mut loader, header, first) =
            Loader::open(&self.plan, path, Holds::Prefixes, options, epoch)?;
        let entries = restore::room_for_entries(self, &header);
        let names = self.plan.max_namespaces().max(2 * self.plan.seq_slots) as usize;
        let mut table = loader.verify(header, first, Room { entries, names })?;
        let mut stage = self.stage(&table)?;
        let mut slots = self.slot_stage(&table)?;
        let staged = self.stage_all(&mut loader, &mut table, &mut stage, &mut slots);
        // Blocks that could not be zeroed were written whole, or are given back.
        self.scrub_refused = None;
        if let Err(error) = staged {
            self.unstage(&mut stage);
            self.unstage_slots(&slots);
            self.scrub_freed();
            return Err(error);
        }
        self.commit_stage(&mut stage);
        self.commit_slots(&slots);
        self.counters.restored_blocks += stage.blocks;
        self.counters.restored_slots += slots.len();
        self.scrub_freed();
        let covered: u64 = table.entries.iter().map(|entry| u64::from(entry.covered)).sum();
        Ok(Restored {
            file_tokens: table.tokens,
            dropped_tokens: table.tokens - covered,
            blocks: stage.blocks,
            blocks_present: stage.present,
            slots: slots.len(),
        })
    }

    fn stage_all(
        &mut self,
        loader: &mut Loader,
        table: &mut Table,
        stage: &mut restore::Stage,
        slots: &mut slots::SlotStage,
    ) -> Result<(), SaveError> {
        if self.index().is_some() {
            self.stage_blocks(loader, table, stage)?;
        }
        if self.restores_slots() {
            self.stage_slots(loader, table, slots)?;
        }
        Ok(self.pool.device.submit()?)
    }
}

/// The error for a buffer of so many bytes that could not be allocated.
const fn out_of_memory(bytes: u64) -> SaveError {
    SaveError::OutOfMemory { bytes: Bytes(bytes) }
}

/// An empty buffer with room for so many bytes.
fn buffer(bytes: usize) -> Result<Vec<u8>, SaveError> {
    let mut buffer = Vec::new();
    buffer.try_reserve_exact(bytes).map_err(|_| out_of_memory(bytes as u64))?;
    Ok(buffer)
}

/// A buffer of so many equal values.
fn buffer_of<T: Copy>(len: usize, value: T) -> Result<Vec<T>, SaveError> {
    let mut buffer = Vec::new();
    let bytes = (len * size_of::<T>()) as u64;
    buffer.try_reserve_exact(len).map_err(|_| out_of_memory(bytes))?;
    buffer.resize(len, value);
    Ok(buffer)
}
