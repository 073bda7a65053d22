//! What a C program cannot show: panics, and that a second thread is refused while a first is
//! known to be inside.

use std::ffi::{CStr, c_void};
use std::mem::zeroed;
use std::ptr::{from_mut, null, null_mut};
use std::sync::Barrier;

use super::*;

const TOML: &str = "model = { num_layers = 1, num_q_heads = 1, num_kv_heads = 1, head_dim = 16 }\n\
    cache = { mode = 'paged', format = 'f16', event_buffer = 64 }\n\
    limits = { max_seqs = 4, max_seq_len = 64, max_batch_tokens = 64 }\n\
    device = { threads = 1 }";

/// A small plan.
pub(super) fn plan() -> kvpool_plan_t {
    plan_with(&[])
}

/// The same with other settings.
pub(super) fn plan_with(settings: &[&CStr]) -> kvpool_plan_t {
    let settings: Vec<_> = settings.iter().map(|setting| setting.as_ptr()).collect();
    let (set, sets) = (settings.as_ptr(), settings.len());
    // SAFETY: handles are numbers.
    let (mut config, mut plan): (kvpool_config_t, kvpool_plan_t) = unsafe { zeroed() };
    let (text, name) = (TOML.as_ptr().cast(), c"test".as_ptr());
    // SAFETY: a text and its length, a C string, C strings and their number, a place.
    let status = unsafe { kvpool_config_parse(text, TOML.len(), name, set, sets, &raw mut config) };
    assert_eq!(status, KVPOOL_OK);
    // SAFETY: a place.
    assert_eq!(unsafe { kvpool_plan_new(config, &raw mut plan) }, KVPOOL_OK);
    assert_eq!(kvpool_config_destroy(config), KVPOOL_OK);
    plan
}

/// An open cache.
pub(super) fn open() -> kvpool_cache_t {
    let (plan, mut cache) = (plan(), kvpool_cache_t { word: [0, 0] });
    // SAFETY: a place.
    assert_eq!(unsafe { kvpool_cache_open(plan, &raw mut cache) }, KVPOOL_OK);
    assert_eq!(kvpool_plan_destroy(plan), KVPOOL_OK);
    cache
}

pub(super) fn begin(cache: kvpool_cache_t, prompt: &[u32]) -> (kvpool_status_t, kvpool_begun_t) {
    // SAFETY: numbers.
    let mut begun: kvpool_begun_t = unsafe { zeroed() };
    let size = size_of::<kvpool_begun_t>();
    // SAFETY: a prompt and its length, no options, a place and its size.
    let status = unsafe {
        kvpool_cache_begin(cache, prompt.as_ptr(), prompt.len(), null(), &raw mut begun, size)
    };
    (status, begun)
}

pub(super) fn stats(cache: kvpool_cache_t) -> kvpool_status_t {
    // SAFETY: numbers.
    let mut stats: kvpool_stats_t = unsafe { zeroed() };
    // SAFETY: a place and its size.
    unsafe { kvpool_cache_stats(cache, &raw mut stats, size_of::<kvpool_stats_t>()) }
}

fn last_error() -> kvpool_error_t {
    // SAFETY: numbers and bytes.
    let mut error: kvpool_error_t = unsafe { zeroed() };
    // SAFETY: a place and its size.
    unsafe { kvpool_last_error(&raw mut error, size_of::<kvpool_error_t>()) };
    error
}

fn message() -> String {
    let error = last_error();
    // SAFETY: it ends with a NUL.
    unsafe { CStr::from_ptr(error.message.as_ptr()) }.to_str().expect("UTF-8").to_owned()
}

/// Edge 58: a panic becomes a status, and the cache says from then on that it is not to be used.
/// Others are.
#[test]
fn edge_58_a_panic_poisons_its_cache_and_no_other() {
    let (broken, sound) = (open(), open());
    let (_, before) = begin(broken, &[1, 2, 3]);
    fault::panic_in_next_verb();
    assert_eq!(begin(broken, &[1, 2, 3]).0, KVPOOL_PANIC);
    assert!(message().contains("a panic that a test asked for"), "{}", message());
    assert_eq!(kvpool_cache_release(broken, before.sequence), KVPOOL_POISONED);
    assert_eq!(stats(broken), KVPOOL_POISONED);
    assert_eq!(last_error().status, KVPOOL_POISONED);
    assert_eq!(begin(sound, &[1, 2, 3]).0, KVPOOL_OK);
    assert_eq!(kvpool_cache_close(broken), KVPOOL_OK);
    assert_eq!(stats(broken), KVPOOL_STALE_HANDLE);
    assert_eq!(kvpool_cache_check(sound), KVPOOL_OK);
    assert_eq!(kvpool_cache_close(sound), KVPOOL_OK);
}

/// A panic while a step is open ends nothing but the cache.
#[test]
fn a_panic_within_a_step_leaves_a_cache_that_can_be_closed() {
    let cache = open();
    let (_, begun) = begin(cache, &[1, 2, 3]);
    let items = [kvpool_step_item_t { sequence: begun.sequence, num_tokens: 3, reserved: 0 }];
    let mut step = kvpool_step_t { word: [0, 0] };
    // SAFETY: items and their number, no tokens, a place.
    let status =
        unsafe { kvpool_cache_reserve(cache, items.as_ptr(), 1, null(), 0, &raw mut step) };
    assert_eq!(status, KVPOOL_OK);
    fault::panic_in_next_verb();
    assert_eq!(kvpool_step_mark_appended(cache, step, 0), KVPOOL_PANIC);
    assert_eq!(kvpool_step_commit(cache, step), KVPOOL_POISONED);
    assert_eq!(kvpool_cache_close(cache), KVPOOL_OK);
}

/// What a callback saw when it called back.
struct Seen {
    cache: kvpool_cache_t,
    verb: kvpool_status_t,
    reader: kvpool_status_t,
    close: kvpool_status_t,
    calls: u32,
}

unsafe extern "C" fn call_back(context: *mut c_void, event: *const kvpool_event_t) {
    // SAFETY: the test's own struct.
    let seen = unsafe { &mut *context.cast::<Seen>() };
    // SAFETY: an event.
    assert_eq!(unsafe { (*event).size }, size_of::<kvpool_event_t>());
    seen.verb = begin(seen.cache, &[9]).0;
    seen.reader = stats(seen.cache);
    seen.close = kvpool_cache_close(seen.cache);
    seen.calls += 1;
}

/// A callback that calls back is refused, and waits for nothing.
#[test]
fn a_callback_that_calls_back_is_busy() {
    let cache = open();
    let mut seen = Seen { cache, verb: -1, reader: -1, close: -1, calls: 0 };
    let context = from_mut(&mut seen).cast();
    // SAFETY: a function, its context, nowhere for the number.
    let status = unsafe { kvpool_cache_resync_events(cache, Some(call_back), context, null_mut()) };
    assert_eq!(status, KVPOOL_OK);
    let Seen { verb, reader, close, calls, .. } = seen;
    assert_eq!((verb, reader, close, calls), (KVPOOL_BUSY, KVPOOL_BUSY, KVPOOL_BUSY, 1));
    assert_eq!(begin(cache, &[9]).0, KVPOOL_OK);
    assert_eq!(kvpool_cache_close(cache), KVPOOL_OK);
}

/// A callback that holds its verb until another thread has tried.
struct Held<'a> {
    inside: &'a Barrier,
    tried: &'a Barrier,
}

unsafe extern "C" fn hold(context: *mut c_void, _event: *const kvpool_event_t) {
    // SAFETY: the test's own struct.
    let held = unsafe { &*context.cast::<Held<'_>>() };
    held.inside.wait();
    held.tried.wait();
}

/// Edge 59: a second thread's verb is refused while the first one's is under way, and so is
/// closing; what is allowed beside it works.
#[test]
fn edge_59_a_second_threads_verb_is_busy_and_a_probe_is_not() {
    let cache = open();
    let (inside, tried) = (Barrier::new(2), Barrier::new(2));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut held = Held { inside: &inside, tried: &tried };
            let context = from_mut(&mut held).cast();
            // SAFETY: a function, its context, nowhere for the number.
            let status =
                unsafe { kvpool_cache_resync_events(cache, Some(hold), context, null_mut()) };
            assert_eq!(status, KVPOOL_OK);
        });
        inside.wait();
        assert_eq!(begin(cache, &[1]).0, KVPOOL_BUSY);
        assert_eq!(kvpool_cache_close(cache), KVPOOL_BUSY);
        // SAFETY: numbers.
        let mut probe: kvpool_probe_t = unsafe { zeroed() };
        let size = size_of::<kvpool_probe_t>();
        // SAFETY: a prompt and its length, no namespace, a place and its size.
        let status =
            unsafe { kvpool_cache_probe(cache, [1_u32].as_ptr(), 1, null(), &raw mut probe, size) };
        assert_eq!(status, KVPOOL_OK);
        // SAFETY: numbers.
        let mut info: kvpool_plan_info_t = unsafe { zeroed() };
        let size = size_of::<kvpool_plan_info_t>();
        // SAFETY: a place and its size.
        let status = unsafe { kvpool_cache_get_plan_info(cache, &raw mut info, size) };
        assert_eq!(status, KVPOOL_OK);
        tried.wait();
    });
    assert_eq!(begin(cache, &[1]).0, KVPOOL_OK);
    assert_eq!(kvpool_cache_close(cache), KVPOOL_OK);
}

/// Edge 2, 3: handles of every kind that are zero, forged, of another kind, of another cache or
/// stale.
#[test]
fn edge_02_03_handles_that_name_nothing_are_refused() {
    let (cache, other) = (open(), open());
    let (_, begun) = begin(cache, &[1, 2, 3]);
    let release = |word| kvpool_cache_release(cache, kvpool_seq_t { word });
    let [at, named] = begun.sequence.word;
    assert_eq!(release([0, 0]), KVPOOL_BAD_HANDLE);
    assert_eq!(release([u64::MAX, u64::MAX]), KVPOOL_BAD_HANDLE);
    assert_eq!(release(cache.word), KVPOOL_BAD_HANDLE);
    assert_eq!(release([at + 1, named]), KVPOOL_STALE_HANDLE);
    assert_eq!(release([at | 0xFFFF_FFFF, named]), KVPOOL_STALE_HANDLE);
    assert_eq!(release([at, named + 1]), KVPOOL_STALE_HANDLE);
    assert_eq!(kvpool_cache_release(other, begun.sequence), KVPOOL_FOREIGN_HANDLE);
    assert_eq!(kvpool_cache_check(cache), KVPOOL_OK);
    assert_eq!(release([at, named]), KVPOOL_OK);
    assert_eq!(release([at, named]), KVPOOL_STALE_HANDLE);
    let (_, next) = begin(cache, &[4]);
    assert_eq!(next.sequence.word[0], at, "the slot is used again");
    assert_eq!(release([at, named]), KVPOOL_STALE_HANDLE);
    assert_eq!(kvpool_cache_close(other), KVPOOL_OK);
    assert_eq!(kvpool_cache_close(other), KVPOOL_STALE_HANDLE);
    let forged = kvpool_cache_t { word: [cache.word[0] + 1000, cache.word[1]] };
    assert_eq!(kvpool_cache_close(forged), KVPOOL_STALE_HANDLE);
    assert_eq!(kvpool_cache_close(cache), KVPOOL_OK);
}

/// A handle of a reservation, made one of a sequence: it is none yet.
#[test]
fn a_reservation_is_no_sequence() {
    let cache = open();
    let mut reservation = kvpool_reservation_t { word: [0, 0] };
    let prompt = [1_u32, 2, 3];
    // SAFETY: a prompt and its length, no options, a place, no estimate.
    let status = unsafe {
        kvpool_cache_can_admit(
            cache,
            prompt.as_ptr(),
            3,
            null(),
            &raw mut reservation,
            null_mut(),
            0,
        )
    };
    assert_eq!(status, KVPOOL_OK);
    let [at, named] = reservation.word;
    let forged = kvpool_seq_t { word: [at, named & !(0xFF << 56) | 0xC4 << 56] };
    assert_eq!(kvpool_cache_truncate(cache, forged, 0), KVPOOL_STALE_HANDLE);
    assert_eq!(kvpool_cache_release(cache, forged), KVPOOL_STALE_HANDLE);
    // SAFETY: numbers.
    let mut begun: kvpool_begun_t = unsafe { zeroed() };
    let size = size_of::<kvpool_begun_t>();
    // SAFETY: a place and its size.
    let status = unsafe { kvpool_cache_begin_reserved(cache, reservation, &raw mut begun, size) };
    assert_eq!(status, KVPOOL_OK);
    assert_eq!(kvpool_cache_release(cache, begun.sequence), KVPOOL_OK);
    assert_eq!(kvpool_cache_check(cache), KVPOOL_OK);
    assert_eq!(kvpool_cache_close(cache), KVPOOL_OK);
}

/// Every handle with one bit turned over, of a sequence and of a step.
#[test]
fn a_handle_with_any_bit_turned_over_is_refused() {
    let cache = open();
    let (_, begun) = begin(cache, &[1, 2, 3]);
    let items = [kvpool_step_item_t { sequence: begun.sequence, num_tokens: 3, reserved: 0 }];
    let mut step = kvpool_step_t { word: [0, 0] };
    // SAFETY: items and their number, no tokens, a place.
    let status =
        unsafe { kvpool_cache_reserve(cache, items.as_ptr(), 1, null(), 0, &raw mut step) };
    assert_eq!(status, KVPOOL_OK);
    let turned = |word: [u64; 2], bit: u32| match bit {
        0..64 => [word[0] ^ 1 << bit, word[1]],
        _ => [word[0], word[1] ^ 1 << (bit - 64)],
    };
    let refused = [KVPOOL_BAD_HANDLE, KVPOOL_STALE_HANDLE, KVPOOL_FOREIGN_HANDLE];
    // SAFETY: numbers.
    let mut info: kvpool_seq_info_t = unsafe { zeroed() };
    let size = size_of::<kvpool_seq_info_t>();
    for bit in 0..128 {
        let sequence = kvpool_seq_t { word: turned(begun.sequence.word, bit) };
        // SAFETY: a place and its size.
        let status = unsafe { kvpool_seq_get_info(cache, sequence, &raw mut info, size) };
        assert!(refused.contains(&status), "bit {bit} of a sequence: {status}");
        let forged = kvpool_step_t { word: turned(step.word, bit) };
        let status = kvpool_step_mark_appended(cache, forged, 0);
        assert!(refused.contains(&status), "bit {bit} of a step: {status}");
    }
    assert_eq!(kvpool_step_cancel(cache, step), KVPOOL_OK);
    assert_eq!(kvpool_cache_close(cache), KVPOOL_OK);
}

/// In a batch, what is no handle of a sequence is told as that.
#[test]
fn a_step_of_what_is_no_sequence_is_refused_as_that() {
    let cache = open();
    let (_, begun) = begin(cache, &[1, 2, 3]);
    let item = |sequence| kvpool_step_item_t { sequence, num_tokens: 1, reserved: 0 };
    let mut step = kvpool_step_t { word: [0, 0] };
    let mut reserve = |items: &[kvpool_step_item_t]| {
        // SAFETY: items and their number, no tokens, a place.
        unsafe {
            kvpool_cache_reserve(cache, items.as_ptr(), items.len(), null(), 0, &raw mut step)
        }
    };
    let zero = kvpool_seq_t { word: [0, 0] };
    assert_eq!(reserve(&[item(begun.sequence), item(zero)]), KVPOOL_BAD_HANDLE);
    let [at, named] = begun.sequence.word;
    let foreign = kvpool_seq_t { word: [at ^ 1 << 40, named] };
    assert_eq!(reserve(&[item(foreign), item(begun.sequence)]), KVPOOL_FOREIGN_HANDLE);
    assert_eq!(reserve(&[item(begun.sequence), item(begun.sequence)]), KVPOOL_BAD_STEP);
    assert_eq!(reserve(&[item(begun.sequence)]), KVPOOL_OK);
    assert_eq!(kvpool_step_cancel(cache, step), KVPOOL_OK);
    assert_eq!(kvpool_step_cancel(cache, step), KVPOOL_STALE_HANDLE);
    assert_eq!(kvpool_cache_close(cache), KVPOOL_OK);
}

/// A view that is out keeps the pool's memory when the cache is closed.
#[test]
fn a_dlpack_view_outlives_its_cache() {
    let cache = open();
    let mut tensor: *mut DLManagedTensor = null_mut();
    // SAFETY: a place.
    let status = unsafe { kvpool_cache_dlpack(cache, 0, KVPOOL_V, &raw mut tensor) };
    assert_eq!(status, KVPOOL_OK);
    assert_eq!(kvpool_cache_close(cache), KVPOOL_OK);
    // SAFETY: it was just lent.
    let view = unsafe { &*tensor };
    assert_eq!(view.dl_tensor.dtype, DLDataType { code: 2, bits: 16, lanes: 1 });
    // SAFETY: 4 dimensions.
    let shape = unsafe { std::slice::from_raw_parts(view.dl_tensor.shape, 4) };
    assert_eq!(shape, [16, 1, 16, 16]);
    // SAFETY: the first element of the pool's memory that the view keeps.
    assert_eq!(unsafe { view.dl_tensor.data.cast::<u16>().read() }, 0);
    let delete = view.deleter.expect("a deleter");
    // SAFETY: once.
    unsafe { delete(tensor) };
}

/// Views are lent from a fixed number, and come back.
#[test]
fn dlpack_views_are_refused_when_all_are_out() {
    let cache = open();
    let lend = || {
        let mut tensor: *mut DLManagedTensor = null_mut();
        // SAFETY: a place.
        let status = unsafe { kvpool_cache_dlpack(cache, 0, KVPOOL_K, &raw mut tensor) };
        (status, tensor)
    };
    let mut out: Vec<*mut DLManagedTensor> = Vec::new();
    let refused = loop {
        match lend() {
            (KVPOOL_OK, tensor) => out.push(tensor),
            (status, _) => break status,
        }
    };
    assert_eq!((refused, out.len()), (KVPOOL_NO_VIEW, 8));
    let delete = |tensor: *mut DLManagedTensor| {
        // SAFETY: lent, and deleted once.
        let delete = unsafe { (*tensor).deleter }.expect("a deleter");
        // SAFETY: as above.
        unsafe { delete(tensor) };
    };
    delete(out.swap_remove(3));
    let (status, again) = lend();
    assert_eq!(status, KVPOOL_OK);
    out.push(again);
    out.into_iter().for_each(delete);
    assert_eq!(kvpool_cache_close(cache), KVPOOL_OK);
}

/// The kernels that this machine has are named as Rust names them.
#[test]
fn every_kernel_has_its_name() {
    for choice in ["auto", "reference", "portable", "avx2", "avx512", "avx512-bf16"] {
        for format in ["f16", "bf16", "int8"] {
            let toml = TOML.replace("threads = 1", &format!("threads = 1, kernel = '{choice}'"));
            let toml = toml.replace("'f16'", &format!("'{format}'"));
            let Ok(source) = crate::config::parse(&toml, std::path::Path::new("t"), &[]) else {
                panic!("{toml}");
            };
            let plan = crate::plan::Plan::new(&source.config, &source.geometry).expect("a plan");
            match crate::cache::Cache::open_on_cpu(plan, &source.config.device, None) {
                Ok(cache) => {
                    let name = cache.device_info().kernel;
                    assert_eq!(kernel_name(name).to_str(), Ok(name));
                }
                // Other machines have other kernels.
                Err(error) => assert!(error.to_string().contains(choice), "{error}"),
            }
        }
    }
}
