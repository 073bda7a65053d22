//! What is missing is said in so many different ways, and nothing is left behind by an open that
//! fails: edge cases 61 and 62.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Output};

use super::driver::{calls, counter, current_context, fail, last_failure, live, reset_counters};
use super::emulator;
use crate::common::Spec;
use crate::faults;
use kvpool::cache::Cache;
use kvpool::config::{Format, ScaleKind};
use kvpool::error::{DeviceError, OpenError};

/// A job of three variants that runs in a moment.
const JOB: &str = "
[model]
num_layers = 2
num_q_heads = 4
num_kv_heads = 2
head_dim = 32
[limits]
max_seqs = 2
max_seq_len = 48
max_batch_tokens = 32
[cache]
mode = 'paged'
tokens_per_block = 8
[device]
kind = 'cuda'
[workload]
kind = 'generator'
seed = 1
requests = 3
prompt_tokens = { dist = 'fixed', value = 20 }
output_tokens = { dist = 'fixed', value = 4 }
check_samples = 8
[[variant]]
name = 'paged f16'
[[variant]]
name = 'contiguous int8'
mode = 'contiguous'
format = 'int8'
";

/// Entry points whose callers can do nothing about a failure.
pub(super) const GIVES_BACK: [&str; 7] = [
    "cuCtxPopCurrent_v2",
    "cuDevicePrimaryCtxRelease_v2",
    "cuEventDestroy_v2",
    "cuMemFreeHost",
    "cuMemFree_v2",
    "cuModuleUnload",
    "cuStreamDestroy_v2",
];

/// A plan that opens at once: of one layer, INT8 for its counts, and with a table of angles.
fn smallest() -> Spec {
    Spec {
        format: Format::Int8,
        scale: ScaleKind::PerTokenHead,
        windows: vec![0],
        head_dim: 16,
        rope: toml::from_str("theta = 10000.0").ok(),
        max_seqs: 1,
        max_seq_len: 16,
        max_batch_tokens: 8,
        ..Spec::default()
    }
}

/// Runs `kvpool` with the job, on a driver in this folder.
fn kvpool(arguments: &[&str], driver: Option<&Path>, variables: &[(&str, &str)]) -> Output {
    let folder = tempfile::tempdir().unwrap();
    let job = folder.path().join("job.toml");
    std::fs::write(&job, JOB).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvpool"));
    command.args(arguments).env_remove("LD_LIBRARY_PATH").envs(variables.iter().copied());
    if arguments.first() == Some(&"run") {
        command.arg(&job);
    }
    if let Some(driver) = driver {
        command.env("LD_LIBRARY_PATH", driver);
    }
    command.output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The doctor's report.
fn doctor(driver: Option<&Path>) -> serde_json::Value {
    let output = kvpool(&["doctor", "--json"], driver, &[]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn edge_62_five_different_messages() {
    if !cfg!(all(target_arch = "x86_64", target_os = "linux")) {
        println!("skipped: the emulator runs on Linux on x86-64 only");
        return;
    }
    let emulated = emulator::folder();
    let cases: [(&str, &str, &str); 3] = [
        ("KVPOOL_EMU_DEVICES", "0", "the driver sees 0 GPUs"),
        ("KVPOOL_EMU_DRIVER_VERSION", "11040", "the driver is of CUDA 11.4"),
        ("KVPOOL_EMU_CAPABILITY", "7.5", "the GPU is of compute capability 7.5"),
    ];
    for (variable, value, says) in cases {
        let output = kvpool(&["run"], Some(&emulated), &[(variable, value)]);
        let said = text(&output.stderr);
        assert!(!output.status.success() && said.contains(says), "{variable}: {said}");
        // The doctor has no trouble to say so.
        let output = kvpool(&["doctor"], Some(&emulated), &[(variable, value)]);
        assert!(output.status.success(), "{}", text(&output.stderr));
    }
    // A library that is no emulator, and no kernels: as on a machine with a GPU and without nvcc.
    let has_kernels = doctor(None)["cuda"]["build"].get("with").is_some();
    if has_kernels {
        println!("skipped: this build has kernels, so no message says that there are none");
    } else {
        let output = kvpool(&["run"], Some(&emulator::disguised()), &[]);
        let said = text(&output.stderr);
        assert!(said.contains("this build of kvpool has no CUDA kernels"), "{said}");
    }
    if doctor(None)["cuda"]["driver"].is_null() {
        let output = kvpool(&["run"], None, &[]);
        let said = text(&output.stderr);
        assert!(said.contains("this machine has no libcuda"), "{said}");
    } else {
        println!("skipped: this machine has a driver, so no message says that there is none");
    }
}

#[test]
fn a_job_runs_on_the_emulated_device_and_the_doctor_says_that_it_is_none() {
    if !cfg!(all(target_arch = "x86_64", target_os = "linux")) {
        println!("skipped: the emulator runs on Linux on x86-64 only");
        return;
    }
    let emulated = emulator::folder();
    let output = kvpool(&["run"], Some(&emulated), &[("KVPOOL_EMU_SEED", "3")]);
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{out}\n{err}");
    assert!(out.contains("cuda-emulated"), "{out}");

    let output = kvpool(&["doctor"], Some(&emulated), &[]);
    let out = text(&output.stdout);
    assert!(out.contains("*** EMULATED") && out.contains("gpu 0"), "{out}");
    let report = doctor(Some(&emulated));
    assert_eq!(report["cuda"]["driver"]["emulated"], true, "{report}");

    // A budget in percent is resolved once, and told.
    let percent = ["run", "--set", "pool.capacity=budget:50%"];
    let output = kvpool(&percent, Some(&emulated), &[("KVPOOL_EMU_DEVICE_MEMORY", "8MiB")]);
    let err = text(&output.stderr);
    assert!(output.status.success(), "{err}");
    assert!(err.contains("\"budget:50%\" of 8,388,608 B") || err.contains("budget:4194"), "{err}");
}

/// Room for the plan, and for half of what the kernels take.
#[test]
fn edge_61_kernels_take_memory_before_the_pool_does() {
    let plan = smallest().plan();
    let needed = plan.pool_bytes.get() + plan.cuda_workspace().unwrap().device_bytes.get();
    let kernels = needed / 2;
    let memory = needed + kernels / 2;
    super::again(
        &["cuda::errors::a_plan_that_fits_without_the_kernels_only_is_refused", "--ignored"],
        &[
            ("KVPOOL_EMU_DEVICE_MEMORY", &memory.to_string()),
            ("KVPOOL_EMU_MODULE_BYTES", &kernels.to_string()),
        ],
    );
}

#[test]
#[ignore = "started by cuda::errors::edge_61_kernels_take_memory_before_the_pool_does"]
fn a_plan_that_fits_without_the_kernels_only_is_refused() {
    let spec = smallest();
    let opened = Cache::open_on_device(spec.plan(), &spec.config().device, None);
    let error = opened.map(|_| ()).expect_err("no room");
    let text = error.to_string();
    assert!(matches!(error, OpenError::Plan(_)), "{text}");
    assert!(text.contains("beside the kernels"), "{text}");
    assert_eq!(counter("allocations"), 0, "before anything is allocated");
    assert_eq!(live(), [0; 8], "nothing is left");
}

/// Every call of the driver that an open makes fails, in turn, until there is none left: the error
/// names it, nothing is left behind, and the next open works.
#[test]
#[ignore = "started by cuda::the_tests_of_the_device_run_on_the_emulated_device"]
fn edge_61_an_open_that_fails_leaves_nothing_behind() {
    let spec = smallest();
    let open = || Cache::open_on_device(spec.plan(), &spec.config().device, None);
    drop(open().expect("opens"));
    let before = (live(), current_context());
    reset_counters();
    let cache = open().expect("opens");
    let made = calls();
    drop(cache);
    // CUDA_ERROR_OUT_OF_MEMORY, CUDA_ERROR_LAUNCH_FAILED
    for code in [2, 719] {
        let mut failed = BTreeMap::new();
        for nth in 1.. {
            reset_counters();
            fail(Some(&format!("*:{nth}:{code}")));
            let opened = open();
            fail(None);
            if counter("failures") == 0 {
                opened.expect("no call failed");
                break;
            }
            let call = last_failure();
            let error = opened.map(|_| ()).expect_err(&call);
            let OpenError::Device(error) = error else { panic!("{call}: {error}") };
            let text = error.to_string();
            match error {
                DeviceError::CudaCall { call: named, code: number, .. } => {
                    assert_eq!((named, number), (&*call, code), "{text}");
                    assert!(!(call.ends_with("Alloc_v2") && code == 2), "{text}");
                }
                DeviceError::CudaOutOfMemory { call: named, .. } => {
                    assert_eq!((named, code), (&*call, 2), "{text}");
                    assert!(text.contains("bytes free") && text.contains("lower"), "{text}");
                }
                _ => panic!("{call}: {text}"),
            }
            assert_eq!((live(), current_context()), before, "call {nth}, {call}, left something");
            drop(open().expect("the next opens"));
            *failed.entry(call).or_insert(0) += 1;
        }
        assert_eq!((live(), current_context()), before);
        // Each as often as a good open makes it; what gives something back has nobody to tell.
        let expected = made.iter().filter(|(call, _)| !GIVES_BACK.contains(&call.as_str()));
        assert!(failed.iter().eq(expected), "{failed:?} failed of {made:?}");
        assert!(failed.len() >= 26 && failed.values().sum::<u64>() > 80, "{failed:?}");
    }
}

/// Every call of the driver that a working cache makes fails once, in turn: the verb says so, and
/// the same verb again goes on as if nothing had been.
#[test]
#[ignore = "started by cuda::the_tests_of_the_device_run_on_the_emulated_device"]
fn edge_61_every_call_of_the_driver_may_fail_once() {
    const CALLS: [&str; 8] = [
        "cuCtxPushCurrent_v2",
        "cuMemcpyHtoDAsync_v2",
        "cuMemcpyDtoHAsync_v2",
        "cuMemsetD8Async",
        "cuLaunchKernel",
        "cuEventQuery",
        "cuEventRecord",
        "cuStreamSynchronize",
    ];
    let mut failed = [0; CALLS.len()];
    for spec in faults::specs() {
        let good = faults::script(&mut spec.open());
        assert!(good.failures.is_empty());
        for (call, failed) in CALLS.into_iter().zip(&mut failed) {
            let mut nth = 1;
            loop {
                let mut cache = spec.open();
                // CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
                fail(Some(&format!("{call}:{nth}:701")));
                let run = faults::script(&mut cache);
                fail(None);
                let said = run.failures.len() as u64 + cache.stats().scrub_failures;
                assert!(run.bits == good.bits, "{spec:?}: after {call} {nth} failed");
                if said == 0 {
                    // There was no such call any more.
                    break;
                }
                *failed += 1;
                // Not all of them: there are thousands, most of them alike.
                nth += 1 + nth / 2;
            }
        }
    }
    // Most are made by every verb; whole units are not set in every script.
    assert!(failed.iter().all(|failed| *failed >= 4), "{CALLS:?} failed {failed:?} times");
}
