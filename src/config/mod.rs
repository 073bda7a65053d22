//! The TOML file as its author wrote it.
//!
//! These are plain serde structs: unknown keys are refused, and nothing is computed here. A file
//! goes through [`load`] (or [`parse`]), which reports every mistake with its file, line and key,
//! and from there to [`crate::plan::Plan::new`], which does all the arithmetic. Code below the
//! plan never reads a `Config`.

mod capacity;
mod check;
mod complaint;
mod cost;
mod generate;
mod hf;
mod job;
mod keys;
mod length;
mod load;
mod locate;
mod model;
pub mod model_file;
mod names;
mod overlay;
mod presets;
mod rope;
mod sweep;
#[cfg(test)]
pub(crate) mod trickle;
mod variant;
mod workload;

pub use check::{Invalid, MAX_TOKENS_PER_BLOCK, MIN_TOKENS_PER_BLOCK, contiguous_set, verify};
pub use cost::{CostConfig, GoalsConfig};
pub use generate::{GenerateConfig, GenerateEngine, MAX_ANSWERS};
pub use length::LengthDistribution;
pub use load::{Source, load, parse};
pub use model::Geometry;
pub use model_file::{Architecture, ModelFile, ModelFormat};
pub use presets::{PRESETS, Preset};
pub use rope::{RopeConfig, RopeScaling, RopeStyle};
pub use sweep::SweepConfig;
pub use variant::VariantConfig;
pub use workload::{ArrivalUnit, Arrivals, ColumnsConfig, Compute, WorkloadConfig, WorkloadKind};

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// One whole configuration file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// The model's attention geometry.
    pub model: ModelConfig,
    /// The largest sequences and batches.
    pub limits: LimitsConfig,
    /// How keys and values are kept.
    pub cache: CacheConfig,
    /// Rotary position encoding of K on its way into the cache; none without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rope: Option<RopeConfig>,
    /// How much is allocated.
    #[serde(default)]
    pub pool: PoolConfig,
    /// Where it is allocated, and what computes.
    #[serde(default)]
    pub device: DeviceConfig,
    /// What `kvpool run` drives through the cache; a file without it is for `plan` and for the
    /// library.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workload: Option<WorkloadConfig>,
    /// Prompts that `kvpool run` has the model of `model.file` complete, in the place of a
    /// workload.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generate: Option<GenerateConfig>,
    /// How long a step takes on the simulated clock of a job that computes nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<CostConfig>,
    /// What a request must keep to count as served well.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub goals: Option<GoalsConfig>,
    /// The variants that `kvpool run` compares; none means the file itself is the only one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub variant: Vec<VariantConfig>,
    /// More variants: the products of lists.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sweep: Vec<SweepConfig>,
}

/// `[model]`: exactly one of a preset, a Hugging Face `config.json`, a file with the model's
/// weights, or the numbers themselves.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelConfig {
    /// The name of a built-in model, as `kvpool presets` lists them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preset: Option<String>,
    /// A Hugging Face `config.json`; a relative path starts from the folder of the TOML file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hf_config: Option<PathBuf>,
    /// A file with the model's weights, GGUF or llama2.c's legacy export; a relative path starts
    /// from the folder of the TOML file. It says how K is rotated, too, so that `[rope]` is not
    /// needed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<PathBuf>,
    /// The tokenizer of a file of llama2.c's, which has none inside; a relative path starts from
    /// the folder of the TOML file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<PathBuf>,
    /// Transformer layers that keep K and V.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub num_layers: Option<u32>,
    /// Query heads in a layer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub num_q_heads: Option<u32>,
    /// Key/value heads in a layer; divides `num_q_heads`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub num_kv_heads: Option<u32>,
    /// Elements of one head's key or value vector; a multiple of 8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub head_dim: Option<u32>,
    /// How many keys a query may see, itself included; 0 = all. One entry, or a pattern that is
    /// repeated over the layers, or one entry a layer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attention_window: Option<Vec<u32>>,
    /// How many tokens at the start of a sequence stay visible to every query of a windowed
    /// layer (attention sinks).
    #[serde(default)]
    pub sink_tokens: u32,
}

/// `[limits]`: what the pool must be able to hold.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LimitsConfig {
    /// Sequences alive at once.
    pub max_seqs: u32,
    /// Tokens of the longest sequence, prompt and output together.
    pub max_seq_len: u32,
    /// Tokens of one step, over all its sequences.
    pub max_batch_tokens: u32,
    /// Tokens of one sequence in one step. Default: `max_batch_tokens`, or the smallest attention
    /// window or `max_seq_len` where that is less.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_step_tokens: Option<u32>,
    /// How far `truncate` can always rewind in layers with an attention window, in tokens. Layers
    /// without one can be rewound to any length.
    #[serde(default)]
    pub max_rewind_tokens: u32,
}

/// `[cache]`: how keys and values are kept.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CacheConfig {
    /// Which layers are contiguous and which are paged.
    pub mode: CacheMode,
    /// Tokens of one block: 8, 16, 32, 64 or 128. Contiguous layers do not use it.
    #[serde(default = "default_tokens_per_block")]
    pub tokens_per_block: u32,
    /// How an element is stored.
    #[serde(default)]
    pub format: Format,
    /// What is promised to a sequence when it begins.
    #[serde(default)]
    pub admission: Admission,
    /// `max-utilization` only: blocks of each paged layer group that `begin` leaves free, so that
    /// the sequences that run already have room to grow before one must be preempted.
    #[serde(default)]
    pub watermark_blocks: u32,
    /// Whether a sequence that begins takes over what the cache already has of its prompt, and
    /// whether full blocks are kept for that after their sequence is released. They are memory
    /// that any sequence can have: they are evicted when blocks are needed. Off, nothing is kept
    /// and nothing is looked up.
    #[serde(default = "default_prefix_reuse")]
    pub prefix_reuse: bool,
    /// How many events (a block stored for reuse, removed, all cleared) are kept for
    /// `poll_events`; the oldest are lost when there are more. 0 keeps none.
    #[serde(default)]
    pub event_buffer: u32,
    /// Settings of the `int8` format; refused with any other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub int8: Option<Int8Config>,
    /// Settings of the `hybrid` mode; refused with any other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hybrid: Option<HybridConfig>,
}

/// The size of a block when the file does not say.
fn default_tokens_per_block() -> u32 {
    16
}

/// Prefixes are shared unless the file says otherwise: the answers are the same bits either way.
fn default_prefix_reuse() -> bool {
    true
}

/// Which layers keep their keys and values in one run, and which in blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CacheMode {
    /// Every layer: one run of memory for each sequence slot.
    Contiguous,
    /// Every layer: blocks, found through a block table.
    Paged,
    /// Some layers one way and some the other.
    Hybrid,
    /// The baseline of jobs: each request gets one run of memory as long as it will be, the first
    /// that is free, as it was before paging. It is simulated; there is no such plan.
    Dynamic,
}

/// How an element of K or V is stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// IEEE single precision, 4 bytes.
    F32,
    /// IEEE half precision, 2 bytes.
    #[default]
    F16,
    /// bfloat16, 2 bytes.
    Bf16,
    /// Signed 8-bit integers with scales.
    Int8,
}

/// What `begin` promises a sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Admission {
    /// Every block up to the sequence's declared length: what is admitted finishes.
    #[default]
    Guaranteed,
    /// Nothing: blocks are taken step by step, and a step may find none left. More sequences run
    /// at once; the engine must be ready to preempt.
    MaxUtilization,
    /// Every block up to the sequence's declared length, as [`Admission::Guaranteed`]; and once a
    /// step was committed, nobody joins until all of the batch have been released.
    StaticBatch,
}

/// `[cache.int8]`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Int8Config {
    /// What shares one scale.
    #[serde(default)]
    pub scale: ScaleKind,
    /// `per-tensor` only: the scale of K, one or one a layer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub k_scale: Option<StaticScale>,
    /// `per-tensor` only: the scale of V, one or one a layer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub v_scale: Option<StaticScale>,
}

/// What shares one INT8 scale.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ScaleKind {
    /// One token's vector in one KV head; the scale is computed on append and lies in the block.
    #[default]
    PerTokenHead,
    /// 32 consecutive elements of such a vector.
    #[serde(rename = "per-group-32")]
    PerGroup32,
    /// A whole layer's K or V; the scales are given in the file.
    PerTensor,
}

/// A static scale: one for all layers, or one a layer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum StaticScale {
    /// The same for every layer.
    One(f32),
    /// One entry a layer.
    PerLayer(Vec<f32>),
}

/// `[cache.hybrid]`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HybridConfig {
    /// The layers that are contiguous; the others are paged.
    #[serde(default)]
    pub contiguous_layers: ContiguousLayers,
}

/// Names the contiguous layers of a hybrid plan.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum ContiguousLayers {
    /// `"windowed"`, `"first:4"` or `"0..4"` (the end is not included).
    Named(String),
    /// The layers themselves, counted from 0.
    List(Vec<u32>),
}

impl Default for ContiguousLayers {
    fn default() -> Self {
        Self::Named("windowed".to_owned())
    }
}

/// `[pool]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PoolConfig {
    /// `"worst-case"`, `"tokens:N"`, `"blocks:N"` or `"budget:SIZE"`.
    #[serde(default)]
    pub capacity: Capacity,
    /// The length that sequences typically reach, in tokens; default `limits.max_seq_len`. Where a
    /// plan has paged layers with and without a window, it divides `tokens:N` or `budget:SIZE`
    /// between them: short sequences need as many blocks of either kind, long ones far fewer of
    /// the windowed kind.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub typical_seq_len: Option<u32>,
    /// When the bytes of K, V and scales that nobody holds any more are zeroed.
    #[serde(default)]
    pub scrub: Scrub,
}

impl Default for PoolConfig {
    fn default() -> Self {
        Self { capacity: Capacity::WorstCase, typical_seq_len: None, scrub: Scrub::Off }
    }
}

/// When released bytes are zeroed. What is kept for reuse has not been released: it is when it is
/// evicted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Scrub {
    /// Never: they stay until they are overwritten. No verb shows them.
    #[default]
    Off,
    /// By the verb that releases them.
    OnRelease,
    /// By the verb that gives them to another sequence.
    OnReuse,
}

/// How much the pool holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Capacity {
    /// `max_seqs` sequences of `max_seq_len` tokens in every layer.
    #[default]
    WorstCase,
    /// This many tokens in every layer, over all sequences, but no more than the worst case.
    Tokens(u64),
    /// This many blocks in every paged layer group.
    Blocks(u64),
    /// As much as fits in this many bytes, but no more than the worst case.
    Budget(crate::units::Bytes),
    /// As much as fits in so many hundredths of the memory that the device has free, but no more
    /// than the worst case. [`resolve_budget`](crate::device::resolve_budget) turns it into bytes,
    /// once, before the plan is made.
    BudgetPercent(u8),
}

/// `[device]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceConfig {
    /// What holds the pool and computes.
    #[serde(default)]
    pub kind: DeviceKind,
    /// `cuda` only: which GPU, in the driver's order, counted from 0.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub ordinal: u32,
    /// CPU worker threads, the calling one included; 0 = one for each core.
    #[serde(default)]
    pub threads: u32,
    /// Which implementation of the CPU kernels.
    #[serde(default)]
    pub kernel: KernelChoice,
    /// The most memory that the pool and its bookkeeping may take, on a GPU the pool and its
    /// workspace; without it, what the machine or the GPU has available.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "size_option")]
    pub memory_limit: Option<crate::units::Bytes>,
}

impl Default for DeviceConfig {
    fn default() -> Self {
        Self {
            kind: DeviceKind::Cpu,
            ordinal: 0,
            threads: 0,
            kernel: KernelChoice::Auto,
            memory_limit: None,
        }
    }
}

/// What holds the pool and computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceKind {
    /// Host memory and the host's cores.
    #[default]
    Cpu,
    /// An NVIDIA GPU.
    Cuda,
}

/// Which implementation of the CPU kernels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KernelChoice {
    /// The fastest that this CPU has.
    #[default]
    Auto,
    /// Scalar, in f64, obvious: the truth that the others are tested against.
    Reference,
    /// Vectorised by the compiler for the build's baseline instruction set.
    Portable,
    /// Vectorised for AVX2 and FMA.
    Avx2,
    /// Vectorised for AVX-512.
    Avx512,
    /// The same, with queries and weights rounded to bfloat16 where K and V are bfloat16: faster,
    /// and less exact by as much as storing them is. Never chosen by `auto`.
    #[serde(rename = "avx512-bf16")]
    Avx512Bf16,
}

/// Whether a number is its default.
fn is_zero(number: &u32) -> bool {
    *number == 0
}

/// Reads and writes an optional size as a number or as a string with a unit.
mod size_option {
    use serde::{Deserializer, Serializer};

    use crate::units::Bytes;

    pub(super) fn serialize<S: Serializer>(
        size: &Option<Bytes>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        match size {
            Some(bytes) => serializer.serialize_u64(bytes.get()),
            None => serializer.serialize_none(),
        }
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<Bytes>, D::Error> {
        super::load::size(deserializer).map(Some)
    }
}
