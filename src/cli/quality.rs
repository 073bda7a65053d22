//! `kvpool quality`: what a cache format costs.

use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write as _};
use std::path::PathBuf;

use clap::{Args, value_parser};

use super::{CliError, File, conclude, table, text_of};
use crate::error::ModelError;
use crate::job::model;
use crate::job::model::quality::{self, Options, QualityReport};
use crate::units::grouped;

/// What to read, and how much of it.
#[derive(Debug, Args)]
pub(super) struct QualityArgs {
    #[command(flatten)]
    file: File,
    /// The text that is read
    #[arg(long, value_name = "FILE")]
    text: PathBuf,
    /// How many windows of it are read
    #[arg(long, value_name = "N", default_value_t = 8,
          value_parser = value_parser!(u32).range(1..))]
    windows: u32,
    /// Tokens of a window
    #[arg(long, value_name = "N", default_value_t = 1024,
          value_parser = value_parser!(u32).range(2..))]
    window_tokens: u32,
    /// The formats that are measured beside f32, such as f16,int8/per-group-32 (default: all)
    #[arg(long, value_name = "NAME", value_delimiter = ',', value_parser = quality::FORMATS)]
    formats: Vec<String>,
    /// Print one JSON document instead of a table
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &QualityArgs) -> Result<(), CliError> {
    let source = args.file.load()?;
    let text = std::fs::read_to_string(&args.text)
        .map_err(|error| ModelError::file(&args.text, error.to_string()))?;
    let model = model::load(&source)?;
    let tokens = model.tokenizer.encode(&text, false);
    let options = Options {
        windows: args.windows as usize,
        window_tokens: args.window_tokens as usize,
        formats: args.formats.clone(),
    };
    let watched = io::stderr().is_terminal();
    let report =
        quality::measure(&model, &model::config_of(&source), &tokens, &options, &mut |done| {
            if watched {
                // Only for whoever watches.
                let _ = writeln!(io::stderr(), "window {done} of {}", args.windows);
            }
        })?;
    let document = if args.json {
        serde_json::to_string_pretty(&report).map_err(io::Error::other)? + "\n"
    } else {
        text_of_report(&report)
    };
    let differ: Vec<String> = (report.formats.iter())
        .filter(|one| !one.modes_equal)
        .map(|one| format!("{}: the modes gave different bits", one.format))
        .collect();
    conclude(Ok(()), &document, std::iter::empty(), differ)
}

fn text_of_report(report: &QualityReport) -> String {
    let header = [
        "cache format",
        "bytes a\ntoken",
        "perplexity",
        "± standard\nerror",
        "change\nto f32",
        "± standard\nerror",
        "mean KL\nto f32",
        "same top\ntoken",
        "modes\nequal",
    ];
    let mut table = table(&header, 1..8);
    for one in &report.formats {
        table.add_row([
            one.format.clone(),
            grouped(one.bytes_per_token),
            format!("{:.3}", one.perplexity),
            format!("{:.3}", one.perplexity_error),
            format!("{:+.3} %", one.change_percent),
            format!("{:.3} %", one.change_error_percent),
            format!("{:.2e}", one.mean_kl),
            format!("{:.2} %", one.same_top_percent),
            (if one.modes_equal { "yes" } else { "NO" }).to_owned(),
        ]);
    }
    let mut text = text_of(&table);
    let QualityReport { windows, window_tokens, predicted, .. } = report;
    // Writing to a String cannot fail.
    let _ = writeln!(
        text,
        "\n{windows} windows of {window_tokens} tokens, {} of them predicted",
        grouped(*predicted)
    );
    for (format, why) in &report.left_out {
        let _ = writeln!(text, "left out: {format}: {why}");
    }
    text
}
