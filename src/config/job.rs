//! What a job needs beside its workload, and what only a job may have.

use super::complaint::Complaint;
use super::{Admission, CacheMode, Capacity, Compute, Config, DeviceKind, KernelChoice};

/// Checks that `[cost]`, `[goals]` and the baseline stand in a job that simulates time, and that
/// such a job has what it needs.
pub(super) fn check(config: &Config) -> Result<(), Complaint> {
    let replays = config.workload.as_ref().is_some_and(|w| w.compute == Compute::None);
    if !replays {
        for (key, given) in [
            ("cost", config.cost.is_some()),
            ("goals", config.goals.is_some()),
            ("cache.mode", config.cache.mode == CacheMode::Dynamic),
        ] {
            if given {
                let problem = match key {
                    "cache.mode" => {
                        "\"dynamic\" is a baseline that is simulated, and nothing is here"
                    }
                    _ => "is about simulated time, and there is none here",
                };
                return Err(Complaint::with_help(
                    key,
                    problem,
                    "remove it, or give a [workload] with compute = \"none\"",
                ));
            }
        }
        return Ok(());
    }
    let Some(cost) = &config.cost else {
        return Err(Complaint::new("cost", "is missing; workload.compute = \"none\" needs it"));
    };
    cost.check()?;
    config.goals.as_ref().map_or(Ok(()), super::GoalsConfig::check)?;
    check_device(config)?;
    if config.cache.mode == CacheMode::Dynamic { check_dynamic(config) } else { Ok(()) }
}

/// Nothing is computed, so there is nothing to choose a kernel for. Threads are those that replay
/// variants side by side, the memory limit is that of the device that is planned for.
fn check_device(config: &Config) -> Result<(), Complaint> {
    let device = &config.device;
    for (key, given) in [
        ("device.kind", device.kind != DeviceKind::Cpu),
        ("device.kernel", device.kernel != KernelChoice::Auto),
    ] {
        if given {
            return Err(Complaint::with_help(
                key,
                "workload.compute = \"none\" computes on no device",
                "remove it, or remove workload.compute",
            ));
        }
    }
    Ok(())
}

/// The baseline has memory and a model, and none of what came with paging.
fn check_dynamic(config: &Config) -> Result<(), Complaint> {
    let refused = |key: &str, what: &str| {
        let problem = format!("cache.mode = \"dynamic\" has no {what}");
        Err(Complaint::with_help(key, problem, "remove it, or change cache.mode"))
    };
    if matches!(config.pool.capacity, Capacity::Blocks(_)) {
        return refused("pool.capacity", "blocks to count; give \"budget:SIZE\" or \"tokens:N\"");
    }
    if config.cache.admission == Admission::StaticBatch {
        return refused("cache.admission", "static batches");
    }
    Ok(())
}
