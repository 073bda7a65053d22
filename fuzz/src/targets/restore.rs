//! A save, of prefixes or of a sequence: one that a cache has written, or records that say anything, with
//! bytes changed under checksums that are right again. It is restored into a cache of any mode and
//! block size that may hold something already.
//!
//! What is refused changes nothing; what is taken breaks no invariant; and what is found by a
//! sequence that begins then has the K and V of its tokens. With `KVPOOL_FUZZ_SAY` set it tells what
//! became of each file.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{LazyLock, Mutex};

use arbitrary::Arbitrary;
use kvpool::cache::{
    BeginOptions, Cache, KeyPart, Namespace, RestoreOptions, SaveOptions, SeqHandle,
};
use kvpool::config::parse;
use kvpool::device::TensorRef;
use kvpool::plan::{Kv, Plan};
use kvpool::units::LayerIdx;
use xxhash_rust::xxh3::xxh3_64;

use crate::scratch::Scratch;

#[derive(Debug, Arbitrary)]
pub(super) struct Input {
    model: u8,
    old: Shape,
    new: Shape,
    /// What the cache has that the file is for.
    before: u8,
    sequence: bool,
    file: File,
    edits: Vec<Edit>,
    /// The file ends here.
    cut: Option<u16>,
    key: Option<u8>,
    max_len: Option<u8>,
}

/// What may differ between the cache of a save and that of its restore.
#[derive(Clone, Copy, Debug, Arbitrary)]
struct Shape {
    mode: u8,
    per_block: u8,
    longest: u8,
    blocks: u8,
    scrub: u8,
}

#[derive(Debug, Arbitrary)]
enum File {
    /// What the old cache writes, having run so many texts.
    Saved(u8),
    Records(Vec<Record>),
}

#[derive(Clone, Copy, Debug, Arbitrary)]
struct Edit {
    /// Of which record, and where in it.
    record: u8,
    at: u8,
    byte: u8,
    /// Its checksum stays wrong.
    wrong: bool,
}

#[derive(Clone, Copy, Debug, Arbitrary)]
enum Record {
    Name(Name),
    Block { parent: u8, name: u8, tokens: u8, text: u8, class: u8, limit: u16, spans: [Span; 3] },
    Sequence(Sequence),
}

/// Salt, adapter, model.
#[derive(Clone, Copy, Debug, Arbitrary)]
struct Name([u8; 3]);

#[derive(Clone, Copy, Debug, Arbitrary)]
enum Span {
    Whole,
    None,
    Parts(u8, u8),
}

#[derive(Clone, Copy, Debug, Arbitrary)]
struct Sequence {
    len: u8,
    longer: u8,
    limit: u8,
    lookahead: u8,
    known: u8,
    text: u8,
    shares: bool,
    salt_from: u8,
    name: Name,
    /// From, to, priority, time limit.
    retentions: [(u8, u8, u8, u8); 4],
}

const LAYERS: usize = 3;
const HEAD_DIM: usize = 8;
const REWIND: u32 = 4;

/// The token at a position of one of three texts, which part ways after 20 tokens.
fn token(text: u8, position: u32) -> u32 {
    (position * 7 + u32::from(text % 3) * (position / 20)) % 5
}

fn text(text: u8, len: u32) -> Vec<u32> {
    (0..len).map(|position| token(text, position)).collect()
}

/// What K and V of a token are, in each of their elements.
fn stored(kv: Kv, position: u32, token: u32) -> f32 {
    let number = match kv {
        Kv::K => position,
        Kv::V => token + 64,
    };
    f32::from(u16::try_from(number).expect("small"))
}

fn key_part(number: u8) -> Option<KeyPart> {
    match number % 4 {
        0 => None,
        1 => KeyPart::bytes(b"").ok(),
        2 => KeyPart::bytes(b"a").ok(),
        _ => Some(KeyPart::number(number.into())),
    }
}

impl Name {
    fn namespace(self, salt_from: u32) -> Namespace {
        let [salt, adapter, model] = self.0.map(key_part);
        Namespace { salt, salt_from, adapter, model }
    }

    /// Its bytes in a file.
    fn bytes(self) -> Vec<u8> {
        self.0
            .into_iter()
            .flat_map(|part| {
                let mut bytes = [0; 48];
                match part % 4 {
                    0 => {}
                    1 => bytes[47] = 1,
                    2 => (bytes[0], bytes[47]) = (b'a', 2),
                    _ => (bytes[0], bytes[47]) = (part, 255),
                }
                bytes
            })
            .collect()
    }
}

impl Shape {
    fn per_block(self) -> u32 {
        [8, 4, 16, 2][usize::from(self.per_block) % 4]
    }

    /// An empty cache; `None` where settings do not go together.
    fn open(self, model: u8) -> Option<Cache> {
        let mode = ["paged", "contiguous", "hybrid"][usize::from(self.mode) % 3];
        let windows = ["[0, 0, 0]", "[20, 0, 12]", "[9, 9, 9]"][usize::from(model) % 3];
        let sinks = [0, 2][usize::from(model / 3) % 2];
        let longest = [64, 40, 19][usize::from(self.longest) % 3];
        let hybrid = if mode == "hybrid" { ", hybrid = { contiguous_layers = [0] }" } else { "" };
        let capacity = match mode {
            "contiguous" => "worst-case".to_owned(),
            _ => format!("blocks:{}", 64 / self.per_block() + u32::from(self.blocks) % 24),
        };
        let scrub = ["off", "on-release", "on-reuse"][usize::from(self.scrub) % 3];
        let per_block = self.per_block();
        let toml = format!(
            "model = {{ num_layers = {LAYERS}, num_q_heads = 1, num_kv_heads = 1, \
               head_dim = {HEAD_DIM}, attention_window = {windows}, sink_tokens = {sinks} }}\n\
             limits = {{ max_seqs = 4, max_seq_len = {longest}, max_batch_tokens = 32, \
               max_step_tokens = 8, max_rewind_tokens = {REWIND} }}\n\
             cache = {{ mode = '{mode}', format = 'f16', tokens_per_block = {per_block}, \
               event_buffer = 32, prefix_reuse = true{hybrid} }}\n\
             pool = {{ capacity = '{capacity}', scrub = '{scrub}' }}\n\
             device = {{ threads = 1 }}"
        );
        let source = parse(&toml, Path::new("fuzz.toml"), &[]).ok()?;
        let plan = Plan::new(&source.config, &source.geometry).ok()?;
        Some(Cache::open_on_cpu(plan, &source.config.device, None).expect("it is small"))
    }
}

/// Computes a sequence's tokens up to a length, a few at a time.
fn fill(cache: &mut Cache, sequence: SeqHandle, of: u8, len: u32) {
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
fn pass(
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

fn check(cache: &Cache) {
    if let Err(error) = cache.check_invariants() {
        panic!("{error}");
    }
}

/// A save of an old cache: of a sequence, or of prefixes.
fn saved((model, old, sequence): (u8, Shape, bool), texts: u8, path: &Path) -> Option<Vec<u8>> {
    let mut cache = old.open(model)?;
    let longest = cache.plan().limits.max_seq_len;
    if sequence {
        let name = Name([texts % 4, 0, 0]).namespace(u32::from(texts) % 24);
        let len = 1 + u32::from(texts) % longest;
        let sequence = pass(&mut cache, texts, len, name, true)?;
        if texts >= 128 {
            // Behind what it had, as far as a window allows it.
            let _ = cache.truncate(sequence, len.saturating_sub(REWIND).max(1));
        }
        cache.save_sequence(sequence, path, &SaveOptions::default()).expect("written");
    } else {
        for n in 0..=texts % 4 {
            let name = Name([n % 3, texts % 2, 0]).namespace(u32::from(texts) % 24);
            let len = longest.min(20 + 7 * u32::from(n) + u32::from(texts) % 8);
            let sequence = pass(&mut cache, n, len, name, true)?;
            cache.release(sequence).expect("alive");
        }
        cache.save_prefixes(path, &SaveOptions::default()).expect("written");
    }
    Some(std::fs::read(path).expect("there"))
}

fn put32(out: &mut Vec<u8>, number: u32) {
    out.extend_from_slice(&number.to_le_bytes());
}

/// A record as it lies in a file.
fn record(kind: u32, payload: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    put32(&mut out, kind);
    put32(&mut out, 0);
    out.extend_from_slice(&(payload.len() as u64).to_le_bytes());
    out.extend_from_slice(payload);
    let sum = xxh3_64(&out);
    out.extend_from_slice(&sum.to_le_bytes());
    out
}

/// A file of such records: the header of the old cache, and the end that they ask for.
fn written(input: &Input, records: &[Record], path: &Path) -> Option<Vec<u8>> {
    static HEADERS: LazyLock<Mutex<HashMap<u8, Vec<u8>>>> = LazyLock::new(Mutex::default);
    let mut headers = HEADERS.lock().expect("one thread");
    let mut file = match headers.get(&(input.model % 6)) {
        Some(header) => header.clone(),
        None => {
            let all = saved((input.model, input.old, false), 0, path)?;
            let len = usize::from(u16::from_le_bytes([all[12], all[13]]));
            headers.insert(input.model % 6, all[..len].to_vec());
            all[..len].to_vec()
        }
    };
    let per_block = input.old.per_block();
    file[16..20].copy_from_slice(&(if input.sequence { 1_u32 } else { 2 }).to_le_bytes());
    file[48..52].copy_from_slice(&per_block.to_le_bytes());
    let end = file.len() - 8;
    let sum = xxh3_64(&file[..end]);
    file[end..].copy_from_slice(&sum.to_le_bytes());
    // Where each block ends.
    let mut ends: Vec<u32> = Vec::new();
    let (mut names, mut all_tokens) = (0_u8, 0_u64);
    for one in records.iter().take(40) {
        match *one {
            Record::Name(name) => {
                names = names.saturating_add(1);
                file.extend(record(1, &name.bytes()));
            }
            Record::Block { parent, name, tokens, text, class, limit, spans } => {
                let parent = match usize::from(parent) {
                    0 => None,
                    _ if ends.is_empty() => None,
                    // Mostly the one before.
                    n if input.sequence || n >= 128 => Some(ends.len() - 1),
                    n => Some(n % ends.len()),
                };
                let name = match parent {
                    None if !input.sequence => 1 + u32::from(name) % u32::from(names.max(1)),
                    _ if name < 200 || names == 0 => 0,
                    _ => 1 + u32::from(name) % u32::from(names),
                };
                let tokens =
                    if tokens < 192 { per_block } else { 1 + u32::from(tokens) % per_block };
                let start = parent.map_or(0, |parent| ends[parent]);
                ends.push(start + tokens);
                all_tokens += u64::from(tokens);
                let parent = parent.map_or(u32::MAX, |parent| parent as u32);
                let head = [parent, name, tokens, (class % 101).into()];
                file.extend(record(2, &block(head, (start, text), limit, spans)));
            }
            Record::Sequence(sequence) => file.extend(record(3, &sequence.payload())),
        }
    }
    let counts = [ends.len() as u64, all_tokens, names.into()];
    let end: Vec<u8> = counts.iter().flat_map(|count| count.to_le_bytes()).collect();
    file.extend(record(4, &end));
    Some(file)
}

/// The payload of a block. `head`: parent, namespace, tokens, priority.
fn block(head: [u32; 4], (start, text): (u32, u8), limit: u16, spans: [Span; 3]) -> Vec<u8> {
    let tokens = head[2];
    let mut out = Vec::new();
    head.iter().for_each(|number| put32(&mut out, *number));
    let limit = if limit == 0 { u64::MAX } else { limit.into() };
    out.extend_from_slice(&limit.to_le_bytes());
    out.extend_from_slice(&(limit / 2).to_le_bytes());
    (start..start + tokens).for_each(|position| put32(&mut out, token(text, position)));
    let spans = spans.map(|span| match span {
        Span::Whole => (0, 0),
        Span::None => (0, tokens),
        Span::Parts(head, from) => {
            let from = 1 + u32::from(from) % tokens;
            (u32::from(head) % from, from)
        }
    });
    spans.iter().for_each(|(head, from)| put32(&mut out, head | from << 16));
    for (head, from) in spans {
        if (head, from) == (0, tokens) {
            continue;
        }
        for kv in [Kv::K, Kv::V] {
            for at in 0..tokens {
                let there = at < head || at >= from;
                let number = stored(kv, start + at, token(text, start + at));
                let number = if there { half_bits(number) } else { 0 };
                (0..HEAD_DIM).for_each(|_| out.extend_from_slice(&number.to_le_bytes()));
            }
        }
    }
    out
}

/// The bits of a small whole number as f16.
fn half_bits(number: f32) -> u16 {
    if number == 0.0 {
        return 0;
    }
    let bits = number.to_bits();
    let exponent = (bits >> 23 & 0xFF) + 15 - 127;
    u16::try_from(exponent << 10 | bits >> 13 & 0x3FF).expect("small")
}

impl Sequence {
    fn payload(&self) -> Vec<u8> {
        let mut out = Vec::new();
        let len = u32::from(self.len) % 70;
        let known = u32::from(self.known) % 70;
        let numbers = [
            len,
            len + u32::from(self.longer) % 10,
            u32::from(self.limit),
            u32::from(self.lookahead) % 8,
            known,
            self.shares.into(),
            self.salt_from.into(),
            0,
        ];
        numbers.iter().for_each(|number| put32(&mut out, *number));
        out.extend(self.name.bytes());
        for (from, to, priority, limit) in self.retentions {
            put32(&mut out, from.into());
            put32(&mut out, to.into());
            let limit = if limit == 0 { u64::MAX } else { limit.into() };
            out.extend_from_slice(&limit.to_le_bytes());
            put32(&mut out, priority.into());
            put32(&mut out, 0);
        }
        (0..known).for_each(|position| put32(&mut out, token(self.text, position)));
        out
    }
}

/// Where the records of a file begin, the header first, and its end.
fn starts(file: &[u8]) -> Vec<usize> {
    let mut starts = vec![0, usize::from(u16::from_le_bytes([file[12], file[13]]))];
    let mut at = starts[1];
    while at < file.len() {
        let len = file[at + 8..at + 16].try_into().expect("eight bytes");
        at += 24 + usize::try_from(u64::from_le_bytes(len)).expect("small");
        starts.push(at);
    }
    starts
}

/// Changes bytes, and mends the checksums.
fn edit(file: &mut [u8], edits: &[Edit]) {
    let starts = starts(file);
    for edit in edits {
        let record = usize::from(edit.record) % (starts.len() - 1);
        let (start, end) = (starts[record], starts[record + 1] - 8);
        let at = start + usize::from(edit.at) % (end - start);
        file[at] = edit.byte;
        if !edit.wrong {
            let sum = xxh3_64(&file[start..end]);
            file[end..end + 8].copy_from_slice(&sum.to_le_bytes());
        }
    }
}

/// Puts something into a cache. Gives a sequence that is alive.
fn furnish(cache: &mut Cache, before: u8) {
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

/// Runs one input.
pub(super) fn run(input: &Input) {
    static FILE: LazyLock<Mutex<Scratch>> = LazyLock::new(|| Mutex::new(Scratch::new("save")));
    let mut scratch = FILE.lock().expect("one thread");
    let other = scratch.fill(&[]).with_extension("written");
    let file = match &input.file {
        File::Saved(texts) => saved((input.model, input.old, input.sequence), *texts, &other),
        File::Records(records) => written(input, records, &other),
    };
    let _ = std::fs::remove_file(&other);
    let Some(mut file) = file else { return };
    edit(&mut file, &input.edits);
    if let Some(cut) = input.cut {
        file.truncate(cut.into());
    }
    let path = scratch.fill(&file);
    let Some(mut cache) = input.new.open(input.model) else { return };
    furnish(&mut cache, input.before);
    check(&cache);
    let known = input.edits.is_empty();
    let options = RestoreOptions {
        key: input.key.map(u64::from),
        max_len: input.max_len.map(u32::from),
        ..RestoreOptions::default()
    };
    let digest = cache.state_digest();
    let taken = if input.sequence {
        cache.restore_sequence(path, &options).map(|begun| Some(begun.sequence))
    } else {
        cache.restore_prefixes(path, &options).map(|_| None)
    };
    check(&cache);
    if std::env::var_os("KVPOOL_FUZZ_SAY").is_some() {
        eprintln!("{taken:?}");
    }
    match taken {
        Err(error) => {
            assert!(!error.to_string().is_empty());
            assert_eq!(cache.state_digest(), digest, "{error}: it left a trace");
        }
        Ok(None) => {}
        Ok(Some(sequence)) => use_restored(&mut cache, sequence),
    }
    use_cache(&mut cache, known);
}

/// A sequence that was restored goes on, back, and ends.
fn use_restored(cache: &mut Cache, sequence: SeqHandle) {
    let len = cache.seq_len(sequence).expect("alive");
    if let Ok(fork) = cache.fork(sequence) {
        check(cache);
        fill(cache, fork, 1, len + 5);
        check(cache);
        cache.release(fork).expect("alive");
    }
    fill(cache, sequence, 0, len + 9);
    check(cache);
    let now = cache.seq_len(sequence).expect("alive");
    let _ = cache.truncate(sequence, now.saturating_sub(REWIND));
    check(cache);
    fill(cache, sequence, 2, len + 20);
    check(cache);
    cache.release(sequence).expect("alive");
    check(cache);
}

/// What is cached is found and evicted.
fn use_cache(cache: &mut Cache, known: bool) {
    let longest = cache.plan().limits.max_seq_len;
    for (of, name, salt_from) in [
        (0, [0, 0, 0], 0),
        (1, [1, 0, 0], 8),
        (2, [2, 1, 0], 5),
        (0, [1, 1, 0], 20),
        (1, [0, 2, 3], 0),
    ] {
        let namespace = Name(name).namespace(salt_from);
        // A damaged K or V is not told from a right one.
        if let Some(sequence) = pass(cache, of, longest, namespace, known) {
            cache.release(sequence).expect("alive");
            check(cache);
        }
        cache.set_time_ms(2000 + 10_000 * u64::from(of));
        check(cache);
    }
    cache.clear_cached();
    check(cache);
}
