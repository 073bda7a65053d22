//! The driver's other verbs.

use kvpool::cache::ReservationRefused;
use kvpool::config::Admission;
use kvpool::error::CacheError;

use super::driver::{Driver, Live, Pin};
use super::driver_begin::retentions;
use crate::common::Rng;

impl Driver {
    pub(super) fn fork(&mut self) -> Result<(), CacheError> {
        let Some(at) = self.pick() else { return Ok(()) };
        let source = self.live[at].clone();
        let seq = self.call(|cache| cache.fork(source.seq))?;
        self.begun += 1;
        self.live.push(Live { seq, order: self.begun, ..source });
        self.check_one(self.live.len() - 1);
        Ok(())
    }

    pub(super) fn truncate(&mut self) -> Result<(), CacheError> {
        let Some(at) = self.pick() else { return Ok(()) };
        let live = self.live[at].clone();
        let now = live.text.len();
        let len = match self.rng.below(8) {
            0 => 0,
            1 => now + 1,
            2 => self.rng.below(u64::from(now) + 1) as u32,
            _ => now.saturating_sub(self.rng.below(5) as u32),
        };
        let gone = self.window_gone(live.high_water, len);
        let result = self.call(|cache| cache.truncate(live.seq, len));
        if len < now {
            let refused = matches!(result, Err(CacheError::WindowGone { .. }));
            assert_eq!(refused, gone.is_some(), "{len} of {now}, {}", live.high_water);
        }
        match result {
            Ok(()) => {
                let live = &mut self.live[at];
                live.high_water = if len == 0 { 0 } else { live.high_water };
                if len < live.text.len() {
                    // What the prompt had behind it is not announced any more.
                    live.prompt.truncate(len as usize);
                }
                live.text.truncate(len);
            }
            Err(CacheError::TruncateBeyondEnd { .. }) => assert!(len > now),
            // Under guaranteed admission the copy that a later write needs cannot be promised.
            Err(CacheError::NotAdmitted { .. }) => assert!(self.promised()),
            Err(CacheError::WindowGone { wanted, window, kept_from, shortest }) => {
                assert_eq!((wanted, Some((window, kept_from, shortest))), (len, gone));
            }
            Err(error) => panic!("truncate: {error}"),
        }
        self.check_one(at);
        result
    }

    /// What refuses a rewind to `len` tokens: the first window that has moved too far, the token
    /// from which on its layers still have everything, and the shortest length that they can be
    /// rewound to. Of what was ever committed they keep the window and `max_rewind_tokens` more.
    fn window_gone(&self, high_water: u32, len: u32) -> Option<(u32, u32, u32)> {
        let plan = self.cache.plan();
        let rewind = plan.limits.max_rewind_tokens;
        let mut windows = plan.groups.iter().filter_map(|group| group.window);
        let moved = |window: &u32| high_water + 1 > window + rewind && len + rewind < high_water;
        let window = windows.find(moved).filter(|_| len > 0)?;
        Some((window, high_water + 1 - window - rewind, high_water - rewind))
    }

    pub(super) fn release(&mut self) -> Result<(), CacheError> {
        let Some(at) = self.pick() else { return self.reset() };
        let live = self.live.swap_remove(at);
        self.call(|cache| cache.release(live.seq)).expect("alive");
        self.dead.push(live.seq);
        if self.dead.len() > 64 {
            let at = self.rng.below(64) as usize;
            self.dead.swap_remove(at);
        }
        Ok(())
    }

    pub(super) fn pin(&mut self) -> Result<(), CacheError> {
        let Some(at) = self.pick() else { return Ok(()) };
        let live = self.live[at].clone();
        let handle = self.call(|cache| cache.pin(live.seq))?;
        // What it holds: the whole blocks below the look-ahead, with known tokens.
        let mut text = live.text;
        text.truncate(text.len().saturating_sub(live.lookahead).min(text.known()));
        let tokens: Vec<u32> = text.tokens.iter().map(|token| *token as u32).collect();
        // Behind a look-ahead others may have published what this one has not yet.
        let full_blocks = match text.epoch == self.epoch && live.lookahead == 0 {
            true => self.cache.probe(&tokens, &text.ns.options()).full_blocks,
            false => 0,
        };
        self.pins.push(Pin { handle, text, full_blocks });
        if self.pins.len() > 2 { self.unpin() } else { Ok(()) }
    }

    pub(super) fn unpin(&mut self) -> Result<(), CacheError> {
        if self.pins.is_empty() {
            return Ok(());
        }
        let at = self.rng.below(self.pins.len() as u64) as usize;
        let handle = self.pins.swap_remove(at).handle;
        self.call(|cache| cache.unpin(handle)).expect("pinned");
        self.call(|cache| cache.unpin(handle))
            .map_or_else(|_| Ok(()), |()| panic!("unpinned twice"))
    }

    pub(super) fn set_retention(&mut self) -> Result<(), CacheError> {
        if self.chance(2) {
            self.now += self.rng.below(40);
            let now = self.now;
            self.cache.set_time_ms(now);
            self.check_invariants();
            return Ok(());
        }
        let Some(at) = self.pick() else { return Ok(()) };
        let retention = retentions(&mut self.rng)?;
        let seq = self.live[at].seq;
        self.call(|cache| cache.set_retention(seq, retention))
    }

    /// The verbs that make the cache forget. Live sequences keep what they have.
    pub(super) fn forget(&mut self) -> Result<(), CacheError> {
        if !self.checks.forget || !self.chance(4) {
            return Ok(());
        }
        if self.chance(2) {
            let epoch = self.rng.below(3);
            let changed = self.call(|cache| cache.set_epoch(epoch));
            // What a reservation holds is of the epoch that it was made in.
            assert_eq!(changed.is_err(), !self.held.is_empty(), "{changed:?}");
            changed?;
            self.epoch = epoch;
        } else {
            self.cache.clear_cached();
            if self.live.is_empty() && self.pins.is_empty() && self.held.is_empty() {
                self.committed.clear();
            }
        }
        self.check_invariants();
        for at in 0..self.live.len() {
            self.check_one(at);
        }
        Ok(())
    }

    /// Forgets everything, when nothing is alive.
    fn reset(&mut self) -> Result<(), CacheError> {
        if !self.checks.forget || !self.chance(8) {
            return Ok(());
        }
        let busy = !self.pins.is_empty() || !self.held.is_empty();
        self.call(|cache| cache.reset()).inspect_err(|_| assert!(busy))?;
        if !busy {
            self.committed.clear();
            self.epoch = 0;
            let delivered = self.replay.delivered;
            self.replay = super::events::Replay::default();
            self.replay.blind = true;
            self.replay.delivered = delivered;
        }
        Ok(())
    }

    /// The youngest goes, and never the last one.
    pub(super) fn preempt(&mut self) -> Result<(), CacheError> {
        let before = self.cache.state_digest();
        let alive = self.live.len();
        let Some(gone) = self.cache.preempt_youngest() else {
            assert_eq!(self.cache.state_digest(), before, "nothing was preempted");
            let busy = self.spec.admission == Admission::MaxUtilization
                && alive > 0
                && alive + self.held.len() > 1;
            assert!(!busy, "there were {alive} to choose from");
            return Ok(());
        };
        self.check_invariants();
        assert!(self.spec.admission == Admission::MaxUtilization);
        if gone.reserved {
            // The youngest reservation goes before any sequence.
            let held = self.held.pop().expect("a reservation");
            let refused = self.call(|cache| cache.begin_reserved(held.reservation));
            assert_eq!(refused, Err(ReservationRefused::Cancelled));
            return Ok(());
        }
        assert!(alive > 1 && self.held.is_empty());
        let at = self.live.iter().position(|live| live.seq == gone.sequence).expect("alive");
        let live = self.live.swap_remove(at);
        assert!(self.live.iter().all(|other| other.order < live.order), "not the youngest");
        assert_eq!(gone.len, live.text.len());
        self.dead.push(live.seq);
        Ok(())
    }

    /// Reads the events and compares what they build with what a probe finds.
    pub(super) fn poll(&mut self) -> Result<(), CacheError> {
        let before = self.cache.state_digest();
        self.replay.poll(&mut self.cache);
        if self.spec.event_buffer > 0 && self.chance(8) {
            self.replay.resync(&mut self.cache);
        }
        assert_eq!(self.cache.state_digest(), before, "reading events changes nothing else");
        if self.spec.event_buffer > 0 && !self.replay.blind {
            let prompt = self.prompt();
            let ns = self.namespace();
            if self.paged_without_windows() {
                self.replay.check_probe(&self.cache, &prompt, &ns.options());
            }
            if self.live.is_empty() && self.pins.is_empty() && self.held.is_empty() {
                self.replay.check_idle(&self.cache);
            }
        }
        Ok(())
    }

    /// A handle that was released is refused by every verb.
    pub(super) fn stale(&mut self) -> Result<(), CacheError> {
        if self.dead.is_empty() {
            return Ok(());
        }
        let seq = self.dead[self.rng.below(self.dead.len() as u64) as usize];
        let pick = |rng: &mut Rng| rng.below(6);
        let choice = pick(&mut self.rng);
        let retention = kvpool::cache::Retentions::default();
        let result = self.call(|cache| match choice {
            0 => cache.release(seq),
            1 => cache.truncate(seq, 0),
            2 => cache.fork(seq).map(|_| ()),
            3 => cache.pin(seq).map(|_| ()),
            4 => cache.set_retention(seq, retention),
            _ => cache.reserve(&[(seq, 1)]).map(|_| ()),
        });
        assert!(matches!(result, Err(CacheError::StaleHandle { .. })), "{result:?}");
        result
    }
}
