//! The handles that calls gave out, and the one that a call is made with.

use kvpool::capi::*;

use super::input::Which;

/// Handles that were given out.
#[derive(Default)]
pub(super) struct Handles {
    pub(super) seqs: Vec<kvpool_seq_t>,
    pub(super) steps: Vec<kvpool_step_t>,
    pub(super) pins: Vec<kvpool_pin_t>,
    pub(super) reservations: Vec<kvpool_reservation_t>,
    pub(super) blocks: Vec<kvpool_block_t>,
    /// How many the last step has.
    pub(super) tokens: u32,
}

impl Handles {
    pub(super) fn seq(&self, which: Which) -> kvpool_seq_t {
        pick(&self.seqs, which, |word| kvpool_seq_t { word })
    }

    pub(super) fn step(&self, which: Which) -> kvpool_step_t {
        pick(&self.steps, which, |word| kvpool_step_t { word })
    }

    pub(super) fn pin(&self, which: Which) -> kvpool_pin_t {
        pick(&self.pins, which, |word| kvpool_pin_t { word })
    }

    pub(super) fn reservation(&self, which: Which) -> kvpool_reservation_t {
        pick(&self.reservations, which, |word| kvpool_reservation_t { word })
    }

    pub(super) fn block(&self, which: Which) -> kvpool_block_t {
        pick(&self.blocks, which, |word| kvpool_block_t { word })
    }
}

fn pick<T: Copy>(list: &[T], which: Which, made_up: fn([u64; 2]) -> T) -> T {
    match which {
        Which::Known(at) if !list.is_empty() => list[usize::from(at) % list.len()],
        Which::Forged(a, b) => made_up([a, b]),
        _ => made_up([0, 0]),
    }
}
