//! The seeded generator.

use super::random::{self, Rng};
use super::workload::{Content, Request, whole};
use crate::config::{LengthDistribution, WorkloadConfig};

/// What the lengths are drawn for: separates their random numbers from those of other uses. Each
/// use has its own, so that what is shared changes no length of what is not.
pub(super) const LENGTHS: u64 = 0x004C_454E;
/// The lengths of the shared prefixes.
const PREFIX_LENGTHS: u64 = 0x5046_584C;
/// Which conversation has which shared prefix.
const PREFIX_CHOICE: u64 = 0x5046_5843;
/// The numbers of turns.
const TURNS: u64 = 0x5455_524E;
/// How many answers a prompt has.
const ANSWERS: u64 = 0x414E_5357;
/// What agents' tools answer, how often and how late.
const TOOLS: u64 = 0x544F_4F4C;
/// The times between turns.
const THINKING: u64 = 0x5448_4E4B;

/// The requests of the seeded generator, conversation by conversation. The last one is cut off
/// where there are enough requests.
pub(super) fn generate(config: &WorkloadConfig) -> Vec<Request> {
    let mut lengths = Rng::new(config.seed, LENGTHS);
    let mut draw = |distribution: Option<LengthDistribution>| {
        distribution.map_or(1, |distribution| length(distribution, &mut lengths))
    };
    let mut prefixes = Prefixes::new(config);
    let mut turns = Rng::new(config.seed, TURNS);
    let mut tools = Tools::new(config);
    if config.answers.is_some() {
        return with_answers(config);
    }
    let wanted = config.requests.unwrap_or(0);
    let mut requests = Vec::with_capacity(wanted as usize);
    let mut arrival = 0;
    for own in 0.. {
        if arrival == wanted {
            break;
        }
        let (prefix, prefix_tokens, mut repeated_tokens) = prefixes.choose();
        let content = Content { prefix, prefix_tokens, own, ..Content::default() };
        // What the next prompt begins with; what does not fit u32 is longer than any limit.
        let mut history = prefix_tokens;
        let mut turns_left =
            config.turns.map_or(1, |distribution| length(distribution, &mut turns));
        let mut calls_left = tools.calls();
        let mut is_answer = false;
        for turn in 0..wanted - arrival {
            let brought = if is_answer { tools.answer() } else { draw(config.prompt_tokens) };
            let prompt_tokens = history.saturating_add(brought);
            let output_tokens = draw(config.output_tokens);
            requests.push(Request {
                id: u64::from(arrival),
                content,
                arrival,
                turn,
                repeated_tokens,
                prompt_tokens,
                output_tokens,
                gap_ns: if turn == 0 { 0 } else { tools.gap_ns(is_answer) },
                is_fork: false,
                arrival_ns: 0,
            });
            arrival += 1;
            history = prompt_tokens.saturating_add(output_tokens);
            repeated_tokens = history;
            is_answer = calls_left > 0;
            if is_answer {
                calls_left -= 1;
                continue;
            }
            turns_left -= 1;
            if turns_left == 0 {
                break;
            }
            calls_left = tools.calls();
        }
    }
    requests
}

/// Prompts with several answers each: behind the request of a prompt stand those of its other
/// answers. The first is the longest, so that its limit is enough for its forks.
fn with_answers(config: &WorkloadConfig) -> Vec<Request> {
    let mut lengths = Rng::new(config.seed, LENGTHS);
    let mut counts = Rng::new(config.seed, ANSWERS);
    let wanted = config.requests.unwrap_or(0);
    let mut requests = Vec::with_capacity(wanted as usize);
    let (mut arrival, mut outputs) = (0, Vec::new());
    for prompt in 0.. {
        if arrival == wanted {
            break;
        }
        let mut draw = |distribution: Option<LengthDistribution>| {
            distribution.map_or(1, |distribution| length(distribution, &mut lengths))
        };
        let prompt_tokens = draw(config.prompt_tokens);
        let answers = config.answers.map_or(1, |answers| length(answers, &mut counts));
        outputs.clear();
        outputs.extend((0..answers.min(wanted - arrival)).map(|_| draw(config.output_tokens)));
        outputs.sort_unstable_by(|a, b| b.cmp(a));
        for (answer, &output_tokens) in outputs.iter().enumerate() {
            // All answers have the prompt's tokens, and each its own behind them.
            let own = u64::from(arrival);
            let content =
                Content { prefix: prompt, prefix_tokens: prompt_tokens, own, ..Content::default() };
            requests.push(Request {
                id: own,
                content,
                arrival,
                is_fork: answer > 0,
                repeated_tokens: if answer > 0 { prompt_tokens } else { 0 },
                prompt_tokens,
                output_tokens,
                ..Request::default()
            });
            arrival += 1;
        }
    }
    requests
}

/// What goes on between the requests of a conversation.
struct Tools<'a> {
    config: &'a WorkloadConfig,
    lengths: Rng,
    thinking: Rng,
}

impl<'a> Tools<'a> {
    fn new(config: &'a WorkloadConfig) -> Self {
        let (lengths, thinking) = (Rng::new(config.seed, TOOLS), Rng::new(config.seed, THINKING));
        Self { config, lengths, thinking }
    }

    /// How many calls the next turn makes.
    fn calls(&mut self) -> u32 {
        self.config.tool_calls.map_or(0, |calls| length(calls, &mut self.lengths))
    }

    /// How long the answer of a call is.
    fn answer(&mut self) -> u32 {
        self.config.tool_tokens.map_or(1, |tokens| length(tokens, &mut self.lengths))
    }

    /// The time from the end of a request to the next of its conversation.
    fn gap_ns(&mut self, is_answer: bool) -> u64 {
        let ms = if is_answer {
            self.config.tool_ms.map_or(0, |ms| length(ms, &mut self.lengths))
        } else {
            self.config.think_ms.map_or(0, |ms| length(ms, &mut self.thinking))
        };
        u64::from(ms) * 1_000_000
    }
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

/// Draws one length. Each draw takes its own numbers from the generator, so lengths depend on
/// nothing but the seed and the distributions before them.
pub(super) fn length(distribution: LengthDistribution, rng: &mut Rng) -> u32 {
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
        LengthDistribution::Bimodal { median, second_median, second_share, sigma, min, max } => {
            let median = if rng.unit() < second_share { second_median } else { median };
            whole(median * random::exp(sigma * rng.normal())).clamp(min, max)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::WorkloadKind;

    fn requests(config: &WorkloadConfig) -> Vec<Request> {
        generate(config)
    }

    fn generator(seed: u64, prompt: LengthDistribution) -> WorkloadConfig {
        WorkloadConfig {
            seed,
            requests: Some(4000),
            prompt_tokens: Some(prompt),
            output_tokens: Some(LengthDistribution::Fixed { value: 7 }),
            ..WorkloadConfig::new(WorkloadKind::Generator)
        }
    }

    #[test]
    fn the_generator_is_fixed_by_its_seed() {
        let lognormal =
            LengthDistribution::Lognormal { median: 100.0, sigma: 0.8, min: 8, max: 900 };
        let first = requests(&generator(1, lognormal));
        assert_eq!(first, requests(&generator(1, lognormal)));
        assert_ne!(first, requests(&generator(2, lognormal)));
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
        let (plain, shared) = (requests(&plain), requests(&sharing));
        assert_eq!(shared, requests(&sharing));
        let mut lengths = [None; 3];
        for (plain, shared) in plain.iter().zip(&shared) {
            let Content { prefix, prefix_tokens, own, .. } = shared.content;
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
        assert!(requests(&one).iter().all(|r| r.content.prefix == 0));
    }

    #[test]
    fn answers_stand_behind_their_prompt() {
        let config = WorkloadConfig {
            answers: Some(LengthDistribution::Uniform { min: 1, max: 4 }),
            output_tokens: Some(LengthDistribution::Uniform { min: 5, max: 50 }),
            ..generator(1, LengthDistribution::Uniform { min: 1, max: 90 })
        };
        let all = requests(&config);
        assert_eq!((all.len(), &all), (4000, &requests(&config)));
        let forks = all.iter().filter(|request| request.is_fork).count();
        assert!((2300..2500).contains(&forks), "three of five: {forks}");
        for pair in all.windows(2) {
            let [before, next] = pair else { unreachable!("pairs") };
            assert_ne!(before.content.own, next.content.own);
            assert_eq!(before.content.prefix == next.content.prefix, next.is_fork);
            if next.is_fork {
                assert_eq!(before.prompt_tokens, next.prompt_tokens);
                assert!(before.output_tokens >= next.output_tokens);
            }
        }
    }

    #[test]
    fn a_turn_continues_the_conversation() {
        let config = WorkloadConfig {
            shared_prefix_tokens: Some(LengthDistribution::Fixed { value: 5 }),
            turns: Some(LengthDistribution::Uniform { min: 1, max: 4 }),
            ..generator(1, LengthDistribution::Uniform { min: 1, max: 9 })
        };
        let all = requests(&config);
        assert_eq!(all, requests(&config));
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
        let all = requests(&endless);
        assert!(all.iter().zip(0..).all(|(r, at)| r.turn == at && r.content.own == 0));
    }

    #[test]
    fn a_uniform_length_takes_every_value() {
        let uniform = LengthDistribution::Uniform { min: 3, max: 6 };
        let all = requests(&generator(1, uniform));
        for value in 3..=6 {
            let count = all.iter().filter(|r| r.prompt_tokens == value).count();
            assert!((900..1100).contains(&count), "{value}: {count}");
        }
        let everything = LengthDistribution::Uniform { min: 1, max: u32::MAX };
        assert_eq!(requests(&generator(1, everything)).len(), 4000);
    }

    #[test]
    fn two_modes_have_their_shares() {
        let bimodal = LengthDistribution::Bimodal {
            median: 100.0,
            second_median: 8000.0,
            second_share: 0.25,
            sigma: 0.3,
            min: 8,
            max: 32_000,
        };
        let all = requests(&generator(1, bimodal));
        let long = all.iter().filter(|r| r.prompt_tokens > 1000).count();
        assert!((900..1100).contains(&long), "{long} of 4000");
        let short = all.iter().filter(|r| r.prompt_tokens <= 100).count();
        assert!((1350..1650).contains(&short), "{short}: half of the other three quarters");
    }

    #[test]
    fn agents_go_on_with_what_their_tools_answer() {
        let fixed = |value| Some(LengthDistribution::Fixed { value });
        let config = WorkloadConfig {
            turns: fixed(2),
            tool_calls: fixed(3),
            tool_tokens: fixed(50),
            tool_ms: fixed(9),
            think_ms: fixed(1000),
            ..generator(1, LengthDistribution::Fixed { value: 10 })
        };
        let all = requests(&config);
        // A turn of 10 tokens and three answers of 50, twice; each goes on behind 7 of output.
        for conversation in all.chunks_exact(8) {
            let prompts: Vec<u32> = conversation.iter().map(|r| r.prompt_tokens).collect();
            assert_eq!(prompts, [10, 67, 124, 181, 198, 255, 312, 369]);
            let gaps: Vec<u64> = conversation.iter().map(|r| r.gap_ns / 1_000_000).collect();
            assert_eq!(gaps, [0, 9, 9, 9, 1000, 9, 9, 9]);
            assert!(conversation.iter().zip(0..).all(|(r, turn)| r.turn == turn));
        }
        // Some turns call no tool, and what takes no time follows at once.
        let calls = LengthDistribution::Uniform { min: 0, max: 2 };
        let few = WorkloadConfig {
            tool_calls: Some(calls),
            tool_ms: fixed(0),
            think_ms: fixed(0),
            ..config.clone()
        };
        let few = requests(&few);
        let mut lengths = [0; 9];
        few.chunk_by(|_, next| next.turn > 0).for_each(|turns| lengths[turns.len()] += 1);
        assert!(lengths[2..=6].iter().all(|count| *count > 50), "{lengths:?}");
        assert_eq!(lengths[7..], [0, 0]);
        assert!(few.iter().all(|request| request.gap_ns == 0));
        // What tools do changes no length of what people say.
        let uniform = LengthDistribution::Uniform { min: 1, max: 900 };
        let plain = requests(&generator(1, uniform));
        let agents = WorkloadConfig { turns: None, ..config };
        let agents = requests(&WorkloadConfig { prompt_tokens: Some(uniform), ..agents });
        assert_eq!(agents[0].prompt_tokens, plain[0].prompt_tokens);
    }
}
