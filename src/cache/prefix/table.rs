//! An open-addressed table from 32-bit tags to small numbers, of a fixed size.
//!
//! Linear probing over twice as many places as there can be values, so a look touches one cache
//! line most of the time; a removal shifts the followers back, so there are no tombstones and the
//! table is as good after a year as at the start. Equal tags are allowed: whoever asks compares
//! what the values stand for.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::device::{huge_vec, prefetch};
use crate::error::DeviceError;
use crate::plan::probe_places;

/// The table. An entry is `tag << 32 | value + 1`, or 0 for none.
#[derive(Debug)]
pub(in crate::cache) struct ProbeTable {
    entries: Vec<AtomicU64>,
    /// 32 less the bits of a place's index.
    shift: u32,
}

impl ProbeTable {
    /// A table for up to `values` values.
    pub(in crate::cache) fn new(values: u64) -> Result<Self, DeviceError> {
        let places = probe_places(values);
        Ok(Self {
            entries: huge_vec(usize::try_from(places).unwrap_or(0), |_| AtomicU64::new(0))?,
            shift: 32 - places.trailing_zeros(),
        })
    }

    #[inline]
    fn home(&self, tag: u32) -> usize {
        // In 64 bits, because a shift by all 32 must give 0.
        usize::try_from(u64::from(tag) >> self.shift).unwrap_or(0)
    }

    /// Tells the processor that a tag will be looked for.
    #[inline]
    pub(super) fn prefetch(&self, tag: u32) {
        prefetch(&self.entries[self.home(tag)]);
    }

    /// The values with this tag.
    #[inline]
    pub(in crate::cache) fn with_tag(&self, tag: u32) -> Tagged<'_> {
        Tagged { entries: &self.entries, at: self.home(tag), left: self.entries.len(), tag }
    }

    /// Adds a value. There is room: no more values are added than `new` was told.
    pub(in crate::cache) fn insert(&self, tag: u32, value: u32) {
        let mask = self.entries.len() - 1;
        let mut at = self.home(tag);
        for _ in 0..self.entries.len() {
            if self.entries[at].load(Relaxed) == 0 {
                self.entries[at].store(u64::from(tag) << 32 | (u64::from(value) + 1), Relaxed);
                return;
            }
            at = (at + 1) & mask;
        }
        debug_assert!(false, "the table is full");
    }

    /// Takes a value out.
    pub(in crate::cache) fn remove(&self, tag: u32, value: u32) {
        let mask = self.entries.len() - 1;
        let mut hole = self.home(tag);
        loop {
            match self.entries[hole].load(Relaxed) {
                0 => {
                    debug_assert!(false, "not in the table");
                    return;
                }
                entry if split(entry) == (tag, value) => break,
                _ => hole = (hole + 1) & mask,
            }
        }
        let mut at = hole;
        loop {
            at = (at + 1) & mask;
            let entry = self.entries[at].load(Relaxed);
            if entry == 0 {
                break;
            }
            // Move it if its home is not behind the hole.
            let home = self.home(split(entry).0);
            if at.wrapping_sub(home) & mask >= at.wrapping_sub(hole) & mask {
                self.entries[hole].store(entry, Relaxed);
                hole = at;
            }
        }
        self.entries[hole].store(0, Relaxed);
    }

    /// Takes everything out.
    pub(in crate::cache) fn clear(&self) {
        self.entries.iter().for_each(|entry| entry.store(0, Relaxed));
    }

    /// Values in the table.
    pub(super) fn len(&self) -> usize {
        self.entries.iter().filter(|entry| entry.load(Relaxed) != 0).count()
    }
}

/// The values with one tag.
#[derive(Clone, Debug)]
pub(in crate::cache) struct Tagged<'a> {
    entries: &'a [AtomicU64],
    at: usize,
    /// Places that were not looked at yet.
    left: usize,
    tag: u32,
}

impl Iterator for Tagged<'_> {
    type Item = u32;

    #[inline]
    fn next(&mut self) -> Option<u32> {
        while self.left > 0 {
            let entry = self.entries[self.at].load(Relaxed);
            if entry == 0 {
                self.left = 0;
                break;
            }
            self.at = (self.at + 1) & (self.entries.len() - 1);
            self.left -= 1;
            let (tag, value) = split(entry);
            if tag == self.tag {
                return Some(value);
            }
        }
        None
    }
}

/// Tag and value of an entry that is not empty.
#[inline]
fn split(entry: u64) -> (u32, u32) {
    #[expect(clippy::cast_possible_truncation, reason = "the two halves of the entry")]
    let halves = ((entry >> 32) as u32, (entry as u32).wrapping_sub(1));
    halves
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn follows_a_model_through_removals() {
        for spread in [0, 3, u32::MAX] {
            let table = ProbeTable::new(40).expect("memory");
            let mut model: Vec<(u32, u32)> = Vec::new();
            let mut state = 1_u64;
            for _ in 0..20_000 {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let value = (state >> 33) as u32 % 40;
                let tag = (value.wrapping_mul(0x9E37_79B9) & spread).rotate_left(value % 2 * 30);
                match model.iter().position(|entry| *entry == (tag, value)) {
                    Some(at) => {
                        table.remove(tag, value);
                        model.swap_remove(at);
                    }
                    None => {
                        table.insert(tag, value);
                        model.push((tag, value));
                    }
                }
                assert_eq!(table.len(), model.len());
                let mut found: Vec<u32> = table.with_tag(tag).collect();
                let of_tag = model.iter().filter(|entry| entry.0 == tag);
                let mut wanted: Vec<u32> = of_tag.map(|entry| entry.1).collect();
                found.sort_unstable();
                wanted.sort_unstable();
                assert_eq!(found, wanted);
            }
        }
    }
}
