//! Where the visible keys of a tile lie: from here on nothing knows of modes and blocks.

use super::lanes::Isa;
use super::task::Task;
use crate::config::ScaleKind;
use crate::plan::{E8M8, Kv, SCALE_BYTES, TILE_TOKENS};

/// Keys of a tile, at most.
pub(super) const TILE: usize = TILE_TOKENS as usize;

/// The scores of a tile of one query head.
pub(super) type TileRow = [f32; TILE];

/// Where a tile's visible keys lie.
#[derive(Debug)]
pub(super) struct Tile<'a> {
    pool: &'a [u8],
    /// Visible keys.
    pub(super) keys: usize,
    /// Bytes of one vector.
    pub(super) row_bytes: usize,
    /// Whether scales lie in the block.
    scaled: bool,
    /// Bytes from a K vector to its V vector.
    to_v: usize,
    /// Bytes from a K vector's scales to its V vector's.
    pub(super) scale_to_v: usize,
    /// Byte offset of each key's vector, in ascending position. `[keys]`
    at: [usize; TILE],
    /// Byte offset of the vector's scales. `[keys]`
    pub(super) scale_at: [usize; TILE],
}

/// An offset in the pool as an index. The pool is one slice, so an offset that does not fit
/// fails at the slice's bounds.
#[inline(always)]
fn index(offset: u64) -> usize {
    usize::try_from(offset).unwrap_or(usize::MAX)
}

impl<'a> Tile<'a> {
    pub(super) fn new(task: &Task<'a>) -> Self {
        let layout = task.view.layout;
        let row = |kv| layout.row(0, task.layer, kv, task.head, 0);
        let scale = |kv| layout.scales(0, task.layer, kv, task.head, 0);
        Self {
            pool: task.pool,
            keys: 0,
            row_bytes: index(layout.row_bytes()),
            scaled: layout.scales_per_row > 0,
            to_v: index(row(Kv::V) - row(Kv::K)),
            scale_to_v: index(scale(Kv::V) - scale(Kv::K)),
            at: [0; TILE],
            scale_at: [0; TILE],
        }
    }

    /// Lists the visible keys of the tile `start..end`.
    pub(super) fn locate(&mut self, task: &Task<'a>, start: u32, end: u32) {
        let layout = task.view.layout;
        let scale_bytes = (layout.scales_per_row * SCALE_BYTES) as usize;
        self.keys = 0;
        for (mut position, to) in task.visible_in(start, end) {
            while position < to {
                let run = task.view.run(position, to);
                let (unit, token) = task.view.place(position);
                let at = index(layout.row(unit, task.layer, Kv::K, task.head, token));
                let scale_at = index(layout.scales(unit, task.layer, Kv::K, task.head, token));
                let places = self.keys..self.keys + run as usize;
                for (i, key) in places.clone().enumerate() {
                    self.at[key] = at + i * self.row_bytes;
                    self.scale_at[key] = scale_at + i * scale_bytes;
                }
                self.keys = places.end;
                position += run;
            }
        }
    }

    /// The K vector of a key.
    #[inline(always)]
    pub(super) fn k(&self, key: usize) -> &'a [u8] {
        &self.pool[self.at[key]..][..self.row_bytes]
    }

    /// The V vector of a key.
    #[inline(always)]
    pub(super) fn v(&self, key: usize) -> &'a [u8] {
        &self.pool[self.at[key] + self.to_v..][..self.row_bytes]
    }

    /// Scale `i` behind byte `at`.
    #[inline(always)]
    pub(super) fn scale(&self, at: usize, i: usize) -> f32 {
        let at = at + i * SCALE_BYTES as usize;
        E8M8(u16::from_le_bytes([self.pool[at], self.pool[at + 1]])).to_f32()
    }

    /// Asks for a key's K vector before it is needed. The hardware follows long runs by itself;
    /// blocks in no order it cannot.
    #[inline(always)]
    pub(super) fn prefetch_k<I: Isa>(&self, isa: I, key: usize) {
        if key < self.keys {
            prefetch(isa, self.k(key));
            // Eight keys' scales fit in a cache line, and eight keys are the smallest block.
            if key.is_multiple_of(8) && self.scaled {
                isa.prefetch(&self.pool[self.scale_at[key]]);
                isa.prefetch(&self.pool[self.scale_at[key] + self.scale_to_v]);
            }
        }
    }

    /// The same for its V vector.
    #[inline(always)]
    pub(super) fn prefetch_v<I: Isa>(&self, isa: I, key: usize) {
        if key < self.keys {
            prefetch(isa, self.v(key));
        }
    }

    /// The scales of whole vectors, K's and V's; 1 where there are none, and for no key.
    #[inline(always)]
    pub(super) fn row_scales(&self, task: &Task<'_>, k: &mut TileRow, v: &mut TileRow) {
        k.fill(1.0);
        v.fill(1.0);
        match task.view.layout.format.scale {
            Some(ScaleKind::PerTokenHead) => {
                for key in 0..self.keys {
                    k[key] = self.scale(self.scale_at[key], 0);
                    v[key] = self.scale(self.scale_at[key] + self.scale_to_v, 0);
                }
            }
            Some(ScaleKind::PerTensor) => {
                k[..self.keys].fill(task.scales.k);
                v[..self.keys].fill(task.scales.v);
            }
            Some(ScaleKind::PerGroup32) | None => {}
        }
    }
}

/// Bytes of a cache line.
const CACHE_LINE: usize = 64;

/// Asks for all cache lines of a vector.
#[inline(always)]
fn prefetch<I: Isa>(isa: I, row: &[u8]) {
    for line in row.chunks(CACHE_LINE) {
        isa.prefetch(&line[0]);
    }
}
