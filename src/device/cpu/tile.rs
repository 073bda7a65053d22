//! Where the keys of a tile lie: from here on nothing knows of modes and blocks.

use super::lanes::{Isa, WIDTH};
use super::task::Task;
use crate::config::ScaleKind;
use crate::plan::{Addressing, E8M8, Kv, SCALE_BYTES, TILE_TOKENS};

/// Keys of a tile, at most.
pub(super) const TILE: usize = TILE_TOKENS as usize;

/// Keys that are looked at together.
pub(super) const QUAD: usize = 4;

/// Quads of a tile.
const QUADS: usize = TILE / QUAD;

/// Keys whose scales are read together: no block is smaller.
const OCTET: usize = 8;

/// One number for each key of a tile.
pub(super) type TileRow = [f32; TILE];

/// Keys `.0` to `.1`, the end excluded, of a tile.
pub(super) type Keys = (usize, usize);

/// The positions `start..start + TILE` (fewer at the end of a sequence). A key's number is its
/// position less `start`, whatever is visible of the tile.
#[derive(Debug)]
pub(super) struct Tile<'a> {
    pool: &'a [u8],
    /// First position.
    pub(super) start: u32,
    /// The keys that any row of the task sees, in ascending order; either range may be empty.
    pub(super) seen: [Keys; 2],
    /// Bytes of one vector.
    pub(super) row_bytes: usize,
    /// Quads of a run: of the keys that lie one behind the other wherever the tile is.
    run_quads: usize,
    /// Whether scales lie in the block.
    scaled: bool,
    /// Bytes from a K vector to its V vector.
    to_v: usize,
    /// Bytes from a K vector's scales to its V vector's.
    scale_to_v: usize,
    /// KV heads of the task.
    kv_heads: usize,
    /// Bytes from a KV head's vectors to the next one's.
    head_stride: usize,
    /// Bytes from a KV head's scales to the next one's.
    scale_head_stride: usize,
    /// Bytes from the task's first KV head's vectors to those of the one under way: at most
    /// `(kv_heads - 1) * head_stride`.
    shift: usize,
    /// The same for scales.
    scale_shift: usize,
    /// Byte offset of each key's K vector of the task's first KV head. Where a key is not seen
    /// this is what it was before. Of every entry `at`, seen or not,
    /// `at + (kv_heads - 1) * head_stride + to_v + row_bytes` is at most `pool.len()`.
    at: [usize; TILE],
    /// Byte offset of the first KV head's K vector's scales, for keys that are seen.
    scale_at: [usize; TILE],
}

/// An offset in the pool as an index. The pool is one slice, so an offset that does not fit
/// fails at the slice's bounds.
#[inline(always)]
fn index(offset: u64) -> usize {
    usize::try_from(offset).unwrap_or(usize::MAX)
}

impl<'a> Tile<'a> {
    /// A tile of no keys.
    ///
    /// # Panics
    /// When not even one vector fits in the pool.
    pub(super) fn new(task: &Task<'a>) -> Self {
        let layout = task.view.layout;
        let row = |kv, head| layout.row(0, task.layer, kv, head, 0);
        let scale = |kv, head| layout.scales(0, task.layer, kv, head, 0);
        let (first, kv_heads) = (task.head, task.kv_heads as usize);
        let row_bytes = index(layout.row_bytes());
        let to_v = index(row(Kv::V, first) - row(Kv::K, first));
        let head_stride = index(row(Kv::K, first + 1) - row(Kv::K, first));
        let last = (kv_heads - 1) * head_stride;
        // A block lies in a tile, or a tile in a block.
        let run_quads = match layout.addressing {
            Addressing::Blocks => (layout.unit_tokens as usize / QUAD).clamp(1, QUADS),
            Addressing::Slot | Addressing::Ring => QUADS,
        };
        assert!(row_bytes <= task.pool.len().saturating_sub(to_v + last), "a vector");
        Self {
            pool: task.pool,
            start: 0,
            seen: [(0, 0); 2],
            row_bytes,
            run_quads,
            scaled: layout.scales_per_row > 0,
            to_v,
            scale_to_v: index(scale(Kv::V, first) - scale(Kv::K, first)),
            kv_heads,
            head_stride,
            scale_head_stride: index(scale(Kv::K, first + 1) - scale(Kv::K, first)),
            shift: 0,
            scale_shift: 0,
            at: [0; TILE],
            scale_at: [0; TILE],
        }
    }

    /// Turns to one KV head, counted from the task's first.
    ///
    /// # Panics
    /// When the task has no such head.
    #[inline(always)]
    pub(super) fn turn_to(&mut self, kv_head: usize) {
        assert!(kv_head < self.kv_heads, "a head of the task");
        self.shift = kv_head * self.head_stride;
        self.scale_shift = kv_head * self.scale_head_stride;
    }

    /// Finds the keys of the tile `start..end` that any row sees.
    ///
    /// # Panics
    /// When one of them does not lie in the pool.
    pub(super) fn locate(&mut self, task: &Task<'a>, start: u32, end: u32) {
        let layout = task.view.layout;
        let scale_bytes = (layout.scales_per_row * SCALE_BYTES) as usize;
        let room = self.pool.len() - self.to_v - (self.kv_heads - 1) * self.head_stride;
        self.start = start;
        self.seen = task.seen().map(|range| keys(range, start, end));
        for (from, to) in self.seen {
            let mut key = from;
            while key < to {
                #[expect(clippy::cast_possible_truncation, reason = "at most 64")]
                let position = start + key as u32;
                let run = task.view.run(position, end) as usize;
                let run = run.min(to - key);
                let (unit, token) = task.view.place(position);
                let at = index(layout.row(unit, task.layer, Kv::K, task.head, token));
                let bytes = run * self.row_bytes;
                assert!(at <= room && bytes <= room - at, "keys in the pool");
                for (i, place) in self.at[key..key + run].iter_mut().enumerate() {
                    *place = at + i * self.row_bytes;
                }
                if self.scaled {
                    let at = index(layout.scales(unit, task.layer, Kv::K, task.head, token));
                    for (i, place) in self.scale_at[key..key + run].iter_mut().enumerate() {
                        *place = at + i * scale_bytes;
                    }
                }
                key += run;
            }
        }
    }

    /// Becomes what another tile of the task is; that one keeps what it has. (They could change places, but
    /// that copies three times as much, and references that change places keep the compiler from
    /// knowing where a tile lies.)
    #[inline(always)]
    pub(super) fn become_like(&mut self, other: &Self) {
        self.start = other.start;
        self.seen = other.seen;
        // Entries of keys that are not seen may stay what they are, but a copy of all has no branches.
        self.at = other.at;
        if self.scaled {
            self.scale_at = other.scale_at;
        }
    }

    /// The keys of the tile that one row sees.
    pub(super) fn seen_by(&self, task: &Task<'_>, row: usize) -> [Keys; 2] {
        self.cut(task.seen_by(row))
    }

    /// The parts of two ranges of positions that lie in the tile, as keys.
    pub(super) fn cut(&self, ranges: [(u32, u32); 2]) -> [Keys; 2] {
        let end = self.start.saturating_add(TILE_TOKENS);
        ranges.map(|range| keys(range, self.start, end))
    }

    /// Whether a row sees all keys that a tile can have.
    #[inline(always)]
    pub(super) fn all_seen_by(&self, task: &Task<'_>, row: usize) -> bool {
        self.seen_by(task, row)[1] == (0, TILE)
    }

    /// The runs of the tile: its blocks, or all of it.
    pub(super) fn runs(&self) -> usize {
        QUADS / self.run_quads
    }

    /// The part of [`Tile::quads`] that lies in one run.
    pub(super) fn quads_of(&self, run: usize) -> [Keys; 2] {
        let (start, end) = (run * self.run_quads, (run + 1) * self.run_quads);
        self.quads().map(|(from, to)| (from.max(start), to.min(end)))
    }

    /// The quads in which there are keys that are seen: two ranges that do not overlap.
    pub(super) fn quads(&self) -> [Keys; 2] {
        let [first, second] = self
            .seen
            .map(|(from, to)| if from < to { (from / QUAD, to.div_ceil(QUAD)) } else { (0, 0) });
        [first, (second.0.max(first.1).min(second.1), second.1)]
    }

    /// The K vector of a key; of one that is not seen, bytes of the pool that mean nothing.
    #[inline(always)]
    pub(super) fn k(&self, key: usize) -> &'a [u8] {
        let at = self.at[key] + self.shift;
        // SAFETY: `at + (kv_heads - 1) * head_stride + to_v + row_bytes` is at most `pool.len()`
        // for every entry of `self.at`: `new` checks it for 0, which they begin as, and `locate`
        // for what it writes. `turn_to` sees to it that `shift` is no more than that.
        unsafe { self.pool.get_unchecked(at..at + self.row_bytes) }
    }

    /// The V vector of a key; of one that is not seen, bytes of the pool that mean nothing.
    #[inline(always)]
    pub(super) fn v(&self, key: usize) -> &'a [u8] {
        let at = self.at[key] + self.shift + self.to_v;
        // SAFETY: as in `k`.
        unsafe { self.pool.get_unchecked(at..at + self.row_bytes) }
    }

    /// Scale `i` of a key's K vector.
    #[inline(always)]
    pub(super) fn k_scale(&self, key: usize, i: usize) -> f32 {
        self.scale(self.scale_at[key] + self.scale_shift, i)
    }

    /// Scale `i` of a key's V vector.
    #[inline(always)]
    pub(super) fn v_scale(&self, key: usize, i: usize) -> f32 {
        self.scale(self.scale_at[key] + self.scale_shift + self.scale_to_v, i)
    }

    /// Scale `i` behind byte `at`.
    #[inline(always)]
    fn scale(&self, at: usize, i: usize) -> f32 {
        let at = at + i * SCALE_BYTES as usize;
        E8M8(u16::from_le_bytes([self.pool[at], self.pool[at + 1]])).to_f32()
    }

    /// Bytes from the K vector of a key to the one meant.
    #[inline(always)]
    fn offset(&self, kv: Kv, kv_head: usize) -> usize {
        kv_head * self.head_stride + if kv == Kv::V { self.to_v } else { 0 }
    }

    /// The keys of a run.
    pub(super) fn keys_of(&self, run: usize) -> Keys {
        (run * self.run_quads * QUAD, (run + 1) * self.run_quads * QUAD)
    }

    /// Asks for the first bytes of every run, so that what must be looked up of their pages is
    /// there when more of them is asked for.
    #[inline(always)]
    pub(super) fn touch<I: Isa>(&self, isa: I) {
        for at in self.at.iter().step_by(self.run_quads * QUAD) {
            let first = self.pool.as_ptr().wrapping_add(*at);
            isa.prefetch(first);
            isa.prefetch(first.wrapping_add(self.to_v));
        }
    }

    /// The vectors of one run and KV head, to be asked for in `passes` pieces for each quad.
    #[inline(always)]
    pub(super) fn run_ahead(&self, kv: Kv, run: usize, kv_head: usize, passes: usize) -> Run<'a> {
        let shift = passes.max(1).ilog2();
        let at = self.at.get(run * self.run_quads * QUAD).copied().unwrap_or(0);
        let nothing = self.seen == [(0, 0); 2];
        Run {
            pool: self.pool,
            at: at + self.offset(kv, kv_head),
            pieces: if nothing { 0 } else { self.run_quads << shift },
            bytes: (QUAD * self.row_bytes) >> shift,
            even: passes.is_power_of_two(),
        }
    }

    /// Asks for the scales of one KV head, counted from the task's first.
    #[inline(always)]
    pub(super) fn prefetch_scales<I: Isa>(&self, isa: I, kv_head: usize) {
        if self.scaled {
            let first = self.pool.as_ptr().wrapping_add(kv_head * self.scale_head_stride);
            // Eight keys' scales fit in a cache line.
            for at in self.scale_at.iter().step_by(OCTET) {
                let at = first.wrapping_add(*at);
                isa.prefetch(at);
                isa.prefetch(at.wrapping_add(self.scale_to_v));
            }
        }
    }

    /// The scales of whole vectors, K's and V's; 1 where there are none, and for keys that are
    /// not seen.
    #[inline(always)]
    pub(super) fn row_scales(&self, task: &Task<'_>, k: &mut TileRow, v: &mut TileRow) {
        match task.view.layout.format.scale {
            Some(ScaleKind::PerTokenHead) => {
                k.fill(1.0);
                v.fill(1.0);
                for (from, to) in self.seen {
                    self.read_scales(self.scale_shift, from, to, k);
                    self.read_scales(self.scale_shift + self.scale_to_v, from, to, v);
                }
            }
            Some(ScaleKind::PerTensor) => {
                k.fill(task.scales.k);
                v.fill(task.scales.v);
            }
            Some(ScaleKind::PerGroup32) | None => {
                k.fill(1.0);
                v.fill(1.0);
            }
        }
    }

    /// The scales of every 32 elements of a key's V vector, or of its K vector. `out`: `[groups]`
    #[inline(always)]
    pub(super) fn group_scales(&self, of_v: bool, key: usize, out: &mut [TileRow]) {
        for (i, out) in out.iter_mut().enumerate() {
            out[key] = if of_v { self.v_scale(key, i) } else { self.k_scale(key, i) };
        }
    }

    /// The bytes of the scales of eight keys that are seen, if these are `N` in a row.
    #[inline(always)]
    pub(super) fn octet_scales<const N: usize>(&self, of_v: bool, key: usize) -> Option<&[u8; N]> {
        let offset = self.scale_shift + if of_v { self.scale_to_v } else { 0 };
        let (first, last) = (self.scale_at[key], self.scale_at[key + OCTET - 1]);
        if last != first + N / OCTET * (OCTET - 1) {
            return None;
        }
        self.pool[first + offset..].first_chunk()
    }

    /// The only scale of each of the keys `from..to`, `offset` bytes behind the first head's K
    /// vector's.
    #[inline(always)]
    fn read_scales(&self, offset: usize, from: usize, to: usize, out: &mut TileRow) {
        let mut key = from;
        while key < to {
            let at = self.scale_at[key] + offset;
            let last = key + OCTET - 1;
            if last < to && self.scale_at[last] + offset == at + 2 * (OCTET - 1) {
                let bytes = self.pool[at..at + 2 * OCTET].as_chunks::<2>().0;
                for (out, bytes) in out[key..=last].iter_mut().zip(bytes) {
                    *out = E8M8(u16::from_le_bytes(*bytes)).to_f32();
                }
                key += OCTET;
            } else {
                out[key] = self.scale(at, 0);
                key += 1;
            }
        }
    }
}

/// What to ask memory for, piece by piece, while something else is computed. The hardware follows
/// long runs by itself, but not fast enough, and blocks in no order not at all; and it has room
/// for so few requests at a time that they are best spread over all of the work that goes on
/// meanwhile.
pub(super) trait Ahead {
    /// Whether one token of a slot is computed on, whose vectors lie one behind the other from tile to
    /// tile: the hardware follows them, if they are read in the order in which they lie.
    const FOLLOWS: bool;

    /// Takes the next piece: asks for its lines, or gives its first byte to the caller, who asks
    /// for a line or two with every few instructions. `None` when there is nothing to do.
    fn piece<I: Isa>(&mut self, isa: I) -> Option<*const u8>;

    /// The same for a caller who knows how many bytes a piece has, best of all when it is compiled.
    #[inline(always)]
    fn piece_of<I: Isa>(&mut self, isa: I, _bytes: usize) -> Option<*const u8> {
        self.piece(isa)
    }
}

/// An [`Ahead`] of a tile.
pub(super) trait AheadOf<'a>: Ahead {
    /// The vectors of one KV head, counted from the task's first, to be asked for in `passes` pieces for
    /// each quad.
    fn of(tile: &Tile<'a>, kv: Kv, kv_head: usize, passes: usize) -> Self;
}

/// Vectors of KV heads, as an [`Ahead`]. A piece is asked for all at once, which is best
/// where one run follows the other; or, if `SPREAD`, line by line, which is best for blocks here
/// and there, where each request takes longer and a burst of them would have to wait. (A type of
/// its own, since a question in the innermost loops costs some per cent.)
#[derive(Debug)]
pub(super) struct Vectors<'a, const SPREAD: bool> {
    pool: &'a [u8],
    /// Byte offsets of the quads. No block ends inside a quad; where a ring does, or a key is not
    /// seen, the wrong bytes are asked for, which is harmless.
    at: [usize; QUADS],
    /// How many of them there are to ask for.
    quads: usize,
    /// The quad that follows the one under way.
    quad: usize,
    /// Byte offset of the next piece of the quad under way.
    first: usize,
    /// How many pieces of it are left. (A number of the piece and a division take longer.)
    left: usize,
    /// Pieces of a quad.
    pieces: usize,
    /// Bytes of a piece.
    bytes: usize,
    /// Whether the pieces are as long as what is read meanwhile.
    even: bool,
}

impl<const SPREAD: bool> Ahead for Vectors<'_, SPREAD> {
    const FOLLOWS: bool = false;

    #[inline(always)]
    fn piece<I: Isa>(&mut self, isa: I) -> Option<*const u8> {
        if self.left == 0 {
            if self.quad >= self.quads.min(QUADS) {
                return None;
            }
            self.first = self.at[self.quad];
            self.quad += 1;
            self.left = self.pieces;
        }
        let first = self.pool.as_ptr().wrapping_add(self.first);
        self.first += self.bytes;
        self.left -= 1;
        if SPREAD && self.even {
            return Some(first);
        }
        prefetch(isa, first, self.bytes);
        None
    }
}

impl<'a, const SPREAD: bool> AheadOf<'a> for Vectors<'a, SPREAD> {
    fn of(tile: &Tile<'a>, kv: Kv, kv_head: usize, passes: usize) -> Self {
        let shift = passes.max(1).ilog2();
        let mut ahead = Self {
            pool: tile.pool,
            at: [0; QUADS],
            quads: if tile.seen == [(0, 0); 2] { 0 } else { QUADS },
            quad: 0,
            first: 0,
            left: 0,
            pieces: 1 << shift,
            bytes: (QUAD * tile.row_bytes) >> shift,
            even: passes.is_power_of_two(),
        };
        let offset = tile.offset(kv, kv_head);
        for (quad, at) in ahead.at.iter_mut().enumerate() {
            *at = tile.at[quad * QUAD] + offset;
        }
        ahead
    }
}

/// Vectors of a slot, of which each lies behind the one before, as an [`Ahead`]: line by line for a caller
/// who knows how many there are, and for others all at once.
#[derive(Debug)]
pub(super) struct Onward<'a> {
    pool: &'a [u8],
    /// Byte offset of the next piece. Behind the end of a ring the wrong bytes are asked for, which is
    /// harmless.
    at: usize,
    /// How many are left.
    pieces: usize,
    /// Bytes of a piece.
    bytes: usize,
}

impl Ahead for Onward<'_> {
    const FOLLOWS: bool = true;

    #[inline(always)]
    fn piece<I: Isa>(&mut self, isa: I) -> Option<*const u8> {
        let first = self.piece_of(isa, self.bytes)?;
        prefetch(isa, first, self.bytes);
        None
    }

    #[inline(always)]
    fn piece_of<I: Isa>(&mut self, _isa: I, bytes: usize) -> Option<*const u8> {
        debug_assert_eq!(bytes, self.bytes, "bytes of a piece");
        self.pieces = self.pieces.checked_sub(1)?;
        let first = self.pool.as_ptr().wrapping_add(self.at);
        self.at = self.at.wrapping_add(bytes);
        Some(first)
    }
}

impl<'a> AheadOf<'a> for Onward<'a> {
    #[inline(always)]
    fn of(tile: &Tile<'a>, kv: Kv, kv_head: usize, passes: usize) -> Self {
        let passes = passes.max(1);
        // The latest keys are all but always the tile's; sinks are few.
        let [_, (from, to)] = tile.seen;
        let before = from * tile.row_bytes;
        Self {
            pool: tile.pool,
            at: tile.at[from % TILE].wrapping_sub(before).wrapping_add(tile.offset(kv, kv_head)),
            pieces: if from < to { QUADS * passes } else { 0 },
            bytes: QUAD * tile.row_bytes / passes,
        }
    }
}

/// The vectors of one KV head in one run, as an [`Ahead`]: line by line, as of [`Vectors`].
#[derive(Debug)]
pub(super) struct Run<'a> {
    pool: &'a [u8],
    /// Byte offset of the next piece.
    at: usize,
    /// How many are left.
    pieces: usize,
    /// Bytes of a piece.
    bytes: usize,
    /// Whether the pieces are as long as what is read meanwhile.
    even: bool,
}

impl Ahead for Run<'_> {
    const FOLLOWS: bool = false;

    #[inline(always)]
    fn piece<I: Isa>(&mut self, isa: I) -> Option<*const u8> {
        self.pieces = self.pieces.checked_sub(1)?;
        let first = self.pool.as_ptr().wrapping_add(self.at);
        self.at += self.bytes;
        if self.even {
            return Some(first);
        }
        prefetch(isa, first, self.bytes);
        None
    }
}

/// Nothing to ask for.
pub(super) const NOTHING: Option<&mut Vectors<'static, false>> = None;

/// Asks for the cache lines of `bytes` bytes. Any address will do.
#[inline(always)]
pub(super) fn prefetch<I: Isa>(isa: I, first: *const u8, bytes: usize) {
    let mut at = 0;
    while at < bytes {
        isa.prefetch(first.wrapping_add(at));
        at += CACHE_LINE;
    }
}

/// The part of a range of positions that lies in the tile `start..end`, as keys.
#[inline(always)]
fn keys((from, to): (u32, u32), start: u32, end: u32) -> Keys {
    let (from, to) = (from.max(start), to.min(end));
    if from < to { ((from - start) as usize, (to - start) as usize) } else { (0, 0) }
}

/// Sets what is outside of two ascending ranges to -∞.
#[inline(always)]
pub(super) fn mask(row: &mut TileRow, seen: [Keys; 2]) {
    let [first, second] = seen;
    if second == (0, TILE) {
        return;
    }
    for (key, score) in row.iter_mut().enumerate() {
        let seen = (first.0 <= key && key < first.1) || (second.0 <= key && key < second.1);
        if !seen {
            *score = f32::NEG_INFINITY;
        }
    }
}

/// Bytes of a cache line.
pub(super) const CACHE_LINE: usize = 64;

const _: () = assert!(TILE.is_multiple_of(WIDTH) && TILE.is_multiple_of(OCTET));
