//! The prefix index as its readers see it.
//!
//! A node is a block of the lead group that is published: its tokens, its parent, its children.
//! Nodes form a forest; the roots are the blocks that begin a prompt, a list of them for every
//! namespace. Everything here is an atomic, written by the cache under the [`SeqLock`] and read by
//! anyone; see `seqlock.rs`.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use super::hash;
use super::namespaces::{Namespace, Namespaces};
use super::seqlock::SeqLock;
use super::table::ProbeTable;
use super::work;
use crate::device::{all_of, huge_vec, prefetch};
use crate::error::DeviceError;
use crate::plan::{NO_BLOCK, NODE_BYTES};

/// Blocks whose hashes are computed, and whose places are asked for, before the first is compared.
const AHEAD: usize = 16;

/// Children of a block that are compared when it is looked for one that matches in part.
const CHILDREN_COMPARED: usize = 32;

/// One published block; all zeros but for the links in one that is not.
#[derive(Debug)]
#[repr(align(32))]
pub(super) struct Node {
    /// Parent, and the namespace that begins here (0: none), in the upper half.
    pub(super) up: AtomicU64,
    /// First child, and the next sibling in the upper half.
    pub(super) down: AtomicU64,
    /// The hash of the chain up to here.
    pub(super) hash: AtomicU64,
    /// Previous sibling; then the block's own priority (8 bits) and whether it is published.
    pub(super) back: AtomicU64,
}

const _: () = assert!(size_of::<Node>() as u64 == NODE_BYTES);

/// Bit of [`Node::back`]: the block is published.
pub(super) const PUBLISHED: u64 = 1 << 40;

/// Eight words of tokens: a cache line.
#[derive(Debug)]
#[repr(align(64))]
pub(super) struct Line(pub(super) [AtomicU64; 8]);

/// Two halves of a word.
#[expect(clippy::cast_possible_truncation, reason = "the two halves")]
pub(super) const fn halves(word: u64) -> (u32, u32) {
    (word as u32, (word >> 32) as u32)
}

/// A word of two halves.
pub(super) const fn word(low: u32, high: u32) -> u64 {
    low as u64 | (high as u64) << 32
}

/// The namespaces of a prompt's chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cache) struct ChainKeys {
    /// Of the first block.
    pub(in crate::cache) first: u32,
    /// Of block `salted_at`; 0 when there is none, or it is the first.
    pub(in crate::cache) salted: u32,
    /// The block at which the salt begins.
    pub(in crate::cache) salted_at: u32,
}

impl ChainKeys {
    /// Of a sequence that shares nothing.
    pub(in crate::cache) const NONE: Self = Self { first: 0, salted: 0, salted_at: 0 };

    /// The namespace that begins at a block; 0 for none.
    #[inline]
    pub(in crate::cache) const fn at(&self, block: u32) -> u32 {
        if block == 0 {
            self.first
        } else if block == self.salted_at {
            self.salted
        } else {
            0
        }
    }
}

/// What a walk along a prompt found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cache) struct Walk {
    /// Whole blocks found.
    pub(in crate::cache) full: u32,
    /// The last of them.
    pub(in crate::cache) last: u32,
    /// The block that goes on in part, and for how many tokens.
    pub(in crate::cache) partial: Option<(u32, u32)>,
}

impl Walk {
    /// Tokens found.
    pub(in crate::cache) fn len(&self, per_block: u32) -> u32 {
        self.full * per_block + self.partial.map_or(0, |(_, tokens)| tokens)
    }

    const NOTHING: Self = Self { full: 0, last: NO_BLOCK, partial: None };
}

/// The index.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) version: SeqLock,
    tokens_per_block: u32,
    /// `[blocks]`
    pub(super) nodes: Vec<Node>,
    /// `[blocks, tokens_per_block / 2]`, a block at least half a line.
    lines: Vec<Line>,
    pub(super) table: ProbeTable,
    pub(super) names: Namespaces,
    /// The epoch that new sequences begin in.
    pub(super) epoch: AtomicU64,
    /// All ones; zero in the test that every hash is the same.
    pub(super) hash_mask: u64,
    /// For each windowed paged group and block of the lead group, the block that holds the same
    /// tokens. `[windowed groups][blocks]`
    pub(super) attached: Vec<Vec<AtomicU32>>,
}

/// Tokens that a line holds.
const LINE_TOKENS: usize = 16;

impl Shared {
    pub(super) fn new(
        blocks: u32,
        tokens_per_block: u32,
        namespaces: u32,
        windowed: usize,
        hash_mask: u64,
    ) -> Result<Self, DeviceError> {
        let len = blocks as usize;
        let lines = (len * tokens_per_block as usize).div_ceil(LINE_TOKENS);
        let none = || u64::from(NO_BLOCK);
        let attached = (0..windowed).map(|_| huge_vec(len, |_| AtomicU32::new(NO_BLOCK)));
        Ok(Self {
            version: SeqLock::new(),
            tokens_per_block,
            nodes: huge_vec(len, |_| Node {
                up: AtomicU64::new(none()),
                down: AtomicU64::new(word(NO_BLOCK, NO_BLOCK)),
                hash: AtomicU64::new(0),
                back: AtomicU64::new(none()),
            })?,
            lines: huge_vec(lines, |_| Line(std::array::from_fn(|_| AtomicU64::new(0))))?,
            table: ProbeTable::new(u64::from(blocks))?,
            names: Namespaces::new(namespaces)?,
            epoch: AtomicU64::new(0),
            hash_mask,
            attached: all_of(attached)?,
        })
    }

    /// Tokens of a block.
    pub(super) fn tokens_per_block(&self) -> u32 {
        self.tokens_per_block
    }

    /// The words of a block's tokens, two in each.
    #[inline]
    fn words(&self, block: u32) -> impl Iterator<Item = &AtomicU64> {
        let per_block = self.tokens_per_block as usize / 2;
        let start = block as usize * per_block;
        let (first, within) = (start / 8, start % 8);
        let lines = &self.lines[first..first + (within + per_block).div_ceil(8)];
        lines.iter().flat_map(|line| &line.0).skip(within).take(per_block)
    }

    /// Writes a block's tokens.
    pub(super) fn store_tokens(&self, block: u32, tokens: &[u32]) {
        let per_block = self.tokens_per_block as usize / LINE_TOKENS;
        if per_block > 0 {
            let start = block as usize * per_block;
            let lines = &self.lines[start..start + per_block];
            for (line, sixteen) in lines.iter().zip(tokens.as_chunks::<LINE_TOKENS>().0) {
                for (at, word_of) in line.0.iter().enumerate() {
                    word_of.store(word(sixteen[2 * at], sixteen[2 * at + 1]), Relaxed);
                }
            }
            return;
        }
        for (word_of, pair) in self.words(block).zip(tokens.as_chunks::<2>().0) {
            word_of.store(word(pair[0], pair[1]), Relaxed);
        }
    }

    /// Reads a block's tokens. `[tokens_per_block]`
    pub(super) fn load_tokens(&self, block: u32, tokens: &mut [u32]) {
        for (word_of, pair) in self.words(block).zip(tokens.as_chunks_mut::<2>().0) {
            *pair = halves(word_of.load(Relaxed)).into();
        }
    }

    /// Whether a block has exactly these tokens. `[tokens_per_block]`
    #[inline]
    fn same_tokens(&self, block: u32, tokens: &[u32]) -> bool {
        work::compared(tokens.len());
        let per_block = self.tokens_per_block as usize / 2;
        if per_block >= 8 {
            // Whole lines: eight words at a time, all differences gathered before the one branch.
            let start = block as usize * per_block / 8;
            let lines = &self.lines[start..start + per_block / 8];
            let mut difference = 0;
            for (line, sixteen) in lines.iter().zip(tokens.as_chunks::<LINE_TOKENS>().0) {
                for (at, word_of) in line.0.iter().enumerate() {
                    difference |=
                        word_of.load(Relaxed) ^ word(sixteen[2 * at], sixteen[2 * at + 1]);
                }
            }
            return difference == 0;
        }
        let pairs = self.words(block).zip(tokens.as_chunks::<2>().0);
        pairs.fold(0, |all, (w, pair)| all | (w.load(Relaxed) ^ word(pair[0], pair[1]))) == 0
    }

    /// Tokens at the start of a block that are the same.
    fn common_tokens(&self, block: u32, tokens: &[u32]) -> u32 {
        let stored = self.words(block).flat_map(|word_of| {
            let (first, second) = halves(word_of.load(Relaxed));
            [first, second]
        });
        let same = stored.zip(tokens).take_while(|(a, b)| a == *b).count();
        work::compared(same + 1);
        // At most `tokens_per_block`.
        u32::try_from(same).unwrap_or(0)
    }

    /// The hash of a chain that goes on with a block.
    #[inline]
    pub(super) fn chain(&self, before: u64, tokens: &[u32], ns: u32) -> u64 {
        hash::chain(before, hash::of_tokens(tokens), ns) & self.hash_mask
    }

    /// The child of `parent` with exactly these tokens, in the namespace that begins there.
    #[inline]
    pub(super) fn find(&self, hash: u64, parent: u32, ns: u32, tokens: &[u32]) -> Option<u32> {
        let up = word(parent, ns);
        self.table.with_tag(hash::tag(hash)).find(|block| {
            let Some(node) = self.nodes.get(*block as usize) else { return false };
            work::node();
            node.up.load(Relaxed) == up && self.same_tokens(*block, tokens)
        })
    }

    /// The namespaces of a prompt, as far as they are in use: what is not is 0, and nothing of it
    /// can be found.
    pub(super) fn keys(&self, namespace: &Namespace) -> ChainKeys {
        let epoch = self.epoch.load(Relaxed);
        let find = |salted| self.names.find(&namespace.key(epoch, salted)).unwrap_or(0);
        let salted_at = namespace.salt_from / self.tokens_per_block;
        match namespace.salt {
            None => ChainKeys { first: find(false), salted: 0, salted_at: 0 },
            Some(_) if salted_at == 0 => ChainKeys { first: find(true), salted: 0, salted_at: 0 },
            Some(_) => {
                let salted = match find(true) {
                    // The salt is new: nothing from here on can match.
                    0 => u32::MAX,
                    salted => salted,
                };
                ChainKeys { first: find(false), salted, salted_at }
            }
        }
    }

    /// Walks along a prompt as far as the index has it, but never to its last token, which must be
    /// computed for its output.
    pub(super) fn walk(&self, prompt: &[u32], keys: &ChainKeys) -> Walk {
        let per_block = self.tokens_per_block as usize;
        if keys.first == 0 || prompt.len() < 2 {
            return Walk::NOTHING;
        }
        let usable = &prompt[..prompt.len() - 1];
        let mut walk = Walk::NOTHING;
        let mut hash = hash::SEED;
        let mut at = 0;
        // First all hashes of a stretch, then all places, so that the misses overlap.
        'walk: for stretch in usable.chunks(per_block * AHEAD) {
            let mut hashes = [0; AHEAD];
            for ((next, tokens), slot) in
                (at..).zip(stretch.chunks_exact(per_block)).zip(&mut hashes)
            {
                hash = self.chain(hash, tokens, keys.at(next));
                *slot = hash;
                self.table.prefetch(hash::tag(hash));
            }
            for slot in hashes.iter().take(stretch.len() / per_block) {
                self.prefetch_first(hash::tag(*slot));
            }
            for (slot, tokens) in hashes.iter().zip(stretch.chunks_exact(per_block)) {
                match self.find(*slot, walk.last, keys.at(at), tokens) {
                    Some(block) => walk.last = block,
                    None => break 'walk,
                }
                walk.full += 1;
                at += 1;
            }
        }
        let done = walk.full as usize * per_block;
        let rest = &usable[done..usable.len().min(done + per_block)];
        walk.partial = self.partial(walk.last, keys.at(walk.full), keys.first, rest);
        walk
    }

    /// Tells the processor that the first block with this tag will be compared.
    #[inline]
    fn prefetch_first(&self, tag: u32) {
        if let Some(block) = self.table.with_tag(tag).next() {
            self.prefetch_block(block);
        }
    }

    /// Tells the processor that a block's node and tokens will be read or written.
    #[inline]
    pub(super) fn prefetch_block(&self, block: u32) {
        if let Some(node) = self.nodes.get(block as usize) {
            prefetch(node);
            prefetch(&self.lines[block as usize * self.tokens_per_block as usize / LINE_TOKENS]);
        }
    }

    /// The first of the children of a block, or of the roots of a namespace.
    fn first_child(&self, parent: u32, root_ns: u32) -> u32 {
        match self.nodes.get(parent as usize) {
            Some(node) => halves(node.down.load(Relaxed)).0,
            None => self.names.root(root_ns).map_or(NO_BLOCK, |root| root.load(Relaxed)),
        }
    }

    /// Among the newest children, the one that has the most tokens in common, if any has one.
    fn partial(&self, parent: u32, ns: u32, root_ns: u32, tokens: &[u32]) -> Option<(u32, u32)> {
        let mut best = None;
        let mut most = 0;
        let mut child = self.first_child(parent, root_ns);
        for _ in 0..CHILDREN_COMPARED {
            let Some(node) = self.nodes.get(child as usize) else { break };
            if node.up.load(Relaxed) == word(parent, ns) {
                let common = self.common_tokens(child, tokens);
                if common > most {
                    most = common;
                    best = Some((child, common));
                }
            }
            child = halves(node.down.load(Relaxed)).1;
        }
        best
    }

    /// The parent of a node.
    #[inline]
    pub(super) fn parent(&self, block: u32) -> u32 {
        self.nodes.get(block as usize).map_or(NO_BLOCK, |node| halves(node.up.load(Relaxed)).0)
    }

    /// The block of a windowed group that holds the tokens of a node.
    #[inline]
    pub(super) fn attached(&self, windowed: usize, block: u32) -> u32 {
        let of_group = &self.attached[windowed];
        of_group.get(block as usize).map_or(NO_BLOCK, |entry| entry.load(Relaxed))
    }
}
