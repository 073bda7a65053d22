//! `kvpool plan`.

use std::fmt::Write as _;
use std::io::{self, Write as _};

use serde::Serialize;

use super::{CliError, print, table, text_of};
use crate::config::{CacheMode, Compute, Config, DeviceKind, Source};
use crate::device::cpu::{available_memory, num_threads};
use crate::device::cuda::CudaGpu;
use crate::device::resolve_budget;
use crate::error::{OpenError, PlanError};
use crate::job::replay::check_memory;
use crate::plan::{KvFormat, Plan};
use crate::units::{Bytes, grouped};

/// The plan of the file, and those of its variants. As JSON, the keys are those of the plan, and
/// `variants` when the file has some.
#[derive(Serialize)]
struct Document<'a> {
    #[serde(flatten)]
    plan: &'a Plan,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    variants: Vec<Variant<'a>>,
}

/// One variant: its plan, or why it has none.
#[derive(Serialize)]
struct Variant<'a> {
    name: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    plan: Option<&'a Plan>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// A variant's name, settings and plan.
type Planned = (String, Config, Result<Plan, PlanError>);

/// Plans a file and its variants, and prints the plans.
pub(super) fn run(source: &Source, json: bool) -> Result<(), CliError> {
    let base_config = resolved(&source.config)?;
    let refused =
        |problem: String| CliError::Usage(format!("{}: {problem}", source.path.display()));
    let base =
        Plan::new(&base_config, &source.geometry).map_err(|error| refused(error.to_string()))?;
    let one = source.config.variant.is_empty() && source.config.sweep.is_empty();
    let variants: Vec<Planned> = if one {
        Vec::new()
    } else {
        let named = source.variants().into_iter();
        // The baseline of replays is simulated: it has no plan.
        let planned = named.filter(|(_, config)| config.cache.mode != CacheMode::Dynamic);
        planned
            .map(|(name, config)| {
                let config = resolved(&config)?;
                let plan = Plan::new(&config, &source.geometry);
                Ok((name, config, plan))
            })
            .collect::<Result<_, CliError>>()?
    };
    let printed = if json {
        let document = document(&base, &variants);
        print(&(serde_json::to_string_pretty(&document).map_err(io::Error::other)? + "\n"))
    } else {
        let notes = memory_notes(&base, &base_config, &variants);
        print(&(text(&base, &variants) + &notes + &baselines(source)))
    };
    // A plan that is refused is told whether anybody reads the others or not.
    match variants.into_iter().find_map(|(name, _, plan)| Some((name, plan.err()?))) {
        None => printed,
        // As that of the file itself, it is a mistake in the settings.
        Some((name, error)) => Err(refused(format!("variant {name:?}: {error}"))),
    }
}

/// Names the variants that have no plan.
fn baselines(source: &Source) -> String {
    let dynamic = |(name, config): (String, Config)| {
        (config.cache.mode == CacheMode::Dynamic).then_some(name)
    };
    let names: Vec<String> = source.variants().into_iter().filter_map(dynamic).collect();
    if names.is_empty() {
        return String::new();
    }
    format!(
        "without a plan, as dynamic is a baseline that replays simulate: {}\n",
        names.join(", ")
    )
}

/// The configuration with a capacity in percent turned into bytes, which is told.
fn resolved(config: &Config) -> Result<Config, CliError> {
    let mut config = config.clone();
    if let Some(budget) = resolve_budget(&mut config).map_err(OpenError::from)? {
        writeln!(io::stderr().lock(), "{budget}")?;
    }
    Ok(config)
}

/// Whether a plan would open here.
struct Fit {
    /// The memory that it takes beside the pool.
    needs: String,
    /// What `device.memory_limit` or this machine has for it, or why it will be refused.
    verdict: Result<String, String>,
    /// What the memory is for, a line each.
    terms: Vec<String>,
}

impl Fit {
    /// Of a plan for the device that the settings name, or for a replay.
    fn of(plan: &Plan, config: &Config) -> Option<Self> {
        if config.workload.as_ref().is_some_and(|workload| workload.compute == Compute::None) {
            let needs =
                format!("bookkeeping of a replay {} B, nothing of the pool", plan.host_bytes);
            let verdict = match check_memory(plan, config) {
                Ok(()) => Ok("it fits".to_owned()),
                Err(error) => Err(format!("it will be refused: {error}")),
            };
            return Some(Self { needs, verdict, terms: Vec::new() });
        }
        if config.device.kind == DeviceKind::Cuda {
            return Self::on_gpu(plan, config);
        }
        let threads = num_threads(&config.device);
        let workspace = plan.cpu_workspace_bytes(threads).ok()?;
        let (available, whose) = match (config.device.memory_limit, available_memory()) {
            (Some(limit), _) => (limit, "device.memory_limit"),
            (None, Some(available)) => (available, "what this machine has available"),
            (None, None) => return None,
        };
        let verdict = verdict(plan.check_memory(workspace, available, whose), available, whose);
        let needs = format!("workspace of {threads} threads {workspace} B");
        Some(Self { needs, verdict, terms: Vec::new() })
    }

    fn on_gpu(plan: &Plan, config: &Config) -> Option<Self> {
        let workspace = plan.cuda_workspace().ok()?;
        let needs = format!(
            "workspace on the GPU {} B, pinned host memory {} B",
            workspace.device_bytes, workspace.pinned_bytes
        );
        let gpu = CudaGpu::find(config.device.ordinal).and_then(|gpu| gpu.memory());
        let (available, whose) = match (config.device.memory_limit, gpu) {
            (Some(limit), _) => (limit, "device.memory_limit"),
            (None, Ok((free, _))) => (free, "what the GPU has free"),
            (None, Err(error)) => {
                let verdict = Err(format!("it will be refused here: {error}"));
                return Some(Self { needs, verdict, terms: Vec::new() });
            }
        };
        let checked = plan.check_device_memory(workspace.device_bytes, available, whose);
        let term = |(name, bytes): (&str, Bytes)| {
            format!("          {:>16} B  {name}\n", bytes.to_string())
        };
        let terms = workspace.terms().into_iter().map(term).collect();
        Some(Self { needs, verdict: verdict(checked, available, whose), terms })
    }
}

fn verdict(
    checked: Result<(), PlanError>,
    available: Bytes,
    whose: &str,
) -> Result<String, String> {
    match checked {
        Ok(()) => Ok(format!("it fits in {} of {whose}", available.human())),
        Err(error) => Err(format!("it will be refused: {error}")),
    }
}

/// The memory that the file's plan takes and whether that is there; and the same of each variant
/// that will be refused for it.
fn memory_notes(base: &Plan, config: &Config, variants: &[Planned]) -> String {
    let mut text = String::new();
    if let Some(fit) = Fit::of(base, config) {
        let without = if variants.is_empty() { "" } else { "without its variants: " };
        let (Fit { needs, terms, .. }, Ok(note) | Err(note)) = (&fit, &fit.verdict);
        // Writing to a String cannot fail.
        let _ = writeln!(text, "memory    {without}{needs}; {note}");
        text.push_str(&terms.concat());
    }
    for (name, config, plan) in variants {
        let fit = plan.as_ref().ok().and_then(|plan| Fit::of(plan, config));
        if let Some(Fit { needs, verdict: Err(why), .. }) = fit {
            let _ = writeln!(text, "          variant {name:?}: {needs}; {why}");
        }
    }
    text
}

fn document<'a>(base: &'a Plan, variants: &'a [Planned]) -> Document<'a> {
    let variants = variants.iter().map(|(name, _, plan)| Variant {
        name,
        plan: plan.as_ref().ok(),
        error: plan.as_ref().err().map(ToString::to_string),
    });
    Document { plan: base, variants: variants.collect() }
}

fn text(base: &Plan, variants: &[Planned]) -> String {
    let mut text = base.explain();
    if variants.is_empty() {
        return text;
    }
    // Writing to a String cannot fail.
    let _ = writeln!(text, "\nvariants of this file:\n");
    let header = ["variant", "mode", "format", "pool bytes", "tokens", "full-length\nsequences"];
    let mut rows = table(&header, 3..6);
    for (name, config, plan) in variants {
        let numbers = match plan {
            Ok(plan) => [
                plan.pool_bytes.to_string(),
                grouped(plan.capacity_tokens),
                grouped(plan.full_length_seqs.into()),
            ],
            Err(_) => ["does not plan", "-", "-"].map(str::to_owned),
        };
        let [bytes, tokens, seqs] = numbers;
        let format = KvFormat::of(config).name();
        rows.add_row([name, config.cache.mode.name(), format, &bytes, &tokens, &seqs]);
    }
    text.push_str(&text_of(&rows));
    text
}
