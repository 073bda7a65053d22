//! The stand-in for a model: computes K, V and Q of a step, and takes the outputs in.
//!
//! **The checksum** covers the outputs that a model would sample a token from: those at the last
//! token of each prompt and at every token behind it. It is the wrapping sum, over these rows, of
//! a hash of request, position, layer and the bits of the row. So it does not depend on the
//! schedule, and it changes when a single bit of a single output does. Every request has the same
//! such rows whatever is reused, and each is computed, since the last token of a prompt is never
//! taken from the cache: the checksum must be the same with prefix reuse and without.
//!
//! **Rows inside a prompt** are left out of it. Which of them are computed at all depends on what
//! is in the cache, and nobody reads them: what they are for are the keys and values, and those
//! count in every row behind. They are still checked: against f64 where a sample lies there (see
//! [`super::check`]), and against themselves where they are computed twice.
//!
//! **A row that is computed again** after a preemption is not counted again. It must come to the
//! same bits, wherever in the sequence it lies, though it is computed in other company, in other
//! chunks and over blocks that may be another sequence's.

use std::time::{Duration, Instant};

use super::check::{Checker, Verdict};
use super::formula::Formula;
use super::random::mix;
use super::tokens::Tokens;
use super::work::{Run, Work};
use super::workload::Request;
use crate::cache::{AttendOptions, Step};
use crate::config::{Admission, Geometry};
use crate::error::CacheError;
use crate::plan::Plan;
use crate::units::LayerIdx;

/// Lanes of the row hash: enough for the compiler to use the widest registers.
const LANES: usize = 16;

/// One token of a step.
#[derive(Clone, Copy, Debug)]
struct Row {
    request: u64,
    token: u32,
    position: u32,
}

/// What the rows of requests came to, for those that may be computed again: every request that
/// runs, and every one that was preempted and waits. There are never more of these than sequence
/// slots, since no request is admitted for the first time while a preempted one waits.
#[derive(Debug, Default)]
struct Memory {
    /// The hash of each row over all layers; 0 for a row that has not been computed.
    /// `[requests at once, longest request]`
    rows: Vec<u64>,
    longest: usize,
    free: Vec<u32>,
}

impl Memory {
    /// Enough for the requests of a job under this plan; nothing where none is ever preempted.
    fn new(plan: &Plan, requests: &[Request]) -> Self {
        if plan.admission != Admission::MaxUtilization {
            return Self::default();
        }
        let most = u64::from(plan.limits.max_seq_len);
        let runnable = requests.iter().map(Request::total_tokens).filter(|total| *total <= most);
        let longest = usize::try_from(runnable.max().unwrap_or(0)).unwrap_or(usize::MAX);
        let count = requests.len().min(plan.seq_slots as usize);
        let free = (0..plan.seq_slots).take(count).rev().collect();
        Self { rows: vec![0; count * longest], longest, free }
    }

    fn of(&mut self, place: u32) -> &mut [u64] {
        &mut self.rows[place as usize * self.longest..][..self.longest]
    }
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
    /// The hash of each row of the step, over the layers so far. `[max_batch_tokens]`
    hashes: Vec<u64>,
    memory: Memory,
    checksum: u64,
    counted: u64,
    mismatches: u64,
}

/// The tensors of one layer of a step.
struct Tensors<'a> {
    k: &'a [f32],
    v: &'a [f32],
    q: &'a [f32],
    out: &'a mut [f32],
}

impl<'a> Engine<'a> {
    pub(super) fn new(
        plan: &Plan,
        formula: &'a Formula,
        checker: &'a Checker,
        requests: &[Request],
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
            hashes: Vec::with_capacity(tokens),
            memory: Memory::new(plan, requests),
            checksum: 0,
            counted: 0,
            mismatches: 0,
        }
    }

    /// The checksum of the rows so far that a model would sample from.
    pub(super) fn checksum(&self) -> u64 {
        self.checksum
    }

    /// How many rows are in the checksum.
    pub(super) fn counted(&self) -> u64 {
        self.counted
    }

    /// Rows that came out differently when they were computed again.
    pub(super) fn mismatches(&self) -> u64 {
        self.mismatches
    }

    /// What was checked.
    pub(super) fn verdict(&self) -> &Verdict<'a> {
        &self.verdict
    }

    /// Computes K, V and Q of the step in a layer. The outputs are poisoned, so that one that the
    /// cache does not write shows.
    fn fill(&mut self, layer: u32) -> Tensors<'_> {
        let (kv, q) = (self.rows.len() * self.kv_len, self.rows.len() * self.q_len);
        let rows = self
            .rows
            .iter()
            .zip(self.k.chunks_exact_mut(self.kv_len))
            .zip(self.v.chunks_exact_mut(self.kv_len))
            .zip(self.q.chunks_exact_mut(self.q_len));
        for (((row, k), v), q) in rows {
            let Row { request, token, position } = *row;
            self.formula.fill_k(token, position, layer, k);
            self.formula.fill_v(token, position, layer, v);
            self.formula.fill_q(request, token, position, layer, q);
        }
        let out = &mut self.out[..q];
        out.fill(f32::NAN);
        Tensors { k: &self.k[..kv], v: &self.v[..kv], q: &self.q[..q], out }
    }

    /// Takes in the outputs of the step in a layer.
    fn fold(&mut self, layer: u32) {
        let mut start = 0;
        for run in &self.runs {
            let end = start + run.rows as usize;
            let out = &self.out[start * self.q_len..end * self.q_len];
            self.verdict.look(run.request, run.first_position, layer, self.q_len, out);
            let rows = out.chunks_exact(self.q_len).zip(&mut self.hashes[start..end]);
            for (position, (row, hash)) in (run.first_position..).zip(rows) {
                *hash = hash.wrapping_add(hash_row(run.id, position, layer, row));
            }
            start = end;
        }
    }
}

impl Work for Engine<'_> {
    fn tokens(&self) -> &Tokens {
        self.formula.tokens()
    }

    fn clear(&mut self) {
        self.rows.clear();
        self.runs.clear();
        self.hashes.clear();
    }

    fn push(&mut self, run: Run, positions: &[u32], tokens: &[u32]) {
        let rows = positions.iter().zip(tokens);
        self.rows.extend(rows.map(|(&position, &token)| Row { request: run.id, token, position }));
        self.hashes.extend(positions.iter().map(|_| 0));
        self.runs.push(run);
    }

    fn remember(&mut self) -> Option<u32> {
        let place = self.memory.free.pop()?;
        self.memory.of(place).fill(0);
        Some(place)
    }

    fn forget(&mut self, place: u32) {
        self.memory.free.push(place);
    }

    fn compute(&mut self, step: &mut Step<'_>, in_cache: &mut Duration) -> Result<(), CacheError> {
        let num_layers = step.plan().geometry.num_layers;
        for layer in 0..num_layers {
            let Tensors { k, v, q, out } = self.fill(layer);
            let began = Instant::now();
            step.append(LayerIdx(layer), k.into(), v.into())?;
            step.attend(LayerIdx(layer), q.into(), out.into(), AttendOptions::default())?;
            *in_cache += began.elapsed();
            self.fold(layer);
        }
        Ok(())
    }

    /// Ends a step that was committed: new rows are counted, and rows that were computed again
    /// must be as before.
    fn committed(&mut self) {
        let mut start = 0;
        for run in &self.runs {
            let hashes = &self.hashes[start..start + run.rows as usize];
            start += hashes.len();
            let first = run.first_position as usize;
            let remembered = run.memory.map(|place| &mut self.memory.of(place)[first..]);
            let mut remembered = remembered.unwrap_or_default().iter_mut();
            for (position, &hash) in (run.first_position..).zip(hashes) {
                if let Some(before) = remembered.next() {
                    if *before != 0 {
                        self.mismatches += u64::from(*before != hash);
                        continue;
                    }
                    *before = hash;
                }
                if position >= run.counts_from {
                    self.checksum = self.checksum.wrapping_add(hash);
                    self.counted += 1;
                }
            }
        }
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
    use std::ops::Range;
    use std::path::Path;

    use super::super::workload::Content;
    use super::*;
    use crate::config::parse;

    /// A plan of one layer with few tokens, and three requests of 4 + 4 tokens.
    fn rig(admission: &str) -> (Plan, Vec<Request>) {
        let text = format!(
            "model = {{ num_layers = 1, num_q_heads = 1, num_kv_heads = 1, head_dim = 16 }}
             limits = {{ max_seqs = 2, max_seq_len = 9, max_batch_tokens = 16 }}
             cache = {{ mode = 'paged', admission = '{admission}' }}"
        );
        let source = parse(&text, Path::new("t.toml"), &[]).expect("fine");
        let plan = Plan::new(&source.config, &source.geometry).expect("fits");
        let request = |id: u32| Request {
            id: id.into(),
            content: Content { own: id.into(), ..Content::default() },
            arrival: id,
            prompt_tokens: 4,
            output_tokens: 4,
            ..Request::default()
        };
        (plan, (0..3).map(request).collect())
    }

    /// Runs rows of request 1 whose outputs are `value`.
    fn run_rows(engine: &mut Engine<'_>, memory: Option<u32>, rows: Range<u32>, value: f32) {
        engine.clear();
        let positions: Vec<u32> = rows.collect();
        let run = Run {
            request: 1,
            id: 1,
            rows: u32::try_from(positions.len()).expect("few"),
            first_position: positions[0],
            counts_from: 3,
            memory,
        };
        engine.push(run, &positions, &positions);
        engine.fill(0).out.fill(value);
        engine.fold(0);
        engine.committed();
    }

    #[test]
    fn rows_that_a_model_would_sample_from_count_once() {
        let (plan, requests) = rig("max-utilization");
        let formula = Formula::new(1, &plan.geometry);
        let checker = Checker::new(&formula, &plan.geometry, &requests, 9, 1, 0);
        let engine = || Engine::new(&plan, &formula, &checker, &requests);

        let mut whole = engine();
        run_rows(&mut whole, None, 0..8, 1.0);
        assert_eq!((whole.counted(), whole.mismatches()), (5, 0));
        // In other chunks, with the start of the prompt never computed, and again from anywhere.
        let mut pieces = engine();
        let memory = pieces.remember();
        assert!(memory.is_some());
        for rows in [2..3, 3..6, 1..5, 5..8, 0..8] {
            run_rows(&mut pieces, memory, rows, 1.0);
        }
        assert_eq!((pieces.counted(), pieces.checksum()), (5, whole.checksum()));
        assert_eq!(pieces.mismatches(), 0);
        // A row inside the prompt does not count, and yet must be the same the second time.
        run_rows(&mut pieces, memory, 1..2, 1.5);
        assert_eq!((pieces.mismatches(), pieces.checksum()), (1, whole.checksum()));
        run_rows(&mut pieces, memory, 3..8, 1.5);
        assert_eq!((pieces.mismatches(), pieces.checksum()), (6, whole.checksum()));
        let mut other = engine();
        run_rows(&mut other, None, 3..8, 1.5);
        assert_ne!(other.checksum(), whole.checksum());
    }

    #[test]
    fn places_to_remember_are_as_many_as_requests_at_once() {
        let (plan, requests) = rig("max-utilization");
        let formula = Formula::new(1, &plan.geometry);
        let checker = Checker::new(&formula, &plan.geometry, &requests, 9, 1, 0);
        let mut engine = Engine::new(&plan, &formula, &checker, &requests);
        assert_eq!(engine.memory.longest, 8);
        let places = [engine.remember(), engine.remember(), engine.remember()];
        assert_eq!(places, [Some(0), Some(1), None]);
        run_rows(&mut engine, Some(1), 0..8, 1.0);
        engine.forget(1);
        assert_eq!(engine.remember(), Some(1));
        run_rows(&mut engine, Some(1), 0..8, 2.0);
        assert_eq!(engine.mismatches(), 0, "another request");
        let (guaranteed, _) = rig("guaranteed");
        let mut engine = Engine::new(&guaranteed, &formula, &checker, &requests);
        assert_eq!(engine.remember(), None, "nothing is computed again");
    }

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
