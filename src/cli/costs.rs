//! `kvpool bench cost` and `kvpool bench on-demand`.

use std::fmt::Write as _;

use serde_json::json;

use super::{CliError, File, print, table, text_of};
use crate::bench::{cost, cpu_name, on_demand};
use crate::units::{Bytes, counted, grouped};

/// Measures the constants of `[cost]`, and prints them as the table of a file.
pub(super) fn cost(file: &File, as_json: bool) -> Result<(), CliError> {
    let measured = cost::run(&file.load()?)?;
    let cpu = cpu_name().unwrap_or_else(|| "this processor".to_owned());
    let cost::Cost { gbps, dram_gbps, step_us, token_us, .. } = measured;
    if as_json {
        let document = json!({
            "version": env!("CARGO_PKG_VERSION"),
            "cpu": cpu,
            "device": measured.device,
            "threads": measured.threads,
            "layers": measured.layers,
            "model_layers": measured.model_layers,
            "bandwidth": (gbps * 1e9).round(),
            "dram_bandwidth": (dram_gbps * 1e9).round(),
            "step_us": step_us,
            "token_us": token_us,
            "weight_bytes": 0,
            "steps": measured.steps.iter().map(|step| json!({
                "seqs": step.seqs, "rows": step.rows, "context": step.context,
                "us": step.us, "model_us": step.model_us,
            })).collect::<Vec<_>>(),
        });
        return print(&format!("{document:#}\n"));
    }
    let mut text = format!(
        "# Measured by `kvpool bench cost {}`\n# on {cpu}, {} with {}: {} of {}, multiplied up.\n# The cache's \
         verbs alone: add what your model's own arithmetic takes to step_us and token_us, and what\n# it reads of its \
         weights in each step to weight_bytes. How far the model is off:\n#\n# {:>4} {:>6} {:>8} {:>12} {:>12}\n",
        file.path.display(),
        measured.device,
        counted(measured.threads.into(), "thread"),
        measured.layers,
        counted(measured.model_layers.into(), "layer"),
        "seqs",
        "tokens",
        "context",
        "measured µs",
        "by [cost] µs"
    );
    for step in &measured.steps {
        let cost::TimedStep { seqs, rows, context, us, model_us } = *step;
        let off = 100.0 * (model_us / us - 1.0);
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "# {seqs:>4} {rows:>6} {context:>8} {us:>12.0} {model_us:>12.0} {off:>+6.0} %"
        );
    }
    let _ = write!(
        text,
        "[cost]\nbandwidth = \"{gbps:.2} GB\"    # plain loads: {dram_gbps:.2} GB/s\nstep_us = {step_us:.1}\ntoken_us = \
         {token_us:.2}\nweight_bytes = 0\n"
    );
    print(&text)
}

/// Measures memory that is there beside memory that is allocated in the steps.
pub(super) fn on_demand(file: &File, as_json: bool) -> Result<(), CliError> {
    let measured = on_demand::run(&file.load()?)?;
    let on_demand::OnDemand { block_bytes, tokens_per_block, seqs, blocks, arms } = &measured;
    const PERCENTS: [f64; 5] = [50.0, 90.0, 99.0, 99.9, 100.0];
    if as_json {
        let arm = |arm: &on_demand::Arm| {
            json!({
                "name": arm.name,
                "page_faults": arm.faults,
                "step_us": PERCENTS.map(|percent| arm.percentile(percent)),
            })
        };
        let document = json!({
            "version": env!("CARGO_PKG_VERSION"),
            "cpu": cpu_name(),
            "block_bytes": block_bytes,
            "tokens_per_block": tokens_per_block,
            "seqs": seqs,
            "steps": arms[0].step_us.len(),
            "blocks": blocks,
            "percents": PERCENTS,
            "arms": arms.iter().map(arm).collect::<Vec<_>>(),
        });
        return print(&format!("{document:#}\n"));
    }
    let mut text = format!(
        "{} of up to {} at once, blocks of {} ({}), {} taken; times of a step in ms\n\n",
        counted((*seqs).into(), "sequence"),
        counted(on_demand::MOST_TOKENS.into(), "token"),
        counted((*tokens_per_block).into(), "token"),
        Bytes(*block_bytes).human(),
        grouped(*blocks)
    );
    let header = ["memory", "p50", "p90", "p99", "p99.9", "longest", "page faults"];
    let mut table = table(&header, 1..header.len());
    for arm in arms {
        let mut row = vec![arm.name.to_owned()];
        row.extend(PERCENTS.map(|percent| format!("{:.3}", arm.percentile(percent) / 1e3)));
        row.push(arm.faults.map_or_else(|| "?".to_owned(), grouped));
        table.add_row(row);
    }
    text.push_str(&text_of(&table));
    print(&text)
}
