//! The driver's ways to begin a sequence. The estimate, the probe and the act agree.

use kvpool::cache::{BeginOptions, Begun, Probe, Retention, Retentions};
use kvpool::error::CacheError;

use super::driver::{Driver, Held, Wanted};
use crate::common::Rng;

impl Wanted {
    fn options(&self, retention: Retentions) -> BeginOptions {
        BeginOptions {
            key: self.key,
            max_len: self.max_len,
            lookahead_tokens: self.lookahead,
            namespace: self.ns.options(),
            retention,
        }
    }
}

/// Up to two ranges, now and then such that they are refused.
pub(super) fn retentions(rng: &mut Rng) -> Result<Retentions, CacheError> {
    let mut ranges = Vec::new();
    let mut from = rng.below(10) as u32;
    for _ in 0..rng.below(3) {
        let to = if rng.below(4) == 0 {
            u32::MAX
        } else {
            from.saturating_add(1 + rng.below(20) as u32)
        };
        let priority = rng.below(102) as u8;
        let duration_ms = (rng.below(2) == 0).then(|| rng.below(50));
        ranges.push(Retention { from, to, priority, duration_ms });
        // Now and then not behind the one before.
        from = to.saturating_add(rng.below(4) as u32).saturating_sub(rng.below(2) as u32);
    }
    Retentions::new(&ranges)
}

impl Driver {
    pub(super) fn wanted(&mut self) -> Wanted {
        let prompt = self.prompt();
        let most = u64::from(self.spec.max_seq_len) + 2;
        let max_len = match self.rng.below(4) {
            0 => None,
            1 => Some(self.rng.below(most) as u32),
            _ => Some(prompt.len() as u32 + self.rng.below(12) as u32),
        };
        let key = self.chance(4).then(|| self.rng.below(3));
        let lookahead = if self.chance(3) { self.rng.below(5) as u32 } else { 0 };
        Wanted { ns: self.namespace(), prompt, key, max_len, lookahead }
    }

    pub(super) fn begin(&mut self) -> Result<(), CacheError> {
        let wanted = self.wanted();
        let options = wanted.options(retentions(&mut self.rng)?);
        let before = self.cache.state_digest();
        let estimate = self.cache.check_admission(&wanted.prompt, &options);
        let probe = self.cache.probe(&wanted.prompt, &options.namespace);
        assert_eq!(self.cache.state_digest(), before, "estimates and probes change nothing");
        if self.paged_without_windows() {
            let whole = probe.full_blocks * self.spec.tokens_per_block + probe.partial_tokens;
            assert_eq!(whole, probe.cached_len, "{probe:?}");
        }
        let result = self.call(|cache| cache.begin(&wanted.prompt, options));
        match (result, estimate) {
            (Ok(begun), Ok(estimate)) => {
                assert_eq!(begun.limit, estimate.limit);
                assert_eq!(estimate.cached_len, begun.cached_len, "estimate and act differ");
                assert!(self.may_come_of(&probe, &begun, false), "{probe:?} came to {begun:?}");
                self.note_begun(&wanted, begun);
                Ok(())
            }
            (Err(error), Err(estimate)) => {
                assert_eq!(error, estimate);
                Err(error)
            }
            (result, estimate) => panic!("estimated {estimate:?}, and came to {result:?}"),
        }
    }

    /// Whether a sequence may begin so after a probe: with what it said, or with whole blocks only,
    /// if there was no room to copy a part of one.
    fn may_come_of(&self, probe: &Probe, begun: &Begun, in_batch: bool) -> bool {
        let per_block = self.spec.tokens_per_block;
        let whole = probe.full_blocks * per_block;
        let reuse = &self.cache.plan().reuse;
        let less =
            begun.cached_len < probe.cached_len && begun.cached_len.is_multiple_of(per_block);
        begun.cached_len == probe.cached_len
            || (probe.partial_tokens > 0 && begun.cached_len == whole)
            // Where the windows or the donors of the longer prefix do not give the whole blocks
            // either, it is less; and in a batch a slot that it would have taken over may be
            // another's by then.
            || (probe.partial_tokens > 0 && less && !self.paged_without_windows())
            || (reuse.has_donors() && in_batch)
    }

    /// All or nothing; every match is claimed before anything is evicted.
    pub(super) fn begin_batch(&mut self) -> Result<(), CacheError> {
        let wanted: Vec<Wanted> = (0..1 + self.rng.below(3)).map(|_| self.wanted()).collect();
        let mut calls = Vec::new();
        let mut probes = Vec::new();
        for wanted in &wanted {
            let options = wanted.options(retentions(&mut self.rng)?);
            probes.push(self.cache.probe(&wanted.prompt, &options.namespace));
            calls.push((&wanted.prompt[..], options));
        }
        let before = self.cache.state_digest();
        let mut begun: Vec<Begun> = Vec::with_capacity(calls.len());
        if let Err(refused) = self.cache.begin_batch(&calls, &mut begun) {
            assert!(begun.is_empty() && refused.index < calls.len());
            assert_eq!(self.cache.state_digest(), before, "{refused}: the refusal left a trace");
            self.check_invariants();
            return Err(refused.source);
        }
        self.check_invariants();
        assert_eq!(begun.len(), wanted.len());
        for ((wanted, begun), probe) in wanted.iter().zip(begun).zip(probes) {
            assert!(
                self.may_come_of(&probe, &begun, true),
                "an early one took it: {probe:?}, {begun:?}"
            );
            self.note_begun(wanted, begun);
        }
        Ok(())
    }

    pub(super) fn can_admit(&mut self) -> Result<(), CacheError> {
        if self.held.len() > 1 {
            return self.cancel_reservation();
        }
        let wanted = self.wanted();
        let options = wanted.options(retentions(&mut self.rng)?);
        let estimate = self.cache.check_admission(&wanted.prompt, &options);
        let result = self.call(|cache| cache.can_admit(&wanted.prompt, &options));
        match (result, estimate) {
            (Ok(reservation), Ok(estimate)) => {
                let cached_len = estimate.cached_len;
                self.held.push(Held { reservation, wanted, cached_len });
                Ok(())
            }
            (Err(error), Err(estimate)) => {
                assert_eq!(error, estimate);
                Err(error)
            }
            (result, estimate) => {
                panic!("estimated {estimate:?}, and came to {:?}", result.map(|_| ()))
            }
        }
    }

    /// What is reserved is there, whatever happened since.
    pub(super) fn begin_reserved(&mut self) -> Result<(), CacheError> {
        if self.held.is_empty() {
            return Ok(());
        }
        let at = self.rng.below(self.held.len() as u64) as usize;
        let Held { reservation, wanted, cached_len } = self.held.swap_remove(at);
        let begun = self.call(|cache| cache.begin_reserved(reservation)).expect("reserved");
        assert_eq!(begun.cached_len, cached_len, "the reservation held these");
        self.note_begun(&wanted, begun);
        Ok(())
    }

    pub(super) fn cancel_reservation(&mut self) -> Result<(), CacheError> {
        if self.held.is_empty() {
            return Ok(());
        }
        let at = self.rng.below(self.held.len() as u64) as usize;
        let held = self.held.swap_remove(at);
        self.call(|cache| cache.cancel_reservation(held.reservation)).expect("reserved");
        Ok(())
    }
}
