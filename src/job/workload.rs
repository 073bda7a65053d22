//! The requests of a job: what each brings, how many tokens it is to generate, when it arrives, and
//! what it shares with others.
//!
//! Three things make prompts begin alike, as in real traffic: a *shared prefix* (a system prompt),
//! which the generator draws for each conversation from a fixed set; the *turns* of a
//! conversation, whose prompts are everything that was said before and new tokens; and the
//! *hashes* of a trace, which say which blocks of tokens are the same. Requests that share nothing
//! have different tokens from the first on.
//!
//! **Memory.** A trace is read line by line. Of each request 72 bytes stay (a [`Request`]), and 8
//! for each hash of its prompt (of a text, one for 8 tokens); nothing else of the file does. While
//! hashes are read, the tree of all different prefixes is held too, about 24 bytes for each
//! different hash.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use super::arrivals;
use super::generator;
use super::random::mix;
use super::reader;
use super::tokens::Tokens;
use crate::config::{WorkloadConfig, WorkloadKind};
use crate::error::JobError;
use crate::units::counted;

/// What the tokens of a request are. Where two requests have the same content up to a position,
/// they have the same tokens, and so the same keys and values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Content {
    /// The shared prefix that the tokens begin with; counts only with `prefix_tokens`.
    pub prefix: u32,
    /// How many tokens of it; 0 for none.
    pub prefix_tokens: u32,
    /// Of a hashed prompt, where its hashes begin in the workload's list.
    pub first_hash: u32,
    /// How many tokens the hashes stand for; 0 for none.
    pub hashed_tokens: u32,
    /// What the tokens behind it are computed from. All turns of a conversation have the same, and
    /// no two conversations.
    pub own: u64,
}

/// One request. Its content (tokens, keys, values, queries) follows from `content`, its `id` and
/// the seed, never from when or with whom it runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Request {
    /// What its queries are computed from; no two requests have the same.
    pub id: u64,
    /// What its tokens, keys and values are computed from.
    pub content: Content,
    /// Its place in the list, counted from 0: those that are there from the start arrive in this
    /// order.
    pub arrival: u32,
    /// Whether it is another answer to the prompt of the request before it: a fork of that one's
    /// sequence, or of the first answer's that can run. Such requests stand behind the one that is
    /// forked.
    pub is_fork: bool,
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
    /// When a first turn arrives, on the simulated clock.
    pub arrival_ns: u64,
    /// How long after the end of the turn before it a later turn arrives.
    pub gap_ns: u64,
}

impl Request {
    /// Tokens of the sequence when the request is done.
    #[must_use]
    pub fn total_tokens(&self) -> u64 {
        u64::from(self.prompt_tokens) + u64::from(self.output_tokens)
    }
}

const _: () = assert!(size_of::<Request>() == 72);

/// All requests of a workload.
#[derive(Clone, Debug, Default)]
pub struct Requests {
    /// In the order of their arrival; the turns of a conversation one behind the other.
    pub list: Vec<Request>,
    /// The hashes of the prompts' blocks that the contents refer to.
    hash_ids: Vec<u64>,
    /// Tokens of one of them.
    block_tokens: u32,
    /// Lines of the trace that were left out.
    pub damaged_lines: u64,
    /// What is wrong with the first of them.
    pub first_damaged: Option<String>,
    /// Requests that `workload.requests` asks for beyond those that the trace has.
    pub missing_requests: u64,
    /// Requests whose answers count as long as `max_tokens` lets them become.
    pub capped_outputs: u64,
}

impl Requests {
    /// A hash of everything that the requests bring: two workloads that have the same are the same.
    /// Sums are not enough for that: another order of the same lengths has the same sums.
    pub(super) fn digest(&self) -> u64 {
        let words = |request: &Request| {
            // All of them, so that one that comes to them is not forgotten here.
            let Request {
                id,
                content,
                arrival,
                is_fork,
                turn,
                repeated_tokens,
                prompt_tokens,
                output_tokens,
                arrival_ns,
                gap_ns,
            } = *request;
            let Content { prefix, prefix_tokens, first_hash, hashed_tokens, own } = content;
            let small = [arrival, turn, repeated_tokens, prompt_tokens, output_tokens];
            let of_content = [prefix, prefix_tokens, first_hash, hashed_tokens];
            let (small, of_content) = (mix(&small.map(u64::from)), mix(&of_content.map(u64::from)));
            mix(&[id, own, is_fork.into(), arrival_ns, gap_ns, small, of_content])
        };
        let requests = self
            .list
            .iter()
            .fold(self.list.len() as u64, |digest, request| mix(&[digest, words(request)]));
        let hashes =
            self.hash_ids.iter().fold(self.hash_ids.len() as u64, |digest, id| mix(&[digest, *id]));
        mix(&[requests, hashes, self.block_tokens.into()])
    }

    /// Makes up the tokens of the requests, and takes the hashes for that.
    pub(super) fn take_tokens(&mut self, seed: u64) -> Tokens {
        Tokens::new(seed, std::mem::take(&mut self.hash_ids), self.block_tokens)
    }
}

/// All requests of a workload, in the order of their arrival.
///
/// # Errors
/// [`JobError::Trace`] when a trace cannot be read.
pub fn requests(config: &WorkloadConfig) -> Result<Requests, JobError> {
    let mut requests = match config.kind {
        WorkloadKind::Generator => {
            Requests { list: generator::generate(config), ..Requests::default() }
        }
        WorkloadKind::AzureCsv
        | WorkloadKind::MooncakeJsonl
        | WorkloadKind::LengthsCsv
        | WorkloadKind::OpenaiJsonl => read(config)?,
    };
    arrivals::assign(config, &mut requests.list);
    if !requests.hash_ids.is_empty() {
        count_repeated(&mut requests);
    }
    Ok(requests)
}

/// The requests of a trace.
fn read(config: &WorkloadConfig) -> Result<Requests, JobError> {
    let mut trace = reader::open(config)?;
    let block_tokens = match config.kind {
        WorkloadKind::OpenaiJsonl => reader::openai::BLOCK_TOKENS,
        _ => config.scaled_hash_block(),
    };
    let mut requests = Requests { block_tokens, ..Requests::default() };
    let limit = config.requests.unwrap_or(u32::MAX);
    let mut hash_ids = Vec::new();
    let scaled = |tokens| scaled(tokens, config.length_scale);
    for arrival in 0..limit {
        let Some(row) = trace.next_row(&mut hash_ids)? else { break };
        let prompt_tokens = scaled(row.prompt_tokens);
        let Ok(first_hash) = u32::try_from(requests.hash_ids.len()) else { break };
        requests.hash_ids.extend_from_slice(&hash_ids);
        let hashed_tokens = if hash_ids.is_empty() { 0 } else { prompt_tokens };
        let own = u64::from(arrival);
        requests.list.push(Request {
            id: own,
            content: Content { first_hash, hashed_tokens, own, ..Content::default() },
            arrival,
            prompt_tokens,
            output_tokens: scaled(row.output_tokens),
            // Counted from the first later on.
            arrival_ns: row.arrival_ns.cast_unsigned(),
            ..Request::default()
        });
    }
    requests.capped_outputs = trace.capped();
    let damaged = trace.damaged();
    if requests.list.is_empty() {
        let left_out = damaged.first.map_or_else(String::new, |first| {
            format!(
                " that can be read: {} left out; the first: {first}",
                counted(damaged.lines, "damaged line")
            )
        });
        return Err(JobError::Trace {
            path: config.path.clone().unwrap_or_default(),
            line: 0,
            problem: format!("has no requests{left_out}"),
        });
    }
    (requests.damaged_lines, requests.first_damaged) = (damaged.lines, damaged.first);
    let asked = config.requests.map_or(0, u64::from);
    requests.missing_requests = asked.saturating_sub(requests.list.len() as u64);
    Ok(requests)
}

/// Counts what an infinite cache would find of each prompt: walks down the tree of all prefixes so
/// far. A node is a block behind the blocks before it, and knows how many tokens of it have been
/// seen.
fn count_repeated(requests: &mut Requests) {
    let Requests { list, hash_ids, block_tokens, .. } = requests;
    let mut nodes: HashMap<(u32, u64), (u32, u32)> = HashMap::new();
    let mut next_node = 1;
    for request in list {
        let (mut parent, mut repeated, mut known) = (0, 0, true);
        let mut left = request.content.hashed_tokens;
        let ids = &hash_ids[request.content.first_hash as usize..];
        for id in ids.iter().take(left.div_ceil(*block_tokens) as usize) {
            let own = left.min(*block_tokens);
            left -= own;
            match nodes.entry((parent, *id)) {
                Entry::Occupied(mut node) => {
                    let (name, seen) = node.get_mut();
                    if known {
                        repeated += own.min(*seen);
                        known = *seen >= own && own == *block_tokens;
                    }
                    *seen = own.max(*seen);
                    parent = *name;
                }
                Entry::Vacant(node) => {
                    node.insert((next_node, own));
                    known = false;
                    parent = next_node;
                    next_node += 1;
                }
            }
        }
        request.repeated_tokens = repeated;
    }
}

/// A length of a trace, scaled down to whole tokens; never to none.
fn scaled(tokens: u32, scale: f64) -> u32 {
    whole(f64::from(tokens) * scale).max(1)
}

/// Rounds up to a whole number of tokens, at most the largest u32.
pub(super) fn whole(tokens: f64) -> u32 {
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

    #[test]
    fn scaling_rounds_up_and_keeps_one() {
        assert_eq!([scaled(100, 0.25), scaled(101, 0.25), scaled(1, 1e-9)], [25, 26, 1]);
        assert_eq!(scaled(u32::MAX, 1.0), u32::MAX);
    }

    /// Whatever a request brings is part of the digest, and so is its place among the others.
    #[test]
    fn the_digest_tells_workloads_with_the_same_sums_apart() {
        let list = [3_u32, 5].map(|tokens| Request {
            prompt_tokens: tokens,
            output_tokens: 8 - tokens,
            ..Request::default()
        });
        let of = |list: Vec<Request>| Requests { list, ..Requests::default() }.digest();
        let with = |change: fn(&mut Request)| {
            let mut list = list.to_vec();
            change(&mut list[1]);
            of(list)
        };
        let mut all = vec![
            of(list.to_vec()),
            of(vec![list[1], list[0]]),
            of(vec![list[0]]),
            with(|request| request.id = 1),
            with(|request| request.content.prefix = 1),
            with(|request| request.content.prefix_tokens = 1),
            with(|request| request.content.first_hash = 1),
            with(|request| request.content.hashed_tokens = 1),
            with(|request| request.content.own = 1),
            with(|request| request.arrival = 1),
            with(|request| request.is_fork = true),
            with(|request| request.turn = 1),
            with(|request| request.repeated_tokens = 1),
            with(|request| request.prompt_tokens += 1),
            with(|request| request.output_tokens += 1),
            with(|request| request.arrival_ns = 1),
            with(|request| request.gap_ns = 1),
            hashed(&[(10, &[1, 2, 3])]).digest(),
            hashed(&[(10, &[1, 2, 4])]).digest(),
            hashed(&[(10, &[2, 1, 3])]).digest(),
            Requests { block_tokens: 5, ..hashed(&[(10, &[1, 2, 3])]) }.digest(),
        ];
        let count = all.len();
        assert_eq!(of(list.to_vec()), all[0]);
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), count);
    }

    /// Prompts with these tokens and hashes, in blocks of 4.
    fn hashed(prompts: &[(u32, &[u64])]) -> Requests {
        let mut requests = Requests { block_tokens: 4, ..Requests::default() };
        for (tokens, ids) in prompts {
            let first_hash = u32::try_from(requests.hash_ids.len()).expect("few");
            requests.hash_ids.extend_from_slice(ids);
            let content = Content { first_hash, hashed_tokens: *tokens, ..Content::default() };
            let own = Request { content, prompt_tokens: *tokens, ..Request::default() };
            requests.list.push(own);
        }
        requests
    }

    #[test]
    fn an_infinite_cache_finds_what_was_there() {
        let mut requests = hashed(&[
            (10, &[1, 2, 3]),
            (10, &[1, 2, 3]),
            (12, &[1, 2, 3]), // the third block goes on for two tokens that nobody has seen
            (12, &[1, 2, 3]),
            (11, &[1, 2, 4]),
            (8, &[2, 3]), // the same hashes at another place are no prefix
            (9, &[1, 2, 3]),
        ]);
        count_repeated(&mut requests);
        let repeated: Vec<u32> = requests.list.iter().map(|r| r.repeated_tokens).collect();
        assert_eq!(repeated, [0, 10, 10, 12, 8, 0, 9]);
    }
}
