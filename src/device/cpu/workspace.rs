//! The device's working memory, allocated once, as `plan/workspace.rs` sizes it.

use super::super::table_of;
use super::memory::out_of_memory;
use crate::error::DeviceError;
use crate::plan::{CpuWorkspace, LANES};
use crate::units::{Bytes, Overflow};

/// Sixteen numbers on a cache line of their own.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
struct CacheLine([f32; LANES as usize]);

/// Scratch, partial results, and the reference's accumulators.
#[derive(Debug)]
pub(super) struct Workspace {
    sizes: CpuWorkspace,
    /// `[threads, scratch_len]`, then `[rows, max_splits, num_kv_heads, partial_len]`
    lines: Vec<CacheLine>,
    /// `[threads, head_dim]`
    doubles: Vec<f64>,
    scratch_len: usize,
    partial_len: usize,
}

impl Workspace {
    /// Allocates it.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub(super) fn open(sizes: CpuWorkspace) -> Result<Self, DeviceError> {
        // The tables for the rotation of K are `RopeTables`'.
        let bytes = sizes.bytes().unwrap_or(Bytes(u64::MAX));
        let error = || out_of_memory(bytes, 0);
        let len = |numbers: Result<u64, Overflow>| {
            numbers.ok().and_then(|n| usize::try_from(n).ok()).ok_or_else(error)
        };
        let scratch_len = len(sizes.scratch_len())?;
        let partial_len = len(sizes.partial_len(sizes.q_heads_per_kv_head.into()))?;
        let threads = sizes.threads as usize;
        let splits =
            len(Bytes(sizes.split_pairs()).try_mul(u64::from(sizes.max_splits)).map(Bytes::get))?;
        let numbers = partial_len
            .checked_mul(splits)
            .and_then(|partials| partials.checked_add(scratch_len.checked_mul(threads)?))
            .ok_or_else(error)?;
        let lines = table_of(numbers / LANES as usize, CacheLine([0.0; LANES as usize]))?;
        let doubles = table_of(threads * sizes.head_dim as usize, 0.0)?;
        Ok(Self { sizes, lines, doubles, scratch_len, partial_len })
    }

    /// What it was sized by.
    pub(super) fn sizes(&self) -> &CpuWorkspace {
        &self.sizes
    }

    /// Numbers of one thread's scratch, and of one partial result.
    pub(super) fn lens(&self) -> (usize, usize) {
        (self.scratch_len, self.partial_len)
    }

    /// Bytes allocated.
    pub(super) fn bytes(&self) -> Bytes {
        let lines = self.lines.capacity() * size_of::<CacheLine>();
        Bytes((lines + self.doubles.capacity() * size_of::<f64>()) as u64)
    }

    /// All threads' scratch `[threads, scratch_len]`, and the places of partial results
    /// `[rows, max_splits, num_kv_heads, partial_len]`.
    pub(super) fn scratch_and_partials(&mut self) -> (&mut [f32], &mut [f32]) {
        let numbers = self.lines.len() * LANES as usize;
        let first = self.lines.as_mut_ptr().cast::<f32>();
        // SAFETY: a `CacheLine` is 64 bytes that are sixteen f32 and nothing else, so the lines
        // are `numbers` f32 in a row; the borrow of `self` is handed on.
        let all = unsafe { std::slice::from_raw_parts_mut(first, numbers) };
        all.split_at_mut(self.scratch_len * self.sizes.threads as usize)
    }

    /// The reference's accumulators. `[threads, head_dim]`
    pub(super) fn doubles(&mut self) -> &mut [f64] {
        &mut self.doubles
    }
}
