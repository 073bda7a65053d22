//! The manager against a model that shares nothing with it: prefix reuse, copy-on-write,
//! eviction, admission.
//!
//! - `text`: tokens, and what a fake engine writes for them: K and V of a position are a hash of
//!   all tokens up to it, so a block that is reused wrongly shows.
//! - `device`: memory that copies and appends reach late and in another legal order.
//! - `asking`: a device without memory, which fails when it is told to.
//! - `driver`: random calls of all verbs, with everything that must hold after each.
//! - the rest are tests.

mod admission;
mod asking;
mod device;
mod driver;
mod driver_begin;
mod driver_step;
mod driver_verbs;
mod edges_begin;
mod edges_copy;
mod edges_counted;
mod edges_evict;
mod edges_failed;
mod edges_kept;
mod edges_reuse;
mod edges_tight;
mod edges_told;
mod events;
mod exact;
mod exhaustive;
mod hash;
mod probes;
mod random;
mod rig;
mod saved;
mod scrub;

mod text;
