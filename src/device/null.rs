//! A device without memory, for the manager alone: what the blocks, tables and the prefix index
//! cost, at pool sizes that no machine has memory for.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::{AppendArgs, AppendCounts, AttendArgs, Device, DeviceInfo};
use crate::error::DeviceError;
use crate::plan::Plan;
use crate::units::Bytes;

/// A device that stores nothing and computes nothing.
///
/// Appending and attending succeed and leave everything as it is, the output included. Copying
/// and filling check their ranges against the planned pool, so that a defect of the manager shows
/// here too; a copy is counted. What is read is zeros. [`Device::base_ptr`] is null: there is
/// nothing to point at, so engines of their own must not be run on it.
#[derive(Debug)]
pub struct NullDevice {
    plan_fingerprint: u64,
    pool_bytes: Bytes,
    copied_bytes: Arc<AtomicU64>,
}

impl NullDevice {
    /// A device for this plan. Allocates nothing of what is planned.
    #[must_use]
    pub fn open(plan: &Plan) -> Self {
        Self {
            plan_fingerprint: plan.fingerprint(),
            pool_bytes: plan.pool_bytes,
            copied_bytes: Arc::default(),
        }
    }

    /// The bytes that [`Device::copy`] was asked to copy: a counter to keep while a cache owns
    /// the device.
    #[must_use]
    pub fn copied_bytes(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.copied_bytes)
    }

    /// Whether so many bytes from `offset` on would lie in the pool.
    fn check(&self, offset: u64, len: u64) -> Result<(), DeviceError> {
        match offset.checked_add(len) {
            Some(end) if end <= self.pool_bytes.get() => Ok(()),
            _ => Err(DeviceError::OutOfRange { offset, len, pool: self.pool_bytes }),
        }
    }
}

impl Device for NullDevice {
    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            kind: "none",
            kernel: "none",
            threads: 1,
            pool_bytes: self.pool_bytes,
            workspace_bytes: Bytes::ZERO,
            huge_pages: false,
        }
    }

    fn plan_fingerprint(&self) -> u64 {
        self.plan_fingerprint
    }

    /// Null.
    fn base_ptr(&self) -> *mut u8 {
        std::ptr::null_mut()
    }

    fn append(&mut self, _args: &AppendArgs<'_>) -> Result<AppendCounts, DeviceError> {
        Ok(AppendCounts::default())
    }

    fn attend(&mut self, _args: &mut AttendArgs<'_>) -> Result<(), DeviceError> {
        Ok(())
    }

    fn copy(&mut self, src: u64, dst: u64, len: u64) -> Result<(), DeviceError> {
        self.check(src, len)?;
        self.check(dst, len)?;
        self.copied_bytes.fetch_add(len, Relaxed);
        Ok(())
    }

    fn fill(&mut self, offset: u64, len: u64, _byte: u8) -> Result<(), DeviceError> {
        self.check(offset, len)
    }

    fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        self.check(offset, bytes.len() as u64)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), DeviceError> {
        self.check(offset, out.len() as u64)?;
        out.fill(0);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::config::parse;

    /// 10⁷ blocks: far more than this test could have.
    const TOML: &str = "
        model = { num_layers = 1, num_q_heads = 8, num_kv_heads = 8, head_dim = 128 }
        limits = { max_seqs = 1, max_seq_len = 64, max_batch_tokens = 64 }
        cache = { mode = 'paged', format = 'f16' }
        pool = { capacity = 'blocks:10000000' }";

    fn plan() -> Plan {
        let source = parse(TOML, Path::new("null"), &[]).expect("a valid configuration");
        Plan::new(&source.config, &source.geometry).expect("a plan")
    }

    #[test]
    fn it_says_that_there_is_nothing() {
        let plan = plan();
        let device = NullDevice::open(&plan);
        let info = device.info();
        assert_eq!((info.kind, info.pool_bytes), ("none", plan.pool_bytes));
        assert!(info.pool_bytes > Bytes(1 << 38), "{}", info.pool_bytes);
        assert!(device.base_ptr().is_null());
        assert_eq!(device.plan_fingerprint(), plan.fingerprint());
    }

    #[test]
    fn copies_are_checked_and_counted_and_bytes_are_zeros() {
        let mut device = NullDevice::open(&plan());
        let (copied, end) = (device.copied_bytes(), device.info().pool_bytes.get());
        device.copy(0, end - 8, 8).expect("inside");
        device.copy(end - 4, 0, 4).expect("inside");
        for (src, dst, len) in [(0, end - 7, 8), (end, 0, 1), (u64::MAX, 0, 2)] {
            let error = device.copy(src, dst, len);
            assert!(matches!(error, Err(DeviceError::OutOfRange { .. })), "{error:?}");
        }
        assert_eq!(copied.load(Relaxed), 12);
        device.fill(0, end, 7).expect("inside");
        device.fill(1, end, 7).expect_err("beyond the end");
        let mut out = [1; 4];
        device.read(end - 4, &mut out).expect("inside");
        assert_eq!(out, [0; 4]);
        device.read(end - 3, &mut out).expect_err("beyond the end");
    }
}
