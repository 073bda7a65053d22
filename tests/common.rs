//! What the integration tests share: plans in a few words, contents that are known, and attention
//! computed naively from them.

use kvpool::cache::{AttendOptions, Cache, SeqHandle};
use kvpool::config::{
    Admission, CacheConfig, CacheMode, Capacity, Config, ContiguousLayers, DeviceConfig,
    DeviceKind, Format, Geometry, HybridConfig, Int8Config, KernelChoice, LimitsConfig,
    ModelConfig, PoolConfig, RopeConfig, ScaleKind, Scrub, StaticScale,
};
use kvpool::device::{TensorMut, TensorRef};
use kvpool::error::{CacheError, PlanError};
use kvpool::plan::{Kv, Plan};
use kvpool::units::LayerIdx;

/// A cache in a few words.
#[derive(Clone, Debug)]
pub(crate) struct Spec {
    pub(crate) mode: CacheMode,
    pub(crate) format: Format,
    pub(crate) scale: ScaleKind,
    pub(crate) tokens_per_block: u32,
    pub(crate) windows: Vec<u32>,
    pub(crate) sink_tokens: u32,
    pub(crate) num_q_heads: u32,
    pub(crate) num_kv_heads: u32,
    pub(crate) head_dim: u32,
    pub(crate) max_seqs: u32,
    pub(crate) max_seq_len: u32,
    pub(crate) max_batch_tokens: u32,
    pub(crate) max_step_tokens: Option<u32>,
    pub(crate) max_rewind_tokens: u32,
    pub(crate) rope: Option<RopeConfig>,
    pub(crate) capacity: Capacity,
    pub(crate) admission: Admission,
    pub(crate) prefix_reuse: bool,
    pub(crate) event_buffer: u32,
    pub(crate) watermark_blocks: u32,
    pub(crate) scrub: Scrub,
    /// For `Hybrid`.
    pub(crate) contiguous_layers: Vec<u32>,
    pub(crate) threads: u32,
    pub(crate) kernel: KernelChoice,
}

impl Default for Spec {
    fn default() -> Self {
        Self {
            mode: CacheMode::Paged,
            format: Format::F32,
            scale: ScaleKind::PerTokenHead,
            tokens_per_block: 8,
            windows: vec![0, 0],
            sink_tokens: 0,
            num_q_heads: 2,
            num_kv_heads: 1,
            head_dim: 8,
            max_seqs: 4,
            max_seq_len: 64,
            max_batch_tokens: 64,
            max_step_tokens: None,
            max_rewind_tokens: 0,
            rope: None,
            capacity: Capacity::WorstCase,
            admission: Admission::Guaranteed,
            prefix_reuse: true,
            event_buffer: 0,
            watermark_blocks: 0,
            scrub: Scrub::Off,
            contiguous_layers: vec![0],
            threads: 1,
            kernel: KernelChoice::Auto,
        }
    }
}

impl Spec {
    pub(crate) fn mode(mode: CacheMode) -> Self {
        Self { mode, ..Self::default() }
    }

    pub(crate) fn geometry(&self) -> Geometry {
        Geometry {
            num_layers: self.windows.len() as u32,
            num_q_heads: self.num_q_heads,
            num_kv_heads: self.num_kv_heads,
            head_dim: self.head_dim,
            windows: self.windows.clone(),
            sink_tokens: self.sink_tokens,
        }
    }

    pub(crate) fn config(&self) -> Config {
        let per_tensor = self.scale == ScaleKind::PerTensor;
        let int8 = Int8Config {
            scale: self.scale,
            k_scale: per_tensor.then_some(StaticScale::One(4.0 / 127.0)),
            v_scale: per_tensor.then_some(StaticScale::One(4.0 / 127.0)),
        };
        let contiguous_layers = ContiguousLayers::List(self.contiguous_layers.clone());
        Config {
            model: ModelConfig {
                num_layers: Some(self.windows.len() as u32),
                num_q_heads: Some(self.num_q_heads),
                num_kv_heads: Some(self.num_kv_heads),
                head_dim: Some(self.head_dim),
                attention_window: Some(self.windows.clone()),
                sink_tokens: self.sink_tokens,
                ..ModelConfig::default()
            },
            limits: LimitsConfig {
                max_seqs: self.max_seqs,
                max_seq_len: self.max_seq_len,
                max_batch_tokens: self.max_batch_tokens,
                max_step_tokens: self.max_step_tokens,
                max_rewind_tokens: self.max_rewind_tokens,
            },
            cache: CacheConfig {
                mode: self.mode,
                tokens_per_block: self.tokens_per_block,
                format: self.format,
                admission: self.admission,
                prefix_reuse: self.prefix_reuse,
                event_buffer: self.event_buffer,
                watermark_blocks: self.watermark_blocks,
                int8: (self.format == Format::Int8).then_some(int8),
                hybrid: (self.mode == CacheMode::Hybrid)
                    .then_some(HybridConfig { contiguous_layers }),
            },
            rope: self.rope.clone(),
            pool: PoolConfig {
                capacity: self.capacity,
                scrub: self.scrub,
                ..PoolConfig::default()
            },
            device: if on_cuda() {
                DeviceConfig { kind: DeviceKind::Cuda, ..DeviceConfig::default() }
            } else {
                DeviceConfig {
                    threads: self.threads,
                    kernel: self.kernel,
                    ..DeviceConfig::default()
                }
            },
            workload: None,
            cost: None,
            goals: None,
            generate: None,
            variant: Vec::new(),
            sweep: Vec::new(),
        }
    }

    pub(crate) fn try_plan(&self) -> Result<Plan, PlanError> {
        Plan::new(&self.config(), &self.geometry())
    }

    pub(crate) fn plan(&self) -> Plan {
        self.try_plan().unwrap_or_else(|error| panic!("{self:?}: {error}"))
    }

    /// With blocks of fewer tokens than any kernel is made for: for the manager alone.
    pub(crate) fn small_plan(&self) -> Plan {
        let plan = Plan::with_small_blocks(&self.config(), &self.geometry());
        plan.unwrap_or_else(|error| panic!("{self:?}: {error}"))
    }

    pub(crate) fn open(&self) -> Cache {
        Cache::open_on_device(self.plan(), &self.config().device, None).expect("opens")
    }

    /// On the CPU, also where the tests run on a GPU.
    pub(crate) fn open_on_cpu(&self) -> Cache {
        let device =
            DeviceConfig { threads: self.threads, kernel: self.kernel, ..DeviceConfig::default() };
        Cache::open_on_cpu(self.plan(), &device, None).expect("opens")
    }
}

/// The variable that makes the tests run on a CUDA device; `tests/cuda` sets it.
pub(crate) const DEVICE_VAR: &str = "KVPOOL_TEST_DEVICE";

/// Whether the tests run on a CUDA device.
pub(crate) fn on_cuda() -> bool {
    std::env::var(DEVICE_VAR).is_ok_and(|device| device == "cuda")
}

/// All three modes of a spec whose layer list has at least two layers.
pub(crate) const MODES: [CacheMode; 3] =
    [CacheMode::Contiguous, CacheMode::Paged, CacheMode::Hybrid];

/// Every format; the scale form counts for INT8 only.
pub(crate) const FORMATS: [(Format, ScaleKind); 6] = [
    (Format::F32, ScaleKind::PerTokenHead),
    (Format::F16, ScaleKind::PerTokenHead),
    (Format::Bf16, ScaleKind::PerTokenHead),
    (Format::Int8, ScaleKind::PerTokenHead),
    (Format::Int8, ScaleKind::PerGroup32),
    (Format::Int8, ScaleKind::PerTensor),
];

/// Mixes words into one.
pub(crate) fn mix(words: &[u64]) -> u64 {
    words.iter().fold(0x9E37_79B9_7F4A_7C15, |state, word| {
        let x = (state ^ word).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        (x ^ (x >> 29)).wrapping_mul(0x94D0_49BB_1331_11EB) ^ (x >> 32)
    })
}

/// A small random number generator for drivers of tests.
pub(crate) struct Rng(pub(crate) u64);

impl Rng {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(&[self.0])
    }

    /// A number below `end`, which is at least 1.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
}

/// One element of K, V or Q: a multiple of 1/16 in [-4, 4), exact in every float format. `tag`
/// stands for the token at the position, so sequences that differ in it hold different values.
pub(crate) fn element(tag: u64, position: u32, layer: u32, what: u64, head: u32, d: u32) -> f32 {
    let word = mix(&[tag, position.into(), layer.into(), what, head.into(), d.into()]);
    ((word >> 40) % 128) as f32 / 16.0 - 4.0
}

/// One token's vector of all heads. `what`: 0 = K, 1 = V, 2 = Q.
pub(crate) fn vector(
    tag: u64,
    position: u32,
    layer: u32,
    what: u64,
    heads: u32,
    dim: u32,
) -> Vec<f32> {
    (0..heads)
        .flat_map(|head| (0..dim).map(move |d| element(tag, position, layer, what, head, d)))
        .collect()
}

/// The tensor of a step: `tags[i]` is the token at `positions[i]`.
pub(crate) fn tensor(
    tags: &[u64],
    positions: &[u32],
    layer: u32,
    what: u64,
    heads: u32,
    dim: u32,
) -> Vec<f32> {
    tags.iter()
        .zip(positions)
        .flat_map(|(tag, position)| vector(*tag, *position, layer, what, heads, dim))
        .collect()
}

/// The outputs of one step in every layer, `[layers][tokens, q heads, head_dim]`, and the lse.
pub(crate) struct Outputs {
    pub(crate) out: Vec<Vec<f32>>,
    pub(crate) lse: Vec<Vec<f32>>,
}

/// Runs one whole step: reserve, append and attend in every layer, commit. `tags` are the tokens
/// of all sequences, one behind the other.
pub(crate) fn run_step(
    cache: &mut Cache,
    batch: &[(SeqHandle, u32)],
    tags: &[u64],
) -> Result<Outputs, CacheError> {
    let geometry = cache.plan().geometry.clone();
    let (kv_heads, q_heads, dim) = (geometry.num_kv_heads, geometry.num_q_heads, geometry.head_dim);
    let mut step = cache.reserve(batch)?;
    assert_eq!(step.num_tokens(), tags.len());
    let positions = step.positions().to_vec();
    let mut outputs = Outputs { out: Vec::new(), lse: Vec::new() };
    for layer in 0..geometry.num_layers {
        let k = tensor(tags, &positions, layer, 0, kv_heads, dim);
        let v = tensor(tags, &positions, layer, 1, kv_heads, dim);
        let q = tensor(tags, &positions, layer, 2, q_heads, dim);
        step.append(LayerIdx(layer), TensorRef::F32(&k), TensorRef::F32(&v))?;
        // Poisoned, so that an element that is not written shows.
        let mut out = vec![f32::NAN; q.len()];
        let mut lse = vec![f32::NAN; tags.len() * q_heads as usize];
        let options = AttendOptions { softmax_scale: None, lse: Some(&mut lse) };
        step.attend(LayerIdx(layer), TensorRef::F32(&q), TensorMut::F32(&mut out), options)?;
        outputs.out.push(out);
        outputs.lse.push(lse);
    }
    step.commit()?;
    Ok(outputs)
}

/// Appends tokens in every layer and commits, without attention.
pub(crate) fn append_step(
    cache: &mut Cache,
    batch: &[(SeqHandle, u32)],
    tags: &[u64],
) -> Result<(), CacheError> {
    let geometry = cache.plan().geometry.clone();
    let mut step = cache.reserve(batch)?;
    let positions = step.positions().to_vec();
    for layer in 0..geometry.num_layers {
        let (heads, dim) = (geometry.num_kv_heads, geometry.head_dim);
        let k = tensor(tags, &positions, layer, 0, heads, dim);
        let v = tensor(tags, &positions, layer, 1, heads, dim);
        step.append(LayerIdx(layer), TensorRef::F32(&k), TensorRef::F32(&v))?;
    }
    step.commit()
}

/// Reserves and commits without any K or V: for tests of the bookkeeping alone.
pub(crate) fn empty_step(cache: &mut Cache, batch: &[(SeqHandle, u32)]) -> Result<(), CacheError> {
    let layers = cache.plan().geometry.num_layers;
    let mut step = cache.reserve(batch)?;
    for layer in 0..layers {
        step.mark_appended(LayerIdx(layer))?;
    }
    step.commit()
}

/// Attention of one query and head in f64, from the contents themselves. `tags` are the tokens
/// of the sequence up to the query, which is the last.
pub(crate) fn naive_attention(
    geometry: &Geometry,
    tags: &[u64],
    layer: u32,
    q_head: u32,
    store: impl Fn(Kv, &[f32]) -> Vec<f32>,
) -> (Vec<f64>, f64) {
    let dim = geometry.head_dim;
    let kv_head = q_head / geometry.q_heads_per_kv_head();
    let row = |what: u64, position: u32, head: u32| -> Vec<f32> {
        let tag = tags[position as usize];
        (0..dim).map(|d| element(tag, position, layer, what, head, d)).collect()
    };
    let position = tags.len() as u32 - 1;
    let q = row(2, position, q_head);
    // A key is seen when it is one of the `window` latest, the query's own included, or a sink.
    let window = geometry.windows[layer as usize];
    let seen = |key: &u32| window == 0 || position - key < window || *key < geometry.sink_tokens;
    let keys: Vec<u32> = (0..=position).filter(seen).collect();
    let scores: Vec<f64> = keys
        .iter()
        .map(|key| {
            let k = store(Kv::K, &row(0, *key, kv_head));
            let dot: f64 = q.iter().zip(&k).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
            dot / f64::from(dim).sqrt()
        })
        .collect();
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = scores.iter().map(|score| (score - max).exp()).sum();
    let mut out = vec![0.0; dim as usize];
    for (key, score) in keys.iter().zip(&scores) {
        let v = store(Kv::V, &row(1, *key, kv_head));
        let p = (score - max).exp() / sum;
        for (out, v) in out.iter_mut().zip(&v) {
            *out += p * f64::from(*v);
        }
    }
    (out, max + sum.ln())
}

/// Compares bits, so that NaN equals NaN and -0 does not equal 0.
pub(crate) fn assert_same_bits(a: &[f32], b: &[f32], what: &str) {
    assert_eq!(a.len(), b.len(), "{what}: lengths");
    for (i, (x, y)) in a.iter().zip(b).enumerate() {
        assert_eq!(x.to_bits(), y.to_bits(), "{what}: element {i}: {x} and {y}");
    }
}

/// Begins a sequence with a prompt of `len` tokens and the plan's own limit.
pub(crate) fn begin(cache: &mut Cache, len: u32) -> SeqHandle {
    begin_with(cache, len, None).expect("admitted")
}

/// Begins a sequence that may have `max_len` tokens.
pub(crate) fn begin_with(
    cache: &mut Cache,
    len: u32,
    max_len: Option<u32>,
) -> Result<SeqHandle, CacheError> {
    let options = kvpool::cache::BeginOptions { max_len, ..Default::default() };
    Ok(cache.begin(&vec![0; len as usize], options)?.sequence)
}

/// Asserts that a call is refused, and that the refusal leaves no trace (P4).
pub(crate) fn assert_refused<T>(
    cache: &mut Cache,
    call: impl FnOnce(&mut Cache) -> Result<T, CacheError>,
) -> CacheError {
    let before = cache.state_digest();
    let Err(error) = call(cache).map(|_| ()) else { panic!("the call was not refused") };
    assert_eq!(cache.state_digest(), before, "{error}: the refusal left a trace");
    cache.check_invariants().expect("invariants");
    error
}
