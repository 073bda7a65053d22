//! What can be read at run time (P12).

use serde::Serialize;

use super::BlockCounts;
use crate::plan::GroupReuse;
use crate::units::Bytes;

/// Counters and gauges of a cache.
///
/// Gauges: `seqs`, `used_bytes`, `held_bytes`, `promised_bytes`, `cached_bytes`. Everything else
/// only grows.
/// `held_bytes + promised_bytes − used_bytes` is the waste: memory that no other sequence can
/// have and that holds no token.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Stats {
    /// Sequences alive, reservations among them.
    pub seqs: u32,
    /// Bytes of K, V and scales of tokens that some query may still see. Full blocks that several
    /// sequences share count once; a last block that several have not filled counts for each, as
    /// far as `held_bytes` goes.
    pub used_bytes: Bytes,
    /// Bytes of the blocks and slots that sequences hold.
    pub held_bytes: Bytes,
    /// Bytes of the blocks that admission promised and that are not taken yet.
    pub promised_bytes: Bytes,
    /// Bytes of blocks that nobody holds and that are kept for reuse, promised ones left out.
    pub cached_bytes: Bytes,
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
    /// Sequences begun, forks included; a reservation when its sequence begins.
    pub seqs_begun: u64,
    /// Elements that were NaN or infinite on the way into INT8.
    pub nonfinite: u64,
    /// Elements beyond the range of a static INT8 scale.
    pub saturated: u64,
    /// Bytes copied within the pool.
    pub copied_bytes: Bytes,
    /// Bytes zeroed because `pool.scrub` asks for it.
    pub scrubbed_bytes: Bytes,
    /// Times that the device refused to zero something. A free block is zeroed again when it is
    /// taken; tokens behind a sequence's end stay.
    pub scrub_failures: u64,
    /// Sequences that looked for a prefix: all that were begun, forks left out.
    pub prefix_queries: u64,
    /// Tokens of their prompts.
    pub prefix_query_tokens: u64,
    /// Of these, tokens that were in the cache.
    pub prefix_hit_tokens: u64,
    /// Whole blocks that were.
    pub prefix_hit_blocks: u64,
    /// Matches that ended within a block.
    pub prefix_partial_hits: u64,
    /// Tokens of those last blocks.
    pub prefix_partial_tokens: u64,
    /// Matches that a windowed group made shorter.
    pub window_misses: u64,
    /// Matches that were shorter than in the index because no slot of contiguous groups had as
    /// much.
    pub donor_misses: u64,
    /// Blocks made shareable.
    pub blocks_published: u64,
    /// Blocks given back at once because the index had the same one.
    pub blocks_deduplicated: u64,
    /// Cached blocks given up for others.
    pub evictions: u64,
    /// Blocks copied before a write because others held them too.
    pub cow_copies: u64,
    /// Shareable blocks taken out of the index by a sequence that was rewound: the one that it goes
    /// on to write in place, and those that went on from it.
    pub blocks_withdrawn: u64,
    /// Blocks of which a part was copied for a new sequence.
    pub partial_copies: u64,
    /// Blocks of which a part was of use, taken over without copying.
    pub partial_takeovers: u64,
    /// Prefixes copied between slots of contiguous groups.
    pub donor_copies: u64,
    /// Sequences that give others nothing, because all numbers of namespaces were in use. What they
    /// found they have.
    pub namespaces_refused: u64,
    /// Slots of contiguous groups taken over with their prefix.
    pub donor_takeovers: u64,
    /// Files written: saves of prefixes and of sequences.
    pub saves: u64,
    /// Their tokens.
    pub saved_tokens: u64,
    /// Sequences restored from files.
    pub restored_seqs: u64,
    /// Blocks of prefixes that were restored and not cached before.
    pub restored_blocks: u64,
    /// Slots of contiguous groups that a prefix was restored into.
    pub restored_slots: u64,
    /// Sequences preempted, reservations among them.
    pub preemptions: u64,
    /// Sequences refused because all slots were taken,
    pub refused_slots: u64,
    /// because too few blocks were available,
    pub refused_blocks: u64,
    /// because the whole pool has too few,
    pub refused_never: u64,
    /// because they were longer than a limit,
    pub refused_too_long: u64,
    /// and because a static batch was under way.
    pub refused_static_batch: u64,
}

/// Gauges of one layer group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct GroupStats {
    /// Blocks by state; zeros for a contiguous group.
    pub blocks: BlockCounts,
    /// Tokens that some query may still see, over all sequences.
    pub live_tokens: u64,
    /// The most blocks that were cached at once; 0 for a contiguous group.
    pub peak_cached: u32,
    /// How the group takes part when sequences share a prefix.
    pub reuse: GroupReuse,
}
