//! Rotating K on its way into the pool, by tables of cosines and sines that are made at open.

use super::super::convert::Source;
use super::super::table_of;
use super::memory::out_of_memory;
use crate::error::DeviceError;
use crate::plan::{Rope, rotated};
use crate::units::Bytes;

/// The longest vector.
pub(super) const MAX_DIM: usize = 1024;

/// The plan's rotation and its tables.
#[derive(Debug)]
pub(super) struct RopeTables {
    rope: Rope,
    /// `[tables, (cos, sin), positions, dims / 2]`
    numbers: Vec<f32>,
}

impl RopeTables {
    /// Fills in the tables, as long as the plan says.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub(super) fn open(rope: &Rope) -> Result<Self, DeviceError> {
        let len = rope.numbers().ok().and_then(|len| usize::try_from(len).ok());
        let bytes = Bytes(len.map_or(u64::MAX, |len| len as u64 * 4));
        let len = len.ok_or_else(|| out_of_memory(bytes, 0))?;
        let mut numbers = table_of(len, 0.0)?;
        rope.fill(&mut numbers);
        Ok(Self { rope: rope.clone(), numbers })
    }

    /// Bytes allocated.
    pub(super) fn bytes(&self) -> u64 {
        (self.numbers.capacity() * size_of::<f32>()) as u64
    }

    /// The rotation by one of the tables, of tokens at these positions.
    ///
    /// # Errors
    /// [`DeviceError::BadLayout`] when there is no such table, or a token without an angle.
    pub(super) fn rotation<'a>(
        &'a self,
        table: u32,
        positions: &'a [u32],
        tokens: usize,
    ) -> Result<Rotation<'a>, DeviceError> {
        let beyond = |position: &u32| *position >= self.rope.positions;
        if positions.len() != tokens || positions.iter().any(beyond) {
            return Err(DeviceError::BadLayout);
        }
        let half = self.rope.dims as usize / 2;
        let len = self.rope.positions as usize * half;
        let start = table as usize * 2 * len;
        let numbers = self.numbers.get(start..start + 2 * len).ok_or(DeviceError::BadLayout)?;
        let (cos, sin) = numbers.split_at(len);
        Ok(Rotation { rope: &self.rope, half, cos, sin, positions })
    }
}

/// How the K of a step are rotated.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rotation<'a> {
    rope: &'a Rope,
    half: usize,
    /// `[positions, dims / 2]` each
    cos: &'a [f32],
    sin: &'a [f32],
    /// `[tokens]`
    positions: &'a [u32],
}

impl Rotation<'_> {
    /// Rotates one vector of a token of the step. `x` and `out`: `[head_dim]`
    #[inline(always)]
    pub(super) fn rotate<S: Source>(&self, token: usize, x: &[S], out: &mut [f32]) {
        for (out, x) in out.iter_mut().zip(x) {
            *out = x.to_f32();
        }
        let start = self.positions[token] as usize * self.half;
        let cos = &self.cos[start..start + self.half];
        let sin = &self.sin[start..start + self.half];
        for (pair, (cos, sin)) in cos.iter().zip(sin).enumerate() {
            let (a, b) = self.rope.pair(pair);
            (out[a], out[b]) = rotated(out[a], out[b], *cos, *sin);
        }
    }
}
