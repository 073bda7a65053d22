//! The numbers of a failure, and texts of a fixed size: `kvpool_error_t` is made of them.

use std::ffi::c_char;
use std::fmt::{self, Write as _};

use super::failure::{CallError, Failure};
use crate::error::{CacheError, ConfigError, DeviceError, OpenError, Origin, PlanError, SaveError};

/// The numbers of a failure, where it has some.
#[derive(Clone, Copy, Debug)]
pub(super) struct Facts {
    pub(super) line: u32,
    pub(super) wanted: u64,
    pub(super) available: u64,
    pub(super) index: u64,
    pub(super) knob: Text<64>,
}

/// `KVPOOL_NO_NUMBER`
const NO_NUMBER: u64 = u64::MAX;

impl Facts {
    pub(super) const NONE: Self = Self {
        line: 0,
        wanted: NO_NUMBER,
        available: NO_NUMBER,
        index: NO_NUMBER,
        knob: Text::EMPTY,
    };

    fn of(wanted: impl Into<u64>, available: impl Into<u64>, knob: &str) -> Self {
        Self { wanted: wanted.into(), available: available.into(), ..Self::knob(knob) }
    }

    /// A setting without numbers. What follows the first blank explains it.
    fn knob(knob: &str) -> Self {
        let mut facts = Self::NONE;
        // A text that is too long is cut.
        let _ = facts.knob.write_str(knob.split(' ').next().unwrap_or_default());
        facts
    }

    fn available(available: impl Into<u64>, knob: &str) -> Self {
        Self { available: available.into(), ..Self::knob(knob) }
    }

    fn of_cache(error: &CacheError) -> Self {
        const POOL: &str = "pool.capacity";
        const SEQS: &str = "limits.max_seqs";
        const REWIND: &str = "limits.max_rewind_tokens";
        match *error {
            CacheError::NoSeqSlot { seq_slots } => Self::available(seq_slots, SEQS),
            CacheError::SequenceTooLong { wanted, limit, knob }
            | CacheError::StepTooLarge { wanted, limit, knob } => Self::of(wanted, limit, knob),
            CacheError::NeverFits { wanted, total, .. } => Self::of(wanted, total, POOL),
            CacheError::NotAdmitted { wanted, available, .. }
            | CacheError::PoolExhausted { wanted, available, .. } => {
                Self::of(wanted, available, POOL)
            }
            CacheError::LookaheadBeyondRewind { wanted, limit } => Self::of(wanted, limit, REWIND),
            CacheError::WrongShape { got, expected, .. } => {
                Self::of(expected as u64, got as u64, "")
            }
            CacheError::TruncateBeyondEnd { wanted, len } => Self::of(wanted, len, ""),
            CacheError::WindowGone { wanted, shortest, .. } => Self::of(wanted, shortest, REWIND),
            CacheError::NotHeld { from, kept_from, .. } => Self::of(from, kept_from, ""),
            CacheError::TooManyRefs { limit, .. } => Self::available(limit, ""),
            CacheError::BatchUnderWay { live } => Self::available(live, "cache.admission"),
            CacheError::BadRetention { at, .. } => Self { index: at as u64, ..Self::NONE },
            CacheError::ReuseOff => Self::knob("cache.prefix_reuse"),
            CacheError::NoPin { limit } => Self::available(limit, SEQS),
            CacheError::KeyPartTooLong { len, limit } => Self::of(len as u64, limit as u64, ""),
            CacheError::NoSuchLayer { layer, num_layers } => Self::of(layer.0, num_layers, ""),
            CacheError::NoSuchGroup { group, num_groups, .. } => Self::of(group.0, num_groups, ""),
            CacheError::Device(error) => Self::of_device(&error),
            _ => Self::NONE,
        }
    }

    fn of_device(error: &DeviceError) -> Self {
        const POOL: &str = "pool.capacity";
        match *error {
            DeviceError::OutOfMemory { bytes, available, .. } => {
                Self::of(bytes.get(), available.get(), POOL)
            }
            DeviceError::CudaOutOfMemory { bytes, free, .. } => {
                Self::of(bytes.get(), free.get(), POOL)
            }
            DeviceError::KernelUnsupported { .. } => Self::knob("device.kernel"),
            DeviceError::Thread { .. } => Self::knob("device.threads"),
            DeviceError::CudaNoGpu { ordinal, count } => Self::of(ordinal, count, "device.ordinal"),
            DeviceError::CudaNoDriver
            | DeviceError::CudaNotCompiled { .. }
            | DeviceError::CudaDriverTooOld { .. } => Self::knob("device.kind"),
            _ => Self::NONE,
        }
    }

    fn of_save(error: &SaveError) -> Self {
        match *error {
            SaveError::OtherVersion { found, supported } => Self::of(found, supported, ""),
            SaveError::Differs { found, expected, .. }
            | SaveError::OtherEpoch { found, expected } => Self::of(found, expected, ""),
            SaveError::OutOfMemory { bytes } => Self { wanted: bytes.get(), ..Self::NONE },
            SaveError::Cache(ref error) => Self::of_cache(error),
            _ => Self::NONE,
        }
    }

    fn of_plan(error: &PlanError) -> Self {
        const POOL: &str = "pool.capacity";
        match error {
            PlanError::MemoryTooSmall { needed, available, .. }
            | PlanError::BudgetTooSmall { needed, available, .. } => {
                Self::of(needed.get(), available.get(), POOL)
            }
            PlanError::CapacityTooSmall { given, needed, .. } => Self::of(*needed, *given, POOL),
            PlanError::TooMany { wanted, limit, .. } => Self::of(*wanted, *limit, ""),
            PlanError::Contradiction { key, .. } => Self::knob(key),
            PlanError::Overflow(_) => Self::NONE,
        }
    }

    fn of_config(error: &ConfigError) -> Self {
        let line_of = |origin: &Origin| match origin {
            Origin::File { line, .. } => u32::try_from(*line).unwrap_or(u32::MAX),
            Origin::Override => 0,
        };
        match error {
            ConfigError::Key { origin, key, .. } => {
                Self { line: line_of(origin), ..Self::knob(key) }
            }
            ConfigError::Syntax { origin, .. } => Self { line: line_of(origin), ..Self::NONE },
            ConfigError::Read { .. } | ConfigError::Override { .. } => Self::NONE,
        }
    }

    fn of_call(error: &CallError) -> Self {
        let of = |wanted: usize, available: usize| Self::of(wanted as u64, available as u64, "");
        match *error {
            CallError::BadSize { got, expected, .. } => of(expected, got),
            CallError::BufferTooSmall { wanted, capacity } => of(wanted, capacity),
            CallError::TooManyObjects { limit, .. } | CallError::NoView { limit } => {
                Self::available(limit as u64, "")
            }
            CallError::NoSuchGroup { group, num_groups } => Self::of(group, num_groups, ""),
            _ => Self::NONE,
        }
    }

    pub(super) fn of_failure(failure: &Failure) -> Self {
        match failure {
            Failure::Call(error) => Self::of_call(error),
            Failure::Item { index, error } => Self { index: *index as u64, ..Self::of_call(error) },
            Failure::Cache(error) => Self::of_cache(error),
            Failure::Batch(refused) => {
                Self { index: refused.index as u64, ..Self::of_cache(&refused.source) }
            }
            Failure::Config(error) => Self::of_config(error),
            Failure::Save(error) => Self::of_save(error),
            Failure::Plan(error) | Failure::Open(OpenError::Plan(error)) => Self::of_plan(error),
            Failure::Device(error) | Failure::Open(OpenError::Device(error)) => {
                Self::of_device(error)
            }
            Failure::Invariant(_) | Failure::Panic(_) | Failure::Text(_) => Self::NONE,
        }
    }
}

/// A C string of fixed size; what does not fit is cut, at a character.
#[derive(Clone, Copy, Debug)]
pub(super) struct Text<const N: usize> {
    bytes: [u8; N],
    len: usize,
}

impl<const N: usize> Text<N> {
    pub(super) const EMPTY: Self = Self { bytes: [0; N], len: 0 };

    pub(super) fn to_c(self) -> [c_char; N] {
        self.bytes.map(|byte| c_char::from_ne_bytes([byte]))
    }
}

impl<const N: usize> fmt::Write for Text<N> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let room = N - 1 - self.len;
        let cut = (0..=room.min(text.len())).rev().find(|at| text.is_char_boundary(*at));
        let text = &text.as_bytes()[..cut.unwrap_or(0)];
        self.bytes[self.len..self.len + text.len()].copy_from_slice(text);
        self.len += text.len();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_cut_at_a_character() {
        let mut text = Text::<6>::EMPTY;
        write!(text, "abcd→").expect("cut");
        assert_eq!(&text.bytes, b"abcd\0\0");
        write!(text, "é").expect("cut");
        assert_eq!(&text.bytes, b"abcd\0\0");
        write!(text, "ef").expect("cut");
        assert_eq!(&text.bytes, b"abcde\0");
    }

    #[test]
    fn a_knob_is_a_key_and_nothing_else() {
        let knob = "limits.max_step_tokens (left out, it is the smallest attention window)";
        let error = CacheError::StepTooLarge { wanted: 3, limit: 2, knob };
        let facts = Facts::of_cache(&error);
        assert_eq!(&facts.knob.bytes[..facts.knob.len], b"limits.max_step_tokens");
        assert_eq!((facts.wanted, facts.available), (3, 2));
    }
}
