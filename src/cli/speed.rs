//! `kvpool bench model`: how fast a model reads and writes.

use std::io;

use clap::{Args, value_parser};

use super::{CliError, File, bench, print, table, text_of};
use crate::config::Format;
use crate::job::model;
use crate::job::model::speed::{self, Options};

/// What to measure.
#[derive(Debug, Args)]
pub(super) struct SpeedArgs {
    #[command(flatten)]
    file: File,
    /// Tokens that are in the cache when writing begins
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "128,4000",
          value_parser = value_parser!(u32).range(1..))]
    context: Vec<u32>,
    /// Tokens that are written, in each round
    #[arg(long, value_name = "N", default_value_t = 64,
          value_parser = value_parser!(u32).range(1..=4096))]
    tokens: u32,
    /// Rounds, of which the median counts
    #[arg(long, value_name = "N", default_value_t = 5,
          value_parser = value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Formats of the cache
    #[arg(long, value_name = "NAME", value_delimiter = ',', default_value = "f16,int8",
          value_parser = bench::named::<Format>)]
    formats: Vec<Format>,
    /// Make K and V of the context up instead of reading a text: writing takes as long
    #[arg(long)]
    made_up: bool,
    /// Turn K and V by a Walsh-Hadamard matrix before they are stored
    #[arg(long)]
    spread: bool,
}

/// What is read: plain prose, so that no format has an easy time of it.
const TEXT: &str = "The harbour was quiet in the early morning, and the boats lay side by side at the long \
                    wooden pier. A man with a blue cap came down the hill, carrying two baskets and a coil of \
                    rope, and stopped to look at the sky before he went on board. ";

pub(super) fn run(args: &SpeedArgs, json: bool) -> Result<(), CliError> {
    let source = args.file.load()?;
    let model = model::load(&source)?;
    let options = Options {
        contexts: args.context.clone(),
        tokens: args.tokens,
        rounds: args.rounds,
        formats: args.formats.clone(),
        made_up: args.made_up,
        spread: args.spread,
    };
    let tokens = model.tokenizer.encode(TEXT, false);
    let results = speed::measure(&model, &model::config_of(&source), &tokens, &options)?;
    if json {
        let text = serde_json::to_string_pretty(&results).map_err(io::Error::other)?;
        return print(&format!("{text}\n"));
    }
    let header = [
        "format",
        "context",
        "reads\ntokens/s",
        "writes\ntokens/s",
        "ms a\nnew token",
        "of it\nattention",
        "of it\nmanager",
    ];
    let mut table = table(&header, 1..7);
    for one in &results {
        table.add_row([
            one.format.clone(),
            one.context.to_string(),
            one.read_tokens_per_s.map_or_else(|| "-".to_owned(), |speed| format!("{speed:.0}")),
            format!("{:.1}", one.write_tokens_per_s),
            format!("{:.2}", one.write_ms),
            format!("{:.2}", one.attention_ms),
            format!("{:.4}", one.manager_ms),
        ]);
    }
    print(&text_of(&table))
}
