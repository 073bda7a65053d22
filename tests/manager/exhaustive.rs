//! Every order of operations up to a depth, on a pool of four blocks with three sequences.
//!
//! A block cannot have fewer than 8 tokens, so 8 tokens stand for the two of the smallest block
//! that can be half full: sequences grow by 4 or by 8. Paths that lead to the same state (digest of
//! the cache and content of the model) are followed once. Each path is run from an empty cache, so
//! that nothing depends on copying one.

use std::collections::HashSet;

use kvpool::cache::{Cache, PinHandle};
use kvpool::config::{Admission, CacheMode, Capacity};
use kvpool::device::TensorRef;
use kvpool::error::CacheError;
use kvpool::plan::{Kv, Plan};
use kvpool::units::LayerIdx;

use super::device::TestDevice;
use super::rig::{Line, paged, up_to};
use super::text::{Ns, Text, check_contents, vector};
use crate::common::{Spec, mix};

/// One operation. Numbers name live sequences in the order of their begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Op {
    /// A sequence with one of the prompts.
    Begin(usize),
    /// So many tokens: the prompt's, then ones of this id.
    Step(usize, u32, u32),
    /// All of them by 4 tokens in one step.
    StepAll,
    /// A step of 8 tokens that comes to nothing.
    Cancel(usize),
    /// 4 tokens back.
    Truncate(usize),
    Fork(usize),
    Release(usize),
    Pin(usize),
    Unpin,
    Clear,
}

fn all_operations() -> Vec<Op> {
    let mut ops = vec![Op::Begin(0), Op::Begin(1), Op::Begin(2), Op::StepAll, Op::Unpin, Op::Clear];
    for seq in 0..3 {
        ops.extend([
            Op::Step(seq, 8, 0),
            Op::Step(seq, 4, 0),
            Op::Step(seq, 4, 1),
            Op::Truncate(seq),
            Op::Fork(seq),
            Op::Release(seq),
        ]);
    }
    ops.extend([Op::Cancel(0), Op::Pin(0), Op::Pin(1)]);
    ops
}

/// Prompts of which each shares a beginning with the others: a block and a half, one that parts
/// from it inside the second block, and one block with one token more.
fn prompt(which: usize) -> Vec<u32> {
    match which {
        0 => [[0; 8].as_slice(), &[0; 5]].concat(),
        1 => [[0; 8].as_slice(), &[0, 0, 1, 1, 1, 1, 1, 1, 1]].concat(),
        _ => vec![0; 9],
    }
}

/// A cache and its model.
struct World {
    cache: Cache,
    live: Vec<(Line, Vec<u32>)>,
    pin: Option<(PinHandle, u64)>,
    committed: HashSet<u64>,
    guaranteed: bool,
}

impl World {
    fn new(plan: &Plan) -> Self {
        let (device, _) = TestDevice::open(plan, 0);
        Self {
            cache: Cache::open(plan.clone(), device).expect("opens"),
            live: Vec::new(),
            pin: None,
            committed: HashSet::new(),
            guaranteed: plan.admission == Admission::Guaranteed,
        }
    }

    /// Whether the operation names something that is there.
    fn applies(&self, op: Op) -> bool {
        match op {
            Op::Begin(_) | Op::Clear => true,
            Op::StepAll => self.live.len() > 1,
            Op::Pin(at) => self.pin.is_none() && at < self.live.len(),
            Op::Unpin => self.pin.is_some(),
            Op::Step(at, ..)
            | Op::Cancel(at)
            | Op::Truncate(at)
            | Op::Fork(at)
            | Op::Release(at) => at < self.live.len(),
        }
    }

    fn apply(&mut self, op: Op) -> Result<(), CacheError> {
        match op {
            Op::Begin(which) => self.begin(which),
            Op::Step(at, tokens, id) => self.step(&[at], tokens, id),
            Op::StepAll => self.step(&(0..self.live.len()).collect::<Vec<_>>(), 4, 1),
            Op::Cancel(at) => {
                let gone = |cache: &Cache| cache.stats().evictions + cache.stats().blocks_withdrawn;
                let before = (self.cache.state_digest(), gone(&self.cache));
                self.cache.reserve(&[(self.live[at].0.seq, 8)])?.cancel();
                let kept = gone(&self.cache) == before.1;
                assert!(
                    !kept || self.cache.state_digest() == before.0,
                    "a trace of a cancelled step"
                );
                Ok(())
            }
            Op::Truncate(at) => {
                let (line, _) = &mut self.live[at];
                let len = line.text.len().saturating_sub(4);
                self.cache.truncate(line.seq, len)?;
                line.text.truncate(len);
                Ok(())
            }
            Op::Fork(at) => {
                let (line, prompt) = self.live[at].clone();
                let seq = self.cache.fork(line.seq)?;
                self.live.push((Line { seq, ..line }, prompt));
                Ok(())
            }
            Op::Release(at) => self.cache.release(self.live.remove(at).0.seq),
            Op::Pin(at) => {
                let (line, _) = &self.live[at];
                let what = line.text.hash_before(line.text.tokens.len());
                self.pin = Some((self.cache.pin(line.seq)?, what));
                Ok(())
            }
            Op::Unpin => match self.pin.take() {
                Some((handle, _)) => self.cache.unpin(handle),
                None => Ok(()),
            },
            Op::Clear => {
                self.cache.clear_cached();
                Ok(())
            }
        }
    }

    fn begin(&mut self, which: usize) -> Result<(), CacheError> {
        let prompt = prompt(which);
        // The third may come to its own block and no further than the next.
        let options = up_to(if which == 2 { 16 } else { 24 });
        let estimate = self.cache.check_admission(&prompt, &options);
        let found = self.cache.probe(&prompt, &Ns::default().options()).cached_len;
        let begun = self.cache.begin(&prompt, options);
        assert_eq!(
            begun.map(|begun| (begun.limit, begun.cached_len)),
            estimate.map(|estimate| (estimate.limit, estimate.cached_len)),
            "the estimate and the act"
        );
        let begun = begun?;
        let cached = begun.cached_len as usize;
        assert_eq!(begun.cached_len, found);
        let text = Text::of(Ns::default(), 0, 8, &prompt[..cached]);
        assert!(cached == 0 || self.committed.contains(&text.hash_before(cached)), "a false hit");
        let line = Line { seq: begun.sequence, text, cached_len: begun.cached_len };
        self.live.push((line, prompt));
        Ok(())
    }

    fn step(&mut self, which: &[usize], tokens: u32, id: u32) -> Result<(), CacheError> {
        let mut batch = Vec::new();
        let (mut ids, mut hashes, mut texts) = (Vec::new(), Vec::new(), Vec::new());
        let mut within = true;
        for &at in which {
            let (line, prompt) = &self.live[at];
            batch.push((line.seq, tokens));
            let mut text = line.text.clone();
            for position in line.text.tokens.len()..line.text.tokens.len() + tokens as usize {
                let token = prompt.get(position).copied().unwrap_or(id);
                ids.push(token);
                text.push(token.into());
            }
            within &= text.len() <= self.cache.seq_limit(line.seq).expect("alive");
            hashes.extend_from_slice(&text.hashes[line.text.tokens.len()..]);
            texts.push(text);
        }
        let layers = self.cache.plan().geometry.num_layers;
        let step = self.cache.reserve_tokens(&batch, &ids);
        let mut step = match step {
            Ok(step) => step,
            Err(error) => {
                assert!(!(self.guaranteed && within), "what was promised is not there: {error}");
                return Err(error);
            }
        };
        for layer in 0..layers {
            let tensor = |kv| -> Vec<f32> {
                let mut tensor = vec![0.0; hashes.len() * 8];
                for (hash, out) in hashes.iter().zip(tensor.chunks_mut(8)) {
                    vector(*hash, layer, kv, out);
                }
                tensor
            };
            let (k, v) = (tensor(Kv::K), tensor(Kv::V));
            step.append(LayerIdx(layer), TensorRef::F32(&k), TensorRef::F32(&v))?;
        }
        step.commit()?;
        for (&at, text) in which.iter().zip(texts) {
            self.committed.extend(&text.hashes);
            self.live[at].0.text = text;
        }
        Ok(())
    }

    fn check(&self, buffer: &mut Vec<f32>) {
        self.cache.check_invariants().expect("invariants");
        for (line, _) in &self.live {
            check_contents(&self.cache, line.seq, &line.text, None, buffer);
        }
    }

    /// What stands for the state of the cache and of the model.
    fn state(&self) -> u64 {
        let pinned = self.pin.as_ref().map_or(0, |(_, what)| what | 1);
        let mut words = vec![self.cache.state_digest(), pinned];
        for (line, prompt) in &self.live {
            let length = line.text.tokens.len();
            words.extend([line.text.hash_before(length), length as u64, prompt.len() as u64]);
            words.push(u64::from(line.seq.slot()));
        }
        mix(&words)
    }
}

/// How far a search came.
#[derive(Debug, Default)]
struct Search {
    states: usize,
    edges: u64,
    refused: u64,
    hits: u64,
}

fn run(plan: &Plan, path: &[Op]) -> (World, Result<(), CacheError>) {
    let mut world = World::new(plan);
    let mut last = Ok(());
    for op in path {
        last = world.apply(*op);
    }
    (world, last)
}

/// Follows every path of `depth` operations, breadth first.
fn search(spec: &Spec, depth: usize) -> Search {
    let plan = spec.plan();
    let ops = all_operations();
    let mut seen = HashSet::new();
    let mut frontier: Vec<Vec<Op>> = vec![Vec::new()];
    let mut found = Search::default();
    let mut buffer = Vec::new();
    for _ in 0..depth {
        let mut next = Vec::new();
        for path in &frontier {
            let (here, _) = run(&plan, path);
            let applicable: Vec<Op> = ops.iter().copied().filter(|op| here.applies(*op)).collect();
            let digest = here.cache.state_digest();
            drop(here);
            for op in applicable {
                let longer = [path.as_slice(), &[op]].concat();
                let checked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                    let (world, result) = run(&plan, &longer);
                    world.check(&mut buffer);
                    let refused = result.is_err();
                    assert!(
                        !refused || world.cache.state_digest() == digest,
                        "a refusal left a trace"
                    );
                    let hit = world.live.last().is_some_and(|(line, _)| line.cached_len > 0);
                    (world.state(), refused, hit && matches!(op, Op::Begin(_)))
                }));
                let Ok((state, refused, hit)) = checked else {
                    panic!("after {longer:?} with {spec:?}");
                };
                found.edges += 1;
                found.refused += u64::from(refused);
                found.hits += u64::from(hit);
                if !refused && seen.insert(state) {
                    next.push(longer);
                }
            }
        }
        frontier = next;
        println!("{} states, {found:?}", seen.len());
    }
    found.states = seen.len();
    found
}

fn small(windows: &[u32]) -> Spec {
    Spec {
        windows: windows.to_vec(),
        capacity: Capacity::Blocks(4),
        max_seqs: 3,
        max_seq_len: 32,
        max_batch_tokens: 24,
        max_step_tokens: Some(8),
        ..paged(4)
    }
}

/// The depth, or a smaller one where a test build would take too long.
fn depth(release: usize) -> usize {
    if cfg!(debug_assertions) { release - 2 } else { release }
}

fn thorough(found: &Search) {
    assert!(found.states > 1000 && found.refused > 100 && found.hits > 100, "{found:?}");
}

#[test]
fn every_order_of_operations_with_four_blocks() {
    thorough(&search(&small(&[0]), depth(8)));
}

#[test]
fn every_order_of_operations_under_max_utilization() {
    let spec = Spec { admission: Admission::MaxUtilization, ..small(&[0]) };
    thorough(&search(&spec, depth(7)));
}

#[test]
fn every_order_of_operations_with_windows() {
    thorough(&search(&small(&[0, 8]), depth(6)));
}

#[test]
fn every_order_of_operations_in_contiguous_slots() {
    let spec = Spec { mode: CacheMode::Contiguous, capacity: Capacity::WorstCase, ..small(&[0]) };
    thorough(&search(&spec, depth(6)));
}

#[test]
fn every_order_of_operations_with_rings_beside_blocks() {
    let spec = Spec { mode: CacheMode::Hybrid, ..small(&[8, 0]) };
    thorough(&search(&spec, depth(6)));
}
