//! The work of a replay: nothing is computed, everything is accounted for.

use std::time::Duration;

use super::clock::Clock;
use super::meters::{Gauges, Meters};
use crate::cache::Step;
use crate::config::{CostConfig, GoalsConfig};
use crate::error::CacheError;
use crate::job::tokens::Tokens;
use crate::job::work::{Moment, Run, Served, Work};
use crate::plan::{GroupKind, Plan};
use crate::units::GroupIdx;

/// Accounts for the steps of one variant.
#[derive(Debug)]
pub(super) struct Simulated<'a> {
    tokens: &'a Tokens,
    clock: Clock,
    pool_bytes: u64,
    /// The contiguous groups: their index, bytes of a slot and of a token.
    slots: Vec<(GroupIdx, u64, u64)>,
    pub(super) meters: Meters,
}

impl<'a> Simulated<'a> {
    pub(super) fn new(
        tokens: &'a Tokens,
        plan: &Plan,
        cost: &CostConfig,
        goals: Option<GoalsConfig>,
        meters: impl FnOnce(Option<GoalsConfig>) -> Meters,
    ) -> Self {
        let slots = (0..)
            .zip(&plan.groups)
            .filter(|(_, group)| group.kind == GroupKind::Contiguous)
            .map(|(g, group)| (GroupIdx(g), group.layout.unit_bytes, group.bytes_per_token.get()))
            .collect();
        Self {
            tokens,
            clock: Clock::new(cost, plan),
            pool_bytes: plan.pool_bytes.get(),
            slots,
            meters: meters(goals),
        }
    }
}

impl Work for Simulated<'_> {
    fn tokens(&self) -> &Tokens {
        self.tokens
    }

    fn clear(&mut self) {
        self.clock.clear();
    }

    fn push(&mut self, run: Run, _positions: &[u32], _tokens: &[u32]) {
        self.clock.add(run.first_position, run.rows);
    }

    fn compute(&mut self, step: &mut Step<'_>, _in_cache: &mut Duration) -> Result<(), CacheError> {
        step.mark_all_appended();
        Ok(())
    }

    fn took_ns(&mut self, copied_bytes: u64) -> u64 {
        self.clock.took_ns(copied_bytes)
    }

    fn note(&mut self, moment: &Moment<'_>) {
        let Moment { cache, stats, .. } = moment;
        let seqs = u64::from(stats.seqs);
        let (mut slot_held, mut slot_used) = (0, 0);
        for (group, unit_bytes, token_bytes) in &self.slots {
            let live = cache.group_stats(*group).map_or(0, |group| group.live_tokens);
            slot_held += unit_bytes * seqs;
            slot_used += token_bytes * live;
        }
        let (used, held) = (stats.used_bytes.get(), stats.held_bytes.get());
        let promised = stats.promised_bytes.get();
        let free = self.pool_bytes.saturating_sub(held + promised);
        let slot_waste = slot_held.saturating_sub(slot_used);
        let gauges = Gauges {
            used,
            held,
            promised,
            cached: stats.cached_bytes.get(),
            slot_waste,
            free,
            largest_run: free,
            running: moment.running,
            waiting: moment.waiting,
        };
        self.meters.step(moment.began_ns, moment.took_ns, &gauges);
        if self.meters.album.is_fuller(held) {
            self.meters.album.draw(moment.began_ns.saturating_add(moment.took_ns), held, cache);
        }
    }

    fn served(&mut self, served: &Served) {
        self.meters.served(served);
    }
}
