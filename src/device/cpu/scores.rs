//! q·k of a tile in f32 lanes.
//!
//! A score is summed in 16 lanes over the elements, and the lanes in a fixed tree, whichever
//! other heads and keys are computed beside it.

#![expect(
    clippy::needless_range_loop,
    reason = "loops over constant bounds index register arrays; this is the form that unrolls"
)]

use super::lanes::{Element, Isa, Line, USUAL, WIDTH};
use super::tile::{Ahead, Keys, QUAD, Tile, TileRow, prefetch};

/// q·k of all heads with some quads of the tile, in two ranges: what is computed for keys that are
/// not seen means nothing.
#[inline(always)]
pub(super) fn all_scores<I: Isa, E: Element, A: Ahead>(
    isa: I,
    tile: &Tile<'_>,
    quads: [Keys; 2],
    ahead: &mut A,
    q: &[Line],
    lines: usize,
    scores: &mut [TileRow],
) {
    let is_usual = lines == USUAL && tile.row_bytes == USUAL * WIDTH * E::BYTES;
    if I::WIDE && A::FOLLOWS && is_usual {
        all_scores_of::<I, E, A, USUAL>(isa, tile, quads, ahead, q, lines, scores);
    } else {
        all_scores_of::<I, E, A, 0>(isa, tile, quads, ahead, q, lines, scores);
    }
}

/// The same, with vectors of `L` whole lines; of any length if that is 0.
#[inline(always)]
fn all_scores_of<I: Isa, E: Element, A: Ahead, const L: usize>(
    isa: I,
    tile: &Tile<'_>,
    quads: [Keys; 2],
    ahead: &mut A,
    q: &[Line],
    lines: usize,
    scores: &mut [TileRow],
) {
    let mut ahead = Some(ahead);
    let heads = scores.len();
    let mut g = 0;
    while heads - g >= 4 {
        let (q, scores) = (&q[g * lines..], &mut scores[g..]);
        if I::WIDE {
            scores_of::<I, E, A, 4, 4, L>(isa, tile, quads, ahead.take(), q, lines, scores);
        } else if E::GROUPED {
            scores_of::<I, E, A, 4, 1, L>(isa, tile, quads, ahead.take(), q, lines, scores);
        } else {
            scores_of::<I, E, A, 4, 2, L>(isa, tile, quads, ahead.take(), q, lines, scores);
        }
        g += 4;
    }
    while heads - g >= 2 {
        let (q, scores) = (&q[g * lines..], &mut scores[g..]);
        if E::GROUPED && !I::WIDE {
            scores_of::<I, E, A, 2, 2, L>(isa, tile, quads, ahead.take(), q, lines, scores);
        } else {
            scores_of::<I, E, A, 2, 4, L>(isa, tile, quads, ahead.take(), q, lines, scores);
        }
        g += 2;
    }
    if heads > g {
        let (q, scores) = (&q[g * lines..], &mut scores[g..]);
        scores_of::<I, E, A, 1, 4, 0>(isa, tile, quads, ahead.take(), q, lines, scores);
    }
}

/// q·k of `G` heads with some quads of the tile, `K` keys at a time: a whole quad where pieces are
/// handed out.
#[inline(always)]
fn scores_of<I: Isa, E: Element, A: Ahead, const G: usize, const K: usize, const L: usize>(
    isa: I,
    tile: &Tile<'_>,
    quads: [Keys; 2],
    mut ahead: Option<&mut A>,
    q: &[Line],
    lines: usize,
    scores: &mut [TileRow],
) {
    let mut heads: [&[Line]; G] = [&[]; G];
    for g in 0..G {
        heads[g] = &q[g * lines..][..lines];
    }
    let scores = &mut scores[..G];
    for (from, to) in quads {
        for quad in from..to {
            let key = quad * QUAD;
            let mut piece = None;
            if let Some(ahead) = &mut ahead {
                piece = if L == 0 {
                    ahead.piece(isa)
                } else {
                    ahead.piece_of(isa, QUAD * L * WIDTH * E::BYTES)
                };
            }
            for key in (key..key + QUAD).step_by(K) {
                let sums = products::<I, E, A, G, K, L>(isa, tile, piece, key, &heads);
                for g in 0..G {
                    scores[g][key..key + K].copy_from_slice(&sums[g]);
                }
            }
        }
    }
}

/// q·k of `G` heads with `K` keys. Asks for as many bytes from `piece` on as it reads.
#[inline(always)]
fn products<I: Isa, E: Element, A: Ahead, const G: usize, const K: usize, const L: usize>(
    isa: I,
    tile: &Tile<'_>,
    piece: Option<*const u8>,
    key: usize,
    heads: &[&[Line]; G],
) -> [[f32; K]; G] {
    let mut rows: [&[E::Chunk]; K] = [&[]; K];
    let mut rests: [&[u8]; K] = [&[]; K];
    for k in 0..K {
        (rows[k], rests[k]) = E::chunks(tile.k(key + k));
    }
    let whole = if L == 0 { rows[0].len() } else { L };
    let mut heads = *heads;
    let mut tails: [&[Line]; G] = [&[]; G];
    for g in 0..G {
        (heads[g], tails[g]) = heads[g].split_at(whole);
    }
    for k in 0..K {
        rows[k] = &rows[k][..whole];
    }
    let mut acc = [[isa.splat(0.0); K]; G];
    if !I::WIDE && !E::GROUPED && G * K > 4 {
        // There are registers for eight accumulators of eight lanes: half of every line, and then
        // the other. (And none for a piece's place: `split_with`.)
        let lower = half_products::<I, E, G, K, false>(isa, &rows, &heads);
        let upper = half_products::<I, E, G, K, true>(isa, &rows, &heads);
        for g in 0..G {
            for k in 0..K {
                acc[g][k] = isa.join(lower[g][k], upper[g][k]);
            }
        }
    } else if E::GROUPED {
        for pair in 0..whole / 2 {
            if let Some(first) = piece {
                let bytes = 2 * K * WIDTH * E::BYTES;
                prefetch(isa, first.wrapping_add(pair * bytes), bytes);
            }
            for k in 0..K {
                let scale = isa.splat(tile.k_scale(key + k, pair));
                let first = E::load(isa, &rows[k][2 * pair]);
                let second = E::load(isa, &rows[k][2 * pair + 1]);
                for g in 0..G {
                    let sum = isa.mul(isa.load(&heads[g][2 * pair]), first);
                    let sum = isa.fma(isa.load(&heads[g][2 * pair + 1]), second, sum);
                    acc[g][k] = isa.fma(sum, scale, acc[g][k]);
                }
            }
        }
    } else if G == 1 && I::WIDE && A::FOLLOWS {
        // Vector by vector, in the order in which they lie. (With a length that the compiler knows it
        // would read a vector's last lines first.)
        for k in 0..K {
            for (q, chunk) in heads[0].iter().zip(rows[k]) {
                acc[0][k] = isa.fma(isa.load(q), E::load(isa, chunk), acc[0][k]);
            }
        }
    } else {
        for i in 0..whole {
            if let Some(first) = piece {
                let bytes = K * WIDTH * E::BYTES;
                prefetch(isa, first.wrapping_add(i * bytes), bytes);
            }
            for k in 0..K {
                let row = E::load(isa, &rows[k][i]);
                for g in 0..G {
                    acc[g][k] = isa.fma(isa.load(&heads[g][i]), row, acc[g][k]);
                }
            }
        }
    }
    if L == 0 && !E::GROUPED && !rests[0].is_empty() {
        for k in 0..K {
            let row = E::load_tail(isa, rests[k]);
            for g in 0..G {
                acc[g][k] = isa.fma(isa.load(&tails[g][0]), row, acc[g][k]);
            }
        }
    }
    isa.sums(acc)
}

/// The lower eight lanes of the products of whole lines, or the `UPPER` ones.
#[inline(always)]
fn half_products<I: Isa, E: Element, const G: usize, const K: usize, const UPPER: bool>(
    isa: I,
    rows: &[&[E::Chunk]; K],
    heads: &[&[Line]; G],
) -> [[I::Half; K]; G] {
    let mut acc = [[isa.no_half(); K]; G];
    for i in 0..rows[0].len() {
        let mut line = [isa.splat(0.0); K];
        for k in 0..K {
            line[k] = E::load(isa, &rows[k][i]);
        }
        for g in 0..G {
            let q = isa.load(&heads[g][i]);
            for k in 0..K {
                acc[g][k] = isa.fma_half::<UPPER>(q, line[k], acc[g][k]);
            }
        }
    }
    acc
}
