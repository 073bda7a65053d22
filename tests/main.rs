//! The crate as its users see it. Tests of an edge case carry its number: `edge_17_…`.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_possible_wrap,
    reason = "small numbers of tests"
)]
#![allow(clippy::print_stdout, reason = "a skipped part is printed, and measured errors are")]

mod accuracy;
mod build_script;
mod capi;
mod cli;
mod common;
mod config;
mod cuda;
mod edge_admission;
mod edge_blocks;
mod edge_cases;
mod edge_windows;
mod faults;

mod int8;
mod job;
mod job_reuse;
mod layout;
mod manager;
mod one_answer;
mod params;
mod plans;
mod replay;
mod review;
mod rope;
mod stateful;
mod structure;
mod walk;
