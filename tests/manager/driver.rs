//! Random calls of every verb on one cache, with what must hold after each.
//!
//! The model knows what is in every live sequence and what was ever committed. What the cache has
//! evicted it cannot know, so a hit is checked for being true: the tokens were committed, in this
//! namespace and epoch, and K and V are those that belong to them.

use std::collections::HashSet;

use kvpool::cache::{Begun, Cache, PinHandle, Reservation, SeqHandle};
use kvpool::config::Admission;
use kvpool::units::GroupIdx;

use super::device::open_late;
use super::events::Replay;
use super::text::{KEY_PARTS, Ns, Stored, Text, check_contents};
use crate::common::{Rng, Spec, mix};

/// A live sequence.
#[derive(Clone)]
pub(crate) struct Live {
    pub(crate) seq: SeqHandle,
    pub(crate) text: Text,
    /// The most tokens that it ever had, since it began or was rewound to none.
    pub(crate) high_water: u32,
    /// Tokens that were announced at begin and that nothing has contradicted since.
    pub(crate) prompt: Vec<u32>,
    pub(crate) limit: u32,
    pub(crate) lookahead: u32,
    /// The order of `begin`.
    pub(crate) order: u64,
}

/// A reservation that is held, with what it was made for.
pub(super) struct Held {
    pub(super) reservation: Reservation,
    pub(super) wanted: Wanted,
    pub(super) cached_len: u32,
}

/// What a sequence is begun with.
#[derive(Clone)]
pub(super) struct Wanted {
    pub(super) ns: Ns,
    pub(super) prompt: Vec<u32>,
    pub(super) key: Option<u64>,
    pub(super) max_len: Option<u32>,
    pub(super) lookahead: u32,
}

/// A pin, and the blocks that a probe must find as long as it is there.
pub(super) struct Pin {
    pub(super) handle: PinHandle,
    pub(super) text: Text,
    pub(super) full_blocks: u32,
}

/// How often things happened.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    pub(crate) done: u64,
    pub(crate) refused: u64,
    pub(crate) hits: u64,
    pub(crate) partial_hits: u64,
}

/// What is checked, beyond what always is.
#[derive(Clone, Copy)]
pub(crate) struct Checks {
    /// Whether K and V are written and read.
    pub(crate) contents: bool,
    /// What the format makes of a vector; `None` where it stores f32 as it is.
    pub(crate) stored: Option<Stored>,
    /// Whether now and then everything unused is filled with NaN.
    pub(crate) poison: bool,
    /// Whether verbs that forget (epochs, clearing, resets) are called.
    pub(crate) forget: bool,
    /// Whether nothing must be left of what nobody holds, after every operation.
    pub(crate) residue: bool,
}

impl Default for Checks {
    fn default() -> Self {
        Self { contents: true, stored: None, poison: true, forget: true, residue: false }
    }
}

/// One cache and its model.
pub(crate) struct Driver {
    pub(crate) cache: Cache,
    pub(crate) spec: Spec,
    pub(crate) checks: Checks,
    pub(crate) rng: Rng,
    pub(crate) live: Vec<Live>,
    pub(super) dead: Vec<SeqHandle>,
    pub(super) pins: Vec<Pin>,
    pub(super) held: Vec<Held>,
    /// What stands for every text that was ever part of a sequence.
    pub(super) committed: HashSet<u64>,
    pub(super) replay: Replay,
    pub(super) now: u64,
    pub(super) epoch: u64,
    pub(super) begun: u64,
    pub(super) unknown: u64,
    documents: Vec<Vec<u32>>,
    buffer: Vec<f32>,
    pub(super) tensors: [Vec<f32>; 2],
    pub(crate) counts: Counts,
    /// Stands for everything that was called and what came of it.
    pub(crate) trail: u64,
}

impl Driver {
    /// A driver on memory of its own.
    pub(crate) fn new(spec: &Spec, seed: u64) -> Self {
        Self::on(spec, open_late(spec, 0), seed)
    }

    /// A driver on a cache that was opened somehow.
    pub(crate) fn on(spec: &Spec, cache: Cache, seed: u64) -> Self {
        let mut rng = Rng(seed);
        let documents = documents(&mut rng, spec.max_seq_len);
        Self {
            cache,
            spec: spec.clone(),
            checks: Checks::default(),
            rng,
            live: Vec::new(),
            dead: Vec::new(),
            pins: Vec::new(),
            held: Vec::new(),
            committed: HashSet::new(),
            replay: Replay::default(),
            now: 0,
            epoch: 0,
            begun: 0,
            unknown: 0,
            documents,
            buffer: Vec::new(),
            tensors: [Vec::new(), Vec::new()],
            counts: Counts::default(),
            trail: 0,
        }
    }

    /// Calls so many random verbs.
    pub(crate) fn run(&mut self, operations: u64) {
        for _ in 0..operations {
            self.operation();
        }
    }

    /// One random verb and the checks behind it.
    pub(crate) fn operation(&mut self) {
        let touched = match self.rng.below(64) {
            0..12 => self.begin(),
            12..14 => self.begin_batch(),
            14..17 => self.can_admit(),
            17..20 => self.begin_reserved(),
            20 => self.cancel_reservation(),
            21..40 => self.step(),
            40..42 => self.cancel_step(),
            42..46 => self.fork(),
            46..50 => self.truncate(),
            50..55 => self.release(),
            55..57 => self.pin(),
            57 => self.unpin(),
            58..60 => self.set_retention(),
            60 => self.forget(),
            61 => self.preempt(),
            62 => self.poll(),
            _ => self.stale(),
        };
        match touched {
            Ok(()) => self.counts.done += 1,
            Err(_) => self.counts.refused += 1,
        }
        self.check_some();
        if self.checks.residue && !self.cache.has_open_step() {
            let residue = self.cache.find_residue();
            assert_eq!(residue, Ok(None), "group, unit, token; {:?}", self.spec);
        }
        let words = [self.trail, touched.is_ok().into(), self.cache.state_digest()];
        self.trail = mix(&words);
    }

    /// Calls a verb. When it is refused, nothing has changed (P4).
    pub(super) fn call<T, E: std::fmt::Display>(
        &mut self,
        verb: impl FnOnce(&mut Cache) -> Result<T, E>,
    ) -> Result<T, E> {
        let before = self.cache.state_digest();
        let result = verb(&mut self.cache);
        if let Err(error) = &result {
            assert_eq!(self.cache.state_digest(), before, "{error}: the refusal left a trace");
        }
        self.check_invariants();
        result
    }

    pub(super) fn check_invariants(&self) {
        if let Err(error) = self.cache.check_invariants() {
            panic!("{error}; {:?}", self.spec);
        }
    }

    /// One sequence's contents, and now and then everything's.
    fn check_some(&mut self) {
        let alive = self.cache.stats().seqs as usize;
        assert!(alive >= self.live.len() && alive <= self.live.len() + self.held.len());
        if self.rng.below(32) == 0 {
            self.check_all();
        } else if let Some(at) = self.pick() {
            self.check_one(at);
        }
    }

    /// Contents of all sequences, and what pins promise.
    pub(crate) fn check_all(&mut self) {
        if self.checks.poison && self.rng.below(4) == 0 {
            self.poison();
        }
        for at in 0..self.live.len() {
            self.check_one(at);
        }
        if !self.paged_without_windows() {
            return;
        }
        for pin in &self.pins {
            if pin.text.epoch != self.epoch {
                continue;
            }
            let tokens: Vec<u32> = pin.text.tokens.iter().map(|t| *t as u32).collect();
            let found = self.cache.probe(&tokens, &pin.text.ns.options());
            assert!(found.full_blocks >= pin.full_blocks, "a pinned block was lost");
        }
    }

    /// Fills with NaN what no live token and no cached block owns.
    fn poison(&mut self) {
        let before = self.cache.state_digest();
        self.cache.poison_unused(0xFF).expect("in the pool");
        assert_eq!(self.cache.state_digest(), before);
    }

    pub(super) fn check_one(&mut self, at: usize) {
        let live = &self.live[at];
        if self.checks.contents {
            let stored = self.checks.stored;
            check_contents(&self.cache, live.seq, &live.text, stored, &mut self.buffer);
        } else {
            assert_eq!(self.cache.seq_len(live.seq), Ok(live.text.len()));
        }
    }

    /// A live sequence, if there is one.
    pub(super) fn pick(&mut self) -> Option<usize> {
        let alive = self.live.len() as u64;
        (alive > 0).then(|| self.rng.below(alive) as usize)
    }

    pub(super) fn chance(&mut self, of: u64) -> bool {
        self.rng.below(of) == 0
    }

    /// Whether all layers are paged and see everything: then a probe is exact in blocks.
    pub(super) fn paged_without_windows(&self) -> bool {
        let plan = self.cache.plan();
        let paged = |g: u32| self.cache.free_blocks(GroupIdx(g)).is_ok();
        let groups = 0..plan.groups.len() as u32;
        groups.into_iter().all(paged) && plan.groups.iter().all(|group| group.window.is_none())
    }

    /// Whether admission promises that steps succeed.
    pub(super) fn promised(&self) -> bool {
        self.spec.admission != Admission::MaxUtilization
    }

    /// A namespace; most often the plain one, so that prefixes meet.
    pub(super) fn namespace(&mut self) -> Ns {
        if self.rng.below(8) < 5 {
            return Ns::default();
        }
        let part = |rng: &mut Rng| match rng.below(3) {
            0 => rng.below(KEY_PARTS.into()) as u8,
            _ => 0,
        };
        let rng = &mut self.rng;
        let salt_from = [0, 0, 8, 12, 16][rng.below(5) as usize];
        let salt = (part(rng) + u8::from(rng.below(2) == 0)) % KEY_PARTS;
        Ns { salt, salt_from, adapter: part(rng), model: part(rng) / 3 }
    }

    /// The start of a document, now and then with another end.
    pub(super) fn prompt(&mut self) -> Vec<u32> {
        let document = self.rng.below(self.documents.len() as u64) as usize;
        let most = u64::from(self.spec.max_seq_len) + 2;
        let len = match self.rng.below(4) {
            0 => 8 * self.rng.below(5) + self.rng.below(2),
            1 => self.rng.below(most),
            _ => self.rng.below(most / 2 + 1),
        };
        let len = (len as usize).min(self.documents[document].len());
        let mut prompt = self.documents[document][..len].to_vec();
        if self.chance(4) {
            for _ in 0..self.rng.below(5) {
                prompt.pop();
            }
            for _ in 0..self.rng.below(5) {
                prompt.push(self.rng.below(3) as u32);
            }
        }
        prompt
    }

    /// The token that most often follows: a document's, so that decoded tokens meet too.
    pub(super) fn next_token(&mut self, position: usize) -> u32 {
        if self.chance(16) {
            return self.rng.below(3) as u32;
        }
        let document = if self.chance(4) { self.documents.len() as u64 } else { 1 };
        let document = self.rng.below(document) as usize;
        self.documents[document].get(position).copied().unwrap_or(0)
    }

    /// Takes note of a sequence that was begun, and checks that its hit is true.
    pub(super) fn note_begun(&mut self, wanted: &Wanted, begun: Begun) {
        let per_block = self.spec.tokens_per_block;
        let cached = begun.cached_len as usize;
        assert!(cached == 0 || cached < wanted.prompt.len(), "the last token is left to compute");
        assert!(self.spec.prefix_reuse || cached == 0, "reuse is off");
        let text = Text::of(wanted.ns, self.epoch, per_block, &wanted.prompt[..cached]);
        assert!(
            cached == 0 || self.committed.contains(&text.hash_before(cached)),
            "{cached} tokens of {wanted:?} were never committed",
            wanted = wanted.prompt
        );
        let most = self.spec.max_seq_len;
        let limit = wanted.max_len.unwrap_or(most).saturating_add(wanted.lookahead).min(most);
        assert_eq!(begun.limit, limit);
        self.counts.hits += u64::from(cached > 0);
        self.counts.partial_hits += u64::from(!(cached as u32).is_multiple_of(per_block));
        self.begun += 1;
        self.live.push(Live {
            seq: begun.sequence,
            text,
            high_water: begun.cached_len,
            prompt: wanted.prompt.clone(),
            limit,
            lookahead: wanted.lookahead,
            order: self.begun,
        });
        self.check_one(self.live.len() - 1);
    }

    /// Gives everything back and checks that nothing is left.
    pub(crate) fn finish(&mut self) {
        self.check_all();
        if self.chance(2) {
            let held = self.held.pop();
            held.map(|held| self.call(|cache| cache.cancel_reservation(held.reservation)));
        }
        // The rest are lost.
        assert_eq!(self.cache.cancel_reservations(), self.held.len() as u32);
        self.held.clear();
        self.check_invariants();
        while let Some(pin) = self.pins.pop() {
            self.call(|cache| cache.unpin(pin.handle)).expect("pinned");
        }
        while let Some(live) = self.live.pop() {
            self.call(|cache| cache.release(live.seq)).expect("alive");
        }
        let stats = self.cache.stats();
        assert_eq!((stats.seqs, stats.used_bytes.0, stats.held_bytes.0), (0, 0, 0));
        assert_eq!(stats.promised_bytes.0, 0);
        self.poll().expect("never refused");
        self.cache.clear_cached();
        self.check_invariants();
        for group in (0..).map_while(|g| self.cache.group_stats(GroupIdx(g))) {
            assert_eq!((group.blocks.active, group.blocks.cached), (0, 0));
            assert_eq!(group.blocks.free, group.blocks.total);
        }
        let probe = self.cache.probe(&self.documents[0], &Ns::default().options());
        assert_eq!(probe.cached_len, 0, "everything was cleared");
    }
}

/// Texts that share beginnings: whole blocks, and a part of one.
fn documents(rng: &mut Rng, len: u32) -> Vec<Vec<u32>> {
    let mut fresh = |len: usize| -> Vec<u32> { (0..len).map(|_| rng.below(3) as u32).collect() };
    let len = len as usize;
    let first = fresh(len);
    let mut all = vec![first.clone()];
    for shared in [8, 13, 19, 0] {
        let shared = shared.min(len);
        let mut tail = fresh(len - shared);
        if let Some(token) = tail.first_mut() {
            // The first token that differs does.
            *token = (first[shared] + 1) % 3;
        }
        all.push([&first[..shared], &tail].concat());
    }
    all
}
