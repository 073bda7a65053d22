//! Decode, append and prefill: the cases and how one is measured.

use std::fmt::Write as _;
use std::path::Path;
use std::time::{Duration, Instant};

use super::deviation::Right;
use super::dram::Passes;
use super::inputs::{FILL_TOKENS, Inputs, tokens_a_step};
use super::{BenchError, Measurement, Options};
use crate::cache::{AttendOptions, BeginOptions, Cache, SeqHandle};
use crate::config::{CacheMode, Format, Source, parse};
use crate::device::{TensorMut, TensorRef};
use crate::error::{CacheError, OpenError};
use crate::plan::{Kv, Plan};
use crate::units::LayerIdx;

/// Which verb is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Attention of one new token of each sequence.
    Decode,
    /// Storing K and V of new tokens.
    Append,
    /// Attention of many new tokens of each sequence.
    Prefill,
}

/// One shape: heads, sequences, tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Which verb is timed.
    pub operation: Operation,
    /// Query heads.
    pub num_q_heads: u32,
    /// KV heads.
    pub num_kv_heads: u32,
    /// Elements of a vector.
    pub head_dim: u32,
    /// Sequences.
    pub num_seqs: u32,
    /// Tokens of each sequence before the step.
    pub cached: u32,
    /// Tokens of each sequence in the step.
    pub rows: u32,
}

/// A format in a mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Variant {
    /// The format.
    pub format: Format,
    /// The mode.
    pub mode: CacheMode,
}

/// The shapes of an operation: those that the peers were measured at, in layers of models that
/// people run.
#[must_use]
pub fn shapes(operation: Operation) -> Vec<Shape> {
    let shape = |num_q_heads, num_kv_heads, num_seqs, cached, rows| Shape {
        operation,
        num_q_heads,
        num_kv_heads,
        head_dim: 128,
        num_seqs,
        cached,
        rows,
    };
    match operation {
        // The context counts the new token.
        Operation::Decode => vec![
            shape(32, 8, 1, 4095, 1),
            shape(32, 8, 1, 32767, 1),
            shape(32, 8, 16, 2047, 1),
            shape(32, 32, 1, 2047, 1),
            shape(32, 32, 8, 2047, 1),
        ],
        Operation::Append => vec![shape(32, 8, 1, 0, 16), shape(32, 8, 1, 0, 512)],
        Operation::Prefill => vec![shape(32, 8, 1, 0, 512), shape(32, 8, 1, 4096, 512)],
    }
}

impl Shape {
    /// The name in reports: operation, heads, sequences × tokens.
    #[must_use]
    pub fn name(&self) -> String {
        let heads = format!("q{}kv{}d{}", self.num_q_heads, self.num_kv_heads, self.head_dim);
        let context = self.cached + self.rows;
        match self.operation {
            Operation::Decode => format!("decode/{heads}/{}x{context}", self.num_seqs),
            Operation::Append => format!("append/{heads}/{}", self.rows),
            Operation::Prefill => format!("prefill/{heads}/{}+{}", self.cached, self.rows),
        }
    }

    /// Multiplications and additions of one call, two for each pair: q·k and p·v over all keys
    /// that each query sees.
    fn flops(&self) -> f64 {
        if self.operation == Operation::Append {
            return 0.0;
        }
        let (cached, rows) = (f64::from(self.cached), f64::from(self.rows));
        let keys = rows * cached + rows * (rows + 1.0) / 2.0;
        let heads = f64::from(self.num_q_heads) * f64::from(self.num_seqs);
        4.0 * keys * heads * f64::from(self.head_dim)
    }

    /// Tokens whose K and V one call must read, or write, at least once.
    fn tokens(&self) -> u64 {
        let per_seq = match self.operation {
            Operation::Append => self.rows,
            Operation::Decode | Operation::Prefill => self.cached + self.rows,
        };
        u64::from(self.num_seqs) * u64::from(per_seq)
    }
}

/// An open cache with its sequences at the point before the timed step.
struct Case {
    cache: Cache,
    seqs: Vec<(SeqHandle, u32)>,
    variant: Variant,
    num_layers: u32,
}

/// Layers of an append case.
const APPEND_LAYERS: u64 = 16;

/// The configuration of one variant of a shape, and its layers.
fn configuration(
    shape: &Shape,
    variant: Variant,
    options: &Options,
    threads: u32,
) -> (Source, u32) {
    let Variant { format, mode } = variant;
    let row_bytes = u64::from(shape.head_dim) * if format == Format::Int8 { 1 } else { 2 };
    let token_bytes = 2 * u64::from(shape.num_kv_heads) * row_bytes;
    let (num_layers, context) = match shape.operation {
        // Few layers and a long sequence: every step writes to places that no cache holds.
        Operation::Append => {
            let tokens = options.layer_bytes() / (APPEND_LAYERS * token_bytes);
            (APPEND_LAYERS, tokens.clamp(u64::from(shape.rows) * 2, 1 << 20))
        }
        Operation::Decode | Operation::Prefill => {
            let layer_bytes = shape.tokens() * token_bytes;
            let layers = options.layer_bytes().div_ceil(layer_bytes).clamp(2, 512);
            (layers, u64::from(shape.cached + shape.rows))
        }
    };
    let num_layers = u32::try_from(num_layers).unwrap_or(2);
    let batch_tokens = (shape.rows * shape.num_seqs).max(FILL_TOKENS);
    let mut toml = format!(
        "[model]\nnum_layers = {num_layers}\nnum_q_heads = {}\nnum_kv_heads = {}\n\
             head_dim = {}\n[limits]\nmax_seqs = {}\nmax_seq_len = {context}\n\
             max_batch_tokens = {batch_tokens}\n[cache]\nmode = \"{mode}\"\nformat = \"{format}\"\n",
        shape.num_q_heads, shape.num_kv_heads, shape.head_dim, shape.num_seqs
    );
    if mode == CacheMode::Hybrid {
        // Writing to a String cannot fail.
        let _ = writeln!(toml, "hybrid.contiguous_layers = \"first:{}\"", num_layers / 2);
    }
    let _ = writeln!(toml, "[device]\nthreads = {threads}\nkernel = \"{}\"", options.kernel);
    // The text above is this function's own: that it parses is held by a test of every shape.
    let source = parse(&toml, Path::new("bench"), &[]).expect("a valid configuration");
    (source, num_layers)
}

impl Case {
    /// Opens and fills one variant of a shape.
    ///
    /// # Errors
    /// What the plan, the machine's memory or the device refuses.
    fn open(
        shape: &Shape,
        variant: Variant,
        options: &Options,
        threads: u32,
        inputs: &Inputs,
    ) -> Result<Self, OpenError> {
        let (source, num_layers) = configuration(shape, variant, options, threads);
        let plan = Plan::new(&source.config, &source.geometry)?;
        let mut cache = Cache::open_on_cpu(plan, &source.config.device, None)?;
        let seqs = fill(&mut cache, shape, num_layers, inputs).expect("the plan holds the shape");
        Ok(Self { cache, seqs, variant, num_layers })
    }
}

/// Gives each sequence its cached tokens, in blocks that a running server would have: one step
/// after the other over all sequences, so that neighbours in memory belong to different ones.
fn fill(
    cache: &mut Cache,
    shape: &Shape,
    num_layers: u32,
    inputs: &Inputs,
) -> Result<Vec<(SeqHandle, u32)>, CacheError> {
    let row = (shape.num_kv_heads * shape.head_dim) as usize;
    let seqs: Vec<SeqHandle> = (0..shape.num_seqs)
        .map(|_| cache.begin(&[], BeginOptions::default()).map(|begun| begun.sequence))
        .collect::<Result<_, _>>()?;
    let per_seq = tokens_a_step(shape);
    let mut done = 0;
    while done < shape.cached {
        let now = per_seq.min(shape.cached - done);
        let batch: Vec<_> = seqs.iter().map(|seq| (*seq, now)).collect();
        let mut step = cache.reserve(&batch)?;
        let (k, v) = inputs.kv(step.num_tokens(), row);
        for layer in 0..num_layers {
            step.append(LayerIdx(layer), k, v)?;
        }
        step.commit()?;
        done += now;
    }
    Ok(seqs.into_iter().map(|seq| (seq, shape.rows)).collect())
}

impl Case {
    /// One call of the shape's verb for one layer, timed. Layers take turns by `round`, so that
    /// calls come to bytes that no cache holds any more.
    fn turn(
        &mut self,
        operation: Operation,
        round: usize,
        inputs: &Inputs,
        out: &mut [f32],
    ) -> Result<Duration, CacheError> {
        let layer = u32::try_from(round).unwrap_or(0) % self.num_layers;
        let geometry = &self.cache.plan().geometry;
        let row = (geometry.num_kv_heads * geometry.head_dim) as usize;
        if operation == Operation::Append && layer == 0 {
            let (seq, rows) = self.seqs[0];
            if self.cache.seq_len(seq)? + rows > self.cache.seq_limit(seq)? {
                self.cache.truncate(seq, 0)?;
            }
        }
        let mut step = self.cache.reserve(&self.seqs)?;
        let (k, v) = inputs.kv(step.num_tokens(), row);
        let start = Instant::now();
        step.append(LayerIdx(layer), k, v)?;
        if operation == Operation::Append {
            let time = start.elapsed();
            if layer + 1 == self.num_layers {
                // On to the next places. What the other layers hold there does not matter.
                (0..layer).try_for_each(|other| step.mark_appended(LayerIdx(other)))?;
                step.commit()?;
            }
            return Ok(time);
        }
        let (q, out) = (TensorRef::F32(&inputs.q), TensorMut::F32(out));
        let start = Instant::now();
        step.attend(LayerIdx(layer), q, out, AttendOptions::default())?;
        Ok(start.elapsed())
    }

    /// A hash of what the verb gives in the first layer: outputs, or the keys that it stored.
    fn checksum(
        &mut self,
        operation: Operation,
        inputs: &Inputs,
        out: &mut [f32],
    ) -> Result<u64, CacheError> {
        if operation != Operation::Append {
            self.turn(operation, 0, inputs, out)?;
            return Ok(hash(out));
        }
        let (seq, rows) = self.seqs[0];
        self.cache.truncate(seq, 0)?;
        for round in 0..self.num_layers as usize {
            self.turn(operation, round, inputs, out)?;
        }
        let geometry = &self.cache.plan().geometry;
        let row = (geometry.num_kv_heads * geometry.head_dim) as usize;
        let mut stored = vec![0.0; rows as usize * row];
        // The last layer: the one that the step which was committed has appended.
        let last = LayerIdx(self.num_layers - 1);
        self.cache.export(seq, last, Kv::K, 0, rows, &mut stored)?;
        Ok(hash(&stored))
    }
}

/// One open variant, to be timed by somebody else: the criterion groups.
pub struct Session {
    case: Case,
    operation: Operation,
    inputs: Inputs,
    out: Vec<f32>,
    round: usize,
}

impl Session {
    /// Opens and fills one variant of a shape.
    ///
    /// # Errors
    /// What the plan, the machine's memory or the device refuses.
    pub fn open(
        shape: &Shape,
        variant: Variant,
        options: &Options,
        threads: u32,
    ) -> Result<Self, OpenError> {
        let inputs = Inputs::new(shape);
        let case = Case::open(shape, variant, options, threads, &inputs)?;
        let out = vec![0.0; inputs.q.len()];
        Ok(Self { case, operation: shape.operation, inputs, out, round: 0 })
    }

    /// The time that so many calls take together.
    ///
    /// # Errors
    /// A verb that is refused: a defect.
    pub fn time(&mut self, calls: u64) -> Result<Duration, CacheError> {
        let mut total = Duration::ZERO;
        for _ in 0..calls {
            total += self.case.turn(self.operation, self.round, &self.inputs, &mut self.out)?;
            self.round += 1;
        }
        Ok(total)
    }
}

/// Rounds that are not counted: they warm the code and the clock up.
const WARM_UP: usize = 2;

/// The least rounds that a median is taken over.
const ROUNDS_MIN: usize = 9;

/// A call so long is a turn by itself: threads that wake up do not tell.
const LONG: Duration = Duration::from_millis(20);

/// How long a turn of shorter calls takes, about.
const TURN: Duration = Duration::from_millis(5);

/// Calls of a turn that are counted, at most.
const CALLS_MAX: u32 = 8;

impl Case {
    /// The times of a turn: a call that wakes the threads up, which is not counted, and some that
    /// follow at once; or one that is long. `next`: the number of the next call.
    fn turns(
        &mut self,
        operation: Operation,
        next: &mut usize,
        inputs: &Inputs,
        out: &mut [f32],
    ) -> Result<Vec<f64>, CacheError> {
        let mut call = || {
            *next += 1;
            self.turn(operation, *next - 1, inputs, out)
        };
        let first = call()?;
        if first > LONG {
            return Ok(vec![first.as_secs_f64()]);
        }
        let calls = (TURN.as_nanos() / first.as_nanos().max(1)).clamp(1, CALLS_MAX.into());
        (0..calls).map(|_| Ok(call()?.as_secs_f64())).collect()
    }
}

/// Measures every variant of a shape, taking turns of a few calls.
///
/// # Errors
/// A variant that cannot be opened.
pub(super) fn measure(
    shape: &Shape,
    options: &Options,
    threads: u32,
) -> Result<Vec<Measurement>, BenchError> {
    let inputs = Inputs::new(shape);
    let mut cases = Vec::new();
    for &format in &options.formats {
        for &mode in &options.modes {
            let variant = Variant { format, mode };
            let case = Case::open(shape, variant, options, threads, &inputs)
                .map_err(|error| BenchError::of(error, shape, variant, options, threads))?;
            cases.push(case);
        }
    }
    let mut out = vec![0.0_f32; inputs.q.len()];
    let mut times = vec![Vec::new(); cases.len()];
    let dram = Passes::new(threads).map_err(|error| BenchError::of_probe(error, threads))?;
    let mut read = Vec::new();
    let start = Instant::now();
    let mut next = vec![0; cases.len()];
    let mut round = 0;
    while round < WARM_UP + ROUNDS_MIN || start.elapsed().as_secs_f64() < options.seconds {
        for ((case, times), next) in cases.iter_mut().zip(&mut times).zip(&mut next) {
            let timed = case.turns(shape.operation, next, &inputs, &mut out);
            let timed = timed.expect("the plan holds the shape");
            if round >= WARM_UP {
                times.extend(timed);
            }
        }
        // Of the others memory is not the limit, and a pass would drive their inputs out of the caches.
        if shape.operation == Operation::Decode {
            let gbps = dram.gbps();
            if round >= WARM_UP {
                read.push(gbps);
            }
        }
        round += 1;
    }
    if read.is_empty() {
        read.extend((0..ROUNDS_MIN).map(|_| dram.gbps()));
    }
    drop(dram);
    read.sort_by(f64::total_cmp);
    let right = Right::new(shape, &inputs);
    let mut measured = Vec::new();
    for (case, times) in cases.iter_mut().zip(times) {
        let checksum = case.checksum(shape.operation, &inputs, &mut out);
        let checksum = checksum.expect("the plan holds the shape");
        let error = right.as_ref().map(|right| right.error(&out));
        let summary = summary(shape, case, times, checksum);
        let dram_gbps = read[read.len() / 2];
        measured.push(Measurement {
            error,
            dram_gbps,
            dram_best_gbps: read[read.len() - 1],
            fraction: summary.gbps / dram_gbps,
            ..summary
        });
    }
    Ok(measured)
}

/// FNV-1a over the bits.
fn hash(values: &[f32]) -> u64 {
    values.iter().fold(0xCBF2_9CE4_8422_2325, |hash, value| {
        (hash ^ u64::from(value.to_bits())).wrapping_mul(0x0100_0000_01B3)
    })
}

fn summary(shape: &Shape, case: &Case, mut times: Vec<f64>, checksum: u64) -> Measurement {
    times.sort_by(f64::total_cmp);
    let median = times[times.len() / 2];
    let plan = case.cache.plan();
    let per_layer = plan.bytes_per_token.get() / u64::from(case.num_layers);
    #[expect(clippy::cast_precision_loss, reason = "sizes below 2^53")]
    let bytes = (shape.tokens() * per_layer) as f64;
    let device = case.cache.device_info();
    Measurement {
        shape: shape.name(),
        mode: case.variant.mode.name(),
        format: plan.format.name(),
        path: device.kernel,
        threads: device.threads,
        footprint_bytes: plan.pool_bytes.get(),
        median_us: median * 1e6,
        min_us: times[0] * 1e6,
        gbps: bytes / median / 1e9,
        dram_gbps: 0.0,
        dram_best_gbps: 0.0,
        fraction: 0.0,
        line_ns: None,
        gflops: shape.flops() / median / 1e9,
        calls: times.len(),
        error: None,
        checksum: format!("{checksum:016x}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `configuration` may expect its own text to be valid: here is every one of them.
    #[test]
    fn every_shape_has_a_plan() {
        for operation in [Operation::Decode, Operation::Append, Operation::Prefill] {
            for shape in shapes(operation) {
                for format in [Format::F32, Format::F16, Format::Bf16, Format::Int8] {
                    for mode in [CacheMode::Contiguous, CacheMode::Paged, CacheMode::Hybrid] {
                        let options = Options::of(operation, format, mode);
                        let variant = Variant { format, mode };
                        let (source, layers) = configuration(&shape, variant, &options, 2);
                        let plan = Plan::new(&source.config, &source.geometry).expect("a plan");
                        assert_eq!(plan.geometry.num_layers, layers);
                        // Twice the footprint for f32, which has no rule of its own; and never
                        // much less, or a cache could hold it.
                        let divisor = if operation == Operation::Prefill { 8 } else { 1 };
                        let least = (512 << 20) / divisor;
                        assert!(plan.pool_bytes.get() >= least * 9 / 10, "{}", shape.name());
                        assert!(plan.full_length_seqs >= shape.num_seqs, "{}", shape.name());
                    }
                }
            }
        }
    }

    /// Steps that fill are of different lengths here, and every sequence has keys of its own.
    #[test]
    fn results_err_as_their_formats_do() {
        let shape = Shape {
            num_q_heads: 4,
            num_kv_heads: 2,
            head_dim: 32,
            num_seqs: 3,
            cached: 700,
            ..shapes(Operation::Decode)[0]
        };
        for rows in [1, 5] {
            let shape = Shape { rows, ..shape };
            let mut options = Options::of(Operation::Decode, Format::F32, CacheMode::Paged);
            options.formats.push(Format::Int8);
            (options.seconds, options.footprint_bytes) = (0.0, 1 << 20);
            let measured = measure(&shape, &options, 1).expect("the machine has 2 MiB");
            let errors: Vec<f64> = measured.iter().filter_map(|one| one.error).collect();
            assert!(errors[0] < 1e-5 && 1e-4 < errors[1] && errors[1] < 0.1, "{errors:?}");
        }
        let append = shapes(Operation::Append)[0];
        assert!(Right::new(&append, &Inputs::new(&append)).is_none());
    }

    #[test]
    fn operations_are_counted() {
        let decode = shapes(Operation::Decode)[0];
        // 4,096 keys of 32 heads of 128: two multiplications and two additions each.
        assert_eq!(decode.flops(), 4.0 * 4096.0 * 32.0 * 128.0);
        let prefill = shapes(Operation::Prefill)[0];
        assert_eq!(prefill.flops(), 4.0 * (512.0 * 513.0 / 2.0) * 32.0 * 128.0);
        assert_eq!(shapes(Operation::Append)[0].flops(), 0.0);
    }
}
