//! Each call of the device that a verb makes fails, in turn, until the verb has made all of them:
//! after each failure the verb has said so and everything is as before, bit for bit (here nothing
//! has to be evicted or taken over to make room: that would stay so); in the end what comes out is
//! what comes out where nothing fails.
//!
//! `faults.rs` goes on from each failure with a cache of its own; here it is one cache for all.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use kvpool::cache::{
    AttendOptions, BeginOptions, Cache, Namespace, RestoreOptions, SaveOptions, SeqHandle, StepId,
};
use kvpool::device::{TensorMut, TensorRef};
use kvpool::error::{CacheError, DeviceError, SaveError};
use kvpool::plan::{GroupKind, Kv};
use kvpool::units::LayerIdx;

use crate::common::tensor;

/// What makes calls of a device fail.
pub(crate) trait Faults {
    /// The n-th call from now on fails.
    fn arm(&mut self, nth: u64);
    /// None fails any more. The call that has, if one has.
    fn disarm(&mut self) -> Option<String>;
    /// Whether K and V are compared after every failure, or after the first, second, fourth and so
    /// on.
    fn is_thorough(&self) -> bool;
    /// Whether this is the error for it.
    fn is_told(&self, call: &str, error: DeviceError) -> bool;
}

/// A verb's failure, by the device.
#[derive(Debug)]
pub(crate) struct Told(DeviceError);

impl From<CacheError> for Told {
    fn from(error: CacheError) -> Self {
        match error {
            CacheError::Device(error) => Self(error),
            error => panic!("the device did not say this: {error}"),
        }
    }
}

impl From<SaveError> for Told {
    fn from(error: SaveError) -> Self {
        match error {
            SaveError::Cache(error) => error.into(),
            error => panic!("the device did not say this: {error}"),
        }
    }
}

/// What must be as before: the bookkeeping, K and V of every sequence, and what others would find.
struct Snapshot {
    digest: u64,
    stored: Vec<u32>,
    found: Vec<u32>,
    counts: [u64; 6],
}

impl fmt::Debug for Snapshot {
    /// All but K and V.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x} {:?} {:?}", self.digest, self.found, self.counts)
    }
}

/// Whether released sequences leave their tokens in slots, for others to find.
fn has_donors(cache: &Cache) -> bool {
    cache.plan().groups.iter().any(|group| group.kind == GroupKind::Contiguous)
}

/// Asserts that what a failure leaves is what was there before: all of it, but where a sequence was
/// to begin. Then the order may differ in which blocks and slots come next; and a slot that had
/// been taken for it has nothing left that others could find.
fn check(verb: &str, has_donors: bool, before: &Snapshot, after: &Snapshot, what: &str) {
    let begins = ["begin", "restore_sequence"].contains(&verb) || (verb == "fork" && has_donors);
    if !begins {
        assert_eq!(after.digest, before.digest, "{what}");
    }
    if begins && has_donors {
        let fewer = after.found.iter().zip(&before.found).all(|(after, before)| after <= before);
        assert!(fewer, "{what}: {after:?}, before {before:?}");
        // What is cached.
        let all_but = |of: &Snapshot| [&of.counts[..2], &of.counts[3..]].concat();
        assert_eq!(all_but(after), all_but(before), "{what}");
    } else {
        assert_eq!((&after.found, after.counts), (&before.found, before.counts), "{what}");
    }
}

/// A run in which every verb is walked through.
pub(crate) struct Walk<'a> {
    faults: Option<&'a mut dyn Faults>,
    /// The sequences that are alive.
    pub(crate) seqs: Vec<SeqHandle>,
    prompts: Vec<Vec<u32>>,
    /// What came out.
    pub(crate) bits: Vec<u32>,
    /// How often each call has failed.
    pub(crate) failed: BTreeMap<String, u64>,
    /// How often each verb has.
    pub(crate) verbs: BTreeMap<&'static str, u64>,
}

impl<'a> Walk<'a> {
    /// Without faults nothing fails.
    pub(crate) fn new(faults: Option<&'a mut dyn Faults>) -> Self {
        Self {
            faults,
            seqs: Vec::new(),
            prompts: Vec::new(),
            bits: Vec::new(),
            failed: BTreeMap::new(),
            verbs: BTreeMap::new(),
        }
    }

    fn is_thorough(&self) -> bool {
        self.faults.as_ref().is_some_and(|faults| faults.is_thorough())
    }

    /// What there is; `thorough`: with K and V.
    fn snapshot(&self, cache: &Cache, thorough: bool) -> Snapshot {
        let geometry = &cache.plan().geometry;
        let row = (geometry.num_kv_heads * geometry.head_dim) as usize;
        let mut stored = Vec::new();
        for seq in self.seqs.iter().filter(|_| thorough) {
            let len = cache.seq_len(*seq).expect("alive");
            stored.push(len);
            for layer in 0..geometry.num_layers {
                let window = geometry.windows[layer as usize];
                // What the next query sees.
                let from = if window == 0 { 0 } else { (len + 1).saturating_sub(window) };
                for kv in [Kv::K, Kv::V] {
                    let mut out = vec![f32::NAN; (len - from) as usize * row];
                    let read = cache.export(*seq, LayerIdx(layer), kv, from, len, &mut out);
                    read.expect("held");
                    stored.extend(out.iter().map(|x| x.to_bits()));
                }
            }
        }
        let found =
            self.prompts.iter().map(|prompt| cache.probe(prompt, &Namespace::default()).cached_len);
        let stats = cache.stats();
        let counts = [
            stats.seqs.into(),
            stats.held_bytes.0,
            stats.cached_bytes.0,
            stats.steps_committed,
            stats.steps_cancelled,
            stats.nonfinite,
        ];
        Snapshot { digest: cache.state_digest(), stored, found: found.collect(), counts }
    }

    /// Calls a verb, with each of its calls of the device failing first.
    pub(crate) fn verb<T>(
        &mut self,
        cache: &mut Cache,
        name: &'static str,
        mut verb: impl FnMut(&mut Cache) -> Result<T, Told>,
    ) -> T {
        if self.faults.is_none() {
            return verb(cache).expect("nothing fails");
        }
        let mut before = self.snapshot(cache, true);
        for nth in 1_u64.. {
            let faults = self.faults.as_mut().expect("there are");
            faults.arm(nth);
            let result = verb(cache);
            let failed = faults.disarm();
            let what = format!("{name}, call {nth} of the device, {failed:?}");
            match (result, failed) {
                (Ok(done), None) => return done,
                (Err(Told(error)), Some(call)) => {
                    assert!(faults.is_told(&call, error), "{what}: {error}");
                    *self.failed.entry(call).or_insert(0) += 1;
                    *self.verbs.entry(name).or_insert(0) += 1;
                }
                (Ok(_), Some(_)) => panic!("{what}: nothing was said"),
                (Err(Told(error)), None) => panic!("{what}: {error}"),
            }
            cache.check_invariants().expect("invariants");
            let thorough = nth.is_power_of_two() || self.is_thorough();
            let after = self.snapshot(cache, thorough);
            assert!(!thorough || after.stored == before.stored, "{what}: other K and V");
            check(name, has_donors(cache), &before, &after, &what);
            let stored = std::mem::take(&mut before.stored);
            before = Snapshot { stored, ..after };
        }
        unreachable!("there are not so many calls")
    }

    /// Begins a sequence; gives the tokens that were found.
    pub(crate) fn begin(&mut self, cache: &mut Cache, prompt: &[u32]) -> (SeqHandle, u32) {
        let options = BeginOptions { max_len: Some(40), ..BeginOptions::default() };
        self.prompts.push(prompt.to_vec());
        // NaN in everything that nobody owns, so that what is not written shows.
        cache.poison_unused(0xFF).expect("in the pool");
        let begun = self.verb(cache, "begin", |cache| Ok(cache.begin(prompt, options)?));
        self.seqs.push(begun.sequence);
        (begun.sequence, begun.cached_len)
    }

    pub(crate) fn release(&mut self, cache: &mut Cache, seq: SeqHandle) {
        self.seqs.retain(|other| *other != seq);
        cache.release(seq).expect("alive");
        cache.check_invariants().expect("invariants");
    }

    /// Opens a step and puts it aside.
    pub(crate) fn reserve(
        &mut self,
        cache: &mut Cache,
        batch: &[(SeqHandle, u32)],
        ids: &[u32],
    ) -> StepId {
        cache.poison_unused(0xFF).expect("in the pool");
        self.verb(cache, "reserve", |cache| Ok(cache.reserve_tokens(batch, ids)?.detach()))
    }

    /// A whole step. `ids` are the tokens, which are also what is stored.
    pub(crate) fn step(&mut self, cache: &mut Cache, batch: &[(SeqHandle, u32)], ids: &[u32]) {
        let geometry = cache.plan().geometry.clone();
        let (kv_heads, q_heads) = (geometry.num_kv_heads, geometry.num_q_heads);
        let step = self.reserve(cache, batch, ids);
        let resumed = cache.resume(step).expect("open");
        let positions = resumed.positions().to_vec();
        resumed.detach();
        let tags: Vec<u64> = ids.iter().map(|id| u64::from(*id)).collect();
        for layer in 0..geometry.num_layers {
            let of = |what, heads| tensor(&tags, &positions, layer, what, heads, geometry.head_dim);
            let (k, v, q) = (of(0, kv_heads), of(1, kv_heads), of(2, q_heads));
            self.verb(cache, "append", |cache| {
                let mut step = cache.resume(step)?;
                let (k, v) = (TensorRef::F32(&k), TensorRef::F32(&v));
                let appended = step.append(LayerIdx(layer), k, v);
                step.detach();
                Ok(appended?)
            });
            let (out, lse) = self.verb(cache, "attend", |cache| {
                let mut out = vec![f32::NAN; q.len()];
                let mut lse = vec![f32::NAN; tags.len() * q_heads as usize];
                let mut step = cache.resume(step)?;
                let options = AttendOptions { softmax_scale: None, lse: Some(&mut lse) };
                let (q, to) = (TensorRef::F32(&q), TensorMut::F32(&mut out));
                let attended = step.attend(LayerIdx(layer), q, to, options);
                step.detach();
                attended?;
                Ok((out, lse))
            });
            self.bits.extend(out.iter().chain(&lse).map(|x| x.to_bits()));
        }
        self.verb(cache, "commit", |cache| {
            let step = cache.resume(step)?;
            Ok(step.commit()?)
        });
    }

    /// Computes the rest of a prompt. How much that is may depend on what has failed, so what
    /// counts is a token behind it.
    fn catch_up(&mut self, cache: &mut Cache, seq: SeqHandle, ids: &[u32]) {
        let kept = self.bits.len();
        for chunk in ids.chunks(8) {
            self.step(cache, &[(seq, chunk.len() as u32)], chunk);
        }
        self.bits.truncate(kept);
        self.step(cache, &[(seq, 1)], &[777]);
    }

    /// K and V of a sequence, read back.
    fn export(&mut self, cache: &mut Cache, seq: SeqHandle, from: u32, to: u32) {
        let geometry = &cache.plan().geometry;
        let row = (geometry.num_kv_heads * geometry.head_dim) as usize;
        for kv in [Kv::K, Kv::V] {
            let out = self.verb(cache, "export", |cache| {
                let mut out = vec![f32::NAN; (to - from) as usize * row];
                cache.export(seq, LayerIdx(1), kv, from, to, &mut out)?;
                Ok(out)
            });
            self.bits.extend(out.iter().map(|x| x.to_bits()));
        }
    }

    /// Begins, steps, forks, copies on write, rewinds, finds a prefix in part, reads back, saves
    /// and restores. `folder`: of the saves.
    pub(crate) fn verbs_of_the_host(&mut self, cache: &mut Cache, folder: &Path) {
        let prompt: Vec<u32> = (0..20).collect();
        let (a, _) = self.begin(cache, &prompt);
        for chunk in prompt.chunks(8) {
            self.step(cache, &[(a, chunk.len() as u32)], chunk);
        }
        let b = self.verb(cache, "fork", |cache| Ok(cache.fork(a)?));
        self.seqs.push(b);
        self.step(cache, &[(a, 1), (b, 2)], &[100, 200, 201]);
        self.export(cache, b, 14, 22);
        self.verb(cache, "truncate", |cache| Ok(cache.truncate(b, 21)?));
        self.step(cache, &[(b, 3)], &[300, 301, 302]);
        let file = folder.join("sequence");
        self.verb(cache, "save_sequence", |cache| {
            Ok(cache.save_sequence(b, &file, &SaveOptions::default())?)
        });
        self.release(cache, a);
        let options = RestoreOptions::default();
        let restored = self
            .verb(cache, "restore_sequence", |cache| Ok(cache.restore_sequence(&file, &options)?));
        self.seqs.push(restored.sequence);
        self.step(cache, &[(restored.sequence, 2)], &[400, 401]);
        // 13 tokens of the first prompt, and others.
        let other: Vec<u32> = (0..13).chain(50..55).collect();
        let (c, found) = self.begin(cache, &other);
        self.catch_up(cache, c, &other[found as usize..]);
        self.export(cache, c, 10, 18);
        let file = folder.join("prefixes");
        self.verb(cache, "save_prefixes", |cache| {
            Ok(cache.save_prefixes(&file, &SaveOptions::default())?)
        });
        for seq in std::mem::take(&mut self.seqs) {
            self.release(cache, seq);
        }
        cache.clear_cached();
        self.verb(cache, "restore_prefixes", |cache| Ok(cache.restore_prefixes(&file, &options)?));
        let (d, found) = self.begin(cache, &prompt);
        self.catch_up(cache, d, &prompt[found as usize..]);
        self.export(cache, d, 12, 20);
        self.release(cache, d);
        self.verb(cache, "synchronize", |cache| Ok(cache.synchronize()?));
        let stats = cache.stats();
        self.bits.extend([stats.nonfinite as u32, stats.saturated as u32]);
    }
}
