//! Files of saved prefixes and sequences that cannot be written, read or taken.

use super::{CacheError, DeviceError};
use crate::units::{Bytes, grouped};

/// A save that failed, or a restore that was refused. The file that was there is as it was, and so
/// is the cache. Owns no heap memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SaveError {
    /// The operating system refused.
    #[error("{what} failed{}; {help}", SystemError(*code))]
    Io {
        /// What was tried, with the part of the file.
        what: &'static str,
        /// The operating system's error number, 0 when it gave none.
        code: i32,
        /// What to do.
        help: &'static str,
    },
    /// Another save to the same file is under way.
    #[error("another save to this file is under way; let it end, or give another name")]
    UnderWay,
    /// The file is none of ours.
    #[error("the file does not begin as a save of kvpool does; give the path of one")]
    NotASave,
    /// Another version of the format.
    #[error(
        "the file has version {found} of the save format and this kvpool reads version {supported}; save again with this kvpool"
    )]
    OtherVersion {
        /// The file's version.
        found: u32,
        /// The one that can be read.
        supported: u32,
    },
    /// A sequence where prefixes are wanted, or the reverse.
    #[error("the file holds {found}, and {wanted} is wanted; use the verb for what it holds")]
    OtherKind {
        /// What it holds.
        found: &'static str,
        /// What was to be restored.
        wanted: &'static str,
    },
    /// What was saved does not fit this plan.
    #[error(
        "the file's {what} is {found} and this plan's is {expected}; open a plan with the file's, or save anew"
    )]
    Differs {
        /// What differs.
        what: &'static str,
        /// In the file, as a number.
        found: u64,
        /// In the plan.
        expected: u64,
    },
    /// The model that the save was made with is another.
    #[error(
        "the file was saved with another model id than the one given; give the id that it was saved with if the weights are the same, or save anew"
    )]
    OtherModel,
    /// The epoch that the save was made in is another.
    #[error(
        "the file was saved in epoch {found} and the cache is in epoch {expected}; set the epoch first if the weights are the same, or save anew"
    )]
    OtherEpoch {
        /// The file's.
        found: u64,
        /// The cache's.
        expected: u64,
    },
    /// The file ends too early.
    #[error(
        "the file ends at byte {}, in the middle of {part}: it was cut off; restore another copy, or start without",
        grouped(*at)
    )]
    Truncated {
        /// Its length.
        at: u64,
        /// What is cut.
        part: &'static str,
    },
    /// A checksum or a number that cannot be.
    #[error(
        "{problem} in the record at byte {}: the file is damaged; restore another copy, or start without",
        grouped(*at)
    )]
    Damaged {
        /// Where the record begins.
        at: u64,
        /// What is wrong.
        problem: &'static str,
    },
    /// A layer needs tokens that the file does not have, because there it had a shorter window.
    #[error(
        "layer {layer} of this plan needs tokens from {needed} on and the file has them from {held} on; use a plan in which the layer has the window that the file was saved with"
    )]
    NotWhole {
        /// The layer.
        layer: u32,
        /// First token that this plan needs.
        needed: u32,
        /// First token that the file has.
        held: u32,
    },
    /// A sequence was to be saved without what has a salt, and has one, or may have.
    #[error(
        "the sequence has a salt, or this cache does not know whether it has, and unsalted_only is set; save it without that, to a place as private as its prompt"
    )]
    Salted,
    /// The buffer could not be allocated.
    #[error("the {} bytes of a save's buffers could not be allocated; free some memory, or lower limits.max_seq_len or limits.max_seqs", grouped(bytes.get()))]
    OutOfMemory {
        /// How much was wanted.
        bytes: Bytes,
    },
    /// The cache refused, or its device failed.
    #[error(transparent)]
    Cache(#[from] CacheError),
}

/// The operating system's number in words, if it gave one.
struct SystemError(i32);

impl std::fmt::Display for SystemError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.0 == 0 { Ok(()) } else { write!(f, " (system error {})", self.0) }
    }
}

impl From<DeviceError> for SaveError {
    fn from(error: DeviceError) -> Self {
        Self::Cache(error.into())
    }
}
