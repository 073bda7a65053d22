//! The requests of a job: what each brings, how many tokens it is to generate, and what it shares
//! with others.
//!
//! Two things make prompts begin alike, as in real traffic: a *shared prefix* (a system prompt),
//! which the generator draws for each conversation from a fixed set, and the *turns* of a
//! conversation, whose prompts are everything that was said before and new tokens. Requests that
//! share nothing have different tokens from the first on.

use std::path::Path;

use super::random::{self, Rng};
use super::trace;
use crate::config::{LengthDistribution, WorkloadConfig, WorkloadKind};
use crate::error::JobError;

/// What the tokens of a request are. Where two requests have the same content up to a position,
/// they have the same tokens, and so the same keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Content {
    /// The shared prefix that the tokens begin with; counts only with `prefix_tokens`.
    pub prefix: u32,
    /// How many tokens of it; 0 for none.
    pub prefix_tokens: u32,
    /// What the tokens behind it are computed from. All turns of a conversation have the same, and
    /// no two conversations.
    pub own: u64,
}

/// One request. Its content (tokens, keys, values, queries) follows from `content`, its `id` and
/// the seed, never from when or with whom it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// What its queries are computed from; no two requests have the same.
    pub id: u64,
    /// What its tokens, keys and values are computed from.
    pub content: Content,
    /// Its place in the list, counted from 0: those that are there from the start arrive in this
    /// order.
    pub arrival: u32,
    /// Which turn of its conversation it is, counted from 0. Turn n + 1 stands behind turn n in
    /// the list, and arrives when that is done.
    pub turn: u32,
    /// Tokens at the start of its prompt that a request before it in the list has too: what prefix
    /// reuse can save at most.
    pub repeated_tokens: u32,
    /// Tokens that it comes with, shared prefix and earlier turns included; at least 1.
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

/// What the lengths are drawn for: separates their random numbers from those of other uses. Each
/// use has its own, so that what is shared changes no length of what is not.
const LENGTHS: u64 = 0x004C_454E;
/// The lengths of the shared prefixes.
const PREFIX_LENGTHS: u64 = 0x5046_584C;
/// Which conversation has which shared prefix.
const PREFIX_CHOICE: u64 = 0x5046_5843;
/// The numbers of turns.
const TURNS: u64 = 0x5455_524E;

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
                requests.push(alone(arrival, prompt, output));
            }
            Ok(requests)
        }
    }
}

/// The requests of the seeded generator, conversation by conversation. The last one is cut off
/// where there are enough requests.
fn generate(config: &WorkloadConfig) -> Vec<Request> {
    let mut lengths = Rng::new(config.seed, LENGTHS);
    let mut draw = |distribution: Option<LengthDistribution>| {
        distribution.map_or(1, |distribution| length(distribution, &mut lengths))
    };
    let mut prefixes = Prefixes::new(config);
    let mut turns = Rng::new(config.seed, TURNS);
    let wanted = config.requests.unwrap_or(0);
    let mut requests = Vec::with_capacity(wanted as usize);
    let mut arrival = 0;
    for own in 0.. {
        if arrival == wanted {
            break;
        }
        let (prefix, prefix_tokens, mut repeated_tokens) = prefixes.choose();
        let content = Content { prefix, prefix_tokens, own };
        // What the next prompt begins with; what does not fit u32 is longer than any limit.
        let mut history = prefix_tokens;
        let wanted_turns = config.turns.map_or(1, |distribution| length(distribution, &mut turns));
        for turn in 0..wanted_turns.min(wanted - arrival) {
            let prompt_tokens = history.saturating_add(draw(config.prompt_tokens));
            let output_tokens = draw(config.output_tokens);
            requests.push(Request {
                id: u64::from(arrival),
                content,
                arrival,
                turn,
                repeated_tokens,
                prompt_tokens,
                output_tokens,
            });
            arrival += 1;
            history = prompt_tokens.saturating_add(output_tokens);
            repeated_tokens = history;
        }
    }
    requests
}

/// The shared prefixes of a workload.
struct Prefixes {
    /// How long each is, and whether a request has it already; empty when nothing is shared.
    prefixes: Vec<(u32, bool)>,
    choice: Rng,
}

impl Prefixes {
    fn new(config: &WorkloadConfig) -> Self {
        let mut lengths = Rng::new(config.seed, PREFIX_LENGTHS);
        let count = config.num_shared_prefixes.unwrap_or(1);
        let prefixes = config.shared_prefix_tokens.map_or_else(Vec::new, |distribution| {
            (0..count).map(|_| (length(distribution, &mut lengths), false)).collect()
        });
        Self { prefixes, choice: Rng::new(config.seed, PREFIX_CHOICE) }
    }

    /// The prefix of the next conversation, how long it is, and how many of its tokens a request
    /// before has too.
    fn choose(&mut self) -> (u32, u32, u32) {
        let count = u32::try_from(self.prefixes.len()).unwrap_or(u32::MAX);
        if count == 0 {
            return (0, 0, 0);
        }
        let chosen = self.choice.below(count);
        let (tokens, seen) = &mut self.prefixes[chosen as usize];
        let repeated = if *seen { *tokens } else { 0 };
        *seen = true;
        (chosen, *tokens, repeated)
    }
}

/// A request that shares nothing with any other.
fn alone(arrival: u32, prompt_tokens: u32, output_tokens: u32) -> Request {
    let id = u64::from(arrival);
    let content = Content { prefix: 0, prefix_tokens: 0, own: id };
    Request { id, content, arrival, turn: 0, repeated_tokens: 0, prompt_tokens, output_tokens }
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
            shared_prefix_tokens: None,
            num_shared_prefixes: None,
            turns: None,
            max_open_conversations: None,
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
        assert!(
            first.iter().all(|r| r.content.own == r.id && (r.turn, r.repeated_tokens) == (0, 0))
        );
    }

    #[test]
    fn shared_prefixes_stand_before_the_same_requests() {
        let uniform = LengthDistribution::Uniform { min: 1, max: 90 };
        let plain = generator(1, uniform);
        let sharing = WorkloadConfig {
            shared_prefix_tokens: Some(LengthDistribution::Uniform { min: 10, max: 20 }),
            num_shared_prefixes: Some(3),
            ..plain.clone()
        };
        let (plain, shared) = (requests(&plain).expect("fine"), requests(&sharing).expect("fine"));
        assert_eq!(shared, requests(&sharing).expect("fine"));
        let mut lengths = [None; 3];
        for (plain, shared) in plain.iter().zip(&shared) {
            let Content { prefix, prefix_tokens, own } = shared.content;
            assert_eq!(own, plain.content.own);
            assert_eq!(shared.prompt_tokens, prefix_tokens + plain.prompt_tokens);
            assert_eq!(shared.output_tokens, plain.output_tokens);
            // The first that has it repeats nothing; every other all of it.
            let seen = lengths[prefix as usize].replace(prefix_tokens);
            assert_eq!(shared.repeated_tokens, seen.unwrap_or(0));
            assert!(seen.is_none_or(|seen| seen == prefix_tokens));
        }
        let lengths = lengths.map(|length| length.expect("every prefix is used"));
        assert!(lengths.iter().all(|length| (10..=20).contains(length)), "{lengths:?}");
        let one = WorkloadConfig { num_shared_prefixes: None, ..sharing };
        assert!(requests(&one).expect("fine").iter().all(|r| r.content.prefix == 0));
    }

    #[test]
    fn a_turn_continues_the_conversation() {
        let config = WorkloadConfig {
            shared_prefix_tokens: Some(LengthDistribution::Fixed { value: 5 }),
            turns: Some(LengthDistribution::Uniform { min: 1, max: 4 }),
            ..generator(1, LengthDistribution::Uniform { min: 1, max: 9 })
        };
        let all = requests(&config).expect("fine");
        assert_eq!(all, requests(&config).expect("fine"));
        assert_eq!(all.len(), 4000, "each turn is a request");
        let mut counts = [0; 4];
        for pair in all.windows(2) {
            let [before, next] = pair else { unreachable!("pairs") };
            counts[before.turn as usize] += 1;
            if next.turn == 0 {
                assert_eq!(next.content.own, before.content.own + 1);
                assert!(next.prompt_tokens > 5 && next.prompt_tokens <= 5 + 9);
                continue;
            }
            assert_eq!((next.content, next.turn), (before.content, before.turn + 1));
            assert_eq!(u64::from(next.repeated_tokens), before.total_tokens());
            assert!(next.prompt_tokens > next.repeated_tokens);
        }
        assert!(counts.is_sorted_by(|a, b| a > b) && counts[3] > 300, "{counts:?}");
        let endless = LengthDistribution::Fixed { value: u32::MAX };
        let endless = WorkloadConfig { turns: Some(endless), ..config };
        let all = requests(&endless).expect("fine");
        assert!(all.iter().zip(0..).all(|(r, at)| r.turn == at && r.content.own == 0));
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
