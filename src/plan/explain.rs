//! The plan as a person reads it.

use std::fmt::Write as _;

use super::group::{GroupKind, LayerGroup};
use super::layout::Addressing;
use super::{Plan, SCALE_BYTES};
use crate::config::{CacheMode, Scrub};
use crate::units::{Bytes, counted, grouped};

impl Plan {
    /// The plan as text: the formula with this model's numbers, the groups, and what fits.
    #[must_use]
    pub fn explain(&self) -> String {
        let mut text = String::new();
        // Writing to a String cannot fail.
        let _ = self.write_to(&mut text);
        text
    }

    fn write_to(&self, out: &mut String) -> std::fmt::Result {
        let g = &self.geometry;
        writeln!(
            out,
            "model     {} layers, {} query heads, {} KV heads, head_dim {}",
            g.num_layers, g.num_q_heads, g.num_kv_heads, g.head_dim
        )?;
        writeln!(
            out,
            "cache     {}, {}{}",
            self.mode.name(),
            self.format.name(),
            if self.mode == CacheMode::Contiguous {
                String::new()
            } else {
                format!(", {} tokens per block", self.tokens_per_block)
            }
        )?;
        writeln!(
            out,
            "limits    {} of {} tokens; a step: {} tokens, {} of one sequence",
            sequences(self.limits.max_seqs),
            grouped(self.limits.max_seq_len.into()),
            grouped(self.limits.max_batch_tokens.into()),
            grouped(self.limits.max_step_tokens.into())
        )?;
        if let Some(rope) = &self.rope {
            writeln!(
                out,
                "rope      K is rotated before it is stored: {} of {} elements, {}",
                rope.dims,
                g.head_dim,
                counted(rope.tables.len() as u64, "table")
            )?;
        }
        writeln!(out)?;
        self.write_formula(out)?;
        writeln!(out)?;
        self.write_groups(out)?;
        writeln!(out)?;
        self.write_totals(out)
    }

    /// 2 · layers · KV heads · `head_dim` · bytes, and what a full sequence takes.
    fn write_formula(&self, out: &mut String) -> std::fmt::Result {
        let g = &self.geometry;
        let scales = self.format.scales_per_row(g.head_dim);
        let vector = if scales == 0 {
            format!("{} × {} B", g.head_dim, self.format.element_bytes())
        } else {
            format!(
                "({} × {} B + {scales} × {SCALE_BYTES} B of scales)",
                g.head_dim,
                self.format.element_bytes()
            )
        };
        writeln!(
            out,
            "per token = 2 (K, V) × {} layers × {} KV heads × {vector} = {} B",
            g.num_layers, g.num_kv_heads, self.bytes_per_token
        )?;
        let naive = |seqs: u32| {
            u128::from(self.bytes_per_token.get())
                * u128::from(self.limits.max_seq_len)
                * u128::from(seqs)
        };
        let show = |bytes: u128| match u64::try_from(bytes) {
            Ok(bytes) => format!("{} B ({})", grouped(bytes), Bytes(bytes).human()),
            Err(_) => format!("{bytes} B"),
        };
        writeln!(
            out,
            "one sequence of {} tokens, no window, no rounding: {}",
            grouped(self.limits.max_seq_len.into()),
            show(naive(1))
        )?;
        writeln!(
            out,
            "{} of that length: {}",
            sequences(self.limits.max_seqs),
            show(naive(self.limits.max_seqs))
        )
    }

    fn write_groups(&self, out: &mut String) -> std::fmt::Result {
        let header = [
            "group",
            "kind",
            "layers",
            "window",
            "unit",
            "B/token",
            "tokens",
            "unit bytes",
            "units",
            "bytes",
        ];
        let mut rows = vec![header.map(str::to_owned)];
        for (index, group) in self.groups.iter().enumerate() {
            rows.push([
                index.to_string(),
                match group.kind {
                    GroupKind::Contiguous => "contiguous".to_owned(),
                    GroupKind::Paged => "paged".to_owned(),
                },
                layer_ranges(group),
                group.window.map_or_else(|| "full".to_owned(), |window| grouped(window.into())),
                match group.layout.addressing {
                    Addressing::Blocks => "block",
                    Addressing::Slot => "slot",
                    Addressing::Ring => "ring",
                }
                .to_owned(),
                grouped(group.bytes_per_token.get()),
                grouped(group.layout.unit_tokens.into()),
                grouped(group.layout.unit_bytes),
                grouped(group.layout.units.into()),
                grouped(group.layout.bytes()),
            ]);
        }
        write_table(out, &rows)
    }

    fn write_totals(&self, out: &mut String) -> std::fmt::Result {
        writeln!(
            out,
            "pool      {} B ({}), of which {} B padding",
            self.pool_bytes,
            self.pool_bytes.human(),
            self.padding_bytes
        )?;
        writeln!(
            out,
            "host      {} B ({}) for tables and lists",
            self.host_bytes,
            self.host_bytes.human()
        )?;
        writeln!(
            out,
            "capacity  {} tokens; certain to run to full length at once: {}; alive at once at most: {}",
            grouped(self.capacity_tokens),
            sequences(self.full_length_seqs),
            sequences(self.seq_slots)
        )?;
        writeln!(out, "prefixes  {}", self.reuse.words())?;
        let scrub = match self.scrub {
            Scrub::Off => "off: released bytes stay until they are overwritten",
            Scrub::OnRelease => "on-release: the verb that releases bytes zeroes them",
            Scrub::OnReuse => "on-reuse: bytes are zeroed before another sequence has them",
        };
        writeln!(out, "scrub     {scrub}")?;
        if self.watermark_blocks > 0 {
            let blocks = counted(self.watermark_blocks.into(), "block");
            writeln!(
                out,
                "watermark {blocks} of each paged group left free when a sequence begins beside others"
            )?;
        }
        if self.full_length_seqs == 0 {
            writeln!(
                out,
                "note      a sequence of limits.max_seq_len tokens does not fit this pool and will be refused when it begins"
            )?;
        }
        for group in &self.groups {
            if group.layout.addressing == Addressing::Ring {
                writeln!(
                    out,
                    "note      a ring of {} tokens = window {} + rewind {} + step {}{}",
                    grouped(group.layout.unit_tokens.into()),
                    group.window.unwrap_or(0),
                    self.limits.max_rewind_tokens,
                    self.limits.max_step_tokens,
                    match group.layout.sink_tokens {
                        0 => String::new(),
                        sinks => format!(" + sinks {sinks}"),
                    }
                )?;
            }
        }
        Ok(())
    }
}

/// `1 sequence`, `2 sequences`.
fn sequences(count: u32) -> String {
    counted(count.into(), "sequence")
}

/// The group's layers, shortened: `0-4, 6-10` or `29 of 34`.
fn layer_ranges(group: &LayerGroup) -> String {
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    for layer in &group.layers {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == layer.0 => *last = layer.0,
            _ => ranges.push((layer.0, layer.0)),
        }
    }
    if ranges.len() > 3 {
        return format!("{} layers", group.layers.len());
    }
    let shown: Vec<String> = ranges
        .iter()
        .map(
            |(first, last)| {
                if first == last { first.to_string() } else { format!("{first}-{last}") }
            },
        )
        .collect();
    shown.join(",")
}

/// Columns as wide as their widest cell; the first five to the left, numbers to the right.
fn write_table(out: &mut String, rows: &[[String; 10]]) -> std::fmt::Result {
    let width =
        |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    for row in rows {
        let mut line = String::new();
        for (column, cell) in row.iter().enumerate() {
            let width = width(column);
            if column < 5 {
                write!(line, "{cell:<width$}  ")?;
            } else {
                write!(line, "{cell:>width$}  ")?;
            }
        }
        writeln!(out, "{}", line.trim_end())?;
    }
    Ok(())
}
