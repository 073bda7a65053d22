//! While nothing is evicted, the model knows exactly what is cached: a prompt finds all of it.

use std::collections::{HashMap, HashSet};

use kvpool::cache::{BeginOptions, Cache};
use kvpool::device::NullDevice;

use super::driver_step::skip;
use super::rig::paged;
use super::text::{Ns, Text};
use crate::common::{Rng, Spec};

const BLOCK: u32 = 8;

/// The blocks that can be found.
#[derive(Default)]
struct Published {
    /// The blocks behind a prefix, by what stands for the prefix and the salt behind it.
    children: HashMap<u64, Vec<Vec<u32>>>,
    blocks: HashSet<u64>,
}

impl Published {
    /// Full blocks below the look-ahead, all of whose tokens are known.
    fn publish(&mut self, text: &Text, lookahead: u32) {
        let stable = text.len().saturating_sub(lookahead).min(text.known());
        for end in (1..=stable / BLOCK).map(|block| block * BLOCK) {
            if self.blocks.insert(text.hash_before(end as usize)) {
                let start = end - BLOCK;
                let tokens = &text.tokens[start as usize..end as usize];
                let tokens = tokens.iter().map(|token| *token as u32).collect();
                self.children.entry(text.block_key(start)).or_default().push(tokens);
            }
        }
    }

    /// Tokens of a prompt that are there: whole blocks, then the longest part of one.
    fn find(&self, ns: Ns, prompt: &[u32]) -> (u32, u32) {
        let text = Text::of(ns, 0, BLOCK, prompt);
        let most = prompt.len().saturating_sub(1);
        let mut full = 0;
        let whole = |full: usize| self.blocks.contains(&text.hash_before(full * BLOCK as usize));
        while (full + 1) * BLOCK as usize <= most && whole(full + 1) {
            full += 1;
        }
        let start = full * BLOCK as usize;
        let rest = &prompt[start..most.max(start)];
        let run = |tokens: &Vec<u32>| tokens.iter().zip(rest).take_while(|(a, b)| a == b).count();
        let children = self.children.get(&text.block_key(start as u32));
        let partial = children.and_then(|all| all.iter().map(run).max()).unwrap_or(0);
        (full as u32, partial as u32)
    }
}

/// A prompt of whole blocks of equal tokens and one token more, so that sequences part where a
/// block begins and no begin takes a part of a block over.
fn prompt(rng: &mut Rng) -> Vec<u32> {
    let blocks = rng.below(4);
    let mut prompt = Vec::new();
    for _ in 0..blocks {
        prompt.extend([rng.below(3) as u32; BLOCK as usize]);
    }
    prompt.push(rng.below(3) as u32);
    prompt
}

#[test]
fn edge_24_everything_that_was_published_is_found() {
    let spec = Spec { max_step_tokens: Some(16), ..paged(2048) };
    let plan = spec.plan();
    let device = Box::new(NullDevice::open(&plan));
    let mut cache = Cache::open(plan, device).expect("opens");
    let spaces = [
        Ns::default(),
        Ns { salt: 2, salt_from: 8, ..Ns::default() },
        Ns { adapter: 1, ..Ns::default() },
    ];
    let mut rng = Rng(24);
    let mut published = Published::default();
    // Sequence, text, prompt, look-ahead.
    let mut alive: Vec<(kvpool::cache::SeqHandle, Text, Vec<u32>, u32)> = Vec::new();
    let (mut hit_tokens, mut query_tokens, mut queries) = (0_u64, 0_u64, 0_u64);
    for _ in 0..20_000 {
        let at = rng.below(alive.len().max(1) as u64) as usize;
        match rng.below(8) {
            0..2 if alive.len() < 6 => {
                let (prompt, ns) = (prompt(&mut rng), spaces[rng.below(3) as usize]);
                let lookahead = if rng.below(3) == 0 { 3 } else { 0 };
                let options = BeginOptions {
                    lookahead_tokens: lookahead,
                    namespace: ns.options(),
                    ..BeginOptions::default()
                };
                let (full, partial) = published.find(ns, &prompt);
                let begun = cache.begin(&prompt, options).expect("there is room");
                assert_eq!((begun.cached_len, partial), (full * BLOCK, 0), "{ns:?}: {prompt:?}");
                hit_tokens += u64::from(begun.cached_len);
                query_tokens += prompt.len() as u64;
                queries += 1;
                let text = Text::of(ns, 0, BLOCK, &prompt[..begun.cached_len as usize]);
                alive.push((begun.sequence, text, prompt, lookahead));
            }
            2..6 if !alive.is_empty() => {
                let (seq, text, prompt, lookahead) = &mut alive[at];
                let n = (1 + rng.below(12) as u32).min(60 - text.len().min(60));
                let mut ids = Vec::new();
                for _ in 0..n {
                    let position = text.len() as usize;
                    let token = match prompt.get(position) {
                        Some(token) => u64::from(*token),
                        // Parts from others only where a block begins.
                        None if position.is_multiple_of(BLOCK as usize) => rng.below(3),
                        None => text.tokens[position - 1],
                    };
                    ids.push(token as u32);
                    text.push(token);
                }
                if n > 0 {
                    skip(cache.reserve_tokens(&[(*seq, n)], &ids).expect("promised"))
                        .expect("whole");
                    published.publish(text, *lookahead);
                }
            }
            6 if !alive.is_empty() => {
                let (seq, text, ..) = alive.swap_remove(at);
                cache.release(seq).expect("alive");
                // Nothing is rewound any more, so the look-ahead holds nothing back.
                published.publish(&text, 0);
            }
            7 if !alive.is_empty() && alive.len() < 7 => {
                let (seq, text, prompt, lookahead) = alive[at].clone();
                if let Ok(seq) = cache.fork(seq) {
                    alive.push((seq, text, prompt, lookahead));
                }
            }
            _ => {}
        }
        cache.check_invariants().expect("invariants");
        // A prompt of any length, which may end inside a block.
        let mut asked = prompt(&mut rng);
        asked.truncate(1 + rng.below(asked.len() as u64) as usize);
        let ns = spaces[rng.below(3) as usize];
        let (probe, (full, partial)) =
            (cache.probe(&asked, &ns.options()), published.find(ns, &asked));
        assert_eq!((probe.full_blocks, probe.partial_tokens), (full, partial), "{asked:?}");
    }
    let stats = cache.stats();
    assert_eq!(stats.evictions, 0, "the model counts on it");
    assert_eq!(stats.blocks_published, published.blocks.len() as u64);
    assert_eq!(
        (stats.prefix_hit_tokens, stats.prefix_query_tokens, stats.prefix_queries),
        (hit_tokens, query_tokens, queries)
    );
    assert!(hit_tokens > 5000 && published.blocks.len() > 100, "{stats:?}");
}
