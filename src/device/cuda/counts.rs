//! What appends in INT8 have met, counted by the kernels in the workspace.

use super::driver::Entered;
use super::{CudaDevice, tables};
use crate::device::AppendCounts;
use crate::error::DeviceError;
use crate::plan::CUDA_COUNTS_BYTES;

/// Where an append counts what INT8 meets. Whoever cancels a step drops its own counts alone, so
/// those of appends that nobody has waited for lie apart.
#[derive(Clone, Copy, Debug)]
pub(super) enum Counting {
    /// With tensors in device memory, since the device was opened: the number only grows, since a
    /// graph that is played adds to it too.
    Since,
    /// With tensors in host memory: of one append, which waits for them. It begins with 0, so
    /// what one that failed has left there is nobody's.
    Once,
}

impl CudaDevice {
    /// Where appends count.
    pub(super) fn counts_at(&self, whose: Counting) -> u64 {
        let first = self.workspace.address() + self.sizes.counts;
        match whose {
            Counting::Since => first,
            Counting::Once => first + CUDA_COUNTS_BYTES,
        }
    }

    /// Reads back what appends have counted. Waits for the stream.
    pub(super) fn read_counts(
        &self,
        cx: &Entered<'_>,
        whose: Counting,
    ) -> Result<AppendCounts, DeviceError> {
        let from = self.counts_at(whose);
        let mut now = [0_u8; tables::COUNTS_BYTES];
        // SAFETY: two numbers of the workspace; the place is waited for before it is used.
        unsafe { cx.download(now.as_mut_ptr(), from, now.len(), self.stream) }?;
        cx.wait_for_stream(self.stream)?;
        let number =
            |at: usize| now[at..at + 8].iter().rev().fold(0, |n, b| n << 8 | u64::from(*b));
        Ok(AppendCounts { nonfinite: number(0), saturated: number(8) })
    }

    /// Waits for the stream, and gives what appends with tensors in device memory have counted
    /// since the last time.
    pub(super) fn new_counts(&mut self, cx: &Entered<'_>) -> Result<AppendCounts, DeviceError> {
        cx.no_capture(self.stream)?;
        if !self.counts {
            cx.wait_for_stream(self.stream)?;
            return Ok(AppendCounts::default());
        }
        let now = self.read_counts(cx, Counting::Since)?;
        let new = AppendCounts {
            nonfinite: now.nonfinite - self.counted.nonfinite,
            saturated: now.saturated - self.counted.saturated,
        };
        self.counted = now;
        Ok(new)
    }
}
