//! The numbers that are stored and asked about: the same for every layer and variant.

use super::attention::Shape;
use crate::device::TensorRef;

/// The tokens of one step while a case is filled.
pub(super) const FILL_TOKENS: u32 = 1024;

/// Tokens that each sequence gets in one step of `fill`, but for the last.
pub(super) fn tokens_a_step(shape: &Shape) -> u32 {
    (FILL_TOKENS / shape.num_seqs).max(1)
}

/// Tensors for the largest step, the same for every layer and variant.
pub(super) struct Inputs {
    kv: Vec<f32>,
    /// `[new tokens, num_q_heads, head_dim]`
    pub(super) q: Vec<f32>,
}

impl Inputs {
    /// Those of a shape.
    pub(super) fn new(shape: &Shape) -> Self {
        let rows = (shape.rows * shape.num_seqs) as usize;
        let kv_row = (shape.num_kv_heads * shape.head_dim) as usize;
        let q_row = (shape.num_q_heads * shape.head_dim) as usize;
        // Twice the largest step, so that K and V are different stretches.
        let kv = normal(1, 2 * rows.max(FILL_TOKENS as usize) * kv_row);
        Self { kv, q: normal(2, rows * q_row) }
    }

    /// K and V of `tokens` tokens.
    pub(super) fn kv(&self, tokens: usize, row: usize) -> (TensorRef<'_>, TensorRef<'_>) {
        let half = self.kv.len() / 2;
        let len = tokens * row;
        (TensorRef::F32(&self.kv[..len]), TensorRef::F32(&self.kv[half..half + len]))
    }

    /// K and V of one token of a sequence, as `fill` and then the timed step have stored them.
    /// `[num_kv_heads, head_dim]` each
    pub(super) fn kv_at(&self, shape: &Shape, seq: u32, position: u32) -> (&[f32], &[f32]) {
        let per_seq = tokens_a_step(shape);
        let (start, now) = if position < shape.cached {
            let start = position / per_seq * per_seq;
            (start, per_seq.min(shape.cached - start))
        } else {
            (shape.cached, shape.rows)
        };
        let row = (shape.num_kv_heads * shape.head_dim) as usize;
        let first = (seq * now + position - start) as usize * row;
        let second = self.kv.len() / 2 + first;
        (&self.kv[first..first + row], &self.kv[second..second + row])
    }

    /// The queries of one new token. `[num_q_heads, head_dim]`
    pub(super) fn q_at(&self, shape: &Shape, seq: u32, row: u32) -> &[f32] {
        let len = (shape.num_q_heads * shape.head_dim) as usize;
        &self.q[(seq * shape.rows + row) as usize * len..][..len]
    }
}

/// Roughly normal numbers from a fixed seed.
fn normal(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed;
    let mut piece = move || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        #[expect(clippy::cast_precision_loss, reason = "16 bits")]
        let value = (state >> 48) as f32 / 65536.0 - 0.5;
        value
    };
    (0..count).map(|_| (piece() + piece() + piece() + piece()) * 1.732).collect()
}
