//! One shape in one format and mode, open and filled.

use half::f16;
use kvpool::cache::{BeginOptions, Cache, SeqHandle, Step};
use kvpool::config::{CacheMode, Format, Source, parse};
use kvpool::plan::Plan;
use kvpool::units::LayerIdx;

use super::driver::{Memory, Stream};

/// Elements of a vector.
pub(crate) const DIM: u32 = 128;
/// Rows of K and V that are put in at a time before anything is timed.
const FILL_ROWS: u32 = 4096;

/// What is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    /// Attention of one new token of each sequence.
    Decode,
    /// Storing K and V of new tokens.
    Append,
    /// Attention of many new tokens.
    Prefill,
    /// Copying blocks, or parts of slots, in one launch.
    Copy,
}

/// A shape.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) operation: Operation,
    /// Sequences; pairs of units for a copy.
    pub(crate) batch: u32,
    /// Tokens of each sequence, those of the step included.
    pub(crate) context: u32,
    /// Tokens of each sequence in the step; tokens of a unit for a copy.
    pub(crate) rows: u32,
    pub(crate) kv_heads: u32,
    /// Query heads of a KV head.
    pub(crate) group: u32,
}

impl Shape {
    pub(crate) fn name(&self) -> String {
        let Self { batch, context, rows, kv_heads, group, .. } = *self;
        let heads = format!("q{}kv{kv_heads}d{DIM}", kv_heads * group);
        match self.operation {
            Operation::Decode => format!("decode/{heads}/gqa{group}/batch{batch}/context{context}"),
            Operation::Append => format!("append/{heads}/tokens{rows}"),
            Operation::Prefill => format!("prefill/{heads}/gqa{group}/{}+{rows}", context - rows),
            Operation::Copy => format!("copy/{heads}/pairs{batch}/tokens{rows}"),
        }
    }

    /// Multiplications and additions, two for each pair, of one layer.
    pub(crate) fn flops(&self) -> f64 {
        if matches!(self.operation, Operation::Append | Operation::Copy) {
            return 0.0;
        }
        let (rows, before) = (f64::from(self.rows), f64::from(self.context - self.rows));
        let keys = rows * before + rows * (rows + 1.0) / 2.0;
        4.0 * keys * f64::from(self.batch * self.kv_heads * self.group * DIM)
    }

    /// Tokens whose K and V one layer must read, or write.
    fn tokens(&self) -> f64 {
        let per_seq = match self.operation {
            Operation::Decode | Operation::Prefill => self.context,
            Operation::Append | Operation::Copy => self.rows,
        };
        f64::from(self.batch) * f64::from(per_seq)
    }

    pub(crate) fn source(&self, format: Format, mode: CacheMode, layers: u32) -> Source {
        let Self { batch, context, rows, kv_heads, group, .. } = *self;
        // A copy goes from one sequence to another.
        let seqs = if self.operation == Operation::Copy { 2 * batch } else { batch };
        let step = (batch * rows).max(FILL_ROWS.min(context)).max(seqs);
        let mut text = format!(
            "model = {{ num_layers = {layers}, num_q_heads = {}, num_kv_heads = {kv_heads}, \
             head_dim = {DIM} }}\n\
             limits = {{ max_seqs = {seqs}, max_seq_len = {context}, max_batch_tokens = {step} }}\n\
             device = {{ kind = 'cuda' }}\n\
             cache = {{ mode = '{}', format = '{}', tokens_per_block = 64, prefix_reuse = false",
            kv_heads * group,
            mode.name(),
            format.name()
        );
        if mode == CacheMode::Hybrid {
            text.push_str(", hybrid = { contiguous_layers = 'first:1' }");
        }
        text.push_str(" }\n");
        parse(&text, std::path::Path::new("gpu"), &[]).unwrap_or_else(|error| panic!("{error}"))
    }
}

/// Halves in (-1, 1) that repeat nowhere soon.
pub(crate) fn numbers(seed: u32, len: usize) -> Vec<f16> {
    let mut state = seed.wrapping_mul(0x9E37_79B9) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        f16::from_f32((state >> 8) as f32 / (1 << 23) as f32 - 1.0)
    };
    (0..len).map(|_| next()).collect()
}

/// A cache with its sequences at the point before the step, and the step's tensors.
pub(crate) struct Case {
    shape: Shape,
    cache: Cache,
    layers: u32,
    seqs: Vec<(SeqHandle, u32)>,
    k: Memory,
    v: Memory,
    q: Memory,
    out: Memory,
    bytes_per_token: f64,
}

impl Case {
    /// Opens and fills it.
    ///
    /// # Errors
    /// In words, most likely that the GPU has no room for it.
    pub(crate) fn open(
        shape: &Shape,
        format: Format,
        mode: CacheMode,
        stream: &Stream,
        footprint: u64,
    ) -> Result<Self, String> {
        let one = shape.source(format, mode, 2);
        let plan = Plan::new(&one.config, &one.geometry).map_err(|error| error.to_string())?;
        let layers = (2 * footprint).div_ceil(plan.pool_bytes.get()).clamp(2, 32) as u32;
        let source = shape.source(format, mode, layers);
        let plan =
            Plan::new(&source.config, &source.geometry).map_err(|error| error.to_string())?;
        let bytes_per_token = plan.bytes_per_token.get() as f64 / f64::from(layers);
        let mut cache = Cache::open_on_device(plan, &source.config.device, None)
            .map_err(|error| error.to_string())?;
        cache.set_stream(stream.handle()).map_err(|error| error.to_string())?;
        let row = (shape.kv_heads * DIM) as usize;
        let rows = (shape.batch * shape.rows).max(FILL_ROWS.min(shape.context)) as usize;
        let (k, v) = (Memory::of(&numbers(1, rows * row)), Memory::of(&numbers(2, rows * row)));
        let queries = (shape.batch * shape.rows) as usize * row * shape.group as usize;
        let (q, out) = (Memory::of(&numbers(3, queries)), Memory::new(queries * 2));
        let mut case =
            Self { shape: *shape, cache, layers, seqs: Vec::new(), k, v, q, out, bytes_per_token };
        case.fill().map_err(|error| error.to_string())?;
        Ok(case)
    }

    fn fill(&mut self) -> Result<(), kvpool::error::CacheError> {
        let Shape { operation, batch, context, rows, kv_heads, .. } = self.shape;
        let before = if operation == Operation::Copy { context - 1 } else { context - rows };
        for _ in 0..batch {
            let seq = self.cache.begin(&[], BeginOptions::default())?.sequence;
            let mut left = before;
            while left > 0 {
                let now = left.min(FILL_ROWS);
                let len = (now * kv_heads * DIM) as usize;
                let mut step = self.cache.reserve(&[(seq, now)])?;
                for layer in 0..self.layers {
                    step.append_device(LayerIdx(layer), self.k.tensor(len), self.v.tensor(len))?;
                }
                step.commit()?;
                left -= now;
            }
            self.seqs.push((seq, if operation == Operation::Copy { 1 } else { rows }));
        }
        self.cache.synchronize()
    }

    /// Bytes that one layer must move: K, V and scales that are read (decode, prefill), K and V
    /// that are read and stored (append), or what is read and written (copy).
    pub(crate) fn bytes(&self) -> f64 {
        let tokens = self.shape.tokens();
        let stored = tokens * self.bytes_per_token;
        match self.shape.operation {
            Operation::Decode | Operation::Prefill => stored,
            Operation::Append => stored + tokens * f64::from(self.shape.kv_heads * DIM * 2 * 2),
            Operation::Copy => {
                let rows = f64::from(self.shape.rows);
                2.0 * (rows - 1.0) / rows * stored
            }
        }
    }

    /// Microseconds of one layer, over all layers.
    ///
    /// # Errors
    /// What the cache says, in words.
    pub(crate) fn time(&mut self, stream: &Stream) -> Result<f64, String> {
        let us = match self.shape.operation {
            Operation::Copy => self.time_copy(stream),
            _ => self.time_step(stream),
        };
        us.map(|us| us / f64::from(self.layers)).map_err(|error| error.to_string())
    }

    /// A step that is cancelled: its tables are uploaded before, so that kernels alone are timed.
    fn time_step(&mut self, stream: &Stream) -> Result<f64, kvpool::error::CacheError> {
        let Self { shape, cache, layers, seqs, k, v, q, out, .. } = self;
        let kv = (shape.batch * shape.rows * shape.kv_heads * DIM) as usize;
        let queries = kv * shape.group as usize;
        let mut step = cache.reserve(seqs)?;
        step.prepare()?;
        let append = |step: &mut Step<'_>| {
            (0..*layers).try_for_each(|layer| {
                step.append_device(LayerIdx(layer), k.tensor(kv), v.tensor(kv))
            })
        };
        let mut failed = Ok(());
        if shape.operation == Operation::Append {
            let us = stream.time(|| failed = append(&mut step));
            return failed.map(|()| us);
        }
        append(&mut step)?;
        let us = stream.time(|| {
            failed = (0..*layers).try_for_each(|layer| {
                let (q, out) = (q.tensor(queries), out.tensor(queries));
                step.attend_device(LayerIdx(layer), q, out, None, None)
            });
        });
        failed.map(|()| us)
    }

    /// The copies on write of forks, in one launch a group (the tables of the step are not part of
    /// it); or, where there are no blocks, the forks themselves.
    fn time_copy(&mut self, stream: &Stream) -> Result<f64, kvpool::error::CacheError> {
        let Self { cache, seqs, .. } = self;
        let mut forks = Vec::with_capacity(seqs.len());
        let mut failed = Ok(());
        let mut us = stream.time(|| {
            for (seq, _) in seqs.iter() {
                match cache.fork(*seq) {
                    Ok(fork) => forks.push((fork, 1)),
                    Err(error) => failed = Err(error),
                }
            }
        });
        failed?;
        if cache.free_blocks(kvpool::units::GroupIdx(cache.plan().groups.len() as u32 - 1)).is_ok()
        {
            let mut cancelled = Ok(());
            let blocks = stream.time(|| cancelled = cache.reserve(&forks).map(Step::cancel));
            cancelled?;
            // A hybrid copies slots in the fork, and blocks in the step.
            let slots = cache.plan().groups.len() > 1;
            us = if slots { us + blocks } else { blocks };
        }
        cache.synchronize()?;
        for (fork, _) in forks {
            cache.release(fork)?;
        }
        Ok(us)
    }
}
