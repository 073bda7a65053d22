//! One variant, from its plan to its result.

use std::sync::atomic::Ordering::Relaxed;

use super::clock::Clock;
use super::dynamic::Dynamic;
use super::meters::Meters;
use super::picture::Album;
use super::result::{Replayed, VariantFailure, VariantResult};
use super::simulated::Simulated;
use super::{ReplayObserver, Shared};
use crate::cache::Cache;
use crate::config::{
    Admission, CacheConfig, CacheMode, Capacity, Config, ContiguousLayers, CostConfig,
};
use crate::device::cpu::available_memory;
use crate::device::{NullDevice, resolve_budget};
use crate::error::{CacheError, OpenError, PlanError};
use crate::job::meter::mean;
use crate::job::scheduler::Scheduler;
use crate::plan::Plan;
use crate::units::{Bytes, counted};

/// Steps between two looks at whether to stop.
const STEPS_AT_ONCE: u32 = 256;

/// Whether a plan can be replayed: its pool, of which nothing is allocated, within
/// `device.memory_limit`, and its bookkeeping in what this machine has available.
///
/// # Errors
/// [`PlanError::MemoryTooSmall`].
pub fn check_memory(plan: &Plan, config: &Config) -> Result<(), PlanError> {
    if let Some(limit) = config.device.memory_limit {
        plan.check_device_memory(Bytes::ZERO, limit, "device.memory_limit")?;
    }
    match available_memory() {
        Some(available) if plan.host_bytes > available => Err(PlanError::MemoryTooSmall {
            needed: plan.host_bytes,
            pool: Bytes::ZERO,
            host: plan.host_bytes,
            workspace: Bytes::ZERO,
            available,
            source_of_limit: "what this machine has available",
            worst_case: plan.capacity == Capacity::WorstCase,
        }),
        _ => Ok(()),
    }
}

/// A variant that can run.
#[derive(Debug)]
pub(super) struct Replayer<'a> {
    shared: &'a Shared<'a>,
    config: Config,
    cost: CostConfig,
    /// The plan; of the baseline, that of the same model with contiguous layers, which says how
    /// long a token is.
    plan: Plan,
    /// The baseline's memory.
    dynamic_bytes: Option<u64>,
}

impl std::fmt::Debug for Shared<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("requests", &self.requests.len()).finish_non_exhaustive()
    }
}

impl<'a> Replayer<'a> {
    /// Plans a variant, and checks that its bookkeeping fits this machine, and its pool the device
    /// that is planned for.
    pub(super) fn plan(shared: &'a Shared<'a>, config: &Config) -> Result<Self, OpenError> {
        let mut config = config.clone();
        resolve_budget(&mut config)?;
        let contradiction = |key: &str, problem: &str, help: &str| {
            OpenError::Plan(PlanError::Contradiction {
                key: key.to_owned(),
                problem: problem.to_owned(),
                help: help.to_owned(),
            })
        };
        let Some(cost) = config.cost.clone() else {
            return Err(contradiction("cost", "is missing", "give [cost]"));
        };
        if config.cache.mode == CacheMode::Dynamic {
            let mut contiguous = config.clone();
            contiguous.cache.mode = CacheMode::Contiguous;
            contiguous.pool.capacity = Capacity::WorstCase;
            let plan = Plan::new(&contiguous, shared.geometry)?;
            let per_token = plan.bytes_per_token;
            let bytes = match config.pool.capacity {
                Capacity::Budget(bytes) => bytes,
                Capacity::Tokens(tokens) => per_token.try_mul(tokens).map_err(PlanError::from)?,
                Capacity::WorstCase | Capacity::Blocks(_) | Capacity::BudgetPercent(_) => per_token
                    .try_mul(u64::from(plan.limits.max_seqs))
                    .and_then(|bytes| bytes.try_mul(u64::from(plan.limits.max_seq_len)))
                    .map_err(PlanError::from)?,
            };
            if let Some(limit) = config.device.memory_limit.filter(|limit| bytes > *limit) {
                return Err(OpenError::Plan(PlanError::MemoryTooSmall {
                    needed: bytes,
                    pool: bytes,
                    host: Bytes::ZERO,
                    workspace: Bytes::ZERO,
                    available: limit,
                    source_of_limit: "device.memory_limit",
                    worst_case: config.pool.capacity == Capacity::WorstCase,
                }));
            }
            return Ok(Self { shared, config, cost, plan, dynamic_bytes: Some(bytes.get()) });
        }
        let plan = Plan::new(&config, shared.geometry)?;
        check_memory(&plan, &config)?;
        Ok(Self { shared, config, cost, plan, dynamic_bytes: None })
    }

    /// Replays it; `None` when it was stopped before its end.
    pub(super) fn run(
        &self,
        name: &str,
        index: usize,
        fingerprint: &str,
        observer: &dyn ReplayObserver,
    ) -> Option<Replayed> {
        let mut result = VariantResult {
            variant: name.to_owned(),
            index,
            fingerprint: fingerprint.to_owned(),
            ceiling_hit_rate: self.shared.ceiling_hit_rate,
            ..self.settings()
        };
        let done = match self.dynamic_bytes {
            Some(bytes) => Ok(self.run_dynamic(bytes, &mut result, observer)),
            None => self.run_cache(&mut result, observer).map_err(|error| error.to_string()),
        };
        match done {
            Ok(true) => Some(Replayed::Done(Box::new(result))),
            Ok(false) => None,
            Err(error) => Some(Replayed::Failed(VariantFailure {
                variant: name.to_owned(),
                index,
                fingerprint: fingerprint.to_owned(),
                mode: self.config.cache.mode,
                error: format!("variant {name:?}: {error}"),
            })),
        }
    }

    /// The part of the result that is known before.
    fn settings(&self) -> VariantResult {
        let (config, plan) = (&self.config, &self.plan);
        let dynamic = self.dynamic_bytes.is_some();
        let paged = matches!(config.cache.mode, CacheMode::Paged | CacheMode::Hybrid);
        let bytes_per_token = plan.bytes_per_token.get();
        let tables = plan.host_terms.iter().filter(|term| term.what == "block tables");
        VariantResult {
            mode: Some(config.cache.mode),
            format: plan.format.name().to_owned(),
            tokens_per_block: if paged { plan.tokens_per_block } else { 0 },
            admission: plan.admission.name().to_owned(),
            prefix_reuse: plan.reuse.is_on() && !dynamic,
            other_settings: other_settings(&config.cache),
            capacity: config.pool.capacity.to_string(),
            pool_bytes: self.dynamic_bytes.unwrap_or(plan.pool_bytes.get()),
            host_bytes: if dynamic { 0 } else { plan.host_bytes.get() },
            table_bytes: if dynamic { 0 } else { tables.map(|t| t.bytes.get()).sum() },
            bytes_per_token,
            capacity_tokens: self
                .dynamic_bytes
                .map_or(plan.capacity_tokens, |bytes| bytes / bytes_per_token.max(1)),
            ..VariantResult::default()
        }
    }

    fn stopped(&self) -> bool {
        self.shared.stop.is_some_and(|stop| stop.load(Relaxed))
    }

    /// Drives the cache; `false` when it was stopped.
    fn run_cache(
        &self,
        result: &mut VariantResult,
        observer: &dyn ReplayObserver,
    ) -> Result<bool, OpenOrCache> {
        let shared = self.shared;
        let device = NullDevice::open(&self.plan);
        let cache = Cache::open(self.plan.clone(), Box::new(device))?;
        let album = Album::of(&cache);
        let meters = |goals| Meters::new(goals, album);
        let work =
            Simulated::new(&shared.tokens, &self.plan, &self.cost, self.config.goals, meters);
        let mut scheduler = Scheduler::new(cache, work, &shared.requests, shared.most_open)?;
        let of = shared.requests.len() as u64;
        let mut more = true;
        let mut told = 0;
        while more {
            if self.stopped() {
                return Ok(false);
            }
            for _ in 0..STEPS_AT_ONCE {
                more = scheduler.step()?;
                if !more {
                    break;
                }
            }
            observer.requests(&result.variant, scheduler.counts.completed - told, of);
            told = scheduler.counts.completed;
        }
        scheduler.work.meters.fill(result, scheduler.queue.now_ns);
        let Scheduler { cache, counts, .. } = &scheduler;
        let stats = cache.stats();
        result.requests_refused_too_long = counts.refused_too_long;
        result.requests_refused_never_fits = counts.refused_never_fits;
        result.first_refusal = scheduler.first_refusal();
        result.preemptions = counts.preemptions;
        result.forks = counts.forks;
        result.prompt_tokens = counts.prompt_tokens;
        result.prefix_hit_tokens = counts.hit_tokens;
        result.hit_rate = mean(counts.hit_tokens.into(), counts.prompt_tokens);
        result.computed_tokens = stats.tokens_appended;
        result.evictions = stats.evictions;
        result.copied_bytes = stats.copied_bytes.get();
        result.problems.extend(self.problems(&scheduler));
        Ok(true)
    }

    /// What is not as it must be at the end.
    fn problems(&self, scheduler: &Scheduler<'_, Simulated<'_>>) -> Vec<String> {
        let mut problems = Vec::new();
        let (got, expected) = (scheduler.counts.new_tokens, scheduler.tokens_to_come());
        if got != expected {
            problems.push(format!("{got} tokens were reached, expected {expected}"));
        }
        if scheduler.counts.hit_tokens > scheduler.counts.repeated_tokens {
            problems.push(format!(
                "{} prompt tokens were found in the cache, and only {} are in an earlier request too",
                scheduler.counts.hit_tokens, scheduler.counts.repeated_tokens
            ));
        }
        if self.plan.admission != Admission::MaxUtilization && scheduler.counts.preemptions > 0 {
            problems.push("a request was preempted that was promised its blocks".to_owned());
        }
        if let Err(error) = scheduler.cache.check_invariants() {
            problems.push(error.to_string());
        }
        problems
    }

    /// Drives the baseline; `false` when it was stopped.
    fn run_dynamic(
        &self,
        bytes: u64,
        result: &mut VariantResult,
        observer: &dyn ReplayObserver,
    ) -> bool {
        let shared = self.shared;
        let mut dynamic = Dynamic::new(
            &shared.requests,
            shared.most_open,
            (bytes, self.plan.bytes_per_token.get()),
            &self.plan.limits,
            Clock::new(&self.cost, &self.plan),
            |album| Meters::new(self.config.goals, album),
        );
        let (of, mut told, mut more) = (shared.requests.len() as u64, 0, true);
        while more {
            if self.stopped() {
                return false;
            }
            for _ in 0..STEPS_AT_ONCE {
                more = dynamic.step();
                if !more {
                    break;
                }
            }
            let done = dynamic.meters.completed();
            observer.requests(&result.variant, done - told, of);
            told = done;
        }
        dynamic.meters.fill(result, dynamic.queue.now_ns);
        let failures = &dynamic.failures;
        result.requests_refused_too_long = failures.too_long;
        result.requests_refused_never_fits = failures.never_fits;
        result.prompt_tokens = failures.prompt_tokens;
        result.computed_tokens = failures.computed_tokens;
        result.alloc_failures = failures.all;
        result.alloc_failures_with_room = failures.with_room;
        result.worst_free_bytes = failures.worst_free;
        result.worst_largest_run = failures.worst_largest;
        result.free_without_1gb_run = failures.free_without_gb;
        true
    }
}

/// Settings that a variant can change, and that are not numbers of the result by themselves.
fn other_settings(cache: &CacheConfig) -> String {
    let mut settings = Vec::new();
    if cache.mode == CacheMode::Hybrid {
        let layers = cache.hybrid.clone().unwrap_or_default().contiguous_layers;
        settings.push(match layers {
            ContiguousLayers::Named(name) => format!("layers {name}"),
            ContiguousLayers::List(layers) => format!("layers {layers:?}"),
        });
    }
    if cache.watermark_blocks > 0 {
        settings.push(format!("watermark {}", cache.watermark_blocks));
    }
    if cache.event_buffer > 0 {
        settings.push(counted(cache.event_buffer.into(), "event"));
    }
    settings.join(", ")
}

/// What ends a replay early: a defect.
#[derive(Debug, thiserror::Error)]
pub(super) enum OpenOrCache {
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error(transparent)]
    Cache(#[from] CacheError),
}
