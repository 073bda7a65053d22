//! The handles that calls gave out, and the one that a call is made with.

use kvpool::capi::*;

use super::input::Which;
use super::look::Views;

/// Handles that were given out.
#[derive(Clone, Default)]
pub(super) struct Handles {
    pub(super) seqs: Vec<kvpool_seq_t>,
    pub(super) steps: Vec<kvpool_step_t>,
    pub(super) pins: Vec<kvpool_pin_t>,
    pub(super) reservations: Vec<kvpool_reservation_t>,
    pub(super) blocks: Vec<kvpool_block_t>,
    /// How many the last step has.
    pub(super) tokens: u32,
    pub(super) views: Views,
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

impl Handles {
    /// Takes over what a call was given that was made with the first so many of these.
    pub(super) fn absorb(&mut self, before: &Self, after: Self) {
        fn tail<T>(to: &mut Vec<T>, before: usize, after: Vec<T>) {
            to.extend(after.into_iter().skip(before));
        }
        if after.steps.len() > before.steps.len() {
            self.tokens = after.tokens;
        }
        tail(&mut self.seqs, before.seqs.len(), after.seqs);
        tail(&mut self.steps, before.steps.len(), after.steps);
        tail(&mut self.pins, before.pins.len(), after.pins);
        tail(&mut self.reservations, before.reservations.len(), after.reservations);
        tail(&mut self.blocks, before.blocks.len(), after.blocks);
    }
}

fn pick<T: Copy>(list: &[T], which: Which, made_up: fn([u64; 2]) -> T) -> T {
    match which {
        Which::Known(at) if !list.is_empty() => list[usize::from(at) % list.len()],
        Which::Forged(a, b) => made_up([a, b]),
        _ => made_up([0, 0]),
    }
}
