//! The random driver in every mode, under every admission.
//!
//! **A million operations with every check** (1,000,006; `KVPOOL_LONG_TESTS=100000000` makes them
//! as many instead) are run in release builds and others alike, 71,429 in each of the 14 plans of
//! [`plans`], in three tests, so that cores share them. The device carries out copies and writes
//! late and out of order (up to 24 wait, `device.rs`). After each operation:
//!
//! - the invariants hold; a refused call has left the digest as it was (P4); under guaranteed
//!   admission nothing that keeps to the rules is refused in the middle;
//! - the estimate, the probe and the act agree; a hit is of tokens that were committed in the same
//!   namespace and epoch (absent, empty, number and text as salt, adapter and model; salts from a
//!   position on), and never of the prompt's last token;
//! - K and V of everything that its next query may read are compared, bit by bit, with what belongs
//!   to the tokens: of each sequence that the operation has touched, and of another one; of all
//!   sequences every 32 operations on average, now and then after all that nobody owns was filled
//!   with NaN.
//!
//! Beside it 70,000 operations run without the delay, and 28,000 in f16, bf16 and INT8.

use std::sync::atomic::Ordering::Relaxed;

use kvpool::cache::Cache;
use kvpool::config::{Admission, CacheMode, Capacity, Format, ScaleKind};
use kvpool::device::{dequantize_row, quantize_row};
use kvpool::plan::E8M8;

use super::device::{TestDevice, open_late};
use super::driver::{Checks, Counts, Driver};
use crate::common::{Spec, mix, on_cuda};

/// Plans small enough that everything runs out.
pub(crate) fn plans() -> Vec<(&'static str, Spec)> {
    use Admission::{Guaranteed, MaxUtilization, StaticBatch};
    use CacheMode::{Contiguous, Hybrid, Paged};
    let small = |mode, windows: &[u32], admission, blocks| Spec {
        mode,
        windows: windows.to_vec(),
        admission,
        capacity: if blocks == 0 { Capacity::WorstCase } else { Capacity::Blocks(blocks) },
        prefix_reuse: true,
        max_seqs: 4,
        max_seq_len: 40,
        max_batch_tokens: 32,
        max_step_tokens: Some(9),
        ..Spec::default()
    };
    let with_events = |spec| Spec { event_buffer: 1 << 12, ..spec };
    let windows = |spec| Spec { sink_tokens: 3, max_rewind_tokens: 4, ..spec };
    vec![
        ("paged", with_events(small(Paged, &[0], Guaranteed, 12))),
        ("paged-tight", small(Paged, &[0, 0], Guaranteed, 6)),
        ("paged-max-util", Spec { watermark_blocks: 1, ..small(Paged, &[0], MaxUtilization, 7) }),
        ("paged-static", with_events(small(Paged, &[0], StaticBatch, 12))),
        ("paged-windowed", windows(small(Paged, &[0, 9], Guaranteed, 14))),
        ("paged-windowed-max-util", with_events(small(Paged, &[12, 0, 9], MaxUtilization, 9))),
        ("paged-all-windowed", windows(small(Paged, &[9], Guaranteed, 12))),
        ("hybrid-rings", windows(small(Hybrid, &[9, 0], Guaranteed, 12))),
        ("hybrid-rings-max-util", small(Hybrid, &[0, 9], MaxUtilization, 7)),
        ("hybrid-contiguous", small(Hybrid, &[0, 0], Guaranteed, 12)),
        ("contiguous", small(Contiguous, &[0], Guaranteed, 0)),
        ("contiguous-rings", windows(small(Contiguous, &[9, 0], Guaranteed, 0))),
        ("contiguous-static", small(Contiguous, &[0], StaticBatch, 0)),
        ("no-reuse", Spec { prefix_reuse: false, ..small(Paged, &[0, 9], Guaranteed, 12) }),
    ]
}

/// Operations of a test: a share of the number that is asked for, or of a million; of fewer on an
/// emulated device, which is a few hundred times slower.
pub(crate) fn operations(share: u64) -> u64 {
    let all = std::env::var("KVPOOL_LONG_TESTS").ok().and_then(|text| text.parse().ok());
    all.unwrap_or(if on_cuda() { 5_000_u64 } else { 1_000_000 }).div_ceil(share)
}

fn run(name: &str, spec: &Spec, mut driver: Driver, operations: u64) -> Counts {
    driver.run(operations);
    driver.finish();
    let stats = driver.cache.stats();
    println!("{name}: {:?}, {stats:?}", driver.counts);
    let Counts { done, refused, hits, .. } = driver.counts;
    assert!(done + refused == operations && done > operations / 2, "{:?}", driver.counts);
    if operations < 1000 {
        // Too few to say what is rare: on an emulated device.
        return driver.counts;
    }
    assert!(refused > operations / 100, "{:?}", driver.counts);
    if spec.prefix_reuse && stats.prefix_queries > 0 && driver.cache.plan().reuse.is_on() {
        assert!(hits > operations / 200, "{name}: {hits} hits");
    }
    driver.counts
}

/// The plans that are chosen, each with its share of a million operations, on a device that does
/// its work late and in another order.
fn run_late(chosen: impl Fn(&Spec) -> bool, seed: u64) {
    let plans = plans();
    let each = operations(plans.len() as u64);
    let mut waited = 0;
    for (seed, (name, spec)) in (seed..).zip(plans).filter(|(_, (_, spec))| chosen(spec)) {
        if on_cuda() {
            // The emulator itself is late: it does what must be done, and in the order of a seed.
            run(name, &spec, Driver::on(&spec, open_late(&spec, 24), seed), each);
            continue;
        }
        let plan = spec.plan();
        let (device, seen) = TestDevice::open(&plan, 24);
        let driver = Driver::on(&spec, Cache::open(plan, device).expect("opens"), seed);
        run(name, &spec, driver, each);
        waited += seen.waited.load(Relaxed);
    }
    assert!(
        waited > 50 || on_cuda(),
        "{waited} sources of copies were written again while the copy waited"
    );
}

fn is_windowed(spec: &Spec) -> bool {
    spec.windows.iter().any(|window| *window > 0)
}

/// The first part of the million (edge 4).
#[test]
fn edge_04_a_million_operations_part_1_in_blocks() {
    run_late(|spec| spec.mode == CacheMode::Paged && !is_windowed(spec), 0);
}

/// The second (edge 36).
#[test]
fn edge_36_a_million_operations_part_2_in_blocks_with_windows() {
    run_late(|spec| spec.mode == CacheMode::Paged && is_windowed(spec), 100);
}

/// The third (edge 40).
#[test]
fn edge_40_a_million_operations_part_3_in_slots_and_rings() {
    run_late(|spec| spec.mode != CacheMode::Paged, 200);
}

/// The same without the delay, where nothing can be put right by a later read.
#[test]
fn edge_40_contents_are_true_at_once_in_every_plan() {
    for (seed, (name, spec)) in (300..).zip(plans()) {
        run(name, &spec, Driver::new(&spec, seed), operations(200));
    }
}

/// One vector quantised with a scale of its own, and back.
pub(super) fn through_int8(row: &[f32]) -> Vec<f32> {
    let (mut q, mut scale) = (vec![0; row.len()], [E8M8(0)]);
    quantize_row(row, &mut q, &mut scale, ScaleKind::PerTokenHead, 0.0);
    let mut out = vec![0.0; row.len()];
    dequantize_row(&q, &scale, ScaleKind::PerTokenHead, 0.0, &mut out);
    out
}

/// The other formats, scales with their tokens (P9).
#[test]
fn contents_are_true_in_every_format() {
    for (seed, (name, spec)) in (200..).zip(plans()) {
        let format = [Format::Int8, Format::F16, Format::Bf16][seed as usize % 3];
        let spec = Spec { format, num_kv_heads: 2, ..spec };
        let mut driver = Driver::on(&spec, spec.open(), seed);
        let stored = (format == Format::Int8).then_some(through_int8 as fn(&[f32]) -> Vec<f32>);
        driver.checks = Checks { stored, ..Checks::default() };
        run(name, &spec, driver, operations(500));
    }
}

/// The same calls give the same ids, events, statistics and digests (P10).
#[test]
fn same_calls_same_everything_with_reuse() {
    for (seed, (name, spec)) in (300..).zip(plans()) {
        let run = || {
            let mut driver = Driver::new(&spec, seed);
            let mut tables = 0;
            for _ in 0..if on_cuda() { 10 } else { 100 } {
                driver.run(20);
                for group in
                    (0..).map_while(|g| driver.cache.block_table(kvpool::units::GroupIdx(g)).ok())
                {
                    tables = group.0.iter().fold(tables, |all, id| mix(&[all, (*id).into()]));
                }
            }
            driver.poll().expect("never refused");
            let replay = format!("{:?}", driver.replay.delivered);
            (driver.trail, tables, replay, driver.cache.stats())
        };
        assert_eq!(run(), run(), "{name}");
    }
}
