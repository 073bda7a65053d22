//! The header's sections "Config", "Plan" and "Cache: open, look, close": the cache that an input
//! chooses.

use std::ptr::null;

use kvpool::capi::*;

use super::input::Input;
use super::zeroed;

const LAYERS: u32 = 2;
pub(super) const KV_HEADS: usize = 1;
pub(super) const Q_HEADS: usize = 2;
pub(super) const HEAD_DIM: usize = 32;
pub(super) const MAX_TOKENS: usize = 32;

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
    let windows = [[0, 0], [0, 9], [9, 9]][usize::from(input.windows) % 3];
    let (paged, hybrid) = match mode {
        "paged" => (&windows[..], ""),
        "hybrid" => (&windows[1..], ", hybrid = { contiguous_layers = [0] }"),
        _ => (&windows[..0], ""),
    };
    // Events are for blocks of layers that have no window.
    let events = if paged.contains(&0) { 32 } else { 0 };
    let capacity = if mode == "contiguous" { "worst-case" } else { "blocks:12" };
    format!(
        "model = {{ num_layers = {LAYERS}, num_q_heads = {Q_HEADS}, num_kv_heads = {KV_HEADS}, \
           head_dim = {HEAD_DIM}, attention_window = {windows:?} }}\n\
         limits = {{ max_seqs = 4, max_seq_len = 64, max_batch_tokens = {MAX_TOKENS}, \
           max_step_tokens = 9, max_rewind_tokens = 4 }}\n\
         cache = {{ mode = '{mode}', format = '{format}', admission = '{admission}', \
           tokens_per_block = 8, event_buffer = {events}{scale}{hybrid} }}\n\
         pool = {{ capacity = '{capacity}', scrub = '{scrub}' }}\n\
         device = {{ threads = 1 }}"
    )
}

/// An empty cache, and what it was opened with.
#[derive(Clone, Copy)]
pub(super) struct Opened {
    pub(super) config: kvpool_config_t,
    pub(super) plan: kvpool_plan_t,
    pub(super) cache: kvpool_cache_t,
}

impl Opened {
    /// Ends what is left when the cache was closed.
    pub(super) fn destroy(self) {
        assert_eq!(kvpool_config_destroy(self.config), KVPOOL_OK);
        assert_eq!(kvpool_plan_destroy(self.plan), KVPOOL_OK);
    }
}

/// Every shape is one that opens; `KVPOOL_FUZZ=shapes` tries them all.
pub(super) fn open(input: &Input) -> Opened {
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
    assert_eq!(parsed, KVPOOL_OK, "{text}");
    // SAFETY: places.
    unsafe {
        assert_eq!(kvpool_plan_new(config, &mut plan), KVPOOL_OK, "{text}");
        assert_eq!(kvpool_cache_open(plan, &mut cache), KVPOOL_OK, "{text}");
    }
    Opened { config, plan, cache }
}

pub(super) fn text(cache: kvpool_cache_t, as_json: bool, capacity: u8) -> kvpool_status_t {
    let mut buffer = [0; 256];
    let mut needed = 0;
    let form = if as_json { KVPOOL_JSON } else { KVPOOL_TEXT };
    // SAFETY: a buffer longer than any capacity here, a place.
    unsafe { kvpool_cache_text(cache, form, buffer.as_mut_ptr(), capacity.into(), &mut needed) }
}
