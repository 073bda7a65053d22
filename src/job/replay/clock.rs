//! How long steps take: the cost model of `[cost]`, in whole numbers but for the rounding of its
//! constants, so that a replay gives the same times everywhere.

use crate::config::CostConfig;
use crate::plan::{LayerGroup, Plan};

/// One layer group's share of the bytes that a step moves.
#[derive(Clone, Copy, Debug)]
struct Share {
    bytes_per_token: u64,
    window: Option<u32>,
    sink_tokens: u32,
}

/// Adds a step's bytes and tokens up.
#[derive(Debug)]
pub(super) struct Clock {
    shares: Vec<Share>,
    bandwidth: u128,
    step_ns: u64,
    /// Picoseconds, so that a fraction of a nanosecond counts.
    token_ps: u64,
    weight_bytes: u64,
    /// Of the step: bytes read and written, tokens.
    bytes: u64,
    tokens: u64,
    /// What had been copied within the pool when the step before ended.
    copied: u64,
}

impl Clock {
    pub(super) fn new(cost: &CostConfig, plan: &Plan) -> Self {
        let share = |group: &LayerGroup| Share {
            bytes_per_token: group.bytes_per_token.get(),
            window: group.window,
            sink_tokens: group.layout.sink_tokens,
        };
        Self {
            shares: plan.groups.iter().map(share).collect(),
            bandwidth: u128::from(cost.bandwidth.get().max(1)),
            step_ns: rounded(cost.step_us * 1e3),
            token_ps: rounded(cost.token_us * 1e6),
            weight_bytes: cost.weight_bytes.get(),
            bytes: 0,
            tokens: 0,
            copied: 0,
        }
    }

    /// Begins a step.
    pub(super) fn clear(&mut self) {
        self.bytes = 0;
        self.tokens = 0;
    }

    /// Adds one sequence's rows of the step: what they write, and what they see.
    pub(super) fn add(&mut self, first_position: u32, rows: u32) {
        let len = u64::from(first_position) + u64::from(rows);
        for share in &self.shares {
            // The first row sees a window, and the rows behind it see each other.
            let seen = share.window.map_or(len, |window| {
                let visible =
                    u64::from(window) - 1 + u64::from(rows) + u64::from(share.sink_tokens);
                visible.min(len)
            });
            let bytes = share.bytes_per_token.saturating_mul(seen + u64::from(rows));
            self.bytes = self.bytes.saturating_add(bytes);
        }
        self.tokens += u64::from(rows);
    }

    /// How long the step takes. `copied` bytes have been copied within the pool so far.
    pub(super) fn took_ns(&mut self, copied: u64) -> u64 {
        let copied_now = u128::from(copied - self.copied);
        self.copied = copied;
        let moved = u128::from(self.weight_bytes) + u128::from(self.bytes) + 2 * copied_now;
        let moving = (moved * 1_000_000_000).div_ceil(self.bandwidth);
        let computing = (u128::from(self.tokens) * u128::from(self.token_ps)).div_ceil(1000);
        let total = u128::from(self.step_ns) + computing + moving;
        u64::try_from(total).unwrap_or(u64::MAX)
    }
}

fn rounded(number: f64) -> u64 {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "checked to be in range"
    )]
    let whole = number.round() as u64;
    whole
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::config::parse;
    use crate::units::Bytes;

    #[test]
    fn a_step_takes_what_the_formula_says() {
        let text = "
            model = { num_layers = 2, num_q_heads = 1, num_kv_heads = 1, head_dim = 16, \
                      attention_window = [8, 0], sink_tokens = 2 }
            limits = { max_seqs = 2, max_seq_len = 64, max_batch_tokens = 32, max_step_tokens = 8 }
            cache = { mode = 'paged', tokens_per_block = 8 }";
        let source = parse(text, Path::new("t"), &[]).expect("fine");
        let plan = Plan::new(&source.config, &source.geometry).expect("fits");
        let cost = CostConfig {
            bandwidth: Bytes(1_000_000_000),
            step_us: 3.0,
            token_us: 0.5,
            weight_bytes: Bytes(1000),
        };
        let mut clock = Clock::new(&cost, &plan);
        // A token is 64 bytes in each layer. Rows 20..24 of a sequence: the layer with all keys
        // reads 24 and writes 4, the other reads 7 + 4 and 2 sinks.
        clock.add(20, 4);
        assert_eq!(clock.took_ns(0), 3000 + 4 * 500 + 1000 + 64 * (24 + 4 + 7 + 4 + 2 + 4));
        // A decode step of a short sequence, and 100 bytes that were copied.
        clock.clear();
        clock.add(2, 1);
        assert_eq!(clock.took_ns(100), 3000 + 500 + 1000 + 64 * (3 + 1) * 2 + 200);
        clock.clear();
        assert_eq!(clock.took_ns(100), 3000 + 1000);
        // What takes longer than the clock can tell takes as long as it can.
        let endless = CostConfig { bandwidth: Bytes(1), weight_bytes: Bytes(1 << 62), ..cost };
        let mut clock = Clock::new(&endless, &plan);
        clock.add(2, 1);
        assert_eq!(clock.took_ns(u64::MAX), u64::MAX);
    }
}
