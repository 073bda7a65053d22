//! The processor's floating-point mode.
//!
//! A program may run with denormals flushed to zero or another rounding (`-ffast-math`, some
//! frameworks' settings), and the workers inherit what held when they were started. Kernels set
//! the standard mode for as long as they run, so that the answer never depends on it (P5).

/// Holds the standard mode (round to nearest even, denormals kept, no traps); dropping it restores
/// what was there before.
pub(super) struct FloatMode {
    #[cfg(target_arch = "x86_64")]
    before: u32,
}

#[cfg(target_arch = "x86_64")]
impl FloatMode {
    /// The state of the control register after a reset.
    const STANDARD: u32 = 0x1F80;

    /// The bits that are flags of what has happened, not modes.
    const FLAGS: u32 = 0x3F;

    /// Whether this thread is in the standard mode.
    #[cfg(test)]
    pub(super) fn is_standard() -> bool {
        let mut now = 0_u32;
        // SAFETY: stores 4 bytes to `now`, which is there and aligned.
        unsafe {
            std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut now, options(nostack));
        }
        now & !Self::FLAGS == Self::STANDARD
    }

    /// Sets the mode that flushes denormals to zero, as an engine's libraries may.
    #[cfg(test)]
    pub(super) fn flush_to_zero() {
        load(Self::STANDARD | 1 << 15);
    }

    /// Sets the standard mode on this thread.
    pub(super) fn standard() -> Self {
        let mut before = 0_u32;
        // SAFETY: stores 4 bytes to `before`, which is there and aligned.
        unsafe {
            std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut before, options(nostack));
        }
        if before & !Self::FLAGS != Self::STANDARD {
            load(Self::STANDARD);
        }
        Self { before }
    }
}

#[cfg(target_arch = "x86_64")]
impl Drop for FloatMode {
    fn drop(&mut self) {
        // What ran meanwhile may have left another mode.
        load(self.before);
    }
}

/// Loads the control register.
#[cfg(target_arch = "x86_64")]
fn load(mode: u32) {
    // SAFETY: `mode` is the standard state or one that the register held, so no reserved bit is
    // set. The standard mode is the one that Rust code expects; the other is the caller's own.
    unsafe {
        std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const mode, options(nostack));
    }
}

#[cfg(not(target_arch = "x86_64"))]
impl FloatMode {
    /// Other processors' modes are left as they are.
    pub(super) fn standard() -> Self {
        Self {}
    }
}
