//! Edge case 32: probes from many threads beside a writer.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;

use kvpool::cache::{Cache, Prober};
use kvpool::config::{Admission, CacheMode, Capacity};
use kvpool::device::NullDevice;

use super::driver::Driver;
use super::driver_step::skip;
use super::rig::{paged, up_to};
use super::text::Ns;
use crate::common::Spec;

fn driver(spec: &Spec, seed: u64) -> Driver {
    let plan = spec.plan();
    let device = Box::new(NullDevice::open(&plan));
    let mut driver = Driver::on(spec, Cache::open(plan, device).expect("opens"), seed);
    driver.checks.contents = false;
    driver.checks.poison = false;
    driver.checks.forget = false;
    driver
}

/// A sequence that stays alive: its blocks are never evicted.
fn hold(driver: &mut Driver, prompt: &[u32]) {
    let begun = driver.cache.begin(prompt, up_to(prompt.len() as u32)).expect("admitted");
    let left = prompt.len() as u32 - begun.cached_len;
    let most = driver.cache.plan().limits.max_step_tokens;
    for done in (0..left).step_by(most as usize) {
        let batch = [(begun.sequence, most.min(left - done))];
        skip(driver.cache.reserve(&batch).expect("promised")).expect("whole");
    }
    driver.cache.pin(begun.sequence).expect("alive");
    driver.cache.release(begun.sequence).expect("alive");
}

/// Ends the probing threads, also when the writer has failed: they would go on for ever.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// Asks for what is always there, what is never there, and what comes and goes.
fn probe_all(prober: &Prober, pinned: &[u32], changing: &[u32]) {
    let plain = Ns::default().options();
    let found = prober.probe(pinned, &plain);
    assert_eq!((found.cached_len, found.full_blocks), (24, 3), "pinned blocks");
    let salted = Ns { salt: 6, ..Ns::default() }.options();
    assert_eq!(prober.probe(pinned, &salted).cached_len, 0, "another salt");
    let found = prober.probe(changing, &plain);
    assert!(found.cached_len < changing.len() as u32);
    assert_eq!(found.cached_len, found.full_blocks * 8 + found.partial_tokens);
    assert_eq!(prober.probe(&[], &plain).cached_len, 0);
}

#[test]
fn edge_32_probes_from_eight_threads_beside_a_writer() {
    let spec = Spec { max_seqs: 4, max_seq_len: 40, max_step_tokens: Some(9), ..paged(16) };
    // Tokens that the driver never uses.
    let pinned: Vec<u32> = (1000..1025).collect();
    let trail_of = |threads: usize| {
        let mut driver = driver(&spec, 32);
        hold(&mut driver, &pinned);
        let prober = driver.cache.prober().expect("paged, with reuse");
        let (stop, probes) = (AtomicBool::new(false), AtomicU64::new(0));
        thread::scope(|scope| {
            let _stop = Stop(&stop);
            for thread in 0..threads {
                let prober = prober.clone();
                let (stop, probes, pinned) = (&stop, &probes, &pinned);
                scope.spawn(move || {
                    let changing: Vec<u32> = (0..33).map(|at| (at + thread as u32) % 3).collect();
                    while !stop.load(Relaxed) {
                        probe_all(&prober, pinned, &changing);
                        probes.fetch_add(1, Relaxed);
                    }
                });
            }
            while probes.load(Relaxed) < threads as u64 {
                thread::yield_now();
            }
            driver.run(20_000);
        });
        assert!(threads == 0 || probes.load(Relaxed) > 100);
        (driver.trail, driver.cache.stats())
    };
    assert_eq!(trail_of(8), trail_of(0), "probes changed something");
}

/// When nobody writes, a prober says what `probe` says.
#[test]
fn edge_32_a_prober_agrees_with_the_cache() {
    for admission in [Admission::Guaranteed, Admission::MaxUtilization] {
        for windows in [vec![0], vec![0, 9]] {
            let spec = Spec {
                admission,
                windows,
                max_seqs: 4,
                max_seq_len: 40,
                max_step_tokens: Some(9),
                ..paged(12)
            };
            let mut driver = driver(&spec, 33);
            let prober = driver.cache.prober().expect("paged, with reuse");
            for _ in 0..3000 {
                driver.operation();
                let (prompt, ns) = (driver.prompt(), driver.namespace().options());
                let digest = driver.cache.state_digest();
                assert_eq!(prober.probe(&prompt, &ns), driver.cache.probe(&prompt, &ns));
                assert_eq!(driver.cache.state_digest(), digest);
            }
        }
    }
}

#[test]
fn edge_32_a_prober_outlives_its_cache_and_knows_when_there_is_none() {
    let mut driver = driver(&paged(8), 1);
    let prober = driver.cache.prober().expect("paged, with reuse");
    hold(&mut driver, &(0..25).collect::<Vec<_>>());
    drop(driver);
    let found = prober.probe(&(0..25).collect::<Vec<_>>(), &Ns::default().options());
    assert_eq!((found.cached_len, found.full_blocks, found.partial_tokens), (24, 3, 0));
    for spec in [
        Spec { mode: CacheMode::Contiguous, capacity: Capacity::WorstCase, ..paged(8) },
        Spec { mode: CacheMode::Hybrid, ..paged(8) },
        Spec { prefix_reuse: false, ..paged(8) },
    ] {
        assert!(spec.open().prober().is_none(), "{spec:?}");
    }
}
