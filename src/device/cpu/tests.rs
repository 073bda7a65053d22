//! The CPU device against its own reference, and against itself in every other arrangement.

mod bitwise;
mod edges;
mod rig;
mod values;
#[cfg(target_arch = "x86_64")]
mod wide;
