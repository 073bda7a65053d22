//! The stand-in for a model: computes K, V and Q of a step, and takes the outputs in.
//!
//! Outputs go into an order-independent checksum: the wrapping sum, over all rows, of a hash of
//! request, position, layer and the bits of the row. So it does not depend on the schedule, and
//! it changes when a single bit of a single output does. A row that is computed again after a
//! preemption is not counted again; it is summed up separately and must come to the same.

use super::check::{Checker, Verdict};
use super::formula::Formula;
use super::random::mix;
use crate::config::Geometry;
use crate::plan::Plan;

/// Lanes of the row hash: enough for the compiler to use the widest registers.
const LANES: usize = 16;

/// One token of a step.
#[derive(Clone, Copy, Debug)]
struct Row {
    request: u64,
    token: u32,
    position: u32,
}

/// Consecutive tokens of one request in a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    /// The request's index in the job.
    pub(super) request: u32,
    /// The request's id.
    pub(super) id: u64,
    /// Rows of the step that belong to it.
    pub(super) rows: u32,
    /// The position of its first row.
    pub(super) first_position: u32,
    /// Tokens of the request that were folded in before: rows below are computed again.
    pub(super) folded: u32,
}

/// The sums of one request's row hashes.
#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    /// Every row once.
    first: u64,
    /// The rows that were computed again since the last preemption.
    again: u64,
    /// What `again` must come to, and at which length; 0 when nothing is computed again.
    expected: u64,
    until: u32,
}

/// Buffers and sums. Allocates nothing after [`Engine::new`].
#[derive(Debug)]
pub(super) struct Engine<'a> {
    formula: &'a Formula,
    verdict: Verdict<'a>,
    rows: Vec<Row>,
    runs: Vec<Run>,
    kv_len: usize,
    q_len: usize,
    /// `[max_batch_tokens, num_kv_heads, head_dim]`
    k: Vec<f32>,
    /// `[max_batch_tokens, num_kv_heads, head_dim]`
    v: Vec<f32>,
    /// `[max_batch_tokens, num_q_heads, head_dim]`
    q: Vec<f32>,
    /// `[max_batch_tokens, num_q_heads, head_dim]`
    out: Vec<f32>,
    /// `[requests]`
    sums: Vec<Sums>,
    mismatches: u64,
}

/// The tensors of one layer of a step.
pub(super) struct Tensors<'a> {
    pub(super) k: &'a [f32],
    pub(super) v: &'a [f32],
    pub(super) q: &'a [f32],
    pub(super) out: &'a mut [f32],
}

impl<'a> Engine<'a> {
    pub(super) fn new(
        plan: &Plan,
        formula: &'a Formula,
        checker: &'a Checker,
        requests: usize,
    ) -> Self {
        let Geometry { num_q_heads, num_kv_heads, head_dim, .. } = plan.geometry;
        let tokens = plan.limits.max_batch_tokens as usize;
        let kv_len = num_kv_heads as usize * head_dim as usize;
        let q_len = num_q_heads as usize * head_dim as usize;
        Self {
            formula,
            verdict: Verdict::new(checker),
            rows: Vec::with_capacity(tokens),
            runs: Vec::with_capacity(tokens.min(plan.seq_slots as usize)),
            kv_len,
            q_len,
            k: vec![0.0; tokens * kv_len],
            v: vec![0.0; tokens * kv_len],
            q: vec![0.0; tokens * q_len],
            out: vec![0.0; tokens * q_len],
            sums: vec![Sums::default(); requests],
            mismatches: 0,
        }
    }

    /// The formula.
    pub(super) fn formula(&self) -> &'a Formula {
        self.formula
    }

    /// Begins a step with no rows.
    pub(super) fn clear(&mut self) {
        self.rows.clear();
        self.runs.clear();
    }

    /// Adds the next rows of the step. `positions` are those that the cache hands out.
    pub(super) fn push(&mut self, run: Run, positions: &[u32]) {
        let formula = self.formula;
        self.rows.extend(positions.iter().map(|&position| Row {
            request: run.id,
            token: formula.token(run.id, position),
            position,
        }));
        self.runs.push(run);
    }

    /// Computes K, V and Q of the step in a layer. The outputs are poisoned, so that one that the
    /// cache does not write shows.
    pub(super) fn fill(&mut self, layer: u32) -> Tensors<'_> {
        let (kv, q) = (self.rows.len() * self.kv_len, self.rows.len() * self.q_len);
        let rows = self
            .rows
            .iter()
            .zip(self.k.chunks_exact_mut(self.kv_len))
            .zip(self.v.chunks_exact_mut(self.kv_len))
            .zip(self.q.chunks_exact_mut(self.q_len));
        for (((row, k), v), q) in rows {
            let Row { request, token, position } = *row;
            self.formula.fill_k(request, token, position, layer, k);
            self.formula.fill_v(request, token, position, layer, v);
            self.formula.fill_q(request, token, position, layer, q);
        }
        let out = &mut self.out[..q];
        out.fill(f32::NAN);
        Tensors { k: &self.k[..kv], v: &self.v[..kv], q: &self.q[..q], out }
    }

    /// Takes in the outputs of the step in a layer.
    pub(super) fn fold(&mut self, layer: u32) {
        let mut start = 0;
        for run in &self.runs {
            let len = run.rows as usize * self.q_len;
            let out = &self.out[start..start + len];
            start += len;
            self.verdict.look(run.request, run.first_position, layer, self.q_len, out);
            let sums = &mut self.sums[run.request as usize];
            for (position, row) in (run.first_position..).zip(out.chunks_exact(self.q_len)) {
                let hash = hash_row(run.id, position, layer, row);
                let sum = if position < run.folded { &mut sums.again } else { &mut sums.first };
                *sum = sum.wrapping_add(hash);
            }
        }
    }

    /// Ends a step that was committed: rows that were computed again must be as before.
    pub(super) fn committed(&mut self) {
        for run in &self.runs {
            let sums = &mut self.sums[run.request as usize];
            if sums.until > 0 && run.first_position + run.rows >= sums.until {
                self.mismatches += u64::from(sums.again != sums.expected);
                sums.until = 0;
            }
        }
    }

    /// Notes that a request lost its tokens and will compute them again: its first `folded` ones
    /// have been folded in already.
    pub(super) fn preempted(&mut self, request: u32, folded: u32) {
        let sums = &mut self.sums[request as usize];
        sums.again = 0;
        sums.expected = sums.first;
        sums.until = folded;
    }

    /// The checksum of all outputs so far.
    pub(super) fn checksum(&self) -> u64 {
        self.sums.iter().fold(0, |sum, sums| sum.wrapping_add(sums.first))
    }

    /// Requests whose rows came out differently the second time.
    pub(super) fn mismatches(&self) -> u64 {
        self.mismatches
    }

    /// What was checked.
    pub(super) fn verdict(&self) -> &Verdict<'a> {
        &self.verdict
    }
}

/// A 64-bit hash of a row's place and bits. Every step is a bijection of its lane, so that two
/// rows that differ in one element never have the same lanes.
fn hash_row(request: u64, position: u32, layer: u32, row: &[f32]) -> u64 {
    let mut lanes = [0x9E37_79B9_u32; LANES];
    let mut chunks = row.chunks_exact(LANES);
    for chunk in &mut chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane = (lane.rotate_left(15) ^ x.to_bits()).wrapping_mul(0x85EB_CA6B);
        }
    }
    for (lane, x) in lanes.iter_mut().zip(chunks.remainder()) {
        *lane = (lane.rotate_left(15) ^ x.to_bits()).wrapping_mul(0x85EB_CA6B);
    }
    let place = mix(&[request, u64::from(position) << 32 | u64::from(layer)]);
    lanes
        .chunks_exact(2)
        .fold(place, |state, pair| mix(&[state, u64::from(pair[0]) << 32 | u64::from(pair[1])]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_sees_every_bit_and_the_place() {
        let row: Vec<f32> = (0..40_u8).map(f32::from).collect();
        let hash = hash_row(1, 2, 3, &row);
        assert_eq!(hash, hash_row(1, 2, 3, &row));
        assert_ne!(hash, hash_row(2, 2, 3, &row));
        assert_ne!(hash, hash_row(1, 3, 3, &row));
        assert_ne!(hash, hash_row(1, 2, 4, &row));
        assert_ne!(hash, hash_row(1, 3, 2, &row));
        for at in 0..row.len() {
            for bit in [0, 12, 31] {
                let mut other = row.clone();
                other[at] = f32::from_bits(other[at].to_bits() ^ 1 << bit);
                assert_ne!(hash, hash_row(1, 2, 3, &other), "element {at}, bit {bit}");
            }
        }
        let mut swapped = row;
        swapped.swap(0, 16);
        assert_ne!(hash, hash_row(1, 2, 3, &swapped), "the order within a lane counts");
    }
}
