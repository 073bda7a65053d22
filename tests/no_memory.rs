//! Edge case 61 on the host: every table of `open` is refused its memory, in turn. The status says
//! how much was wanted and how much there was; nothing stays allocated; the next open works.
//!
//! A binary of its own, without the test harness, since the global allocator is what fails.
//!
//! So is every buffer of a save or a restore, the only verbs that allocate. All of it once more on
//! the emulated CUDA device, on which nothing may be left either.
//!
//! What is refused here are the allocations whose size follows from the plan, of 16 KiB and more
//! (of the emulated device 4 KiB, of saves 1 KiB).
//! Those of a few bytes beside them (a thread's name, a boxed device) are the standard library's to
//! make, and it ends the process where there is not even that much.

#![expect(clippy::cast_possible_truncation, reason = "small numbers of a test")]
#![allow(clippy::cast_possible_wrap, reason = "sizes of a test")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
#![expect(clippy::print_stdout, reason = "a test without a harness reports for itself")]

#[allow(dead_code, reason = "shared with the other integration tests, which use all of it")]
mod common;
#[allow(dead_code, reason = "shared with the tests of the CUDA device")]
#[path = "cuda/driver.rs"]
mod driver;
#[allow(dead_code, reason = "shared with the tests of the CUDA device")]
#[path = "cuda/emulator.rs"]
mod emulator;

use std::alloc::{GlobalAlloc, Layout, System};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicI64, AtomicU64, AtomicUsize, Ordering::SeqCst};

use common::{MODES, Spec};
use kvpool::cache::{BeginOptions, Cache, RestoreOptions, SaveOptions};
use kvpool::capi::*;
use kvpool::config::{CacheMode, DeviceConfig};
use kvpool::error::{DeviceError, OpenError, SaveError};

/// Allocations from this size on are counted, and may be refused, where a test says no other.
const LARGE_BYTES: usize = 16 << 10;
static LARGE: AtomicUsize = AtomicUsize::new(LARGE_BYTES);

/// The large allocation that is refused, counted down from when it is set; 0: none is.
static REFUSED: AtomicU64 = AtomicU64::new(0);
/// Its size, once it was.
static REFUSED_BYTES: AtomicU64 = AtomicU64::new(0);
/// Bytes allocated and not freed.
static LIVE: AtomicI64 = AtomicI64::new(0);

struct Failing;

/// Whether it is this allocation's turn.
fn refuses(bytes: usize) -> bool {
    if bytes < LARGE.load(SeqCst) || REFUSED.load(SeqCst) == 0 || REFUSED.fetch_sub(1, SeqCst) != 1
    {
        return false;
    }
    REFUSED_BYTES.store(bytes as u64, SeqCst);
    true
}

// SAFETY: every call goes to `System` with the caller's own arguments, or gives null, as an
// allocator may; counting touches nothing but atomics.
unsafe impl GlobalAlloc for Failing {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if refuses(layout.size()) {
            return null_mut();
        }
        LIVE.fetch_add(layout.size() as i64, SeqCst);
        // SAFETY: the caller keeps `GlobalAlloc::alloc`'s contract, which is `System`'s too.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size() as i64, SeqCst);
        // SAFETY: `ptr` came from `System` through this allocator with the same layout.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Failing = Failing;

fn main() {
    if common::on_cuda() {
        // What is counted there needs a context.
        driver::enter();
    }
    edge_61_every_table_of_open_is_refused_in_turn();
    edge_61_the_same_through_the_c_interface();
    edge_61_every_buffer_of_a_save_is_refused_in_turn();
    if common::on_cuda() {
        return;
    }
    #[cfg(target_os = "linux")]
    edge_61_the_pool_and_the_threads_are_refused();
    the_same_on_the_emulated_cuda_device();
}

/// Runs this program again, on the emulated driver.
fn the_same_on_the_emulated_cuda_device() {
    let Some(mut again) = emulator::this_program() else { return };
    let status = again.status().expect("starts");
    assert!(status.success(), "on the emulated CUDA device");
    println!("the_same_on_the_emulated_cuda_device ... ok");
}

/// What is allocated on the emulated device, and is not given back.
fn on_the_device() -> [u64; 8] {
    if common::on_cuda() { driver::live() } else { [0; 8] }
}

/// Every table of this is large.
fn spec(mode: CacheMode) -> Spec {
    Spec {
        mode,
        windows: vec![0, 0, 16],
        max_seqs: 4096,
        max_seq_len: 64,
        max_batch_tokens: 4096,
        max_step_tokens: Some(8),
        // Where there are no blocks there is nothing to tell of them.
        event_buffer: if mode == CacheMode::Contiguous { 0 } else { 4096 },
        threads: 2,
        head_dim: 16,
        rope: toml::from_str("theta = 10000.0").ok(),
        max_rewind_tokens: 0,
        ..Spec::default()
    }
}

/// Calls `open` with the n-th large allocation refused, for every n that it has. Gives how many.
fn in_turn(mut open: impl FnMut(u64) -> bool) -> u64 {
    assert!(open(0), "opens when nothing is refused");
    let (before, device) = (LIVE.load(SeqCst), on_the_device());
    for nth in 1.. {
        REFUSED.store(nth, SeqCst);
        REFUSED_BYTES.store(0, SeqCst);
        let opened = open(nth);
        let reached = REFUSED.swap(0, SeqCst) == 0;
        assert_eq!(opened, !reached, "allocation {nth}");
        let left = LIVE.load(SeqCst) - before;
        // What a thread keeps of its own is there once.
        assert!(left < 4096, "allocation {nth} left {left} bytes behind");
        assert_eq!(on_the_device(), device, "allocation {nth} left something on the device");
        if !reached {
            return nth - 1;
        }
        assert!(open(0), "the next open works");
    }
    unreachable!("there are not so many")
}

fn edge_61_every_table_of_open_is_refused_in_turn() {
    // The device's own tables are smaller than those of the manager.
    let large = if common::on_cuda() { 4 << 10 } else { LARGE_BYTES };
    LARGE.store(large, SeqCst);
    for mode in MODES {
        let spec = spec(mode);
        let config = spec.config().device;
        let count = in_turn(|nth| match Cache::open_on_device(spec.plan(), &config, None) {
            // The check allocates too.
            Ok(cache) => nth > 0 || cache.check_invariants().is_ok(),
            Err(OpenError::Device(error @ DeviceError::OutOfMemory { bytes, available, .. })) => {
                assert_eq!(bytes.get(), REFUSED_BYTES.load(SeqCst), "{error}");
                assert!(available.get() > 0, "{error}");
                assert!(error.to_string().contains("lower pool.capacity"), "{error}");
                false
            }
            Err(error) => panic!("{error}"),
        });
        assert!(count > 10, "{mode:?}: only {count} large allocations");
        println!("edge_61_every_table_of_open_is_refused_in_turn ... ok ({mode:?}: {count})");
    }
    LARGE.store(LARGE_BYTES, SeqCst);
}

/// Of many sequences, and of many layers: each has tables of its own that are large.
fn edge_61_the_same_through_the_c_interface() {
    refuse_through_the_c_interface(2, 4096, 10);
    refuse_through_the_c_interface(300, 64, 2);
}

fn refuse_through_the_c_interface(layers: u32, seqs: u32, least: u64) {
    let device = if common::on_cuda() { "kind = 'cuda'" } else { "threads = 1" };
    let toml = format!(
        "model = {{ num_layers = {layers}, num_q_heads = 2, num_kv_heads = 1, head_dim = 16 }}\n\
        cache = {{ mode = 'paged', event_buffer = {seqs} }}\n\
        limits = {{ max_seqs = {seqs}, max_seq_len = 64, max_batch_tokens = {seqs}, max_step_tokens = 8 }}\n\
        device = {{ {device} }}"
    );
    // SAFETY: handles are numbers.
    let (mut config, mut plan): (kvpool_config_t, kvpool_plan_t) = unsafe { std::mem::zeroed() };
    let (text, name) = (toml.as_ptr().cast(), c"test".as_ptr());
    // SAFETY: a text and its length, a C string, no overrides, a place.
    let status = unsafe { kvpool_config_parse(text, toml.len(), name, null(), 0, &raw mut config) };
    assert_eq!(status, KVPOOL_OK);
    // SAFETY: a place.
    assert_eq!(unsafe { kvpool_plan_new(config, &raw mut plan) }, KVPOOL_OK);
    let count = in_turn(|_| {
        // SAFETY: a handle is a number.
        let mut cache: kvpool_cache_t = unsafe { std::mem::zeroed() };
        // SAFETY: a place.
        let status = unsafe { kvpool_cache_open(plan, &raw mut cache) };
        if status == KVPOOL_OK {
            assert_eq!(kvpool_cache_close(cache), KVPOOL_OK);
            return true;
        }
        assert_eq!(status, KVPOOL_OUT_OF_MEMORY);
        // SAFETY: a struct of numbers.
        let mut error: kvpool_error_t = unsafe { std::mem::zeroed() };
        // SAFETY: a place and its size.
        let told = unsafe { kvpool_last_error(&raw mut error, size_of::<kvpool_error_t>()) };
        assert_eq!(told, KVPOOL_OK);
        assert_eq!(error.wanted, REFUSED_BYTES.load(SeqCst));
        assert!(error.available > 0);
        false
    });
    assert!(count > least, "only {count} large allocations");
    println!("edge_61_the_same_through_the_c_interface ... ok ({layers} layers: {count})");
}

/// What a save or a restore comes to when the buffer that was refused is told of.
fn told<T>(result: &Result<T, SaveError>) -> bool {
    match result {
        Ok(_) => true,
        Err(error @ SaveError::OutOfMemory { bytes }) => {
            // What the plan counts for it, which may be a little more.
            let refused = REFUSED_BYTES.load(SeqCst);
            assert!((refused..=2 * refused).contains(&bytes.get()), "{refused}: {error}");
            assert!(error.to_string().contains("free some memory"), "{error}");
            false
        }
        Err(error) => panic!("{error}"),
    }
}

/// The only verbs that allocate: of prefixes in blocks and in slots, and of a sequence.
fn edge_61_every_buffer_of_a_save_is_refused_in_turn() {
    // Their buffers are larger than this here, and what the standard library makes is not.
    LARGE.store(1 << 10, SeqCst);
    let folder = tempfile::tempdir().expect("a folder");
    let (prefixes, sequence) = (folder.path().join("prefixes"), folder.path().join("sequence"));
    let (saving, restoring) = (SaveOptions::default(), RestoreOptions::default());
    for mode in MODES {
        let spec = Spec {
            mode,
            windows: vec![0, 0, 16],
            max_seqs: 64,
            max_seq_len: 1024,
            max_step_tokens: Some(8),
            threads: 1,
            head_dim: 64,
            ..Spec::default()
        };
        let mut old = spec.open();
        let mut last = None;
        for first in 0..40 {
            let prompt: Vec<u32> = (first * 100..first * 100 + 17).collect();
            let options = BeginOptions { max_len: Some(32), ..BeginOptions::default() };
            let seq = old.begin(&prompt, options).expect("fits").sequence;
            for part in prompt.chunks(8) {
                let mut step = old.reserve(&[(seq, part.len() as u32)]).expect("fits");
                step.mark_all_appended();
                step.commit().expect("whole");
            }
            if let Some(earlier) = last.replace(seq) {
                old.release(earlier).expect("alive");
            }
        }
        let seq = last.expect("forty");
        let mut new = spec.open();
        let mut counts = [0; 4];
        let digest = old.state_digest();
        counts[0] = in_turn(|_| told(&old.save_prefixes(&prefixes, &saving)));
        counts[1] = in_turn(|_| told(&old.save_sequence(seq, &sequence, &saving)));
        assert_eq!(old.state_digest(), digest, "a save changes nothing");
        let files = std::fs::read_dir(folder.path()).expect("a folder").count();
        assert_eq!(files, 2, "nothing half done is left");
        counts[2] = in_turn(|nth| {
            // Into an empty cache, or one that has them already.
            let digest = new.state_digest();
            let done = told(&new.restore_prefixes(&prefixes, &restoring));
            assert!(done || new.state_digest() == digest, "a buffer that was refused left a trace");
            if nth > 0 && done {
                new.clear_cached();
            }
            done
        });
        counts[3] = in_turn(|_| {
            let digest = new.state_digest();
            match new.restore_sequence(&sequence, &restoring) {
                Ok(begun) => new.release(begun.sequence).is_ok(),
                refused => {
                    assert_eq!(new.state_digest(), digest);
                    told(&refused)
                }
            }
        });
        new.check_invariants().expect("invariants");
        assert!(counts.iter().all(|count| *count > 0), "{mode:?}: {counts:?}");
        println!("edge_61_every_buffer_of_a_save_is_refused_in_turn ... ok ({mode:?}: {counts:?})");
    }
    a_sequence_whose_ids_are_its_longest_record();
    LARGE.store(LARGE_BYTES, SeqCst);
}

/// The buffer of records is as long as that of a full sequence's ids: it never grows, which would
/// end the process where there is no more.
fn a_sequence_whose_ids_are_its_longest_record() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("sequence");
    let spec = Spec { windows: vec![0], max_seqs: 1, max_seq_len: 2048, ..Spec::default() };
    let (mut old, mut new) = (spec.open(), spec.open());
    let prompt: Vec<u32> = (0..2048).collect();
    let seq = old.begin(&prompt, BeginOptions::default()).expect("fits").sequence;
    for part in prompt.chunks(64) {
        let mut step = old.reserve(&[(seq, part.len() as u32)]).expect("fits");
        step.mark_all_appended();
        step.commit().expect("whole");
    }
    let saved = in_turn(|_| told(&old.save_sequence(seq, &file, &SaveOptions::default())));
    let restored = in_turn(|_| match new.restore_sequence(&file, &RestoreOptions::default()) {
        Ok(begun) => new.release(begun.sequence).is_ok(),
        refused => told(&refused),
    });
    assert!(saved > 0 && restored > 0, "{saved} {restored}");
    println!("a_sequence_whose_ids_are_its_longest_record ... ok ({saved}, {restored})");
}

/// The pool's mapping, and a worker's stack: by a limit on the address space.
#[cfg(target_os = "linux")]
fn edge_61_the_pool_and_the_threads_are_refused() {
    let page = 4096;
    let now = || {
        let statm = std::fs::read_to_string("/proc/self/statm").expect("Linux has it");
        statm.split(' ').next().and_then(|pages| pages.parse::<u64>().ok()).expect("a number")
            * page
    };
    let limited = |more: u64, threads: u32, max_seqs: u32| {
        let spec = Spec { max_seqs, max_seq_len: 1024, threads, head_dim: 128, ..Spec::default() };
        let config = DeviceConfig { threads, ..DeviceConfig::default() };
        let plan = spec.plan();
        let mut old = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: a place for the limit.
        assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_AS, &raw mut old) }, 0);
        let new = libc::rlimit { rlim_cur: now() + more, ..old };
        // SAFETY: a limit.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &raw const new) }, 0);
        let opened = Cache::open_on_cpu(plan, &config, None).map(|_| ());
        // SAFETY: as above.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &raw const old) }, 0);
        opened
    };
    limited(1 << 30, 2, 8).expect("there is enough");
    // A pool of 512 MiB where 256 are left.
    match limited(256 << 20, 1, 256) {
        Err(OpenError::Device(DeviceError::OutOfMemory { bytes, code, .. })) => {
            assert_eq!((bytes.get(), code), (512 << 20, libc::ENOMEM));
        }
        other => panic!("{other:?}"),
    }
    // Stacks of 2 MiB for 63 threads where 48 are left.
    match limited(48 << 20, 64, 1) {
        Err(OpenError::Device(DeviceError::Thread { index, code })) => {
            assert!((1..63).contains(&index) && code == libc::EAGAIN, "{index} {code}");
        }
        other => panic!("{other:?}"),
    }
    limited(1 << 30, 2, 8).expect("and afterwards, too");
    println!("edge_61_the_pool_and_the_threads_are_refused ... ok");
}
