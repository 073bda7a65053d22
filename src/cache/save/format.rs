//! The layout of a save, byte by byte: `docs/save-format.md` describes the same.
//!
//! All numbers are little-endian. A header, then records: a frame of 16 bytes, a payload, the
//! checksum of both. K and V lie by layer in the order of the model, whatever groups the plan has.

pub(super) use xxhash_rust::xxh3::Xxh3 as Checksums;
use xxhash_rust::xxh3::xxh3_64;

use crate::cache::prefix::{KeyPart, NameWords};
use crate::config::{Format, MAX_TOKENS_PER_BLOCK, MIN_TOKENS_PER_BLOCK, RopeStyle, ScaleKind};
use crate::error::SaveError;
use crate::plan::{GroupLayout, NO_BLOCK, Plan, Rope, SCALE_BYTES};

/// The first bytes of every save.
pub(super) const MAGIC: [u8; 8] = *b"KVPOOLSV";

/// The version of the format.
pub(super) const VERSION: u32 = 1;

/// Bytes of the header before its lists.
pub(super) const FIXED: usize = 128;

/// Bytes of a checksum.
pub(super) const CHECKSUM: usize = 8;

/// Bytes before a payload: kind, 0, the payload's length in 64 bits.
pub(super) const FRAME: usize = 16;

/// Bytes of a namespace: salt, adapter, model.
pub(super) const NAME_BYTES: usize = 144;

/// Bytes of a block's payload before its tokens.
pub(super) const BLOCK_FIXED: usize = 32;

/// Bytes of a sequence's payload before its tokens.
pub(super) const SEQUENCE_FIXED: usize = 32 + NAME_BYTES + 4 * 24;

/// Bytes of the last payload.
pub(super) const END_BYTES: usize = 24;

/// Bytes of a header's text that cannot be ours.
pub(super) const MAX_HEADER: usize = 1 << 20;

/// What a save holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Holds {
    Sequence = 1,
    Prefixes = 2,
}

impl Holds {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Sequence => "a sequence",
            Self::Prefixes => "prefixes",
        }
    }
}

/// Kinds of records.
pub(super) const NAME: u32 = 1;
pub(super) const BLOCK: u32 = 2;
pub(super) const SEQUENCE: u32 = 3;
pub(super) const END: u32 = 4;

/// The header's numbers that do not follow from the plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) holds: Holds,
    /// Tokens of a whole block.
    pub(super) block_tokens: u32,
    /// Whether prefixes with a salt were left out.
    pub(super) unsalted_only: bool,
    pub(super) epoch: u64,
    pub(super) model: Option<KeyPart>,
}

/// Puts a number at the end.
pub(super) fn put32(out: &mut Vec<u8>, number: u32) {
    out.extend_from_slice(&number.to_le_bytes());
}

/// Puts a number at the end.
pub(super) fn put64(out: &mut Vec<u8>, number: u64) {
    out.extend_from_slice(&number.to_le_bytes());
}

/// The number at a place, which must be inside.
pub(super) fn get32(bytes: &[u8], at: usize) -> u32 {
    let four = bytes.get(at..at + 4).and_then(|four| four.first_chunk());
    four.map_or(0, |four| u32::from_le_bytes(*four))
}

/// The number at a place, which must be inside.
pub(super) fn get64(bytes: &[u8], at: usize) -> u64 {
    let eight = bytes.get(at..at + 8).and_then(|eight| eight.first_chunk());
    eight.map_or(0, |eight| u64::from_le_bytes(*eight))
}

/// The checksum of some bytes.
pub(super) fn checksum(bytes: &[u8]) -> u64 {
    xxh3_64(bytes)
}

fn element_number(plan: &Plan) -> u32 {
    match plan.format.element {
        Format::F32 => 0,
        Format::F16 => 1,
        Format::Bf16 => 2,
        Format::Int8 => 3,
    }
}

fn scale_number(plan: &Plan) -> u32 {
    match plan.format.scale {
        None => 0,
        Some(ScaleKind::PerTokenHead) => 1,
        Some(ScaleKind::PerTensor) => 2,
        Some(ScaleKind::PerGroup32) => 3,
    }
}

/// Style, rotated elements and tables of the plan's rotation.
fn rope_numbers(rope: Option<&Rope>) -> [u32; 3] {
    let Some(rope) = rope else { return [0; 3] };
    let style = match rope.style {
        RopeStyle::Halves => 1,
        RopeStyle::Pairs => 2,
    };
    [style, rope.dims, u32::try_from(rope.tables.len()).unwrap_or(u32::MAX)]
}

/// The numbers of a plan that a save must have too, with their names, in the order of the header.
fn plan_numbers(plan: &Plan) -> [(&'static str, u32); 7] {
    let geometry = &plan.geometry;
    [
        ("element format (0 f32, 1 f16, 2 bf16, 3 int8)", element_number(plan)),
        ("scale form (0 none, 1 per-token-head, 2 per-tensor, 3 per-group-32)", scale_number(plan)),
        ("number of layers", geometry.num_layers),
        ("number of query heads", geometry.num_q_heads),
        ("number of KV heads", geometry.num_kv_heads),
        ("head_dim", geometry.head_dim),
        ("number of sink tokens", geometry.sink_tokens),
    ]
}

/// The header of a save of this plan.
pub(super) fn header(plan: &Plan, header: &Header) -> Vec<u8> {
    let mut out = Vec::new();
    out.extend_from_slice(&MAGIC);
    put32(&mut out, VERSION);
    put32(&mut out, 0);
    put32(&mut out, header.holds as u32);
    plan_numbers(plan).iter().for_each(|(_, number)| put32(&mut out, *number));
    put32(&mut out, header.block_tokens);
    put32(&mut out, if header.unsalted_only { 2 } else { 1 });
    put64(&mut out, header.epoch);
    let model = header.model.as_ref().map_or(&[0; 6], KeyPart::words);
    model.iter().for_each(|word| put64(&mut out, *word));
    rope_numbers(plan.rope.as_ref()).iter().for_each(|number| put32(&mut out, *number));
    put32(&mut out, 0);
    debug_assert_eq!(out.len(), FIXED);
    plan.geometry.windows.iter().for_each(|window| put32(&mut out, *window));
    for scales in &plan.static_scales {
        put32(&mut out, scales.k.to_bits());
        put32(&mut out, scales.v.to_bits());
    }
    for table in plan.rope.iter().flat_map(|rope| &rope.tables) {
        put64(&mut out, table.factor.to_bits());
        table.frequencies.iter().for_each(|turn| put64(&mut out, turn.to_bits()));
    }
    // The length of all of it, which is small.
    let len = u32::try_from(out.len() + CHECKSUM).unwrap_or(u32::MAX);
    out[12..16].copy_from_slice(&len.to_le_bytes());
    let sum = checksum(&out);
    put64(&mut out, sum);
    out
}

/// Reads a header whose checksum is right, and compares it with a plan's.
pub(super) fn read_header(plan: &Plan, bytes: &[u8]) -> Result<Header, SaveError> {
    let damaged = |problem| SaveError::Damaged { at: 0, problem };
    let holds = match get32(bytes, 16) {
        1 => Holds::Sequence,
        2 => Holds::Prefixes,
        _ => return Err(damaged("an unknown kind of save")),
    };
    for (at, (what, expected)) in plan_numbers(plan).into_iter().enumerate() {
        let found = get32(bytes, 20 + 4 * at);
        if found != expected {
            let (found, expected) = (found.into(), expected.into());
            return Err(SaveError::Differs { what, found, expected });
        }
    }
    let block_tokens = get32(bytes, 48);
    // Smaller blocks than any cache has are more of them than `Plan::save_bytes` counts.
    let least = MIN_TOKENS_PER_BLOCK.min(plan.tokens_per_block);
    if !block_tokens.is_power_of_two() || !(least..=MAX_TOKENS_PER_BLOCK).contains(&block_tokens) {
        return Err(damaged("an impossible number of tokens of a block"));
    }
    let unsalted_only = match get32(bytes, 52) {
        1 => false,
        2 => true,
        _ => return Err(damaged("an unknown policy of salts")),
    };
    let mut model = [0; 6];
    for (at, word) in model.iter_mut().enumerate() {
        *word = get64(bytes, 64 + 8 * at);
    }
    let model = KeyPart::from_words(&model).ok_or(damaged("a model id that cannot be"))?;
    let names = ["style of rotation (0 none, 1 halves, 2 pairs)", "rotated elements", "rotations"];
    let rope = rope_numbers(plan.rope.as_ref());
    for (at, (what, expected)) in names.into_iter().zip(rope).enumerate() {
        let found = get32(bytes, 112 + 4 * at);
        if found != expected {
            let (found, expected) = (found.into(), expected.into());
            return Err(SaveError::Differs { what, found, expected });
        }
    }
    let epoch = get64(bytes, 56);
    let own = Header { holds, block_tokens, unsalted_only, epoch, model };
    compare_lists(plan, bytes, &header(plan, &own))?;
    Ok(own)
}

/// Compares what follows the fixed part.
fn compare_lists(plan: &Plan, found: &[u8], expected: &[u8]) -> Result<(), SaveError> {
    if found.len() != expected.len() {
        return Err(SaveError::Damaged { at: 0, problem: "a length that does not fit" });
    }
    let windows = FIXED + 4 * plan.geometry.windows.len();
    let scales = windows + 8 * plan.static_scales.len();
    let parts = [
        ("attention window of a layer", FIXED..windows, 4),
        ("static INT8 scale of a layer (bits of an f32)", windows..scales, 4),
        ("rotation of a pair (bits of an f64)", scales..expected.len() - CHECKSUM, 8),
    ];
    for (what, part, bytes) in parts {
        let at = part
            .clone()
            .step_by(bytes)
            .find(|at| found[*at..*at + bytes] != expected[*at..*at + bytes]);
        if let Some(at) = at {
            let number = |of: &[u8]| if bytes == 4 { get32(of, at).into() } else { get64(of, at) };
            let (found, expected) = (number(found), number(expected));
            return Err(SaveError::Differs { what, found, expected });
        }
    }
    Ok(())
}

/// Sizes of what one layer stores of some tokens. `[K, V][kv head][token][head_dim]`, then the
/// scales.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) layers: usize,
    heads: usize,
    row: usize,
    scales: usize,
}

impl Shape {
    pub(super) fn of(plan: &Plan) -> Self {
        let geometry = &plan.geometry;
        let scales = plan.format.scales_per_row(geometry.head_dim) * SCALE_BYTES;
        Self {
            layers: geometry.num_layers as usize,
            heads: geometry.num_kv_heads as usize,
            row: (geometry.head_dim * plan.format.element_bytes()) as usize,
            scales: scales as usize,
        }
    }

    /// Bytes of so many tokens of one layer.
    pub(super) const fn layer_bytes(&self, tokens: usize) -> usize {
        2 * self.heads * tokens * (self.row + self.scales)
    }

    /// Bytes of the largest record of a block.
    pub(super) const fn max_record(&self, tokens: usize) -> usize {
        FRAME
            + BLOCK_FIXED
            + self.head_bytes(tokens)
            + self.layers * self.layer_bytes(tokens)
            + CHECKSUM
    }

    /// Bytes of tokens and spans.
    pub(super) const fn head_bytes(&self, tokens: usize) -> usize {
        4 * tokens + 4 * self.layers
    }
}

/// Tokens of a block that a layer has: those below `head`, and those from `from` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) head: u16,
    pub(super) from: u16,
}

impl Span {
    pub(super) const WHOLE: Self = Self { head: 0, from: 0 };

    /// Of `tokens` from position `start` on, those below position `head` and from position `from`
    /// on.
    pub(super) fn new(start: u32, tokens: u32, head: u32, from: u32) -> Self {
        let within = |position: u32| position.saturating_sub(start).min(tokens);
        let (head, from) = (within(head), within(from));
        if head >= from {
            return Self::WHOLE;
        }
        // At most `MAX_TOKENS_PER_BLOCK`.
        let narrow = |tokens: u32| u16::try_from(tokens).unwrap_or(u16::MAX);
        Self { head: narrow(head), from: narrow(from) }
    }

    /// Whether none of the tokens is there.
    pub(super) fn is_empty(self, tokens: u32) -> bool {
        self.head == 0 && u32::from(self.from) >= tokens
    }

    /// Whether all tokens of a range are there.
    pub(super) fn covers(self, range: &std::ops::Range<u32>) -> bool {
        range.end <= u32::from(self.head) || range.start >= u32::from(self.from)
    }

    /// The parts of a range that are there.
    pub(super) fn parts(self, range: &std::ops::Range<u32>) -> [std::ops::Range<u32>; 2] {
        let (head, from) = (u32::from(self.head), u32::from(self.from));
        [range.start..range.end.min(head), range.start.max(from)..range.end]
    }
}

/// The numbers of a block's record.
#[derive(Clone, Copy, Debug)]
pub(super) struct BlockHead {
    /// Number of the record before it on its chain; [`NO_BLOCK`] for none.
    pub(super) parent: u32,
    /// Number of the namespace that begins here; 0 for none.
    pub(super) name: u32,
    pub(super) tokens: u32,
    /// Its priority.
    pub(super) class: u8,
    pub(super) duration_ms: u64,
    /// Of these, what is left.
    pub(super) left_ms: u64,
}

impl BlockHead {
    /// A block of a sequence: nothing but its place on the chain.
    pub(super) const fn of_sequence(parent: u32, tokens: u32) -> Self {
        Self { parent, name: 0, tokens, class: 0, duration_ms: u64::MAX, left_ms: u64::MAX }
    }

    pub(super) fn put(&self, out: &mut Vec<u8>) {
        put32(out, self.parent);
        put32(out, self.name);
        put32(out, self.tokens);
        put32(out, self.class.into());
        put64(out, self.duration_ms);
        put64(out, self.left_ms);
    }

    pub(super) fn get(payload: &[u8]) -> Self {
        Self {
            parent: get32(payload, 0),
            name: get32(payload, 4),
            tokens: get32(payload, 8),
            class: u8::try_from(get32(payload, 12)).unwrap_or(u8::MAX),
            duration_ms: get64(payload, 16),
            left_ms: get64(payload, 24),
        }
    }

    pub(super) const fn parent(&self) -> Option<u32> {
        if self.parent == NO_BLOCK { None } else { Some(self.parent) }
    }
}

/// Puts salt, adapter and model.
pub(super) fn put_name(out: &mut Vec<u8>, words: &NameWords) {
    words.iter().for_each(|word| put64(out, *word));
}

/// Salt, adapter and model at a place; `None` where no key part is like that.
pub(super) fn get_name(bytes: &[u8], at: usize) -> Option<NameWords> {
    let mut words = [0; NAME_BYTES / 8];
    for (n, word) in words.iter_mut().enumerate() {
        *word = get64(bytes, at + 8 * n);
    }
    let parts = words.as_chunks::<6>().0;
    parts.iter().all(|part| KeyPart::from_words(part).is_some()).then_some(words)
}

/// Tokens of a record that lie one behind the other in a unit.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    pub(super) unit: u32,
    pub(super) unit_token: u32,
    /// The first of them in the record.
    pub(super) token: u32,
    pub(super) len: u32,
}

impl Shape {
    /// Calls `each` with every run of bytes of one layer's tokens: where it lies in the pool, and
    /// where in the layer's part of a record of `tokens` tokens.
    pub(super) fn each_piece(
        &self,
        layout: &GroupLayout,
        layer: u32,
        run: Run,
        tokens: u32,
        each: &mut dyn FnMut(u64, std::ops::Range<usize>) -> Result<(), SaveError>,
    ) -> Result<(), SaveError> {
        use crate::plan::Kv;
        let Run { unit, unit_token, token, len } = run;
        let rows = 2 * self.heads * tokens as usize;
        let scales_at = rows * self.row;
        if len == layout.unit_tokens && len == tokens {
            each(layout.row(unit, layer, Kv::K, 0, 0), 0..scales_at)?;
            if self.scales > 0 {
                let end = scales_at + rows * self.scales;
                each(layout.scales(unit, layer, Kv::K, 0, 0), scales_at..end)?;
            }
            return Ok(());
        }
        for (kind, kv) in [Kv::K, Kv::V].into_iter().enumerate() {
            for head in 0..layout.num_kv_heads {
                let first = (kind * self.heads + head as usize) * tokens as usize + token as usize;
                let range = |at: usize, bytes: usize| {
                    at + first * bytes..at + (first + len as usize) * bytes
                };
                each(layout.row(unit, layer, kv, head, unit_token), range(0, self.row))?;
                if self.scales > 0 {
                    let at = layout.scales(unit, layer, kv, head, unit_token);
                    each(at, range(scales_at, self.scales))?;
                }
            }
        }
        Ok(())
    }
}
