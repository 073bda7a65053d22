//! The CUDA device, on the emulated driver: the kernels' own sources, executed by the host.
//!
//! The driver's library is found through the library path of a process, so the tests of `inside.rs`
//! and the suite of the CPU run in processes of their own, which are started here. Each runs with
//! another seed of the emulator: it delays work, and shuffles threads, otherwise.

mod driver;
mod emulator;
mod errors;
mod exports;
mod inside;
mod traffic;

use std::process::Command;

use crate::common::DEVICE_VAR;

/// Runs this test program again, on the emulated device. Its output is printed.
fn again(arguments: &[&str], variables: &[(&str, &str)]) {
    if !cfg!(all(target_arch = "x86_64", target_os = "linux")) {
        println!("skipped: the emulator runs on Linux on x86-64 only");
        return;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(arguments)
        .env("LD_LIBRARY_PATH", emulator::folder())
        .env(DEVICE_VAR, "cuda")
        .envs(emulator::sanitizer_variables())
        .envs(variables.iter().copied());
    let output = command.output().unwrap();
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    println!("{out}\n{err}");
    assert!(output.status.success(), "{arguments:?} {variables:?} failed on the emulated device");
    assert!(!out.contains(" 0 passed"), "no test ran: {arguments:?}");
}

/// The tests that are written for the CPU, on the CUDA device.
#[test]
fn the_suite_of_the_cpu_runs_on_the_emulated_device() {
    let suite = [
        "one_answer::",
        "int8::",
        "edge_blocks::",
        "edge_admission::",
        "stateful::",
        "review::",
        "--skip=kernels_agree_with_the_reference",
        "--skip=a_million_operations",
        "--skip=edge_51",
        // About the CPU device itself.
        "--skip=edge_19_memory_is_checked",
        "--skip=the_callers_floating_point_mode",
    ];
    again(&suite, &[("KVPOOL_EMU_SEED", "1")]);
}

#[test]
fn the_tests_of_the_device_run_on_the_emulated_device() {
    // One after the other: they look at counters of the whole process.
    let arguments =
        ["cuda::inside::", "cuda::errors::", "cuda::exports::", "--ignored", "--test-threads=1"];
    for seed in ["0", "7"] {
        again(&arguments, &[("KVPOOL_EMU_SEED", seed)]);
    }
}

#[test]
fn the_traffic_of_kernels_is_near_the_least() {
    again(&["cuda::traffic::", "--ignored", "--test-threads=1"], &[("KVPOOL_EMU_SEED", "0")]);
}
