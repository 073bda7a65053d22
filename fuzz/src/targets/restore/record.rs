//! The records of a save, as `docs/save-format.md` has them, with whatever an input says in them.

use kvpool::plan::Kv;
use xxhash_rust::xxh3::xxh3_64;

use super::input::{Name, Record, Sequence, Span};
use super::texts::{HEAD_DIM, stored, token};

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

/// What was written into a file so far: what a block may lie behind, and what the end counts.
pub(super) struct Written {
    sequence: bool,
    per_block: u32,
    /// Where each block ends.
    ends: Vec<u32>,
    tokens: u64,
    names: u8,
}

impl Written {
    /// Nothing, in a file of a sequence or of prefixes.
    pub(super) fn new(sequence: bool, per_block: u32) -> Self {
        Self { sequence, per_block, ends: Vec::new(), tokens: 0, names: 0 }
    }

    /// The next record.
    pub(super) fn record(&mut self, one: Record) -> Vec<u8> {
        match one {
            Record::Name(name) => {
                self.names = self.names.saturating_add(1);
                record(1, &name.bytes())
            }
            Record::Block { parent, name, tokens, text, class, limit, spans } => {
                let parent = self.parent(parent);
                let name = self.name(name, parent.is_none());
                let tokens = if tokens < 192 {
                    self.per_block
                } else {
                    1 + u32::from(tokens) % self.per_block
                };
                let start = parent.map_or(0, |parent| self.ends[parent]);
                self.ends.push(start + tokens);
                self.tokens += u64::from(tokens);
                let parent = parent.map_or(u32::MAX, |parent| parent as u32);
                let head = [parent, name, tokens, (class % 101).into()];
                record(2, &block(head, (start, text), limit, spans))
            }
            Record::Sequence(sequence) => record(3, &sequence.payload()),
        }
    }

    /// Which block a block lies behind.
    fn parent(&self, parent: u8) -> Option<usize> {
        match usize::from(parent) {
            0 => None,
            _ if self.ends.is_empty() => None,
            // Mostly the one before.
            n if self.sequence || n >= 128 => Some(self.ends.len() - 1),
            n => Some(n % self.ends.len()),
        }
    }

    /// Which namespace a block says; 0 is none.
    fn name(&self, name: u8, first: bool) -> u32 {
        if first && !self.sequence {
            1 + u32::from(name) % u32::from(self.names.max(1))
        } else if name < 200 || self.names == 0 {
            0
        } else {
            1 + u32::from(name) % u32::from(self.names)
        }
    }

    /// The last record.
    pub(super) fn end(&self) -> Vec<u8> {
        let counts = [self.ends.len() as u64, self.tokens, self.names.into()];
        let end: Vec<u8> = counts.iter().flat_map(|count| count.to_le_bytes()).collect();
        record(4, &end)
    }
}

impl Name {
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
