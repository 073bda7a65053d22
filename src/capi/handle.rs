//! Handles: two words that hold a kind, a generation, a place, and for what lives in a cache the
//! cache's id.
//!
//! ```text
//!   word 0: [owner: 32][place: 32]      word 1: [kind: 8][generation: 56]
//! ```
//!
//! Nothing in a handle is trusted: the kind is looked at here, the rest where the handle is used.

use super::bindings::{
    kvpool_block_t, kvpool_cache_t, kvpool_config_t, kvpool_pin_t, kvpool_plan_t,
    kvpool_reservation_t, kvpool_seq_t, kvpool_step_t,
};
use super::failure::CallError;
use crate::cache::{PinHandle, SeqHandle, StepId};
use crate::pool::BlockHandle;

const GENERATION_BITS: u32 = 56;

/// A block's handle has its group in the upper bits of the generation.
const GROUP_BITS: u32 = 16;
const BLOCK_GENERATION_BITS: u32 = GENERATION_BITS - GROUP_BITS;

/// A type of handles.
pub(super) trait Handle: Copy {
    /// Its number in the handle, and its name in messages.
    const KIND: u8;
    const NAME: &'static str;
    fn from_words(word: [u64; 2]) -> Self;
    fn words(self) -> [u64; 2];
}

macro_rules! handles {
    ($($kind:literal $name:literal $type:ident),*) => {
        $(impl Handle for $type {
            const KIND: u8 = $kind;
            const NAME: &'static str = $name;
            fn from_words(word: [u64; 2]) -> Self {
                Self { word }
            }
            fn words(self) -> [u64; 2] {
                self.word
            }
        })*
    };
}

handles! {
    0xC1 "config" kvpool_config_t,
    0xC2 "plan" kvpool_plan_t,
    0xC3 "cache" kvpool_cache_t,
    0xC4 "sequence" kvpool_seq_t,
    0xC5 "step" kvpool_step_t,
    0xC6 "pin" kvpool_pin_t,
    0xC7 "reservation" kvpool_reservation_t,
    0xC8 "block" kvpool_block_t
}

/// What a handle says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Parts {
    pub(super) owner: u32,
    pub(super) place: u32,
    pub(super) generation: u64,
}

/// The handle of some parts. A generation of more than 56 bits does not come up: it would take
/// longer than any machine lasts.
pub(super) fn pack<H: Handle>(parts: Parts) -> H {
    let Parts { owner, place, generation } = parts;
    let generation = generation & ((1 << GENERATION_BITS) - 1);
    let kind = u64::from(H::KIND) << GENERATION_BITS;
    H::from_words([u64::from(owner) << 32 | u64::from(place), kind | generation])
}

/// The parts of a handle, when it is of its kind.
#[expect(clippy::cast_possible_truncation, reason = "the two halves of a word")]
pub(super) fn unpack<H: Handle>(handle: H) -> Result<Parts, CallError> {
    let [at, named] = handle.words();
    if named >> GENERATION_BITS != u64::from(H::KIND) {
        let zero = handle.words() == [0, 0];
        return Err(CallError::BadHandle { wanted: H::NAME, zero });
    }
    let generation = named & ((1 << GENERATION_BITS) - 1);
    Ok(Parts { owner: (at >> 32) as u32, place: at as u32, generation })
}

pub(super) fn seq(handle: kvpool_seq_t) -> Result<SeqHandle, CallError> {
    let Parts { owner, place, generation } = unpack(handle)?;
    Ok(SeqHandle::from_parts(owner, place, generation))
}

/// A sequence's handle, or, where it is none, one that no cache has given out.
#[expect(clippy::cast_possible_truncation, reason = "the two halves of a word")]
#[inline]
pub(super) fn seq_or_nobodys(handle: kvpool_seq_t) -> SeqHandle {
    let [at, named] = handle.word;
    let generation = named & ((1 << GENERATION_BITS) - 1);
    let is_seq = named >> GENERATION_BITS == u64::from(kvpool_seq_t::KIND);
    // Caches are numbered from 1 on.
    SeqHandle::from_parts(if is_seq { (at >> 32) as u32 } else { 0 }, at as u32, generation)
}

pub(super) fn of_seq(handle: SeqHandle) -> kvpool_seq_t {
    let (owner, place, generation) = handle.parts();
    pack(Parts { owner, place, generation })
}

pub(super) fn pin(handle: kvpool_pin_t) -> Result<PinHandle, CallError> {
    let Parts { owner, place, generation } = unpack(handle)?;
    Ok(PinHandle::from_parts(owner, place, generation))
}

pub(super) fn of_pin(handle: PinHandle) -> kvpool_pin_t {
    let (owner, place, generation) = handle.parts();
    pack(Parts { owner, place, generation })
}

pub(super) fn step(handle: kvpool_step_t) -> Result<StepId, CallError> {
    let Parts { owner, place, generation } = unpack(handle)?;
    if place != 0 {
        // Steps have none: it was never given out.
        return Err(CallError::StaleHandle { what: "step" });
    }
    Ok(StepId::from_parts(owner, generation))
}

pub(super) fn of_step(step: StepId) -> kvpool_step_t {
    let (owner, generation) = step.parts();
    pack(Parts { owner, place: 0, generation })
}

pub(super) fn block(handle: kvpool_block_t) -> Result<BlockHandle, CallError> {
    let Parts { owner, place, generation } = unpack(handle)?;
    let group = (generation >> BLOCK_GENERATION_BITS) as u32;
    let generation = generation & ((1 << BLOCK_GENERATION_BITS) - 1);
    Ok(BlockHandle::from_parts(owner, group, place, generation))
}

/// A block's handle, where its group has a number that fits.
pub(super) fn of_block(handle: BlockHandle) -> Result<kvpool_block_t, CallError> {
    let (owner, group, place, generation) = handle.parts();
    if group >> GROUP_BITS != 0 {
        let problem = "has a number that is too high for handles of its blocks";
        return Err(CallError::BadArgument { what: "group", problem });
    }
    let generation = generation & ((1 << BLOCK_GENERATION_BITS) - 1);
    let generation = u64::from(group) << BLOCK_GENERATION_BITS | generation;
    Ok(pack(Parts { owner, place, generation }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_keeps_its_parts() {
        let parts = Parts { owner: u32::MAX, place: 7, generation: (1 << GENERATION_BITS) - 1 };
        assert_eq!(unpack(pack::<kvpool_seq_t>(parts)), Ok(parts));
        for group in [0, 4095, 4096, 65535] {
            let generation = (1 << BLOCK_GENERATION_BITS) - 1;
            let block = BlockHandle::from_parts(3, group, u32::MAX, generation);
            assert_eq!(of_block(block).and_then(super::block), Ok(block));
        }
        // Cut, it would be another group's block.
        assert!(of_block(BlockHandle::from_parts(3, 65536, 1, 1)).is_err());
    }

    #[test]
    fn a_handle_of_another_kind_is_none() {
        let pin: kvpool_pin_t = pack(Parts { owner: 1, place: 2, generation: 3 });
        let as_seq = kvpool_seq_t { word: pin.word };
        assert_eq!(unpack(as_seq), Err(CallError::BadHandle { wanted: "sequence", zero: false }));
        let zero = kvpool_cache_t { word: [0, 0] };
        assert_eq!(unpack(zero), Err(CallError::BadHandle { wanted: "cache", zero: true }));
    }
}
