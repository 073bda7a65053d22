//! Verbs that were refused.

use super::DeviceError;
use crate::units::{GroupIdx, LayerIdx, counted};

/// A verb that was refused. The cache is as it was before the call (P4). Owns no heap memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CacheError {
    /// The handle belongs to another cache.
    #[error("the handle belongs to another cache")]
    ForeignHandle,
    /// The sequence of the handle was released, or the handle was never given out.
    #[error(
        "the sequence handle (slot {slot}, generation {generation}) is not alive: it was released, or never given out"
    )]
    StaleHandle {
        /// Its slot.
        slot: u32,
        /// Its generation.
        generation: u64,
    },
    /// The step was committed or cancelled, or was never open.
    #[error("step {number} is not open: it was committed or cancelled, or never reserved")]
    StaleStep {
        /// Its number.
        number: u64,
    },
    /// The block of the handle was given back, or the handle was never given out.
    #[error(
        "the block handle (group {group}, block {block}, generation {generation}) is not alive"
    )]
    StaleBlock {
        /// Its layer group.
        group: GroupIdx,
        /// Its block.
        block: u32,
        /// Its generation.
        generation: u64,
    },
    /// A sequence with this key is alive.
    #[error("a sequence with key {key} is alive; release it first, or use another key")]
    DuplicateKey {
        /// The key.
        key: u64,
    },
    /// All sequence slots are taken; one comes free when a sequence is released.
    #[error(
        "{} taken; release a sequence, or raise limits.max_seqs (contiguous: pool.capacity)",
        all(*seq_slots, "sequence slot")
    )]
    NoSeqSlot {
        /// How many there are.
        seq_slots: u32,
    },
    /// A sequence longer than the plan allows.
    #[error("{wanted} tokens exceed the sequence's limit of {limit}; raise {knob}")]
    SequenceTooLong {
        /// Tokens wanted.
        wanted: u64,
        /// Tokens allowed.
        limit: u32,
        /// Which setting, or option of `begin`, sets the limit.
        knob: &'static str,
    },
    /// The pool could not hold this sequence even when empty; waiting does not help.
    #[error(
        "the sequence needs {} of layer group {group} and the whole pool has {total}: it can never run; \
         give begin a smaller max_len (left out, it is limits.max_seq_len) or less look-ahead, or raise pool.capacity",
        counted(*wanted, "block")
    )]
    NeverFits {
        /// Which layer group is short.
        group: GroupIdx,
        /// Blocks wanted.
        wanted: u64,
        /// Blocks in the pool.
        total: u64,
    },
    /// The pool cannot take this sequence now; it can when others are released.
    #[error(
        "the sequence needs {} of layer group {group} and {available} {} not taken or promised; release a sequence, or raise pool.capacity",
        counted(*wanted, "block"), is_are(*available)
    )]
    NotAdmitted {
        /// Which layer group is short.
        group: GroupIdx,
        /// Blocks wanted.
        wanted: u64,
        /// Blocks neither taken nor promised.
        available: u64,
    },
    /// A step needs more blocks than are free.
    #[error(
        "the step needs {} of layer group {group} and {available} {} free; release or preempt a sequence, or raise pool.capacity",
        counted(*wanted, "block"), is_are(*available)
    )]
    PoolExhausted {
        /// Which layer group is short.
        group: GroupIdx,
        /// Blocks wanted.
        wanted: u64,
        /// Blocks free.
        available: u64,
    },
    /// The same sequence twice in one step.
    #[error("the sequence in slot {slot} is named twice in one step")]
    SequenceTwice {
        /// Its slot.
        slot: u32,
    },
    /// No token for a sequence of a step.
    #[error("0 tokens reserved for the sequence in slot {slot}; leave it out of the step instead")]
    ZeroTokens {
        /// Its slot.
        slot: u32,
    },
    /// Look-ahead that could not be taken back.
    #[error(
        "{wanted} look-ahead tokens could not be rewound in layers with a window; at most {limit} can: raise limits.max_rewind_tokens"
    )]
    LookaheadBeyondRewind {
        /// Look-ahead wanted.
        wanted: u32,
        /// `limits.max_rewind_tokens`.
        limit: u32,
    },
    /// The CSR form was asked for before it was built.
    #[error("the CSR form of this step is not built yet; call build_csr first")]
    CsrNotBuilt,
    /// A step larger than the plan allows.
    #[error(
        "{wanted} tokens in one step exceed the limit of {limit}; split the step, or raise {knob}"
    )]
    StepTooLarge {
        /// Tokens wanted.
        wanted: u64,
        /// Tokens allowed.
        limit: u32,
        /// The setting.
        knob: &'static str,
    },
    /// The layer does not exist.
    #[error("layer {layer} does not exist; the model has {num_layers}")]
    NoSuchLayer {
        /// Layer.
        layer: LayerIdx,
        /// Layers of the model.
        num_layers: u32,
    },
    /// The layer group does not exist.
    #[error("layer group {group} does not exist{kind}; the plan has {num_groups}")]
    NoSuchGroup {
        /// Group.
        group: GroupIdx,
        /// Groups of the plan.
        num_groups: u32,
        /// What else would be refused, in words: `, or is not paged`, or nothing.
        kind: &'static str,
    },
    /// A buffer of the wrong length.
    #[error("{what} has {got} elements, expected {expected} ({shape})")]
    WrongShape {
        /// Which buffer.
        what: &'static str,
        /// Its length.
        got: usize,
        /// The length that the step asks for.
        expected: usize,
        /// The shape in words.
        shape: &'static str,
    },
    /// K and V of two element types.
    #[error("k is of {k} and v of {v}; give both in one element type")]
    MixedTypes {
        /// That of K.
        k: &'static str,
        /// That of V.
        v: &'static str,
    },
    /// `attend` before `append`: the step's own keys are not there yet.
    #[error("layer {layer} is attended before its K and V of this step were appended")]
    AttendBeforeAppend {
        /// The layer.
        layer: LayerIdx,
    },
    /// `append` twice for one layer.
    #[error("layer {layer} was already appended in this step")]
    AlreadyAppended {
        /// The layer.
        layer: LayerIdx,
    },
    /// `commit` of a step whose K and V are not all there.
    #[error(
        "{} not appended in this step, the first is {first}; append what is missing, or call mark_appended when your own kernels wrote it",
        if *missing == 1 { "1 layer was".to_owned() } else { format!("{missing} layers were") }
    )]
    StepIncomplete {
        /// How many.
        missing: u32,
        /// The first.
        first: LayerIdx,
    },
    /// `truncate` to more tokens than there are.
    #[error("cannot truncate to {wanted} tokens a sequence of {len}")]
    TruncateBeyondEnd {
        /// Length wanted.
        wanted: u32,
        /// Length now.
        len: u32,
    },
    /// `truncate` to where the keys of a windowed layer are gone.
    #[error(
        "cannot rewind to {wanted} tokens: a layer with window {window} keeps only tokens from {kept_from} on; the shortest length left is {shortest}; raise limits.max_rewind_tokens"
    )]
    WindowGone {
        /// Length wanted.
        wanted: u32,
        /// The window of the layer that refuses.
        window: u32,
        /// The first token that it keeps.
        kept_from: u32,
        /// The shortest length that can be rewound to.
        shortest: u32,
    },
    /// A range of tokens that the layer does not hold.
    #[error("tokens {from}..{to} are not all held by layer {layer}: it holds {kept_from}..{len}")]
    NotHeld {
        /// The layer.
        layer: LayerIdx,
        /// First token wanted.
        from: u32,
        /// End of the range wanted.
        to: u32,
        /// First token held.
        kept_from: u32,
        /// Tokens of the sequence.
        len: u32,
    },
    /// A softmax scale that is not a finite positive number.
    #[error("the softmax scale must be finite and above 0")]
    BadSoftmaxScale,
    /// The count of references to a block would pass its limit.
    #[error("block {block} has {limit} references, which is the limit")]
    TooManyRefs {
        /// The block.
        block: u32,
        /// The limit.
        limit: u32,
    },
    /// Static batches: nothing begins before the batch that runs has ended.
    #[error(
        "a static batch of {} is under way; release {} first, or use cache.admission = \"guaranteed\"",
        counted((*live).into(), "sequence"), it_them(*live)
    )]
    BatchUnderWay {
        /// Sequences of the batch.
        live: u32,
    },
    /// A token of a step that is not the one that the prompt had at this position.
    #[error(
        "token {given} given for position {position} of the sequence in slot {slot}, where its prompt has {known}"
    )]
    TokenMismatch {
        /// The sequence's slot.
        slot: u32,
        /// The position.
        position: u32,
        /// What the prompt has.
        known: u32,
        /// What was given.
        given: u32,
    },
    /// A range of tokens to retain that cannot be.
    #[error("retention range {at}: {problem}")]
    BadRetention {
        /// Which range.
        at: usize,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// A verb of prefix reuse in a plan that shares nothing.
    #[error(
        "this plan shares no prefix blocks (see the plan's `prefixes` line); set cache.prefix_reuse = true, or make the layers without a window paged"
    )]
    ReuseOff,
    /// A sequence that has no shareable block.
    #[error(
        "the sequence has no shareable block to pin yet: blocks are shareable when they are full, committed, and their token ids are known"
    )]
    NothingToPin,
    /// All pins are in use.
    #[error("{} in use; unpin something, or raise limits.max_seqs", all(*limit, "pin"))]
    NoPin {
        /// How many there are.
        limit: u32,
    },
    /// The operation would make reservations outdated.
    #[error("{} held; begin or cancel {} first", are(*held, "reservation"), it_them(*held))]
    ReservationsHeld {
        /// How many.
        held: u32,
    },
    /// A salt, adapter or model id with more bytes than are kept.
    #[error(
        "a salt, adapter or model id has {len} bytes, and {limit} at most are kept; give a digest of it"
    )]
    KeyPartTooLong {
        /// Its bytes.
        len: usize,
        /// The most that there can be.
        limit: usize,
    },
    /// A pin that was let go, or never given out.
    #[error("the pin handle (slot {slot}, generation {generation}) is not alive")]
    StalePin {
        /// Its slot.
        slot: u32,
        /// Its generation.
        generation: u64,
    },
    /// The operation needs an idle cache, and pins are alive.
    #[error("{} alive; unpin {} first", are(*live, "pin"), it_them(*live))]
    PinsAlive {
        /// How many.
        live: u32,
    },
    /// The operation needs an idle cache, and sequences are alive.
    #[error(
        "{} alive; release {} first{}",
        are(*live, "sequence"),
        it_them(*live),
        if *reserved > 0 { " (cancel_reservations gives reserved places back)" } else { "" }
    )]
    SequencesAlive {
        /// How many, reservations counted.
        live: u32,
        /// How many of them are reservations.
        reserved: u32,
    },
    /// The device failed. Sequences, their tokens and what they were promised are as they were, and
    /// the verb can be called again. What the verb had evicted, taken over or withdrawn from the
    /// index to make room for it before it came to the device does not come back, and free and
    /// cached blocks may have another order. After an error that ends a GPU's context every verb
    /// that needs the device says so, until the cache is closed.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// A batch of sequences that was refused as a whole. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("sequence {index} of the batch: {source}")]
pub struct BatchRefused {
    /// The first sequence that was refused.
    pub index: usize,
    /// Why.
    pub source: CacheError,
}

/// A violated invariant: a defect of kvpool.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invariant violated: {0}")]
pub struct InvariantError(pub String);

/// The verb that goes with a count.
fn is_are(count: u64) -> &'static str {
    if count == 1 { "is" } else { "are" }
}

/// The pronoun that goes with a count.
fn it_them(count: u32) -> &'static str {
    if count == 1 { "it" } else { "them" }
}

/// `1 pin is`, `2 pins are`.
fn are(count: u32, what: &str) -> String {
    format!("{} {}", counted(count.into(), what), is_are(count.into()))
}

/// `the only pin is`, `all 2 pins are`.
fn all(count: u32, what: &str) -> String {
    if count == 1 { format!("the only {what} is") } else { format!("all {}", are(count, what)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_no_plural() {
        let group = GroupIdx(0);
        for (one, text) in [
            (
                CacheError::SequencesAlive { live: 1, reserved: 0 },
                "1 sequence is alive; release it first",
            ),
            (
                CacheError::SequencesAlive { live: 2, reserved: 1 },
                "2 sequences are alive; release them first (cancel_reservations gives reserved places back)",
            ),
            (CacheError::PinsAlive { live: 1 }, "1 pin is alive; unpin it first"),
            (CacheError::PinsAlive { live: 3 }, "3 pins are alive; unpin them first"),
            (
                CacheError::ReservationsHeld { held: 1 },
                "1 reservation is held; begin or cancel it first",
            ),
            (CacheError::NoPin { limit: 1 }, "the only pin is in use;"),
            (CacheError::NoPin { limit: 4 }, "all 4 pins are in use;"),
            (CacheError::NoSeqSlot { seq_slots: 1 }, "the only sequence slot is taken;"),
            (CacheError::BatchUnderWay { live: 1 }, "a static batch of 1 sequence is under way;"),
            (
                CacheError::StepIncomplete { missing: 1, first: LayerIdx(3) },
                "1 layer was not appended in this step, the first is 3;",
            ),
            (
                CacheError::PoolExhausted { group, wanted: 1, available: 0 },
                "the step needs 1 block of layer group 0 and 0 are free;",
            ),
            (
                CacheError::NotAdmitted { group, wanted: 2, available: 1 },
                "the sequence needs 2 blocks of layer group 0 and 1 is not taken or promised;",
            ),
        ] {
            assert!(one.to_string().starts_with(text), "{one}");
        }
    }

    #[test]
    fn what_never_fits_names_every_knob() {
        let error = CacheError::NeverFits { group: GroupIdx(1), wanted: 5, total: 4 }.to_string();
        for knob in ["max_len", "limits.max_seq_len", "look-ahead", "pool.capacity"] {
            assert!(error.contains(knob), "{knob}: {error}");
        }
    }
}
