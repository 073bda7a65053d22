//! The kernels under criterion, for comparing one version of kvpool with another: the same cases as
//! `kvpool bench`, cut down to one shape of each operation so that a run takes a minute or two.
//! For figures beside the memory's speed and beside other programs use `kvpool bench` and
//! `benches/peers/`.

use criterion::{Criterion, criterion_group, criterion_main};
use kvpool::bench::{Operation, Options, Session, Variant, shapes};
use kvpool::config::{CacheMode, Format};

/// The first shape of an operation, in every mode in f16 and INT8, on one thread.
fn group(criterion: &mut Criterion, name: &str, operation: Operation) {
    let mut group = criterion.benchmark_group(name);
    group.sample_size(20);
    for format in [Format::F16, Format::Int8] {
        for mode in [CacheMode::Contiguous, CacheMode::Paged, CacheMode::Hybrid] {
            let options =
                Options { footprint_bytes: 256 << 20, ..Options::of(operation, format, mode) };
            let shape = shapes(operation)[0];
            let variant = Variant { format, mode };
            let mut session =
                Session::open(&shape, variant, &options, 1).expect("fits the machine");
            group.bench_function(format!("{}/{mode}/{format}", shape.name()), |bencher| {
                bencher.iter_custom(|calls| session.time(calls).expect("the plan holds the shape"));
            });
        }
    }
    group.finish();
}

/// Where a serving engine spends its time: one new token of each sequence.
fn decode(criterion: &mut Criterion) {
    group(criterion, "decode", Operation::Decode);
}

/// What every new token costs before it is attended to.
fn append(criterion: &mut Criterion) {
    group(criterion, "append", Operation::Append);
}

/// The time to the first token.
fn prefill(criterion: &mut Criterion) {
    group(criterion, "prefill", Operation::Prefill);
}

criterion_group!(benches, decode, append, prefill);
criterion_main!(benches);
