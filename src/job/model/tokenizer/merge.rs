//! Merges neighbours, the best pair first, the leftmost of equals, in O(n log n).

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// How soon a pair is merged: the largest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Priority(i64);

impl Priority {
    /// The lower the rank, the sooner.
    pub(super) fn of_rank(rank: u32) -> Self {
        Self(-i64::from(rank))
    }

    /// The higher the score, the sooner.
    pub(super) fn of_score(score: f32) -> Self {
        // The order of floats is that of their bits, but for the sign; -0 is as 0.
        let bits = (score + 0.0).to_bits().cast_signed();
        Self(i64::from(if bits < 0 { i32::MIN - bits } else { bits }))
    }
}

/// No neighbour.
const NONE: usize = usize::MAX;

/// One pair that can be merged.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Pair {
    priority: Priority,
    left: Reverse<usize>,
    right: usize,
    symbols: (u32, u32),
    merged: u32,
}

/// Merges until nothing can be. `lookup` says what two neighbours become, if anything.
pub(super) fn merge(
    symbols: &mut Vec<u32>,
    mut lookup: impl FnMut(u32, u32) -> Option<(Priority, u32)>,
) {
    let count = symbols.len();
    // Neighbours of each place that is still there.
    let mut next: Vec<usize> = (1..=count).map(|at| if at == count { NONE } else { at }).collect();
    let mut previous: Vec<usize> = (0..count).map(|at| at.checked_sub(1).unwrap_or(NONE)).collect();
    let mut alive = vec![true; count];
    let mut pairs = BinaryHeap::new();
    let mut offer = |pairs: &mut BinaryHeap<Pair>, symbols: &[u32], left: usize, right: usize| {
        if left == NONE || right == NONE {
            return;
        }
        let pair = (symbols[left], symbols[right]);
        if let Some((priority, merged)) = lookup(pair.0, pair.1) {
            pairs.push(Pair { priority, left: Reverse(left), right, symbols: pair, merged });
        }
    };
    for left in 1..count {
        offer(&mut pairs, symbols, left - 1, left);
    }
    while let Some(Pair { left: Reverse(left), right, symbols: pair, merged, .. }) = pairs.pop() {
        // Either may have been merged with another since.
        if !alive[left] || !alive[right] || (symbols[left], symbols[right]) != pair {
            continue;
        }
        symbols[left] = merged;
        alive[right] = false;
        next[left] = next[right];
        if next[right] != NONE {
            previous[next[right]] = left;
        }
        offer(&mut pairs, symbols, previous[left], left);
        offer(&mut pairs, symbols, left, next[left]);
    }
    let mut alive = alive.iter();
    symbols.retain(|_| alive.next() == Some(&true));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_pair_goes_first_and_the_leftmost_of_equals() {
        // 1 + 1 = 2 at once, 2 + 1 = 3 before 2 + 2 = 4.
        let lookup = |a: u32, b: u32| match (a, b) {
            (1, 1) => Some((Priority::of_rank(0), 2)),
            (2, 1) => Some((Priority::of_rank(1), 3)),
            (2, 2) => Some((Priority::of_rank(2), 4)),
            _ => None,
        };
        for (count, expected) in
            [(0, &[][..]), (1, &[1]), (2, &[2]), (3, &[3]), (4, &[4]), (5, &[2, 3]), (8, &[4, 4])]
        {
            let mut symbols = vec![1; count];
            merge(&mut symbols, lookup);
            assert_eq!(symbols, expected, "{count}");
        }
    }

    #[test]
    fn scores_are_ordered_as_floats() {
        let scores = [f32::NEG_INFINITY, -1e30, -2.0, -0.5, 0.0, 1e-30, 3.0, f32::INFINITY];
        for pair in scores.windows(2) {
            assert!(Priority::of_score(pair[0]) < Priority::of_score(pair[1]), "{pair:?}");
        }
        assert_eq!(Priority::of_score(-0.0), Priority::of_score(0.0));
    }
}
