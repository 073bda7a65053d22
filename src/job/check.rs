//! Samples of the attention output against naive attention in f64.
//!
//! What to check is chosen before anything runs, from the requests and the seed alone, so it is
//! the same for every variant. What to expect is computed from the [`Formula`], never from the
//! cache: a key that the cache lost, moved or mixed up shows as an error of the size of a value.
//! What a request takes from the cache instead of computing it is checked through the outputs
//! behind it, which attend to it; a sample that lies inside such a prefix is never computed, and
//! does not count as checked.

use std::ops::Range;

use super::formula::Formula;
use super::random::Rng;
use super::workload::Request;
use crate::config::{Format, Geometry, ScaleKind};
use crate::plan::KvFormat;

/// Separates the random numbers of the choice from those of other uses.
const SAMPLES: u64 = 0x5341_4D50;

/// One output that is checked.
#[derive(Clone, Debug)]
pub(super) struct Sample {
    request: u32,
    position: u32,
    layer: u32,
    head: u32,
    /// `[head_dim]`
    expected: Vec<f64>,
}

/// All outputs that are checked, in the order of request and position.
#[derive(Debug)]
pub struct Checker {
    samples: Vec<Sample>,
    /// For each request, its samples. `[requests]`
    of_request: Vec<Range<usize>>,
}

impl Checker {
    /// Chooses about `count` samples among requests of at most `longest` tokens, and computes
    /// what they must be. Layers take turns; of every four samples one lies at the last position
    /// of its sequence, one among the output tokens and two anywhere.
    #[must_use]
    pub fn new(
        formula: &Formula,
        geometry: &Geometry,
        requests: &[Request],
        longest: u32,
        seed: u64,
        count: u32,
    ) -> Self {
        // A trace of 2³² requests does not fit in memory; what lies beyond is not sampled.
        let runnable: Vec<(u32, &Request)> = (0..)
            .zip(requests)
            .filter(|(_, request)| request.total_tokens() <= u64::from(longest))
            .collect();
        let mut rng = Rng::new(seed, SAMPLES);
        let mut chosen = Vec::new();
        let candidates = u32::try_from(runnable.len()).unwrap_or(u32::MAX);
        for i in 0..if candidates == 0 { 0 } else { count } {
            let (index, request) = runnable[rng.below(candidates) as usize];
            // No longer than `longest`, so the sum fits.
            let total = request.prompt_tokens + request.output_tokens;
            let position = match i % 4 {
                0 => total - 1,
                1 => request.prompt_tokens + rng.below(request.output_tokens),
                _ => rng.below(total),
            };
            chosen.push((
                index,
                position,
                i % geometry.num_layers,
                rng.below(geometry.num_q_heads),
            ));
        }
        chosen.sort_unstable();
        chosen.dedup();
        let samples: Vec<Sample> = chosen
            .into_iter()
            .map(|(request, position, layer, head)| {
                let whose = &requests[request as usize];
                let expected = naive_attention(formula, geometry, whose, position, layer, head);
                Sample { request, position, layer, head, expected }
            })
            .collect();
        let of_request = (0..requests.len())
            .map(|index| {
                let start = samples.partition_point(|s| (s.request as usize) < index);
                start..samples.partition_point(|s| s.request as usize <= index)
            })
            .collect();
        Self { samples, of_request }
    }
}

/// What a run has checked so far. Allocates nothing after [`Verdict::new`].
#[derive(Debug)]
pub(super) struct Verdict<'a> {
    checker: &'a Checker,
    seen: Vec<bool>,
    worst: f64,
}

impl<'a> Verdict<'a> {
    pub(super) fn new(checker: &'a Checker) -> Self {
        Self { checker, seen: vec![false; checker.samples.len()], worst: 0.0 }
    }

    /// Compares what is to be compared of one request's rows in one layer. `out` are the rows
    /// from `first_position` on. `[rows, num_q_heads, head_dim]`
    pub(super) fn look(
        &mut self,
        request: u32,
        first_position: u32,
        layer: u32,
        row_len: usize,
        out: &[f32],
    ) {
        let of_request = &self.checker.of_request[request as usize];
        for at in of_request.clone() {
            let sample = &self.checker.samples[at];
            if sample.layer != layer || sample.position < first_position {
                continue;
            }
            let row = (sample.position - first_position) as usize * row_len;
            if row >= out.len() {
                continue;
            }
            let dim = sample.expected.len();
            let start = row + sample.head as usize * dim;
            for (got, expected) in out[start..start + dim].iter().zip(&sample.expected) {
                let error = (f64::from(*got) - expected).abs();
                // NaN is no number to take a maximum with, and the worst of all.
                self.worst = if error.is_nan() { f64::INFINITY } else { self.worst.max(error) };
            }
            self.seen[at] = true;
        }
    }

    /// Samples compared.
    pub(super) fn checked(&self) -> u64 {
        self.seen.iter().filter(|seen| **seen).count() as u64
    }

    /// The largest absolute error; `None` when nothing was compared.
    pub(super) fn max_abs_error(&self) -> Option<f64> {
        (self.checked() > 0).then_some(self.worst)
    }
}

/// The largest error that a format may have on the formula's numbers; `None` where it depends on
/// scales that the file gives. Outputs are of size 1; a wrong key changes them by about as much.
#[must_use]
pub fn error_limit(format: KvFormat) -> Option<f64> {
    match (format.element, format.scale) {
        (_, Some(ScaleKind::PerTensor)) => None,
        (Format::F32, _) => Some(1e-4),
        (Format::F16, _) => Some(1e-2),
        (Format::Bf16, _) => Some(8e-2),
        (Format::Int8, _) => Some(0.25),
    }
}

/// Attention of one query and head in f64 over all keys that it may see, with the softmax scale
/// 1 / √`head_dim`.
fn naive_attention(
    formula: &Formula,
    geometry: &Geometry,
    request: &Request,
    position: u32,
    layer: u32,
    head: u32,
) -> Vec<f64> {
    let dim = geometry.head_dim as usize;
    let kv_len = geometry.num_kv_heads as usize * dim;
    let kv_head = (head / geometry.q_heads_per_kv_head()) as usize;
    let kv_range = kv_head * dim..(kv_head + 1) * dim;
    let token = |position| formula.token(&request.content, position);

    let mut q = vec![0.0; geometry.num_q_heads as usize * dim];
    formula.fill_q(request.id, token(position), position, layer, &mut q);
    let q = &q[head as usize * dim..(head as usize + 1) * dim];
    let window = geometry.windows[layer as usize];
    let keys: Vec<u32> = (0..=position)
        .filter(|key| window == 0 || position - key < window || *key < geometry.sink_tokens)
        .collect();

    let mut k = vec![0.0; kv_len];
    let scale = 1.0 / f64::from(geometry.head_dim).sqrt();
    let scores: Vec<f64> = keys
        .iter()
        .map(|key| {
            formula.fill_k(token(*key), *key, layer, &mut k);
            let pairs = q.iter().zip(&k[kv_range.clone()]);
            scale * pairs.map(|(q, k)| f64::from(*q) * f64::from(*k)).sum::<f64>()
        })
        .collect();
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = scores.iter().map(|score| (score - max).exp()).sum();
    let mut out = vec![0.0; dim];
    let mut v = vec![0.0; kv_len];
    for (key, score) in keys.iter().zip(&scores) {
        formula.fill_v(token(*key), *key, layer, &mut v);
        let weight = (score - max).exp() / sum;
        for (out, v) in out.iter_mut().zip(&v[kv_range.clone()]) {
            *out += weight * f64::from(*v);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::super::workload::Content;
    use super::*;

    fn geometry() -> Geometry {
        Geometry {
            num_layers: 3,
            num_q_heads: 4,
            num_kv_heads: 2,
            head_dim: 16,
            windows: vec![1, 0, 5],
            sink_tokens: 2,
        }
    }

    fn requests() -> Vec<Request> {
        (0..10).map(|i| request(i, 5 + i, 3 + 10 * i)).collect()
    }

    fn request(arrival: u32, prompt_tokens: u32, output_tokens: u32) -> Request {
        let id = u64::from(arrival);
        let content = Content { prefix: 1, prefix_tokens: 2, own: id, ..Content::default() };
        Request { id, content, arrival, prompt_tokens, output_tokens, ..Request::default() }
    }

    #[test]
    fn samples_are_spread_and_fixed() {
        let formula = Formula::new(1, &geometry());
        let checker = Checker::new(&formula, &geometry(), &requests(), 80, 1, 60);
        assert!(checker.samples.len() > 50);
        let requests = requests();
        for sample in &checker.samples {
            let request = &requests[sample.request as usize];
            assert!(request.total_tokens() <= 80, "the longer ones cannot run");
            assert!(u64::from(sample.position) < request.total_tokens());
        }
        for layer in 0..3 {
            assert!(checker.samples.iter().any(|s| s.layer == layer));
        }
        let last =
            |s: &&Sample| u64::from(s.position) + 1 == requests[s.request as usize].total_tokens();
        assert!(checker.samples.iter().filter(last).count() >= 8);
        let total: usize = checker.of_request.iter().map(Range::len).sum();
        assert_eq!(total, checker.samples.len());
        let none = Checker::new(&formula, &geometry(), &requests[..1], 7, 1, 60);
        assert!(none.samples.is_empty(), "no request can run");
        assert_eq!(Verdict::new(&none).max_abs_error(), None);
    }

    #[test]
    fn windows_and_sinks_are_honoured() {
        let formula = Formula::new(1, &geometry());
        // A query that sees one key has that key's value; with sinks it sees two more.
        let without = Geometry { sink_tokens: 0, ..geometry() };
        let mut v = vec![0.0; 32];
        let seven = request(7, 20, 20);
        formula.fill_v(formula.token(&seven.content, 9), 9, 0, &mut v);
        let out = naive_attention(&formula, &without, &seven, 9, 0, 3);
        for (out, v) in out.iter().zip(&v[16..]) {
            assert!((out - f64::from(*v)).abs() < 1e-12, "query head 3 uses KV head 1");
        }
        assert_ne!(out, naive_attention(&formula, &geometry(), &seven, 9, 0, 3));
        // Early positions see everything either way.
        let early = naive_attention(&formula, &geometry(), &seven, 3, 2, 0);
        let full = Geometry { windows: vec![0, 0, 0], ..geometry() };
        assert_eq!(early, naive_attention(&formula, &full, &seven, 3, 2, 0));
    }

    #[test]
    fn errors_are_seen_and_nan_is_the_worst() {
        let formula = Formula::new(1, &geometry());
        let requests = requests();
        let checker = Checker::new(&formula, &geometry(), &requests[..1], 80, 1, 8);
        let expected = |at: usize| &checker.samples[at];
        let rows = 8;
        let mut verdict = Verdict::new(&checker);
        let sample = expected(0);
        let mut out = vec![0.0_f32; rows * 64];
        let start = sample.position as usize * 64 + sample.head as usize * 16;
        for (out, expected) in out[start..].iter_mut().zip(&sample.expected) {
            #[expect(clippy::cast_possible_truncation, reason = "what a cache would give")]
            let rounded = *expected as f32;
            *out = rounded;
        }
        verdict.look(0, 0, 99, 64, &out);
        assert_eq!(verdict.checked(), 0, "another layer");
        let only = &out[sample.position as usize * 64..][..64];
        verdict.look(0, sample.position, sample.layer, 64, only);
        let one = verdict.max_abs_error().expect("checked");
        assert!(one < 1e-6 || verdict.checked() > 1, "{one}");
        out.fill(f32::NAN);
        verdict.look(0, 0, sample.layer, 64, &out);
        assert_eq!(verdict.max_abs_error(), Some(f64::INFINITY));
    }
}
