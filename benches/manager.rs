//! The manager under criterion, for comparing one version of kvpool with another: the cases of
//! `kvpool bench manager`, which says what each of them times.

use std::time::Duration;

use criterion::{Criterion, criterion_group, criterion_main};
use kvpool::bench::manager::{CASES, ManagerError};

/// Counts, so that a case that allocates fails.
#[global_allocator]
static ALLOCATOR: kvpool::device::CountingAllocator = kvpool::device::CountingAllocator;

/// Every case; an iteration is one of its units.
fn manager(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("manager");
    for case in CASES {
        // Opened when criterion has chosen it, which its filter may not.
        let mut work = None;
        group.bench_function(case.name, |bencher| {
            bencher.iter_custom(|iterations| {
                let work = work.get_or_insert_with(|| case.open(u32::MAX));
                let work = match work {
                    Ok(work) => work,
                    Err(ManagerError::TooLarge { .. }) => return Duration::from_nanos(iterations),
                    Err(error) => panic!("{}: {error}", case.name),
                };
                let (mut time, mut units) = (Duration::ZERO, 0);
                while units < iterations {
                    let sample = work.turn().expect("the plan holds the case");
                    assert_eq!(sample.allocations, 0, "{} allocates", case.name);
                    time += sample.time;
                    units += sample.units;
                }
                #[expect(clippy::cast_precision_loss, reason = "a ratio")]
                let share = iterations as f64 / units as f64;
                time.mul_f64(share)
            });
        });
    }
    group.finish();
}

criterion_group!(benches, manager);
criterion_main!(benches);
