//! Mooncake's traces: a JSON object a line, with the hashes of the prompt's blocks.

use serde::Deserialize;

use super::{Row, json_problem, shortened};
use crate::units::counted;

/// The longest line, its end included: of a prompt of some four million tokens.
pub(super) const MAX_LINE_BYTES: u64 = 1 << 17;

/// Tokens of one entry of `hash_ids`; the last entry stands for what is left.
pub(super) const BLOCK_TOKENS: u32 = 512;

/// What a line must have; it may have more.
const EXPECTED: &str = "expected {\"timestamp\": ms, \"input_length\": tokens, \"output_length\": \
     tokens, \"hash_ids\": [a number a block, …]}";

/// A line. `hash_ids` are read into a list that is used again.
#[derive(Deserialize)]
struct Line {
    timestamp: f64,
    input_length: u32,
    output_length: u32,
    hash_ids: Vec<u64>,
}

/// The request of a line, or what is wrong with it.
pub(super) fn row(line: &str, block_tokens: u32, hash_ids: &mut Vec<u64>) -> Result<Row, String> {
    let Line { timestamp, input_length, output_length, hash_ids: ids } = serde_json::from_str(line)
        .map_err(|error| {
            format!("{} in {:?}…; {EXPECTED}", json_problem(&error), shortened(line))
        })?;
    let lengths = [("input_length", input_length), ("output_length", output_length)];
    if let Some((key, _)) = lengths.iter().find(|(_, length)| *length == 0) {
        return Err(format!("{key} is 0; expected a whole number of tokens, 1 or more"));
    }
    let nanos = (timestamp * 1e6).round();
    if !(0.0..9.2e18).contains(&nanos) {
        return Err(format!("timestamp is {timestamp}; expected a number of milliseconds from 0"));
    }
    let blocks = input_length.div_ceil(block_tokens);
    if ids.len() as u64 != u64::from(blocks) {
        return Err(format!(
            "hash_ids has {}; expected {blocks}, one for each {block_tokens} of {input_length} \
             tokens (workload.hash_block_tokens)",
            counted(ids.len() as u64, "entry")
        ));
    }
    hash_ids.extend(ids);
    #[expect(clippy::cast_possible_truncation, reason = "its range is checked")]
    let arrival_ns = nanos as i64;
    Ok(Row { arrival_ns, prompt_tokens: input_length, output_tokens: output_length })
}
