//! kvpool's manager beside `kvbm-logical`, doing the same work in the same process, in turns.
//!
//! `cargo run --release [-- --rounds N --filter TEXT]`; what is measured stands in
//! `benches/peers/README.md` and in the documentation of `kvpool::bench::manager`.

mod counting;
mod kvbm;

use counting::{Counting, count_allocations};
use kvbm::{Backend, Peer, Work};
use kvpool::bench::manager::{CASES, Work as Ours};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// What is compared: kvpool's case, KVBM's work, and what the two are.
const PAIRS: [(&str, Work, &str); 7] = [
    ("alloc_free_1", Work::AllocFree(1), "alloc + free, 1 block"),
    ("alloc_free_256", Work::AllocFree(256), "alloc + free, 256 blocks"),
    ("hit_4096_runs1", Work::Hit, "lookup of 4,096 tokens"),
    ("hit_4096_runs1", Work::HitHashed, "the same, KVBM's hashes given"),
    ("publish_evict_1e5", Work::Publish, "publish, evicting, 100,000 blocks"),
    ("publish_evict_1e5", Work::PublishHashed, "the same, KVBM's hashes given"),
    ("release_4096", Work::Release, "release of 4,096 tokens"),
];

/// Turns of each program in a round. The first quarter is not counted: by then the processor's
/// caches hold what this program needs, and not what the one before has left.
const TURNS: usize = 20;

/// One pair, open.
struct Pair {
    unit: &'static str,
    ours: Box<dyn Ours>,
    our_times: Vec<f64>,
    peers: Vec<(Backend, Peer, Vec<f64>)>,
}

fn main() {
    let (mut rounds, mut filter) = (7, String::new());
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match (arg.as_str(), args.next()) {
            ("--rounds", Some(number)) if number.parse().is_ok_and(|rounds: usize| rounds > 0) => {
                rounds = number.parse().unwrap_or(rounds);
            }
            ("--filter", Some(text)) => filter = text,
            _ => {
                eprintln!("usage: kvpool-peer-kvbm [--rounds N] [--filter TEXT]");
                std::process::exit(2);
            }
        }
    }
    let chosen: Vec<_> = PAIRS.iter().filter(|(case, ..)| case.contains(&filter)).collect();
    let mut pairs: Vec<Pair> = chosen.iter().map(|(case, work, _)| open(case, *work)).collect();
    for round in 0..rounds {
        for pair in &mut pairs {
            // Who comes first changes from round to round.
            let first = round % (pair.peers.len() + 1);
            for program in 0..=pair.peers.len() {
                let at = (first + program) % (pair.peers.len() + 1);
                for turn in 0..TURNS {
                    take_turn(pair, at, turn >= TURNS / 4);
                }
            }
        }
    }
    println!(
        "{:50} {:>10} {:>12}  {:13} {:>7} {:>12}",
        "ns (unit)", "kvpool", "KVBM", "backend", "ratio", "allocations"
    );
    for ((_, _, what), pair) in chosen.iter().zip(&mut pairs) {
        report(what, pair);
    }
    println!("ratio: KVBM's fastest backend / kvpool; allocations: KVBM's, for one unit.");
}

fn open(name: &str, work: Work) -> Pair {
    let case = CASES.iter().find(|case| case.name == name).expect("a case of kvpool");
    let ours = case.open(u32::MAX).expect("kvpool's case opens");
    let peers =
        Backend::ALL.iter().map(|backend| (*backend, Peer::open(*backend, work), Vec::new()));
    Pair { unit: case.unit, ours, our_times: Vec::new(), peers: peers.collect() }
}

fn take_turn(pair: &mut Pair, at: usize, counts: bool) {
    let Pair { ours, our_times, peers, .. } = pair;
    let (time, times) = match peers.get_mut(at) {
        Some((_, peer, times)) => {
            let sample = peer.turn();
            (sample.time.as_secs_f64() * 1e9 / sample.units as f64, times)
        }
        None => (ours.turn().expect("kvpool's case runs").ns_per_unit(), our_times),
    };
    if counts {
        times.push(time);
    }
}

fn report(what: &str, pair: &mut Pair) {
    let ours = median(&mut pair.our_times);
    let mut peers: Vec<(f64, &mut Peer, Backend)> = pair
        .peers
        .iter_mut()
        .map(|(backend, peer, times)| (median(times), peer, *backend))
        .collect();
    peers.sort_by(|a, b| a.0.total_cmp(&b.0));
    for (rank, (theirs, peer, backend)) in peers.iter_mut().enumerate() {
        // A turn of its own, so that counting is in no figure.
        count_allocations(true);
        let sample = peer.turn();
        count_allocations(false);
        let allocations = sample.allocations as f64 / sample.units as f64;
        let (label, our_figure, ratio) = if rank == 0 {
            (
                format!("{what} ({})", pair.unit),
                format!("{ours:.1}"),
                format!("{:.1}", *theirs / ours),
            )
        } else {
            Default::default()
        };
        println!(
            "{label:50} {our_figure:>10} {theirs:>12.1}  {:13} {ratio:>7} {allocations:>12.2}",
            backend.name()
        );
    }
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
