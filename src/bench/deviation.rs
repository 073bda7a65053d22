//! How far a result is off attention over the numbers as they were before storage: what a format
//! and its kernel cost together. The peers' runners in `benches/peers` say the same of theirs.

use super::attention::{Operation, Shape};
use super::inputs::Inputs;

/// The right result of two new tokens: the first one's and the last one's.
pub(super) struct Right {
    /// Index of each token among all new ones, and its result. `[2]`, of `[num_q_heads, head_dim]`
    tokens: [(usize, Vec<f64>); 2],
}

impl Right {
    /// Computes it in f64; `None` where nothing is attended to.
    pub(super) fn new(shape: &Shape, inputs: &Inputs) -> Option<Self> {
        if shape.operation == Operation::Append {
            return None;
        }
        let first = (0, attention(shape, inputs, 0, 0));
        let (seq, row) = (shape.num_seqs - 1, shape.rows - 1);
        let last = (seq * shape.rows + row) as usize;
        let right = if last == 0 { first.1.clone() } else { attention(shape, inputs, seq, row) };
        Some(Self { tokens: [first, (last, right)] })
    }

    /// The largest deviation, as a part of the token's largest number. `out`: `[new tokens,
    /// num_q_heads, head_dim]`
    pub(super) fn error(&self, out: &[f32]) -> f64 {
        let of_token = |(token, right): &(usize, Vec<f64>)| {
            let out = &out[token * right.len()..][..right.len()];
            let off = out.iter().zip(right).map(|(out, right)| (f64::from(*out) - right).abs());
            let largest = right.iter().map(|right| right.abs());
            // NaN is an error, and no number is larger.
            let largest_off = off.fold(0.0, |a, b| if a >= b { a } else { b });
            largest_off / largest.fold(0.0, f64::max)
        };
        let [first, last] = self.tokens.each_ref().map(of_token);
        if first >= last { first } else { last }
    }
}

/// Attention of one new token. `[num_q_heads, head_dim]`
fn attention(shape: &Shape, inputs: &Inputs, seq: u32, row: u32) -> Vec<f64> {
    let dim = shape.head_dim as usize;
    let group = (shape.num_q_heads / shape.num_kv_heads) as usize;
    let q = inputs.q_at(shape, seq, row);
    let keys = shape.cached + row + 1;
    let mut right = Vec::with_capacity(q.len());
    for (head, q) in q.chunks_exact(dim).enumerate() {
        let elements = head / group * dim..(head / group + 1) * dim;
        let score = |key| -> f64 {
            let k = &inputs.kv_at(shape, seq, key).0[elements.clone()];
            q.iter().zip(k).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum()
        };
        let scale = 1.0 / f64::from(shape.head_dim).sqrt();
        let scores: Vec<f64> = (0..keys).map(|key| score(key) * scale).collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let (mut sum, mut values) = (0.0, vec![0.0; dim]);
        for (key, score) in (0..keys).zip(&scores) {
            let weight = (score - max).exp();
            sum += weight;
            let v = &inputs.kv_at(shape, seq, key).1[elements.clone()];
            for (value, v) in values.iter_mut().zip(v) {
                *value += weight * f64::from(*v);
            }
        }
        right.extend(values.iter().map(|value| value / sum));
    }
    right
}
