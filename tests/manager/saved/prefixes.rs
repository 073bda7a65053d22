//! Prefixes that are saved and restored.

use kvpool::cache::{BeginOptions, KeyPart, RestoreOptions, SaveOptions};
use kvpool::config::{Format, ScaleKind};
use kvpool::error::{CacheError, SaveError};

use super::{Folder, attend, refused, restore, rig, save, windowed};
use crate::common::{MODES, Spec, assert_same_bits};
use crate::manager::rig::{Line, Rig, paged, tokens, up_to};
use crate::manager::text::Ns;

#[test]
fn edge_54_prefixes_come_back_bit_for_bit() {
    let folder = Folder::new();
    let file = folder.file("prefixes");
    for mode in MODES {
        for windows in [vec![0, 0, 0], vec![20, 0, 12]] {
            let spec = Spec { windows, ..windowed(mode) };
            let mut old = rig(&spec);
            let prompt = tokens(0, 41);
            old.pass(&prompt);
            let saved = save(&old.cache, &file);
            assert!(saved.tokens >= 40, "{mode:?}: {saved:?}");
            let mut new = rig(&spec);
            let restored = restore(&mut new.cache, &file);
            assert_eq!(restored.file_tokens, saved.tokens);
            let (of_save, of_restore) = (old.cache.stats(), new.cache.stats());
            assert_eq!((of_save.saves, of_save.saved_tokens), (1, saved.tokens));
            assert_eq!(
                (of_restore.restored_blocks, of_restore.restored_slots, of_restore.saves),
                (restored.blocks, restored.slots, 0)
            );
            let (before, after) = (old.found(&prompt), new.found(&prompt));
            assert!(before >= 32, "{mode:?}: {before}");
            assert_eq!(after, before, "{mode:?} {restored:?}");
            // The contents are checked when it begins.
            let mut a = old.begin(&prompt, Ns::default(), up_to(60)).expect("admitted");
            let mut b = new.begin(&prompt, Ns::default(), up_to(60)).expect("admitted");
            assert_eq!(a.cached_len, b.cached_len);
            let rest = &prompt[a.cached_len as usize..];
            for more in [rest, &[7, 8, 9], &[10]] {
                let (x, y) = (attend(&mut old, &mut a, more), attend(&mut new, &mut b, more));
                assert_same_bits(&x, &y, &format!("{mode:?}"));
            }
            old.check(&a);
            new.check(&b);
        }
    }
}

#[test]
fn edge_55_a_second_restore_changes_nothing() {
    let folder = Folder::new();
    let file = folder.file("prefixes");
    for mode in MODES {
        let spec = windowed(mode);
        let mut old = rig(&spec);
        old.pass(&tokens(0, 41));
        old.pass(&[tokens(0, 20), tokens(90, 110)].concat());
        save(&old.cache, &file);
        let mut new = rig(&spec);
        let first = restore(&mut new.cache, &file);
        assert!(first.blocks + first.slots > 0, "{mode:?}");
        let (digest, stats) = (new.cache.state_digest(), new.cache.stats());
        let second = restore(&mut new.cache, &file);
        assert_eq!((second.blocks, second.slots), (0, 0), "{mode:?}");
        assert_eq!(second.dropped_tokens, first.dropped_tokens, "{mode:?}");
        assert_eq!(new.cache.state_digest(), digest, "{mode:?}");
        assert_eq!(new.cache.stats(), stats, "{mode:?}");
        // And into the cache that it is of.
        let digest = old.cache.state_digest();
        let own = restore(&mut old.cache, &file);
        assert_eq!((own.blocks, own.slots, own.dropped_tokens), (0, 0, 0), "{mode:?}");
        assert_eq!(old.cache.state_digest(), digest, "{mode:?}");
    }
}

/// The order of eviction is the file's, and what was cached before stays longer.
#[test]
fn edge_55_the_order_of_eviction_is_kept() {
    let folder = Folder::new();
    let file = folder.file("prefixes");
    let spec = paged(32);
    let mut old = rig(&spec);
    let prompts: Vec<Vec<u32>> = (0..4).map(|n| tokens(100 * n, 100 * n + 17)).collect();
    prompts.iter().for_each(|prompt| _ = old.pass(prompt));
    // The first is used again: it is the youngest now.
    old.pass(&prompts[0]);
    save(&old.cache, &file);
    let mut new = rig(&spec);
    let own = tokens(1000, 1017);
    new.pass(&own);
    assert_eq!(restore(&mut new.cache, &file).blocks, 8);
    // 10 of 32 blocks are cached; sequences of seven blocks push them out, the oldest first.
    let holds = |rig: &Rig| -> Vec<bool> {
        let all = prompts.iter().chain([&own]);
        all.map(|prompt| rig.blocks_found(prompt) == 2).collect()
    };
    assert_eq!(holds(&new), [true; 5]);
    let mut lost = Vec::new();
    let mut held = Vec::new();
    for n in 0..16_u32 {
        let line = new.begin(&tokens(2000 + 100 * n, 2016 + 100 * n), Ns::default(), up_to(16));
        let Ok(mut line) = line else { break };
        let prompt = tokens(2000 + 100 * n, 2016 + 100 * n);
        new.prefill(&mut line, &prompt);
        held.push(line);
        for (at, there) in holds(&new).into_iter().enumerate() {
            if !there && !lost.contains(&at) {
                lost.push(at);
            }
        }
        if held.len() == 8 {
            held.iter().for_each(|line| new.release(line));
            held.clear();
        }
    }
    assert_eq!(lost[..5.min(lost.len())], [1, 2, 3, 0, 4][..5.min(lost.len())]);
    assert!(lost.len() >= 3, "{lost:?}");
}

/// Free blocks all over the place; live sequences; what is in use or cached stays.
#[test]
fn edge_55_into_a_fragmented_pool_and_a_full_one() {
    let folder = Folder::new();
    let file = folder.file("prefixes");
    let spec = paged(24);
    let mut old = rig(&spec);
    let prompts: Vec<Vec<u32>> = (0..4).map(|n| tokens(100 * n, 100 * n + 33)).collect();
    prompts.iter().for_each(|prompt| _ = old.pass(prompt));
    save(&old.cache, &file);

    let mut new = rig(&spec);
    // Every second block stays taken.
    let lines: Vec<Line> = (0..8).map(|n| new.run(&tokens(3000 + 50 * n, 3016 + 50 * n))).collect();
    lines.iter().step_by(2).for_each(|line| new.release(line));
    new.cache.clear_cached();
    let (free, active, ..) = new.blocks();
    assert_eq!((free, active), (16, 8));
    let restored = restore(&mut new.cache, &file);
    assert_eq!(restored.blocks, 16);
    assert_eq!(restored.dropped_tokens, 0);
    for prompt in &prompts {
        assert_eq!(new.blocks_found(prompt), 4);
    }
    lines.iter().skip(1).step_by(2).for_each(|line| new.check(line));
    // What it restored is what it was.
    lines.iter().skip(1).step_by(2).for_each(|line| new.release(line));
    for prompt in &prompts {
        let line = new.begin(prompt, Ns::default(), up_to(33)).expect("admitted");
        assert_eq!(line.cached_len, 32);
        new.release(&line);
    }

    // Full of what is cached: nothing of it goes. Room for five: the youngest chain, and a block.
    let mut full = rig(&spec);
    (0..4).for_each(|n| _ = full.pass(&tokens(4000 + 100 * n, 4033 + 100 * n)));
    full.pass(&tokens(4900, 4925));
    let before = full.cache.stats();
    assert_eq!(full.blocks(), (5, 0, 19, 0));
    let restored = restore(&mut full.cache, &file);
    assert_eq!((restored.blocks, restored.dropped_tokens), (5, 88));
    assert_eq!(full.cache.stats().evictions, before.evictions);
    assert_eq!(full.blocks(), (0, 0, 24, 0));
    assert_eq!(prompts.iter().map(|p| full.blocks_found(p)).collect::<Vec<_>>(), [0, 0, 1, 4]);
    (0..4).for_each(|n| assert_eq!(full.blocks_found(&tokens(4000 + 100 * n, 4032 + 100 * n)), 4));
    assert_eq!(restore(&mut full.cache, &file).blocks, 0);
}

/// A chain of which the first part is held, and one of which it is cached, go on behind it.
#[test]
fn edge_55_chains_go_on_behind_what_is_there() {
    let folder = Folder::new();
    let file = folder.file("prefixes");
    let spec = paged(24);
    let mut old = rig(&spec);
    let prompts = [tokens(0, 49), [tokens(0, 16), tokens(500, 533)].concat(), tokens(800, 833)];
    prompts.iter().for_each(|prompt| _ = old.pass(prompt));
    save(&old.cache, &file);
    let mut new = rig(&spec);
    new.pass(&prompts[2][..17]);
    let held = new.run(&prompts[0][..17]);
    let restored = restore(&mut new.cache, &file);
    assert_eq!((restored.blocks_present, restored.dropped_tokens), (4, 0));
    for prompt in &prompts {
        assert_eq!(new.blocks_found(prompt), prompt.len() as u32 / 8);
    }
    new.release(&held);
    prompts.iter().for_each(|prompt| _ = new.pass(prompt));
}

#[test]
fn edge_54_namespaces_priorities_and_time_limits_come_back() {
    use kvpool::cache::{Retention, Retentions};
    let folder = Folder::new();
    let file = folder.file("prefixes");
    let spec = paged(32);
    let mut old = rig(&spec);
    let prompt = tokens(0, 33);
    let salted = Ns { salt: 2, salt_from: 16, ..Ns::default() };
    let adapted = Ns { adapter: 3, model: 4, ..Ns::default() };
    for ns in [Ns::default(), salted, adapted] {
        let range = Retention { from: 0, to: 33, priority: 80, duration_ms: Some(1000) };
        let retention = match ns.adapter {
            3 => Retentions::new(&[range]).expect("right"),
            _ => Retentions::default(),
        };
        let options = BeginOptions { retention, ..up_to(33) };
        let mut line = old.begin(&prompt, ns, options).expect("admitted");
        old.prefill(&mut line, &prompt);
        old.release(&line);
    }
    old.cache.set_time_ms(400);
    save(&old.cache, &file);
    let mut new = rig(&spec);
    new.cache.set_time_ms(5000);
    assert_eq!(restore(&mut new.cache, &file).blocks, 4 + 2 + 4);
    for ns in [Ns::default(), salted, adapted] {
        assert_eq!(new.cache.probe(&prompt, &ns.options()).cached_len, 32);
    }
    let other = Ns { salt: 5, salt_from: 16, ..Ns::default() };
    assert_eq!(new.cache.probe(&prompt, &other.options()).cached_len, 16);
    // The priority of what was kept ends when it would have.
    let counts = |rig: &Rig| rig.cache.evictions_by_priority().to_vec();
    let before = counts(&new);
    new.cache.set_time_ms(5599);
    new.cache.clear_cached();
    assert_eq!(counts(&new), before);
    let mut later = rig(&spec);
    restore(&mut later.cache, &file);
    let mut sooner = rig(&spec);
    restore(&mut sooner.cache, &file);
    sooner.cache.set_time_ms(599);
    later.cache.set_time_ms(600);
    let first_to_go = |rig: &mut Rig| {
        let mut lines = Vec::new();
        for n in 0..8_u32 {
            let Ok(mut line) =
                rig.begin(&tokens(9000 + 100 * n, 9025 + 100 * n), Ns::default(), up_to(25))
            else {
                break;
            };
            let prompt = tokens(9000 + 100 * n, 9025 + 100 * n);
            rig.prefill(&mut line, &prompt);
            lines.push(line);
        }
        rig.cache.evictions_by_priority()[80]
    };
    assert_eq!(first_to_go(&mut later), 0, "they are of the usual priority");
    assert!(first_to_go(&mut sooner) > 0 || sooner.blocks_found(&prompt) == 0);

    // Without what is private.
    let options = SaveOptions { unsalted_only: true, ..SaveOptions::default() };
    old.cache.save_prefixes(&file, &options).expect("written");
    let mut public = rig(&spec);
    assert_eq!(restore(&mut public.cache, &file).blocks, 8);
    assert_eq!(public.cache.probe(&prompt, &salted.options()).cached_len, 16);
}

/// Only what could be found is saved.
#[test]
fn edge_54_other_epochs_stay_behind() {
    let folder = Folder::new();
    let file = folder.file("prefixes");
    for mode in MODES {
        let mut old = rig(&windowed(mode));
        old.pass(&tokens(0, 41));
        old.cache.set_epoch(7).expect("idle");
        old.epoch = 7;
        old.pass(&tokens(500, 541));
        let saved = save(&old.cache, &file);
        assert!(saved.tokens <= 41, "{saved:?}");
        let mut new = rig(&windowed(mode));
        let error = refused(&mut new.cache, &file);
        assert_eq!(error, SaveError::OtherEpoch { found: 7, expected: 0 });
        new.cache.set_epoch(7).expect("idle");
        new.epoch = 7;
        restore(&mut new.cache, &file);
        assert_eq!(new.found(&tokens(0, 41)), 0);
        assert_eq!(new.found(&tokens(500, 541)), old.found(&tokens(500, 541)));
        new.pass(&tokens(500, 541));
    }
}

#[test]
fn edge_54_another_plan_or_model_is_refused_by_name() {
    let folder = Folder::new();
    let (prefixes, sequence) = (folder.file("prefixes"), folder.file("sequence"));
    let spec = Spec { format: Format::Int8, head_dim: 32, ..Spec::default() };
    let mut old = Rig { stored: None, ..rig(&spec) };
    let seq = old.cache.begin(&tokens(0, 20), up_to(30)).expect("admitted").sequence;
    crate::manager::driver_step::skip(old.cache.reserve(&[(seq, 20)]).expect("fits"))
        .expect("whole");
    save(&old.cache, &prefixes);
    old.cache.save_sequence(seq, &sequence, &SaveOptions::default()).expect("written");
    let others = [
        ("element format", Spec { format: Format::F16, ..spec.clone() }),
        ("scale form", Spec { scale: ScaleKind::PerGroup32, ..spec.clone() }),
        ("number of layers", Spec { windows: vec![0; 3], ..spec.clone() }),
        ("query heads", Spec { num_q_heads: 4, ..spec.clone() }),
        ("KV heads", Spec { num_kv_heads: 2, ..spec.clone() }),
        ("head_dim", Spec { head_dim: 64, ..spec.clone() }),
        ("sink tokens", Spec { sink_tokens: 1, windows: vec![0, 32], ..spec.clone() }),
        ("attention window", Spec { windows: vec![0, 32], ..spec.clone() }),
        (
            "rotation",
            Spec {
                rope: Some(kvpool::config::RopeConfig {
                    theta: Some(1e4),
                    ..kvpool::config::RopeConfig::default()
                }),
                ..spec.clone()
            },
        ),
    ];
    for (what, other) in others {
        let mut new = other.open();
        for file in [&prefixes, &sequence] {
            let error = if file == &prefixes {
                refused(&mut new, file)
            } else {
                let digest = new.state_digest();
                let error = new.restore_sequence(file, &RestoreOptions::default());
                assert_eq!(new.state_digest(), digest);
                error.expect_err("refused")
            };
            assert!(matches!(error, SaveError::Differs { .. }), "{what}: {error}");
            assert!(error.to_string().contains(what), "{what}: {error}");
        }
    }
    let mut new = spec.open();
    let model = KeyPart::bytes(b"other weights").ok();
    let options = RestoreOptions { model, ..RestoreOptions::default() };
    assert_eq!(new.restore_prefixes(&prefixes, &options), Err(SaveError::OtherModel));
    assert_eq!(new.restore_sequence(&sequence, &options), Err(SaveError::OtherModel));
    assert!(matches!(refused(&mut new, &sequence), SaveError::OtherKind { .. }));
    let error = new.restore_sequence(&prefixes, &RestoreOptions::default());
    assert!(matches!(error, Err(SaveError::OtherKind { .. })));
    assert!(matches!(refused(&mut new, &folder.file("none")), SaveError::Io { code: 2, .. }));
    assert!(matches!(refused(&mut new, folder.0.path()), SaveError::Io { .. }));
    // The same model, and everything goes.
    let options = SaveOptions { model, unsalted_only: false };
    old.cache.save_prefixes(&prefixes, &options).expect("written");
    let options = RestoreOptions { model, ..RestoreOptions::default() };
    assert_eq!(new.restore_prefixes(&prefixes, &options).expect("taken").blocks, 2);
    assert_eq!(refused(&mut spec.open(), &prefixes), SaveError::OtherModel);
    let off = Spec { prefix_reuse: false, ..spec };
    let mut new = off.open();
    assert_eq!(refused(&mut new, &prefixes), SaveError::Cache(CacheError::ReuseOff));
    let error = new.save_prefixes(&folder.file("x"), &SaveOptions::default());
    assert_eq!(error, Err(SaveError::Cache(CacheError::ReuseOff)));
}
