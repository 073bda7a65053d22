//! Every order of operations up to a depth of eight, on a pool of four blocks of two tokens with
//! three sequences. Checked after each: invariants, that a refusal leaves no trace, that what was
//! promised is there, that a hit is true and the estimate is the act, and K and V of every
//! sequence.
//!
//! A configuration cannot ask for blocks of two tokens, because no kernel is made for less than
//! eight. The manager has no such limit, so the plans here are made by `Plan::with_small_blocks`.
//! The hash takes eight tokens at a time: in blocks of two all hashes of a depth are the same, and
//! every hit rests on the comparison of the tokens.
//!
//! **Each state is followed once.** Two states are the same if they differ only in what blocks and
//! slots are called, in the order of the sequences, in counters: `Cache::shape_digest`, with what
//! the model knows of each sequence. It holds the bytes that some sequence may come to read, so a
//! path that corrupted them is another state. The operations are the same ones whatever the
//! sequences' order: each verb on each sequence, and steps of several in every order. Where the
//! youngest may have to go (max-utilization), who is older is part of the state; in plans with
//! contiguous layers the slots' numbers are.
//!
//! **What is reached**, in states that are new at depth 1 to 8 (the test asserts the sum):
//!
//! | plan | states, depth 1 to 8 | operations tried |
//! |---|---|---:|
//! | paged, guaranteed | 3, 8, 27, 92, 301, 853, 2,146, 4,634 | 75,398 |
//! | paged, max-utilization | 3, 18, 154, 995, 5,654, 26,101, 98,134, 296,498 | 4,204,779 |
//! | paged, two groups, one with a window | 3, 8, 25, 66, 145, 200, 301, 526 | 11,319 |
//! | contiguous | 3, 18, 141, 1,205, 7,522, 40,789, 177,319, 616,873 | 6,641,020 |
//! | hybrid, rings beside blocks | 3, 11, 60, 341, 1,839, 8,377, 29,771, 91,847 | 777,274 |
//!
//! Guaranteed admission promises a sequence up to three of the four blocks, so that mostly one runs
//! at a time; under max-utilization all three do. A test build goes to depth 5.
//!
//! A path begins in a cache that was reset. That it is as after opening, the search checks.

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

/// Tokens of a block.
const PER_BLOCK: u32 = 2;

/// One operation. Numbers name live sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Op {
    /// A sequence with one of the prompts.
    Begin(u8),
    /// So many tokens: the prompt's, then ones of this id.
    Step(u8, u8, u8),
    /// Several by one token in one step, in one of their orders.
    StepAll(u8),
    /// A step of two tokens that comes to nothing.
    Cancel(u8),
    /// One token back.
    Truncate(u8),
    Fork(u8),
    Release(u8),
    Pin(u8),
    Unpin,
    Clear,
    /// The youngest gives way.
    Preempt,
}

/// The orders of two and of three sequences.
const ORDERS: [&[usize]; 8] =
    [&[0, 1], &[1, 0], &[0, 1, 2], &[0, 2, 1], &[1, 0, 2], &[1, 2, 0], &[2, 0, 1], &[2, 1, 0]];

fn all_operations() -> Vec<Op> {
    let mut ops = vec![Op::Begin(0), Op::Begin(1), Op::Begin(2), Op::Unpin, Op::Clear, Op::Preempt];
    ops.extend((0..8).map(Op::StepAll));
    for seq in 0..3 {
        ops.extend([
            Op::Step(seq, 2, 0),
            Op::Step(seq, 1, 0),
            Op::Step(seq, 1, 1),
            Op::Cancel(seq),
            Op::Truncate(seq),
            Op::Fork(seq),
            Op::Release(seq),
            Op::Pin(seq),
        ]);
    }
    ops
}

/// Prompts of which each shares a beginning with the others: two blocks, one that parts from it
/// inside the second block and has a token more, and one block with one token more.
fn prompt(which: u8) -> &'static [u32] {
    match which {
        0 => &[0, 0, 0, 0],
        1 => &[0, 0, 0, 1, 1],
        _ => &[0, 0, 0],
    }
}

/// A cache and its model.
struct World {
    cache: Cache,
    live: Vec<(Line, &'static [u32])>,
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

    /// Goes back to the beginning, and along a path.
    fn follow(&mut self, path: &[Op], fresh: u64) {
        if let Some((pin, _)) = self.pin.take() {
            self.cache.unpin(pin).expect("pinned");
        }
        for (line, _) in self.live.drain(..) {
            self.cache.release(line.seq).expect("alive");
        }
        self.committed.clear();
        self.cache.reset().expect("nothing is alive");
        assert_eq!(self.cache.state_digest(), fresh, "reset is as after open");
        for op in path {
            self.apply(*op).expect("it was carried out before");
        }
    }

    /// Whether the operation names something that is there.
    fn applies(&self, op: Op) -> bool {
        match op {
            Op::Begin(_) | Op::Clear => true,
            Op::StepAll(order) => ORDERS[usize::from(order)].len() == self.live.len(),
            Op::Pin(at) => self.pin.is_none() && usize::from(at) < self.live.len(),
            Op::Unpin => self.pin.is_some(),
            Op::Preempt => !self.guaranteed,
            Op::Step(at, ..)
            | Op::Cancel(at)
            | Op::Truncate(at)
            | Op::Fork(at)
            | Op::Release(at) => usize::from(at) < self.live.len(),
        }
    }

    fn apply(&mut self, op: Op) -> Result<(), CacheError> {
        match op {
            Op::Begin(which) => self.begin(which),
            Op::Step(at, tokens, id) => self.step(&[at.into()], tokens.into(), id.into()),
            Op::StepAll(order) => self.step(ORDERS[usize::from(order)], 1, 1),
            Op::Cancel(at) => {
                let gone = |cache: &Cache| cache.stats().evictions + cache.stats().blocks_withdrawn;
                let before = (self.cache.state_digest(), gone(&self.cache));
                self.cache.reserve(&[(self.live[usize::from(at)].0.seq, 2)])?.cancel();
                let kept = gone(&self.cache) == before.1;
                assert!(
                    !kept || self.cache.state_digest() == before.0,
                    "a trace of a cancelled step"
                );
                Ok(())
            }
            Op::Truncate(at) => {
                let (line, _) = &mut self.live[usize::from(at)];
                let len = line.text.len().saturating_sub(1);
                self.cache.truncate(line.seq, len)?;
                line.text.truncate(len);
                Ok(())
            }
            Op::Fork(at) => {
                let (line, prompt) = self.live[usize::from(at)].clone();
                let seq = self.cache.fork(line.seq)?;
                self.live.push((Line { seq, ..line }, prompt));
                Ok(())
            }
            Op::Release(at) => self.cache.release(self.live.remove(at.into()).0.seq),
            Op::Pin(at) => {
                let (line, _) = &self.live[usize::from(at)];
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
            Op::Preempt => {
                let gone = self.cache.preempt_youngest();
                // They stand in the order of their beginning.
                let youngest = self.live.pop_if(|_| gone.is_some());
                assert_eq!(gone.map(|gone| gone.sequence), youngest.map(|(line, _)| line.seq));
                assert!(gone.is_some() || self.live.len() < 2);
                Ok(())
            }
        }
    }

    fn begin(&mut self, which: u8) -> Result<(), CacheError> {
        let prompt = prompt(which);
        // The third may come to its own block and no further than the next.
        let options = up_to(if which == 2 { 4 } else { 6 });
        let estimate = self.cache.check_admission(prompt, &options);
        let found = self.cache.probe(prompt, &Ns::default().options()).cached_len;
        let begun = self.cache.begin(prompt, options);
        assert_eq!(
            begun.map(|begun| (begun.limit, begun.cached_len)),
            estimate.map(|estimate| (estimate.limit, estimate.cached_len)),
            "the estimate and the act"
        );
        let begun = begun?;
        let cached = begun.cached_len as usize;
        assert_eq!(begun.cached_len, found);
        let text = Text::of(Ns::default(), 0, PER_BLOCK, &prompt[..cached]);
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

    /// What stands for the state of the cache and of the model, names aside.
    fn state(&self) -> u64 {
        let marked = self.live.iter().map(|(line, prompt)| {
            let length = line.text.tokens.len();
            // Two prompts have the same length only if they are the same.
            let mark = [line.text.hash_before(length), length as u64, prompt.len() as u64];
            (line.seq, mix(&mark))
        });
        let shape = self.cache.shape_digest(&marked.collect::<Vec<_>>()).expect("all alive");
        mix(&[shape, self.pin.as_ref().map_or(0, |(_, what)| what | 1)])
    }
}

/// How far a search came.
#[derive(Debug, Default)]
struct Search {
    /// States that were new at each depth.
    states: Vec<usize>,
    edges: u64,
    refused: u64,
    hits: u64,
}

/// Prints the operations that led to a failure.
struct Path(Vec<Op>, Spec);

impl Drop for Path {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("after {:?} with {:?}", self.0, self.1);
        }
    }
}

/// Follows every path of `depth` operations, breadth first.
fn search(spec: &Spec, depth: usize) -> Search {
    let plan = spec.small_plan();
    let mut world = World::new(&plan);
    let fresh = world.cache.state_digest();
    let ops = all_operations();
    let mut seen = HashSet::from([world.state()]);
    let mut frontier: Vec<Vec<Op>> = vec![Vec::new()];
    let mut found = Search::default();
    let mut buffer = Vec::new();
    for _ in 0..depth {
        let mut next = Vec::new();
        for path in &frontier {
            let mut trail = Path(path.clone(), spec.clone());
            world.follow(path, fresh);
            let (mut here, mut digest) = (true, world.cache.state_digest());
            for &op in &ops {
                if !here {
                    world.follow(path, fresh);
                    (here, digest) = (true, world.cache.state_digest());
                }
                if !world.applies(op) {
                    continue;
                }
                trail.0.push(op);
                found.edges += 1;
                if world.apply(op).is_err() {
                    found.refused += 1;
                    assert_eq!(world.cache.state_digest(), digest, "a refusal left a trace");
                    world.cache.check_invariants().expect("invariants");
                } else {
                    here = false;
                    world.check(&mut buffer);
                    let hit = world.live.last().is_some_and(|(line, _)| line.cached_len > 0);
                    found.hits += u64::from(hit && matches!(op, Op::Begin(_)));
                    if seen.insert(world.state()) {
                        next.push(trail.0.clone());
                    }
                }
                trail.0.pop();
            }
        }
        frontier = next;
        found.states.push(frontier.len());
    }
    println!("{found:?}");
    found
}

fn small(windows: &[u32]) -> Spec {
    Spec {
        windows: windows.to_vec(),
        tokens_per_block: PER_BLOCK,
        capacity: Capacity::Blocks(4),
        max_seqs: 3,
        max_seq_len: 8,
        max_batch_tokens: 6,
        max_step_tokens: Some(2),
        ..paged(4)
    }
}

/// Depth 8; less where a test build would take too long.
fn thorough(spec: &Spec, states: usize) {
    if cfg!(debug_assertions) {
        let found = search(spec, 5);
        assert!(found.refused > 0 && found.hits > 0, "{found:?}");
        return;
    }
    let found = search(spec, 8);
    assert_eq!(found.states.iter().sum::<usize>(), states, "{found:?}");
    assert!(found.refused > 100 && found.hits > 100, "{found:?}");
}

#[test]
fn every_order_of_operations_with_four_blocks() {
    thorough(&small(&[0]), 8_064);
}

#[test]
fn every_order_of_operations_under_max_utilization() {
    let spec = Spec { admission: Admission::MaxUtilization, ..small(&[0]) };
    thorough(&spec, 427_557);
}

/// The window is no multiple of a block.
#[test]
fn every_order_of_operations_with_windows() {
    thorough(&Spec { max_rewind_tokens: 1, ..small(&[0, 3]) }, 1_274);
}

#[test]
fn every_order_of_operations_in_contiguous_slots() {
    let spec = Spec { mode: CacheMode::Contiguous, capacity: Capacity::WorstCase, ..small(&[0]) };
    thorough(&spec, 783_070);
}

#[test]
fn every_order_of_operations_with_rings_beside_blocks() {
    thorough(&Spec { mode: CacheMode::Hybrid, max_rewind_tokens: 1, ..small(&[2, 0]) }, 129_674);
}
