//! A tile's scores become weights, with AVX-512: what `fast.rs` does, to the bit, for sixteen heads
//! side by side, so that few steps wait for one another.

use std::arch::x86_64::*;

use super::fast::largest;
use super::lanes::{Isa, WIDTH};
use super::portion::Portion;
use super::task::{Partial, Task};
use super::tile::{TILE, Tile, TileRow, mask};
use super::x86::{Avx512, memory_op, op};

/// Heads whose lanes are put together at once.
const FOUR: usize = 4;

/// Lines of a tile's row.
const LINES: usize = TILE / WIDTH;

impl Avx512 {
    /// As `fast::all_weights`.
    #[inline(always)]
    #[expect(clippy::too_many_arguments, reason = "the operands of one step")]
    pub(super) fn weights(
        self,
        task: &Task<'_>,
        tile: &Tile<'_>,
        portion: Portion,
        k_scales: &TileRow,
        v_scales: &TileRow,
        scores: &mut [TileRow],
        part: &mut Partial<'_>,
    ) {
        let lines = task.padded_dim / WIDTH;
        let before = portion.first * task.group;
        for (i, scores) in scores.chunks_mut(WIDTH).enumerate() {
            let (first, heads) = (before + i * WIDTH, scores.len());
            let mut maxima = [f32::NEG_INFINITY; WIDTH];
            for (j, (scores, maxima)) in
                scores.chunks_mut(FOUR).zip(maxima.chunks_exact_mut(FOUR)).enumerate()
            {
                self.scale_four(task, tile, first + j * FOUR, k_scales, scores, maxima);
            }
            let (max, sum) = (&mut part.max[first..], &mut part.sum[first..]);
            let (old, old_sum) = (self.load_some(max, heads), self.load_some(sum, heads));
            // A NaN is not among the maxima; the sum brings it to light.
            let new = op!(_mm512_max_ps(self.load(&maxima), old));
            let lowest = self.splat(f32::NEG_INFINITY);
            let finite = op!(_mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(new, lowest));
            let base = op!(_mm512_maskz_mov_ps(finite, new));
            let keep = self.exp(op!(_mm512_sub_ps(old, base)));
            let mut bases = [0.0; WIDTH];
            self.store(base, &mut bases);
            let mut sums = [0.0; WIDTH];
            for ((scores, sums), bases) in scores
                .chunks_mut(FOUR)
                .zip(sums.chunks_exact_mut(FOUR))
                .zip(bases.chunks_exact(FOUR))
            {
                let mut lanes = [self.splat(0.0); FOUR];
                for ((scores, base), lanes) in scores.iter_mut().zip(bases).zip(&mut lanes) {
                    *lanes = self.exp_lanes(scores, v_scales, *base);
                }
                memory_op!(_mm_storeu_ps(sums.as_mut_ptr(), self.sum_four(lanes)));
            }
            let new_sum = op!(_mm512_add_ps(self.mul(old_sum, keep), self.load(&sums)));
            self.store_some(new, max, heads);
            self.store_some(new_sum, sum, heads);
            // A product with 1 changes nothing.
            let mut changed = op!(_mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(keep, self.splat(1.0)));
            changed &= u16::MAX >> (WIDTH - heads);
            if changed != 0 {
                let mut keeps = [0.0; WIDTH];
                self.store(keep, &mut keeps);
                let acc = &mut part.acc.as_chunks_mut::<WIDTH>().0[first * lines..];
                for (i, acc) in acc.chunks_exact_mut(lines).take(heads).enumerate() {
                    if changed & (1 << i) != 0 {
                        let keep = self.splat(keeps[i]);
                        for acc in acc {
                            self.store(self.mul(self.load(acc), keep), acc);
                        }
                    }
                }
            }
        }
    }

    /// Scales the scores of up to four heads, the first of which is `first`, sets those of keys
    /// that their rows do not see to -∞, and gives the largest of each.
    #[inline(always)]
    fn scale_four(
        self,
        task: &Task<'_>,
        tile: &Tile<'_>,
        first: usize,
        k_scales: &TileRow,
        scores: &mut [TileRow],
        maxima: &mut [f32],
    ) {
        let scale = self.splat(task.softmax_scale);
        let mut lanes = [self.splat(f32::NEG_INFINITY); FOUR];
        for (scores, lanes) in scores.iter_mut().zip(&mut lanes) {
            let row = scores.as_chunks_mut::<WIDTH>().0.iter_mut();
            for (line, scales) in row.zip(k_scales.as_chunks::<WIDTH>().0) {
                let scores = self.mul(self.mul(self.load(line), self.load(scales)), scale);
                // The second operand where one is NaN.
                *lanes = op!(_mm512_max_ps(scores, *lanes));
                self.store(scores, line);
            }
        }
        memory_op!(_mm_storeu_ps(maxima.as_mut_ptr(), self.max_four(lanes)));
        let rows = (first / task.group, (first + scores.len() - 1) / task.group);
        if tile.all_seen_by(task, rows.0) && tile.all_seen_by(task, rows.1) {
            return;
        }
        for (i, (scores, max)) in scores.iter_mut().zip(maxima).enumerate() {
            mask(scores, tile.seen_by(task, (first + i) / task.group));
            *max = largest(scores);
        }
    }

    /// Turns a head's scores into weights, and gives the lanes of their sum.
    #[inline(always)]
    fn exp_lanes(self, row: &mut TileRow, scales: &TileRow, base: f32) -> __m512 {
        let base = self.splat(base);
        let mut sums = self.splat(0.0);
        let scales = scales.as_chunks::<WIDTH>().0;
        let row = row.as_chunks_mut::<WIDTH>().0;
        let mut weights = [sums; LINES];
        for (weights, line) in weights.iter_mut().zip(&*row) {
            *weights = self.exp(op!(_mm512_sub_ps(self.load(line), base)));
        }
        for ((weights, line), scales) in weights.into_iter().zip(row).zip(scales) {
            sums = op!(_mm512_add_ps(sums, weights));
            // A weight of 0 stays so, as that of a key that is not seen is, whatever its scale.
            let some = op!(_mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(weights, self.splat(0.0)));
            self.store(op!(_mm512_maskz_mul_ps(some, weights, self.load(scales))), line);
        }
        sums
    }

    /// The sums of four vectors, each summed as `Isa::sum` does it.
    #[inline(always)]
    fn sum_four(self, v: [__m512; FOUR]) -> __m128 {
        let four = self.sums_four_apart(v);
        let two = op!(_mm512_add_ps(four, _mm512_permute_ps::<0b01_00_11_10>(four)));
        let one = op!(_mm512_add_ps(two, _mm512_permute_ps::<0b10_11_00_01>(two)));
        self.first_lanes(one)
    }

    /// The largest lanes of four vectors without NaN.
    #[inline(always)]
    pub(super) fn max_four(self, v: [__m512; FOUR]) -> __m128 {
        let low = op!(_mm512_shuffle_f32x4::<0x44>(v[0], v[1]));
        let high = op!(_mm512_shuffle_f32x4::<0xEE>(v[0], v[1]));
        let ab = op!(_mm512_max_ps(low, high));
        let low = op!(_mm512_shuffle_f32x4::<0x44>(v[2], v[3]));
        let high = op!(_mm512_shuffle_f32x4::<0xEE>(v[2], v[3]));
        let cd = op!(_mm512_max_ps(low, high));
        let low = op!(_mm512_shuffle_f32x4::<0x88>(ab, cd));
        let high = op!(_mm512_shuffle_f32x4::<0xDD>(ab, cd));
        let four = op!(_mm512_max_ps(low, high));
        let two = op!(_mm512_max_ps(four, _mm512_permute_ps::<0b01_00_11_10>(four)));
        let one = op!(_mm512_max_ps(two, _mm512_permute_ps::<0b10_11_00_01>(two)));
        self.first_lanes(one)
    }

    /// The first lane of each quarter.
    #[inline(always)]
    fn first_lanes(self, v: __m512) -> __m128 {
        let at = op!(_mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 12, 8, 4, 0));
        op!(_mm512_castps512_ps128(_mm512_permutexvar_ps(at, v)))
    }

    /// The first `n` numbers, at most sixteen, and zeros.
    #[inline(always)]
    fn load_some(self, from: &[f32], n: usize) -> __m512 {
        let from = &from[..n];
        // SAFETY: the mask lets `from` through and nothing else, and the load asks for no
        // alignment; `self` exists only on a CPU that has it (`detect`).
        unsafe { _mm512_maskz_loadu_ps(u16::MAX >> (WIDTH - n), from.as_ptr()) }
    }

    /// Stores the first `n` lanes.
    #[inline(always)]
    fn store_some(self, v: __m512, to: &mut [f32], n: usize) {
        let to = &mut to[..n];
        // SAFETY: as in `load_some`.
        unsafe { _mm512_mask_storeu_ps(to.as_mut_ptr(), u16::MAX >> (WIDTH - n), v) };
    }
}
