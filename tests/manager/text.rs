//! Tokens with their namespace, and the K and V that the fake engine computes for them.

use kvpool::cache::{Cache, KeyPart, Namespace, SeqHandle};
use kvpool::plan::Kv;
use kvpool::units::LayerIdx;

use crate::common::mix;

/// A namespace in small numbers, which the model compares by itself. 0 is absent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Ns {
    pub(crate) salt: u8,
    pub(crate) salt_from: u32,
    pub(crate) adapter: u8,
    pub(crate) model: u8,
}

/// Key parts that are easily mistaken for each other: absent, empty, zero, text.
pub(crate) const KEY_PARTS: u8 = 7;

fn key_part(number: u8) -> Option<KeyPart> {
    match number {
        0 => None,
        1 => KeyPart::bytes(b"").ok(),
        2 => KeyPart::bytes(b"a").ok(),
        3 => Some(KeyPart::number(0)),
        4 => KeyPart::bytes(&[0; 8]).ok(),
        5 => KeyPart::bytes(&[0]).ok(),
        _ => Some(KeyPart::number(97)),
    }
}

impl Ns {
    pub(crate) fn options(&self) -> Namespace {
        Namespace {
            salt: key_part(self.salt),
            salt_from: self.salt_from,
            adapter: key_part(self.adapter),
            model: key_part(self.model),
        }
    }

    /// The salt in force at a position: from `salt_from`, rounded down to a block.
    fn salt_at(&self, position: u32, per_block: u32) -> u64 {
        let from = self.salt_from / per_block * per_block;
        if position >= from { self.salt.into() } else { 0 }
    }
}

/// The tokens of a sequence. `hashes[i]` stands for all of them up to and with the i-th, and for
/// what else K and V depend on: adapter, model, epoch, and the salt where it is in force.
#[derive(Clone, Debug)]
pub(crate) struct Text {
    pub(crate) ns: Ns,
    pub(crate) epoch: u64,
    per_block: u32,
    pub(crate) tokens: Vec<u64>,
    pub(crate) hashes: Vec<u64>,
}

/// Tokens from here on are known to the engine alone: no two are the same.
pub(crate) const UNKNOWN: u64 = 1 << 40;

impl Text {
    pub(crate) fn new(ns: Ns, epoch: u64, per_block: u32) -> Self {
        Self { ns, epoch, per_block, tokens: Vec::new(), hashes: Vec::new() }
    }

    pub(crate) fn of(ns: Ns, epoch: u64, per_block: u32, tokens: &[u32]) -> Self {
        let mut text = Self::new(ns, epoch, per_block);
        tokens.iter().for_each(|token| text.push((*token).into()));
        text
    }

    pub(crate) fn len(&self) -> u32 {
        self.tokens.len() as u32
    }

    pub(crate) fn push(&mut self, token: u64) {
        let salt = self.ns.salt_at(self.len(), self.per_block);
        let before = self.hash_before(self.tokens.len());
        self.tokens.push(token);
        self.hashes.push(mix(&[before, token, salt]));
    }

    pub(crate) fn truncate(&mut self, len: u32) {
        self.tokens.truncate(len as usize);
        self.hashes.truncate(len as usize);
    }

    /// What stands for the first `len` tokens.
    pub(crate) fn hash_before(&self, len: usize) -> u64 {
        let root = [self.ns.adapter.into(), self.ns.model.into(), self.epoch];
        len.checked_sub(1).map_or_else(|| mix(&root), |last| self.hashes[last])
    }

    /// What stands for the first `len` tokens and the salt of the block behind them.
    pub(crate) fn block_key(&self, len: u32) -> u64 {
        mix(&[self.hash_before(len as usize), self.ns.salt_at(len, self.per_block)])
    }

    /// The leading tokens whose ids the cache can know.
    pub(crate) fn known(&self) -> u32 {
        self.tokens.iter().take_while(|token| **token < UNKNOWN).count() as u32
    }
}

/// K or V of one position: eight values of a byte each, multiples of 1/16 that every float format
/// holds exactly, for each head.
pub(crate) fn vector(hash: u64, layer: u32, kv: Kv, out: &mut [f32]) {
    for (at, chunk) in (0..).zip(out.chunks_mut(8)) {
        let word = mix(&[hash, u64::from(layer) * 2 + kv as u64, at]);
        for (value, byte) in chunk.iter_mut().zip(word.to_le_bytes()) {
            *value = (f32::from(byte) - 128.0) / 16.0;
        }
    }
}

/// What a format makes of one head's vector.
pub(crate) type Stored = fn(&[f32]) -> Vec<f32>;

/// Checks everything that a sequence's next query may see.
pub(crate) fn check_contents(
    cache: &Cache,
    seq: SeqHandle,
    text: &Text,
    stored: Option<Stored>,
    buffer: &mut Vec<f32>,
) {
    let geometry = &cache.plan().geometry;
    let row = (geometry.num_kv_heads * geometry.head_dim) as usize;
    assert_eq!(cache.seq_len(seq), Ok(text.len()));
    let mut want = [0.0; 256];
    let want = &mut want[..row];
    for layer in 0..geometry.num_layers {
        let window = geometry.windows[layer as usize];
        let from = if window == 0 { 0 } else { (text.len() + 1).saturating_sub(window) };
        let sinks = if window == 0 { 0 } else { geometry.sink_tokens.min(from) };
        for (from, to) in [(0, sinks), (from, text.len())] {
            for kv in [Kv::K, Kv::V] {
                buffer.resize((to - from) as usize * row, 0.0);
                cache.export(seq, LayerIdx(layer), kv, from, to, buffer).expect("held");
                for (position, got) in (from..to).zip(buffer.chunks(row)) {
                    vector(text.hashes[position as usize], layer, kv, want);
                    if let Some(stored) = stored {
                        let dim = geometry.head_dim as usize;
                        let rounded: Vec<f32> = want.chunks(dim).flat_map(stored).collect();
                        want.copy_from_slice(&rounded);
                    }
                    let same = got.iter().zip(&*want).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(
                        same,
                        "{kv:?} of layer {layer}, position {position} of {}: {got:?} instead of \
                         {want:?}",
                        text.len()
                    );
                }
            }
        }
    }
}
