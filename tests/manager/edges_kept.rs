//! What is kept, and for whom: retention of blocks that are hit, and more tenants than numbers for
//! them.

use kvpool::cache::{BeginOptions, Cache, KeyPart, Namespace, Retention, Retentions};
use kvpool::config::CacheMode;
use kvpool::device::NullDevice;
use kvpool::error::CacheError;

use super::driver_step::skip;
use super::rig::{Rig, paged, tokens, up_to};
use super::text::Ns;
use crate::common::{MODES, Spec, assert_refused};

fn null(spec: &Spec) -> Cache {
    let plan = spec.plan();
    let device = Box::new(NullDevice::open(&plan));
    Cache::open(plan, device).expect("opens")
}

fn kept(priority: u8, duration_ms: Option<u64>) -> Retentions {
    Retentions::new(&[Retention { from: 0, to: u32::MAX, priority, duration_ms }]).expect("valid")
}

/// A prompt comes, with a retention, and goes.
fn run(rig: &mut Rig, prompt: &[u32], retention: Retentions) {
    let options = BeginOptions { retention, ..up_to(prompt.len() as u32) };
    let mut line = rig.begin(prompt, Ns::default(), options).expect("fits");
    rig.prefill(&mut line, prompt);
    rig.release(&line);
}

/// Two blocks must go: they are those of `b`.
fn assert_outlives(rig: &mut Rig, a: &[u32], b: &[u32]) {
    let free = rig.blocks().0;
    let mut line = rig.begin(&[], Ns::default(), up_to((free + 2) * 8)).expect("fits");
    rig.feed(&mut [(&mut line, &tokens(1000, 1000 + (free + 2) * 8))]).expect("promised");
    assert_eq!((rig.blocks_found(a), rig.blocks_found(b)), (2, 0));
}

/// Where nothing is shared, a retention is refused and not ignored, whatever it is given to.
#[test]
fn edge_64_a_retention_where_nothing_is_reused_is_refused() {
    for mode in MODES {
        let mut cache = Spec { prefix_reuse: false, ..Spec::mode(mode) }.open();
        let seq = cache.begin(&[1, 2, 3], BeginOptions::default()).expect("fits").sequence;
        let retention = kept(90, None);
        let options = BeginOptions { retention, ..BeginOptions::default() };
        type Call<'a> = &'a dyn Fn(&mut Cache) -> Result<(), CacheError>;
        let calls: [Call<'_>; 5] = [
            &|cache| cache.begin(&[1, 2, 3], options).map(|_| ()),
            &|cache| {
                let mut out = Vec::with_capacity(2);
                let wanted = [(&[1, 2][..], BeginOptions::default()), (&[1, 2][..], options)];
                let refused = cache.begin_batch(&wanted, &mut out);
                refused.map_err(|refused| {
                    assert_eq!(refused.index, 1);
                    refused.source
                })
            },
            &|cache| cache.check_admission(&[1, 2, 3], &options).map(|_| ()),
            &|cache| cache.can_admit(&[1, 2, 3], &options).map(|_| ()),
            &|cache| cache.set_retention(seq, retention),
        ];
        for call in calls {
            assert_eq!(assert_refused(&mut cache, call), CacheError::ReuseOff, "{mode:?}");
        }
    }
}

/// A prompt that comes again with the same retention is kept as the first time.
#[test]
fn retention_comes_back_with_a_hit() {
    // Seven of eight blocks: a, a', b.
    let (a, b) = (tokens(0, 17), tokens(100, 116));
    let mut rig = Rig::new(&paged(8));
    run(&mut rig, &a, kept(80, Some(100)));
    rig.cache.set_time_ms(200);
    // It decayed; now the same user comes again and asks for the same.
    run(&mut rig, &a, kept(80, Some(100)));
    run(&mut rig, &b, Retentions::default());
    assert_outlives(&mut rig, &a, &b);
}

#[test]
fn a_higher_retention_counts_for_blocks_that_are_hit() {
    let (a, b) = (tokens(0, 17), tokens(100, 116));
    let mut rig = Rig::new(&paged(8));
    run(&mut rig, &a, Retentions::default());
    run(&mut rig, &a, kept(90, None));
    run(&mut rig, &b, Retentions::default());
    assert_outlives(&mut rig, &a, &b);
}

/// The same prompt computed by two at once: the block that stays is kept as the one asked who gave
/// its own up for it.
#[test]
fn a_higher_retention_counts_for_blocks_that_two_computed() {
    let (a, b) = (tokens(0, 17), tokens(100, 116));
    for retention in [kept(90, None), kept(90, Some(100))] {
        let mut rig = Rig::new(&paged(8));
        let mut first = rig.begin(&a, Ns::default(), up_to(17)).expect("fits");
        let options = BeginOptions { retention, ..up_to(17) };
        let mut second = rig.begin(&a, Ns::default(), options).expect("fits");
        rig.prefill(&mut first, &a);
        rig.prefill(&mut second, &a);
        assert_eq!(rig.cache.stats().blocks_deduplicated, 2);
        rig.release(&second);
        rig.release(&first);
        run(&mut rig, &b, Retentions::default());
        assert_outlives(&mut rig, &a, &b);
    }
}

/// A match needs the blocks of windows too: those of a parent are kept for as much as its child.
#[test]
fn a_retention_of_a_child_keeps_its_parents_windows() {
    let mut rig = Rig::new(&Spec { windows: vec![0, 20], ..paged(8) });
    let (prompt, priority) = (tokens(0, 17), 90);
    let child = Retention { from: 8, to: 16, priority, duration_ms: None };
    run(&mut rig, &prompt, Retentions::new(&[child]).expect("valid"));
    for other in 1..20 {
        run(&mut rig, &tokens(100 * other, 100 * other + 17), Retentions::default());
    }
    assert!(rig.cache.evictions_by_priority()[35] > 20);
    assert_eq!(rig.found(&prompt), 16);
}

/// And a lower one lowers nothing.
#[test]
fn a_lower_retention_lowers_nothing_that_two_computed() {
    let (a, b) = (tokens(0, 17), tokens(100, 116));
    let mut rig = Rig::new(&paged(8));
    let options = BeginOptions { retention: kept(90, None), ..up_to(17) };
    let mut first = rig.begin(&a, Ns::default(), options).expect("fits");
    let options = BeginOptions { retention: kept(10, Some(1)), ..up_to(17) };
    let mut second = rig.begin(&a, Ns::default(), options).expect("fits");
    rig.prefill(&mut first, &a);
    rig.prefill(&mut second, &a);
    rig.release(&first);
    rig.release(&second);
    rig.cache.set_time_ms(500);
    run(&mut rig, &b, Retentions::default());
    assert_outlives(&mut rig, &a, &b);
}

/// What a child was worth counts for its parent as long as the child is there.
#[test]
fn a_child_that_is_gone_keeps_its_parent_no_longer() {
    let mut rig = Rig::new(&paged(8));
    let range = |from, to, priority| Retention { from, to, priority, duration_ms: None };
    let retention = Retentions::new(&[range(0, 8, 20), range(8, 16, 90)]).expect("valid");
    let options = BeginOptions { retention, ..up_to(16) };
    let (a, b) = (tokens(0, 16), tokens(100, 108));
    let mut line = rig.begin(&a, Ns::default(), options).expect("fits");
    rig.prefill(&mut line, &a);
    rig.truncate(&mut line, 12);
    rig.release(&line);
    run(&mut rig, &b, Retentions::default());
    assert_eq!((rig.blocks_found(&a), rig.blocks_found(&b)), (1, 1));
    let free = rig.blocks().0;
    let mut line = rig.begin(&[], Ns::default(), up_to((free + 1) * 8)).expect("fits");
    rig.feed(&mut [(&mut line, &tokens(1000, 1000 + (free + 1) * 8))]).expect("promised");
    assert_eq!((rig.blocks_found(&a), rig.blocks_found(&b)), (0, 1));
    assert_eq!(rig.cache.evictions_by_priority()[20], 1);
}

/// More tenants than names: who comes last is cached too, sooner or later.
#[test]
fn namespaces_are_not_used_up_for_ever() {
    let spec = Spec { max_seqs: 2, ..paged(80_000) };
    let mut cache = null(&spec);
    let run = |cache: &mut Cache, tenant: u64| {
        let namespace = Namespace { salt: Some(KeyPart::number(tenant)), ..Namespace::default() };
        let options = BeginOptions { namespace, ..up_to(9) };
        let prompt = tokens(0, 9);
        let begun = cache.begin(&prompt, options).expect("fits");
        let left = 9 - begun.cached_len;
        skip(cache.reserve(&[(begun.sequence, left)]).expect("fits")).expect("whole");
        cache.release(begun.sequence).expect("alive");
        begun.cached_len
    };
    for tenant in 0..66_000 {
        run(&mut cache, tenant);
    }
    // One tenant that comes again and again, while others come too.
    let mut found = 0;
    for round in 0..1000 {
        found = found.max(run(&mut cache, 1_000_000));
        run(&mut cache, 2_000_000 + round);
    }
    assert!(found > 0, "the last tenant never finds its own prompt");
}

/// Ranges say how long blocks are kept: where nothing is kept in blocks they are refused, not
/// ignored.
#[test]
fn edge_64_retention_needs_blocks() {
    let retention = kept(90, None);
    let mut cache = Spec { mode: CacheMode::Contiguous, ..Spec::default() }.open();
    let options = BeginOptions { retention, ..BeginOptions::default() };
    let digest = cache.state_digest();
    assert_eq!(cache.begin(&[1, 2, 3], options), Err(CacheError::ReuseOff));
    assert_eq!(cache.state_digest(), digest);
    let begun = cache.begin(&[1, 2, 3], BeginOptions::default()).expect("admitted");
    let digest = cache.state_digest();
    assert_eq!(cache.set_retention(begun.sequence, retention), Err(CacheError::ReuseOff));
    assert_eq!(cache.state_digest(), digest);
}
