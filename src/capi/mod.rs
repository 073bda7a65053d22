//! The C interface. `csrc/include/kvpool.h` is its source and its documentation: the rules on
//! statuses, ownership, threads and memory stand there; here stands how they are kept.
//!
//! | file | section of the header |
//! |---|---|
//! | `failure.rs`, `facts.rs`, `last_error.rs` | statuses, numbers of a failure, last error |
//! | `handle.rs`, `registry.rs`, `process.rs` | handles, the objects behind them, and what a fork leaves of these |
//! | `object.rs`, `gate.rs`, `turns.rs` | a cache behind its handle: who may enter, and what a panic leaves |
//! | `later.rs` | what is given back while it cannot be taken |
//! | `caller.rs` | pointers of the caller, checked |
//! | `config.rs`, `plan.rs`, `open.rs`, `dlpack.rs` | config, plan, cache |
//! | `sequence.rs`, `admission.rs`, `step.rs`, `tensor.rs` | sequences, admission, steps |
//! | `prefix.rs`, `save.rs`, `events.rs`, `stats.rs` | prefixes, save and restore, events, statistics |
//! | `decode.rs`, `fault.rs` | none: for `kvpool bench capi`, and in tests |
//!
//! `bindings.rs` (the header's types) and `signatures.rs` (that every function has the signature
//! that the header declares) are made by `csrc/bindings.sh`.
//!
//! **Locks.** `device/rank.rs` has them and their order, which builds with debug assertions and
//! unit tests check: a cache's own mutex (`gate.rs`; `turns.rs` says in which order it is given),
//! its DLPack views (`dlpack.rs`), the table of objects (`registry.rs`, for the time of a look-up).
//! A verb claims the cache before it takes the mutex, so a second verb is refused rather than kept
//! waiting; a reader waits for the verb that is under way, and a verb for the readers that are.

#![allow(missing_docs, clippy::missing_safety_doc, reason = "kvpool.h documents the functions")]
#![allow(non_camel_case_types, reason = "the header's names")]

mod admission;
mod bindings;
mod caller;
mod config;
pub mod decode;
mod dlpack;
mod events;
mod facts;
mod failure;
#[cfg(test)]
mod fault;
mod gate;
mod handle;
mod last_error;
mod later;
mod object;
mod open;
mod plan;
mod prefix;
mod process;
mod registry;
mod save;
mod sequence;
mod signatures;
mod stats;
mod step;
mod tensor;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_panics;
#[cfg(test)]
mod tests_waiting;
mod text;
mod turns;

pub use admission::*;
pub use bindings::*;
pub use config::*;
pub use dlpack::{DLDataType, DLDevice, DLManagedTensor, DLTensor, kvpool_cache_dlpack};
pub use events::*;
pub use last_error::{kvpool_last_error, kvpool_status_name};
pub use open::*;
pub use plan::*;
pub use prefix::*;
pub use save::*;
pub use sequence::*;
pub use stats::*;
pub use step::*;

/// The ABI's version.
#[unsafe(no_mangle)]
pub extern "C" fn kvpool_abi_version() -> u32 {
    KVPOOL_ABI_VERSION
}

/// The library's version, with its final NUL.
#[unsafe(no_mangle)]
pub extern "C" fn kvpool_version() -> *const std::ffi::c_char {
    KVPOOL_VERSION.as_ptr().cast()
}

// The header cannot read Cargo.toml.
const _: () = assert!(
    env!("CARGO_PKG_VERSION").len() + 1 == KVPOOL_VERSION.len(),
    "KVPOOL_VERSION of kvpool.h is not the package's version"
);

#[cfg(test)]
mod version {
    use super::*;

    #[test]
    fn the_header_has_the_version_of_the_package() {
        let text = format!("{KVPOOL_VERSION_MAJOR}.{KVPOOL_VERSION_MINOR}.{KVPOOL_VERSION_PATCH}");
        assert_eq!(text, env!("CARGO_PKG_VERSION"));
        let name = KVPOOL_VERSION.strip_suffix(b"\0").expect("a C string");
        assert_eq!(name, text.as_bytes());
    }
}
