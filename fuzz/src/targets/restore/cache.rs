//! The caches on both sides of a save: opened, filled, and checked.

use std::path::Path;

use kvpool::cache::{BeginOptions, Cache, KeyPart, Namespace, SeqHandle};
use kvpool::config::parse;
use kvpool::device::TensorRef;
use kvpool::plan::{Kv, Plan};
use kvpool::units::LayerIdx;

use super::super::combinations;
use super::input::{Name, Shape};
use super::texts::{HEAD_DIM, stored, text, token};

const LAYERS: usize = 3;
const WINDOWS: [[u32; LAYERS]; 3] = [[0, 0, 0], [20, 0, 12], [9, 9, 9]];
/// Windows, and whether there are sinks.
pub(super) const MODELS: u8 = 6;
pub(super) const REWIND: u32 = 4;

fn key_part(number: u8) -> Option<KeyPart> {
    match number % 4 {
        0 => None,
        1 => KeyPart::bytes(b"").ok(),
        2 => KeyPart::bytes(b"a").ok(),
        _ => Some(KeyPart::number(number.into())),
    }
}

impl Name {
    pub(super) fn namespace(self, salt_from: u32) -> Namespace {
        let [salt, adapter, model] = self.0.map(key_part);
        Namespace { salt, salt_from, adapter, model }
    }
}

impl Shape {
    pub(super) fn per_block(self) -> u32 {
        [8, 32, 16, 128][usize::from(self.per_block) % 4]
    }

    /// An empty cache. Every shape is one that opens; `KVPOOL_FUZZ=shapes` tries them all.
    pub(super) fn open(self, model: u8) -> Cache {
        let mode = ["paged", "contiguous", "hybrid"][usize::from(self.mode) % 3];
        let windows = WINDOWS[usize::from(model) % 3];
        let longest = [64, 40, 19][usize::from(self.longest) % 3];
        let sees_all = |window: &u32| *window == 0 || *window >= longest;
        // Sinks are for windows, and events for blocks of layers that have none.
        let sinks = if windows == [0; LAYERS] { 0 } else { [0, 2][usize::from(model / 3) % 2] };
        let (paged, hybrid) = match mode {
            "paged" => (&windows[..], ""),
            "hybrid" => (&windows[1..], ", hybrid = { contiguous_layers = [0] }"),
            _ => (&windows[..0], ""),
        };
        let events = if paged.iter().any(sees_all) { 32 } else { 0 };
        let per_block = self.per_block();
        let capacity = match mode {
            "contiguous" => "worst-case".to_owned(),
            _ => format!("blocks:{}", 64_u32.div_ceil(per_block) + u32::from(self.blocks) % 24),
        };
        let scrub = ["off", "on-release", "on-reuse"][usize::from(self.scrub) % 3];
        let toml = format!(
            "model = {{ num_layers = {LAYERS}, num_q_heads = 1, num_kv_heads = 1, \
               head_dim = {HEAD_DIM}, attention_window = {windows:?}, sink_tokens = {sinks} }}\n\
             limits = {{ max_seqs = 4, max_seq_len = {longest}, max_batch_tokens = 32, \
               max_step_tokens = 8, max_rewind_tokens = {REWIND} }}\n\
             cache = {{ mode = '{mode}', format = 'f16', tokens_per_block = {per_block}, \
               event_buffer = {events}, prefix_reuse = true{hybrid} }}\n\
             pool = {{ capacity = '{capacity}', scrub = '{scrub}' }}\n\
             device = {{ threads = 1 }}"
        );
        let source = parse(&toml, Path::new("fuzz.toml"), &[]).expect("a shape");
        let plan = Plan::new(&source.config, &source.geometry).expect("a shape");
        Cache::open_on_cpu(plan, &source.config.device, None).expect("it is small")
    }

    /// All shapes; of the numbers of blocks, the fewest and the most.
    pub(super) fn all() -> impl Iterator<Item = Self> {
        combinations([3, 4, 3, 2, 3]).map(|[mode, per_block, longest, most, scrub]| Self {
            mode,
            per_block,
            longest,
            blocks: 23 * most,
            scrub,
        })
    }
}

/// Computes a sequence's tokens up to a length, a few at a time.
pub(super) fn fill(cache: &mut Cache, sequence: SeqHandle, of: u8, len: u32) {
    loop {
        let at = cache.seq_len(sequence).expect("alive");
        let limit = cache.seq_limit(sequence).expect("alive");
        let ids: Vec<u32> =
            (at..len.min(limit).min(at + 8)).map(|position| token(of, position)).collect();
        if ids.is_empty() {
            return;
        }
        let count = u32::try_from(ids.len()).expect("few");
        let Ok(mut step) = cache.reserve_tokens(&[(sequence, count)], &ids) else { return };
        let tensor = |kv| -> Vec<f32> {
            let row = |(position, id): (u32, &u32)| [stored(kv, position, *id); HEAD_DIM];
            (at..).zip(&ids).flat_map(row).collect()
        };
        let (k, v) = (tensor(Kv::K), tensor(Kv::V));
        for layer in 0..LAYERS {
            let layer = LayerIdx(u32::try_from(layer).expect("few"));
            step.append(layer, TensorRef::F32(&k), TensorRef::F32(&v)).expect("appended");
        }
        step.commit().expect("whole");
    }
}

/// Begins a text, computes it, and checks K and V of what it may see, if these are known.
pub(super) fn pass(
    cache: &mut Cache,
    of: u8,
    len: u32,
    namespace: Namespace,
    known: bool,
) -> Option<SeqHandle> {
    let options = BeginOptions { namespace, ..BeginOptions::default() };
    let begun = cache.begin(&text(of, len), options).ok()?;
    check(cache);
    if known {
        check_contents(cache, begun.sequence, of);
    }
    fill(cache, begun.sequence, of, len);
    check(cache);
    if known {
        check_contents(cache, begun.sequence, of);
    }
    Some(begun.sequence)
}

fn check_contents(cache: &Cache, sequence: SeqHandle, of: u8) {
    let len = cache.seq_len(sequence).expect("alive");
    let geometry = &cache.plan().geometry;
    for layer in 0..geometry.num_layers {
        let window = geometry.windows[layer as usize];
        let from = if window == 0 { 0 } else { (len + 1).saturating_sub(window) };
        let sinks = if window == 0 { 0 } else { geometry.sink_tokens.min(from) };
        for position in (0..sinks).chain(from..len) {
            for kv in [Kv::K, Kv::V] {
                let mut row = [f32::NAN; HEAD_DIM];
                cache
                    .export(sequence, LayerIdx(layer), kv, position, position + 1, &mut row)
                    .expect("held");
                let right = [stored(kv, position, token(of, position)); HEAD_DIM];
                assert_eq!(row, right, "{kv:?} of layer {layer}, position {position} of {len}");
            }
        }
    }
}

pub(super) fn check(cache: &Cache) {
    if let Err(error) = cache.check_invariants() {
        panic!("{error}");
    }
}

/// Puts something into a cache. Gives a sequence that is alive.
pub(super) fn furnish(cache: &mut Cache, before: u8) {
    let longest = cache.plan().limits.max_seq_len;
    if before & 1 != 0
        && let Some(sequence) = pass(cache, 0, longest.min(29), Namespace::default(), true)
    {
        cache.release(sequence).expect("alive");
    }
    if before & 2 != 0 {
        let _ = pass(cache, 1, longest.min(33), Name([1, 0, 0]).namespace(8), true);
    }
    if before & 4 != 0
        && let Some(sequence) = pass(cache, 2, longest.min(18), Namespace::default(), true)
    {
        let _ = cache.pin(sequence);
    }
    if before & 8 != 0 {
        cache.set_time_ms(1000);
    }
}
