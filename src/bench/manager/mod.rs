//! The manager: blocks, tables, the prefix index and the verbs on them, without K and V.
//!
//! Every case runs a [`Cache`](crate::cache::Cache) with one tiny layer on a
//! [`NullDevice`](crate::device::NullDevice), blocks of 16 tokens, guaranteed admission and prefix
//! reuse, so that what is timed is bookkeeping alone. Before anything is timed the pool is *full*:
//! every block that no sequence holds is cached, in an order shuffled over up to 1,024 blocks, and
//! the index is as full as it can be.
//!
//! | name | unit | what is inside the timing |
//! |---|---|---|
//! | `alloc_free_1` | block | [`BlockStore::take`] and [`BlockStore::drop_ref`] of one block, 100,000 free ones |
//! | `alloc_free_256` | block | 256 × `take`, then 256 × `drop_ref`, the last taken first |
//! | `hit_4096_runs1` | lookup | `begin` of 4,097 tokens whose first 4,096 are cached: tokens hashed and compared, 256 blocks taken out of the cached list and into a table row, admission |
//! | `hit_4096_runs16` | lookup | the same; the prefix was stored by 16 sequences, each of which extended the one before by 256 tokens, so its blocks lie in 16 places |
//! | `hit_32768_runs1`, `hit_32768_runs16` | lookup | the same with 32,768 tokens, 2,048 blocks |
//! | `miss_4096` | lookup | `begin` of 4,097 tokens of which nothing is cached; blocks are found through their parents, so the first one decides |
//! | `probe_4096` | lookup | `probe` of the prompts of `hit_4096_runs1` |
//! | `publish_evict_1e3` | block | `begin` with 4,096 tokens never seen before, `reserve` of all of them, `mark_appended`, `commit`, with 1,000 blocks in the pool: each of the 256 blocks evicts a cached one and is published |
//! | `publish_evict_1e5`, `publish_evict_1e7` | block | the same in a pool of 100,000 and of 10,000,000 blocks |
//! | `release_4096` | sequence | `release` of a sequence with 256 published blocks, which become cached |
//! | `fork_4096` | sequence | `fork` of a sequence of 4,096 tokens |
//! | `decode_step_1`, `decode_step_256`, `decode_step_4096` | sequence | `reserve_tokens` of one token for each of so many sequences, `mark_appended`, `commit`; over 16 steps or a multiple, in which each sequence fills a block, publishes it and takes the next one, which evicts. Their lengths differ, so that in each step 1/16 of them do |
//!
//! The pool has 100,000 blocks where nothing else is said. Lookups, probes, releases and forks go
//! over 16 prompts of 4,096 tokens, or 4 of 32,768, in turn, after one pass that is not timed: warm
//! code, and as much of the prompts in the processor's caches as fits. Releases of what a lookup or
//! a fork took, and making up prompts, are outside the timing.
//!
//! All cases are open at once. In a round each of them in its turn runs for a while, and the first
//! quarter of that is not counted: by then the processor's caches hold what they hold in a program
//! with one manager, and not what the cases before have left. Figures are medians over all rounds.
//! After every turn the counters of the cache must say that what was timed has happened, or the
//! run fails.
//!
//! [`BlockStore::take`]: crate::pool::BlockStore::take
//! [`BlockStore::drop_ref`]: crate::pool::BlockStore::drop_ref

mod blocks;
mod decode;
mod fixture;
mod prefix;
mod publish;

use std::time::{Duration, Instant};

use serde::Serialize;

use crate::device::allocation_counts;
use crate::device::cpu::available_memory;
use crate::error::{CacheError, OpenError};
use crate::units::{Bytes, grouped};

use blocks::AllocFree;
use decode::Decode;
use prefix::{Prefix, Verb};
use publish::Publish;

use super::error::shown;

/// Blocks of a pool where the case says nothing else.
const POOL_BLOCKS: u32 = 100_000;

/// One case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Case {
    /// Its name in reports.
    pub name: &'static str,
    /// `block`, `lookup` or `sequence`.
    pub unit: &'static str,
    /// What is timed, in a line.
    pub what: &'static str,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// This many blocks taken, then dropped.
    AllocFree(u32),
    /// A verb on prefixes of so many tokens, stored in so many runs.
    Prefix(Verb, u32, u32),
    /// Publishing into a pool of so many blocks.
    Publish(u32),
    /// Steps of so many sequences.
    Decode(u32),
}

/// All cases, in the order of reports.
pub const CASES: [Case; 16] = [
    case("alloc_free_1", "block", "one block taken and dropped", Kind::AllocFree(1)),
    case("alloc_free_256", "block", "256 blocks taken, then dropped", Kind::AllocFree(256)),
    case(
        "hit_4096_runs1",
        "lookup",
        "begin with 4,096 of 4,097 tokens cached",
        Kind::Prefix(Verb::Hit, 4096, 1),
    ),
    case(
        "hit_4096_runs16",
        "lookup",
        "the same, stored in 16 places",
        Kind::Prefix(Verb::Hit, 4096, 16),
    ),
    case(
        "hit_32768_runs1",
        "lookup",
        "begin with 32,768 of 32,769 tokens cached",
        Kind::Prefix(Verb::Hit, 32768, 1),
    ),
    case(
        "hit_32768_runs16",
        "lookup",
        "the same, stored in 16 places",
        Kind::Prefix(Verb::Hit, 32768, 16),
    ),
    case(
        "miss_4096",
        "lookup",
        "begin with 4,097 tokens of which none is cached",
        Kind::Prefix(Verb::Miss, 4096, 1),
    ),
    case(
        "probe_4096",
        "lookup",
        "how much of 4,097 tokens is cached",
        Kind::Prefix(Verb::Probe, 4096, 1),
    ),
    case(
        "publish_evict_1e3",
        "block",
        "new blocks published, cached ones evicted, in a pool of 1,000",
        Kind::Publish(1_000),
    ),
    case("publish_evict_1e5", "block", "the same in a pool of 100,000", Kind::Publish(100_000)),
    case(
        "publish_evict_1e7",
        "block",
        "the same in a pool of 10,000,000",
        Kind::Publish(10_000_000),
    ),
    case(
        "release_4096",
        "sequence",
        "release of 4,096 tokens, which become cached",
        Kind::Prefix(Verb::Release, 4096, 1),
    ),
    case(
        "fork_4096",
        "sequence",
        "fork of a sequence of 4,096 tokens",
        Kind::Prefix(Verb::Fork, 4096, 1),
    ),
    case(
        "decode_step_1",
        "sequence",
        "reserve and commit of one token in a batch of 1",
        Kind::Decode(1),
    ),
    case("decode_step_256", "sequence", "the same in a batch of 256", Kind::Decode(256)),
    case("decode_step_4096", "sequence", "the same in a batch of 4,096", Kind::Decode(4096)),
];

const fn case(name: &'static str, unit: &'static str, what: &'static str, kind: Kind) -> Case {
    Case { name, unit, what, kind }
}

/// Why a case has no figure.
#[derive(Debug, thiserror::Error)]
pub enum ManagerError {
    /// The cache cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// A verb was refused that the plan has room for: a defect.
    #[error("a verb that must succeed was refused: {0}")]
    Cache(#[from] CacheError),
    /// What was timed is not what should have been: the figure would mean nothing.
    #[error("{what} came to {got} and not {expected}: what was timed is not what was meant")]
    NotDone {
        /// A counter.
        what: &'static str,
        /// What it must be.
        expected: u64,
        /// What it is.
        got: u64,
    },
    /// No case has such a name.
    #[error("no case's name contains {}; there are {}", shown(filter), CASES.map(|case| case.name).join(", "))]
    NoSuchCase {
        /// What was asked for.
        filter: String,
    },
    /// The tables of the case do not fit into this machine's memory.
    #[error("its tables need {needed}, and this machine has {available} available")]
    TooLarge {
        /// Host memory of the plan.
        needed: Bytes,
        /// What the machine has.
        available: Bytes,
    },
}

/// What one turn measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// The time of all its units.
    pub time: Duration,
    /// How many units were done.
    pub units: u64,
    /// Heap allocations of the process meanwhile; 0 without the counting allocator.
    pub allocations: u64,
}

impl Sample {
    /// Times some work.
    fn of<E>(units: u64, work: impl FnOnce() -> Result<(), E>) -> Result<Self, E> {
        let before = allocation_counts().allocations;
        let start = Instant::now();
        work()?;
        let time = start.elapsed();
        Ok(Self { time, units, allocations: allocation_counts().allocations - before })
    }

    /// Adds another one.
    fn add(&mut self, other: Self) {
        self.time += other.time;
        self.units += other.units;
        self.allocations += other.allocations;
    }

    /// Nanoseconds for one unit.
    #[must_use]
    pub fn ns_per_unit(&self) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "units of one turn")]
        let units = self.units.max(1) as f64;
        self.time.as_secs_f64() * 1e9 / units
    }
}

/// An open case: it can be timed as often as one likes.
pub trait Work {
    /// Does what it times some times over, and checks that it happened.
    ///
    /// # Errors
    /// A verb that was refused, or a counter that does not fit: defects.
    fn turn(&mut self) -> Result<Sample, ManagerError>;
}

impl Case {
    /// Makes everything ready: opens the cache, fills it, stores what is looked up. Pools are cut
    /// to `largest_pool` blocks as far as the case can do with fewer.
    ///
    /// # Errors
    /// [`ManagerError::TooLarge`] when the machine lacks the memory; anything else is a defect.
    pub fn open(&self, largest_pool: u32) -> Result<Box<dyn Work>, ManagerError> {
        self.open_watched(largest_pool, &mut |_, _| {})
    }

    /// The same; `filled` hears how many blocks of the pool are filled, and of how many.
    fn open_watched(
        &self,
        largest_pool: u32,
        filled: &mut dyn FnMut(u32, u32),
    ) -> Result<Box<dyn Work>, ManagerError> {
        let pool = POOL_BLOCKS.min(largest_pool);
        Ok(match self.kind {
            Kind::AllocFree(blocks) => Box::new(AllocFree::new(blocks, pool)),
            Kind::Prefix(verb, tokens, runs) => {
                Box::new(Prefix::open(verb, tokens, runs, pool, filled)?)
            }
            Kind::Publish(blocks) => Box::new(Publish::open(blocks.min(largest_pool), filled)?),
            Kind::Decode(seqs) => Box::new(Decode::open(seqs, pool, filled)?),
        })
    }
}

/// What to measure.
#[derive(Clone, Debug)]
pub struct Options {
    /// Substring of the names; empty = all.
    pub filter: String,
    /// Rounds over all cases.
    pub rounds: u32,
    /// Turns of a case in a round; three quarters of them are counted.
    pub turns: u32,
    /// Pools are cut to so many blocks, for a run that only shows that everything works.
    pub largest_pool: u32,
}

impl Options {
    /// All cases in full.
    #[must_use]
    pub fn full() -> Self {
        Self { filter: String::new(), rounds: 9, turns: 40, largest_pool: u32::MAX }
    }

    /// All cases with few rounds: its figures are rough.
    #[must_use]
    pub fn quick() -> Self {
        Self { rounds: 2, turns: 12, ..Self::full() }
    }
}

/// One measured case.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Measurement {
    /// The case.
    pub name: &'static str,
    /// `block`, `lookup` or `sequence`.
    pub unit: &'static str,
    /// Median time of one unit.
    pub ns_per_unit: f64,
    /// Heap allocations in all timed rounds together; `null` where the process does not count
    /// them.
    pub allocations: Option<u64>,
}

/// What a run says while it goes on.
#[derive(Debug, thiserror::Error)]
pub enum Note {
    /// A case is being made ready; its pool may take seconds to fill.
    #[error("opening {0}")]
    Opening(&'static str),
    /// So many blocks of its pool are filled.
    #[error("filling the pool of {name}: {} of {} blocks", grouped((*done).into()), grouped((*of).into()))]
    Filling {
        /// The case.
        name: &'static str,
        /// Blocks that are filled.
        done: u32,
        /// Blocks of the pool.
        of: u32,
    },
    /// A round over all cases begins, counted from 1.
    #[error("round {round} of {of}")]
    Round {
        /// Which.
        round: u32,
        /// How many there are.
        of: u32,
    },
    /// A case has no figure.
    #[error("{name} is left out: {reason}")]
    LeftOut {
        /// The case.
        name: &'static str,
        /// [`ManagerError::TooLarge`].
        reason: ManagerError,
    },
}

/// Measures the cases that the options ask for. `note` is told which pool is being filled and how
/// far that is, which case is left out and why, and which round begins.
///
/// # Errors
/// A defect; a case that lacks memory is none.
pub fn run(
    options: &Options,
    note: &mut dyn FnMut(&Note),
) -> Result<Vec<Measurement>, ManagerError> {
    let mut open = Vec::new();
    if !CASES.iter().any(|case| case.name.contains(&options.filter)) {
        return Err(ManagerError::NoSuchCase { filter: options.filter.clone() });
    }
    for case in CASES.iter().filter(|case| case.name.contains(&options.filter)) {
        note(&Note::Opening(case.name));
        let name = case.name;
        let mut filled = |done, of| note(&Note::Filling { name, done, of });
        match case.open_watched(options.largest_pool, &mut filled) {
            Ok(work) => open.push((case, work, Vec::new(), 0)),
            Err(reason @ ManagerError::TooLarge { .. }) => {
                note(&Note::LeftOut { name, reason });
            }
            Err(error) => return Err(error),
        }
    }
    let turns = options.turns.max(1);
    let rounds = options.rounds.max(1);
    for round in 1..=rounds {
        note(&Note::Round { round, of: rounds });
        for (_, work, times, allocations) in &mut open {
            for turn in 0..turns {
                let sample = work.turn()?;
                if turn >= turns / 4 {
                    times.push(sample.ns_per_unit());
                    *allocations += sample.allocations;
                }
            }
        }
    }
    let counting = allocations_are_counted();
    let measured = open.into_iter().map(|(case, _, mut times, allocations)| {
        times.sort_by(f64::total_cmp);
        Measurement {
            name: case.name,
            unit: case.unit,
            ns_per_unit: times[times.len() / 2],
            allocations: counting.then_some(allocations),
        }
    });
    Ok(measured.collect())
}

/// Whether this process counts its allocations: a count of 0 means something only then.
fn allocations_are_counted() -> bool {
    let before = allocation_counts().allocations;
    drop(std::hint::black_box(Box::new(0_u64)));
    allocation_counts().allocations > before
}

/// Refuses a counter that is not what it must be.
fn expect(what: &'static str, expected: u64, got: u64) -> Result<(), ManagerError> {
    if expected == got { Ok(()) } else { Err(ManagerError::NotDone { what, expected, got }) }
}

/// Refuses tables that the machine has no memory for.
fn check_memory(needed: Bytes) -> Result<(), ManagerError> {
    match available_memory() {
        // A tenth more, for what a filling process needs beside them.
        Some(available) if needed.get() + needed.get() / 10 > available.get() => {
            Err(ManagerError::TooLarge { needed, available })
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The small form (house habit 10): every case runs, in small pools, and checks itself.
    #[test]
    fn every_case_does_what_it_times() {
        let options = Options { rounds: 1, turns: 2, largest_pool: 20_000, ..Options::full() };
        let mut notes = Vec::new();
        let measured = run(&options, &mut |note| notes.push(note.to_string()));
        let measured = measured.expect("every case");
        let names: Vec<_> = measured.iter().map(|one| one.name).collect();
        assert_eq!(names, CASES.map(|case| case.name), "{notes:?}");
        for one in &measured {
            assert!(one.ns_per_unit > 0.0, "{one:?}");
            // The library's own tests count no allocations, and must not claim that there are none.
            assert_eq!(one.allocations, None, "{one:?}");
        }
    }

    #[test]
    fn what_did_not_happen_is_no_figure() {
        assert!(expect("evictions", 3, 3).is_ok());
        let error = expect("evictions", 3, 2).unwrap_err().to_string();
        assert!(error.contains("evictions came to 2 and not 3"), "{error}");
    }

    #[test]
    fn tables_beyond_the_machines_memory_are_refused() {
        assert!(check_memory(Bytes(1)).is_ok());
        if available_memory().is_some() {
            let error = check_memory(Bytes(1 << 60)).unwrap_err().to_string();
            assert!(error.contains("its tables need"), "{error}");
        }
    }
}
