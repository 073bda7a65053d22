//! Saves that would be read, or waited for, for ever.

use std::io::Write;
use std::path::Path;

use kvpool::cache::RestoreOptions;
use kvpool::config::CacheMode;
use kvpool::error::SaveError;
use xxhash_rust::xxh3::xxh3_64;

use super::{Folder, refused, rig, save};
use crate::common::Spec;
use crate::manager::rig::{Line, tokens};

/// A record as it lies in a file.
fn record(kind: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = [&kind.to_le_bytes()[..], &[0; 4]].concat();
    bytes.extend_from_slice(&(payload.len() as u64).to_le_bytes());
    bytes.extend_from_slice(payload);
    bytes.extend_from_slice(&xxh3_64(&bytes).to_le_bytes());
    bytes
}

/// Tokens of a block.
const TOKENS: u32 = 8;

/// A block, of which the layer has zeros, or nothing. `parent`: `u32::MAX` for none; `id`: of all
/// its tokens.
fn block(parent: u32, id: u32, layer: &[u8]) -> Vec<u8> {
    let namespace = u32::from(parent == u32::MAX);
    let mut payload = Vec::new();
    for number in [parent, namespace, TOKENS, 35] {
        payload.extend_from_slice(&number.to_le_bytes());
    }
    payload.extend_from_slice(&[0xFF; 16]);
    (0..TOKENS).for_each(|_| payload.extend_from_slice(&id.to_le_bytes()));
    let from = if layer.is_empty() { TOKENS as u8 } else { 0 };
    payload.extend_from_slice(&[0, 0, from, 0]);
    payload.extend_from_slice(layer);
    record(2, &payload)
}

/// One layer with or without a window (0), eight slots of forty blocks.
fn small(window: u32) -> Spec {
    Spec {
        mode: CacheMode::Contiguous,
        tokens_per_block: TOKENS,
        windows: vec![window],
        max_seqs: 8,
        max_seq_len: 40 * TOKENS,
        ..Spec::default()
    }
}

/// The first records of a save of `small`: its header, and the namespace of what it holds.
fn beginning(path: &Path, window: u32) -> Vec<u8> {
    let mut old = rig(&small(window));
    old.pass(&tokens(0, 33));
    save(&old.cache, path);
    let bytes = std::fs::read(path).expect("there");
    let header = u32::from_le_bytes(bytes[12..16].try_into().expect("four")) as usize;
    bytes[..header + 16 + 144 + 8].to_vec()
}

/// A chain of full length, and so many others that part from it at its last block, of all of which
/// the layer has nothing; then a chain of one block that it has. How many slots take it.
fn restored_behind(window: u32, leaves: u32) -> u64 {
    let folder = Folder::new();
    let path = folder.file("leaves");
    let mut file = beginning(&path, window);
    let geometry = small(window).open().plan().geometry.clone();
    let layer = vec![0; (TOKENS * 2 * geometry.num_kv_heads * geometry.head_dim * 4) as usize];
    let mut blocks = 0;
    for at in 0..39 {
        let parent = if at == 0 { u32::MAX } else { at - 1 };
        file.extend(block(parent, at, &[]));
        blocks += 1;
    }
    for leaf in 0..leaves {
        file.extend(block(38, 1000 + leaf, &[]));
        blocks += 1;
    }
    file.extend(block(u32::MAX, 7, &layer));
    blocks += 1;
    let counts = [blocks, u64::from(TOKENS) * blocks, 1].map(u64::to_le_bytes).concat();
    file.extend(record(4, &counts));
    std::fs::write(&path, &file).expect("written");
    let mut cache = small(window).open();
    let restored = cache.restore_prefixes(&path, &RestoreOptions::default()).expect("taken");
    cache.check_invariants().expect("invariants");
    restored.slots
}

/// What is not whole in a layer without a window is not looked at twice. What a layer with a window
/// might take is, chain by chain, each of which may be as long as the file: not for ever.
#[test]
fn edge_54_chains_in_vain_come_to_an_end() {
    for leaves in [20, 250] {
        assert_eq!(restored_behind(0, leaves), 1, "{leaves} chains end where the first one does");
    }
    assert_eq!(restored_behind(16, 20), 1, "a few of them cost nothing");
    assert_eq!(restored_behind(16, 250), 0, "many are given up");
}

/// As many chains as slots: each takes the next one, and those that keep something stay.
#[test]
fn edge_55_every_chain_of_many_has_its_slot() {
    let slots = 2048;
    let spec = Spec { max_seqs: slots, ..small(0) };
    let folder = Folder::new();
    let path = folder.file("many");
    let mut file = beginning(&path, 0);
    let layer = vec![0; (TOKENS * 2 * 8 * 4) as usize];
    (0..slots).for_each(|id| file.extend(block(u32::MAX, id, &layer)));
    let counts = [u64::from(slots), u64::from(TOKENS * slots), 1].map(u64::to_le_bytes).concat();
    file.extend(record(4, &counts));
    std::fs::write(&path, &file).expect("written");
    let mut new = rig(&spec);
    // Of those that end here two keep a text, one of them for itself.
    let lines: Vec<Line> =
        (0..5).map(|n| new.run(&tokens(9000 + 100 * n, 9020 + 100 * n))).collect();
    lines.iter().for_each(|line| new.release(line));
    new.cache.clear_cached();
    let kept = [new.run(&tokens(7000, 7020)), new.run(&tokens(8000, 8020))];
    kept.iter().for_each(|line| new.release(line));
    let restored = new.cache.restore_prefixes(&path, &RestoreOptions::default()).expect("taken");
    new.cache.check_invariants().expect("invariants");
    assert_eq!(restored.slots, u64::from(slots) - 2);
    let found = |id: u32| new.found(&[id; TOKENS as usize + 1]);
    let missing: Vec<u32> = (0..slots).filter(|id| found(*id) != TOKENS).collect();
    assert_eq!(missing, [slots - 2, slots - 1], "the last of the file");
    assert!(new.found(&tokens(7000, 7020)) >= 19 && new.found(&tokens(8000, 8020)) >= 19);
}

/// Smaller blocks than any cache has would take more memory than the plan says.
#[test]
fn edge_54_blocks_of_a_few_tokens_are_refused() {
    let folder = Folder::new();
    let path = folder.file("small");
    let beginning = beginning(&path, 0);
    let header = u32::from_le_bytes(beginning[12..16].try_into().expect("four")) as usize;
    for tokens in [0_u32, 1, 2, 4, 7, 12, 256] {
        let mut file = std::fs::read(&path).expect("there");
        file[48..52].copy_from_slice(&tokens.to_le_bytes());
        let sum = xxh3_64(&file[..header - 8]);
        file[header - 8..header].copy_from_slice(&sum.to_le_bytes());
        let other = folder.file("changed");
        std::fs::write(&other, &file).expect("written");
        let problem = "an impossible number of tokens of a block";
        let error = refused(&mut small(0).open(), &other);
        assert_eq!(error, SaveError::Damaged { at: 0, problem }, "{tokens} tokens");
    }
}

/// A record that cannot be is refused by its length: the file has holes, and nobody could read it
/// to its end.
#[test]
fn edge_54_a_record_of_terabytes_is_not_read() {
    let folder = Folder::new();
    let path = folder.file("holes");
    let beginning = beginning(&path, 0);
    for kind in [2_u32, 3] {
        let mut file = std::fs::File::create(&path).expect("a file");
        file.write_all(&beginning).expect("written");
        let len = 1_u64 << 42;
        file.write_all(&[&kind.to_le_bytes()[..], &[0; 4], &len.to_le_bytes()].concat())
            .expect("written");
        if file.set_len(len + (1 << 20)).is_err() {
            println!("skipped: no file of that length here");
            return;
        }
        let error = refused(&mut small(0).open(), &path);
        let problem = "an impossible length";
        let at = beginning.len() as u64;
        assert_eq!(error, SaveError::Damaged { at, problem }, "kind {kind}");
    }
}

/// Opening a pipe waits for whoever writes to it.
#[test]
#[cfg(unix)]
fn edge_54_what_is_no_file_is_not_waited_for() {
    let folder = Folder::new();
    let pipe = folder.file("pipe");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status();
    if !made.is_ok_and(|status| status.success()) {
        println!("skipped: no mkfifo");
        return;
    }
    let error = refused(&mut small(0).open(), &pipe);
    assert!(error.to_string().contains("reading what is no file"), "{error}");
    let error = refused(&mut small(0).open(), Path::new("/dev/zero"));
    assert!(error.to_string().contains("reading what is no file"), "{error}");
    let error = refused(&mut small(0).open(), folder.file(".").as_path());
    assert!(error.to_string().contains("reading a folder as a file"), "{error}");
}
