//! What can be read at run time (P12).

use serde::Serialize;

use super::BlockCounts;
use crate::units::Bytes;

/// Counters and gauges of a cache.
///
/// Gauges: `seqs`, the three `_bytes` without `peak`, `groups`. Everything else only grows.
/// `held_bytes + promised_bytes − used_bytes` is the waste: memory that no other sequence can
/// have and that holds no token.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Stats {
    /// Sequences alive.
    pub seqs: u32,
    /// Bytes of K, V and scales of tokens that some query may still see.
    pub used_bytes: Bytes,
    /// Bytes of the blocks and slots that sequences hold.
    pub held_bytes: Bytes,
    /// Bytes of the blocks that admission promised and that are not taken yet.
    pub promised_bytes: Bytes,
    /// The largest `used_bytes` so far.
    pub peak_used_bytes: Bytes,
    /// The largest `held_bytes` so far.
    pub peak_held_bytes: Bytes,
    /// Tokens committed.
    pub tokens_appended: u64,
    /// Steps committed.
    pub steps_committed: u64,
    /// Steps cancelled or dropped.
    pub steps_cancelled: u64,
    /// Sequences begun, forks included.
    pub seqs_begun: u64,
    /// Elements that were NaN or infinite on the way into INT8.
    pub nonfinite: u64,
    /// Elements beyond the range of a static INT8 scale.
    pub saturated: u64,
    /// Bytes copied within the pool.
    pub copied_bytes: Bytes,
}

/// Gauges of one layer group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct GroupStats {
    /// Blocks by state; zeros for a contiguous group.
    pub blocks: BlockCounts,
    /// Tokens that some query may still see, over all sequences.
    pub live_tokens: u64,
}
