//! One answer (P5): the same bits in every arrangement.

use super::rig::{Answer, FORMATS, Params, Rig, SLOTS, kernels};
use crate::config::{CacheMode, KernelChoice, ScaleKind};

const LEN: u32 = 1100;
const KEY: u32 = 5;
const SLOT: u32 = 1;

/// The last rows of one sequence, alone.
fn alone(params: Params, chunk: u32) -> Answer {
    let mut rig = Rig::new(params);
    rig.begin(SLOT, KEY);
    rig.append(SLOT, LEN, chunk);
    rig.attend(&[(SLOT, 2)])
}

/// All rows of one sequence behind its first `cached` tokens, `chunk` of them a step.
fn in_chunks(params: Params, cached: u32, rows: u32, chunk: u32) -> impl PartialEq {
    let mut rig = Rig::new(params);
    rig.begin(SLOT, KEY);
    rig.append(SLOT, cached, u32::MAX);
    let (mut out, mut lse) = (Vec::new(), Vec::new());
    for _ in 0..rows / chunk {
        rig.append(SLOT, chunk, chunk);
        let answer = rig.attend(&[(SLOT, chunk)]);
        out.extend(answer.out);
        lse.extend(answer.lse);
    }
    Answer { out, lse }.bits()
}

fn arrangements(base: Params) -> Vec<Params> {
    let mut all = vec![base, Params { max_seq_len: 3000, ..base }];
    for threads in [2, 3, 5] {
        all.push(Params { threads, ..base });
    }
    for (tokens_per_block, threads) in [(8, 2), (16, 1), (32, 1), (64, 3), (128, 1)] {
        all.push(Params { mode: CacheMode::Paged, tokens_per_block, threads, ..base });
    }
    all
}

#[test]
fn modes_blocks_and_threads_change_no_bit() {
    for kernel in kernels().into_iter().chain([KernelChoice::Reference]) {
        for (i, format) in FORMATS.into_iter().enumerate() {
            // The windows make the contiguous layer a ring, and a slot where the window and a
            // step are longer than the sequence.
            let (window, sinks) = [(0, 0), (300, 0), (301, 7), (700, 70)][i % 4];
            let base = Params { format, kernel, window, sinks, ..Params::default() };
            let expected = alone(base, u32::MAX).bits();
            for params in arrangements(base) {
                assert!(alone(params, 333).bits() == expected, "{params:?} against {base:?}");
            }
        }
    }
}

#[test]
fn token_by_token_changes_no_bit() {
    for kernel in kernels() {
        for mode in [CacheMode::Contiguous, CacheMode::Paged] {
            let params = Params { mode, kernel, window: 90, sinks: 3, ..Params::default() };
            let mut whole = Rig::new(params);
            whole.begin(SLOT, KEY);
            whole.append(SLOT, 500, u32::MAX);
            whole.append(SLOT, 80, u32::MAX);
            let prefill = whole.attend(&[(SLOT, 80)]).bits();
            let mut single = Rig::new(params);
            single.begin(SLOT, KEY);
            single.append(SLOT, 500, 1);
            let (mut out, mut lse) = (Vec::new(), Vec::new());
            for _ in 0..80 {
                single.append(SLOT, 1, 1);
                let answer = single.attend(&[(SLOT, 1)]);
                out.extend(answer.out);
                lse.extend(answer.lse);
            }
            assert!(Answer { out, lse }.bits() == prefill, "{params:?}");
        }
    }
}

#[test]
fn rows_at_once_change_no_bit() {
    // Prefills of all at once, in chunks, and with few and many threads, which make blocks of
    // different heights; heads that fill lines and blocks and some that do not.
    let shapes = [
        (1, 64),
        (1, 16),
        (1, 48),
        (2, 64),
        (2, 48),
        (3, 96),
        (4, 128),
        (5, 32),
        (8, 72),
        (5, 24),
        (1, 8),
        (1, 112),
        (40, 64),
        (1, 128),
        (2, 128),
        (3, 128),
        (1, 256),
        (4, 256),
        (5, 128),
    ];
    for kernel in kernels() {
        for (i, (group, head_dim)) in shapes.into_iter().enumerate() {
            for (j, format) in FORMATS.into_iter().enumerate() {
                if format.1 == Some(ScaleKind::PerGroup32) && head_dim % 32 != 0 {
                    continue;
                }
                let (window, sinks) = [(0, 0), (9, 2), (90, 0), (100, 7)][(i + j) % 4];
                let params = Params {
                    mode: CacheMode::Paged,
                    kernel,
                    format,
                    group,
                    head_dim,
                    window,
                    sinks,
                    ..Params::default()
                };
                let answer =
                    |threads, chunk| in_chunks(Params { threads, ..params }, 470, 90, chunk);
                let expected = answer(1, 1);
                for (threads, chunk) in [(1, 90), (1, 45), (3, 90), (2, 9), (1, 9), (4, 2)] {
                    // No step is longer than a window.
                    if window > 0 && chunk > window {
                        continue;
                    }
                    assert!(answer(threads, chunk) == expected, "{params:?} {chunk}");
                }
                // One token of a slot is read in another order.
                let slot = Params { mode: CacheMode::Contiguous, ..params };
                assert!(in_chunks(slot, 470, 90, 1) == expected, "{slot:?}");
            }
        }
    }
}

#[test]
fn windows_shorter_than_a_step_change_no_bit() {
    // What the first and the last of some rows see of a tile says nothing of what those between
    // see: a window may begin behind a tile and end in it for other rows.
    let shapes = [(1, 1), (1, 8), (1, 15), (1, 30), (2, 14), (3, 8), (4, 2), (4, 6), (8, 2)];
    for kernel in kernels() {
        for (i, (group, window)) in shapes.into_iter().enumerate() {
            for (j, format) in FORMATS.into_iter().enumerate() {
                let params = Params {
                    mode: CacheMode::Paged,
                    kernel,
                    format,
                    group,
                    window,
                    sinks: [0, 0, 3][(i + j) % 3],
                    kv_heads: 1,
                    max_step_tokens: Some(128),
                    ..Params::default()
                };
                let answer = |chunk| in_chunks(params, 40, 88, chunk);
                let expected = answer(1);
                for chunk in [88, 44] {
                    assert!(answer(chunk) == expected, "{params:?} {chunk}");
                }
            }
        }
    }
}

#[test]
fn kv_heads_side_by_side_change_no_bit() {
    // Calls with one row a sequence, which take KV heads together: as many as there are, in
    // several blocks and with one left over, or few of them where threads are many. Calls with two
    // rows take each alone, so their last rows are what to compare with.
    let shapes = [
        (1, 4, 64),
        (8, 4, 128),
        (9, 1, 64),
        (20, 1, 32),
        (3, 2, 96),
        (12, 3, 72),
        (8, 16, 16),
        (4, 1, 128),
        (4, 2, 128),
        (2, 1, 256),
    ];
    for kernel in kernels() {
        for (i, (kv_heads, group, head_dim)) in shapes.into_iter().enumerate() {
            for (j, format) in FORMATS.into_iter().enumerate() {
                if format.1 == Some(ScaleKind::PerGroup32) && head_dim % 32 != 0 {
                    continue;
                }
                let (window, sinks) = [(0, 0), (90, 3), (300, 0), (601, 7)][(i + j) % 4];
                let base = Params {
                    format,
                    kernel,
                    kv_heads,
                    group,
                    head_dim,
                    window,
                    sinks,
                    ..Params::default()
                };
                let answer = |params: Params, rows| {
                    let mut rig = Rig::new(params);
                    for slot in 0..SLOTS {
                        rig.begin(slot, KEY + slot);
                        rig.append(slot, 560 + 13 * slot, 333);
                    }
                    let seqs: Vec<_> = (0..SLOTS).map(|slot| (slot, rows)).collect();
                    let Answer { out, lse } = rig.attend(&seqs);
                    let last = |all: Vec<f32>| -> Vec<f32> {
                        let row = all.len() / (SLOTS * rows) as usize;
                        let rows = all.chunks(row).skip(rows as usize - 1).step_by(rows as usize);
                        rows.flatten().copied().collect()
                    };
                    Answer { out: last(out), lse: last(lse) }.bits()
                };
                let expected = answer(base, 2);
                for mode in [CacheMode::Contiguous, CacheMode::Paged] {
                    for threads in [1, 2, 7] {
                        let params = Params { mode, threads, ..base };
                        assert!(answer(params, 1) == expected, "{params:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn the_batch_changes_no_bit() {
    for kernel in kernels() {
        for threads in [1, 2, 4] {
            let params = Params { mode: CacheMode::Paged, kernel, threads, ..Params::default() };
            let expected = alone(params, u32::MAX);
            let mut rig = Rig::new(params);
            for slot in 0..SLOTS {
                rig.begin(slot, if slot == SLOT { KEY } else { 100 + slot });
            }
            // Interleaved, so that the sequences' blocks are mixed.
            for _ in 0..11 {
                for slot in 0..SLOTS {
                    rig.append(slot, 100 - if slot == SLOT { 0 } else { slot * 7 }, 100);
                }
            }
            let answer = rig.attend(&[(0, 3), (1, 2), (2, 40)]);
            let (from, n) = (3 * answer.out.len() / 45, expected.out.len());
            let out = answer.out[from..from + n].to_vec();
            let (from, n) = (3 * answer.lse.len() / 45, expected.lse.len());
            let lse = answer.lse[from..from + n].to_vec();
            assert!(Answer { out, lse }.bits() == expected.bits(), "{params:?}");
        }
    }
}

#[test]
fn what_is_stored_does_not_depend_on_threads_or_kernel() {
    // Fewer heads than are quantised side by side, and more; steps that are stored past the
    // caches, and others; a head_dim that ends within a cache line, or within sixteen lanes.
    let shapes = [(3, 64), (5, 96), (5, 72)];
    for (format, (kv_heads, head_dim)) in
        FORMATS.into_iter().flat_map(|format| shapes.map(|shape| (format, shape)))
    {
        if format.1 == Some(ScaleKind::PerGroup32) && head_dim % 32 != 0 {
            continue;
        }
        let stored = |threads, kernel| {
            let params =
                Params { format, threads, kernel, kv_heads, head_dim, ..Params::default() };
            let mut rig = Rig::new(params);
            rig.begin(0, 9);
            rig.append(0, 1200, 1000);
            (rig.bytes(), rig.counts)
        };
        let expected = stored(1, KernelChoice::Portable);
        for kernel in kernels() {
            for threads in [1, 2, 7] {
                assert!(stored(threads, kernel) == expected, "{format:?} {threads} {kernel:?}");
            }
        }
    }
}
