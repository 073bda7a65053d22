//! Each call of the device fails once, in turn, while a cache works: the verb says so, nothing is
//! lost or mixed up, and the same verb again goes on as if nothing had been.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use kvpool::cache::{BeginOptions, Cache, SeqHandle};
use kvpool::config::{CacheMode, DeviceConfig, Format, Scrub};
use kvpool::device::cpu::CpuDevice;
use kvpool::device::{
    AppendArgs, AppendCounts, AttendArgs, Device, DeviceInfo, TensorMut, TensorRef,
};
use kvpool::error::{CacheError, DeviceError};
use kvpool::plan::Kv;
use kvpool::units::LayerIdx;

use crate::common::{FORMATS, MODES, Outputs, Spec, run_step};
use crate::walk::{Faults, Walk};

/// Small caches in which every verb has something to do for the device.
pub(crate) fn specs() -> Vec<Spec> {
    let spec = Spec {
        windows: vec![0, 0],
        max_seqs: 3,
        max_seq_len: 48,
        max_batch_tokens: 24,
        head_dim: 32,
        scrub: Scrub::OnRelease,
        ..Spec::default()
    };
    let with = |mode, format, windows: &[u32]| Spec {
        mode,
        format,
        windows: windows.to_vec(),
        max_rewind_tokens: 4,
        max_step_tokens: Some(8),
        ..spec.clone()
    };
    vec![
        with(CacheMode::Paged, Format::Int8, &[0, 0]),
        with(CacheMode::Contiguous, Format::F32, &[0, 0]),
        with(CacheMode::Hybrid, Format::F16, &[12, 0]),
        with(CacheMode::Paged, Format::F16, &[0, 12]),
    ]
}

/// A run of a script: what it computed, and how often the device failed.
#[derive(Debug, Default)]
pub(crate) struct Script {
    pub(crate) bits: Vec<u32>,
    pub(crate) failures: Vec<DeviceError>,
    /// Whether all that nobody owns is filled with NaN before each verb.
    poison: bool,
}

impl Script {
    /// Calls a verb again when the device has failed.
    fn insist<T>(
        &mut self,
        cache: &mut Cache,
        mut verb: impl FnMut(&mut Cache) -> Result<T, CacheError>,
    ) -> T {
        if self.poison {
            cache.poison_unused(0xFF).expect("in the pool");
        }
        for _ in 0..3 {
            match verb(cache) {
                Ok(done) => return done,
                Err(CacheError::Device(error)) => {
                    self.failures.push(error);
                    cache.check_invariants().expect("invariants, after the device has failed");
                }
                Err(error) => panic!("{error}, after {:?}", self.failures),
            }
        }
        panic!("it fails again and again: {:?}", self.failures)
    }

    fn step(&mut self, cache: &mut Cache, batch: &[(SeqHandle, u32)], tags: &[u64]) {
        let Outputs { out, lse } = self.insist(cache, |cache| {
            let committed = cache.stats().steps_committed;
            let result = run_step(cache, batch, tags);
            assert_eq!(cache.stats().steps_committed - committed, u64::from(result.is_ok()));
            result
        });
        self.bits.extend(out.iter().chain(&lse).flatten().map(|x| x.to_bits()));
    }

    fn read(&mut self, cache: &mut Cache, seq: SeqHandle, from: u32, to: u32) {
        let row = cache.plan().geometry.head_dim as usize;
        for kv in [Kv::K, Kv::V] {
            let out = self.insist(cache, |cache| {
                let mut out = vec![f32::NAN; (to - from) as usize * row];
                cache.export(seq, LayerIdx(1), kv, from, to, &mut out)?;
                Ok(out)
            });
            self.bits.extend(out.iter().map(|x| x.to_bits()));
        }
    }
}

/// Begins, steps, forks, copies on write, rewinds, finds a prefix in part, releases.
pub(crate) fn script(cache: &mut Cache) -> Script {
    script_on(cache, false)
}

fn script_on(cache: &mut Cache, poison: bool) -> Script {
    let mut run = Script { poison, ..Script::default() };
    let prompt: Vec<u32> = (0..20).collect();
    let options = BeginOptions { max_len: Some(40), ..BeginOptions::default() };
    let tags: Vec<u64> = (0..20).collect();
    let a = run.insist(cache, |cache| cache.begin(&prompt, options)).sequence;
    for chunk in tags.chunks(8) {
        run.step(cache, &[(a, chunk.len() as u32)], chunk);
    }
    let b = run.insist(cache, |cache| cache.fork(a));
    run.step(cache, &[(a, 1), (b, 2)], &[100, 200, 201]);
    run.read(cache, b, 14, 22);
    run.insist(cache, |cache| cache.truncate(b, 21));
    run.step(cache, &[(b, 3)], &[300, 301, 302]);
    run.read(cache, a, 14, 21);
    run.insist(cache, |cache| cache.release(a));
    // 13 tokens of the first prompt, and others.
    let other: Vec<u32> = (0..13).chain(50..55).collect();
    let begun = run.insist(cache, |cache| cache.begin(&other, options));
    let tags: Vec<u64> = (0..13).chain(50..55).collect();
    let mut at = begun.cached_len as usize;
    while at < tags.len() {
        let end = (at + 8).min(tags.len());
        run.step(cache, &[(begun.sequence, (end - at) as u32)], &tags[at..end]);
        at = end;
    }
    run.read(cache, begun.sequence, 10, 18);
    run.bits.push(begun.cached_len);
    for seq in [b, begun.sequence] {
        run.insist(cache, |cache| cache.release(seq));
    }
    run.insist(cache, Cache::synchronize);
    cache.clear_cached();
    let stats = cache.stats();
    assert_eq!((stats.seqs, stats.held_bytes.0, stats.cached_bytes.0), (0, 0, 0));
    run
}

/// How far a call comes that fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reached {
    /// Nothing is done.
    Start,
    /// Half of it is.
    Middle,
    /// All of it is.
    End,
}

pub(crate) const REACHED: [Reached; 3] = [Reached::Start, Reached::Middle, Reached::End];

/// The CPU device, of which one call fails.
#[derive(Debug)]
struct Faulty {
    inner: CpuDevice,
    calls: Arc<AtomicU64>,
    /// Which, counted from 1; 0 for none.
    fails: Arc<AtomicU64>,
    reached: Reached,
}

const FAILURE: DeviceError = DeviceError::WorkerPanicked;

/// The first half of a tensor's rows.
fn half(tensor: TensorRef<'_>) -> TensorRef<'_> {
    let TensorRef::F32(data) = tensor else { panic!("these tests store f32") };
    TensorRef::F32(&data[..data.len() / 2])
}

impl Faulty {
    /// How far the call comes that begins now, if it fails.
    fn fault(&self) -> Option<Reached> {
        let call = self.calls.fetch_add(1, Relaxed) + 1;
        (call == self.fails.load(Relaxed)).then_some(self.reached)
    }

    /// What of `len` bytes is done, and whether the call fails.
    fn bytes(&self, len: u64) -> (u64, Result<(), DeviceError>) {
        match self.fault() {
            None => (len, Ok(())),
            Some(Reached::Start) => (0, Err(FAILURE)),
            Some(Reached::Middle) => (len / 2, Err(FAILURE)),
            Some(Reached::End) => (len, Err(FAILURE)),
        }
    }

    /// A call that does nothing here.
    fn nothing(&self) -> Result<(), DeviceError> {
        self.bytes(0).1
    }
}

/// Copies of tokens are made run by run, as the trait has it: they fail between two, or in one.
impl Device for Faulty {
    fn info(&self) -> DeviceInfo {
        self.inner.info()
    }

    fn plan_fingerprint(&self) -> u64 {
        self.inner.plan_fingerprint()
    }

    fn base_ptr(&self) -> *mut u8 {
        self.inner.base_ptr()
    }

    fn append(&mut self, args: &AppendArgs<'_>) -> Result<AppendCounts, DeviceError> {
        let fault = self.fault();
        let rows = args.token_slots.len();
        if fault == Some(Reached::Middle) && rows.is_multiple_of(2) {
            let token_slots = &args.token_slots[..rows / 2];
            let positions = &args.positions[..args.positions.len() / 2];
            let (k, v) = (half(args.k), half(args.v));
            self.inner.append(&AppendArgs { token_slots, positions, k, v, ..*args })?;
        } else if fault != Some(Reached::Start) {
            let counts = self.inner.append(args)?;
            return if fault.is_none() { Ok(counts) } else { Err(FAILURE) };
        }
        Err(FAILURE)
    }

    fn attend(&mut self, args: &mut AttendArgs<'_>) -> Result<(), DeviceError> {
        let fault = self.fault();
        if fault == Some(Reached::Start) {
            return Err(FAILURE);
        }
        self.inner.attend(args)?;
        if let (Some(Reached::Middle), TensorMut::F32(out)) = (fault, &mut args.out) {
            let half = out.len() / 2;
            out[half..].fill(f32::NAN);
        }
        if fault.is_none() { Ok(()) } else { Err(FAILURE) }
    }

    fn copy(&mut self, src: u64, dst: u64, len: u64) -> Result<(), DeviceError> {
        let (done, result) = self.bytes(len);
        self.inner.copy(src, dst, done)?;
        result
    }

    fn submit(&mut self) -> Result<(), DeviceError> {
        self.nothing()
    }

    fn synchronize(&mut self) -> Result<AppendCounts, DeviceError> {
        self.nothing()?;
        Ok(AppendCounts::default())
    }

    fn fill(&mut self, offset: u64, len: u64, byte: u8) -> Result<(), DeviceError> {
        let (done, result) = self.bytes(len);
        self.inner.fill(offset, done, byte)?;
        result
    }

    fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        let (done, result) = self.bytes(bytes.len() as u64);
        self.inner.write(offset, &bytes[..done as usize])?;
        result
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), DeviceError> {
        let (done, result) = self.bytes(out.len() as u64);
        self.inner.read(offset, &mut out[..done as usize])?;
        result
    }
}

/// When a device fails.
#[derive(Debug, Default)]
pub(crate) struct Failing {
    calls: Arc<AtomicU64>,
    fails: Arc<AtomicU64>,
}

impl Failing {
    /// The n-th call from now on fails.
    pub(crate) fn fail_after(&self, n: u64) {
        self.fails.store(self.calls.load(Relaxed) + n, Relaxed);
    }

    /// Whether it did.
    pub(crate) fn has_failed(&self) -> bool {
        self.calls.load(Relaxed) >= self.fails.load(Relaxed)
    }

    /// None fails.
    pub(crate) fn never(&self) {
        self.fails.store(0, Relaxed);
    }
}

impl Faults for Failing {
    fn arm(&mut self, nth: u64) {
        self.fail_after(nth);
    }

    fn disarm(&mut self) -> Option<String> {
        let failed = self.has_failed();
        self.never();
        failed.then(|| "a call of the device".to_owned())
    }

    fn is_thorough(&self) -> bool {
        true
    }

    fn is_told(&self, _: &str, error: DeviceError) -> bool {
        error == FAILURE
    }
}

/// A cache on a device that fails when it is told to.
pub(crate) fn faulty(spec: &Spec, reached: Reached) -> (Cache, Failing) {
    let plan = spec.plan();
    let config = DeviceConfig { threads: 1, ..DeviceConfig::default() };
    let inner = CpuDevice::open(&plan, &config, None).expect("opens");
    let failing = Failing::default();
    let (calls, fails) = (Arc::clone(&failing.calls), Arc::clone(&failing.fails));
    let device = Faulty { inner, calls, fails, reached };
    (Cache::open(plan, Box::new(device)).expect("opens"), failing)
}

/// Runs the script with a failure of the n-th call; gives how many calls there were, too.
fn with_failure(spec: &Spec, fails: u64, reached: Reached) -> (Script, u64, Cache) {
    let (mut cache, failing) = faulty(spec, reached);
    if fails > 0 {
        failing.fail_after(fails);
    }
    let run = script(&mut cache);
    let calls = failing.calls.load(Relaxed);
    (run, calls, cache)
}

/// NaN in everything that nobody owns shows on no path: tails, windows with sinks, copies on write,
/// rewinds, parts of blocks, donors' slots; in every mode and format, on the device at hand.
#[test]
fn edge_43_nan_shows_on_no_path() {
    for ((format, scale), mode) in
        FORMATS.into_iter().flat_map(|format| MODES.map(|mode| (format, mode)))
    {
        for (windows, sink_tokens) in [([0, 0], 0), ([12, 0], 0), ([0, 12], 3), ([12, 12], 3)] {
            let spec = Spec {
                mode,
                format,
                scale,
                sink_tokens,
                windows: windows.to_vec(),
                ..specs().remove(3)
            };
            let spec = Spec { scrub: Scrub::Off, ..spec };
            let clean = script_on(&mut spec.open(), false);
            let poisoned = script_on(&mut spec.open(), true);
            let finite = |bits: &u32| f32::from_bits(*bits).is_finite();
            assert!(poisoned.bits.iter().all(finite), "{spec:?}");
            assert!(poisoned.bits == clean.bits, "{spec:?}");
        }
    }
}

#[test]
fn every_call_of_the_device_may_fail_once() {
    for spec in specs() {
        let (good, calls, _) = with_failure(&spec, 0, Reached::Start);
        assert!(good.failures.is_empty() && calls > 80, "{calls} calls");
        for reached in REACHED {
            let mut told = 0;
            for fails in 1..=calls {
                let (run, _, cache) = with_failure(&spec, fails, reached);
                let what = format!("{spec:?}: call {fails} of {calls}, {reached:?}");
                assert!(run.bits == good.bits, "{what}: another result");
                let stats = cache.stats();
                // Zeroing that fails is told by a counter, and done again when it matters.
                let said = run.failures.len() as u64 + stats.scrub_failures;
                assert!(said >= 1, "{what}: nothing was said");
                told += run.failures.len() as u64;
            }
            assert!(told > calls / 3, "{told} of {calls} failures came to the caller");
        }
    }
}

/// As above, one cache for all failures, and what each leaves compared with what was there before.
#[test]
fn what_fails_leaves_everything_as_it_was() {
    let folder = tempfile::tempdir().expect("a folder");
    for spec in specs() {
        let spec = Spec { scrub: Scrub::Off, ..spec };
        let mut good = Walk::new(None);
        good.verbs_of_the_host(&mut faulty(&spec, Reached::Start).0, folder.path());
        for reached in REACHED {
            let (mut cache, mut failing) = faulty(&spec, reached);
            let mut walk = Walk::new(Some(&mut failing));
            walk.verbs_of_the_host(&mut cache, folder.path());
            assert!(walk.bits == good.bits, "{spec:?}, {reached:?}: another result");
            let failed: u64 = walk.failed.values().sum();
            assert!(walk.verbs.len() >= 9 && failed > 100, "{reached:?}: {:?}", walk.verbs);
        }
    }
}
