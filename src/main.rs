//! The command `kvpool`. All of it is in [`kvpool::cli`]; here is only what a program has once.

use std::process::ExitCode;

/// Counts, so that a report can say that nothing was allocated after open.
#[global_allocator]
static ALLOCATOR: kvpool::device::CountingAllocator = kvpool::device::CountingAllocator;

fn main() -> ExitCode {
    kvpool::cli::main()
}
