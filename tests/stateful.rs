//! The verbs against a naive model that stores everything, in every mode at once.
//!
//! One list of operations runs on a contiguous, a paged and a hybrid cache. After each, all three
//! agree with the model on lengths and contents and with each other, bit by bit, on attention.

use kvpool::cache::{Cache, SeqHandle};
use kvpool::config::{Admission, CacheMode, Capacity, Format, ScaleKind};
use kvpool::device::{dequantize_row, quantize_row};
use kvpool::error::CacheError;
use kvpool::plan::{E8M8, Kv};
use kvpool::units::{GroupIdx, LayerIdx};
use proptest::prelude::*;

use crate::common::{
    MODES, Outputs, Rng, Spec, assert_same_bits, empty_step, mix, naive_attention, run_step, vector,
};

/// One operation; numbers pick among what is alive, modulo how many there are.
#[derive(Clone, Debug)]
enum Op {
    Begin,
    /// Sequences and tokens of a step.
    Step(Vec<(u8, u8)>),
    /// A step that is reserved, half appended and dropped.
    Cancel(Vec<(u8, u8)>),
    Truncate(u8, u16),
    Fork(u8),
    Release(u8),
    /// Uses a handle that was released.
    Stale(u8),
    /// Fills everything unused with NaN bytes.
    Poison,
}

fn op() -> impl Strategy<Value = Op> {
    let batch = || prop::collection::vec((any::<u8>(), 1_u8..12), 1..4);
    prop_oneof![
        3 => Just(Op::Begin),
        12 => batch().prop_map(Op::Step),
        2 => batch().prop_map(Op::Cancel),
        3 => (any::<u8>(), any::<u16>()).prop_map(|(s, len)| Op::Truncate(s, len)),
        1 => any::<u8>().prop_map(Op::Fork),
        1 => any::<u8>().prop_map(Op::Release),
        1 => any::<u8>().prop_map(Op::Stale),
        1 => Just(Op::Poison),
    ]
}

/// A sequence of the model: its tokens, and its handle in each cache.
#[derive(Clone)]
struct Sequence {
    tags: Vec<u64>,
    handles: Vec<SeqHandle>,
}

struct World {
    caches: Vec<Cache>,
    /// What a format makes of one vector.
    stored: fn(&[f32]) -> Vec<f32>,
    seqs: Vec<Sequence>,
    released: Vec<Vec<SeqHandle>>,
    next_tag: u64,
}

impl World {
    fn new(spec: &Spec) -> Self {
        let caches = MODES.iter().map(|&mode| Spec { mode, ..spec.clone() }.open()).collect();
        let stored = if spec.format == Format::Int8 { through_int8 } else { <[f32]>::to_vec };
        Self { caches, stored, seqs: Vec::new(), released: Vec::new(), next_tag: 1 }
    }

    /// The same call on every cache; all succeed alike or are refused with the same error and no
    /// trace.
    fn all<T>(
        &mut self,
        mut call: impl FnMut(&mut Cache, usize) -> Result<T, CacheError>,
    ) -> Result<Vec<T>, CacheError> {
        let mut results = Vec::new();
        for (at, cache) in self.caches.iter_mut().enumerate() {
            let before = cache.state_digest();
            let result = call(cache, at);
            if result.is_err() {
                assert_eq!(cache.state_digest(), before, "a refused call left a trace");
            }
            cache.check_invariants().expect("invariants");
            results.push(result);
        }
        let failed = results.iter().filter(|result| result.is_err()).count();
        assert!(failed == 0 || failed == results.len(), "the modes disagree on a refusal");
        results.into_iter().collect()
    }

    fn apply(&mut self, op: &Op) {
        match op {
            Op::Begin => self.begin(),
            Op::Step(batch) => self.step(batch, true),
            Op::Cancel(batch) => self.step(batch, false),
            Op::Truncate(which, len) => self.truncate(*which, *len),
            Op::Fork(which) => self.fork(*which),
            Op::Release(which) => self.release(*which),
            Op::Stale(which) => self.stale(*which),
            Op::Poison => {
                let _ = self.all(|cache, _| cache.poison_unused(0xFF)).expect("poison");
            }
        }
        self.check_contents();
    }

    fn begin(&mut self) {
        match self.all(|cache, _| Ok(cache.begin(&[], Default::default())?.sequence)) {
            Ok(handles) => self.seqs.push(Sequence { tags: Vec::new(), handles }),
            Err(CacheError::NoSeqSlot { .. } | CacheError::NotAdmitted { .. }) => {
                assert_eq!(self.seqs.len(), self.caches[0].plan().seq_slots as usize);
            }
            Err(error) => panic!("begin: {error}"),
        }
    }

    /// The sequences of a batch without repetition, with their new tokens.
    fn batch(&mut self, batch: &[(u8, u8)]) -> Vec<(usize, Vec<u64>)> {
        let mut chosen: Vec<(usize, Vec<u64>)> = Vec::new();
        for &(which, tokens) in batch {
            if self.seqs.is_empty() {
                break;
            }
            let at = which as usize % self.seqs.len();
            if chosen.iter().all(|(other, _)| *other != at) {
                let first = self.next_tag;
                self.next_tag += u64::from(tokens);
                chosen.push((at, (first..self.next_tag).collect()));
            }
        }
        chosen
    }

    fn step(&mut self, batch: &[(u8, u8)], commit: bool) {
        let chosen = self.batch(batch);
        let tags: Vec<u64> = chosen.iter().flat_map(|(_, tags)| tags.clone()).collect();
        let seqs = self.seqs.clone();
        let rows = |at: usize| -> Vec<(SeqHandle, u32)> {
            chosen.iter().map(|(s, tags)| (seqs[*s].handles[at], tags.len() as u32)).collect()
        };
        if !commit {
            let cancelled = self.all(|cache, at| {
                let before = cache.state_digest();
                let mut step = cache.reserve(&rows(at))?;
                let layers = 1;
                for layer in 0..layers {
                    let n = step.num_tokens() * 8;
                    let junk = vec![f32::NAN; n];
                    step.append(LayerIdx(layer), (&junk[..]).into(), (&junk[..]).into())?;
                }
                drop(step);
                assert_eq!(cache.state_digest(), before, "a cancelled step left a trace");
                Ok(())
            });
            self.accept_limit(cancelled.map(|_| ()));
            return;
        }
        match self.all(|cache, at| run_step(cache, &rows(at), &tags)) {
            Ok(outputs) => {
                for (at, tags) in &chosen {
                    self.seqs[*at].tags.extend(tags);
                }
                self.check_outputs(&chosen, &outputs);
            }
            Err(error) => self.accept_limit(Err(error)),
        }
    }

    /// A step may be refused only for its sizes.
    fn accept_limit(&self, result: Result<(), CacheError>) {
        match result {
            Ok(()) | Err(CacheError::SequenceTooLong { .. } | CacheError::StepTooLarge { .. }) => {}
            Err(error) => panic!("step: {error}"),
        }
    }

    /// Outputs of the modes are the same bits, and near to naive attention.
    fn check_outputs(&self, chosen: &[(usize, Vec<u64>)], outputs: &[Outputs]) {
        let geometry = self.caches[0].plan().geometry.clone();
        for layer in 0..geometry.num_layers as usize {
            for other in &outputs[1..] {
                assert_same_bits(&outputs[0].out[layer], &other.out[layer], "modes: out");
                assert_same_bits(&outputs[0].lse[layer], &other.lse[layer], "modes: lse");
            }
            let mut row = 0;
            for (at, new) in chosen {
                let tags = &self.seqs[*at].tags;
                for end in tags.len() - new.len() + 1..=tags.len() {
                    for head in 0..geometry.num_q_heads as usize {
                        let layer_idx = layer as u32;
                        let (want, lse) = naive_attention(
                            &geometry,
                            &tags[..end],
                            layer_idx,
                            head as u32,
                            |_, row| (self.stored)(row),
                        );
                        let dim = geometry.head_dim as usize;
                        let start = (row * geometry.num_q_heads as usize + head) * dim;
                        let got = &outputs[0].out[layer][start..start + dim];
                        for (got, want) in got.iter().zip(&want) {
                            assert!((f64::from(*got) - want).abs() < 2e-4, "{got} and {want}");
                        }
                        let got = outputs[0].lse[layer][row * geometry.num_q_heads as usize + head];
                        assert!((f64::from(got) - lse).abs() < 2e-4, "lse {got} and {lse}");
                    }
                    row += 1;
                }
            }
        }
    }

    fn truncate(&mut self, which: u8, len: u16) {
        if self.seqs.is_empty() {
            return;
        }
        let at = which as usize % self.seqs.len();
        let handles = self.seqs[at].handles.clone();
        let len = u32::from(len) % (self.seqs[at].tags.len() as u32 + 2);
        match self.all(|cache, c| cache.truncate(handles[c], len)) {
            Ok(_) => self.seqs[at].tags.truncate(len as usize),
            Err(CacheError::TruncateBeyondEnd { len: now, .. }) => {
                assert_eq!(now as usize, self.seqs[at].tags.len());
                assert!(len > now);
            }
            Err(CacheError::WindowGone { shortest, .. }) => assert!(len < shortest),
            Err(error) => panic!("truncate: {error}"),
        }
    }

    fn fork(&mut self, which: u8) {
        if self.seqs.is_empty() {
            return;
        }
        let at = which as usize % self.seqs.len();
        let source = self.seqs[at].clone();
        match self.all(|cache, c| cache.fork(source.handles[c])) {
            Ok(handles) => self.seqs.push(Sequence { tags: source.tags, handles }),
            Err(CacheError::NoSeqSlot { .. } | CacheError::NotAdmitted { .. }) => {}
            Err(error) => panic!("fork: {error}"),
        }
    }

    fn release(&mut self, which: u8) {
        if self.seqs.is_empty() {
            return;
        }
        let at = which as usize % self.seqs.len();
        let gone = self.seqs.swap_remove(at);
        let _ = self.all(|cache, c| cache.release(gone.handles[c])).expect("release");
        self.released.push(gone.handles);
    }

    fn stale(&mut self, which: u8) {
        if self.released.is_empty() {
            return;
        }
        let handles = self.released[which as usize % self.released.len()].clone();
        let result = self.all(|cache, c| match which % 3 {
            0 => cache.release(handles[c]),
            1 => cache.truncate(handles[c], 0),
            _ => cache.reserve(&[(handles[c], 1)]).map(|_| ()),
        });
        assert!(matches!(result, Err(CacheError::StaleHandle { .. })), "{result:?}");
    }

    /// Everything that the model has and a window has not dropped reads back exactly.
    fn check_contents(&self) {
        let geometry = &self.caches[0].plan().geometry;
        for sequence in &self.seqs {
            for (cache, handle) in self.caches.iter().zip(&sequence.handles) {
                let len = cache.seq_len(*handle).expect("alive");
                assert_eq!(len as usize, sequence.tags.len());
                for layer in 0..geometry.num_layers {
                    let window = geometry.windows[layer as usize];
                    let from = if window == 0 { 0 } else { (len + 1).saturating_sub(window) };
                    for (position, tag) in (0..len).zip(&sequence.tags) {
                        if position < from && position >= geometry.sink_tokens {
                            continue;
                        }
                        for kv in [Kv::K, Kv::V] {
                            let (heads, dim) = (geometry.num_kv_heads, geometry.head_dim);
                            let mut got = vec![0.0; (heads * dim) as usize];
                            cache
                                .export(
                                    *handle,
                                    LayerIdx(layer),
                                    kv,
                                    position,
                                    position + 1,
                                    &mut got,
                                )
                                .expect("held");
                            let want = vector(*tag, position, layer, kv as u64, heads, dim);
                            let want: Vec<f32> =
                                want.chunks(dim as usize).flat_map(self.stored).collect();
                            assert_same_bits(&got, &want, "contents");
                        }
                    }
                }
            }
        }
    }
}

/// One vector quantised with a scale of its own, and back.
fn through_int8(row: &[f32]) -> Vec<f32> {
    let (mut q, mut scale) = (vec![0; row.len()], [E8M8(0)]);
    quantize_row(row, &mut q, &mut scale, ScaleKind::PerTokenHead, 0.0);
    let mut out = vec![0.0; row.len()];
    dequantize_row(&q, &scale, ScaleKind::PerTokenHead, 0.0, &mut out);
    out
}

fn full(format: Format) -> Spec {
    Spec { format, max_seqs: 3, max_seq_len: 40, max_batch_tokens: 20, ..Spec::default() }
}

fn windowed() -> Spec {
    Spec {
        windows: vec![12, 0, 5],
        max_seqs: 3,
        max_seq_len: 60,
        max_batch_tokens: 20,
        max_rewind_tokens: 3,
        ..Spec::default()
    }
}

fn run(spec: &Spec, ops: &[Op]) {
    let mut world = World::new(spec);
    for op in ops {
        world.apply(op);
    }
    while !world.seqs.is_empty() {
        world.release(0);
    }
    for cache in &world.caches {
        let stats = cache.stats();
        assert_eq!((stats.seqs, stats.used_bytes.0, stats.held_bytes.0), (0, 0, 0));
        assert_eq!(stats.promised_bytes.0, 0);
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 48, failure_persistence: None, ..ProptestConfig::default()
    })]

    #[test]
    fn edge_40_modes_follow_the_model(ops in prop::collection::vec(op(), 1..60)) {
        run(&full(Format::F32), &ops);
    }

    #[test]
    fn edge_40_modes_follow_the_model_in_f16(ops in prop::collection::vec(op(), 1..40)) {
        run(&Spec { tokens_per_block: 16, ..full(Format::F16) }, &ops);
    }

    #[test]
    fn edge_40_modes_follow_the_model_in_int8(ops in prop::collection::vec(op(), 1..40)) {
        run(&Spec { sink_tokens: 3, format: Format::Int8, ..windowed() }, &ops);
    }

    #[test]
    fn edge_41_windowed_modes_follow_the_model(ops in prop::collection::vec(op(), 1..60)) {
        run(&windowed(), &ops);
    }

    #[test]
    fn edge_41_windows_with_sinks_follow_the_model(ops in prop::collection::vec(op(), 1..50)) {
        run(&Spec { sink_tokens: 3, format: Format::Bf16, ..windowed() }, &ops);
    }
}

/// A million operations on the bookkeeping alone, invariants after each (edge 4). The pool is
/// small enough that refusals are as common as successes.
#[test]
fn edge_04_a_million_operations_keep_the_sum() {
    let shapes = [
        (CacheMode::Paged, vec![0], Admission::MaxUtilization, Capacity::Blocks(7)),
        (CacheMode::Paged, vec![0, 9], Admission::Guaranteed, Capacity::Blocks(9)),
        (CacheMode::Hybrid, vec![9, 0], Admission::MaxUtilization, Capacity::Blocks(6)),
        (CacheMode::Contiguous, vec![0], Admission::Guaranteed, Capacity::WorstCase),
    ];
    let (mut done, mut refused) = (0_u64, 0_u64);
    for (seed, (mode, windows, admission, capacity)) in shapes.into_iter().enumerate() {
        let spec = Spec {
            mode,
            windows,
            admission,
            capacity,
            max_seqs: 4,
            max_seq_len: 40,
            max_batch_tokens: 32,
            max_step_tokens: Some(9),
            ..Spec::default()
        };
        let mut cache = spec.open();
        let mut rng = Rng(seed as u64);
        let mut alive: Vec<SeqHandle> = Vec::new();
        let mut dead: Vec<SeqHandle> = Vec::new();
        for _ in 0..250_000 {
            match random_operation(&mut cache, &mut rng, &mut alive, &mut dead) {
                Ok(()) => done += 1,
                Err(_) => refused += 1,
            }
            cache.check_invariants().expect("invariants");
            assert_eq!(cache.stats().seqs as usize, alive.len());
        }
    }
    // Forks share, so more sequences are alive and more is refused than when they were copies.
    assert!(done > 350_000 && refused > 100_000, "{done} done, {refused} refused");
}

/// One random verb, valid or not.
fn random_operation(
    cache: &mut Cache,
    rng: &mut Rng,
    alive: &mut Vec<SeqHandle>,
    dead: &mut Vec<SeqHandle>,
) -> Result<(), CacheError> {
    let pick = |rng: &mut Rng, list: &[SeqHandle]| {
        (!list.is_empty()).then(|| rng.below(list.len() as u64) as usize)
    };
    let choice = rng.below(16);
    if choice < 4 {
        let prompt = vec![0; rng.below(44) as usize];
        let options = kvpool::cache::BeginOptions {
            key: (rng.below(4) == 0).then(|| rng.below(3)),
            max_len: (rng.below(2) == 0).then(|| rng.below(44) as u32),
            lookahead_tokens: rng.below(3) as u32,
            ..Default::default()
        };
        alive.push(cache.begin(&prompt, options)?.sequence);
        return Ok(());
    }
    if choice == 4 {
        let Some(at) = pick(rng, dead) else {
            return Ok(());
        };
        let error = cache.release(dead[at]).expect_err("stale");
        assert!(matches!(error, CacheError::StaleHandle { .. }));
        return Err(error);
    }
    let Some(at) = pick(rng, alive) else {
        return Ok(());
    };
    match choice {
        5 => {
            dead.push(alive[at]);
            dead.truncate(64);
            cache.release(alive.swap_remove(at))
        }
        6 => cache.truncate(alive[at], rng.below(42) as u32),
        7 => {
            alive.push(cache.fork(alive[at])?);
            Ok(())
        }
        8 => cache.reserve(&[(alive[at], rng.below(9) as u32)]).map(|step| step.cancel()),
        _ => {
            let mut batch: Vec<(SeqHandle, u32)> = Vec::new();
            for handle in alive.iter() {
                if rng.below(2) == 0 {
                    batch.push((*handle, 1 + rng.below(6) as u32));
                }
            }
            empty_step(cache, &batch)
        }
    }
}

/// The same calls give the same block ids, statistics and digests (P10).
#[test]
fn same_calls_same_everything() {
    let run = || {
        let spec = Spec {
            windows: vec![9, 0],
            capacity: Capacity::Blocks(9),
            max_batch_tokens: 32,
            max_step_tokens: Some(9),
            ..Spec::default()
        };
        let mut cache = spec.open();
        let mut rng = Rng(7);
        let (mut alive, mut dead) = (Vec::new(), Vec::new());
        let mut trail = 0;
        for _ in 0..20_000 {
            let failed = random_operation(&mut cache, &mut rng, &mut alive, &mut dead).is_err();
            trail = mix(&[trail, failed.into(), cache.state_digest()]);
        }
        let tables = cache.block_table(GroupIdx(0)).expect("paged").0.to_vec();
        (trail, tables, cache.stats())
    };
    assert_eq!(run(), run());
}
