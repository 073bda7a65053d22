//! `kvpool bench cost`: the cache's part of `[cost]` on this machine's CPU, for the model, format
//! and mode of a file.
//!
//! A few kinds of steps are timed on a cache with a few of the model's layers: one decoding
//! sequence with nearly no context, several with longer ones, and chunks of a prompt. The three
//! constants are those with which the cost model is nearest to all of them, and how far it is off
//! is printed: it knows nothing of a processor's caches, nor that a token of a prompt takes longer
//! the more stands before it. What is timed are the cache's verbs on the CPU: a model's own
//! arithmetic is not in it.

use std::time::Instant;

use super::read_gbps;
use crate::cache::{AttendOptions, BeginOptions, Cache, SeqHandle};
use crate::config::{
    Admission, CacheMode, Capacity, Config, DeviceKind, Geometry, Source, StaticScale,
};
use crate::error::{CacheError, JobError};
use crate::plan::Plan;
use crate::units::LayerIdx;

/// The most layers that are opened; times are multiplied up to the model's.
const MOST_LAYERS: u32 = 4;
/// Sequences that decode together.
const SEQS: u32 = 8;
/// The longest context.
const CONTEXT: u32 = 2048;
/// Tokens of a chunk of a prompt.
const CHUNK: u32 = 256;
/// Steps of each kind; the median counts.
const STEPS: usize = 41;

/// What was measured, for the model's number of layers.
#[derive(Clone, Debug)]
pub struct Cost {
    /// Bytes a second that attention reads of K and V; 10⁹.
    pub gbps: f64,
    /// Bytes a second that plain loads read.
    pub dram_gbps: f64,
    /// `cost.step_us`.
    pub step_us: f64,
    /// `cost.token_us`.
    pub token_us: f64,
    /// The kinds of steps.
    pub steps: Vec<TimedStep>,
    /// What computed: `cpu/avx512`, …
    pub device: String,
    /// Threads that computed.
    pub threads: u32,
    /// Layers that were open.
    pub layers: u32,
    /// Layers of the model.
    pub model_layers: u32,
}

/// One kind of step.
#[derive(Clone, Copy, Debug, Default)]
pub struct TimedStep {
    /// Sequences in it.
    pub seqs: u32,
    /// New tokens of each.
    pub rows: u32,
    /// Tokens of each before it.
    pub context: u32,
    /// The median time, for the model's layers.
    pub us: f64,
    /// What the cost model says of it.
    pub model_us: f64,
}

impl TimedStep {
    fn tokens(&self) -> f64 {
        f64::from(self.seqs) * f64::from(self.rows)
    }

    /// Bytes that the step reads and writes, as the simulated clock counts them.
    fn bytes(&self, per_token: f64) -> f64 {
        let moved = f64::from(self.context) + 2.0 * f64::from(self.rows);
        f64::from(self.seqs) * moved * per_token
    }
}

/// Measures.
///
/// # Errors
/// [`JobError::CpuAlone`] for a file that names another device; a cache that cannot be opened here.
pub fn run(source: &Source) -> Result<Cost, JobError> {
    if source.config.device.kind != DeviceKind::Cpu {
        return Err(JobError::CpuAlone { path: source.path.clone() });
    }
    let variant = || "bench cost".to_owned();
    let (config, geometry) = reduced(source);
    let open = |source| JobError::Open { variant: variant(), source };
    let plan = Plan::new(&config, &geometry).map_err(|error| open(error.into()))?;
    let cache = Cache::open_on_device(plan, &config.device, None).map_err(open)?;
    let device = cache.device_info();
    let read = || read_gbps(device.threads).map_err(|error| open(error.into()));
    let dram_gbps = read()?;
    let failed = |source: CacheError| JobError::Cache { variant: variant(), source };
    let mut rig = Rig::new(cache);
    let mut steps = rig.time().map_err(failed)?;
    let model_layers = source.geometry.num_layers;
    let scale = f64::from(model_layers) / f64::from(geometry.num_layers);
    let per_token = bytes_per_token(&rig.cache) * scale;
    for step in &mut steps {
        step.us *= scale;
    }
    let [step_us, token_us, us_per_byte] = fit(&steps, per_token);
    for step in &mut steps {
        step.model_us = step_us + token_us * step.tokens() + us_per_byte * step.bytes(per_token);
    }
    Ok(Cost {
        gbps: 1e-3 / us_per_byte,
        // If the memory for it is gone meanwhile, the first one is what there is.
        dram_gbps: read().map_or(dram_gbps, |last| dram_gbps.max(last)),
        step_us,
        token_us,
        steps,
        device: format!("{}/{}", device.kind, device.kernel),
        threads: device.threads,
        layers: geometry.num_layers,
        model_layers,
    })
}

/// The file's cache with few layers and sequences, and without what has no part in a step's time.
fn reduced(source: &Source) -> (Config, Geometry) {
    let mut config = source.config.clone();
    (config.workload, config.generate, config.cost, config.goals) = (None, None, None, None);
    (config.variant, config.sweep) = (Vec::new(), Vec::new());
    let context = CONTEXT.min(config.limits.max_seq_len.saturating_sub(2 * CHUNK)).max(64);
    config.limits.max_seqs = SEQS;
    config.limits.max_seq_len = context + 2 * CHUNK;
    config.limits.max_batch_tokens = CHUNK.max(SEQS);
    config.limits.max_step_tokens = Some(CHUNK);
    config.pool.capacity = Capacity::WorstCase;
    config.pool.typical_seq_len = None;
    // Rings are as long as contexts where no layer has a window.
    config.limits.max_rewind_tokens = 0;
    config.cache.prefix_reuse = false;
    config.cache.event_buffer = 0;
    config.cache.admission = Admission::Guaranteed;
    config.cache.watermark_blocks = 0;
    config.device.memory_limit = None;
    config.cache.hybrid = None;
    if config.cache.mode != CacheMode::Contiguous {
        // Layers with windows and without are timed alike: the clock knows what each reads.
        config.cache.mode = CacheMode::Paged;
    }
    let mut geometry = source.geometry.clone();
    geometry.num_layers = geometry.num_layers.min(MOST_LAYERS);
    let layers = geometry.num_layers as usize;
    geometry.windows = vec![0; layers];
    geometry.sink_tokens = 0;
    if let Some(rope) = &mut config.rope {
        rope.window_theta = None;
    }
    let int8 = config.cache.int8.iter_mut();
    for scale in int8.flat_map(|int8| [&mut int8.k_scale, &mut int8.v_scale]) {
        if let Some(StaticScale::PerLayer(scales)) = scale {
            scales.truncate(layers);
        }
    }
    (config, geometry)
}

fn bytes_per_token(cache: &Cache) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
    let bytes = cache.plan().bytes_per_token.get() as f64;
    bytes
}

/// The constants with which the cost model is nearest to these times: microseconds of a step, of a
/// token, of a byte. None is below 0. An error counts by the root of its time: long steps make up
/// most of a job's time, and yet are not all that there is.
fn fit(steps: &[TimedStep], per_token: f64) -> [f64; 3] {
    // What each constant is multiplied by, and what should come out.
    let rows: Vec<[f64; 3]> = steps
        .iter()
        .map(|step| {
            [1.0, step.tokens(), step.bytes(per_token)].map(|factor| factor / step.us.sqrt())
        })
        .collect();
    let mut constants = [0.0; 3];
    // One constant at a time, as well as the others allow; the sum of squares only ever falls.
    for round in 0..60_000 {
        let own = round % 3;
        let (mut above, mut below) = (0.0, 0.0);
        for (row, step) in rows.iter().zip(steps) {
            let others: f64 =
                (0..3).filter(|at| *at != own).map(|at| row[at] * constants[at]).sum();
            above += row[own] * (step.us.sqrt() - others);
            below += row[own] * row[own];
        }
        constants[own] = (above / below).max(0.0);
    }
    constants[2] = constants[2].max(1e-9);
    constants
}

/// A cache with sequences, and tensors for its steps.
struct Rig {
    cache: Cache,
    seqs: Vec<SeqHandle>,
    context: u32,
    k: Vec<f32>,
    q: Vec<f32>,
    out: Vec<f32>,
}

impl Rig {
    fn new(cache: Cache) -> Self {
        let plan = cache.plan();
        let Geometry { num_q_heads, num_kv_heads, head_dim, .. } = plan.geometry;
        let tokens = plan.limits.max_batch_tokens;
        let context = plan.limits.max_seq_len - 2 * CHUNK;
        let some = |elements: u32| -> Vec<f32> {
            (0..elements)
                .map(|i| f32::from(u8::try_from(i % 251).unwrap_or(0)) / 64.0 - 2.0)
                .collect()
        };
        let k = some(tokens * num_kv_heads * head_dim);
        let q = some(tokens * num_q_heads * head_dim);
        let out = vec![0.0; q.len()];
        Self { cache, seqs: Vec::new(), context, k, q, out }
    }

    /// Times every kind of step.
    fn time(&mut self) -> Result<Vec<TimedStep>, CacheError> {
        let context = self.context;
        for _ in 0..SEQS {
            let max_len = Some(self.cache.plan().limits.max_seq_len);
            let options = BeginOptions { max_len, ..BeginOptions::default() };
            self.seqs.push(self.cache.begin(&[1], options)?.sequence);
        }
        let kinds = [
            (1, 1, 16),
            (SEQS, 1, context),
            (1, CHUNK, context / 4),
            (SEQS / 2, 1, context / 2),
            (1, CHUNK / 2, context / 2),
        ];
        let mut steps = Vec::new();
        for (seqs, rows, context) in kinds {
            for at in 0..seqs as usize {
                self.fill(self.seqs[at], context)?;
            }
            let mut times: Vec<f64> = Vec::new();
            for _ in 0..STEPS {
                times.push(self.step(seqs, rows)?);
                for at in 0..seqs as usize {
                    self.cache.truncate(self.seqs[at], context)?;
                }
            }
            times.sort_by(f64::total_cmp);
            let us = times[times.len() / 2];
            steps.push(TimedStep { seqs, rows, context, us, model_us: 0.0 });
        }
        Ok(steps)
    }

    /// Makes a sequence this long.
    fn fill(&mut self, seq: SeqHandle, len: u32) -> Result<(), CacheError> {
        let now = self.cache.seq_len(seq)?;
        if now > len {
            return self.cache.truncate(seq, len);
        }
        let mut left = len - now;
        while left > 0 {
            let rows = left.min(CHUNK);
            let Self { cache, k, .. } = self;
            let mut step = cache.reserve(&[(seq, rows)])?;
            let Geometry { num_layers, num_kv_heads, head_dim, .. } = step.plan().geometry;
            let kv = (rows * num_kv_heads * head_dim) as usize;
            for layer in (0..num_layers).map(LayerIdx) {
                step.append(layer, k[..kv].into(), k[..kv].into())?;
            }
            step.commit()?;
            left -= rows;
        }
        Ok(())
    }

    /// One step of the first sequences, in microseconds.
    fn step(&mut self, seqs: u32, rows: u32) -> Result<f64, CacheError> {
        let wanted: Vec<(SeqHandle, u32)> =
            self.seqs[..seqs as usize].iter().map(|seq| (*seq, rows)).collect();
        let Self { cache, k, q, out, .. } = self;
        let geometry = cache.plan().geometry.clone();
        let rows = (seqs * rows) as usize;
        let kv = rows * (geometry.num_kv_heads * geometry.head_dim) as usize;
        let qs = rows * (geometry.num_q_heads * geometry.head_dim) as usize;
        let began = Instant::now();
        let mut step = cache.reserve(&wanted)?;
        for layer in (0..geometry.num_layers).map(LayerIdx) {
            step.append(layer, k[..kv].into(), k[..kv].into())?;
            let out = (&mut out[..qs]).into();
            step.attend(layer, q[..qs].into(), out, AttendOptions::default())?;
        }
        step.commit()?;
        Ok(began.elapsed().as_secs_f64() * 1e6)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::config::{load, parse};

    /// Every file that is there, and settings that the reduced cache cannot have.
    #[test]
    fn every_good_file_can_be_measured() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs");
        let all = ["", "claims", "replay"].map(|name| std::fs::read_dir(folder.join(name)));
        let all = all.into_iter().flat_map(|entries| entries.expect("a folder"));
        let paths = all.map(|entry| entry.expect("an entry").path());
        let mut sources: Vec<Source> = paths
            .filter(|path| path.extension().is_some_and(|kind| kind == "toml"))
            .map(|path| load(&path, &[]).unwrap_or_else(|error| panic!("{error}")))
            .collect();
        assert!(sources.len() > 20);
        let scales = "[0.1, 0.2, 0.3, 0.4, 0.5, 0.6]";
        for more in [
            "cache.event_buffer = 4096".to_owned(),
            "limits.max_rewind_tokens = 3000".to_owned(),
            format!(
                "cache.format = 'int8'\ncache.int8.scale = 'per-tensor'\n\
                 cache.int8.k_scale = {scales}\ncache.int8.v_scale = {scales}"
            ),
            "model.attention_window = [64, 0]\nmodel.sink_tokens = 4\nrope.theta = 1e6\n\
             rope.window_theta = 1e4"
                .to_owned(),
        ] {
            let text = format!(
                "{more}
                model.num_layers = 6
                model.num_q_heads = 4
                model.num_kv_heads = 2
                model.head_dim = 64
                limits.max_seqs = 2
                limits.max_seq_len = 4096
                limits.max_batch_tokens = 256
                cache.mode = 'paged'"
            );
            let source = parse(&text, Path::new("t.toml"), &[]);
            sources.push(source.unwrap_or_else(|error| panic!("{error}")));
        }
        for source in &sources {
            let (config, geometry) = reduced(source);
            if let Err(error) = Plan::new(&config, &geometry) {
                panic!("{}: {error}", source.path.display());
            }
        }
    }

    #[test]
    fn a_gpu_is_not_taken_for_the_cpu() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/quickstart.toml");
        let source = load(&path, &["device.kind=cuda".to_owned()]).expect("there");
        let error = run(&source).expect_err("not measured").to_string();
        assert!(error.contains("measures the CPU alone"), "{error}");
    }

    #[test]
    fn the_constants_give_the_times_that_they_were_made_from() {
        let kind = |seqs, rows, context| TimedStep { seqs, rows, context, ..TimedStep::default() };
        let mut steps = [kind(1, 1, 16), kind(8, 1, 2048), kind(1, 256, 512)];
        let per_token = 4096.0;
        for step in &mut steps {
            step.us = 12.0 + 1.5 * step.tokens() + step.bytes(per_token) / 2e4;
        }
        let [step_us, token_us, us_per_byte] = fit(&steps, per_token);
        assert!((step_us - 12.0).abs() < 0.1, "{step_us}");
        assert!((token_us - 1.5).abs() < 0.01 && (us_per_byte * 2e4 - 1.0).abs() < 0.01);
        // What is not so is met as well as may be, and never with a constant below 0.
        steps[2].us /= 1e3;
        assert!(fit(&steps, per_token).iter().all(|constant| *constant >= 0.0));
    }
}
