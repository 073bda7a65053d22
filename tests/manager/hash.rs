//! Edge case 21: a hash that puts everything into one bucket changes no answer.

use kvpool::cache::Cache;
use kvpool::device::NullDevice;
use kvpool::units::GroupIdx;

use super::device::TestDevice;
use super::driver::Driver;
use super::random::{operations, plans};
use super::text::Ns;
use crate::common::Spec;

fn pair(spec: &Spec, seed: u64, contents: bool) -> [Driver; 2] {
    [false, true].map(|constant| {
        let plan = spec.plan();
        let device = match contents {
            true => TestDevice::open(&plan, 0).0,
            false => Box::new(NullDevice::open(&plan)),
        };
        let cache = match constant {
            true => Cache::open_with_constant_hash(plan, device),
            false => Cache::open(plan, device),
        };
        let mut driver = Driver::on(spec, cache.expect("opens"), seed);
        driver.checks.contents = contents;
        driver.checks.poison = contents;
        driver
    })
}

#[test]
fn edge_21_a_constant_hash_gives_the_same_reuse() {
    let plans = plans();
    let each = operations(20 * plans.len() as u64);
    for (seed, (name, spec)) in (21..).zip(plans) {
        let [mut honest, mut constant] = pair(&spec, seed, true);
        for round in 0..each {
            honest.operation();
            constant.operation();
            assert_same(&honest, &constant, &format!("{name}, round {round}"));
        }
        let (a, b) = (honest.counts, constant.counts);
        assert_eq!((a.done, a.refused, a.hits), (b.done, b.refused, b.hits), "{name}");
        honest.finish();
        constant.finish();
    }
}

fn assert_same(honest: &Driver, constant: &Driver, what: &str) {
    assert_eq!(honest.live.len(), constant.live.len(), "{what}");
    for (a, b) in honest.live.iter().zip(&constant.live) {
        assert_eq!((&a.text.tokens, a.limit), (&b.text.tokens, b.limit), "{what}");
    }
    for group in 0..honest.cache.plan().groups.len() as u32 {
        let (a, b) = (
            honest.cache.block_table(GroupIdx(group)),
            constant.cache.block_table(GroupIdx(group)),
        );
        assert_eq!(a.ok(), b.ok(), "{what}: block tables");
    }
    assert_eq!(honest.cache.stats(), constant.cache.stats(), "{what}");
    let probe = |driver: &Driver| {
        driver.live.last().map(|live| driver.cache.probe(&live.prompt, &Ns::default().options()))
    };
    assert_eq!(probe(honest), probe(constant), "{what}");
}

/// Blocks that differ in one token, in one bucket all: each finds itself only.
#[test]
fn edge_21_near_equals_in_one_bucket() {
    let spec = super::rig::paged(64);
    let plan = spec.plan();
    let (device, _) = TestDevice::open(&plan, 0);
    let cache = Cache::open_with_constant_hash(plan, device).expect("opens");
    let mut rig = super::rig::Rig::on(&spec, cache);
    let near = |which: usize| {
        let mut prompt = vec![1; 25];
        prompt[which] = 2;
        prompt
    };
    // Less than half a block in common: what is found in part is copied, not taken over.
    let few = || (0..24).filter(|which| which % 8 < 4);
    for which in few() {
        rig.pass(&near(which));
    }
    for which in few() {
        let found = rig.cache.probe(&near(which), &Ns::default().options());
        assert_eq!((found.full_blocks, found.cached_len), (3, 24), "{which}");
        let mut other = near(which);
        other[(which + 8) % 24] = 3;
        assert!(rig.found(&other) < 24, "{which}");
    }
}
