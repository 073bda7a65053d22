//! How much of a chain of the file a slot can take.

use super::buffer_of;
use super::format::Span;
use super::read::{Block, Entry, Table};
use crate::cache::{Cache, group_idx};
use crate::error::SaveError;
use crate::plan::{GroupKind, NO_BLOCK};

/// A chain of the file, from its first block to its last.
#[derive(Debug)]
pub(super) struct Chain {
    /// Places in the table.
    pub(super) entries: Vec<u32>,
    /// What each group has of them. `[entries, num_groups]`
    pub(super) spans: Vec<Span>,
    /// From where on each group has it without a hole. `[num_groups]`
    pub(super) holds_from: Vec<u32>,
    /// The blocks of it up to the hole before that, this included. `[num_groups]`
    holes: Vec<u32>,
    /// The place of the first block of which each lacks some of the sinks. `[num_groups]`
    headless: Vec<u32>,
}

impl Chain {
    /// Room for a chain.
    pub(super) fn new(longest: usize, groups: usize) -> Result<Self, SaveError> {
        Ok(Self {
            entries: buffer_of(longest, 0)?,
            spans: buffer_of(longest * groups, Span::WHOLE)?,
            holds_from: buffer_of(groups, 0)?,
            holes: buffer_of(groups, 0)?,
            headless: buffer_of(groups, 0)?,
        })
    }
}

impl Cache {
    /// The contiguous groups with a window, or those without.
    pub(super) fn contiguous(&self, windowed: bool) -> impl Iterator<Item = usize> + '_ {
        let groups = self.plan.groups.iter().enumerate();
        groups
            .filter(move |(_, layers)| {
                layers.kind == GroupKind::Contiguous && layers.window.is_some() == windowed
            })
            .map(|(group, _)| group)
    }

    /// What each group has of a block. The layers of a group agree, where they were one group when
    /// they were saved; if not, what all of them have.
    pub(super) fn common_spans(&self, block: &Block<'_>) -> impl Iterator<Item = Span> {
        self.plan.groups.iter().map(|group| {
            let spans = group.layers.iter().map(|layer| block.span(layer.index()));
            let common = spans.reduce(|a, b| match (a, b) {
                (Span::WHOLE, other) | (other, Span::WHOLE) => other,
                _ => Span { head: a.head.min(b.head), from: a.from.max(b.from) },
            });
            common.unwrap_or(Span::WHOLE)
        })
    }

    /// The longest part of a chain that every contiguous group can give, and from where on they
    /// have it.
    ///
    /// A shorter part needs earlier tokens (`keep_from` falls with the length), so none that ends
    /// behind what a longer one lacks can do either: each block is looked at a few times, however
    /// many holes there are.
    pub(super) fn usable_len(&self, table: &Table, chain: &mut Chain) -> Option<u32> {
        let end_of = |entry: &Entry| (entry.start + entry.tokens).min(self.plan.limits.max_seq_len);
        // Those without a window have all of it.
        chain.holds_from.fill(0);
        chain.holes.fill(u32::MAX);
        for group in self.contiguous(true) {
            chain.headless[group] = self.headless(table, chain, group);
        }
        let mut blocks = number(chain.entries.len());
        while blocks > 0 {
            let last = table.entries[chain.entries[blocks as usize - 1] as usize];
            let len = end_of(&last);
            let lacks = |group: usize| self.first_lack(table, chain, (blocks, len), group);
            let Some(lack) = self.contiguous(true).find_map(lacks) else { return Some(len) };
            blocks = lack.min(blocks - 1);
        }
        None
    }

    /// What a group lacks of the first blocks of a chain: the place of a block without which no
    /// part that has it can be given.
    fn first_lack(
        &self,
        table: &Table,
        chain: &mut Chain,
        (blocks, len): (u32, u32),
        group: usize,
    ) -> Option<u32> {
        // A hole that lies further ahead is that of a shorter part, too.
        if blocks <= chain.holes[group] {
            (chain.holds_from[group], chain.holes[group]) =
                self.holds_from(table, chain, blocks, group);
        }
        let (from, hole) = (chain.holds_from[group], chain.holes[group]);
        if from > self.plan.keep_from(group_idx(group), len) {
            return Some(hole - 1);
        }
        let sinks = self.plan.groups[group].layout.sink_tokens.min(len);
        if from == 0 { None } else { self.lacks_head(table, chain, group, sinks) }
    }

    /// The first token from which on a group has the first blocks of a chain without a hole, and
    /// how many blocks there are up to that hole, the one that has it included; 0 for none.
    fn holds_from(&self, table: &Table, chain: &Chain, blocks: u32, group: usize) -> (u32, u32) {
        let groups = self.plan.groups.len();
        let mut from = u32::MAX;
        for at in (0..blocks as usize).rev() {
            let entry = &table.entries[chain.entries[at] as usize];
            let span = chain.spans[at * groups + group];
            if span.is_empty(entry.tokens) || u32::from(span.from) >= entry.tokens {
                return (from, number(at + 1));
            }
            from = entry.start + u32::from(span.from);
            if span.from > 0 {
                return (from, number(at + 1));
            }
        }
        (from, 0)
    }

    /// The place of the first block of a chain of which a group lacks some of the sinks, or
    /// `u32::MAX`.
    fn headless(&self, table: &Table, chain: &Chain, group: usize) -> u32 {
        let places = 0..chain.entries.len();
        let sinks = self.plan.groups[group].layout.sink_tokens;
        let place = places
            .map(number)
            .take_while(|at| table.entries[chain.entries[*at as usize] as usize].start < sinks)
            .find(|at| !self.has_head(table, chain, *at, group, sinks));
        place.unwrap_or(u32::MAX)
    }

    /// Whether a group has what the block at a place has of the first tokens.
    fn has_head(&self, table: &Table, chain: &Chain, at: u32, group: usize, tokens: u32) -> bool {
        let entry = &table.entries[chain.entries[at as usize] as usize];
        let head = tokens.saturating_sub(entry.start).min(entry.tokens);
        let span = chain.spans[at as usize * self.plan.groups.len() + group];
        head == 0 || span.covers(&(0..head))
    }

    /// The place of the first block of which a group lacks some of the first tokens, at most the
    /// sinks, of a chain: if any it is where the first of the sinks is lacking, of which fewer tokens
    /// may be asked.
    fn lacks_head(&self, table: &Table, chain: &Chain, group: usize, tokens: u32) -> Option<u32> {
        let at = chain.headless[group];
        (at != u32::MAX && !self.has_head(table, chain, at, group, tokens)).then_some(at)
    }
}

/// A place in a chain, or a number of its blocks: there are fewer than [`NO_BLOCK`].
fn number(blocks: usize) -> u32 {
    u32::try_from(blocks).unwrap_or(NO_BLOCK)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::format::{Header, Holds};
    use super::*;
    use crate::config::parse;
    use crate::device::NullDevice;
    use crate::plan::Plan;

    const TOKENS: u32 = 8;

    fn open(windows: &str, sinks: u32, max_seq_len: u32) -> Cache {
        let text = format!(
            "model = {{ num_layers = 3, num_q_heads = 1, num_kv_heads = 1, head_dim = 8, \
               attention_window = {windows}, sink_tokens = {sinks} }}\n\
             limits = {{ max_seqs = 1, max_seq_len = {max_seq_len}, max_batch_tokens = 64, \
               max_step_tokens = 8, max_rewind_tokens = 4 }}\n\
             cache = {{ mode = 'contiguous' }}"
        );
        let source = parse(&text, Path::new("chain"), &[]).expect("a valid configuration");
        let plan = Plan::new(&source.config, &source.geometry).expect("a plan");
        let device = Box::new(NullDevice::open(&plan));
        Cache::open(plan, device).expect("opens")
    }

    /// A chain of whole blocks but for the last, with these spans. `[blocks, num_groups]`
    fn chain(cache: &Cache, last: u32, spans: Vec<Span>) -> (Table, Chain) {
        let groups = cache.plan.groups.len();
        let blocks = number(spans.len() / groups);
        let header = Header {
            holds: Holds::Prefixes,
            block_tokens: TOKENS,
            unsalted_only: false,
            epoch: 0,
            model: None,
        };
        let entries = (0..blocks).map(|at| Entry {
            at: 0,
            parent: at.checked_sub(1).unwrap_or(NO_BLOCK),
            start: at * TOKENS,
            tokens: if at + 1 == blocks { last } else { TOKENS },
            name: 0,
            block: NO_BLOCK,
            usable: at,
            covered: 0,
            has_children: at + 1 < blocks,
            dropped: false,
            seen: false,
        });
        let entries = entries.collect();
        let table = Table { header, entries, names: Vec::new(), tokens: 0, sequence: None };
        let mut chain = Chain::new(0, groups).expect("memory");
        chain.entries = (0..blocks).collect();
        chain.spans = spans;
        (table, chain)
    }

    /// As [`Cache::usable_len`], every length by itself.
    fn each_by_itself(cache: &Cache, table: &Table, chain: &Chain) -> Option<(u32, Vec<u32>)> {
        let groups = cache.plan.groups.len();
        let holds = |position: u32, group: usize| {
            let at = (position / TOKENS) as usize;
            let place = position % TOKENS;
            chain.spans[at * groups + group].covers(&(place..place + 1))
        };
        (1..=table.entries.len()).rev().find_map(|blocks| {
            let last = &table.entries[blocks - 1];
            let len = (last.start + last.tokens).min(cache.plan.limits.max_seq_len);
            let end = last.start + last.tokens;
            let mut from = vec![0; groups];
            cache
                .contiguous(true)
                .all(|group| {
                    let hole = (0..end).rev().find(|position| !holds(*position, group));
                    from[group] = hole.map_or(0, |hole| hole + 1);
                    let sinks = cache.plan.groups[group].layout.sink_tokens.min(len);
                    from[group] < end
                        && from[group] <= cache.plan.keep_from(group_idx(group), len)
                        && (0..sinks).all(|position| holds(position, group))
                })
                .then_some((len, from))
        })
    }

    #[test]
    fn holes_anywhere_leave_what_they_leave_length_by_length() {
        let (mut found, mut none) = (0, 0);
        for (windows, sinks, max_seq_len) in [
            ("[20, 0, 12]", 0, 200),
            ("[20, 0, 12]", 2, 200),
            ("[9, 30, 0]", 11, 200),
            ("[20, 40, 12]", 17, 93),
            ("[12, 0, 12]", 1000, 200),
        ] {
            let cache = open(windows, sinks, max_seq_len);
            let groups = cache.plan.groups.len();
            for seed in 0..2000_u64 {
                let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
                let mut below = |n: u32| {
                    state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(1);
                    u32::try_from((state >> 33) % u64::from(n)).expect("small")
                };
                let blocks = 1 + below(max_seq_len.div_ceil(TOKENS));
                let last = 1 + below(TOKENS);
                let rare = 2 + below(16);
                let span = |at: u32, below: &mut dyn FnMut(u32) -> u32| {
                    let tokens = if at + 1 == blocks { last } else { TOKENS };
                    let from = 1 + below(tokens);
                    match below(rare) {
                        0 => Span::new(0, tokens, below(from), from),
                        1 => Span::new(0, tokens, 0, tokens),
                        _ => Span::WHOLE,
                    }
                };
                let spans = (0..blocks).flat_map(|at| (0..groups).map(move |_| at));
                let spans: Vec<Span> = spans.map(|at| span(at, &mut below)).collect();
                let (table, mut chain) = chain(&cache, last, spans);
                let expected = each_by_itself(&cache, &table, &chain);
                let len = cache.usable_len(&table, &mut chain);
                let given = len.map(|len| (len, chain.holds_from.clone()));
                assert_eq!(given, expected, "{windows}, {sinks} sinks: {:?}", chain.spans);
                *if given.is_some() { &mut found } else { &mut none } += 1;
            }
        }
        assert!(found > 1000 && none > 1000, "{found} of {none}");
    }

    /// As many blocks as a long file has: a look at each of them for each length would be minutes.
    /// One group has its sinks and a hole behind them, and each shorter part lacks something of the
    /// other.
    #[test]
    fn the_sinks_of_a_long_chain_are_looked_at_once() {
        let blocks = 200_000;
        let sinks = blocks / 2 * TOKENS;
        let cache = open("[80, 0, 96]", sinks, blocks * TOKENS);
        let groups = cache.plan.groups.len();
        let windowed: Vec<usize> = cache.contiguous(true).collect();
        let mut spans = vec![Span::WHOLE; blocks as usize * groups];
        spans[(blocks as usize / 2 + 1) * groups + windowed[0]] = Span::new(0, TOKENS, 0, TOKENS);
        for at in blocks as usize / 2..blocks as usize {
            spans[at * groups + windowed[1]] = Span::new(0, TOKENS, 0, TOKENS);
        }
        let (table, mut chain) = chain(&cache, TOKENS, spans);
        let len = cache.usable_len(&table, &mut chain);
        assert_eq!(len, Some(sinks), "up to the holes");
    }

    /// The same of one hole.
    #[test]
    fn a_long_chain_is_looked_at_once() {
        let blocks = 200_000;
        // A window that all but reaches over the second half, and a hole before it.
        let cache = open("[800000, 0, 800016]", 0, blocks * TOKENS);
        let groups = cache.plan.groups.len();
        let mut spans = vec![Span::WHOLE; blocks as usize * groups];
        let hole = blocks as usize / 2 + 10;
        for group in cache.contiguous(true) {
            spans[hole * groups + group] = Span::new(0, TOKENS, 0, TOKENS);
        }
        let (table, mut chain) = chain(&cache, TOKENS, spans);
        assert_eq!(cache.usable_len(&table, &mut chain), Some(number(hole) * TOKENS));
        assert_eq!(chain.holds_from, [0; 3]);
    }
}
