//! One step of a model: what an engine does with the cache, and what it does on its own.
//!
//! The order is that of every engine: `reserve_tokens` → for each layer `append`, then `attend` →
//! `commit`. Positions come from [`Step::positions`](crate::cache::Step::positions) and from
//! nowhere else: a sequence that began with a shared prefix, was forked, rewound or comes in chunks
//! has its tokens where the cache says, and the engine has no count of its own to get wrong.
//!
//! Every row is computed by itself, in an order that does not depend on the others, so a prompt
//! gives the same bits however it is cut and whoever is in the batch.

use super::weights::{Layer, Model, MoreNorms};
use crate::cache::{AttendOptions, Cache, SeqHandle};
use crate::config::{Architecture, DeviceConfig};
use crate::device::cpu::{Products, Threads, num_threads};
use crate::device::{TensorMut, TensorRef};
use crate::error::ModelError;
use crate::plan::{Plan, Rope, rotated};
use crate::units::LayerIdx;

/// What goes into a step.
#[derive(Clone, Copy, Debug)]
pub struct StepInput<'a> {
    /// The sequences and how many tokens each gets, as for `reserve`.
    pub seqs: &'a [(SeqHandle, u32)],
    /// All their tokens, in that order. `[num_tokens]`
    pub tokens: &'a [u32],
    /// The rows whose scores are wanted, ascending.
    pub wanted: &'a [usize],
}

/// Runs a model on caches of its geometry.
#[derive(Debug)]
pub struct Engine<'m> {
    model: &'m Model,
    products: Products,
    device: DeviceConfig,
    /// For caches that compute elsewhere; the threads of one on the host compute for both.
    own_threads: Option<Threads>,
    rotation: Rotation,
    /// Rows by what they are. Grown once to the largest step.
    hidden: Vec<f32>,
    normed: Vec<f32>,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    attended: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
    logits: Vec<f32>,
    positions: Vec<u32>,
    loses_positions: bool,
    spreads: bool,
    extremes: Option<Vec<[f32; 2]>>,
    timing: Timing,
}

/// Where the time of the steps went, in seconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Timing {
    /// `append` and `attend`.
    pub attention_s: f64,
    /// `reserve`, `commit`, and everything else that is the cache's.
    pub manager_s: f64,
    /// All of it.
    pub total_s: f64,
}

impl<'m> Engine<'m> {
    /// An engine for caches of this plan: of the model's geometry, and with its rotation or none.
    ///
    /// # Errors
    /// [`ModelError::Setting`] for a plan of another model.
    pub fn new(model: &'m Model, plan: &Plan, device: &DeviceConfig) -> Result<Self, ModelError> {
        if plan.geometry != model.file.geometry {
            return Err(ModelError::Setting(
                "the plan's geometry is not the model's; take it from the model file".to_owned(),
            ));
        }
        Ok(Self {
            model,
            products: Products::new(device.kernel),
            device: device.clone(),
            own_threads: None,
            rotation: Rotation::new(model, plan)?,
            hidden: Vec::new(),
            normed: Vec::new(),
            q: Vec::new(),
            k: Vec::new(),
            v: Vec::new(),
            attended: Vec::new(),
            gate: Vec::new(),
            up: Vec::new(),
            logits: Vec::new(),
            positions: Vec::new(),
            loses_positions: false,
            spreads: false,
            extremes: None,
            timing: Timing::default(),
        })
    }

    /// For tests: makes the mistake of an engine that counts its positions from the first token of
    /// each step. The plan must have no rotation of its own, which would not make it.
    #[doc(hidden)]
    pub fn lose_positions(&mut self) {
        self.loses_positions = true;
    }

    /// From here on, turns Q, K and V of each head by one fixed rotation (a Walsh-Hadamard matrix),
    /// and the outputs back. Scores and outputs are the same but for rounding; but what one element
    /// of K or V has much of is spread over all of the vector, so that INT8 scales are not made for
    /// it alone. The plan must have no rotation of its own, which would come behind this one.
    ///
    /// # Errors
    /// [`ModelError::Setting`] where `head_dim` is no power of two, or the plan rotates K.
    pub fn spread(&mut self, plan: &Plan) -> Result<(), ModelError> {
        let head_dim = self.model.file.geometry.head_dim;
        if !head_dim.is_power_of_two() || plan.rope.is_some() {
            return Err(ModelError::Setting(format!(
                "K and V cannot be spread: head_dim is {head_dim}, which must be a power of two, and \
                 the plan must have no [rope]"
            )));
        }
        self.spreads = true;
        Ok(())
    }

    /// Notes the largest magnitudes of K and V from here on: what static scales are made of. The
    /// plan must have no rotation of its own, or K would not be seen as it is stored.
    pub fn observe_extremes(&mut self) {
        self.extremes = Some(vec![[0.0; 2]; self.model.layers.len()]);
    }

    /// The largest magnitudes of K and of V, for each layer.
    #[must_use]
    pub fn extremes(&self) -> &[[f32; 2]] {
        self.extremes.as_deref().unwrap_or_default()
    }

    /// Where the time went.
    #[must_use]
    pub fn timing(&self) -> Timing {
        self.timing
    }

    /// Appends tokens to sequences, and gives the scores of what may follow those of the wanted
    /// rows. `[wanted, vocab_size]`
    ///
    /// # Errors
    /// Those of `reserve`, after which nothing has changed; [`ModelError::Setting`] for a token
    /// that the model does not have.
    ///
    /// # Panics
    /// When a wanted row does not exist.
    pub fn step(&mut self, cache: &mut Cache, input: StepInput<'_>) -> Result<&[f32], ModelError> {
        let began = std::time::Instant::now();
        let file = &self.model.file;
        let vocab = file.vocab_size;
        if let Some(token) = input.tokens.iter().find(|token| **token >= vocab) {
            let problem = format!("there is no token {token}; the model has {vocab}");
            return Err(ModelError::Setting(problem));
        }
        let (rotates_k, softmax_scale) = (cache.plan().rope.is_none(), self.softmax_scale());
        let threads = self.threads(cache)?;
        let mut step = cache.reserve_tokens(input.seqs, input.tokens)?;
        self.positions.clear();
        self.positions.extend_from_slice(step.positions());
        if self.loses_positions {
            let counts = input.seqs.iter().flat_map(|(_, count)| 0..*count);
            self.positions.iter_mut().zip(counts).for_each(|(position, count)| *position = count);
        }
        self.timing.manager_s += began.elapsed().as_secs_f64();
        self.embed(input.tokens);
        for (index, layer) in self.model.layers.iter().enumerate() {
            self.project(&threads, layer)?;
            let windowed = file.geometry.windows[index] > 0;
            self.rotation.rotate(windowed, &self.positions, &mut self.q);
            if rotates_k {
                self.rotation.rotate(windowed, &self.positions, &mut self.k);
            }
            let head_dim = file.geometry.head_dim as usize;
            if self.spreads {
                spread([&mut self.q, &mut self.k, &mut self.v], head_dim);
            }
            self.note_extremes(index);

            let attention = std::time::Instant::now();
            let at = LayerIdx(u32::try_from(index).unwrap_or(u32::MAX));
            step.append(at, TensorRef::F32(&self.k), TensorRef::F32(&self.v))?;
            let options = AttendOptions { softmax_scale, lse: None };
            step.attend(at, TensorRef::F32(&self.q), TensorMut::F32(&mut self.attended), options)?;
            if self.spreads {
                // The matrix is its own inverse.
                spread([&mut self.attended], head_dim);
            }
            self.timing.attention_s += attention.elapsed().as_secs_f64();

            self.feed_forward(&threads, layer)?;
        }
        let commit = std::time::Instant::now();
        step.commit()?;
        self.timing.manager_s += commit.elapsed().as_secs_f64();
        self.score(&threads, input.wanted)?;
        self.timing.total_s += began.elapsed().as_secs_f64();
        Ok(&self.logits)
    }

    /// Who computes: the cache's threads, so that there are not two teams on the same cores.
    fn threads(&mut self, cache: &Cache) -> Result<Threads, ModelError> {
        if let Some(threads) = cache.threads().or(self.own_threads.as_ref()) {
            return Ok(threads.clone());
        }
        let threads = Threads::start(num_threads(&self.device) as usize)?;
        self.own_threads = Some(threads.clone());
        Ok(threads)
    }

    /// 1 / √`head_dim`, which is what all models read here have.
    fn softmax_scale(&self) -> Option<f32> {
        None
    }

    /// Looks the tokens' vectors up.
    fn embed(&mut self, tokens: &[u32]) {
        let dim = self.model.file.dim as usize;
        self.hidden.resize(tokens.len() * dim, 0.0);
        for (token, row) in tokens.iter().zip(self.hidden.chunks_exact_mut(dim)) {
            self.model.embedding.row(*token as usize, row);
        }
        if self.model.file.architecture == Architecture::Gemma3 {
            let scale = float(dim).sqrt();
            self.hidden.iter_mut().for_each(|x| *x *= scale);
        }
    }

    /// q, k and v of a layer, not rotated yet.
    fn project(&mut self, threads: &Threads, layer: &Layer) -> Result<(), ModelError> {
        let file = &self.model.file;
        let rows = self.positions.len();
        self.q.resize(rows * layer.q.columns(), 0.0);
        self.k.resize(rows * layer.k.columns(), 0.0);
        self.v.resize(rows * layer.v.columns(), 0.0);
        self.attended.resize(self.q.len(), 0.0);
        norm(&self.hidden, &layer.attention_norm, file.norm_eps, &mut self.normed);
        self.products.multiply(
            threads,
            &self.normed,
            &mut [(&layer.q, &mut self.q), (&layer.k, &mut self.k), (&layer.v, &mut self.v)],
        )?;
        if let Some(MoreNorms { q, k, .. }) = &layer.more_norms {
            norm_in_place(&mut self.q, q, file.norm_eps);
            norm_in_place(&mut self.k, k, file.norm_eps);
        }
        Ok(())
    }

    /// Everything of a layer that follows attention.
    fn feed_forward(&mut self, threads: &Threads, layer: &Layer) -> Result<(), ModelError> {
        let file = &self.model.file;
        let rows = self.positions.len();
        let eps = file.norm_eps;
        self.normed.resize(self.hidden.len(), 0.0);
        self.products.multiply(
            threads,
            &self.attended,
            &mut [(&layer.attention_out, &mut self.normed)],
        )?;
        if let Some(norms) = &layer.more_norms {
            norm_in_place(&mut self.normed, &norms.attention_out, eps);
        }
        add(&mut self.hidden, &self.normed);

        norm(&self.hidden, &layer.feed_norm, eps, &mut self.normed);
        self.gate.resize(rows * layer.gate.columns(), 0.0);
        self.up.resize(rows * layer.up.columns(), 0.0);
        self.products.multiply(
            threads,
            &self.normed,
            &mut [(&layer.gate, &mut self.gate), (&layer.up, &mut self.up)],
        )?;
        let activate = match file.architecture {
            Architecture::Llama => silu,
            Architecture::Gemma3 => gelu,
        };
        for (gate, up) in self.gate.iter_mut().zip(&self.up) {
            *gate = activate(*gate) * up;
        }
        self.products.multiply(threads, &self.gate, &mut [(&layer.down, &mut self.normed)])?;
        if let Some(norms) = &layer.more_norms {
            norm_in_place(&mut self.normed, &norms.down, eps);
        }
        add(&mut self.hidden, &self.normed);
        Ok(())
    }

    /// Scores of the wanted rows.
    fn score(&mut self, threads: &Threads, wanted: &[usize]) -> Result<(), ModelError> {
        let file = &self.model.file;
        let dim = file.dim as usize;
        // The wanted rows move to the front; they ascend, so none is overwritten before it moves.
        for (to, from) in wanted.iter().enumerate() {
            self.hidden.copy_within(from * dim..(from + 1) * dim, to * dim);
        }
        norm(&self.hidden[..wanted.len() * dim], &self.model.norm, file.norm_eps, &mut self.normed);
        self.logits.resize(wanted.len() * file.vocab_size as usize, 0.0);
        let output = self.model.output();
        Ok(self.products.multiply(threads, &self.normed, &mut [(output, &mut self.logits)])?)
    }

    fn note_extremes(&mut self, layer: usize) {
        let Some(extremes) = &mut self.extremes else { return };
        for (extreme, x) in extremes[layer].iter_mut().zip([&self.k, &self.v]) {
            *extreme = x.iter().fold(*extreme, |most, x| most.max(x.abs()));
        }
    }
}

/// Cosines and sines of every position, as the plan has them.
#[derive(Debug)]
struct Rotation {
    rope: Rope,
    head_dim: usize,
    /// `[tables, (cos, sin), positions, dims / 2]`
    table: Vec<f32>,
}

impl Rotation {
    /// That of the plan, or of the model where the plan has none: the same numbers.
    fn new(model: &Model, plan: &Plan) -> Result<Self, ModelError> {
        let file = &model.file;
        let rope = Rope::of(&file.rope, &file.geometry, plan.limits.max_seq_len);
        let other = "the plan rotates K otherwise than the model; take [rope] from the model file";
        let Some(rope) = rope.filter(|rope| plan.rope.as_ref().is_none_or(|own| own == rope))
        else {
            return Err(ModelError::Setting(other.to_owned()));
        };
        let numbers = rope.numbers().ok().and_then(|numbers| usize::try_from(numbers).ok());
        let numbers =
            numbers.ok_or_else(|| ModelError::Setting("too many positions".to_owned()))?;
        let mut table = vec![0.0; numbers];
        rope.fill(&mut table);
        Ok(Self { rope, head_dim: file.geometry.head_dim as usize, table })
    }

    /// Rotates rows of heads, each row by its position. `x`: `[positions, heads, head_dim]`
    fn rotate(&self, windowed: bool, positions: &[u32], x: &mut [f32]) {
        if positions.is_empty() {
            return;
        }
        let half = self.rope.dims as usize / 2;
        let len = self.rope.positions as usize * half;
        let table = &self.table[self.rope.table_of(windowed) as usize * 2 * len..][..2 * len];
        let (cos, sin) = table.split_at(len);
        let row = x.len() / positions.len();
        for (x, position) in x.chunks_exact_mut(row).zip(positions) {
            let start = *position as usize * half;
            let (cos, sin) = (&cos[start..start + half], &sin[start..start + half]);
            for x in x.chunks_exact_mut(self.head_dim) {
                for (pair, (cos, sin)) in cos.iter().zip(sin).enumerate() {
                    let (a, b) = self.rope.pair(pair);
                    (x[a], x[b]) = rotated(x[a], x[b], *cos, *sin);
                }
            }
        }
    }
}

/// Multiplies every head of some tensors by the normalised Walsh-Hadamard matrix.
fn spread<const N: usize>(tensors: [&mut Vec<f32>; N], head_dim: usize) {
    let scale = 1.0 / float(head_dim).sqrt();
    for x in tensors.into_iter().flat_map(|x| x.chunks_exact_mut(head_dim)) {
        let mut half = 1;
        while half < head_dim {
            match half {
                // Lengths that the compiler knows become shuffles of whole registers.
                1 => butterflies(x, 1),
                2 => butterflies(x, 2),
                4 => butterflies(x, 4),
                8 => butterflies(x, 8),
                _ => butterflies(x, half),
            }
            half *= 2;
        }
        x.iter_mut().for_each(|x| *x *= scale);
    }
}

/// Sums and differences of elements that are `half` apart.
#[inline(always)]
fn butterflies(x: &mut [f32], half: usize) {
    for pair in x.chunks_exact_mut(2 * half) {
        let (a, b) = pair.split_at_mut(half);
        for (a, b) in a.iter_mut().zip(b) {
            (*a, *b) = (*a + *b, *a - *b);
        }
    }
}

/// Divides each row by the root of its mean square, and multiplies by the weights. `out` gets as
/// many rows as `x` has.
fn norm(x: &[f32], weights: &[f32], eps: f32, out: &mut Vec<f32>) {
    out.resize(x.len(), 0.0);
    out.copy_from_slice(x);
    norm_in_place(out, weights, eps);
}

/// The same in place.
fn norm_in_place(x: &mut [f32], weights: &[f32], eps: f32) {
    for x in x.chunks_exact_mut(weights.len()) {
        let squares = x.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>();
        #[expect(clippy::cast_possible_truncation, reason = "the nearest f32")]
        let mean = (squares / f64::from(float(weights.len()))) as f32;
        let scale = 1.0 / (mean + eps).sqrt();
        for (x, weight) in x.iter_mut().zip(weights) {
            *x = *x * scale * weight;
        }
    }
}

fn add(to: &mut [f32], what: &[f32]) {
    to.iter_mut().zip(what).for_each(|(to, what)| *to += what);
}

/// x · sigmoid(x)
fn silu(x: f32) -> f32 {
    x / (1.0 + (-x).exp())
}

/// The tanh form of GELU.
fn gelu(x: f32) -> f32 {
    const SQRT_2_OVER_PI: f32 = 0.797_884_6;
    0.5 * x * (1.0 + (SQRT_2_OVER_PI * x * (1.0 + 0.044_715 * x * x)).tanh())
}

/// A size as f32; models' sizes are far below 2²⁴.
fn float(size: usize) -> f32 {
    #[expect(clippy::cast_precision_loss, reason = "exact below 2²⁴")]
    let value = size as f32;
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spread_vector_keeps_its_products_and_comes_back() {
        let x: Vec<f32> = (0..128_u8).map(|i| f32::from(i * 37 % 101) - 50.0).collect();
        let mut y = x.clone();
        // One large element in each of two heads: each gets the same magnitude everywhere.
        let mut lone = vec![0.0; 128];
        (lone[5], lone[100]) = (8.0, -16.0);
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
        let before = dot(&y, &lone);
        spread([&mut y, &mut lone], 64);
        assert!(lone[..64].iter().all(|x| x.abs() == 1.0), "{lone:?}");
        assert!(lone[64..].iter().all(|x| x.abs() == 2.0), "{lone:?}");
        assert!((dot(&y, &lone) - before).abs() < 1e-2);
        spread([&mut y], 64);
        assert!(x.iter().zip(&y).all(|(a, b)| (a - b).abs() < 1e-4));
    }
}
