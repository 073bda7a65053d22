//! Sixteen f32 lanes, and the element formats read into them.
//!
//! An [`Isa`] value is the proof that the CPU has the instructions: those for x86 are made only
//! by their `detect`. Every method is inlined into a function that is compiled for those
//! instructions (see `fast.rs`), where it is one or two of them.

use std::fmt;

use super::super::AppendCounts;
use super::super::convert::{Source, bf16_to_f32, f16_to_f32};
use super::super::quant::quantize_shared;
use super::append::Stores;
use super::fast::{all_weights, exp_of};
use super::portion::Portion;
use super::task::{Partial, Task};
use super::tile::{Tile, TileRow};
use crate::plan::{E8M8, LANES};

/// Lanes as a length.
pub(super) const WIDTH: usize = LANES as usize;

/// Lines of the vectors for which the compiler lays out loops anew: those of 128 elements.
pub(super) const USUAL: usize = 8;

/// Sixteen numbers in memory.
pub(super) type Line = [f32; WIDTH];

/// Vectors that are quantised side by side, where there are as many.
pub(super) const AT_ONCE: usize = 4;

/// An instruction set's sixteen lanes.
///
/// All sets compute the same operations in the same order; only whether a product and a sum are
/// rounded once ([`Isa::FMA`]) or twice makes a difference between them.
pub(super) trait Isa: Copy + Send + Sync + fmt::Debug + 'static {
    /// Sixteen lanes.
    type V: Copy;
    /// Eight of them, where not [`Isa::WIDE`].
    type Half: Copy;
    /// Whether `fma` rounds once.
    const FMA: bool;
    /// Whether there are registers for sixteen accumulators and more.
    const WIDE: bool;

    /// `x` in every lane.
    fn splat(self, x: f32) -> Self::V;
    /// From memory.
    fn load(self, from: &Line) -> Self::V;
    /// To memory.
    fn store(self, v: Self::V, to: &mut Line);
    /// `a · b`
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a · b + c`
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// Eight zeros.
    #[inline(always)]
    fn no_half(self) -> Self::Half {
        unreachable!("with few registers only")
    }
    /// `a · b + c` of the lower eight lanes, or of the `UPPER` ones; the others are not computed.
    #[inline(always)]
    fn fma_half<const UPPER: bool>(self, _a: Self::V, _b: Self::V, _c: Self::Half) -> Self::Half {
        unreachable!("with few registers only")
    }
    /// Sixteen lanes of two halves.
    #[inline(always)]
    fn join(self, _lower: Self::Half, _upper: Self::Half) -> Self::V {
        unreachable!("with few registers only")
    }
    /// The sum of all lanes: lanes 8 apart first, then 4, 2 and 1.
    fn sum(self, v: Self::V) -> f32;
    /// The same of several, all at once.
    #[inline(always)]
    fn sums<const K: usize, const G: usize>(self, v: [[Self::V; K]; G]) -> [[f32; K]; G] {
        // Loops, not `map`: its closure would be compiled for the baseline's instructions.
        let mut sums = [[0.0; K]; G];
        for (sums, v) in sums.iter_mut().zip(v) {
            for (sum, v) in sums.iter_mut().zip(v) {
                *sum = self.sum(v);
            }
        }
        sums
    }
    /// Turns a tile's products q·k into weights, for all heads of some rows, and brings the running
    /// state up to date. `scores`: of these heads; `part`: of all of the task's
    #[inline(always)]
    fn all_weights(
        self,
        task: &Task<'_>,
        tile: &Tile<'_>,
        portion: Portion,
        scales: [&TileRow; 2],
        scores: &mut [TileRow],
        part: &mut Partial<'_>,
    ) {
        all_weights(self, task, tile, portion, scales, scores, part);
    }
    /// Scales a tile's products q·k, and gives the largest; NaN is passed over.
    #[inline(always)]
    fn scale_scores(self, row: &mut TileRow, scales: &TileRow, scale: f32) -> f32 {
        let mut maxima = [f32::NEG_INFINITY; WIDTH];
        let lines = row.as_chunks_mut::<WIDTH>().0.iter_mut();
        for (line, scales) in lines.zip(scales.as_chunks::<WIDTH>().0) {
            for i in 0..WIDTH {
                line[i] = line[i] * scales[i] * scale;
                maxima[i] = if line[i] > maxima[i] { line[i] } else { maxima[i] };
            }
        }
        let larger = |a, b| if b > a { b } else { a };
        maxima.into_iter().fold(f32::NEG_INFINITY, larger)
    }
    /// Turns a tile's scores into weights, e^(score - base) times the scales of the values, and
    /// gives their sum, the scales left out.
    #[inline(always)]
    fn exp_scores(self, row: &mut TileRow, scales: &TileRow, base: f32) -> f32 {
        let mut sums = [0.0; WIDTH];
        let lines = row.as_chunks_mut::<WIDTH>().0.iter_mut();
        for (line, scales) in lines.zip(scales.as_chunks::<WIDTH>().0) {
            for i in 0..WIDTH {
                let weight = exp_of::<Self>(line[i] - base);
                sums[i] += weight;
                line[i] = weight * scales[i];
            }
        }
        sum_lanes(sums)
    }
    /// `quantize_shared`, to the bit.
    #[inline(always)]
    fn quantize<S: Source>(self, x: &[S], q: &mut [u8], counts: &mut AppendCounts) -> E8M8 {
        quantize_shared(x, q, counts)
    }
    /// The same for several vectors.
    #[inline(always)]
    fn quantize_some<S: Source>(
        self,
        x: [&[S]; AT_ONCE],
        q: [&mut [u8]; AT_ONCE],
        _stores: Stores,
        counts: &mut AppendCounts,
    ) -> [E8M8; AT_ONCE] {
        let mut scales = [E8M8(0); AT_ONCE];
        for ((x, q), scale) in x.into_iter().zip(q).zip(&mut scales) {
            *scale = self.quantize(x, q, counts);
        }
        scales
    }
    /// Stores a vector as IEEE halves.
    #[inline(always)]
    fn store_f16<S: Source>(self, x: &[S], row: &mut [u8], _stores: Stores) {
        for (to, x) in row.as_chunks_mut::<2>().0.iter_mut().zip(x) {
            *to = x.to_f16_bits().to_le_bytes();
        }
    }
    /// Stores a vector as bfloat16.
    #[inline(always)]
    fn store_bf16<S: Source>(self, x: &[S], row: &mut [u8], _stores: Stores) {
        for (to, x) in row.as_chunks_mut::<2>().0.iter_mut().zip(x) {
            *to = x.to_bf16_bits().to_le_bytes();
        }
    }
    /// Lets no access behind it be done before the stores past the caches that come before it.
    #[inline(always)]
    fn fence(self) {}
    /// Asks for the cache line of a byte, which may be written soon. Any address will do.
    #[inline(always)]
    fn prefetch_write(self, _byte: *const u8) {}
    /// Asks for the cache line of a byte, which may be read soon. Any address will do.
    fn prefetch(self, byte: *const u8);
    /// Sixteen f32.
    fn widen_f32(self, bytes: &[u8; 64]) -> Self::V;
    /// Sixteen IEEE halves.
    fn widen_f16(self, bytes: &[u8; 32]) -> Self::V;
    /// Sixteen bfloat16.
    fn widen_bf16(self, bytes: &[u8; 32]) -> Self::V;
    /// Sixteen signed bytes.
    fn widen_i8(self, bytes: &[u8; 16]) -> Self::V;
}

/// Whatever the build's baseline has, through the compiler's vectoriser.
#[derive(Clone, Copy, Debug)]
pub(super) struct Portable;

impl Isa for Portable {
    type V = Line;
    type Half = [f32; WIDTH / 2];
    const FMA: bool = cfg!(any(target_feature = "fma", target_arch = "aarch64"));
    const WIDE: bool = false;

    #[inline(always)]
    fn splat(self, x: f32) -> Line {
        [x; WIDTH]
    }

    #[inline(always)]
    fn load(self, from: &Line) -> Line {
        *from
    }

    #[inline(always)]
    fn store(self, v: Line, to: &mut Line) {
        *to = v;
    }

    #[inline(always)]
    fn mul(self, mut a: Line, b: Line) -> Line {
        for (a, b) in a.iter_mut().zip(b) {
            *a *= b;
        }
        a
    }

    #[inline(always)]
    fn fma(self, a: Line, b: Line, mut c: Line) -> Line {
        for ((a, b), c) in a.into_iter().zip(b).zip(&mut c) {
            *c = mul_add::<{ Self::FMA }>(a, b, *c);
        }
        c
    }

    #[inline(always)]
    fn no_half(self) -> Self::Half {
        [0.0; WIDTH / 2]
    }

    #[inline(always)]
    fn fma_half<const UPPER: bool>(self, a: Line, b: Line, mut c: Self::Half) -> Self::Half {
        let first = if UPPER { WIDTH / 2 } else { 0 };
        for ((a, b), c) in a[first..].iter().zip(&b[first..]).zip(&mut c) {
            *c = mul_add::<{ Self::FMA }>(*a, *b, *c);
        }
        c
    }

    #[inline(always)]
    fn join(self, lower: Self::Half, upper: Self::Half) -> Line {
        let mut v = [0.0; WIDTH];
        v[..WIDTH / 2].copy_from_slice(&lower);
        v[WIDTH / 2..].copy_from_slice(&upper);
        v
    }

    #[inline(always)]
    fn sum(self, v: Line) -> f32 {
        sum_lanes(v)
    }

    #[inline(always)]
    fn prefetch(self, _byte: *const u8) {}

    #[inline(always)]
    fn widen_f32(self, bytes: &[u8; 64]) -> Line {
        let mut v = [0.0; WIDTH];
        for (v, bytes) in v.iter_mut().zip(bytes.as_chunks::<4>().0) {
            *v = f32::from_le_bytes(*bytes);
        }
        v
    }

    #[inline(always)]
    fn widen_f16(self, bytes: &[u8; 32]) -> Line {
        let mut v = [0.0; WIDTH];
        for (v, bytes) in v.iter_mut().zip(bytes.as_chunks::<2>().0) {
            *v = f16_to_f32(u16::from_le_bytes(*bytes));
        }
        v
    }

    #[inline(always)]
    fn widen_bf16(self, bytes: &[u8; 32]) -> Line {
        let mut v = [0.0; WIDTH];
        for (v, bytes) in v.iter_mut().zip(bytes.as_chunks::<2>().0) {
            *v = bf16_to_f32(u16::from_le_bytes(*bytes));
        }
        v
    }

    #[inline(always)]
    fn widen_i8(self, bytes: &[u8; 16]) -> Line {
        let mut v = [0.0; WIDTH];
        for (v, byte) in v.iter_mut().zip(bytes) {
            *v = f32::from(byte.cast_signed());
        }
        v
    }
}

/// `a · b + c`, rounded once where `FMA`.
#[inline(always)]
pub(super) fn mul_add<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// The sum of sixteen lanes: lanes 8 apart first, then 4, 2 and 1.
#[inline(always)]
pub(super) fn sum_lanes(v: Line) -> f32 {
    let mut eight = [0.0; 8];
    for (i, sum) in eight.iter_mut().enumerate() {
        *sum = v[i] + v[i + 8];
    }
    let mut four = [0.0; 4];
    for (i, sum) in four.iter_mut().enumerate() {
        *sum = eight[i] + eight[i + 4];
    }
    (four[0] + four[2]) + (four[1] + four[3])
}

/// How an element lies in the pool.
pub(super) trait Element: 'static {
    /// The bytes of sixteen elements.
    type Chunk: 'static;
    /// Bytes of one element.
    const BYTES: usize;
    /// Whether 32 elements share a scale that lies in the block.
    const GROUPED: bool = false;

    /// The whole chunks of a vector, and what is left: nothing, or eight elements.
    fn chunks(row: &[u8]) -> (&[Self::Chunk], &[u8]);
    /// Sixteen elements as f32.
    fn load<I: Isa>(isa: I, chunk: &Self::Chunk) -> I::V;
    /// Eight elements, and zeros in the other lanes.
    fn load_tail<I: Isa>(isa: I, rest: &[u8]) -> I::V;
}

macro_rules! element {
    ($(#[$doc:meta])* $name:ident, $bytes:literal, $grouped:literal, $from:ident) => {
        $(#[$doc])*
        #[derive(Debug)]
        pub(super) struct $name;

        impl Element for $name {
            type Chunk = [u8; $bytes * WIDTH];
            const BYTES: usize = $bytes;
            const GROUPED: bool = $grouped;

            #[inline(always)]
            fn chunks(row: &[u8]) -> (&[Self::Chunk], &[u8]) {
                row.as_chunks()
            }

            #[inline(always)]
            fn load<I: Isa>(isa: I, chunk: &Self::Chunk) -> I::V {
                isa.$from(chunk)
            }

            #[inline(always)]
            fn load_tail<I: Isa>(isa: I, rest: &[u8]) -> I::V {
                let mut chunk = [0; $bytes * WIDTH];
                chunk[..$bytes * WIDTH / 2].copy_from_slice(rest);
                isa.$from(&chunk)
            }
        }
    };
}

element!(
    /// IEEE single precision.
    ElementF32, 4, false, widen_f32
);
element!(
    /// IEEE half precision.
    ElementF16, 2, false, widen_f16
);
element!(
    /// bfloat16.
    ElementBf16, 2, false, widen_bf16
);
element!(
    /// Signed bytes with one scale for the vector.
    ElementI8, 1, false, widen_i8
);
element!(
    /// Signed bytes with a scale for every 32.
    ElementI8Grouped, 1, true, widen_i8
);
