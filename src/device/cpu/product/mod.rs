//! Products of a model's matrices with rows of activations, for the model engine.
//!
//! `out[row][column] = Σ weights[column][i] · x[row][i]`. A matrix stays as its file has it, blocks
//! of a few bits an element, and is expanded a few columns at a time where it is used, to exactly
//! the numbers that the format stands for. So a quantised matrix gives the same bits as the same
//! matrix in f32.
//!
//! **Bits.** A product of one row and one column is summed in sixteen lanes in the order of `i`,
//! and the lanes in a fixed order ([`Isa::sum`]). Which rows are computed beside it, and by which
//! thread, changes nothing: so a prompt gives the same bits in one piece, in chunks and in a batch.

mod expand;

use std::fmt;

use super::disjoint::Disjoint;
use super::float_mode::FloatMode;
use super::lanes::{Isa, Line, Portable, WIDTH};
use super::threads::Threads;
#[cfg(x86_kernels)]
use super::x86::{Avx2, Avx512};
use crate::config::KernelChoice;
use crate::error::DeviceError;

pub use expand::WeightFormat;

/// Columns that are expanded together.
const COLUMNS: usize = 4;

/// Columns of one item of work.
const CHUNK: usize = 32;

/// A matrix of a model, as its file has it. `[columns, depth]`, row-major
pub struct Weights {
    format: WeightFormat,
    bytes: Vec<u8>,
    columns: usize,
    depth: usize,
}

impl fmt::Debug for Weights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Weights([{}, {}], {:?})", self.columns, self.depth, self.format)
    }
}

impl Weights {
    /// A matrix of `columns` rows of `depth` elements; `None` where it would be empty, the bytes
    /// are not as many as it takes, or `depth` is no multiple of the format's block.
    #[must_use]
    pub fn new(format: WeightFormat, bytes: Vec<u8>, columns: usize, depth: usize) -> Option<Self> {
        let expected = format.row_bytes(depth)?.checked_mul(columns)?;
        (bytes.len() == expected && expected > 0).then_some(Self { format, bytes, columns, depth })
    }

    /// Outputs for each row of activations.
    #[must_use]
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Elements of a row of activations.
    #[must_use]
    pub fn depth(&self) -> usize {
        self.depth
    }

    /// Bytes that it takes.
    #[must_use]
    pub fn num_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Expands one of the matrix's rows, as an embedding is looked up. `out`: `[depth]`
    ///
    /// # Panics
    /// When there is no such row, or `out` has another length.
    pub fn row(&self, column: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.depth, "a row has as many elements as the matrix is deep");
        self.format.expand(self.row_bytes(column), out);
    }

    /// The same matrix with every element as f32.
    #[must_use]
    pub fn expanded(&self) -> Self {
        let mut bytes = Vec::with_capacity(self.columns * self.depth * 4);
        let mut row = vec![0.0; self.depth];
        for column in 0..self.columns {
            self.row(column, &mut row);
            bytes.extend(row.iter().flat_map(|x| x.to_le_bytes()));
        }
        Self { format: WeightFormat::F32, bytes, ..*self }
    }

    #[inline(always)]
    fn row_bytes(&self, column: usize) -> &[u8] {
        let bytes = self.bytes.len() / self.columns;
        &self.bytes[column * bytes..][..bytes]
    }
}

/// Which instructions compute.
#[derive(Clone, Copy, Debug)]
enum Lanes {
    Portable(Portable),
    #[cfg(x86_kernels)]
    Avx2(Avx2),
    #[cfg(x86_kernels)]
    Avx512(Avx512),
}

impl Lanes {
    /// The best that the choice allows and the CPU has.
    fn choose(choice: KernelChoice) -> Self {
        #[cfg(x86_kernels)]
        {
            let avx2 = Avx2::detect().map(Self::Avx2);
            let avx512 = Avx512::detect().map(Self::Avx512);
            let best = match choice {
                KernelChoice::Auto | KernelChoice::Avx512 | KernelChoice::Avx512Bf16 => {
                    avx512.or(avx2)
                }
                KernelChoice::Avx2 => avx2,
                KernelChoice::Reference | KernelChoice::Portable => None,
            };
            best.unwrap_or(Self::Portable(Portable))
        }
        #[cfg(not(x86_kernels))]
        {
            let _ = choice;
            Self::Portable(Portable)
        }
    }
}

/// Computes products.
#[derive(Debug)]
pub struct Products {
    lanes: Lanes,
    /// Rows of activations, filled up with zeros to whole lines. `[rows, lines]`
    rows: Lines,
    /// Expanded columns of each worker. `[workers, COLUMNS, lines]`
    columns: Lines,
}

impl Products {
    /// With the instructions that a choice of kernels stands for.
    #[must_use]
    pub fn new(kernel: KernelChoice) -> Self {
        Self { lanes: Lanes::choose(kernel), rows: Lines::default(), columns: Lines::default() }
    }

    /// Computes the products of rows of activations with several matrices of the same depth.
    /// `x`: `[rows, depth]`; each `out`: `[rows, columns]`
    ///
    /// # Errors
    /// [`DeviceError::WorkerPanicked`].
    ///
    /// # Panics
    /// When a slice has the wrong length.
    pub fn multiply(
        &mut self,
        threads: &Threads,
        x: &[f32],
        parts: &mut [(&Weights, &mut [f32])],
    ) -> Result<(), DeviceError> {
        let Some(depth) = parts.first().map(|(weights, _)| weights.depth) else { return Ok(()) };
        let rows = x.len() / depth;
        assert_eq!(x.len(), rows * depth, "x is [rows, depth]");
        for (weights, out) in parts.iter() {
            assert_eq!(weights.depth, depth, "matrices of one call have one depth");
            assert_eq!(out.len(), rows * weights.columns, "out is [rows, columns]");
        }
        let lines = depth.div_ceil(WIDTH);
        fill_rows(x, depth, self.rows.first(rows * lines));
        let parts: Vec<Part<'_>> = parts
            .iter_mut()
            .map(|(weights, out)| Part {
                weights,
                out: Disjoint::new(out),
                items: weights.columns.div_ceil(CHUNK),
            })
            .collect();
        let job = Job {
            rows: self.rows.first(rows * lines),
            lines,
            columns: Disjoint::new(self.columns.first(threads.count() * COLUMNS * lines)),
            parts: &parts,
        };
        let items = parts.iter().map(|part| part.items).sum();
        let lanes = self.lanes;
        threads.run(items, &|worker, item| job.run(lanes, worker, item))
    }
}

/// Copies activations to whole lines.
fn fill_rows(x: &[f32], depth: usize, rows: &mut [Line]) {
    let lines = depth.div_ceil(WIDTH);
    for (x, row) in x.chunks_exact(depth).zip(rows.chunks_exact_mut(lines)) {
        row[lines - 1] = [0.0; WIDTH];
        row.as_flattened_mut()[..depth].copy_from_slice(x);
    }
}

/// Memory of lines, each within one line of the processor's cache: where the allocator happens to
/// begin costs nothing then.
#[derive(Debug, Default)]
struct Lines(Vec<f32>);

impl Lines {
    /// The first `count` of them; new ones are zeros.
    fn first(&mut self, count: usize) -> &mut [Line] {
        let len = count * WIDTH;
        if self.0.len() < len + WIDTH {
            self.0.resize(len + WIDTH, 0.0);
        }
        let start = self.0.as_ptr().align_offset(size_of::<Line>()).min(WIDTH);
        self.0[start..start + len].as_chunks_mut().0
    }
}

/// One matrix of a call.
struct Part<'a> {
    weights: &'a Weights,
    /// `[rows, columns]`
    out: Disjoint<'a, f32>,
    /// Items of work: chunks of columns.
    items: usize,
}

/// One call.
struct Job<'a> {
    /// `[rows, lines]`
    rows: &'a [Line],
    lines: usize,
    /// `[workers, COLUMNS, lines]`
    columns: Disjoint<'a, Line>,
    parts: &'a [Part<'a>],
}

impl Job<'_> {
    /// Computes one item.
    fn run(&self, lanes: Lanes, worker: usize, mut item: usize) {
        let _mode = FloatMode::standard();
        let Some(part) = self.parts.iter().find(|part| match item.checked_sub(part.items) {
            Some(rest) => {
                item = rest;
                false
            }
            None => true,
        }) else {
            return;
        };
        match lanes {
            Lanes::Portable(isa) => self.chunk(isa, part, worker, item),
            #[cfg(x86_kernels)]
            // SAFETY: the value exists only on a CPU that has the features (`detect`).
            Lanes::Avx2(isa) => unsafe { chunk_avx2(self, isa, part, worker, item) },
            #[cfg(x86_kernels)]
            // SAFETY: the value exists only on a CPU that has the features (`detect`).
            Lanes::Avx512(isa) => unsafe { chunk_avx512(self, isa, part, worker, item) },
        }
    }

    /// Computes a chunk of columns for all rows.
    #[inline(always)]
    fn chunk<I: Isa>(&self, isa: I, part: &Part<'_>, worker: usize, item: usize) {
        let (weights, lines) = (part.weights, self.lines);
        let end = weights.columns.min((item + 1) * CHUNK);
        // SAFETY: `Threads::run` runs no two calls with the same worker index at once.
        let columns = unsafe { self.columns.part(worker * COLUMNS * lines, COLUMNS * lines) };
        let mut first = item * CHUNK;
        while first < end {
            let count = COLUMNS.min(end - first);
            for (at, column) in columns.chunks_exact_mut(lines).enumerate().take(count) {
                column[lines - 1] = [0.0; WIDTH];
                let row = &mut column.as_flattened_mut()[..weights.depth];
                weights.format.expand(weights.row_bytes(first + at), row);
            }
            self.tiles(isa, columns, part, first..first + count);
            first += count;
        }
    }

    /// Computes some columns, expanded, for all rows.
    #[inline(always)]
    fn tiles<I: Isa>(
        &self,
        isa: I,
        columns: &[Line],
        part: &Part<'_>,
        which: std::ops::Range<usize>,
    ) {
        let lines = self.lines;
        let num_rows = self.rows.len() / lines;
        let mut row = 0;
        while row < num_rows {
            let x = &self.rows[row * lines..];
            let sums = match num_rows - row {
                1 => tile::<I, 1>(isa, x, columns, lines),
                2 => tile::<I, 2>(isa, x, columns, lines),
                3 => tile::<I, 3>(isa, x, columns, lines),
                _ => tile::<I, 4>(isa, x, columns, lines),
            };
            for (sums, row) in sums.iter().zip(row..num_rows) {
                let start = row * part.weights.columns + which.start;
                // SAFETY: this call alone computes these columns.
                let out = unsafe { part.out.part(start, which.len()) };
                out.copy_from_slice(&sums[..which.len()]);
            }
            row += 4;
        }
    }
}

/// The products of `R` rows with the expanded columns. `[R of 4, COLUMNS]`
#[inline(always)]
fn tile<I: Isa, const R: usize>(
    isa: I,
    x: &[Line],
    columns: &[Line],
    lines: usize,
) -> [[f32; COLUMNS]; 4] {
    let mut acc = [[isa.splat(0.0); COLUMNS]; R];
    let (x, columns) = (&x[..R * lines], &columns[..COLUMNS * lines]);
    for line in 0..lines {
        let mut w = [isa.splat(0.0); COLUMNS];
        for (w, column) in w.iter_mut().zip(columns.chunks_exact(lines)) {
            *w = isa.load(&column[line]);
        }
        for (acc, x) in acc.iter_mut().zip(x.chunks_exact(lines)) {
            let x = isa.load(&x[line]);
            for (acc, w) in acc.iter_mut().zip(w) {
                *acc = isa.fma(x, w, *acc);
            }
        }
    }
    let mut sums = [[0.0; COLUMNS]; 4];
    sums[..R].copy_from_slice(&isa.sums(acc));
    sums
}

#[cfg(x86_kernels)]
#[target_feature(enable = "avx2,fma,f16c")]
fn chunk_avx2(job: &Job<'_>, isa: Avx2, part: &Part<'_>, worker: usize, item: usize) {
    job.chunk(isa, part, worker, item);
}

#[cfg(x86_kernels)]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
fn chunk_avx512(job: &Job<'_>, isa: Avx512, part: &Part<'_>, worker: usize, item: usize) {
    job.chunk(isa, part, worker, item);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(count: usize, seed: u32) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            f32::from((state >> 16) as u16) / 32768.0 - 1.0
        };
        (0..count).map(|_| next()).collect()
    }

    fn matrix(columns: usize, depth: usize) -> Weights {
        let bytes = numbers(columns * depth, 7).iter().flat_map(|x| x.to_le_bytes()).collect();
        Weights::new(WeightFormat::F32, bytes, columns, depth).expect("the bytes are as many")
    }

    fn threads(count: usize) -> Threads {
        Threads::start(count).expect("starts")
    }

    #[test]
    fn products_are_those_of_the_formula() {
        for (rows, columns, depth) in [(1, 1, 1), (3, 37, 172), (9, 70, 64), (4, 33, 15)] {
            let (x, weights) = (numbers(rows * depth, 3), matrix(columns, depth));
            for kernel in [KernelChoice::Auto, KernelChoice::Portable] {
                let mut out = vec![f32::NAN; rows * columns];
                Products::new(kernel)
                    .multiply(&threads(2), &x, &mut [(&weights, &mut out)])
                    .expect("computes");
                let mut w = vec![0.0; depth];
                for column in 0..columns {
                    weights.row(column, &mut w);
                    for row in 0..rows {
                        let x = &x[row * depth..][..depth];
                        let exact: f64 =
                            x.iter().zip(&w).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                        let got = f64::from(out[row * columns + column]);
                        assert!((got - exact).abs() < 1e-4, "{row}, {column}: {got}, {exact}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_row_has_the_same_bits_alone_and_among_others() {
        let (x, a, b) = (numbers(7 * 100, 3), matrix(45, 100), matrix(9, 100));
        for kernel in [KernelChoice::Auto, KernelChoice::Avx2, KernelChoice::Portable] {
            let mut all = [vec![0.0; 7 * 45], vec![0.0; 7 * 9]];
            let [all_a, all_b] = &mut all;
            Products::new(kernel)
                .multiply(&threads(2), &x, &mut [(&a, all_a), (&b, all_b)])
                .expect("computes");
            let (one, mut alone) = (threads(1), Products::new(kernel));
            for (row, x) in x.chunks(100).enumerate() {
                for (weights, all) in [(&a, &all[0]), (&b, &all[1])] {
                    let mut out = vec![0.0; weights.columns];
                    alone.multiply(&one, x, &mut [(weights, &mut out)]).expect("computes");
                    assert_eq!(out, all[row * weights.columns..][..weights.columns]);
                }
            }
        }
    }

    #[test]
    fn a_matrix_of_the_wrong_size_is_refused() {
        assert!(Weights::new(WeightFormat::F32, vec![0; 15], 1, 4).is_none());
        assert!(Weights::new(WeightFormat::Q4_1, vec![0; 20], 1, 16).is_none());
        assert!(Weights::new(WeightFormat::Q4_1, vec![0; 20], 1, 32).is_some());
        assert!(Weights::new(WeightFormat::F32, vec![], usize::MAX, usize::MAX).is_none());
        assert!(Weights::new(WeightFormat::F32, vec![], 0, 4).is_none());
    }
}
