//! The CPU device against its own reference, and against itself in every other arrangement.

mod bitwise;
mod edges;
mod rig;
#[cfg(x86_kernels)]
mod store;
mod values;
#[cfg(x86_kernels)]
mod wide;
