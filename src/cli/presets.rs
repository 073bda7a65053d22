//! `kvpool presets`.

use serde::Serialize;

use super::{CliError, print, table, text_of};
use crate::config::{PRESETS, Preset};
use crate::units::{Bytes, grouped};

/// A built-in model as JSON.
#[derive(Serialize)]
struct Row {
    name: &'static str,
    num_layers: u32,
    num_q_heads: u32,
    num_kv_heads: u32,
    head_dim: u32,
    /// Repeated over the layers; 0 = all keys.
    attention_window: &'static [u32],
    max_position: u32,
    /// K and V of one token in f16, over all layers.
    f16_bytes_per_token: u64,
}

impl Row {
    fn of(preset: &Preset) -> Self {
        let elements = 2
            * u64::from(preset.num_layers)
            * u64::from(preset.num_kv_heads)
            * u64::from(preset.head_dim);
        Self {
            name: preset.name,
            num_layers: preset.num_layers,
            num_q_heads: preset.num_q_heads,
            num_kv_heads: preset.num_kv_heads,
            head_dim: preset.head_dim,
            attention_window: preset.pattern,
            max_position: preset.max_position,
            f16_bytes_per_token: 2 * elements,
        }
    }
}

/// Prints all built-in models.
pub(super) fn run(json: bool) -> Result<(), CliError> {
    let rows: Vec<Row> = PRESETS.iter().map(Row::of).collect();
    if json {
        let mut text = serde_json::to_string_pretty(&rows).map_err(std::io::Error::other)?;
        text.push('\n');
        return print(&text);
    }
    let header = [
        "preset",
        "layers",
        "query\nheads",
        "KV\nheads",
        "head_dim",
        "longest\nsequence",
        "a token\nin f16",
        "attention windows",
    ];
    let mut table = table(&header, 1..7);
    for row in &rows {
        table.add_row([
            row.name.to_owned(),
            row.num_layers.to_string(),
            row.num_q_heads.to_string(),
            row.num_kv_heads.to_string(),
            row.head_dim.to_string(),
            grouped(row.max_position.into()),
            Bytes(row.f16_bytes_per_token).human(),
            windows(row.attention_window),
        ]);
    }
    print(&text_of(&table))
}

/// A pattern of windows: `full`, `4096`, `5 × 512, full`.
fn windows(pattern: &[u32]) -> String {
    let runs = pattern.chunk_by(|a, b| a == b).map(|run| {
        let window = if run[0] == 0 { "full".to_owned() } else { run[0].to_string() };
        if run.len() == 1 { window } else { format!("{} × {window}", run.len()) }
    });
    runs.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_read_well() {
        assert_eq!(windows(&[0]), "full");
        assert_eq!(windows(&[4096, 0]), "4096, full");
        assert_eq!(windows(&[512, 512, 512, 0]), "3 × 512, full");
    }
}
