//! The CUDA device, on the emulated driver: the kernels' own sources, executed by the host.
//!
//! The driver's library is found through the library path of a process, so the tests of `inside.rs`
//! and the suite of the CPU run in processes of their own, which are started here. Each runs with
//! another seed of the emulator: it delays work, and shuffles threads, otherwise.

mod broken;
mod driver;
mod edges;
mod emulator;
mod errors;
mod exports;
mod faults;
mod from_c;
mod graph;
mod inside;
mod moves;
mod traffic;

/// Runs this test program again, on the emulated device. Its output is printed.
fn again(arguments: &[&str], variables: &[(&str, &str)]) {
    let Some(mut command) = emulator::this_program() else { return };
    let output = command.args(arguments).envs(variables.iter().copied()).output().unwrap();
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    println!("{out}\n{err}");
    assert!(output.status.success(), "{arguments:?} {variables:?} failed on the emulated device");
    assert!(!out.contains(" 0 passed"), "no test ran: {arguments:?}");
}

/// Tests that are written for the CPU, on the CUDA device.
fn run_suite(suite: &[&str]) {
    // About the bookkeeping or files alone, most of them on a device without memory; about the
    // scheduler; about the CPU device itself.
    const SKIPPED: [&str; 24] = [
        "kernels_agree_with_the_reference",
        "a_million_operations_keep_the_sum",
        "edge_19_memory_is_checked",
        "the_callers_floating_point_mode",
        "manager::admission::",
        "manager::exact::",
        "manager::probes::",
        "manager::edges_kept::",
        "manager::edges_counted::",
        "manager::exhaustive::",
        "manager::saved::changed::",
        "manager::saved::files::",
        "late_work_comes_out",
        "job::memory_is_checked",
        "job::real_requests",
        "job::traces_run",
        "job::a_file_without",
        "edge_18_preempt_and_resume",
        "job::edge_12",
        "job::the_observer",
        "job_reuse::a_conversation",
        "job_reuse::a_small_cache",
        "job_reuse::conversations_open",
        "job_reuse::nobody_joins",
    ];
    println!("skipped on the emulated device: {}", SKIPPED.join(", "));
    // One after the other in each process: the emulator does one thing at a time.
    let mut arguments = suite.to_vec();
    let skips = SKIPPED.map(|name| format!("--skip={name}"));
    arguments.extend(skips.iter().map(String::as_str));
    arguments.push("--test-threads=1");
    again(&arguments, &[("KVPOOL_EMU_SEED", "1")]);
}

/// The tests that are written for the CPU, on the CUDA device.
#[test]
fn the_suite_of_the_cpu_runs_on_the_emulated_device() {
    run_suite(&[
        "one_answer::",
        "int8::",
        "accuracy::",
        "faults::edge_43",
        "edge_blocks::",
        "edge_admission::",
        "stateful::",
    ]);
}

#[test]
fn the_suite_of_the_manager_runs_on_the_emulated_device() {
    run_suite(&["review::", "rope::", "manager::"]);
}

#[test]
fn jobs_run_on_the_emulated_device() {
    run_suite(&["job::", "job_reuse::"]);
}

#[test]
fn the_tests_of_the_device_run_on_the_emulated_device() {
    // One after the other: they look at counters of the whole process.
    let arguments = [
        "cuda::inside::",
        "cuda::errors::",
        "cuda::edges::",
        "cuda::exports::",
        "cuda::faults::",
        "cuda::from_c::",
        "cuda::graph::",
        "cuda::moves::",
        "--ignored",
        "--test-threads=1",
        "--skip=edge_45",
        "--skip=a_plan_that_fits_without_the_kernels_only",
    ];
    // The two in two processes, at the same time.
    std::thread::scope(|scope| {
        for seed in ["0", "7"] {
            scope.spawn(move || again(&arguments, &[("KVPOOL_EMU_SEED", seed)]));
        }
    });
}

#[test]
fn a_context_that_broke_is_told_until_the_cache_is_closed() {
    again(&["cuda::broken::", "--ignored", "--test-threads=1"], &[]);
}

#[test]
fn edge_45_offsets_past_four_gibibytes_on_the_device() {
    let memory = [("KVPOOL_EMU_DEVICE_MEMORY", "8GiB")];
    again(&["cuda::edges::edge_45", "--ignored", "--test-threads=1"], &memory);
}

#[test]
fn the_traffic_of_kernels_is_near_the_least() {
    again(&["cuda::traffic::", "--ignored", "--test-threads=1"], &[("KVPOOL_EMU_SEED", "0")]);
}
