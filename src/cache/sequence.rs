//! Sequences: their handles, their slots, and what each holds.

use super::prefix::ProbeTable;
use crate::device::{room, table_of};
use crate::error::{CacheError, DeviceError};
use crate::plan::{GROUP_STATE_BYTES, SEQ_RECORD_BYTES};

/// A sequence as a value that can be checked: it is refused once the sequence was released, also
/// when its slot has another sequence since, and by every other cache (P6).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SeqHandle {
    pub(crate) cache_id: u32,
    pub(crate) slot: u32,
    pub(crate) generation: u64,
}

impl SeqHandle {
    /// The sequence's slot: its row in block tables and its unit in contiguous groups.
    #[must_use]
    pub const fn slot(&self) -> u32 {
        self.slot
    }

    /// A handle made of its parts, to be checked at its next use: for a border that carries
    /// handles as plain numbers.
    #[must_use]
    pub const fn from_parts(cache_id: u32, slot: u32, generation: u64) -> Self {
        Self { cache_id, slot, generation }
    }

    /// The parts: the cache's id, the slot, the generation.
    #[must_use]
    pub const fn parts(&self) -> (u32, u32, u64) {
        (self.cache_id, self.slot, self.generation)
    }
}

/// One slot. `len ≤ high_water ≤ limit`, but for what was restored: its `high_water` may be the
/// plan's rewind beyond that.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SeqRecord {
    /// Raised each time the slot is taken: the first sequence of a slot has 1.
    pub(super) generation: u64,
    pub(super) key: Option<u64>,
    /// The how-many-th sequence of the cache it is: the youngest has the highest number.
    pub(super) begun: u64,
    pub(super) alive: bool,
    /// Whether it is only a reservation so far.
    pub(super) reserved: bool,
    /// Tokens at its end that it may still rewind: they are not published yet, and not shared with
    /// a fork.
    pub(super) lookahead: u32,
    /// Tokens committed.
    pub(super) len: u32,
    /// The most tokens that were ever committed: what has left a window does not come back.
    pub(super) high_water: u32,
    /// Tokens that the sequence may have: what admission was asked for.
    pub(super) limit: u32,
    /// Tokens from the first on whose ids are known. More than `len` while a prompt is prefilled.
    pub(super) known: u32,
    /// The most tokens that were ever written to the slot, cancelled steps included, since it began
    /// or was rewound to none; outlives the sequence, because the bytes do.
    pub(super) written: u32,
    /// The same of those before it in the slot, as far as they were not zeroed.
    pub(super) dirty: u32,
    /// Raised each time a block leaves the sequence: a table row read before is stale.
    pub(super) table_version: u64,
    /// The number of the last step that named it.
    pub(super) last_step: u64,
}

const _: () = assert!(size_of::<SeqRecord>() as u64 <= SEQ_RECORD_BYTES);

/// What a sequence holds of one paged group: blocks `0..sink_blocks` and `first..next` of its
/// row. All zeros in a contiguous group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct GroupState {
    /// The first block of the row that has not left the window.
    pub(super) first: u32,
    /// The end of the blocks of the row.
    pub(super) next: u32,
    /// Blocks held.
    pub(super) held: u32,
    /// Blocks that admission promised in all; 0 under max-utilization.
    pub(super) quota: u32,
    /// In a windowed group of a sequence that was restored from a file: the first token, sinks
    /// aside, that is there. 0 otherwise. In a contiguous group it outlives the sequence, because
    /// the bytes do.
    pub(super) holds_from: u32,
    /// Whether others may hold its last block too, so that it must be looked at before it is
    /// written.
    pub(super) shared_tail: bool,
}

const _: () = assert!(size_of::<GroupState>() as u64 == GROUP_STATE_BYTES);

impl GroupState {
    /// Blocks promised and not taken.
    pub(super) fn promised(&self) -> u32 {
        self.quota.saturating_sub(self.held)
    }
}

/// The slots.
#[derive(Debug)]
pub(super) struct SeqTable {
    pub(super) records: Vec<SeqRecord>,
    /// Free slots; the last is the next to be taken.
    pub(super) free: Vec<u32>,
    /// State in every group. `[seq_slots, num_groups]`
    states: Vec<GroupState>,
    num_groups: usize,
    /// Slots by the engine's keys.
    keys: ProbeTable,
    /// Slots that are only reserved so far.
    reserved: u32,
    cache_id: u32,
}

impl SeqTable {
    pub(super) fn new(
        seq_slots: u32,
        num_groups: usize,
        cache_id: u32,
    ) -> Result<Self, DeviceError> {
        let slots = seq_slots as usize;
        let mut free = room(slots)?;
        free.extend((0..seq_slots).rev());
        Ok(Self {
            records: table_of(slots, SeqRecord::default())?,
            free,
            states: table_of(slots * num_groups, GroupState::default())?,
            num_groups,
            keys: ProbeTable::new(u64::from(seq_slots))?,
            reserved: 0,
            cache_id,
        })
    }

    /// The slot of a handle, when its sequence is alive. A reservation is no sequence yet.
    pub(super) fn check(&self, handle: SeqHandle) -> Result<u32, CacheError> {
        self.check_as(handle, false)
    }

    /// The slot of a reservation, when it is still one.
    pub(super) fn check_reserved(&self, handle: SeqHandle) -> Result<u32, CacheError> {
        self.check_as(handle, true)
    }

    fn check_as(&self, handle: SeqHandle, reserved: bool) -> Result<u32, CacheError> {
        if handle.cache_id != self.cache_id {
            return Err(CacheError::ForeignHandle);
        }
        match self.records.get(handle.slot as usize) {
            Some(record)
                if record.alive
                    && record.reserved == reserved
                    && record.generation == handle.generation =>
            {
                Ok(handle.slot)
            }
            _ => Err(CacheError::StaleHandle { slot: handle.slot, generation: handle.generation }),
        }
    }

    /// The handle of a live sequence.
    pub(super) fn handle(&self, slot: u32) -> SeqHandle {
        let generation = self.record(slot).generation;
        SeqHandle { cache_id: self.cache_id, slot, generation }
    }

    pub(super) fn alive(&self) -> u32 {
        // Both are at most `seq_slots`, a u32.
        u32::try_from(self.records.len() - self.free.len()).unwrap_or(u32::MAX)
    }

    /// Of those alive, how many are only reserved so far.
    pub(super) const fn reserved(&self) -> u32 {
        self.reserved
    }

    /// Notes that a live slot is only reserved, or no more.
    pub(super) fn set_reserved(&mut self, slot: u32, reserved: bool) {
        let was = std::mem::replace(&mut self.record_mut(slot).reserved, reserved);
        self.reserved = self.reserved + u32::from(reserved) - u32::from(was);
    }

    pub(super) fn has_key(&self, key: u64) -> bool {
        self.keys.with_tag(key_tag(key)).any(|slot| self.record(slot).key == Some(key))
    }

    pub(super) fn record(&self, slot: u32) -> &SeqRecord {
        &self.records[slot as usize]
    }

    pub(super) fn record_mut(&mut self, slot: u32) -> &mut SeqRecord {
        &mut self.records[slot as usize]
    }

    pub(super) fn state(&self, slot: u32, group: usize) -> &GroupState {
        &self.states[slot as usize * self.num_groups + group]
    }

    pub(super) fn state_mut(&mut self, slot: u32, group: usize) -> &mut GroupState {
        &mut self.states[slot as usize * self.num_groups + group]
    }

    /// Takes the free slot at a place of the free list for a sequence, and gives its handle.
    pub(super) fn take_at(&mut self, at: usize, key: Option<u64>, limit: u32) -> SeqHandle {
        let slot = self.free.remove(at);
        let record = self.record_mut(slot);
        let generation = record.generation + 1;
        let (written, dirty) = (record.written, record.dirty);
        *record =
            SeqRecord { generation, key, alive: true, limit, written, dirty, ..Default::default() };
        if let Some(key) = key {
            self.keys.insert(key_tag(key), slot);
        }
        SeqHandle { cache_id: self.cache_id, slot, generation }
    }

    /// Undoes [`SeqTable::take_at`].
    pub(super) fn untake(&mut self, slot: u32, at: usize) {
        self.clear(slot);
        self.free.insert(at, slot);
    }

    /// Gives a slot back; its handles are stale from here on.
    pub(super) fn give_back(&mut self, slot: u32) {
        self.clear(slot);
        self.free.push(slot);
    }

    /// Moves the slot that was given back last to where it had been taken from.
    pub(super) fn move_freed(&mut self, at: usize) {
        if let Some(slot) = self.free.pop() {
            self.free.insert(at.min(self.free.len()), slot);
        }
    }

    fn clear(&mut self, slot: u32) {
        if let Some(key) = self.record(slot).key {
            self.keys.remove(key_tag(key), slot);
        }
        self.set_reserved(slot, false);
        let record = self.record_mut(slot);
        let SeqRecord { generation, written, dirty, .. } = *record;
        *record = SeqRecord { generation, written, dirty, ..SeqRecord::default() };
        for group in 0..self.num_groups {
            let state = self.state_mut(slot, group);
            *state = GroupState { holds_from: state.holds_from, ..GroupState::default() };
        }
    }
}

/// Spreads a key over the table's tags.
fn key_tag(key: u64) -> u32 {
    (key.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) as u32
}
