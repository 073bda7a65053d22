//! P1: nothing is allocated between open and close, on success and on refusal.
//!
//! A binary of its own, without the test harness, so that the counts are this file's alone.

#![expect(clippy::cast_possible_truncation, reason = "small numbers of a test")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
#![expect(clippy::print_stdout, reason = "a test without a harness reports for itself")]

#[allow(dead_code, reason = "shared with the other integration tests, which use all of it")]
mod common;
#[allow(dead_code, reason = "shared with the tests of the CUDA device")]
#[path = "cuda/emulator.rs"]
mod emulator;

use common::{FORMATS, MODES, Rng, Spec};
use std::ptr::null;

use kvpool::cache::{
    AttendOptions, BeginOptions, Cache, Namespace, RestoreOptions, SaveOptions, SeqHandle,
};
use kvpool::capi::*;
use kvpool::config::{Admission, Capacity, KernelChoice, RopeConfig, RopeStyle, Scrub};
use kvpool::device::cpu::CpuDevice;
use kvpool::device::{CountingAllocator, TensorMut, TensorRef, allocation_counts};
use kvpool::error::CacheError;
use kvpool::plan::Kv;
use kvpool::units::{GroupIdx, LayerIdx};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Allocations of a call.
fn allocations(call: impl FnOnce()) -> u64 {
    let before = allocation_counts().allocations;
    call();
    allocation_counts().allocations - before
}

/// Buffers that an engine has before it starts.
struct Buffers {
    kv: Vec<f32>,
    q: Vec<f32>,
    out: Vec<f32>,
    lse: Vec<f32>,
    prompt: Vec<u32>,
    alive: Vec<SeqHandle>,
    batch: Vec<(SeqHandle, u32)>,
}

fn main() {
    counting_works();
    edge_10_a_whole_trace_allocates_nothing();
    turning_keys_allocates_nothing();
    large_steps_allocate_nothing();
    probers_allocate_nothing();
    bookkeeping_is_what_the_plan_says();
    the_c_interface_allocates_nothing();
    saves_allocate_what_the_plan_says();
    if !common::on_cuda() {
        the_same_on_the_emulated_cuda_device();
    }
}

/// Runs this program again, on the emulated driver.
fn the_same_on_the_emulated_cuda_device() {
    let Some(mut again) = emulator::this_program() else { return };
    let status = again.status().expect("starts");
    assert!(status.success(), "on the emulated CUDA device");
    println!("the_same_on_the_emulated_cuda_device ... ok");
}

/// The counter counts: a test that could not fail would be worth nothing.
fn counting_works() {
    let counted = allocations(|| drop(std::hint::black_box(vec![1_u8; 100])));
    assert_eq!(counted, 1, "the counting allocator is not installed");
    println!("counting_works ... ok");
}

fn edge_10_a_whole_trace_allocates_nothing() {
    let (mut verbs, mut refused) = (0, 0);
    for mode in MODES {
        for (format, scale) in FORMATS {
            for kernel in [KernelChoice::Auto, KernelChoice::Reference] {
                if common::on_cuda() && kernel == KernelChoice::Reference {
                    continue;
                }
                for admission in [Admission::Guaranteed, Admission::MaxUtilization] {
                    let spec = Spec {
                        format,
                        scale,
                        kernel,
                        admission,
                        head_dim: 32,
                        windows: vec![12, 0, 30],
                        sink_tokens: 2,
                        max_rewind_tokens: 4,
                        threads: 2,
                        scrub: [Scrub::Off, Scrub::OnRelease, Scrub::OnReuse][verbs as usize % 3],
                        // Too little for everything, so that refusals are common.
                        capacity: Capacity::Tokens(128),
                        ..Spec::mode(mode)
                    };
                    let (done, failed) = trace(&spec);
                    verbs += done;
                    refused += failed;
                }
            }
        }
    }
    // A GPU has one choice of kernels.
    let (most, few) = if common::on_cuda() { (5_000, 1_000) } else { (10_000, 2_000) };
    assert!(verbs > most && refused > few, "{verbs} verbs, {refused} refused");
    println!("edge_10_a_whole_trace_allocates_nothing ... ok ({verbs} verbs, {refused} refused)");
}

/// The same through the C interface, with a thread's first failure and DLPack views.
fn the_c_interface_allocates_nothing() {
    let toml = "model = { num_layers = 2, num_q_heads = 2, num_kv_heads = 1, head_dim = 16 }\n\
        cache = { mode = 'paged', format = 'int8', event_buffer = 16 }\n\
        limits = { max_seqs = 4, max_seq_len = 64, max_batch_tokens = 64 }\n\
        device = { threads = 1 }";
    // SAFETY: handles and the structs are numbers.
    let (mut config, mut plan, mut cache): (kvpool_config_t, kvpool_plan_t, kvpool_cache_t) =
        unsafe { std::mem::zeroed() };
    let (text, name) = (toml.as_ptr().cast(), c"test".as_ptr());
    // SAFETY: a text and its length, a C string, no overrides, a place.
    let status = unsafe { kvpool_config_parse(text, toml.len(), name, null(), 0, &raw mut config) };
    assert_eq!(status, KVPOOL_OK);
    // SAFETY: a place.
    assert_eq!(unsafe { kvpool_plan_new(config, &raw mut plan) }, KVPOOL_OK);
    // SAFETY: a place.
    assert_eq!(unsafe { kvpool_cache_open(plan, &raw mut cache) }, KVPOOL_OK);
    let (kv, q, mut out) = (vec![0.5_f32; 16 * 16], vec![0.25_f32; 16 * 32], vec![0_f32; 16 * 32]);
    let tensor = |data: *const f32, len: usize| kvpool_tensor_t {
        data: data.cast_mut().cast(),
        len: len as u64,
        dtype: KVPOOL_F32,
        memory: KVPOOL_HOST,
    };
    let prompts: Vec<Vec<u32>> = (0..8).map(|at| (at % 3..at % 3 + 16).collect()).collect();
    let out = out.as_mut_ptr();
    let mut alive: Vec<kvpool_seq_t> = Vec::with_capacity(prompts.len() * 50);
    let (mut done, mut refused) = (0, 0);
    let mut note = |status: kvpool_status_t| {
        if status == KVPOOL_OK {
            done += 1;
        } else {
            refused += 1;
        }
        status
    };
    let counted = allocations(|| {
        for (turn, prompt) in prompts.iter().cycle().take(400).enumerate() {
            // SAFETY: numbers.
            let mut begun: kvpool_begun_t = unsafe { std::mem::zeroed() };
            let size = size_of::<kvpool_begun_t>();
            // SAFETY: a prompt and its length, no options, a place and its size.
            let status = note(unsafe {
                kvpool_cache_begin(cache, prompt.as_ptr(), 16, null(), &raw mut begun, size)
            });
            if status != KVPOOL_OK {
                // All slots are taken.
                note(kvpool_cache_reset(cache));
                for sequence in alive.drain(..) {
                    note(kvpool_cache_release(cache, sequence));
                }
                continue;
            }
            let tokens = 16 - begun.cached_len;
            let item =
                kvpool_step_item_t { sequence: begun.sequence, num_tokens: tokens, reserved: 0 };
            let mut step = kvpool_step_t { word: [0, 0] };
            // SAFETY: an item, no tokens, a place.
            note(unsafe {
                kvpool_cache_reserve(cache, &raw const item, 1, null(), 0, &raw mut step)
            });
            let n = tokens as usize;
            let (k, q) = (tensor(kv.as_ptr(), n * 16), tensor(q.as_ptr(), n * 32));
            let result = tensor(out, n * 32);
            for layer in 0..3 {
                // SAFETY: tensors in host memory.
                note(unsafe { kvpool_step_append(cache, step, layer, &raw const k, &raw const k) });
                // SAFETY: the same, and no options.
                note(unsafe {
                    kvpool_step_attend(cache, step, layer, &raw const q, &raw const result, null())
                });
            }
            note(kvpool_cache_release(cache, begun.sequence));
            if turn % 5 == 0 {
                // Later, as often as there is room to remember it and more; with its step or behind it.
                for _ in 0..90 {
                    note(kvpool_cache_release_later(cache, begun.sequence));
                }
                if turn % 2 == 0 {
                    note(kvpool_step_cancel_later(cache, step));
                }
            }
            note(kvpool_step_commit(cache, step));
            note(kvpool_step_commit(cache, step));
            let mut view = std::ptr::null_mut();
            // SAFETY: a place.
            note(unsafe { kvpool_cache_dlpack(cache, 0, KVPOOL_K_SCALES, &raw mut view) });
            // SAFETY: it was lent.
            if let Some(delete) = unsafe { (*view).deleter } {
                // SAFETY: once.
                unsafe { delete(view) };
            }
            alive.push(begun.sequence);
        }
    });
    assert_eq!(counted, 0, "allocations of {done} calls and {refused} refused ones");
    assert!(done > 2_500 && refused > 1_400, "{done} done, {refused} refused");
    assert_eq!(kvpool_cache_check(cache), KVPOOL_OK);
    assert_eq!(kvpool_cache_close(cache), KVPOOL_OK);
    println!("the_c_interface_allocates_nothing ... ok ({done} calls, {refused} refused)");
}

/// Runs random verbs, valid and not, and asserts that they allocate nothing.
fn trace(spec: &Spec) -> (u64, u64) {
    let mut cache = spec.open();
    let tokens = spec.max_batch_tokens as usize;
    let mut buffers = Buffers {
        kv: vec![0.5; tokens * 32],
        q: vec![0.25; tokens * 64],
        out: vec![0.0; tokens * 64],
        lse: vec![0.0; tokens * 2],
        prompt: vec![1; 80],
        alive: Vec::with_capacity(16),
        batch: Vec::with_capacity(16),
    };
    let mut rng = Rng(spec.format as u64);
    let (mut done, mut refused) = (0, 0);
    let counted = allocations(|| {
        for _ in 0..400 {
            match verb(&mut cache, &mut rng, &mut buffers) {
                Ok(()) => done += 1,
                Err(error) => {
                    std::hint::black_box(error);
                    refused += 1;
                }
            }
        }
        for seq in buffers.alive.drain(..) {
            let _ = cache.release(seq);
        }
        let _ = cache.reset();
    });
    assert_eq!(counted, 0, "{spec:?}");
    (done, refused)
}

/// One verb on a random sequence.
fn verb(cache: &mut Cache, rng: &mut Rng, buffers: &mut Buffers) -> Result<(), CacheError> {
    let choice = rng.below(16);
    if choice < 3 {
        let prompt = &buffers.prompt[..rng.below(70) as usize];
        let options = BeginOptions {
            key: (choice == 0).then_some(1),
            max_len: Some(rng.below(70) as u32),
            lookahead_tokens: rng.below(6) as u32,
            ..BeginOptions::default()
        };
        cache.check_admission(prompt, &options)?;
        buffers.alive.push(cache.begin(prompt, options)?.sequence);
        return Ok(());
    }
    if buffers.alive.is_empty() {
        let forged = SeqHandle::from_parts(0, 0, 0);
        return cache.release(forged);
    }
    let at = rng.below(buffers.alive.len() as u64) as usize;
    let seq = buffers.alive[at];
    match choice {
        3 => cache.truncate(seq, rng.below(64) as u32),
        4 => {
            buffers.alive.push(cache.fork(seq)?);
            Ok(())
        }
        5 => cache.release(buffers.alive.swap_remove(at)),
        6 => {
            let block = cache.block_of(seq, GroupIdx(1), 0)?;
            cache.block_refs(block)?;
            cache.table_version(seq)?;
            std::hint::black_box((cache.stats(), cache.group_stats(GroupIdx(0))));
            let len = cache.seq_len(seq)?;
            cache.export(seq, LayerIdx(1), Kv::K, 0, len.min(2), &mut buffers.out[..64])
        }
        7 => cache.reserve(&[(seq, 1), (seq, 1)]).map(|step| step.cancel()),
        _ => step(cache, rng, buffers),
    }
}

/// A step of some sequences; now and then it is dropped half way.
fn step(cache: &mut Cache, rng: &mut Rng, buffers: &mut Buffers) -> Result<(), CacheError> {
    buffers.batch.clear();
    for seq in &buffers.alive {
        if rng.below(2) == 0 {
            buffers.batch.push((*seq, 1 + rng.below(12) as u32));
        }
    }
    let drop_at = (rng.below(6) == 0).then(|| rng.below(3));
    let mut step = cache.reserve(&buffers.batch)?;
    let n = step.num_tokens();
    for layer in 0..3 {
        if drop_at == Some(layer) {
            return Ok(());
        }
        let layer = LayerIdx(layer as u32);
        let kv = TensorRef::F32(&buffers.kv[..n * 32]);
        step.append(layer, kv, kv)?;
        let options = AttendOptions { lse: Some(&mut buffers.lse[..n * 2]), softmax_scale: None };
        let q = TensorRef::F32(&buffers.q[..n * 64]);
        step.attend(layer, q, TensorMut::F32(&mut buffers.out[..n * 64]), options)?;
    }
    step.build_csr();
    if step.block_table(GroupIdx(1)).is_ok() {
        step.csr(GroupIdx(1))?;
    }
    step.commit()
}

/// K is turned on its way in, in layers with tables of their own, by both styles of pairs.
fn turning_keys_allocates_nothing() {
    let (mut verbs, mut refused) = (0, 0);
    for (mode, style) in
        MODES.into_iter().zip([RopeStyle::Halves, RopeStyle::Pairs, RopeStyle::Halves])
    {
        for (format, scale) in FORMATS {
            let spec = Spec {
                format,
                scale,
                head_dim: 32,
                windows: vec![12, 0, 30],
                sink_tokens: 2,
                max_rewind_tokens: 4,
                threads: 2,
                capacity: Capacity::Tokens(128),
                rope: Some(RopeConfig {
                    theta: Some(10_000.0),
                    dims: Some(16),
                    style,
                    window_theta: Some(500.0),
                    ..RopeConfig::default()
                }),
                ..Spec::mode(mode)
            };
            let (done, failed) = trace(&spec);
            verbs += done;
            refused += failed;
        }
    }
    assert!(verbs > 2_000 && refused > 500, "{verbs} verbs, {refused} refused");
    println!("turning_keys_allocates_nothing ... ok ({verbs} verbs, {refused} refused)");
}

/// Steps so large that append and attention are dealt out to the workers.
fn large_steps_allocate_nothing() {
    // The emulated GPU is a few hundred times slower.
    let long = if common::on_cuda() { 24 } else { 512 };
    for (format, scale) in FORMATS {
        let spec = Spec {
            format,
            scale,
            head_dim: 64,
            num_kv_heads: 4,
            num_q_heads: 8,
            max_seqs: 2,
            max_seq_len: 2048,
            max_batch_tokens: 512,
            threads: 2,
            ..Spec::default()
        };
        let mut cache = spec.open();
        let (kv, q) = (vec![0.5; 512 * 256], vec![0.25; 512 * 512]);
        let mut out = vec![0.0; 512 * 512];
        let counted = allocations(|| {
            let seq = common::begin(&mut cache, 0);
            for tokens in [long, long, 1, long, 1] {
                let mut step = cache.reserve(&[(seq, tokens)]).expect("fits");
                let n = tokens as usize;
                for layer in 0..2 {
                    let layer = LayerIdx(layer);
                    let kv = TensorRef::F32(&kv[..n * 256]);
                    step.append(layer, kv, kv).expect("append");
                    let (q, out) = (&q[..n * 512], TensorMut::F32(&mut out[..n * 512]));
                    step.attend(layer, TensorRef::F32(q), out, AttendOptions::default())
                        .expect("attend");
                }
                step.commit().expect("whole");
            }
        });
        assert_eq!(counted, 0, "{spec:?}");
    }
    println!("large_steps_allocate_nothing ... ok");
}

/// The exception: these verbs take what `Plan::save_bytes` says, whatever is in the file, give it
/// back, and leave the cache as static as it was.
fn saves_allocate_what_the_plan_says() {
    let folder = tempfile::tempdir().expect("a folder");
    let (prefixes, sequence) = (folder.path().join("prefixes"), folder.path().join("sequence"));
    let (save, restore) = (SaveOptions::default(), RestoreOptions::default());
    for mode in MODES {
        let windows = vec![12, 0, 30];
        let spec = Spec { max_seqs: 8, windows, max_step_tokens: Some(8), ..Spec::mode(mode) };
        let promised = spec.plan().save_bytes().expect("fits").0;
        let mut cache = spec.open();
        let mut other = spec.open();
        for n in 0..8 {
            let prompt: Vec<u32> = (0..64).map(|token| 100 * n + token).collect();
            let seq = cache.begin(&prompt, BeginOptions::default()).expect("fits").sequence;
            for _ in 0..8 {
                let mut step = cache.reserve(&[(seq, 8)]).expect("promised");
                step.mark_all_appended();
                step.commit().expect("whole");
            }
            cache.save_sequence(seq, &sequence, &save).expect("written");
            cache.release(seq).expect("alive");
        }
        let within = |what: &str, call: &mut dyn FnMut()| {
            let before = allocation_counts();
            call();
            let after = allocation_counts();
            let allocated = after.allocated_bytes - before.allocated_bytes;
            assert!(allocated <= promised, "{mode:?} {what}: {allocated} of {promised} bytes");
            assert_eq!(after.freed_bytes - before.freed_bytes, allocated, "{mode:?} {what}");
        };
        within("save", &mut || _ = cache.save_prefixes(&prefixes, &save).expect("written"));
        for what in ["restore", "again"] {
            within(what, &mut || _ = other.restore_prefixes(&prefixes, &restore).expect("taken"));
        }
        within("sequence", &mut || {
            let seq = other.restore_sequence(&sequence, &restore).expect("taken").sequence;
            other.release(seq).expect("alive");
        });
        within("other kind", &mut || {
            other.restore_prefixes(&sequence, &restore).expect_err("no prefixes");
        });
        let none = folder.path().join("none");
        within("no file", &mut || {
            other.restore_prefixes(&none, &restore).expect_err("not there");
        });
    }
    println!("saves_allocate_what_the_plan_says ... ok");
}

/// Also a reader for another thread is had without memory.
fn probers_allocate_nothing() {
    let spec = Spec { windows: vec![12, 0], ..Spec::default() };
    let cache = spec.open();
    let namespace = Namespace::default();
    let made = allocations(|| {
        let one = cache.prober().expect("shares prefixes");
        let other = one.clone();
        assert_eq!(one.probe(&[1, 2, 3], &namespace), other.probe(&[1, 2, 3], &namespace));
    });
    assert_eq!(made, 0, "allocations of a prober");
    println!("probers_allocate_nothing ... ok");
}

/// Host memory of an open cache is the plan's `host_bytes`, up to the few fixed structs
/// themselves.
fn bookkeeping_is_what_the_plan_says() {
    for mode in MODES {
        let spec =
            Spec { max_seqs: 200, max_seq_len: 1000, windows: vec![12, 0], ..Spec::mode(mode) };
        let plan = spec.plan();
        let promised = plan.host_bytes.0;
        let device = CpuDevice::open(&plan, &spec.config().device, None).expect("opens");
        let device = Box::new(device);
        let before = allocation_counts();
        let cache = Cache::open(plan, device).expect("opens");
        let after = allocation_counts();
        let allocated = after.allocated_bytes - before.allocated_bytes;
        let freed = after.freed_bytes - before.freed_bytes;
        let held = allocated - freed;
        assert!(
            held <= promised && promised - held < promised / 10,
            "{mode:?}: {held} bytes held, {promised} planned"
        );
        drop(cache);
        println!("bookkeeping_is_what_the_plan_says ... ok ({mode:?}: {held} of {promised} bytes)");
    }
}
