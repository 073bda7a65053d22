//! Edge case 56: events replayed into an empty index give the live index.

use std::collections::HashMap;

use kvpool::cache::{BeginOptions, Cache, Event, EventKind, Namespace, SeqHandle};
use kvpool::config::{Admission, CacheMode, Capacity};
use kvpool::device::NullDevice;
use kvpool::units::GroupIdx;

use super::driver::Driver;
use super::driver_step::skip;
use super::text::Ns;
use crate::common::{Rng, Spec};

/// What is known of a cached block.
#[derive(Debug, PartialEq, Eq)]
enum Node {
    Stored { parent: Option<u32>, tokens: Vec<u32>, namespace: u32 },
    Attached { of: u32 },
}

/// An index built from events alone.
#[derive(Debug, Default)]
pub(crate) struct Replay {
    nodes: HashMap<(u32, u32), Node>,
    /// The number of the last event.
    last: Option<u64>,
    pub(crate) lost: u64,
    pub(crate) delivered: u64,
    /// Events were lost, so the index is not known until it is cleared or told anew.
    pub(crate) blind: bool,
}

impl Replay {
    /// Reads what there is.
    pub(crate) fn poll(&mut self, cache: &mut Cache) {
        let first_of_poll = self.delivered;
        let mut events = 0;
        let mut first = None;
        let last = self.last;
        let polled = cache.poll_events(&mut |event| {
            first.get_or_insert(event.number);
            self.apply(event);
            events += 1;
        });
        assert_eq!((polled.delivered, first_of_poll + events), (events, self.delivered));
        if let (Some(first), Some(last)) = (first, last) {
            assert_eq!(first, last + 1 + polled.lost, "as many are missing as were lost");
        }
        self.lost += polled.lost;
    }

    fn apply(&mut self, event: Event<'_>) {
        if event.number != self.last.map_or(0, |last| last + 1) {
            assert!(self.last.is_none_or(|last| event.number > last), "numbers grow");
            // What was lost is not known: nothing can be checked before everything is cleared.
            self.blind = true;
        }
        self.last = Some(event.number);
        self.delivered += 1;
        let group = event.group.0;
        match event.kind {
            EventKind::Stored { block, parent, tokens, namespace } => {
                let known = parent.is_none_or(|parent| self.nodes.contains_key(&(group, parent)));
                assert!(known || self.blind, "{event:?}: the parent is not there");
                let node = Node::Stored { parent, tokens: tokens.to_vec(), namespace };
                let old = self.nodes.insert((group, block), node);
                assert!(old.is_none() || self.blind, "{event:?}: stored twice");
            }
            EventKind::Attached { block, of } => {
                let old = self.nodes.insert((group, block), Node::Attached { of });
                assert!(old.is_none() || self.blind, "{event:?}: attached twice");
            }
            EventKind::Removed { block } => {
                let old = self.nodes.remove(&(group, block));
                assert!(old.is_some() || self.blind, "{event:?}: was not there");
                let orphan = self.nodes.iter().find(|((g, _), node)| {
                    matches!(node, Node::Stored { parent: Some(p), .. } if *p == block)
                        && *g == group
                });
                assert!(orphan.is_none() || self.blind, "{event:?}: left {orphan:?} behind");
            }
            EventKind::Cleared => {
                self.nodes.clear();
                self.blind = false;
            }
        }
    }

    /// The whole blocks of a prompt that the replayed index has. `numbers` are those of the
    /// prompt's namespaces, `salted_at` is the block at which the second one begins.
    fn find(&self, prompt: &[u32], per_block: u32, numbers: [u32; 2], salted_at: u32) -> u32 {
        let most = prompt.len().saturating_sub(1) / per_block as usize;
        let mut last = None;
        for (at, wanted) in (0..most as u32).zip(prompt.chunks(per_block as usize)) {
            let expected = match at {
                0 => numbers[0],
                at if at == salted_at => numbers[1],
                _ => 0,
            };
            if expected == 0 && (at == 0 || at == salted_at) {
                return at;
            }
            let next = self.nodes.iter().find(|(_, node)| {
                matches!(node, Node::Stored { parent, tokens, namespace }
                    if *parent == last && tokens == wanted && *namespace == expected)
            });
            match next {
                Some(((_, block), _)) => last = Some(*block),
                None => return at,
            }
        }
        most as u32
    }

    /// The replayed index has as many blocks of a prompt as a probe finds.
    pub(crate) fn check_probe(&self, cache: &Cache, prompt: &[u32], namespace: &Namespace) {
        let per_block = cache.plan().tokens_per_block;
        let salted_at = match namespace.salt {
            Some(_) if namespace.salt_from >= per_block => namespace.salt_from / per_block,
            _ => u32::MAX,
        };
        let numbers = cache.namespace_numbers(namespace);
        let found = self.find(prompt, per_block, numbers, salted_at);
        let probe = cache.probe(prompt, namespace);
        assert_eq!(found, probe.full_blocks, "{numbers:?} {namespace:?} {prompt:?}");
    }

    /// Begins anew from the index as it is; without lost events that is what was known before.
    pub(crate) fn resync(&mut self, cache: &mut Cache) {
        let mut anew = Self::default();
        let mut first = None;
        let delivered = cache.resync_events(&mut |event| {
            assert_eq!(*first.get_or_insert(event.number), event.number);
            assert_eq!(anew.delivered == 0, event.kind == EventKind::Cleared, "first of all");
            anew.apply(Event { number: anew.delivered, ..event });
        });
        assert_eq!(delivered, anew.delivered);
        if !self.blind {
            assert_eq!(self.nodes, anew.nodes, "replayed events and the index differ");
        }
        self.nodes = anew.nodes;
        self.blind = false;
        assert_eq!(cache.poll_events(&mut |_| ()).delivered, 0, "it begins behind this");
        self.last = first.and_then(|next| next.checked_sub(1));
    }

    /// With nothing alive, what is in the index is what is cached.
    pub(crate) fn check_idle(&self, cache: &Cache) {
        for group in 0..cache.plan().groups.len() as u32 {
            let blocks = cache.group_stats(GroupIdx(group)).expect("exists").blocks;
            let known = self.nodes.keys().filter(|(g, _)| *g == group).count();
            assert_eq!(known as u32, blocks.cached, "group {group}");
        }
    }

    fn len(&self) -> usize {
        self.nodes.len()
    }
}

fn reusing(blocks: u64) -> Spec {
    Spec {
        prefix_reuse: true,
        event_buffer: 1 << 12,
        capacity: Capacity::Blocks(blocks),
        max_seq_len: 64,
        ..Spec::default()
    }
}

fn open(spec: &Spec) -> Cache {
    let plan = spec.plan();
    let device = Box::new(NullDevice::open(&plan));
    Cache::open(plan, device).expect("opens")
}

/// Begins, fills and gives back a sequence.
fn through(cache: &mut Cache, prompt: &[u32]) -> Option<SeqHandle> {
    let options = BeginOptions { max_len: Some(prompt.len() as u32), ..Default::default() };
    let begun = cache.begin(prompt, options).ok()?;
    let left = prompt.len() as u32 - begun.cached_len;
    skip(cache.reserve(&[(begun.sequence, left)]).expect("promised")).expect("whole");
    Some(begun.sequence)
}

/// One namespace, so that the replayed index must give exactly what a probe finds, after every
/// single call, with evictions, duplicates and clearing.
#[test]
fn edge_56_events_rebuild_the_index_at_every_step() {
    let mut cache = open(&reusing(9));
    let mut rng = Rng(56);
    let mut replay = Replay::default();
    let mut alive: Vec<SeqHandle> = Vec::new();
    let prompts: Vec<Vec<u32>> = (0..24)
        .map(|n| {
            let shared = [0, 8, 12, 16][n % 4];
            let len = [9, 16, 17, 20, 24, 25, 33][n % 7];
            (0..len).map(|at| if at < shared { 1 } else { 2 + n as u32 }).collect()
        })
        .collect();
    let mut found = [0_u32; 2];
    for _ in 0..4000 {
        match rng.below(8) {
            0..4 => {
                let prompt = &prompts[rng.below(24) as usize];
                alive.extend(through(&mut cache, prompt));
            }
            4..7 if !alive.is_empty() => {
                let at = rng.below(alive.len() as u64) as usize;
                cache.release(alive.swap_remove(at)).expect("alive");
            }
            7 if rng.below(20) == 0 => cache.clear_cached(),
            _ => {}
        }
        replay.poll(&mut cache);
        assert!(!replay.blind && replay.lost == 0);
        for prompt in &prompts {
            let namespace = Ns::default().options();
            replay.check_probe(&cache, prompt, &namespace);
            found[usize::from(cache.probe(prompt, &namespace).full_blocks > 0)] += 1;
        }
        if alive.is_empty() {
            replay.check_idle(&cache);
        }
    }
    assert!(found[0] > 1000 && found[1] > 1000, "{found:?}");
    assert!(cache.stats().evictions > 100);
}

/// Nothing is said of blocks that are not shared, of a refused call, of an aborted one.
#[test]
fn edge_56_no_event_without_a_stored_block() {
    let mut cache = open(&reusing(2));
    let mut replay = Replay::default();
    let options = BeginOptions { max_len: Some(17), ..Default::default() };
    cache.begin(&[7; 17], options).expect_err("three blocks of two");
    let options = BeginOptions { max_len: Some(16), ..Default::default() };
    let seq = cache.begin(&[7; 16], options).expect("fits").sequence;
    cache.reserve(&[(seq, 16)]).expect("promised").cancel();
    skip(cache.reserve(&[(seq, 7)]).expect("promised")).expect("whole");
    replay.poll(&mut cache);
    assert_eq!((replay.delivered, replay.len()), (0, 0), "no block is full");
    skip(cache.reserve(&[(seq, 1)]).expect("promised")).expect("whole");
    replay.poll(&mut cache);
    assert_eq!((replay.delivered, replay.len()), (1, 1));
    cache.release(seq).expect("alive");
    replay.poll(&mut cache);
    assert_eq!((replay.delivered, replay.len()), (1, 1), "it is cached");
    cache.clear_cached();
    replay.poll(&mut cache);
    assert_eq!((replay.delivered, replay.len()), (3, 0), "removed, and cleared");
}

#[test]
fn edge_56_a_slow_reader_is_told_how_many_it_lost() {
    for buffer in [1, 2, 4, 7] {
        let mut cache = open(&Spec { event_buffer: buffer, ..reusing(8) });
        let mut fast = open(&reusing(8));
        let (mut slow, mut all) = (Replay::default(), Replay::default());
        let mut rng = Rng(u64::from(buffer));
        for round in 0..300_u32 {
            let prompt: Vec<u32> =
                (0..8 + 8 * rng.below(3) as u32).map(|at| at + round % 9).collect();
            for cache in [&mut cache, &mut fast] {
                let seq = through(cache, &prompt).expect("one at a time");
                cache.release(seq).expect("alive");
            }
            all.poll(&mut fast);
            if rng.below(3) == 0 {
                slow.poll(&mut cache);
                assert_eq!(slow.delivered + slow.lost, all.delivered, "buffer of {buffer}");
            }
        }
        assert!(slow.lost > 0 && slow.delivered > 0 && all.lost == 0);
        // A reader that lost its way is told everything anew, and goes on from there.
        all.resync(&mut fast);
        slow.resync(&mut cache);
        assert!(!slow.blind && slow.nodes == all.nodes && slow.len() > 0);
        let seq = through(&mut cache, &[99; 8]).expect("one at a time");
        slow.poll(&mut cache);
        assert!(!slow.blind || buffer == 1, "evicted and stored: two events at the most");
        cache.release(seq).expect("alive");
        // So it can where nothing is left.
        cache.clear_cached();
        slow.poll(&mut cache);
        assert_eq!(slow.len(), 0);
    }
}

/// The driver's replay, in plans with several groups and with little room for events.
#[test]
fn edge_56_events_of_every_plan_are_consistent() {
    for (mode, windows) in [
        (CacheMode::Paged, vec![0]),
        (CacheMode::Paged, vec![0, 9]),
        (CacheMode::Paged, vec![9, 0, 17]),
        (CacheMode::Hybrid, vec![9, 0]),
    ] {
        for (event_buffer, admission) in
            [(1 << 12, Admission::Guaranteed), (8, Admission::MaxUtilization)]
        {
            let spec = Spec {
                mode,
                windows: windows.clone(),
                event_buffer,
                admission,
                max_seq_len: 40,
                max_step_tokens: Some(9),
                ..reusing(12)
            };
            let mut driver = Driver::new(&spec, 56);
            for _ in 0..600 {
                driver.run(10);
                driver.poll().expect("never refused");
            }
            driver.finish();
            assert!(driver.replay.delivered > 100);
        }
    }
}

/// What a router does: it knows the namespaces' numbers, and after a change of the weights finds
/// nothing of what was there before, as a prober does.
#[test]
fn edge_56_events_follow_epochs_and_namespaces() {
    let mut cache = open(&reusing(20));
    let mut replay = Replay::default();
    let prober = cache.prober().expect("paged, with reuse");
    let prompt: Vec<u32> = (0..25).collect();
    let salted = Ns { salt: 2, salt_from: 9, ..Ns::default() }.options();
    let plain = Ns::default().options();
    for namespace in [plain, salted] {
        let options = BeginOptions { max_len: Some(25), namespace, ..Default::default() };
        let begun = cache.begin(&prompt, options).expect("fits");
        skip(cache.reserve(&[(begun.sequence, 25 - begun.cached_len)]).expect("promised"))
            .expect("whole");
        cache.release(begun.sequence).expect("alive");
    }
    replay.poll(&mut cache);
    let numbers = cache.namespace_numbers(&salted);
    assert_eq!(numbers[0], cache.namespace_numbers(&plain)[0], "the first block is shared");
    assert!(numbers[0] != 0 && numbers[1] != 0 && numbers[0] != numbers[1], "{numbers:?}");
    for (namespace, blocks) in
        [(plain, 3), (salted, 3), (Ns { salt: 5, ..Ns::default() }.options(), 0)]
    {
        replay.check_probe(&cache, &prompt, &namespace);
        assert_eq!(cache.probe(&prompt, &namespace).full_blocks, blocks);
    }
    cache.set_epoch(1).expect("no reservations");
    replay.poll(&mut cache);
    for namespace in [plain, salted] {
        assert_eq!(cache.namespace_numbers(&namespace), [0, 0], "nothing is of this epoch yet");
        assert_eq!(prober.probe(&prompt, &namespace), cache.probe(&prompt, &namespace));
        replay.check_probe(&cache, &prompt, &namespace);
    }
    cache.set_epoch(0).expect("no reservations");
    assert_eq!(prober.probe(&prompt, &plain).cached_len, 24);
    replay.resync(&mut cache);
    assert!(replay.len() > 4);
}
