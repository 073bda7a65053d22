//! The requests of a job: how many tokens each brings, and how many it is to generate.

use std::path::Path;

use super::random::{self, Rng};
use super::trace;
use crate::config::{LengthDistribution, WorkloadConfig, WorkloadKind};
use crate::error::JobError;

/// One request. Its content (tokens, keys, values, queries) follows from its `id` and the seed,
/// never from when or with whom it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// What its content is computed from.
    pub id: u64,
    /// Its place in the order of arrival, counted from 0.
    pub arrival: u32,
    /// Tokens that it comes with; at least 1.
    pub prompt_tokens: u32,
    /// Tokens that it generates; at least 1. Each is appended to the cache.
    pub output_tokens: u32,
}

impl Request {
    /// Tokens of the sequence when the request is done.
    #[must_use]
    pub fn total_tokens(&self) -> u64 {
        u64::from(self.prompt_tokens) + u64::from(self.output_tokens)
    }
}

/// What the lengths are drawn for: separates their random numbers from those of other uses.
const LENGTHS: u64 = 0x004C_454E;

/// All requests of a workload, in the order of their arrival.
///
/// # Errors
/// [`JobError::Trace`] when a trace cannot be read.
pub fn requests(config: &WorkloadConfig) -> Result<Vec<Request>, JobError> {
    match config.kind {
        WorkloadKind::Generator => Ok(generate(config)),
        WorkloadKind::AzureCsv => {
            let path = config.path.as_deref().unwrap_or(Path::new(""));
            let limit = config.requests.unwrap_or(u32::MAX);
            let mut requests = Vec::new();
            for (arrival, lengths) in (0..limit).zip(trace::open(path)?) {
                let [prompt, output] = lengths?.map(|n| scaled(n, config.length_scale));
                requests.push(request(arrival, prompt, output));
            }
            Ok(requests)
        }
    }
}

/// The requests of the seeded generator.
fn generate(config: &WorkloadConfig) -> Vec<Request> {
    let mut rng = Rng::new(config.seed, LENGTHS);
    let mut draw = |distribution: &Option<LengthDistribution>| {
        distribution.as_ref().map_or(1, |distribution| length(*distribution, &mut rng))
    };
    (0..config.requests.unwrap_or(0))
        .map(|arrival| {
            let prompt = draw(&config.prompt_tokens);
            request(arrival, prompt, draw(&config.output_tokens))
        })
        .collect()
}

fn request(arrival: u32, prompt_tokens: u32, output_tokens: u32) -> Request {
    Request { id: u64::from(arrival), arrival, prompt_tokens, output_tokens }
}

/// Draws one length. Each draw takes its own numbers from the generator, so lengths depend on
/// nothing but the seed and the distributions before them.
fn length(distribution: LengthDistribution, rng: &mut Rng) -> u32 {
    match distribution {
        LengthDistribution::Fixed { value } => value,
        LengthDistribution::Uniform { min, max } => {
            // The whole range of u32 has one length more than u32 can count.
            min + rng.below((max - min).saturating_add(1))
        }
        LengthDistribution::Lognormal { median, sigma, min, max } => {
            let drawn = median * random::exp(sigma * rng.normal());
            whole(drawn).clamp(min, max)
        }
    }
}

/// A length of a trace, scaled down to whole tokens; never to none.
fn scaled(tokens: u32, scale: f64) -> u32 {
    whole(f64::from(tokens) * scale).max(1)
}

/// Rounds up to a whole number of tokens, at most the largest u32.
fn whole(tokens: f64) -> u32 {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "lengths are positive, and `as` saturates"
    )]
    let whole = tokens.ceil() as u32;
    whole
}

#[cfg(test)]
mod tests {
    use super::*;

    fn generator(seed: u64, prompt: LengthDistribution) -> WorkloadConfig {
        WorkloadConfig {
            kind: WorkloadKind::Generator,
            seed,
            requests: Some(4000),
            path: None,
            prompt_tokens: Some(prompt),
            output_tokens: Some(LengthDistribution::Fixed { value: 7 }),
            length_scale: 1.0,
            check_samples: 0,
        }
    }

    #[test]
    fn the_generator_is_fixed_by_its_seed() {
        let lognormal =
            LengthDistribution::Lognormal { median: 100.0, sigma: 0.8, min: 8, max: 900 };
        let first = requests(&generator(1, lognormal)).expect("no trace");
        assert_eq!(first, requests(&generator(1, lognormal)).expect("no trace"));
        assert_ne!(first, requests(&generator(2, lognormal)).expect("no trace"));
        // Once and for all: a change of these numbers changes every published result.
        let prompts: Vec<u32> = first.iter().take(4).map(|r| r.prompt_tokens).collect();
        assert_eq!(prompts, [135, 276, 61, 159]);
        let shorter = first.iter().filter(|r| r.prompt_tokens <= 100).count();
        assert!((1850..2150).contains(&shorter), "{shorter} of 4000 are below the median");
        assert!(first.iter().all(|r| (8..=900).contains(&r.prompt_tokens) && r.output_tokens == 7));
        assert!(first.iter().zip(0..).all(|(r, at)| r.arrival == at && r.id == u64::from(at)));
    }

    #[test]
    fn a_uniform_length_takes_every_value() {
        let uniform = LengthDistribution::Uniform { min: 3, max: 6 };
        let all = requests(&generator(1, uniform)).expect("no trace");
        for value in 3..=6 {
            let count = all.iter().filter(|r| r.prompt_tokens == value).count();
            assert!((900..1100).contains(&count), "{value}: {count}");
        }
        let everything = LengthDistribution::Uniform { min: 1, max: u32::MAX };
        assert!(requests(&generator(1, everything)).is_ok());
    }

    #[test]
    fn scaling_rounds_up_and_keeps_one() {
        assert_eq!([scaled(100, 0.25), scaled(101, 0.25), scaled(1, 1e-9)], [25, 26, 1]);
        assert_eq!(scaled(u32::MAX, 1.0), u32::MAX);
    }
}
