//! Plans that cannot be made.

use crate::units::{Bytes, Overflow, SizeError, grouped};

/// A plan that cannot be made from a valid file.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PlanError {
    /// A size does not fit in 64 bits.
    #[error(
        "the plan is too large to express: {0}; lower limits.max_seqs, limits.max_seq_len or the model's sizes"
    )]
    Overflow(#[from] Overflow),
    /// A count does not fit its 32-bit index.
    #[error("{what} would be {wanted}, and at most {limit} can be addressed; {knob}")]
    TooMany {
        /// What is counted.
        what: &'static str,
        /// How many there would be.
        wanted: u64,
        /// How many there may be.
        limit: u64,
        /// The setting to change.
        knob: &'static str,
    },
    /// The capacity does not hold a single block or slot.
    #[error(
        "pool.capacity gives {} bytes, and the smallest pool of this plan ({what}) takes {} bytes: {} bytes short; \
         raise pool.capacity, or lower {knobs}",
        grouped(available.get()), grouped(needed.get()), grouped(needed.get() - available.get())
    )]
    BudgetTooSmall {
        /// What the smallest pool consists of.
        what: &'static str,
        /// Bytes of the smallest pool.
        needed: Bytes,
        /// Bytes of the budget.
        available: Bytes,
        /// The settings that make it smaller.
        knobs: &'static str,
    },
    /// A capacity in tokens or blocks that does not hold a single block or slot.
    #[error(
        "pool.capacity: {given} {unit} is less than the {needed} that {what} needs; raise pool.capacity, or lower {knobs}"
    )]
    CapacityTooSmall {
        /// The capacity as given.
        given: u64,
        /// Its unit: `tokens` or `blocks`.
        unit: &'static str,
        /// What is needed, in the same unit.
        needed: u64,
        /// What needs it.
        what: &'static str,
        /// The settings to change.
        knobs: &'static str,
    },
    /// The pool and its bookkeeping do not fit the memory at hand.
    #[error(
        "the plan takes {} bytes (pool {}, bookkeeping {}, workspace {}), and {} bytes are available ({source_of_limit}): {} bytes short; \
         {}",
        grouped(needed.get()), grouped(pool.get()), grouped(host.get()), grouped(workspace.get()),
        grouped(available.get()), grouped(needed.get() - available.get()),
        memory_knobs(available.get().saturating_sub(host.get().saturating_add(workspace.get())), *worst_case)
    )]
    MemoryTooSmall {
        /// Pool, bookkeeping and workspace.
        needed: Bytes,
        /// The pool alone.
        pool: Bytes,
        /// The bookkeeping alone.
        host: Bytes,
        /// The device's workspace alone.
        workspace: Bytes,
        /// What there is.
        available: Bytes,
        /// Who says so.
        source_of_limit: &'static str,
        /// Whether `pool.capacity` is the worst case.
        worst_case: bool,
    },
    /// Settings that each are valid but do not go together.
    #[error("{key}: {problem}; {help}")]
    Contradiction {
        /// The dotted key.
        key: String,
        /// What is wrong.
        problem: String,
        /// What to do.
        help: String,
    },
}

/// What to change when a plan takes more memory than there is. `budget` is what is left for the
/// pool; under a capacity that was given, that is what to lower.
fn memory_knobs(budget: u64, worst_case: bool) -> String {
    let more = "give device.memory_limit (or the machine) more";
    match (budget, worst_case) {
        (0, _) => format!(
            "not even the tables and the workspace fit: lower limits.max_seqs or \
             limits.max_seq_len, or {more}"
        ),
        (_, true) => format!(
            "lower limits.max_seqs or limits.max_seq_len, choose a smaller cache.format, give \
             pool.capacity = \"budget:{budget}\", or {more}"
        ),
        (_, false) => {
            format!("lower pool.capacity, to \"budget:{budget}\" at most, or {more}")
        }
    }
}

impl From<SizeError> for PlanError {
    fn from(error: SizeError) -> Self {
        Self::Contradiction {
            key: "pool.capacity".to_owned(),
            problem: error.to_string(),
            help: "write \"worst-case\", \"tokens:N\", \"blocks:N\" or \"budget:SIZE\"".to_owned(),
        }
    }
}
