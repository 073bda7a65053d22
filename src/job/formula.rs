//! What the job keeps in the cache: every element of K, V and Q from a fixed formula.
//!
//! The formula stands in for a model. K and V depend on the token, the position, the layer, the
//! head and the dimension, and on nothing else: as in a model whose layers see one token each, so
//! that requests whose prompts begin alike have the same K and V there and can share them. Q also
//! depends on the request. Whatever is read from the cache can be checked, however it got there: a
//! key of another token, another position or another layer is simply a different number, and two
//! requests have the same token only where their content is the same (the vocabulary is so large
//! that it does not happen by chance). The statistics are those that matter to a cache:
//!
//! - K is normal with a few *outlier channels* a layer and head, whose values lie around a large
//!   mean that is the same for all tokens, as in real models. They are what makes INT8 keys hard.
//! - V is normal.
//! - Q is normal, scaled so that the attention weights are neither uniform nor all on one key:
//!   the scores of a sequence have a standard deviation of about 1.5.
//!
//! Elements are f32 and are not rounded to what the cache stores: the rounding of the cache's
//! format is part of the error that the job measures.

use super::random::{Rng, high, low, mix};
use super::tokens::{Tokens, Use};
use super::workload::Content;
use crate::config::Geometry;

/// The standard deviation of Q's elements.
const Q_SCALE: f32 = 1.5;

/// Channels of a head that have one outlier among them.
const CHANNELS_PER_OUTLIER: u32 = 16;

/// Stands for the request in what is the same for all of them.
const EVERY_REQUEST: u64 = 0;

/// Computes tokens, keys, values and queries.
#[derive(Debug)]
pub struct Formula {
    tokens: Tokens,
    num_kv_heads: usize,
    head_dim: usize,
    /// The mean of each channel of K: 0, or that of an outlier. `[layers, kv heads, head_dim]`
    k_means: Vec<f32>,
}

impl Formula {
    /// The formula for a model and a seed.
    #[must_use]
    pub fn new(seed: u64, geometry: &Geometry) -> Self {
        Self::of(Tokens::new(seed, Vec::new(), 1), geometry)
    }

    /// The formula for a model and a workload's tokens.
    #[must_use]
    pub fn of(tokens: Tokens, geometry: &Geometry) -> Self {
        let seed = tokens.seed;
        let num_kv_heads = geometry.num_kv_heads as usize;
        let head_dim = geometry.head_dim as usize;
        let mut k_means = vec![0.0; geometry.num_layers as usize * num_kv_heads * head_dim];
        let outliers = (geometry.head_dim / CHANNELS_PER_OUTLIER).max(1);
        for (head, means) in (0_u64..).zip(k_means.chunks_exact_mut(head_dim)) {
            let mut rng = Rng::new(seed, mix(&[Use::Outliers as u64, head]));
            for _ in 0..outliers {
                // 8 to 10, of either sign. Two may fall on one channel.
                let size = 8.0 + 2.0 * rng.unit();
                let signed = if rng.below(2) == 0 { size } else { -size };
                #[expect(clippy::cast_possible_truncation, reason = "a mean needs no f64")]
                let mean = signed as f32;
                means[rng.below(geometry.head_dim) as usize] = mean;
            }
        }
        Self { tokens, num_kv_heads, head_dim, k_means }
    }

    /// The token at a position of a content.
    #[must_use]
    pub fn token(&self, content: &Content, position: u32) -> u32 {
        self.tokens.token(content, position)
    }

    /// All of a workload's tokens.
    pub(super) fn tokens(&self) -> &Tokens {
        &self.tokens
    }

    /// One token's keys in a layer. `[num_kv_heads, head_dim]`
    pub fn fill_k(&self, token: u32, position: u32, layer: u32, out: &mut [f32]) {
        let row = self.row(Use::K, EVERY_REQUEST, token, position, layer);
        let means = &self.k_means[layer as usize * self.num_kv_heads * self.head_dim..];
        let heads = out.chunks_exact_mut(self.head_dim).zip(means.chunks_exact(self.head_dim));
        for (head, (out, means)) in (0..).zip(heads) {
            normals(mix(&[row, head]), 1.0, out);
            for (x, mean) in out.iter_mut().zip(means) {
                *x += mean;
            }
        }
    }

    /// One token's values in a layer. `[num_kv_heads, head_dim]`
    pub fn fill_v(&self, token: u32, position: u32, layer: u32, out: &mut [f32]) {
        let row = self.row(Use::V, EVERY_REQUEST, token, position, layer);
        self.fill_heads(row, 1.0, out);
    }

    /// One token's queries of a request in a layer. `[num_q_heads, head_dim]`
    pub fn fill_q(&self, request: u64, token: u32, position: u32, layer: u32, out: &mut [f32]) {
        let row = self.row(Use::Q, request, token, position, layer);
        self.fill_heads(row, Q_SCALE, out);
    }

    fn fill_heads(&self, row: u64, scale: f32, out: &mut [f32]) {
        for (head, out) in (0..).zip(out.chunks_exact_mut(self.head_dim)) {
            normals(mix(&[row, head]), scale, out);
        }
    }

    fn row(&self, what: Use, request: u64, token: u32, position: u32, layer: u32) -> u64 {
        let place = u64::from(position) << 32 | u64::from(token);
        mix(&[self.tokens.seed, what as u64, request, place, u64::from(layer)])
    }
}

/// Fills a vector with roughly normal numbers: the sum of the four bytes of a hash, which has the
/// mean 510 and the standard deviation 147.8. Nothing lies beyond 3.46 standard deviations.
///
/// Simple enough for the compiler to compute many elements at once. The state goes into the hash
/// in two halves, so that 64 bits tell vectors apart.
fn normals(state: u64, scale: f32, out: &mut [f32]) {
    let (first, second) = (low(state), high(state));
    let factor = scale / 147.801_55;
    for (d, out) in (0_u32..).zip(out.iter_mut()) {
        let mut x = first.wrapping_add(d.wrapping_mul(0x9E37_79B9));
        x = (x ^ (x >> 16)).wrapping_mul(0x7FEB_352D) ^ second;
        x = (x ^ (x >> 15)).wrapping_mul(0x846C_A68B);
        x ^= x >> 16;
        let pairs = (x & 0x00FF_00FF) + ((x >> 8) & 0x00FF_00FF);
        let sum = (pairs & 0xFFFF) + (pairs >> 16);
        #[expect(clippy::cast_precision_loss, reason = "within ±510")]
        let centred = (sum.cast_signed() - 510) as f32;
        *out = centred * factor;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIM: usize = 64;

    fn geometry() -> Geometry {
        Geometry {
            num_layers: 3,
            num_q_heads: 4,
            num_kv_heads: 2,
            head_dim: 64,
            windows: vec![0, 0, 0],
            sink_tokens: 0,
        }
    }

    fn moments(values: &[f32]) -> (f64, f64) {
        let n = f64::from(u32::try_from(values.len()).expect("few"));
        let mean = values.iter().map(|x| f64::from(*x)).sum::<f64>() / n;
        let variance = values.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum::<f64>() / n;
        (mean, variance.sqrt())
    }

    #[test]
    fn every_argument_changes_every_vector() {
        let formula = Formula::new(1, &geometry());
        let other_seed = Formula::new(2, &geometry());
        let vector = |fill: &dyn Fn(&mut [f32])| {
            let mut out = vec![0.0; 2 * DIM];
            fill(&mut out);
            out
        };
        let k = |token, position, layer| vector(&|out| formula.fill_k(token, position, layer, out));
        let v = |formula: &Formula, token, position, layer| {
            vector(&|out| formula.fill_v(token, position, layer, out))
        };
        let q = |request, token, position, layer| {
            vector(&|out| formula.fill_q(request, token, position, layer, out))
        };
        let differ = |base: &[f32], others: &[Vec<f32>]| {
            assert_ne!(base[..DIM], base[DIM..], "heads");
            for other in others {
                let pairs = base.iter().zip(other);
                let same = pairs.filter(|(a, b)| a.to_bits() == b.to_bits()).count();
                assert!(same < 8, "{same} of 128 elements are the same");
            }
        };
        assert_eq!(k(2, 3, 0), k(2, 3, 0));
        differ(&k(2, 3, 0), &[k(3, 3, 0), k(2, 4, 0), k(2, 3, 1), v(&formula, 2, 3, 0)]);
        let others = [
            v(&other_seed, 2, 3, 0),
            v(&formula, 3, 3, 0),
            v(&formula, 2, 4, 0),
            v(&formula, 2, 3, 1),
        ];
        differ(&v(&formula, 2, 3, 0), &others);
        differ(&q(1, 2, 3, 0), &[q(2, 2, 3, 0), q(1, 3, 3, 0), q(1, 2, 4, 0), q(1, 2, 3, 1)]);
    }

    #[test]
    fn tokens_are_equal_where_the_content_is_and_nowhere_else() {
        let formula = Formula::new(1, &geometry());
        let tokens = |prefix, prefix_tokens, own| -> Vec<u32> {
            let content = Content { prefix, prefix_tokens, own, ..Content::default() };
            (0..1000).map(|position| formula.token(&content, position)).collect()
        };
        let base = tokens(4, 300, 7);
        let same = |other: &[u32]| base.iter().zip(other).filter(|(a, b)| a == b).count();
        let other = tokens(4, 300, 8);
        assert_eq!((same(&other), &base[..300]), (300, &other[..300]), "the shared prefix");
        assert_eq!(same(&tokens(5, 300, 7)), 700, "the conversation behind another prefix");
        assert_eq!(same(&tokens(7, 300, 4)), 0, "prefix 7 is not conversation 7");
        assert_eq!(same(&tokens(0, 0, 4)), 0, "nor prefix 4 conversation 4");
        assert!(base.iter().all(|token| *token < 1 << 31));
        let mut distinct = base;
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!(distinct.len(), 1000);
    }

    /// Tokens of a conversation that shares nothing.
    fn token(formula: &Formula, own: u64, position: u32) -> u32 {
        formula.token(&Content { own, ..Content::default() }, position)
    }

    #[test]
    fn the_statistics_are_those_of_a_model() {
        let formula = Formula::new(1, &geometry());
        let (mut ks, mut vs, mut qs) = (Vec::new(), Vec::new(), Vec::new());
        for position in 0..400 {
            let (mut k, mut v, mut q) = ([0.0; 2 * DIM], [0.0; 2 * DIM], [0.0; 4 * DIM]);
            let token = token(&formula, 9, position);
            formula.fill_k(token, position, 1, &mut k);
            formula.fill_v(token, position, 1, &mut v);
            formula.fill_q(9, token, position, 1, &mut q);
            ks.extend_from_slice(&k);
            vs.extend_from_slice(&v);
            qs.extend_from_slice(&q);
        }
        let (mean, deviation) = moments(&vs);
        assert!(mean.abs() < 0.02 && (deviation - 1.0).abs() < 0.02, "V: {mean} {deviation}");
        let (mean, deviation) = moments(&qs);
        assert!(mean.abs() < 0.03 && (deviation - 1.5).abs() < 0.03, "Q: {mean} {deviation}");
        let mut outliers = 0;
        for channel in 0..2 * DIM {
            let values: Vec<f32> = ks.iter().copied().skip(channel).step_by(2 * DIM).collect();
            let (mean, deviation) = moments(&values);
            assert!((deviation - 1.0).abs() < 0.2, "channel {channel}: {deviation}");
            assert!(mean.abs() < 0.3 || (7.5..10.5).contains(&mean.abs()), "{channel}: {mean}");
            outliers += usize::from(mean.abs() > 1.0);
        }
        assert!((4..=8).contains(&outliers), "{outliers} outlier channels in two heads");
    }

    #[test]
    fn attention_is_neither_uniform_nor_all_on_one_key() {
        let formula = Formula::new(5, &geometry());
        let mut q = [0.0; 4 * DIM];
        formula.fill_q(1, token(&formula, 1, 255), 255, 0, &mut q);
        let weights: Vec<f64> = (0..256)
            .map(|position| {
                let mut k = [0.0; 2 * DIM];
                formula.fill_k(token(&formula, 1, position), position, 0, &mut k);
                let dot: f64 =
                    q.iter().zip(&k[..DIM]).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
                (dot / 8.0).exp()
            })
            .collect();
        let sum: f64 = weights.iter().sum();
        // How many keys count: 256 if the weights were uniform, 1 if one had it all.
        let effective = sum * sum / weights.iter().map(|w| w * w).sum::<f64>();
        assert!((4.0..120.0).contains(&effective), "{effective}");
    }
}
