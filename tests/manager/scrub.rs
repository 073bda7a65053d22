//! `pool.scrub`: what was released is zeros, K and V and scales, in every plan and format.

use kvpool::cache::BeginOptions;
use kvpool::config::{CacheMode, Capacity, Format, ScaleKind, Scrub};
use kvpool::plan::Kv;
use kvpool::units::GroupIdx;

use super::driver::{Checks, Driver};
use super::random::{operations, plans, through_int8};
use super::rig::{Rig, paged, tokens, up_to};
use super::text::{Ns, Stored};
use crate::common::Spec;

/// Whether K, V and scales of a token of a unit are zeros, in every layer and head.
fn is_zero(rig: &Rig, group: usize, unit: u32, token: u32) -> bool {
    let layout = &rig.cache.plan().groups[group].layout;
    let mut row = vec![1; layout.row_bytes() as usize];
    let mut scales = vec![1; layout.scales_per_row as usize * 2];
    (0..layout.num_layers * layout.num_kv_heads * 2).all(|i| {
        let (layer, kv, head) = (i / 2 / layout.num_kv_heads, i % 2, i / 2 % layout.num_kv_heads);
        let kv = if kv == 0 { Kv::K } else { Kv::V };
        rig.cache.read_bytes(layout.row(unit, layer, kv, head, token), &mut row).unwrap();
        rig.cache.read_bytes(layout.scales(unit, layer, kv, head, token), &mut scales).unwrap();
        row.iter().chain(&scales).all(|byte| *byte == 0)
    })
}

/// After every operation nothing is left of what nobody holds; and nobody's tokens were zeroed.
fn nothing_is_left(spec: &Spec, stored: Option<Stored>, seed: u64, operations: u64, name: &str) {
    let spec = Spec { scrub: Scrub::OnRelease, ..spec.clone() };
    let mut cache = super::device::open_late(&spec, 12);
    // The device of the tests begins with NaN.
    cache.poison_unused(0).expect("in the pool");
    let mut driver = Driver::on(&spec, cache, seed);
    driver.checks = Checks { stored, poison: false, residue: true, ..Checks::default() };
    driver.run(operations);
    driver.finish();
    assert_eq!(driver.cache.find_residue(), Ok(None), "{name}: everything was released");
    let stats = driver.cache.stats();
    // A few operations, as there are on the emulated device, may release nothing.
    assert!(stats.scrubbed_bytes.0 > 0 || operations < 100, "{name}: {stats:?}");
    assert_eq!(stats.scrub_failures, 0, "{name}");
}

#[test]
fn edge_43_what_is_released_is_zeros_in_every_plan() {
    for (seed, (name, spec)) in (500..).zip(plans()) {
        nothing_is_left(&spec, None, seed, operations(500), name);
    }
}

#[test]
fn edge_43_what_is_released_is_zeros_in_every_format() {
    for (seed, (name, spec)) in (600..).zip(plans()) {
        let format = [Format::Int8, Format::F16, Format::Bf16][seed as usize % 3];
        let spec = Spec { format, num_kv_heads: 2, ..spec };
        let stored = (format == Format::Int8).then_some(through_int8 as Stored);
        // Formats are the CPU device's business, not the test's.
        let spec = Spec { scrub: Scrub::OnRelease, ..spec };
        let mut driver = Driver::on(&spec, spec.open(), seed);
        driver.checks = Checks { stored, poison: false, residue: true, ..Checks::default() };
        driver.run(operations(1000));
        driver.finish();
        assert_eq!(driver.cache.find_residue(), Ok(None), "{name}");
    }
}

/// Zeroing before reuse takes nothing from anybody, and never shows what was there: here NaN.
#[test]
fn zeroing_before_reuse_breaks_nothing() {
    for (seed, (name, spec)) in (700..).zip(plans()) {
        let spec = Spec { scrub: Scrub::OnReuse, ..spec };
        let mut driver = Driver::new(&spec, seed);
        driver.run(operations(500));
        driver.finish();
        let scrubbed = driver.cache.stats().scrubbed_bytes.0;
        assert!(scrubbed > 0 || operations(500) < 100, "{name}: {scrubbed} bytes zeroed");
    }
}

/// Under `"off"` the bytes stay; under the others the next owner finds zeros behind its tokens: in
/// fresh blocks and slots, in rings, behind copied prefixes and behind parts that are taken over.
#[test]
fn edge_43_the_next_owner_finds_zeros() {
    let formats = [
        (Format::F32, ScaleKind::PerTokenHead),
        (Format::Int8, ScaleKind::PerTokenHead),
        (Format::Int8, ScaleKind::PerGroup32),
    ];
    for scrub in [Scrub::Off, Scrub::OnRelease, Scrub::OnReuse] {
        for (mode, (format, scale)) in [CacheMode::Paged, CacheMode::Contiguous]
            .into_iter()
            .flat_map(|mode| formats.map(|format| (mode, format)))
        {
            for window in [0, 12] {
                let spec = Spec {
                    mode,
                    format,
                    scale,
                    scrub,
                    windows: vec![window],
                    head_dim: 32,
                    num_kv_heads: 2,
                    max_seqs: 1,
                    max_step_tokens: Some(8),
                    ..Spec::default()
                };
                next_owner(&spec);
            }
        }
    }
}

/// One sequence fills what there is, and another gets it for three tokens.
fn next_owner(spec: &Spec) {
    let mut rig = Rig::on(spec, spec.open());
    rig.stored = None;
    let feed = |rig: &mut Rig, prompt: &[u32]| {
        let seq = rig.cache.begin(prompt, BeginOptions::default()).expect("admitted").sequence;
        for chunk in prompt.chunks(8) {
            let batch = [(seq, chunk.len() as u32)];
            crate::common::append_step(&mut rig.cache, &batch, &vec![7; chunk.len()]).unwrap();
        }
        seq
    };
    let first = feed(&mut rig, &tokens(0, 64));
    rig.cache.release(first).expect("alive");
    rig.cache.clear_cached();
    let second = feed(&mut rig, &tokens(100, 103));
    let (unit, unit_tokens) = match rig.cache.block_of(second, GroupIdx(0), 0) {
        Ok(block) => (block.block().0, spec.tokens_per_block),
        Err(_) => (second.slot(), rig.cache.plan().groups[0].layout.unit_tokens),
    };
    assert!((0..3).all(|token| !is_zero(&rig, 0, unit, token)), "its own tokens are there");
    let zeros = (3..unit_tokens).filter(|token| is_zero(&rig, 0, unit, *token)).count() as u32;
    let scrubbed = rig.cache.stats().scrubbed_bytes.0;
    if spec.scrub == Scrub::Off {
        assert!(zeros < unit_tokens - 3 && scrubbed == 0, "{spec:?}: nothing is zeroed");
    } else {
        assert!(zeros == unit_tokens - 3 && scrubbed > 0, "{spec:?}: {zeros} of {unit_tokens}");
    }
}

/// A part that is taken over, and one that is copied, end where the match ends.
#[test]
fn edge_29_a_part_that_is_taken_over_has_zeros_behind_it() {
    for scrub in [Scrub::OnRelease, Scrub::OnReuse] {
        for partial in [3, 5] {
            let mut rig = Rig::new(&Spec { scrub, ..paged(6) });
            rig.cache.poison_unused(0).expect("in the pool");
            rig.pass(&tokens(0, 24));
            let prompt = [tokens(0, 16 + partial), tokens(900, 905)].concat();
            let line = rig.begin(&prompt, Ns::default(), up_to(32)).expect("admitted");
            assert_eq!(line.cached_len, 16 + partial);
            let stats = rig.cache.stats();
            assert_eq!(stats.partial_takeovers, u64::from(partial >= 4));
            let block = rig.cache.block_of(line.seq, GroupIdx(0), 16).expect("held").block().0;
            for token in 0..8 {
                assert_eq!(is_zero(&rig, 0, block, token), token >= partial, "{scrub:?} {token}");
            }
        }
    }
}

/// A fork that goes leaves nothing behind the tokens of those who share its last block; nor does a
/// step that is cancelled, or a rewind.
#[test]
fn ends_that_are_given_up_are_zeros_at_once() {
    let spec = Spec {
        scrub: Scrub::OnRelease,
        prefix_reuse: false,
        capacity: Capacity::WorstCase,
        ..paged(8)
    };
    for (mode, window) in
        [(CacheMode::Paged, 0), (CacheMode::Contiguous, 0), (CacheMode::Contiguous, 12)]
    {
        let spec = Spec { mode, windows: vec![window], max_rewind_tokens: 4, ..spec.clone() };
        let mut rig = Rig::on(&spec, spec.open());
        let mut line = rig.run(&tokens(0, 12));
        assert_eq!(rig.cache.find_residue(), Ok(None));
        let fork = rig.fork(&line);
        rig.truncate(&mut line, 10);
        assert_eq!(rig.cache.find_residue(), Ok(None), "{mode:?}: the fork holds all 12");
        rig.release(&fork);
        assert_eq!(rig.cache.find_residue(), Ok(None), "{mode:?}: nobody holds the last two");
        let n = 2 * rig.spec.head_dim as usize;
        let junk = vec![3.0_f32; n];
        let mut step = rig.cache.reserve(&[(line.seq, 2)]).expect("promised");
        step.append(kvpool::units::LayerIdx(0), (&junk[..]).into(), (&junk[..]).into()).unwrap();
        drop(step);
        assert_eq!(rig.cache.find_residue(), Ok(None), "{mode:?}: the step was cancelled");
        rig.check(&line);
        rig.release(&line);
        assert_eq!(rig.cache.find_residue(), Ok(None));
        assert_eq!(rig.cache.reset(), Ok(()));
        assert_eq!(rig.cache.find_residue(), Ok(None));
    }
}
