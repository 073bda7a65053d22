//! The answers, before anything is timed: against the CPU's reference, one mode against the other,
//! and a row by itself against the same row among others.

use half::f16;
use kvpool::cache::{AttendOptions, BeginOptions, Cache, SeqHandle};
use kvpool::config::{CacheMode, DeviceConfig, DeviceKind, Format, KernelChoice};
use kvpool::device::TensorMut;
use kvpool::plan::Plan;
use kvpool::units::LayerIdx;

use super::cases::{DIM, Operation, Shape, numbers};
use super::driver::Memory;

/// Holds the GPU's answers against the CPU's reference, and its modes against each other; a line
/// for each format and group.
pub(crate) fn check_answers(tiny: bool) -> Vec<String> {
    let (context, kv_heads) = if tiny { (70, 2) } else { (1100, 8) };
    let mut lines = Vec::new();
    for format in [Format::F16, Format::Int8] {
        for group in [1, 4, 8] {
            let shape =
                Shape { operation: Operation::Decode, batch: 2, context, rows: 5, kv_heads, group };
            let mut outputs = Vec::new();
            for mode in [CacheMode::Contiguous, CacheMode::Paged, CacheMode::Hybrid] {
                outputs.push(answer(&shape, format, mode, DeviceKind::Cuda));
            }
            assert!(
                outputs[1] == outputs[0] && outputs[2] == outputs[0],
                "modes differ: {shape:?}"
            );
            let want = answer(&shape, format, CacheMode::Paged, DeviceKind::Cpu);
            let error = |(a, b): (&f32, &f32)| (a - b).abs();
            let worst = outputs[0].iter().zip(&want).map(error).fold(0.0, f32::max);
            assert!(worst < 2e-3 && worst.is_finite(), "{shape:?} {format}: {worst} off");
            lines.push(format!(
                "checked: {} {}: within {worst:.1e} of the reference, modes bitwise equal",
                shape.name(),
                format.name()
            ));
        }
    }
    lines
}

/// Attention of the last rows of two sequences, in every layer.
fn answer(shape: &Shape, format: Format, mode: CacheMode, kind: DeviceKind) -> Vec<f32> {
    let source = shape.source(format, mode, 2);
    let plan = Plan::new(&source.config, &source.geometry).unwrap();
    let kernel = match kind {
        DeviceKind::Cpu => KernelChoice::Reference,
        DeviceKind::Cuda => KernelChoice::Auto,
    };
    let device = DeviceConfig { kind, kernel, ..DeviceConfig::default() };
    let mut cache = Cache::open_on_device(plan, &device, None).unwrap();
    let row = (shape.kv_heads * DIM) as usize;
    let seqs = [0, 1].map(|_| cache.begin(&[], BeginOptions::default()).unwrap().sequence);
    let mut all = Vec::new();
    for (which, rows) in [(0, shape.context - shape.rows), (1, shape.rows)] {
        let batch =
            if which == 0 { [(seqs[0], rows), (seqs[1], 1)] } else { seqs.map(|s| (s, rows)) };
        let tokens = batch.iter().map(|(_, rows)| *rows as usize).sum::<usize>();
        let mut step = cache.reserve(&batch).unwrap();
        for layer in 0..2 {
            let values = |what: u32, len| numbers(100 * which + 10 * layer + what + 1, len);
            let (k, v) = (values(0, tokens * row), values(1, tokens * row));
            let q = values(2, tokens * row * shape.group as usize);
            let mut out = vec![f32::NAN; q.len()];
            let layer = LayerIdx(layer);
            step.append(layer, (&k[..]).into(), (&v[..]).into()).unwrap();
            if which == 1 {
                let out = TensorMut::F32(&mut out);
                step.attend(layer, (&q[..]).into(), out, AttendOptions::default()).unwrap();
            }
            all.extend(if which == 1 { out } else { Vec::new() });
        }
        step.commit().unwrap();
    }
    all
}

/// Rows of the chunk.
const ROWS: u32 = 5;

/// What is computed beside a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Beside {
    /// Nothing: a decode, whose splits go to thread blocks of their own.
    Nothing,
    /// The other rows of its chunk, which see keys that it does not.
    Chunk,
    /// Another sequence's prompt, so long that the row's splits stay in one thread block, and in
    /// the kernel for items of many rows.
    Prompt,
}

/// Holds rows that are computed by themselves against the same rows among others, bit for bit (P5):
/// chunks and decodes, both sizes of items, splits that are combined and splits that are not.
///
/// What the chunk's first row must not see is 10^8 times as large as what it sees. A line for each
/// format and group.
pub(crate) fn check_rows_alone(tiny: bool) -> Vec<String> {
    let (before, prompt, kv_heads) = if tiny { (530, 40, 2) } else { (1100, 4000, 8) };
    let mut lines = Vec::new();
    for format in [Format::F16, Format::Int8] {
        for group in [1, 4, 8] {
            let shape = Shape {
                operation: Operation::Decode,
                batch: 2,
                context: prompt.max(before) + ROWS,
                rows: ROWS,
                kv_heads,
                group,
            };
            let alone = rows_beside(&shape, format, Beside::Nothing, before, prompt);
            for beside in [Beside::Chunk, Beside::Prompt] {
                let other = rows_beside(&shape, format, beside, before, prompt);
                // Of the prompt's only the last row is there.
                let same = alone.iter().zip(&other).all(|(alone, other)| {
                    alone[alone.len() - other.len()..] == *other && !other.is_empty()
                });
                assert!(same, "{format} x{group}: a row alone and beside {beside:?} differ");
            }
            lines.push(format!(
                "checked: gqa{group} {}: a row behind {before} tokens, alone, in a chunk of {ROWS} \
                 and beside a prompt of {prompt}: bitwise equal",
                format.name()
            ));
        }
    }
    lines
}

/// Bits of the last [`ROWS`] rows of a sequence, a list for each layer; of the last one only beside
/// a prompt.
fn rows_beside(
    shape: &Shape,
    format: Format,
    beside: Beside,
    before: u32,
    prompt: u32,
) -> Vec<Vec<u32>> {
    let source = shape.source(format, CacheMode::Paged, 2);
    let plan = Plan::new(&source.config, &source.geometry).unwrap();
    let mut cache = Cache::open_on_device(plan, &source.config.device, None).unwrap();
    let [seq, other] = [0, 1].map(|_| cache.begin(&[], BeginOptions::default()).unwrap().sequence);
    step(&mut cache, shape, before, &[(seq, 0, before)]);
    let mut bits = vec![Vec::new(); 2];
    let mut keep = |layers: Vec<Vec<f32>>| {
        for (bits, layer) in bits.iter_mut().zip(layers) {
            bits.extend(layer.iter().map(|x| x.to_bits()));
        }
    };
    match beside {
        Beside::Chunk => keep(step(&mut cache, shape, before, &[(seq, before, ROWS)])),
        Beside::Nothing => {
            for row in 0..ROWS {
                keep(step(&mut cache, shape, before, &[(seq, before + row, 1)]));
            }
        }
        Beside::Prompt => {
            step(&mut cache, shape, before, &[(seq, before, ROWS - 1)]);
            let both = [(seq, before + ROWS - 1, 1), (other, 0, prompt)];
            keep(step(&mut cache, shape, before, &both));
        }
    }
    bits
}

/// A step of some rows of sequences, each with its first position, in both layers. Gives the
/// results of the first sequence's rows, at most [`ROWS`] of them. Values behind position `small`
/// are large.
fn step(
    cache: &mut Cache,
    shape: &Shape,
    small: u32,
    batch: &[(SeqHandle, u32, u32)],
) -> Vec<Vec<f32>> {
    let row = (shape.kv_heads * DIM) as usize;
    let (q_row, rows) = (row * shape.group as usize, batch.iter().map(|(_, _, rows)| *rows));
    let tokens = rows.sum::<u32>() as usize;
    let items: Vec<_> = batch.iter().map(|(seq, _, rows)| (*seq, *rows)).collect();
    let kept = (batch[0].2.min(ROWS)) as usize * q_row;
    let mut step = cache.reserve(&items).unwrap();
    let mut memory = Vec::new();
    for layer in 0..2 {
        let tensor = |what: u32, row: usize| {
            let mut values = Vec::with_capacity(tokens * row);
            for (which, (_, first, rows)) in (0..).zip(batch) {
                for position in *first..first + rows {
                    let seed = ((which * 2 + layer) * 3 + what) * 100_000 + position;
                    let of_v = if position > small { 6e4 } else { 1e-4 };
                    let factor = if what == 1 { of_v } else { 1.0 };
                    let scaled = |x: f16| f16::from_f32(x.to_f32() * factor);
                    values.extend(numbers(seed, row).into_iter().map(scaled));
                }
            }
            Memory::of(&values)
        };
        let (k, v, q) = (tensor(0, row), tensor(1, row), tensor(2, q_row));
        let out = Memory::new(tokens * q_row * 4);
        let layer = LayerIdx(layer);
        step.append_device(layer, k.tensor(tokens * row), v.tensor(tokens * row)).unwrap();
        let (q_at, out_at) = (q.tensor(tokens * q_row), out.floats(tokens * q_row));
        step.attend_device(layer, q_at, out_at, None, None).unwrap();
        memory.push(([k, v, q], out));
    }
    step.commit().unwrap();
    cache.synchronize().unwrap();
    memory.iter().map(|(_, out)| out.read(0, kept)).collect()
}
