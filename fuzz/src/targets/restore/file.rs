//! The bytes of a save: as a cache wrote them, or as an input's records say; and changed.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{LazyLock, Mutex};

use kvpool::cache::SaveOptions;
use xxhash_rust::xxh3::xxh3_64;

use super::cache::{MODELS, REWIND, pass};
use super::input::{Edit, Input, Name, Record, Shape};
use super::record::Written;

/// A save of an old cache: of a sequence, or of prefixes. `None` where prefixes are not shared, or
/// have no room.
pub(super) fn saved(
    (model, old, sequence): (u8, Shape, bool),
    texts: u8,
    path: &Path,
) -> Option<Vec<u8>> {
    let mut cache = old.open(model);
    if !sequence && !cache.plan().reuse.is_on() {
        return None;
    }
    let longest = cache.plan().limits.max_seq_len;
    if sequence {
        let name = Name([texts % 4, 0, 0]).namespace(u32::from(texts) % 24);
        let len = 1 + u32::from(texts) % longest;
        let sequence = pass(&mut cache, texts, len, name, true)?;
        if texts >= 128 {
            // Behind what it had, as far as a window allows it.
            let _ = cache.truncate(sequence, len.saturating_sub(REWIND).max(1));
        }
        cache.save_sequence(sequence, path, &SaveOptions::default()).expect("written");
    } else {
        for n in 0..=texts % 4 {
            let name = Name([n % 3, texts % 2, 0]).namespace(u32::from(texts) % 24);
            let len = longest.min(20 + 7 * u32::from(n) + u32::from(texts) % 8);
            let sequence = pass(&mut cache, n, len, name, true)?;
            cache.release(sequence).expect("alive");
        }
        cache.save_prefixes(path, &SaveOptions::default()).expect("written");
    }
    Some(std::fs::read(path).expect("there"))
}

/// A header of the old cache, whose records are of a sequence or of prefixes as the input says.
fn header(input: &Input, path: &Path) -> Vec<u8> {
    static HEADERS: LazyLock<Mutex<HashMap<u8, Vec<u8>>>> = LazyLock::new(Mutex::default);
    let mut headers = HEADERS.lock().expect("one thread");
    let model = input.model % MODELS;
    // It does not depend on the shape but for what is set below, nor, so, on earlier inputs.
    let header = headers.entry(model).or_insert_with(|| {
        let all = saved((model, Shape::default(), true), 0, path).expect("a sequence fits");
        let len = usize::from(u16::from_le_bytes([all[12], all[13]]));
        all[..len].to_vec()
    });
    let mut header = header.clone();
    header[16..20].copy_from_slice(&(if input.sequence { 1_u32 } else { 2 }).to_le_bytes());
    header[48..52].copy_from_slice(&input.old.per_block().to_le_bytes());
    let end = header.len() - 8;
    let sum = xxh3_64(&header[..end]);
    header[end..].copy_from_slice(&sum.to_le_bytes());
    header
}

/// A file of such records: the header of the old cache, and the end that they ask for.
pub(super) fn written(input: &Input, records: &[Record], path: &Path) -> Vec<u8> {
    let mut file = header(input, path);
    let mut written = Written::new(input.sequence, input.old.per_block());
    for one in records.iter().take(40) {
        file.extend(written.record(*one));
    }
    file.extend(written.end());
    file
}

/// Where the records of a file begin, the header first, and its end.
fn starts(file: &[u8]) -> Vec<usize> {
    let mut starts = vec![0, usize::from(u16::from_le_bytes([file[12], file[13]]))];
    let mut at = starts[1];
    while at < file.len() {
        let len = file[at + 8..at + 16].try_into().expect("eight bytes");
        at += 24 + usize::try_from(u64::from_le_bytes(len)).expect("small");
        starts.push(at);
    }
    starts
}

/// Changes bytes, and mends the checksums.
pub(super) fn edit(file: &mut [u8], edits: &[Edit]) {
    let starts = starts(file);
    for edit in edits {
        let record = usize::from(edit.record) % (starts.len() - 1);
        let (start, end) = (starts[record], starts[record + 1] - 8);
        let at = start + usize::from(edit.at) % (end - start);
        file[at] = edit.byte;
        if !edit.wrong {
            let sum = xxh3_64(&file[start..end]);
            file[end..end + 8].copy_from_slice(&sum.to_le_bytes());
        }
    }
}
