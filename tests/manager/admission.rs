//! Edge case 13 by running: for every file in `configs/`, as many sequences of full length as the
//! plan says run to their end at once, and one more is refused.

use kvpool::cache::{BeginOptions, Begun, Cache};
use kvpool::device::NullDevice;
use kvpool::error::CacheError;
use kvpool::plan::Plan;

use super::driver_step::skip;
use crate::common::assert_refused;
use crate::plans::config_plans;

/// The plans of all files and their variants.
fn plans() -> Vec<(String, Plan)> {
    let files = config_plans().into_iter();
    files
        .flat_map(|(file, plans)| {
            plans.into_iter().map(move |(name, plan)| (format!("{file}, {name}"), plan))
        })
        .collect()
}

fn open(plan: &Plan) -> Cache {
    Cache::open(plan.clone(), Box::new(NullDevice::open(plan))).expect("opens")
}

/// The prompt of a sequence: its own tokens, or the same for all.
fn prompt(plan: &Plan, seq: u32, shared: bool) -> Vec<u32> {
    let first = if shared { 0 } else { seq * plan.limits.max_seq_len };
    (first..first + plan.limits.max_seq_len).collect()
}

fn refused_for_want_of_room(error: CacheError) -> bool {
    matches!(
        error,
        CacheError::NotAdmitted { .. }
            | CacheError::NoSeqSlot { .. }
            | CacheError::NeverFits { .. }
            | CacheError::PoolExhausted { .. }
    )
}

/// Begins as many as the plan says and brings all of them to full length, in turns.
fn fill(name: &str, plan: &Plan, cache: &mut Cache, announced: bool) {
    let whole = plan.limits.max_seq_len;
    let mut begun: Vec<Begun> = Vec::new();
    for seq in 0..plan.full_length_seqs {
        let prompt = if announced { prompt(plan, seq, false) } else { Vec::new() };
        let one = cache.begin(&prompt, BeginOptions::default());
        begun.push(one.unwrap_or_else(|error| panic!("{name}: sequence {seq}: {error}")));
    }
    assert!(begun.iter().all(|one| one.cached_len == 0 && one.limit == whole));
    loop {
        let mut batch = Vec::new();
        let mut left_in_batch = plan.limits.max_batch_tokens;
        for one in &begun {
            let len = cache.seq_len(one.sequence).expect("alive");
            let tokens = (whole - len).min(plan.limits.max_step_tokens).min(left_in_batch);
            if tokens > 0 {
                batch.push((one.sequence, tokens));
                left_in_batch -= tokens;
            }
        }
        if batch.is_empty() {
            break;
        }
        // In turns, so that all grow.
        begun.rotate_left(1);
        let step = cache.reserve(&batch);
        skip(step.unwrap_or_else(|error| panic!("{name}: {error}"))).expect("whole");
    }
    cache.check_invariants().expect("invariants");
    let one_more = prompt(plan, plan.full_length_seqs, false);
    let error = assert_refused(cache, |cache| cache.begin(&one_more, BeginOptions::default()));
    assert!(refused_for_want_of_room(error), "{name}: one more: {error}");
    for one in begun {
        assert_eq!(cache.seq_len(one.sequence), Ok(whole));
        cache.release(one.sequence).expect("alive");
    }
}

#[test]
fn edge_13_every_config_runs_as_many_full_length_sequences_as_its_plan_says() {
    let plans = plans();
    assert!(plans.len() >= 50, "only {} plans", plans.len());
    let mut sequences = 0;
    for (name, plan) in plans {
        let mut cache = open(&plan);
        fill(&name, &plan, &mut cache, true);
        // Again, over what the first ones left in the cache, and with tokens that are not known.
        fill_again(&name, &plan, &mut cache);
        sequences += plan.full_length_seqs;
    }
    assert!(sequences > 40, "only {sequences} sequences");
}

/// Other sequences over a pool full of cached blocks.
fn fill_again(name: &str, plan: &Plan, cache: &mut Cache) {
    cache.check_invariants().expect("invariants");
    fill(name, plan, cache, false);
    let stats = cache.stats();
    assert_eq!((stats.seqs, stats.held_bytes.0, stats.promised_bytes.0), (0, 0, 0), "{name}");
}

/// Sequences that share everything: at least as many run.
#[test]
fn edge_13_sharing_never_makes_fewer_fit() {
    for (name, plan) in plans() {
        let mut cache = open(&plan);
        let prompt = prompt(&plan, 0, true);
        let begun: Vec<Begun> = (0..plan.full_length_seqs)
            .map(|_| cache.begin(&prompt, BeginOptions::default()).expect("admitted"))
            .collect();
        for one in begun {
            let mut len = one.cached_len;
            while len < plan.limits.max_seq_len {
                let tokens = (plan.limits.max_seq_len - len).min(plan.limits.max_step_tokens);
                let step = cache.reserve(&[(one.sequence, tokens)]);
                skip(step.unwrap_or_else(|error| panic!("{name}: {error}"))).expect("whole");
                len += tokens;
            }
        }
        cache.check_invariants().expect("invariants");
    }
}
