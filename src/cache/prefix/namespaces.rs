//! Who may share with whom: salt, adapter and model of a prompt, as small numbers.
//!
//! A namespace is kept whole, and compared whole when a sequence begins (P7); from there on its
//! number stands for it, and blocks carry the number. It lives as long as a sequence or a block
//! names it.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use super::table::ProbeTable;
use crate::device::{huge_vec, room, table_of};
use crate::error::{CacheError, DeviceError};
use crate::plan::{NAMESPACE_BYTES, NO_BLOCK};

/// A salt, an adapter's or a model's id: up to 47 bytes, or a number. A number is different from
/// every string of bytes, and the empty string from none at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KeyPart {
    /// The bytes, and in the last one their number plus 1, or [`NUMBER`].
    words: [u64; 6],
}

/// Marks a number in the last byte of a [`KeyPart`].
const NUMBER: u64 = 0xFF;

impl KeyPart {
    /// The most bytes that it can have.
    pub const MAX_BYTES: usize = 47;

    /// Bytes, such as a name or a UUID.
    ///
    /// # Errors
    /// [`CacheError::KeyPartTooLong`] when there are more than [`KeyPart::MAX_BYTES`]: give their
    /// digest then. (Not an `Option`, which would pass for a part that is absent.)
    pub fn bytes(bytes: &[u8]) -> Result<Self, CacheError> {
        if bytes.len() > Self::MAX_BYTES {
            let (len, limit) = (bytes.len(), Self::MAX_BYTES);
            return Err(CacheError::KeyPartTooLong { len, limit });
        }
        let mut all = [0_u8; 48];
        all[..bytes.len()].copy_from_slice(bytes);
        // At most 48.
        all[47] = u8::try_from(bytes.len() + 1).unwrap_or(u8::MAX);
        let mut words = [0; 6];
        for (word, eight) in words.iter_mut().zip(all.as_chunks::<8>().0) {
            *word = u64::from_le_bytes(*eight);
        }
        Ok(Self { words })
    }

    /// The words that stand for it in a file.
    pub(in crate::cache) const fn words(&self) -> &[u64; 6] {
        &self.words
    }

    /// The part that some words stand for: [`None`] inside for an absent one. `None` for words that
    /// no part has.
    pub(in crate::cache) fn from_words(words: &[u64; 6]) -> Option<Option<Self>> {
        if *words == [0; 6] {
            return Some(None);
        }
        let last = words[5] >> 56;
        let rest = [words[1], words[2], words[3], words[4], words[5] & !(NUMBER << 56)];
        if last == NUMBER {
            return (rest == [0; 5]).then_some(Some(Self { words: *words }));
        }
        let mut bytes = [0_u8; 48];
        for (eight, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(words) {
            *eight = word.to_le_bytes();
        }
        let len =
            usize::try_from(last).ok()?.checked_sub(1).filter(|len| *len <= Self::MAX_BYTES)?;
        let padding = bytes[len..Self::MAX_BYTES].iter();
        padding.eq(&[0; Self::MAX_BYTES][len..]).then_some(Some(Self { words: *words }))
    }

    /// A number.
    #[must_use]
    pub const fn number(number: u64) -> Self {
        Self { words: [number, 0, 0, 0, 0, NUMBER << 56] }
    }
}

/// What a prompt's blocks are told apart by, beside their tokens: sequences share only with
/// sequences of the same namespace.
///
/// Everything else on which K and V depend and that can differ between sequences of one cache
/// (position scaling, a prompt's images, ...) belongs into one of the parts as well. Each part is
/// optional, and absent is different from empty and from 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Namespace {
    /// Keeps a tenant's tokens private, from `salt_from` on.
    pub salt: Option<KeyPart>,
    /// Position of the first salted token, rounded down to a block: what lies before is shared
    /// with every sequence of the same adapter and model. Without a salt it means nothing.
    pub salt_from: u32,
    /// The adapter (LoRA) that computes K and V.
    pub adapter: Option<KeyPart>,
    /// The model, where one cache serves several.
    pub model: Option<KeyPart>,
}

/// Words of a namespace: three parts and the epoch.
pub(super) const WORDS: usize = 19;

impl Namespace {
    /// The namespace under an epoch, with its salt or without.
    pub(super) fn key(&self, epoch: u64, salted: bool) -> [u64; WORDS] {
        let mut key = [0; WORDS];
        key[..WORDS - 1].copy_from_slice(&self.words(salted));
        key[WORDS - 1] = epoch;
        key
    }

    /// Salt, adapter and model, with the salt or without.
    pub(in crate::cache) fn words(&self, salted: bool) -> NameWords {
        let mut all = [0; WORDS - 1];
        let parts = [self.salt.filter(|_| salted), self.adapter, self.model];
        for (words, part) in all.as_chunks_mut::<6>().0.iter_mut().zip(parts) {
            *words = part.map_or([0; 6], |part| part.words);
        }
        all
    }

    /// The namespace of a prompt whose first block is in the one of `first`, and that from
    /// `salt_from` on in the one of `salted`. `None` for words that no key part has.
    pub(in crate::cache) fn of_words(
        first: &NameWords,
        salted: Option<&NameWords>,
        salt_from: u32,
    ) -> Option<Self> {
        let part = |words: &NameWords, at: usize| KeyPart::from_words(&words.as_chunks().0[at]);
        Some(Self {
            salt: part(salted.unwrap_or(first), 0)?,
            salt_from,
            adapter: part(first, 1)?,
            model: part(first, 2)?,
        })
    }
}

/// Words of a namespace without its epoch: salt, adapter, model.
pub(in crate::cache) type NameWords = [u64; WORDS - 1];

/// The namespaces in use, as readers see them. Ids count from 1.
#[derive(Debug)]
pub(super) struct Namespaces {
    /// `[capacity, WORDS]`
    keys: Vec<AtomicU64>,
    /// The first of the blocks that begin a chain in each. `[capacity]`
    roots: Vec<AtomicU32>,
    table: ProbeTable,
}

/// Who names the namespaces: the writer's part.
#[derive(Debug)]
pub(super) struct NamespaceRefs {
    /// Sequences and blocks that name it. `[capacity]`
    refs: Vec<u32>,
    /// Free ids less 1; the last is the next to be taken.
    free: Vec<u32>,
}

// A key, a root, a count, and a place in the list of free ids.
const _: () = assert!(WORDS as u64 * 8 + 3 * 4 == NAMESPACE_BYTES);

impl Namespaces {
    pub(super) fn new(capacity: u32) -> Result<Self, DeviceError> {
        let len = capacity as usize;
        Ok(Self {
            keys: huge_vec(len * WORDS, |_| AtomicU64::new(0))?,
            roots: huge_vec(len, |_| AtomicU32::new(NO_BLOCK))?,
            table: ProbeTable::new(u64::from(capacity))?,
        })
    }

    fn same(&self, at: u32, key: &[u64; WORDS]) -> bool {
        let start = at as usize * WORDS;
        self.keys[start..start + WORDS].iter().zip(key).all(|(a, b)| a.load(Relaxed) == *b)
    }

    /// The id of a namespace in use.
    pub(super) fn find(&self, key: &[u64; WORDS]) -> Option<u32> {
        let capacity = u32::try_from(self.roots.len()).unwrap_or(u32::MAX);
        let mut of_tag = self.table.with_tag(hash(key)).filter(|at| *at < capacity);
        of_tag.find(|at| self.same(*at, key)).map(|at| at + 1)
    }

    /// Salt, adapter and model of an id in use, and its epoch.
    pub(super) fn words(&self, id: u32) -> Option<(NameWords, u64)> {
        let start = (id as usize).checked_sub(1)? * WORDS;
        let key = self.keys.get(start..start + WORDS)?;
        let mut words = [0; WORDS - 1];
        for (word, value) in words.iter_mut().zip(key) {
            *word = value.load(Relaxed);
        }
        Some((words, key[WORDS - 1].load(Relaxed)))
    }

    /// The list of blocks that begin a chain in a namespace.
    pub(super) fn root(&self, id: u32) -> Option<&AtomicU32> {
        self.roots.get((id as usize).wrapping_sub(1))
    }

    /// Takes everything out.
    pub(super) fn clear(&self) {
        self.table.clear();
        self.roots.iter().for_each(|root| root.store(NO_BLOCK, Relaxed));
    }
}

impl NamespaceRefs {
    pub(super) fn new(capacity: u32) -> Result<Self, DeviceError> {
        let mut free = room(capacity as usize)?;
        free.extend((0..capacity).rev());
        Ok(Self { refs: table_of(capacity as usize, 0)?, free })
    }

    /// The id of a namespace, with one reference more; `None` when there is no room for another.
    pub(super) fn take(&mut self, names: &Namespaces, key: &[u64; WORDS]) -> Option<u32> {
        if let Some(id) = names.find(key) {
            self.refs[id as usize - 1] += 1;
            return Some(id);
        }
        let at = self.free.pop()?;
        let start = at as usize * WORDS;
        for (word, value) in names.keys[start..start + WORDS].iter().zip(key) {
            word.store(*value, Relaxed);
        }
        names.roots[at as usize].store(NO_BLOCK, Relaxed);
        self.refs[at as usize] = 1;
        names.table.insert(hash(key), at);
        Some(at + 1)
    }

    /// One reference more to a namespace in use; 0 is none.
    pub(super) fn add(&mut self, id: u32) {
        if let Some(refs) = self.refs.get_mut((id as usize).wrapping_sub(1)) {
            *refs += 1;
        }
    }

    /// Whether a reference less would be the last.
    pub(super) fn is_last(&self, id: u32) -> bool {
        self.refs.get((id as usize).wrapping_sub(1)) == Some(&1)
    }

    /// One reference less; 0 is none.
    pub(super) fn drop(&mut self, names: &Namespaces, id: u32) {
        let at = (id as usize).wrapping_sub(1);
        let Some(refs) = self.refs.get_mut(at) else { return };
        *refs -= 1;
        if *refs == 0 {
            let mut key = [0; WORDS];
            for (value, word) in key.iter_mut().zip(&names.keys[at * WORDS..]) {
                *value = word.load(Relaxed);
            }
            names.table.remove(hash(&key), id - 1);
            self.free.push(id - 1);
        }
    }

    /// All free again.
    pub(super) fn clear(&mut self) {
        self.refs.fill(0);
        self.free.clear();
        let capacity = u32::try_from(self.refs.len()).unwrap_or(u32::MAX);
        self.free.extend((0..capacity).rev());
    }

    /// The references of every id in use.
    pub(super) fn in_use(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        (1..).zip(&self.refs).filter(|(_, refs)| **refs > 0).map(|(id, refs)| (id, *refs))
    }

    /// The free ids in their order.
    pub(super) fn free(&self) -> &[u32] {
        &self.free
    }
}

fn hash(key: &[u64; WORDS]) -> u32 {
    let hash = key.iter().fold(0x9E37_79B9_7F4A_7C15_u64, |hash, word| {
        (hash ^ word).wrapping_mul(0xBF58_476D_1CE4_E5B9).rotate_left(27)
    });
    super::hash::tag(hash ^ hash << 32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edge_22_absent_empty_and_zero_differ() {
        let parts = [
            None,
            KeyPart::bytes(b"").ok(),
            KeyPart::bytes(b"\0").ok(),
            KeyPart::bytes(b"a").ok(),
            KeyPart::bytes(&[b'a'; 47]).ok(),
            Some(KeyPart::number(0)),
            Some(KeyPart::number(u64::from(b'a'))),
        ];
        let mut keys = Vec::new();
        for salt in parts {
            for adapter in parts {
                for model in parts {
                    let namespace = Namespace { salt, salt_from: 0, adapter, model };
                    keys.push(namespace.key(0, true));
                    keys.push(namespace.key(1, true));
                }
            }
        }
        let different: std::collections::HashSet<_> = keys.iter().collect();
        assert_eq!(different.len(), keys.len());
        let too_long = CacheError::KeyPartTooLong { len: 48, limit: 47 };
        assert_eq!(KeyPart::bytes(&[0; 48]), Err(too_long));
    }

    #[test]
    fn ids_live_as_long_as_they_are_named() {
        let (names, mut refs) =
            (Namespaces::new(2).expect("memory"), NamespaceRefs::new(2).expect("memory"));
        let key = |n| Namespace::default().key(n, true);
        let (a, b) = (refs.take(&names, &key(1)), refs.take(&names, &key(2)));
        assert_eq!((a, b, refs.take(&names, &key(3))), (Some(1), Some(2), None));
        assert_eq!(refs.take(&names, &key(1)), Some(1));
        refs.drop(&names, 1);
        assert_eq!(names.find(&key(1)), Some(1));
        refs.drop(&names, 1);
        assert_eq!((names.find(&key(1)), names.find(&key(2))), (None, Some(2)));
        assert_eq!(refs.take(&names, &key(3)), Some(1));
    }
}
