//! Random states, saved and restored into another plan.

use kvpool::cache::{RestoreOptions, SaveOptions};
use kvpool::config::{CacheMode, Capacity};

use super::{Folder, attend, restore, rig, save};
use crate::common::{MODES, Rng, Spec, assert_same_bits, on_cuda};
use crate::manager::rig::{Line, Rig, tokens, up_to};
use crate::manager::text::Ns;

/// A prompt of a few families: many begin alike.
fn prompt(rng: &mut Rng) -> Vec<u32> {
    let mut prompt = tokens(0, 8 * rng.below(4) as u32);
    let family = rng.below(3) as u32;
    prompt.extend(tokens(100 + family, 100 + family + 1 + rng.below(24) as u32));
    if rng.below(2) == 0 {
        prompt.extend(tokens(200, 201 + rng.below(12) as u32));
    }
    prompt
}

/// A salt that begins elsewhere would begin at another token in other blocks.
fn namespace(rng: &mut Rng) -> Ns {
    match rng.below(4) {
        0 => Ns { salt: 1 + rng.below(3) as u8, ..Ns::default() },
        1 => Ns { adapter: 3, ..Ns::default() },
        _ => Ns::default(),
    }
}

/// Uses a cache for a while; gives the sequences that are alive at the end.
fn live(rig: &mut Rig, rng: &mut Rng, steps: u32) -> Vec<Line> {
    let mut lines: Vec<Line> = Vec::new();
    for _ in 0..steps {
        match rng.below(6) {
            0 | 1 => {
                let (prompt, ns) = (prompt(rng), namespace(rng));
                if let Ok(mut line) = rig.begin(&prompt, ns, up_to(62)) {
                    rig.prefill(&mut line, &prompt);
                    lines.push(line);
                }
            }
            2 | 3 if !lines.is_empty() => {
                let at = rng.below(lines.len() as u64) as usize;
                let line = lines.swap_remove(at);
                rig.release(&line);
            }
            4 if !lines.is_empty() => {
                let at = rng.below(lines.len() as u64) as usize;
                let len = lines[at].text.len();
                if len < 54 {
                    let more: Vec<u32> = (0..1 + rng.below(6) as u32).map(|n| 300 + n).collect();
                    let mut line = lines[at].clone();
                    rig.feed(&mut [(&mut line, &more)]).expect("promised");
                    lines[at] = line;
                }
            }
            5 if !lines.is_empty() => {
                let at = rng.below(lines.len() as u64) as usize;
                let mut line = lines[at].clone();
                let len = line.text.len().saturating_sub(1 + rng.below(3) as u32).max(1);
                if rig.cache.truncate(line.seq, len).is_ok() {
                    line.text.truncate(len);
                    lines[at] = line;
                }
            }
            _ => {}
        }
    }
    lines
}

fn spec(rng: &mut Rng) -> Spec {
    let mode = MODES[rng.below(3) as usize];
    // Of a hybrid plan one layer is contiguous: with a window, or without.
    let (windows, contiguous) =
        [(vec![0, 0], 0), (vec![20, 0], 0), (vec![0, 12, 20], 1)][rng.below(3) as usize].clone();
    Spec {
        mode,
        tokens_per_block: [8, 16, 32][rng.below(3) as usize],
        sink_tokens: rng.below(3) as u32,
        max_seqs: 5,
        max_rewind_tokens: rng.below(5) as u32,
        max_step_tokens: Some(8),
        contiguous_layers: vec![contiguous],
        windows,
        capacity: Capacity::WorstCase,
        ..Spec::default()
    }
}

/// What the old cache finds, the new one finds, as far as its blocks can hold it; and everything
/// that it finds is right, in K, in V and in attention.
#[test]
fn edge_54_random_states_come_back_in_other_plans() {
    let folder = Folder::new();
    let file = folder.file("prefixes");
    let (mut found, mut same) = (0_u64, 0);
    for seed in 0..if on_cuda() { 6 } else { 60 } {
        let mut rng = Rng(seed);
        let from = spec(&mut rng);
        let other = spec(&mut rng);
        let to = Spec {
            windows: from.windows.clone(),
            sink_tokens: from.sink_tokens,
            contiguous_layers: from.contiguous_layers.clone(),
            ..other
        };
        let mut old = rig(&from);
        let lines = live(&mut old, &mut rng, 60);
        save(&old.cache, &file);
        let mut new = rig(&to);
        let kept = live(&mut new, &mut rng, if seed % 2 == 0 { 0 } else { 20 });
        let restored = restore(&mut new.cache, &file);
        kept.iter().for_each(|line| new.check(line));
        let digest = new.cache.state_digest();
        let again = restore(&mut new.cache, &file);
        assert_eq!((again.blocks, again.slots), (0, 0), "seed {seed}: {restored:?} {again:?}");
        assert_eq!(new.cache.state_digest(), digest, "seed {seed}");
        kept.iter().for_each(|line| new.release(line));
        new.cache.poison_unused(0xFF).expect("done");
        let what = format!("seed {seed}: {from:?} to {to:?}");
        for _ in 0..6 {
            let (mut prompt, ns) = (prompt(&mut rng), namespace(&mut rng));
            prompt.push(999);
            let (x, y) = (
                old.cache.probe(&prompt, &ns.options()).cached_len,
                new.cache.probe(&prompt, &ns.options()).cached_len,
            );
            let alike = from.mode == CacheMode::Paged
                && to.mode == CacheMode::Paged
                && from.tokens_per_block == to.tokens_per_block
                && from.max_rewind_tokens >= to.max_rewind_tokens;
            if alike && seed % 2 == 0 && restored.dropped_tokens == 0 {
                // A shorter rewind needs less of the windows, so that more may be found.
                assert!(y >= x, "{what}: {y} instead of {x}");
                assert!(x == y || from.max_rewind_tokens > to.max_rewind_tokens, "{what}");
                same += 1;
            }
            found += u64::from(y);
            // The contents are compared with what they must be.
            let Ok(mut b) = new.begin(&prompt, ns, up_to(62)) else { continue };
            let rest = prompt[b.text.len() as usize..].to_vec();
            let mut out = Vec::new();
            for chunk in rest.chunks(8) {
                out = attend(&mut new, &mut b, chunk);
            }
            // And the last token's attention with that of a cache in which nothing was restored.
            let mut fresh = rig(&to);
            let mut c = fresh.begin(&prompt, ns, up_to(62)).expect("admitted");
            fresh.prefill(&mut c, &prompt[..prompt.len() - 1]);
            let alone = attend(&mut fresh, &mut c, &prompt[prompt.len() - 1..]);
            assert_same_bits(&last_row(&new, &out), &last_row(&fresh, &alone), &what);
            new.check(&b);
            new.release(&b);
        }
        lines.iter().for_each(|line| old.release(line));
    }
    assert!(found > if on_cuda() { 100 } else { 2000 }, "{found} tokens found");
    assert!(same > 0 || on_cuda(), "some plans are alike");
}

/// The last row of each layer.
fn last_row(rig: &Rig, out: &[f32]) -> Vec<f32> {
    let geometry = &rig.cache.plan().geometry;
    let row = (geometry.num_q_heads * geometry.head_dim) as usize;
    let layer = out.len() / geometry.num_layers as usize;
    out.chunks(layer).flat_map(|layer| layer[layer.len() - row..].to_vec()).collect()
}

/// Sequences in every state, into other plans beside what lives there.
#[test]
fn edge_54_random_sequences_go_on_in_other_plans() {
    let folder = Folder::new();
    let file = folder.file("sequence");
    let mut restored = 0;
    for seed in 100..if on_cuda() { 106 } else { 160 } {
        let mut rng = Rng(seed);
        let (from, other) = (spec(&mut rng), spec(&mut rng));
        let to = Spec {
            windows: from.windows.clone(),
            sink_tokens: from.sink_tokens,
            contiguous_layers: from.contiguous_layers.clone(),
            ..other
        };
        let mut old = rig(&from);
        let lines = live(&mut old, &mut rng, 40);
        let mut new = rig(&to);
        let mut kept = live(&mut new, &mut rng, 15);
        for line in lines {
            old.cache.save_sequence(line.seq, &file, &SaveOptions::default()).expect("written");
            if kept.len() == 5 {
                let gone = kept.swap_remove(rng.below(5) as usize);
                new.release(&gone);
            }
            let begun = new.cache.restore_sequence(&file, &RestoreOptions::default());
            let begun = begun.unwrap_or_else(|error| panic!("seed {seed}: {error}"));
            new.cache.check_invariants().expect("invariants");
            new.cache.poison_unused(0xFF).expect("done");
            let mut b = Line { seq: begun.sequence, ..line.clone() };
            new.check(&b);
            let mut a = line;
            if a.text.len() < 50 {
                let more = [400, 401, 402];
                let (x, y) = (attend(&mut old, &mut a, &more), attend(&mut new, &mut b, &more));
                assert_same_bits(&x, &y, &format!("seed {seed}: {from:?} to {to:?}"));
            }
            kept.push(b);
            restored += 1;
        }
        // What they leave is found, and is right.
        kept.iter().for_each(|line| new.release(line));
        new.cache.poison_unused(0xFF).expect("done");
        for _ in 0..6 {
            let (prompt, ns) = (prompt(&mut rng), namespace(&mut rng));
            if let Ok(mut line) = new.begin(&prompt, ns, up_to(62)) {
                new.prefill(&mut line, &prompt);
                new.release(&line);
            }
        }
    }
    assert!(restored > if on_cuda() { 5 } else { 100 }, "{restored} sequences");
}
