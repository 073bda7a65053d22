//! The places of a step's tokens, one after the other.

use crate::plan::GroupLayout;

/// Consecutive token slots that fall into one class: enough for whole cache lines at a time.
const CLASS_TOKENS: u64 = 8;

/// Goes through token slots, or through those of one class.
#[derive(Clone, Debug)]
pub(super) struct Places<'a> {
    layout: &'a GroupLayout,
    token_slots: &'a [u64],
    /// Classes, and the one that is asked for.
    parts: u64,
    part: u64,
    /// The token to look at next.
    next: usize,
    /// The slot before, its unit and its place there: these most often tell the next one's
    /// without a division.
    last: u64,
    unit: u32,
    token: u32,
}

/// One token's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// Which of the step's tokens.
    pub(super) index: usize,
    /// The unit it is stored in.
    pub(super) unit: u32,
    /// The token within the unit.
    pub(super) token: u32,
    /// Whether it is another slot than the one behind the token's before.
    pub(super) jumps: bool,
}

impl<'a> Places<'a> {
    /// The tokens of class `part` out of `parts`.
    pub(super) fn new(
        layout: &'a GroupLayout,
        token_slots: &'a [u64],
        parts: u64,
        part: u64,
    ) -> Self {
        Self { layout, token_slots, parts, part, next: 0, last: u64::MAX, unit: 0, token: u32::MAX }
    }

    /// The next token's place.
    #[inline(always)]
    pub(super) fn next(&mut self) -> Option<Place> {
        loop {
            let index = self.next;
            let slot = *self.token_slots.get(index)?;
            self.next += 1;
            if self.parts > 1 && slot / CLASS_TOKENS % self.parts != self.part {
                continue;
            }
            let jumps = slot != self.last.wrapping_add(1);
            if !jumps && self.token < self.layout.unit_tokens - 1 {
                self.token += 1;
            } else {
                (self.unit, self.token) = self.layout.split_slot(slot);
            }
            self.last = slot;
            return Some(Place { index, unit: self.unit, token: self.token, jumps });
        }
    }
}
