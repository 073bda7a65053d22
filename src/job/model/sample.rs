//! From scores to a token.
//!
//! A choice depends on the scores, the settings, the request's seed, the answer's number and the
//! position alone. So a request gives the same text alone, in a batch, after a preemption and when
//! a job is resumed.

use super::super::random::{Rng, mix};

/// How tokens are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the scores; 0 takes the best token always.
    pub temperature: f32,
    /// Only the most likely tokens are considered, until their shares come to this. In (0, 1].
    pub top_p: f32,
    /// Where the chance comes from.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { temperature: 0.0, top_p: 1.0, seed: 0 }
    }
}

impl Sampling {
    /// What is wrong with the settings, if anything.
    #[must_use]
    pub fn problem(&self) -> Option<String> {
        if !(self.temperature.is_finite() && self.temperature >= 0.0) {
            return Some(format!("temperature is {}; expected 0 or more", self.temperature));
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return Some(format!("top_p is {}; expected more than 0, at most 1", self.top_p));
        }
        None
    }

    /// Chooses the token at a position of one of a request's answers. `logits`: `[vocab_size]`
    #[must_use]
    pub fn choose(&self, logits: &[f32], answer: u32, position: u32) -> u32 {
        if self.temperature <= 0.0 {
            return best(logits);
        }
        let chance = Rng::new(mix(&[self.seed, answer.into()]), position.into()).unit();
        let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let temperature = f64::from(self.temperature);
        let weight = |score: f32| (f64::from(score - most) / temperature).exp();
        let mut likely: Vec<(u32, f64)> =
            (0..).zip(logits).map(|(token, score)| (token, weight(*score))).collect();
        let total: f64 = likely.iter().map(|(_, weight)| weight).sum();
        if self.top_p >= 1.0 {
            return pick(&likely, chance * total);
        }
        // What cannot be among the likely ones is not sorted.
        let least = total * (1.0 - f64::from(self.top_p))
            / f64::from(u32::try_from(likely.len()).unwrap_or(u32::MAX));
        likely.retain(|(_, weight)| *weight >= least);
        likely.sort_by(|(a, x), (b, y)| y.total_cmp(x).then(a.cmp(b)));
        let (limit, mut sum) = (total * f64::from(self.top_p), 0.0);
        let enough = likely.iter().position(|(_, weight)| {
            sum += weight;
            sum >= limit
        });
        likely.truncate(enough.map_or(likely.len(), |at| at + 1));
        pick(&likely, chance * sum)
    }
}

/// The token with the highest score, the first of equals.
#[must_use]
pub fn best(logits: &[f32]) -> u32 {
    let mut best = (0, f32::NEG_INFINITY);
    for (token, score) in (0..).zip(logits) {
        if *score > best.1 {
            best = (token, *score);
        }
    }
    best.0
}

/// The token in whose share `at` lies.
fn pick(likely: &[(u32, f64)], mut at: f64) -> u32 {
    for (token, weight) in likely {
        at -= weight;
        if at < 0.0 {
            return *token;
        }
    }
    likely.last().map_or(0, |(token, _)| *token)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_is_the_first_of_equals() {
        assert_eq!(best(&[1.0, 3.0, 3.0, f32::NAN]), 1);
        assert_eq!(Sampling::default().choose(&[0.0, 1.0, 0.5], 0, 0), 1);
    }

    #[test]
    fn shares_are_those_of_the_softmax_and_top_p_cuts_the_tail() {
        let logits = [0.5_f32.ln(), 0.3_f32.ln(), 0.2_f32.ln()];
        let count = |sampling: &Sampling| {
            let mut counts = [0_u32; 3];
            for position in 0..20_000 {
                counts[sampling.choose(&logits, 1, position) as usize] += 1;
            }
            counts.map(|count| f64::from(count) / 20_000.0)
        };
        let near = |got: [f64; 3], expected: [f64; 3]| {
            let most = got.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(most < 0.015, "{got:?}, {expected:?}");
        };
        let all = Sampling { temperature: 1.0, top_p: 1.0, seed: 5 };
        near(count(&all), [0.5, 0.3, 0.2]);
        near(count(&Sampling { top_p: 0.7, ..all }), [0.625, 0.375, 0.0]);
        near(count(&Sampling { top_p: 0.01, ..all }), [1.0, 0.0, 0.0]);
        let root: Vec<f64> = [0.25, 0.09, 0.04].iter().map(|x| x / 0.38).collect();
        near(count(&Sampling { temperature: 0.5, ..all }), [root[0], root[1], root[2]]);
    }

    #[test]
    fn answers_and_seeds_differ_and_repeat() {
        let logits = [0.0; 64];
        let line = |seed, answer| -> Vec<u32> {
            let sampling = Sampling { temperature: 1.0, top_p: 1.0, seed };
            (0..8).map(|position| sampling.choose(&logits, answer, position)).collect()
        };
        assert_eq!(line(1, 0), line(1, 0));
        assert_ne!(line(1, 0), line(1, 1));
        assert_ne!(line(1, 0), line(2, 0));
    }
}
