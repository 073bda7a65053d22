//! The C interface, driven with sequences of calls: valid ones, handles that are stale or made up,
//! NULL where a pointer belongs, sizes that are none, from one thread and from two.
//!
//! Whatever the calls are, none may crash or break an invariant; every status must be one that the
//! header names; and at the end the cache, which no call may have poisoned, closes.

use std::ffi::{CStr, CString};
use std::ptr::{null, null_mut};
use std::sync::LazyLock;

use arbitrary::Arbitrary;
use kvpool::capi::*;

use crate::scratch::Scratch;

/// What a call is made with.
#[derive(Clone, Copy, Debug, Arbitrary)]
enum Which {
    /// One that was given out, and may have ended since.
    Known(u8),
    /// Two words that nobody gave out.
    Forged(u64, u64),
    Zero,
}

#[derive(Clone, Debug, Arbitrary)]
enum Op {
    Begin { prompt: Prompt, options: Options, broken: Broken },
    BeginBatch(Vec<(Prompt, Options)>),
    CheckAdmission(Prompt, Options),
    CanAdmit(Prompt, Options),
    BeginReserved(Which),
    CancelReservation(Which),
    CancelReservations,
    Fork(Which),
    Truncate(Which, u8),
    Release(Which),
    SeqInfo(Which, Broken),
    Preempt,
    Reset,
    Reserve { items: Vec<(Which, u8)>, tokens: bool, short: bool },
    Append { step: Which, layer: u8, broken: Broken },
    Attend { step: Which, layer: u8, broken: Broken, scale: f32 },
    MarkAll(Which),
    View(Which),
    Group(Which, u8),
    Csr(Which, u8),
    Commit(Which),
    Cancel(Which),
    Probe(Prompt, Options),
    Pin(Which),
    Unpin(Which),
    Retention(Which, Vec<(u32, u32, u8)>),
    Time(u64),
    Epoch(u8),
    ClearCached,
    Poll,
    Resync,
    Stats(Broken),
    GroupStats(u8),
    Export { seq: Which, layer: u8, part: i32, from: u8, to: u8, len: u16 },
    Read { offset: u64, len: u8 },
    BlockOf(Which, u8, u8),
    Text(bool, u8),
    Check,
    SavePrefixes(bool),
    RestorePrefixes,
    SaveSequence(Which, Broken),
    RestoreSequence { key: Option<u8>, max_len: u8, broken: Broken },
}

#[derive(Clone, Copy, Debug, Arbitrary)]
enum Broken {
    No,
    Null,
    Size(u8),
}

impl Broken {
    /// A struct's size, as this call gives it.
    fn size(self, size: usize) -> usize {
        match self {
            Self::Size(other) => usize::from(other),
            _ => size,
        }
    }
    fn place<T>(self, place: &mut T) -> *mut T {
        if matches!(self, Self::Null) { null_mut() } else { place }
    }
}

/// Tokens: the start of one of a few texts.
#[derive(Clone, Copy, Debug, Arbitrary)]
struct Prompt {
    text: u8,
    len: u8,
}

#[derive(Clone, Copy, Debug, Arbitrary)]
struct Options {
    given: bool,
    key: Option<u8>,
    max_len: u8,
    lookahead: u8,
    salt: Option<u8>,
    salt_from: u8,
}

#[derive(Debug, Arbitrary)]
pub(super) struct Input {
    mode: u8,
    format: u8,
    admission: u8,
    scrub: u8,
    windows: u8,
    /// What another thread does beside it, in one input of four.
    two: u8,
    beside: Vec<Op>,
    ops: Vec<Op>,
}

const LAYERS: u32 = 2;
const KV_HEADS: usize = 1;
const Q_HEADS: usize = 2;
const HEAD_DIM: usize = 32;
const MAX_TOKENS: usize = 32;

/// Handles that were given out.
#[derive(Default)]
struct Known {
    seqs: Vec<kvpool_seq_t>,
    steps: Vec<kvpool_step_t>,
    pins: Vec<kvpool_pin_t>,
    reservations: Vec<kvpool_reservation_t>,
    blocks: Vec<kvpool_block_t>,
    tokens: u32,
}

macro_rules! pick {
    ($list:expr, $which:expr, $handle:ident) => {
        match $which {
            Which::Known(at) if !$list.is_empty() => $list[usize::from(at) % $list.len()],
            Which::Forged(a, b) => $handle { word: [a, b] },
            _ => $handle { word: [0, 0] },
        }
    };
}

/// A struct of numbers and pointers, all zeros.
fn zeroed<T>() -> T {
    // SAFETY: only used for the header's structs, which are numbers and pointers.
    unsafe { std::mem::zeroed() }
}

impl Prompt {
    fn tokens(self) -> Vec<u32> {
        (0..u32::from(self.len) % 70)
            .map(|at| (at * 7 + u32::from(self.text) % 3 * (at / 20)) % 5)
            .collect()
    }
}

impl Options {
    fn build(self) -> kvpool_begin_options_t {
        let mut options: kvpool_begin_options_t = zeroed();
        options.size = size_of::<kvpool_begin_options_t>();
        options.key = self.key.unwrap_or(0).into();
        options.has_key = self.key.is_some().into();
        options.max_len = self.max_len.into();
        options.lookahead_tokens = u32::from(self.lookahead) % 8;
        if let Some(salt) = self.salt {
            options.name_space.salt.kind = KVPOOL_KEY_IS_NUMBER;
            options.name_space.salt.number = salt.into();
        }
        options.name_space.salt_from = self.salt_from.into();
        options
    }
}

/// Where saves go, of this process.
fn path() -> &'static CStr {
    static PATH: LazyLock<CString> = LazyLock::new(|| {
        let path = Scratch::path_of("capi");
        CString::new(path.to_str().expect("plain")).expect("no NUL")
    });
    &PATH
}

unsafe extern "C" fn ignore(_: *mut std::ffi::c_void, _: *const kvpool_event_t) {}

/// The status of a call is one that there is.
fn known(status: kvpool_status_t) -> kvpool_status_t {
    // SAFETY: any number may be asked for; the text has an end.
    let name = unsafe { std::ffi::CStr::from_ptr(kvpool_status_name(status)) };
    assert!(!name.to_bytes().is_empty() && name.to_bytes() != b"unknown", "status {status}");
    assert_ne!(status, KVPOOL_PANIC, "a panic");
    assert_ne!(status, KVPOOL_POISONED, "poisoned");
    assert_ne!(status, KVPOOL_INVARIANT, "an invariant is broken");
    status
}

fn tensor(data: &mut [f32], broken: Broken) -> kvpool_tensor_t {
    let mut tensor: kvpool_tensor_t = zeroed();
    tensor.data =
        if matches!(broken, Broken::Null) { null_mut() } else { data.as_mut_ptr().cast() };
    tensor.len = match broken {
        // Never longer than it is: that is the caller's to keep.
        Broken::Size(size) => (data.len() as u64).min(size.into()),
        _ => data.len() as u64,
    };
    tensor.dtype = KVPOOL_F32;
    tensor
}

/// One call.
fn call(cache: kvpool_cache_t, op: &Op, known_handles: &mut Known) -> kvpool_status_t {
    let k = known_handles;
    // SAFETY: every pointer is to what the function takes, or NULL, and lives through the call.
    unsafe {
        match op {
            Op::Begin { prompt, options, broken } => {
                let (tokens, built) = (prompt.tokens(), options.build());
                let mut out: kvpool_begun_t = zeroed();
                let size = broken.size(size_of::<kvpool_begun_t>());
                let given = if options.given { &raw const built } else { null() };
                let place = if size > size_of::<kvpool_begun_t>() {
                    null_mut()
                } else {
                    broken.place(&mut out)
                };
                let status =
                    kvpool_cache_begin(cache, tokens.as_ptr(), tokens.len(), given, place, size);
                if status == KVPOOL_OK {
                    k.seqs.push(out.sequence);
                }
                status
            }
            Op::BeginBatch(wanted) => {
                let wanted = &wanted[..wanted.len().min(6)];
                let prompts: Vec<_> = wanted.iter().map(|(prompt, _)| prompt.tokens()).collect();
                let options: Vec<_> = wanted.iter().map(|(_, options)| options.build()).collect();
                let items: Vec<_> = prompts
                    .iter()
                    .zip(&options)
                    .map(|(prompt, options)| kvpool_begin_item_t {
                        prompt: prompt.as_ptr(),
                        prompt_len: prompt.len(),
                        options,
                    })
                    .collect();
                let mut out: Vec<kvpool_begun_t> = wanted.iter().map(|_| zeroed()).collect();
                let status = kvpool_cache_begin_batch(
                    cache,
                    items.as_ptr(),
                    items.len(),
                    out.as_mut_ptr(),
                    size_of::<kvpool_begun_t>(),
                );
                if status == KVPOOL_OK {
                    k.seqs.extend(out.iter().map(|begun| begun.sequence));
                }
                status
            }
            Op::CheckAdmission(prompt, options) => {
                let (tokens, built) = (prompt.tokens(), options.build());
                let mut out: kvpool_estimate_t = zeroed();
                let size = size_of::<kvpool_estimate_t>();
                kvpool_cache_check_admission(
                    cache,
                    tokens.as_ptr(),
                    tokens.len(),
                    &built,
                    &mut out,
                    size,
                )
            }
            Op::CanAdmit(prompt, options) => {
                let (tokens, built) = (prompt.tokens(), options.build());
                let mut out: kvpool_reservation_t = zeroed();
                let status = kvpool_cache_can_admit(
                    cache,
                    tokens.as_ptr(),
                    tokens.len(),
                    &built,
                    &mut out,
                    null_mut(),
                    0,
                );
                if status == KVPOOL_OK {
                    k.reservations.push(out);
                }
                status
            }
            Op::BeginReserved(which) => {
                let mut out: kvpool_begun_t = zeroed();
                let reservation = pick!(k.reservations, *which, kvpool_reservation_t);
                let size = size_of::<kvpool_begun_t>();
                let status = kvpool_cache_begin_reserved(cache, reservation, &mut out, size);
                if status == KVPOOL_OK {
                    k.seqs.push(out.sequence);
                }
                status
            }
            Op::CancelReservation(which) => kvpool_cache_cancel_reservation(
                cache,
                pick!(k.reservations, *which, kvpool_reservation_t),
            ),
            Op::CancelReservations => kvpool_cache_cancel_reservations(cache, null_mut()),
            Op::Fork(which) => {
                let mut out: kvpool_seq_t = zeroed();
                let status =
                    kvpool_cache_fork(cache, pick!(k.seqs, *which, kvpool_seq_t), &mut out);
                if status == KVPOOL_OK {
                    k.seqs.push(out);
                }
                status
            }
            Op::Truncate(which, len) => {
                kvpool_cache_truncate(cache, pick!(k.seqs, *which, kvpool_seq_t), (*len).into())
            }
            Op::Release(which) => kvpool_cache_release(cache, pick!(k.seqs, *which, kvpool_seq_t)),
            Op::SeqInfo(which, broken) => {
                let mut out: kvpool_seq_info_t = zeroed();
                let size =
                    broken.size(size_of::<kvpool_seq_info_t>()).min(size_of::<kvpool_seq_info_t>());
                kvpool_seq_get_info(
                    cache,
                    pick!(k.seqs, *which, kvpool_seq_t),
                    broken.place(&mut out),
                    size,
                )
            }
            Op::Preempt => {
                let mut out: kvpool_preempted_t = zeroed();
                kvpool_cache_preempt_youngest(cache, &mut out, size_of::<kvpool_preempted_t>())
            }
            Op::Reset => kvpool_cache_reset(cache),
            Op::Reserve { items, tokens, short } => reserve(cache, items, *tokens, *short, k),
            Op::Append { step, layer, broken } => {
                let n = k.tokens as usize * KV_HEADS * HEAD_DIM;
                let (mut data, mut other) = (vec![0.5; n.max(1)], vec![0.25; n.max(1)]);
                let key = tensor(&mut data[..n], *broken);
                let value = tensor(&mut other[..n], Broken::No);
                let step = pick!(k.steps, *step, kvpool_step_t);
                kvpool_step_append(cache, step, u32::from(*layer) % 3, &key, &value)
            }
            Op::Attend { step, layer, broken, scale } => {
                let n = k.tokens as usize * Q_HEADS * HEAD_DIM;
                let (mut q, mut out) = (vec![0.5; n.max(1)], vec![0.0; n.max(1)]);
                let q = tensor(&mut q[..n], Broken::No);
                let to = tensor(&mut out[..n], *broken);
                let mut options: kvpool_attend_options_t = zeroed();
                options.size = size_of::<kvpool_attend_options_t>();
                options.softmax_scale = *scale;
                let step = pick!(k.steps, *step, kvpool_step_t);
                kvpool_step_attend(cache, step, u32::from(*layer) % 3, &q, &to, &options)
            }
            Op::MarkAll(which) => {
                kvpool_step_mark_all_appended(cache, pick!(k.steps, *which, kvpool_step_t))
            }
            Op::View(which) => {
                let mut out: kvpool_step_view_t = zeroed();
                let step = pick!(k.steps, *which, kvpool_step_t);
                kvpool_step_get_view(cache, step, &mut out, size_of::<kvpool_step_view_t>())
            }
            Op::Group(which, group) => {
                let mut out: kvpool_step_group_t = zeroed();
                let step = pick!(k.steps, *which, kvpool_step_t);
                let size = size_of::<kvpool_step_group_t>();
                kvpool_step_get_group(cache, step, (*group).into(), &mut out, size)
            }
            Op::Csr(which, group) => {
                let mut out: kvpool_step_csr_t = zeroed();
                let step = pick!(k.steps, *which, kvpool_step_t);
                let size = size_of::<kvpool_step_csr_t>();
                kvpool_step_get_csr(cache, step, (*group).into(), &mut out, size)
            }
            Op::Commit(which) => kvpool_step_commit(cache, pick!(k.steps, *which, kvpool_step_t)),
            Op::Cancel(which) => kvpool_step_cancel(cache, pick!(k.steps, *which, kvpool_step_t)),
            Op::Probe(prompt, options) => {
                let (tokens, built) = (prompt.tokens(), options.build());
                let mut out: kvpool_probe_t = zeroed();
                let size = size_of::<kvpool_probe_t>();
                let name_space = &raw const built.name_space;
                kvpool_cache_probe(cache, tokens.as_ptr(), tokens.len(), name_space, &mut out, size)
            }
            Op::Pin(which) => {
                let mut out: kvpool_pin_t = zeroed();
                let status = kvpool_cache_pin(cache, pick!(k.seqs, *which, kvpool_seq_t), &mut out);
                if status == KVPOOL_OK {
                    k.pins.push(out);
                }
                status
            }
            Op::Unpin(which) => kvpool_cache_unpin(cache, pick!(k.pins, *which, kvpool_pin_t)),
            Op::Retention(which, ranges) => {
                let ranges: Vec<_> = ranges
                    .iter()
                    .take(8)
                    .map(|(from, to, priority)| {
                        let mut range: kvpool_retention_t = zeroed();
                        (range.from, range.to) = (*from, *to);
                        range.priority = (*priority).into();
                        range.duration_ms = u64::from(*priority) * 3;
                        range
                    })
                    .collect();
                let seq = pick!(k.seqs, *which, kvpool_seq_t);
                kvpool_cache_set_retention(cache, seq, ranges.as_ptr(), ranges.len())
            }
            Op::Time(now) => kvpool_cache_set_time_ms(cache, *now),
            Op::Epoch(epoch) => kvpool_cache_set_epoch(cache, (*epoch).into()),
            Op::ClearCached => kvpool_cache_clear_cached(cache),
            Op::Poll => {
                kvpool_cache_poll_events(cache, Some(ignore), null_mut(), null_mut(), null_mut())
            }
            Op::Resync => kvpool_cache_resync_events(cache, Some(ignore), null_mut(), null_mut()),
            Op::Stats(broken) => {
                let mut out: kvpool_stats_t = zeroed();
                let size =
                    broken.size(size_of::<kvpool_stats_t>()).min(size_of::<kvpool_stats_t>());
                kvpool_cache_stats(cache, broken.place(&mut out), size)
            }
            Op::GroupStats(group) => {
                let mut out: kvpool_group_stats_t = zeroed();
                let size = size_of::<kvpool_group_stats_t>();
                kvpool_cache_group_stats(cache, (*group).into(), &mut out, size)
            }
            Op::Export { seq, layer, part, from, to, len } => {
                let mut out = vec![0.0; usize::from(*len) + 1];
                let seq = pick!(k.seqs, *seq, kvpool_seq_t);
                let (from, to) = (u32::from(*from), u32::from(*to));
                let right = to.saturating_sub(from) as usize * KV_HEADS * HEAD_DIM;
                out.resize(out.len().max(right), 0.0);
                let len = if len % 2 == 0 { right } else { usize::from(*len) };
                kvpool_cache_export(
                    cache,
                    seq,
                    (*layer).into(),
                    *part,
                    from,
                    to,
                    out.as_mut_ptr(),
                    len,
                )
            }
            Op::Read { offset, len } => {
                let mut out = [0_u8; 256];
                kvpool_cache_read(cache, *offset, out.as_mut_ptr().cast(), (*len).into())
            }
            Op::BlockOf(which, group, position) => {
                let mut out: kvpool_block_t = zeroed();
                let seq = pick!(k.seqs, *which, kvpool_seq_t);
                let status = kvpool_cache_block_of(
                    cache,
                    seq,
                    (*group).into(),
                    (*position).into(),
                    &mut out,
                );
                if status == KVPOOL_OK {
                    k.blocks.push(out);
                }
                let mut refs = 0;
                let block = pick!(k.blocks, *which, kvpool_block_t);
                known(kvpool_cache_block_refs(cache, block, &mut refs));
                status
            }
            Op::Text(as_json, capacity) => {
                let mut buffer = [0; 256];
                let mut needed = 0;
                let form = if *as_json { KVPOOL_JSON } else { KVPOOL_TEXT };
                let to = buffer.as_mut_ptr();
                kvpool_cache_text(cache, form, to, (*capacity).into(), &mut needed)
            }
            Op::Check => kvpool_cache_check(cache),
            Op::SavePrefixes(unsalted_only) => {
                let mut options: kvpool_save_options_t = zeroed();
                options.size = size_of::<kvpool_save_options_t>();
                options.unsalted_only = (*unsalted_only).into();
                let mut out: kvpool_saved_t = zeroed();
                let size = size_of::<kvpool_saved_t>();
                kvpool_cache_save_prefixes(cache, path().as_ptr(), &options, &mut out, size)
            }
            Op::RestorePrefixes => {
                let mut out: kvpool_restored_t = zeroed();
                let size = size_of::<kvpool_restored_t>();
                kvpool_cache_restore_prefixes(cache, path().as_ptr(), null(), &mut out, size)
            }
            Op::SaveSequence(which, broken) => {
                let seq = pick!(k.seqs, *which, kvpool_seq_t);
                let mut out: kvpool_saved_t = zeroed();
                let place = broken.place(&mut out);
                let size = broken.size(size_of::<kvpool_saved_t>());
                kvpool_cache_save_sequence(cache, seq, path().as_ptr(), null(), place, size)
            }
            Op::RestoreSequence { key, max_len, broken } => {
                let mut options: kvpool_restore_options_t = zeroed();
                options.size = broken.size(size_of::<kvpool_restore_options_t>());
                options.key = key.unwrap_or(0).into();
                options.has_key = key.is_some().into();
                options.max_len = (*max_len).into();
                let mut out: kvpool_begun_t = zeroed();
                let size = size_of::<kvpool_begun_t>();
                let status =
                    kvpool_cache_restore_sequence(cache, path().as_ptr(), &options, &mut out, size);
                if status == KVPOOL_OK {
                    k.seqs.push(out.sequence);
                }
                status
            }
        }
    }
}

fn reserve(
    cache: kvpool_cache_t,
    wanted: &[(Which, u8)],
    tokens: bool,
    short: bool,
    k: &mut Known,
) -> kvpool_status_t {
    let wanted = &wanted[..wanted.len().min(6)];
    let items: Vec<_> = wanted
        .iter()
        .map(|(which, count)| {
            let mut item: kvpool_step_item_t = zeroed();
            item.sequence = pick!(k.seqs, *which, kvpool_seq_t);
            item.num_tokens = u32::from(*count) % 12;
            item
        })
        .collect();
    let total: u32 = items.iter().map(|item| item.num_tokens).sum();
    let ids: Vec<u32> = (0..total + 1).map(|at| at % 5).collect();
    let len = if short { total as usize + 1 } else { total as usize };
    let (ids, len) = if tokens { (ids.as_ptr(), len) } else { (null(), 0) };
    let mut out: kvpool_step_t = zeroed();
    // SAFETY: as in `call`.
    let status =
        unsafe { kvpool_cache_reserve(cache, items.as_ptr(), items.len(), ids, len, &mut out) };
    if status == KVPOOL_OK {
        k.steps.push(out);
        k.tokens = total;
        assert!(total as usize <= MAX_TOKENS);
    }
    status
}

/// The configuration that an input chooses.
fn toml(input: &Input) -> String {
    let mode = ["contiguous", "paged", "hybrid"][usize::from(input.mode) % 3];
    let (format, scale) = [
        ("f32", ""),
        ("f16", ""),
        ("bf16", ""),
        ("int8", ", int8 = { scale = 'per-token-head' }"),
        ("int8", ", int8 = { scale = 'per-group-32' }"),
    ][usize::from(input.format) % 5];
    let admission =
        ["guaranteed", "max-utilization", "static-batch"][usize::from(input.admission) % 3];
    let scrub = ["off", "on-release", "on-reuse"][usize::from(input.scrub) % 3];
    let windows = ["[0, 0]", "[0, 9]", "[9, 9]"][usize::from(input.windows) % 3];
    let hybrid = if mode == "hybrid" { ", hybrid = { contiguous_layers = [0] }" } else { "" };
    let capacity = if mode == "contiguous" { "worst-case" } else { "blocks:12" };
    format!(
        "model = {{ num_layers = {LAYERS}, num_q_heads = {Q_HEADS}, num_kv_heads = {KV_HEADS}, \
           head_dim = {HEAD_DIM}, attention_window = {windows} }}\n\
         limits = {{ max_seqs = 4, max_seq_len = 64, max_batch_tokens = {MAX_TOKENS}, \
           max_step_tokens = 9, max_rewind_tokens = 4 }}\n\
         cache = {{ mode = '{mode}', format = '{format}', admission = '{admission}', \
           tokens_per_block = 8, event_buffer = 32{scale}{hybrid} }}\n\
         pool = {{ capacity = '{capacity}', scrub = '{scrub}' }}\n\
         device = {{ threads = 1 }}"
    )
}

/// Runs one input.
pub(super) fn run(input: &Input) {
    let text = toml(input);
    let (mut config, mut plan, mut cache): (kvpool_config_t, kvpool_plan_t, kvpool_cache_t) =
        (zeroed(), zeroed(), zeroed());
    // SAFETY: a text and its length, a C string, no overrides, a place.
    let parsed = unsafe {
        kvpool_config_parse(
            text.as_ptr().cast(),
            text.len(),
            c"fuzz".as_ptr(),
            null(),
            0,
            &mut config,
        )
    };
    if parsed != KVPOOL_OK {
        // Settings that do not go together.
        return;
    }
    // SAFETY: places.
    unsafe {
        assert_eq!(kvpool_plan_new(config, &mut plan), KVPOOL_OK, "{text}");
        assert_eq!(kvpool_cache_open(plan, &mut cache), KVPOOL_OK);
    }
    assert_eq!(kvpool_config_destroy(config), KVPOOL_OK);
    assert_eq!(kvpool_plan_destroy(plan), KVPOOL_OK);
    let two = input.two % 4 == 0 && !input.beside.is_empty();
    std::thread::scope(|scope| {
        if two {
            scope.spawn(|| {
                let mut handles = Known::default();
                for op in input.beside.iter().take(64) {
                    known(call(cache, op, &mut handles));
                }
            });
        }
        let mut handles = Known::default();
        for op in input.ops.iter().take(256) {
            known(call(cache, op, &mut handles));
            if !two {
                assert_eq!(kvpool_cache_check(cache), KVPOOL_OK, "{op:?}");
            }
        }
    });
    assert_eq!(kvpool_cache_check(cache), KVPOOL_OK);
    assert_eq!(kvpool_cache_close(cache), KVPOOL_OK);
    assert_eq!(known(kvpool_cache_check(cache)), KVPOOL_STALE_HANDLE);
    let _ = std::fs::remove_file(Scratch::path_of("capi"));
}
