//! Work lists of attention: which thread blocks compute what.
//!
//! A *packed row* is a row of the step and a query head of the KV head's group. An item is a tile
//! of a sequence's packed rows, and either one split of the keys, whose partial result goes to the
//! workspace to be combined, or all of them, one after the other. Both give the same bits (P5), so
//! the choice is by load: a tile is divided when its splits are much of what each multiprocessor
//! has to do, and places are left in the workspace.

use std::ops::Range;

use super::bindings::{KVPOOL_ALL_SPLITS, KVPOOL_SPLIT_TOKENS, KvpoolItem};
use crate::device::BatchSeq;
use crate::plan::visible;

/// A tile is left whole when each multiprocessor has at least so many times its work to do.
const WHOLE_BELOW: u64 = 8;

/// What the lists of a group depend on beside the step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    /// Query heads of a KV head.
    pub(super) per_kv: u32,
    pub(super) num_kv_heads: u32,
    /// Packed rows of an item, at most.
    pub(super) item_rows: u32,
    /// Keys a query may see; 0 = all.
    pub(super) window: u32,
    pub(super) sink_tokens: u32,
    /// Places in the workspace.
    pub(super) max_partials: u32,
    pub(super) multiprocessors: u32,
}

/// How many entries the lists have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) items: u32,
    pub(super) combines: u32,
}

/// Some packed rows of one sequence.
#[derive(Clone, Copy, Debug)]
struct Tile {
    seq: u32,
    first: u32,
    count: u32,
    /// Splits in which some row sees a key: those of the sinks, and those of the window.
    sinks: u32,
    from: u32,
    end: u32,
}

impl Tile {
    fn splits(&self) -> u32 {
        self.sinks + self.end - self.from
    }
}

/// Calls `each` for the tiles of the rows `rows` of a step.
fn tiles(shape: &Shape, seqs: &[BatchSeq], rows: &Range<u32>, mut each: impl FnMut(Tile)) {
    for (index, seq) in (0..).zip(seqs) {
        // Rows of the sequence, counted from its first.
        let begin = rows.start.saturating_sub(seq.row_start);
        let end = rows.end.saturating_sub(seq.row_start).min(seq.rows);
        let mut first = begin * shape.per_kv;
        while begin < end && first < end * shape.per_kv {
            let count = shape.item_rows.min(end * shape.per_kv - first);
            let lowest = seq.first_position + first / shape.per_kv;
            let highest = seq.first_position + (first + count - 1) / shape.per_kv;
            let (_, from) = visible(lowest, shape.window, shape.sink_tokens);
            let (sinks, _) = visible(highest, shape.window, shape.sink_tokens);
            let from = from / KVPOOL_SPLIT_TOKENS;
            each(Tile {
                seq: index,
                first,
                count,
                sinks: sinks.div_ceil(KVPOOL_SPLIT_TOKENS).min(from),
                from,
                end: highest / KVPOOL_SPLIT_TOKENS + 1,
            });
            first += count;
        }
    }
}

/// Writes the lists for the rows `rows` of a step. The plan has room in them for any step.
pub(super) fn build(
    shape: &Shape,
    seqs: &[BatchSeq],
    rows: Range<u32>,
    items: &mut [KvpoolItem],
    combines: &mut [KvpoolItem],
) -> Counts {
    let mut work = 0;
    tiles(shape, seqs, &rows, |tile| work += u64::from(tile.splits()));
    let each = work * u64::from(shape.num_kv_heads) / u64::from(shape.multiprocessors.max(1));

    let mut counts = Counts::default();
    let mut partial = 0;
    tiles(shape, seqs, &rows, |tile| {
        let Tile { seq, first, count, .. } = tile;
        let splits = tile.splits();
        let places = u64::from(splits) * u64::from(count);
        let whole = splits < 2
            || u64::from(splits) * WHOLE_BELOW <= each
            || u64::from(partial) + places > u64::from(shape.max_partials);
        if whole {
            let split = KVPOOL_ALL_SPLITS;
            push(items, &mut counts.items, KvpoolItem { seq, first, count, split, ..NOTHING });
            return;
        }
        let begins = partial;
        for split in (0..tile.sinks).chain(tile.from..tile.end) {
            let item = KvpoolItem { seq, first, count, split, partial, splits: 0 };
            push(items, &mut counts.items, item);
            partial += count;
        }
        let combine = KvpoolItem { seq, first, count, split: 0, partial: begins, splits };
        push(combines, &mut counts.combines, combine);
    });
    counts
}

const NOTHING: KvpoolItem =
    KvpoolItem { seq: 0, first: 0, count: 0, split: 0, partial: 0, splits: 0 };

fn push(list: &mut [KvpoolItem], len: &mut u32, item: KvpoolItem) {
    list[*len as usize] = item;
    *len += 1;
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape {
        per_kv: 4,
        num_kv_heads: 8,
        item_rows: 16,
        window: 0,
        sink_tokens: 0,
        max_partials: 4096,
        multiprocessors: 132,
    };

    fn seq(row_start: u32, rows: u32, first_position: u32) -> BatchSeq {
        BatchSeq { slot: 0, row_start, rows, first_position }
    }

    fn lists(shape: &Shape, seqs: &[BatchSeq], rows: Range<u32>) -> [Vec<KvpoolItem>; 2] {
        let (mut items, mut combines) = (vec![NOTHING; 10_000], vec![NOTHING; 1000]);
        let counts = build(shape, seqs, rows, &mut items, &mut combines);
        items.truncate(counts.items as usize);
        combines.truncate(counts.combines as usize);
        [items, combines]
    }

    #[test]
    fn a_decode_is_divided_into_its_splits() {
        let [items, combines] = lists(&SHAPE, &[seq(0, 1, 1024), seq(1, 1, 511)], 0..2);
        let splits: Vec<_> =
            items.iter().map(|item| (item.seq, item.split, item.partial)).collect();
        assert_eq!(splits, [(0, 0, 0), (0, 1, 4), (0, 2, 8), (1, KVPOOL_ALL_SPLITS, 0)]);
        assert!(items.iter().all(|item| item.count == 4), "{items:?}");
        let [combine] = combines[..] else { panic!("{combines:?}") };
        assert_eq!((combine.seq, combine.count, combine.partial, combine.splits), (0, 4, 0, 3));
    }

    #[test]
    fn a_long_prefill_is_not_divided_and_every_packed_row_is_there_once() {
        let seqs = [seq(0, 2000, 4096), seq(2000, 3, 0)];
        let [items, combines] = lists(&SHAPE, &seqs, 0..2003);
        assert!(combines.is_empty() && items.iter().all(|item| item.split == KVPOOL_ALL_SPLITS));
        let mut next = [0, 0];
        for item in &items {
            assert_eq!(item.first, next[item.seq as usize]);
            next[item.seq as usize] += item.count;
        }
        assert_eq!(next, [8000, 12]);
    }

    #[test]
    fn a_part_of_the_rows_has_its_own_items() {
        let seqs = [seq(0, 10, 0), seq(10, 10, 700)];
        let [items, _] = lists(&SHAPE, &seqs, 8..12);
        let ranges: Vec<_> = items.iter().map(|i| (i.seq, i.first, i.count)).collect();
        assert_eq!(ranges, [(0, 32, 8), (1, 0, 8), (1, 0, 8)]);
    }

    #[test]
    fn windows_leave_out_the_splits_between_sinks_and_window() {
        let shape = Shape { window: 600, sink_tokens: 4, ..SHAPE };
        let splits = |position| -> Vec<u32> {
            let [items, _] = lists(&shape, &[seq(0, 1, position)], 0..1);
            items.iter().map(|item| item.split).collect()
        };
        assert_eq!(splits(500), [KVPOOL_ALL_SPLITS]);
        assert_eq!(splits(600), [0, 1]);
        assert_eq!(splits(5000), [0, 8, 9]);
        let shape = Shape { sink_tokens: 0, ..shape };
        let [items, _] = lists(&shape, &[seq(0, 1, 5000)], 0..1);
        assert_eq!(items.iter().map(|item| item.split).collect::<Vec<_>>(), [8, 9]);
    }

    #[test]
    fn where_places_run_out_the_rest_stays_whole() {
        let shape = Shape { max_partials: 8, ..SHAPE };
        let [items, combines] = lists(&shape, &[seq(0, 1, 600), seq(1, 1, 600)], 0..2);
        assert_eq!(items.len(), 3);
        assert_eq!(combines.len(), 1);
        assert!(
            items
                .iter()
                .all(|item| item.split == KVPOOL_ALL_SPLITS || item.partial + item.count <= 8)
        );
    }
}
