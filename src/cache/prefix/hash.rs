//! The hash of a chain of blocks.
//!
//! It only has to spread well and to be fast: a hit is what the tokens say, not what the hash says
//! (P7). The tokens of every block are hashed on their own, four products at a time, so that the
//! hashes of many blocks can be computed before the first one is looked for; the chain then takes
//! one product a block. The product with its two halves folded together is that of wyhash
//! (Wang Yi, public domain).

/// What the chain of an empty prefix starts from.
pub(super) const SEED: u64 = 0x243F_6A88_85A3_08D3;

const SALTS: [u64; 4] =
    [0xA076_1D64_78BD_642F, 0xE703_7ED1_A0B4_28DB, 0x8EBC_6AF0_9C88_C6E3, 0x5899_65CC_7537_4CC3];

/// The two halves of the 128-bit product, folded.
#[inline]
fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    #[expect(clippy::cast_possible_truncation, reason = "the lower half")]
    let low = product as u64;
    let high = (product >> 64) as u64;
    low ^ high
}

/// The hash of one block's tokens. `[tokens_per_block]`, a multiple of 8.
#[inline]
pub(super) fn of_tokens(tokens: &[u32]) -> u64 {
    let mut sums = [0_u64; 2];
    for (part, eight) in (1_u64..).zip(tokens.as_chunks::<8>().0) {
        let word = |at: usize| u64::from(eight[at]) | u64::from(eight[at + 1]) << 32;
        let turn = part.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        sums[0] = sums[0].wrapping_add(fold(word(0) ^ SALTS[0] ^ turn, word(2) ^ SALTS[1]));
        sums[1] = sums[1].wrapping_add(fold(word(4) ^ SALTS[2], word(6) ^ SALTS[3] ^ turn));
    }
    sums[0] ^ sums[1].rotate_left(32)
}

/// The hash of a chain that goes on with a block, which begins namespace `ns` (0: it goes on in
/// the one of its parent).
#[inline]
pub(super) fn chain(before: u64, tokens: u64, ns: u32) -> u64 {
    fold(before ^ tokens ^ SALTS[1], SALTS[0] ^ u64::from(ns).wrapping_mul(SALTS[3] | 1))
}

/// The 32 bits that the table sorts by.
#[inline]
pub(super) fn tag(hash: u64) -> u32 {
    (hash >> 32) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every bit of every token changes about half of the tag's bits, alone and in a chain.
    #[test]
    fn spreads_every_bit() {
        let tokens: Vec<u32> = (0..32_u32).map(|t| t.wrapping_mul(77_777)).collect();
        let mut flips = 0;
        let mut cases = 0;
        for at in 0..tokens.len() {
            for bit in 0..32 {
                let mut other = tokens.clone();
                other[at] ^= 1 << bit;
                let (a, b) = (of_tokens(&tokens), of_tokens(&other));
                assert_ne!(a, b);
                let (a, b) = (tag(chain(SEED, a, 1)), tag(chain(SEED, b, 1)));
                flips += (a ^ b).count_ones();
                cases += 1;
            }
        }
        let mean = f64::from(flips) / f64::from(cases);
        assert!((14.0..18.0).contains(&mean), "{mean} of 32 bits change");
        assert_ne!(chain(SEED, 5, 1), chain(SEED, 5, 2));
        assert_ne!(chain(SEED, 5, 0), chain(SEED + 1, 5, 0));
    }

    /// Small token ids in small permutations do not collide.
    #[test]
    fn small_blocks_differ() {
        let mut seen = std::collections::HashSet::new();
        for n in 0..20_000_u32 {
            let tokens: Vec<u32> = (0..8).map(|at| n >> (2 * at) & 3).collect();
            let hash = chain(SEED, of_tokens(&tokens), 1);
            seen.insert((tokens, hash));
        }
        let hashes: std::collections::HashSet<u64> = seen.iter().map(|entry| entry.1).collect();
        assert_eq!(hashes.len(), seen.len());
    }
}
