//! Plain loads, as wide as the CPU has them: what memory gives at most, against which kernels are
//! held.

#[cfg(x86_kernels)]
use std::arch::x86_64::*;

/// Bytes that are read before the loop begins anew.
const STEP: usize = 512;

/// Adds the words of a slice, so that all of it is read, in order. (Its last bytes that are no whole
/// 512 are left out.)
#[must_use]
pub fn sum_words(bytes: &[u8]) -> u64 {
    let steps = bytes.as_chunks::<STEP>().0;
    #[cfg(x86_kernels)]
    {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the CPU has the instructions.
            return unsafe { sum_512(steps) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the CPU has the instructions.
            return unsafe { sum_256(steps) };
        }
    }
    sum_plain(steps)
}

/// In independent sums, for the compiler to make of what the build's baseline has.
fn sum_plain(steps: &[[u8; STEP]]) -> u64 {
    let mut sums = [0_u64; 16];
    for step in steps {
        for words in step.as_chunks::<128>().0 {
            for (sum, word) in sums.iter_mut().zip(words.as_chunks::<8>().0) {
                *sum = sum.wrapping_add(u64::from_le_bytes(*word));
            }
        }
    }
    sums.iter().fold(0, |all, sum| all.wrapping_add(*sum))
}

/// Eight loads of 64 bytes at a time, each with a sum of its own.
#[cfg(x86_kernels)]
#[target_feature(enable = "avx512f")]
fn sum_512(steps: &[[u8; STEP]]) -> u64 {
    let mut sums = [_mm512_setzero_si512(); 8];
    for step in steps {
        for (sum, line) in sums.iter_mut().zip(step.as_chunks::<64>().0) {
            // SAFETY: 64 bytes, and the load asks for no alignment.
            let line = unsafe { _mm512_loadu_si512(line.as_ptr().cast()) };
            *sum = _mm512_add_epi64(*sum, line);
        }
    }
    let mut all = sums[0];
    for sum in &sums[1..] {
        all = _mm512_add_epi64(all, *sum);
    }
    _mm512_reduce_add_epi64(all).cast_unsigned()
}

/// Eight loads of 32 bytes at a time, each with a sum of its own.
#[cfg(x86_kernels)]
#[target_feature(enable = "avx2")]
fn sum_256(steps: &[[u8; STEP]]) -> u64 {
    let mut sums = [_mm256_setzero_si256(); 8];
    for half in steps.as_flattened().as_chunks::<256>().0 {
        for (sum, line) in sums.iter_mut().zip(half.as_chunks::<32>().0) {
            // SAFETY: 32 bytes, and the load asks for no alignment.
            let line = unsafe { _mm256_loadu_si256(line.as_ptr().cast()) };
            *sum = _mm256_add_epi64(*sum, line);
        }
    }
    let mut all = sums[0];
    for sum in &sums[1..] {
        all = _mm256_add_epi64(all, *sum);
    }
    let mut words = [0_u64; 4];
    // SAFETY: 32 bytes, and the store asks for no alignment.
    unsafe { _mm256_storeu_si256(words.as_mut_ptr().cast(), all) };
    words.iter().fold(0, |all, word| all.wrapping_add(*word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_words_are_read() {
        let bytes: Vec<u8> = (0..=250).cycle().step_by(7).take(3 * STEP + 40).collect();
        for (from, len) in [(0, 2 * STEP), (1, STEP), (8, 3 * STEP), (64, 2 * STEP - 64 + 40)] {
            let bytes = &bytes[from..from + len];
            let steps = bytes.as_chunks::<STEP>().0;
            let words = steps.as_flattened().as_chunks::<8>().0.iter();
            let want = words.fold(0, |sum: u64, word| sum.wrapping_add(u64::from_le_bytes(*word)));
            assert_eq!((sum_words(bytes), sum_plain(steps)), (want, want), "from {from}");
            #[cfg(x86_kernels)]
            {
                if is_x86_feature_detected!("avx2") {
                    // SAFETY: the CPU has the instructions.
                    assert_eq!(unsafe { sum_256(steps) }, want, "from {from}");
                }
                if is_x86_feature_detected!("avx512f") {
                    // SAFETY: the CPU has the instructions.
                    assert_eq!(unsafe { sum_512(steps) }, want, "from {from}");
                }
            }
        }
    }
}
