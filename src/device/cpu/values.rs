//! Weighted values of a tile in f32 lanes: added to the accumulators key by key, in ascending
//! order. A key that a row does not see is passed over for it, since 0 times what is stored there
//! need not be 0.

#![expect(
    clippy::needless_range_loop,
    reason = "loops over constant bounds index register arrays; this is the form that unrolls"
)]

use std::marker::PhantomData;

use super::lanes::{Element, Isa, Line, USUAL, WIDTH};
use super::task::Task;
use super::tile::{Ahead, Keys, NOTHING, QUAD, TILE, Tile, TileRow, prefetch};

/// Where the values of a tile are taken from.
pub(super) trait Values<I: Isa>: Copy {
    /// Adds the weighted values of some keys to the accumulators of some heads.
    #[expect(clippy::too_many_arguments, reason = "the operands of one product")]
    fn add<A: Ahead>(
        self,
        isa: I,
        tile: &Tile<'_>,
        ahead: Option<&mut A>,
        keys: Keys,
        heads: usize,
        weights: &[TileRow],
        lines: usize,
        acc: &mut [Line],
    );
}

/// Adds the weighted values of the keys `within` to the accumulators of all heads, and asks for
/// what comes next.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "the operands of one product")]
pub(super) fn all_values<I: Isa>(
    isa: I,
    values: impl Values<I>,
    task: &Task<'_>,
    tile: &Tile<'_>,
    within: Keys,
    ahead: &mut impl Ahead,
    weights: &[TileRow],
    acc: &mut [Line],
) {
    let lines = task.padded_dim / WIDTH;
    let per_row = task.group * lines;
    // What all rows see of the latest keys: the last row begins last, the first one ends first.
    let (_, last) = last_two(tile.seen_by(task, task.rows - 1));
    let (_, first) = last_two(tile.seen_by(task, 0));
    let common = (last.0, first.1);
    let common = if last.0 < last.1 && common.0 < common.1 { common } else { (TILE, TILE) };
    let part = |(from, to): Keys| (from.max(within.0), to.min(within.1));
    for row in 0..task.rows {
        let (sinks, (from, to)) = last_two(tile.seen_by(task, row));
        let (weights, acc) = (&weights[row * task.group..], &mut acc[row * per_row..]);
        let heads = task.group;
        let rest = part((from, to.min(common.0)));
        values.add(isa, tile, NOTHING, part(sinks), heads, weights, lines, acc);
        values.add(isa, tile, NOTHING, rest, heads, weights, lines, acc);
    }
    let heads = weights.len();
    values.add(isa, tile, Some(ahead), part(common), heads, weights, lines, acc);
    for row in 0..task.rows {
        let (_, (from, to)) = last_two(tile.seen_by(task, row));
        let (weights, acc) = (&weights[row * task.group..], &mut acc[row * per_row..]);
        let heads = task.group;
        let rest = part((from.max(common.1), to));
        values.add(isa, tile, NOTHING, rest, heads, weights, lines, acc);
    }
}

/// How often the first of `heads` heads go over the tile's values, or over each quad of them: the
/// lines that are not added up at once are left for the next time. `follows`: [`Ahead::FOLLOWS`]
#[inline(always)]
pub(super) fn passes<I: Isa, E: Element>(tile: &Tile<'_>, heads: usize, follows: bool) -> usize {
    let at_once = match heads {
        1 if takes_eight::<I, E>(tile, follows) => 8,
        1 => 4,
        2 | 3 => 2,
        _ if I::WIDE => 4,
        _ => 1,
    };
    let whole = tile.row_bytes / (E::BYTES * WIDTH);
    (whole / at_once).max(1)
}

/// Whether one head adds up eight lines at once, so that vectors of 128 elements are read whole.
#[inline(always)]
fn takes_eight<I: Isa, E: Element>(tile: &Tile<'_>, follows: bool) -> bool {
    I::WIDE && follows && (tile.row_bytes / (E::BYTES * WIDTH)).is_multiple_of(8)
}

/// Sinks and the rest, by name.
fn last_two([sinks, rest]: [Keys; 2]) -> (Keys, Keys) {
    (sinks, rest)
}

/// The values where they lie in the pool.
#[derive(Debug)]
pub(super) struct Stored<E>(pub(super) PhantomData<E>);

impl<E> Clone for Stored<E> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<E> Copy for Stored<E> {}

impl<I: Isa, E: Element> Values<I> for Stored<E> {
    #[inline(always)]
    fn add<A: Ahead>(
        self,
        isa: I,
        tile: &Tile<'_>,
        mut ahead: Option<&mut A>,
        keys: Keys,
        heads: usize,
        weights: &[TileRow],
        lines: usize,
        acc: &mut [Line],
    ) {
        if keys.0 >= keys.1 {
            return;
        }
        let mut g = 0;
        while heads - g >= 4 {
            let (weights, acc) = (&weights[g..], &mut acc[g * lines..]);
            if I::WIDE {
                values_of::<I, E, A, 4, 4>(isa, tile, ahead.take(), keys, weights, lines, acc);
            } else {
                values_of::<I, E, A, 4, 1>(isa, tile, ahead.take(), keys, weights, lines, acc);
            }
            g += 4;
        }
        while heads - g >= 2 {
            let (weights, acc) = (&weights[g..], &mut acc[g * lines..]);
            values_of::<I, E, A, 2, 2>(isa, tile, ahead.take(), keys, weights, lines, acc);
            g += 2;
        }
        if heads > g {
            let (weights, acc) = (&weights[g..], &mut acc[g * lines..]);
            if takes_eight::<I, E>(tile, A::FOLLOWS) {
                values_of::<I, E, A, 1, 8>(isa, tile, ahead.take(), keys, weights, lines, acc);
            } else {
                values_of::<I, E, A, 1, 4>(isa, tile, ahead.take(), keys, weights, lines, acc);
            }
        }
    }
}

/// Adds the weighted values to the accumulators of `G` heads, `B` lines at a time.
#[inline(always)]
fn values_of<I: Isa, E: Element, A: Ahead, const G: usize, const B: usize>(
    isa: I,
    tile: &Tile<'_>,
    mut ahead: Option<&mut A>,
    keys: Keys,
    weights: &[TileRow],
    lines: usize,
    acc: &mut [Line],
) {
    let whole = tile.row_bytes / (E::BYTES * WIDTH);
    // Of fewer lines accumulators would be read and stored again more often than added to.
    let in_quads = I::WIDE && A::FOLLOWS && B >= 4 && whole > B && whole.is_multiple_of(B);
    match &mut ahead {
        Some(ahead) if in_quads && whole == USUAL && lines == USUAL => {
            quads_of::<I, E, A, G, B, USUAL>(isa, tile, ahead, keys, weights, lines, acc);
        }
        Some(ahead) if in_quads => {
            quads_of::<I, E, A, G, B, 0>(isa, tile, ahead, keys, weights, lines, acc);
        }
        _ => {
            let mut first = 0;
            while first + B <= whole {
                let ahead = ahead.as_deref_mut();
                lines_of::<I, E, G, B>(isa, tile, ahead, keys, first, weights, lines, acc);
                first += B;
            }
            while first < whole {
                lines_of::<I, E, G, 1>(isa, tile, NOTHING, keys, first, weights, lines, acc);
                first += 1;
            }
        }
    }
    if whole < lines {
        for key in keys.0..keys.1.min(TILE) {
            let row = E::load_tail(isa, E::chunks(tile.v(key)).1);
            for g in 0..G {
                let acc = &mut acc[g * lines + whole];
                let sum = isa.fma(isa.splat(weights[g][key]), row, isa.load(acc));
                isa.store(sum, acc);
            }
        }
    }
}

/// Adds all lines of the weighted values, `B` lines at a time, quad after quad: so memory is read in
/// the order in which it lies, and the hardware follows. The order of the additions is that of [`lines_of`].
/// `L`: the number of lines, or 0 for any.
#[inline(always)]
fn quads_of<I: Isa, E: Element, A: Ahead, const G: usize, const B: usize, const L: usize>(
    isa: I,
    tile: &Tile<'_>,
    ahead: &mut A,
    keys: Keys,
    weights: &[TileRow],
    lines: usize,
    acc: &mut [Line],
) {
    let whole = if L == 0 { tile.row_bytes / (E::BYTES * WIDTH) } else { L };
    let lines = if L == 0 { lines } else { L };
    let weights = &weights[..G];
    let (mut key, end) = (keys.0, keys.1.min(TILE));
    while key < end {
        if !key.is_multiple_of(QUAD) || key + QUAD > end {
            // Where a window begins or ends inside.
            let to = end.min((key / QUAD + 1) * QUAD);
            for first in (0..whole).step_by(B) {
                lines_of::<I, E, G, B>(isa, tile, NOTHING, (key, to), first, weights, lines, acc);
            }
            key = to;
            continue;
        }
        // Passes of `B` lines: so one check covers all lines of a pass.
        let mut rows: [&[[E::Chunk; B]]; QUAD] = [&[]; QUAD];
        for k in 0..QUAD {
            rows[k] = &E::chunks(tile.v(key + k)).0.as_chunks().0[..whole / B];
        }
        for pass in 0..whole / B {
            let first = pass * B;
            let piece = if L == 0 {
                ahead.piece(isa)
            } else {
                ahead.piece_of(isa, QUAD * B * WIDTH * E::BYTES)
            };
            let mut sums = [[isa.splat(0.0); B]; G];
            for g in 0..G {
                let acc = &acc[g * lines + first..][..B];
                for b in 0..B {
                    sums[g][b] = isa.load(&acc[b]);
                }
            }
            for k in 0..QUAD {
                let row = &rows[k][pass];
                if let Some(first) = piece {
                    let bytes = B * WIDTH * E::BYTES;
                    prefetch(isa, first.wrapping_add(k * bytes), bytes);
                }
                for b in 0..B {
                    let value = value_of::<I, E>(isa, tile, key + k, first + b, &row[b]);
                    for g in 0..G {
                        sums[g][b] = isa.fma(isa.splat(weights[g][key + k]), value, sums[g][b]);
                    }
                }
            }
            for g in 0..G {
                let acc = &mut acc[g * lines + first..][..B];
                for b in 0..B {
                    isa.store(sums[g][b], &mut acc[b]);
                }
            }
        }
        key += QUAD;
    }
}

/// A line of a key's values, times its scale if it has one of its own.
#[inline(always)]
fn value_of<I: Isa, E: Element>(
    isa: I,
    tile: &Tile<'_>,
    key: usize,
    line: usize,
    chunk: &E::Chunk,
) -> I::V {
    let value = E::load(isa, chunk);
    if E::GROUPED { isa.mul(value, isa.splat(tile.v_scale(key, line / 2))) } else { value }
}

/// Adds lines `first..first + B` of the weighted values to the accumulators of `G` heads.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "the operands of one product")]
fn lines_of<I: Isa, E: Element, const G: usize, const B: usize>(
    isa: I,
    tile: &Tile<'_>,
    mut ahead: Option<&mut impl Ahead>,
    keys: Keys,
    first: usize,
    weights: &[TileRow],
    lines: usize,
    acc: &mut [Line],
) {
    let weights = &weights[..G];
    let mut sums = [[isa.splat(0.0); B]; G];
    for g in 0..G {
        for b in 0..B {
            sums[g][b] = isa.load(&acc[g * lines + first + b]);
        }
    }
    let mut piece = None;
    for key in keys.0..keys.1.min(TILE) {
        if let Some(ahead) = &mut ahead {
            if key.is_multiple_of(QUAD) {
                piece = ahead.piece(isa);
            }
            if let Some(first) = piece {
                let bytes = B * WIDTH * E::BYTES;
                prefetch(isa, first.wrapping_add(key % QUAD * bytes), bytes);
            }
        }
        let row = &E::chunks(tile.v(key)).0[first..first + B];
        for b in 0..B {
            let value = value_of::<I, E>(isa, tile, key, first + b, &row[b]);
            for g in 0..G {
                sums[g][b] = isa.fma(isa.splat(weights[g][key]), value, sums[g][b]);
            }
        }
    }
    for g in 0..G {
        for b in 0..B {
            isa.store(sums[g][b], &mut acc[g * lines + first + b]);
        }
    }
}
