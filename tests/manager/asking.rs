//! A device that has no memory, and asks before it copies or writes: whether it fails, or what else
//! happens just then.

use std::fmt;

use kvpool::device::{AppendArgs, AppendCounts, AttendArgs, Device, DeviceInfo, NullDevice};
use kvpool::error::DeviceError;
use kvpool::plan::Plan;

/// What is about to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Call {
    Copy,
    Write,
}

pub(super) struct Asking<F> {
    inner: NullDevice,
    ask: F,
}

impl<F: FnMut(Call) -> Result<(), DeviceError> + Send> Asking<F> {
    pub(super) fn open(plan: &Plan, ask: F) -> Box<Self> {
        Box::new(Self { inner: NullDevice::open(plan), ask })
    }
}

impl<F> fmt::Debug for Asking<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

impl<F: FnMut(Call) -> Result<(), DeviceError> + Send> Device for Asking<F> {
    fn info(&self) -> DeviceInfo {
        self.inner.info()
    }

    fn plan_fingerprint(&self) -> u64 {
        self.inner.plan_fingerprint()
    }

    fn base_ptr(&self) -> *mut u8 {
        self.inner.base_ptr()
    }

    fn append(&mut self, args: &AppendArgs<'_>) -> Result<AppendCounts, DeviceError> {
        self.inner.append(args)
    }

    fn attend(&mut self, args: &mut AttendArgs<'_>) -> Result<(), DeviceError> {
        self.inner.attend(args)
    }

    fn copy(&mut self, src: u64, dst: u64, len: u64) -> Result<(), DeviceError> {
        (self.ask)(Call::Copy)?;
        self.inner.copy(src, dst, len)
    }

    fn fill(&mut self, offset: u64, len: u64, byte: u8) -> Result<(), DeviceError> {
        self.inner.fill(offset, len, byte)
    }

    fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        (self.ask)(Call::Write)?;
        self.inner.write(offset, bytes)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), DeviceError> {
        self.inner.read(offset, out)
    }
}
