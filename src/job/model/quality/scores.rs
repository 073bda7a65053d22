//! What the scores of two caches have in common, and how far they are from what follows.

use std::ops::AddAssign;

/// Sums over tokens.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sums {
    pub(super) count: u64,
    pub(super) nll: f64,
    pub(super) nll_squares: f64,
    pub(super) difference: f64,
    pub(super) difference_squares: f64,
    pub(super) kl: f64,
    pub(super) same_top: u64,
}

impl AddAssign for Sums {
    fn add_assign(&mut self, other: Self) {
        self.count += other.count;
        self.nll += other.nll;
        self.nll_squares += other.nll_squares;
        self.difference += other.difference;
        self.difference_squares += other.difference_squares;
        self.kl += other.kl;
        self.same_top += other.same_top;
    }
}

/// Mean and its standard error.
pub(super) fn mean_and_error(sum: f64, squares: f64, count: f64) -> (f64, f64) {
    let mean = sum / count;
    let variance = (squares / count - mean * mean).max(0.0) * count / (count - 1.0).max(1.0);
    (mean, (variance / count).sqrt())
}

/// What is known of the scores of one row.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Row {
    /// The logarithm of the sum of their exponentials.
    log_sum: f64,
    top: usize,
    nll: f64,
    /// With an f32 cache: the mean score, weighted with the shares.
    mean: f64,
}

/// The sums of some rows, and the rows. Without a reference they are it.
pub(super) fn compare(
    scores: &[f32],
    reference: Option<(&[f32], &[Row])>,
    targets: &[u32],
    vocab: usize,
) -> (Sums, Vec<Row>) {
    let mut rows = vec![Row::default(); targets.len()];
    let mut sums = vec![Sums::default(); targets.len()];
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let chunk = targets.len().div_ceil(threads).max(1);
    std::thread::scope(|scope| {
        let parts = rows.chunks_mut(chunk).zip(sums.chunks_mut(chunk));
        for (part, (rows, sums)) in parts.enumerate() {
            scope.spawn(move || {
                for (at, (row, sums)) in (part * chunk..).zip(rows.iter_mut().zip(sums)) {
                    let scores = &scores[at * vocab..][..vocab];
                    let of_f32 =
                        reference.map(|(scores, rows)| (&scores[at * vocab..][..vocab], &rows[at]));
                    (*row, *sums) = compare_row(scores, of_f32, targets[at] as usize);
                }
            });
        }
    });
    let mut all = Sums::default();
    sums.into_iter().for_each(|sums| all += sums);
    (all, rows)
}

fn compare_row(scores: &[f32], reference: Option<(&[f32], &Row)>, target: usize) -> (Row, Sums) {
    let mut top = 0;
    for (token, score) in scores.iter().enumerate() {
        if *score > scores[top] {
            top = token;
        }
    }
    let most = f64::from(scores[top]);
    let sum: f64 = scores.iter().map(|score| (f64::from(*score) - most).exp()).sum();
    let log_sum = most + sum.ln();
    let nll = log_sum - f64::from(scores[target]);
    // Σ p · score, with the shares of the f32 cache.
    let weighted = |of_f32: &[f32], log_sum: f64| -> f64 {
        let pairs = of_f32.iter().zip(scores);
        pairs.map(|(own, score)| (f64::from(*own) - log_sum).exp() * f64::from(*score)).sum()
    };
    let mean = reference.map_or_else(|| weighted(scores, log_sum), |(_, row)| row.mean);
    let row = Row { log_sum, top, nll, mean };
    let mut sums = Sums { count: 1, nll, nll_squares: nll * nll, ..Sums::default() };
    if let Some((of_f32, own)) = reference {
        let difference = nll - own.nll;
        sums.difference = difference;
        sums.difference_squares = difference * difference;
        sums.kl = (own.mean - own.log_sum) - (weighted(of_f32, own.log_sum) - log_sum);
        sums.same_top = u64::from(own.top == top);
    } else {
        sums.same_top = 1;
    }
    (row, sums)
}

/// A count as a float.
pub(super) fn float(count: u64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "counts of tokens are below 2⁵³")]
    let value = count as f64;
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divergence_and_perplexity_are_those_of_the_formulas() {
        #[expect(clippy::cast_possible_truncation, reason = "scores are f32")]
        let scores = |shares: [f64; 3], shift: f32| shares.map(|share| share.ln() as f32 + shift);
        let (p, q) = ([0.5, 0.25, 0.25], [0.25, 0.5, 0.25]);
        let (own, sums) = compare_row(&scores(p, 3.0), None, 1);
        assert!((sums.nll - 4.0_f64.ln()).abs() < 1e-6);
        assert_eq!((own.top, sums.same_top, sums.kl), (0, 1, 0.0));
        let (_, sums) = compare_row(&scores(q, -7.0), Some((&scores(p, 3.0), &own)), 1);
        let kl: f64 = p.iter().zip(q).map(|(p, q)| p * (p / q).ln()).sum();
        assert!((sums.kl - kl).abs() < 1e-6, "{} {kl}", sums.kl);
        assert!((sums.difference + 2.0_f64.ln()).abs() < 1e-6);
        assert_eq!(sums.same_top, 0);
    }

    #[test]
    fn the_error_of_a_mean_is_that_of_the_textbook() {
        let (mean, error) = mean_and_error(10.0, 30.0, 4.0);
        // Of 1, 2, 3, 4: variance 5/3.
        assert!((mean - 2.5).abs() < 1e-12);
        assert!((error - (5.0_f64 / 3.0 / 4.0).sqrt()).abs() < 1e-12);
    }
}
