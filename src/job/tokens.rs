//! Which token stands where.
//!
//! Tokens are made up: each follows from the seed, what its place belongs to (a shared prefix, a
//! hashed block of a trace, or the request's own conversation) and the place. So two requests have
//! the same token exactly where they have the same content.

use std::ops::Range;

use super::random::{high, mix, scramble};
use super::workload::Content;

/// Tokens of the vocabulary: far more than a model has, so that two requests have a token in common
/// because they share it, and not by chance.
const VOCABULARY: u32 = 1 << 31;

/// What a hash is for. Two uses never share their numbers.
#[derive(Clone, Copy)]
pub(super) enum Use {
    Token = 1,
    K,
    V,
    Q,
    Outliers,
    Prefix,
    HashedBlock,
}

/// Makes up tokens.
#[derive(Clone, Debug)]
pub struct Tokens {
    pub(super) seed: u64,
    /// The hashes of all prompts' blocks, one request's after the other.
    hash_ids: Vec<u64>,
    /// Tokens of one of them.
    block_tokens: u32,
}

impl Tokens {
    /// The tokens of a seed, with the hashes that the contents refer to.
    #[must_use]
    pub fn new(seed: u64, hash_ids: Vec<u64>, block_tokens: u32) -> Self {
        Self { seed, hash_ids, block_tokens: block_tokens.max(1) }
    }

    /// The token at a position of a content.
    #[must_use]
    pub fn token(&self, content: &Content, position: u32) -> u32 {
        let (state, first, _) = self.segment(content, position);
        place(state, position - first)
    }

    /// Calls `push` with the tokens at these positions, one after the other.
    pub(super) fn each(&self, content: &Content, at: Range<u32>, mut push: impl FnMut(u32)) {
        let mut position = at.start;
        while position < at.end {
            let (state, first, end) = self.segment(content, position);
            let end = end.min(at.end);
            (position..end).for_each(|position| push(place(state, position - first)));
            position = end;
        }
    }

    /// What the tokens around a position are computed from, the position that they are counted
    /// from, and the end of those that it holds for.
    fn segment(&self, content: &Content, position: u32) -> (u64, u32, u32) {
        let state = |what: Use, whose| mix(&[self.seed, what as u64, whose]);
        if position < content.prefix_tokens {
            return (state(Use::Prefix, u64::from(content.prefix)), 0, content.prefix_tokens);
        }
        if position < content.hashed_tokens {
            let block = position / self.block_tokens;
            let first = block * self.block_tokens;
            let end = first.saturating_add(self.block_tokens).min(content.hashed_tokens);
            let id = self.hash_ids.get(content.first_hash as usize + block as usize);
            return (state(Use::HashedBlock, id.copied().unwrap_or(0)), first, end);
        }
        (state(Use::Token, content.own), 0, u32::MAX)
    }
}

/// The token of a place: one more round of the hash that its state came from.
fn place(state: u64, place: u32) -> u32 {
    const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;
    let word = scramble((state ^ u64::from(place)).wrapping_add(GOLDEN));
    high(u64::from(high(word)) * u64::from(VOCABULARY))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hashed(first_hash: u32, hashed_tokens: u32, own: u64) -> Content {
        Content { prefix: 0, prefix_tokens: 0, first_hash, hashed_tokens, own }
    }

    fn all(tokens: &Tokens, content: &Content, at: Range<u32>) -> Vec<u32> {
        let mut list = Vec::new();
        tokens.each(content, at, |token| list.push(token));
        list
    }

    #[test]
    fn tokens_are_equal_exactly_where_the_hashes_are() {
        let tokens = Tokens::new(3, vec![7, 8, 9, 7, 8, 1], 4);
        let (first, second) = (hashed(0, 10, 0), hashed(3, 11, 1));
        let [a, b] = [all(&tokens, &first, 0..12), all(&tokens, &second, 0..12)];
        assert_eq!(a[..8], b[..8]);
        assert!(a[8..].iter().zip(&b[8..]).all(|(a, b)| a != b));
        for (position, token) in (0..12).zip(&a) {
            assert_eq!(tokens.token(&first, position), *token);
        }
        assert_eq!(all(&tokens, &first, 5..9), a[5..9]);
        assert!(all(&tokens, &first, 9..9).is_empty());
        // The hash stands for the tokens wherever the block lies.
        let moved = Tokens::new(3, vec![8], 4);
        assert_eq!(all(&moved, &hashed(0, 4, 0), 0..4), a[4..8]);
        assert_ne!(all(&Tokens::new(4, vec![7, 8, 9], 4), &first, 0..4), a[..4]);
    }

    #[test]
    fn a_prefix_comes_before_what_is_a_requests_own() {
        let tokens = Tokens::new(3, Vec::new(), 512);
        let with = |own| Content { prefix: 2, prefix_tokens: 3, own, ..hashed(0, 0, 0) };
        let [a, b] = [all(&tokens, &with(0), 0..6), all(&tokens, &with(1), 0..6)];
        assert_eq!(a[..3], b[..3]);
        assert!(a[3..].iter().zip(&b[3..]).all(|(a, b)| a != b));
    }
}
