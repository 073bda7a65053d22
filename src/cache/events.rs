//! What happened to the prefix index, for whoever keeps a copy of it (a router, a log).
//!
//! A ring of `cache.event_buffer` events with running numbers. A reader that falls behind loses
//! the oldest, and is told how many; [`Cache::resync_events`] tells it everything anew. Replayed
//! into an empty index, all events give the index as it is.

use super::Cache;
use super::prefix::Namespace;
use super::reuse::Reuse;
use crate::config::MAX_TOKENS_PER_BLOCK;
use crate::device::table_of;
use crate::error::DeviceError;
use crate::plan::{EVENT_BYTES, NO_BLOCK};
use crate::units::GroupIdx;

/// One event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event<'a> {
    /// Counts from 0; a gap is what was lost.
    pub number: u64,
    /// The layer group.
    pub group: GroupIdx,
    /// What happened.
    pub kind: EventKind<'a>,
}

/// What happened to a block of the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind<'a> {
    /// A block became shareable.
    Stored {
        /// The block.
        block: u32,
        /// The block before it; `None` at the start of a prompt.
        parent: Option<u32>,
        /// Its tokens. `[tokens_per_block]`
        tokens: &'a [u32],
        /// The namespace that begins here, as a number of this cache
        /// ([`Cache::namespace_numbers`]); 0 = that of the parent.
        namespace: u32,
    },
    /// A block of a windowed group now holds the same tokens as one of the index.
    Attached {
        /// The block of the windowed group.
        block: u32,
        /// The block of the lead group.
        of: u32,
    },
    /// A block is not shareable any more.
    Removed {
        /// The block.
        block: u32,
    },
    /// No block is.
    Cleared,
}

/// What [`Cache::poll_events`] has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Polled {
    /// Events delivered.
    pub delivered: u64,
    /// Events that were overwritten before they were polled.
    pub lost: u64,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Stored,
    Attached,
    Removed,
    Cleared,
}

#[derive(Clone, Copy, Debug)]
struct Record {
    block: u32,
    other: u32,
    namespace: u32,
    group: u32,
    kind: Kind,
}

const _: () = assert!(size_of::<Record>() as u64 <= EVENT_BYTES);

/// The ring.
#[derive(Debug)]
pub(super) struct EventRing {
    records: Vec<Record>,
    /// `[records, tokens_per_block]`
    tokens: Vec<u32>,
    per_block: usize,
    /// The number of the next event, and of the oldest that was not polled.
    next: u64,
    oldest: u64,
}

impl EventRing {
    pub(super) fn new(events: u32, tokens_per_block: u32) -> Result<Self, DeviceError> {
        let (len, per_block) = (events as usize, tokens_per_block as usize);
        let record = Record { block: 0, other: 0, namespace: 0, group: 0, kind: Kind::Cleared };
        Ok(Self {
            records: table_of(len, record)?,
            tokens: table_of(len * per_block, 0)?,
            per_block,
            next: 0,
            oldest: 0,
        })
    }

    /// The number of the next event.
    pub(super) const fn next(&self) -> u64 {
        self.next
    }

    fn push(&mut self, record: Record) -> Option<usize> {
        let len = self.records.len() as u64;
        if len == 0 {
            return None;
        }
        let at = usize::try_from(self.next % len).unwrap_or(0);
        self.records[at] = record;
        self.next += 1;
        Some(at)
    }

    /// [`EventKind::Stored`].
    pub(super) fn stored(
        &mut self,
        group: usize,
        block: u32,
        (parent, namespace): (u32, u32),
        tokens: &[u32],
    ) {
        let group = u32::try_from(group).unwrap_or(u32::MAX);
        let record = Record { block, other: parent, namespace, group, kind: Kind::Stored };
        if let Some(at) = self.push(record) {
            self.tokens[at * self.per_block..][..self.per_block].copy_from_slice(tokens);
        }
    }

    /// [`EventKind::Attached`].
    pub(super) fn attached(&mut self, group: usize, block: u32, of: u32) {
        let group = u32::try_from(group).unwrap_or(u32::MAX);
        let _ = self.push(Record { block, other: of, namespace: 0, group, kind: Kind::Attached });
    }

    /// [`EventKind::Removed`].
    pub(super) fn removed(&mut self, group: usize, block: u32) {
        let group = u32::try_from(group).unwrap_or(u32::MAX);
        let _ = self.push(Record { block, other: 0, namespace: 0, group, kind: Kind::Removed });
    }

    /// [`EventKind::Cleared`].
    pub(super) fn cleared(&mut self, group: usize) {
        let group = u32::try_from(group).unwrap_or(u32::MAX);
        let record = Record { block: 0, other: 0, namespace: 0, group, kind: Kind::Cleared };
        let _ = self.push(record);
    }

    fn poll(&mut self, each: &mut dyn FnMut(Event<'_>)) -> Polled {
        let len = self.records.len() as u64;
        let first = self.oldest.max(self.next.saturating_sub(len));
        let lost = first - self.oldest;
        for number in first..self.next {
            let at = usize::try_from(number % len.max(1)).unwrap_or(0);
            let Record { block, other, namespace, group, kind } = self.records[at];
            let kind = match kind {
                Kind::Stored => EventKind::Stored {
                    block,
                    parent: (other != NO_BLOCK).then_some(other),
                    tokens: &self.tokens[at * self.per_block..][..self.per_block],
                    namespace,
                },
                Kind::Attached => EventKind::Attached { block, of: other },
                Kind::Removed => EventKind::Removed { block },
                Kind::Cleared => EventKind::Cleared,
            };
            each(Event { number, group: GroupIdx(group), kind });
        }
        self.oldest = self.next;
        Polled { delivered: self.next - first, lost }
    }
}

impl Cache {
    /// Hands over the events since the last call, oldest first. Without `cache.event_buffer`
    /// there are none.
    pub fn poll_events(&mut self, each: &mut dyn FnMut(Event<'_>)) -> Polled {
        self.reuse.as_mut().map_or(Polled::default(), |reuse| reuse.events.poll(each))
    }

    /// Hands over the index as it is, as events: [`EventKind::Cleared`], then every block that is
    /// stored, a parent before its children, then every block that is attached. For a reader that
    /// begins late or has lost events; it goes on with [`Cache::poll_events`], which begins behind
    /// this. Works without `cache.event_buffer` too. All events have the number that the next one
    /// will get. Gives how many they are. Looks at every block of the index.
    pub fn resync_events(&mut self, each: &mut dyn FnMut(Event<'_>)) -> u64 {
        let Some(Reuse { index: Some(index), events, .. }) = &mut self.reuse else { return 0 };
        let number = events.next;
        events.oldest = number;
        let group_of = |group: usize| GroupIdx(u32::try_from(group).unwrap_or(u32::MAX));
        let lead = group_of(index.lead());
        let mut delivered = 0;
        let mut deliver = |group: GroupIdx, kind: EventKind<'_>| {
            each(Event { number, group, kind });
            delivered += 1;
        };
        deliver(lead, EventKind::Cleared);
        let mut tokens = [0; MAX_TOKENS_PER_BLOCK as usize];
        let tokens = &mut tokens[..self.plan.tokens_per_block as usize];
        index.each_published(&mut |block| {
            index.load_tokens(block, tokens);
            let parent = Some(index.parent(block)).filter(|parent| *parent != NO_BLOCK);
            let namespace = index.namespace_of(block);
            deliver(lead, EventKind::Stored { block, parent, tokens, namespace });
        });
        for (windowed, group) in index.windowed().iter().enumerate() {
            for (block, of) in index.attachments(windowed) {
                deliver(group_of(*group), EventKind::Attached { block, of });
            }
        }
        delivered
    }

    /// The numbers under which the namespaces of a prompt stand in events now: that of its first
    /// block, and that of the block at which its salt begins, if that is another one; 0 for one
    /// that no sequence and no cached block names, so that nothing of it is cached. A number stays
    /// while it is in use. After [`Cache::set_epoch`] the same namespace has another number.
    #[must_use]
    pub fn namespace_numbers(&self, namespace: &Namespace) -> [u32; 2] {
        let Some(index) = self.index() else { return [0; 2] };
        let keys = index.keys(namespace);
        // What is salted and not in use has no number in the index either.
        [keys.first, if keys.salted == u32::MAX { 0 } else { keys.salted }]
    }
}
