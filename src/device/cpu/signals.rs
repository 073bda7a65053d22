//! Threads of ours that take none of the program's signals.
//!
//! A signal that is sent to a process goes to any of its threads that does not block it. A program
//! that blocks some in its own threads, to wait for them in one, knows nothing of ours.

/// What a thread is sent for what it does itself: blocked, it would end the program past all handlers.
#[cfg(unix)]
const FAULTS: [libc::c_int; 6] =
    [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP, libc::SIGSYS];

/// Blocks the process's signals in this thread for as long as it lives: a thread that is made meanwhile has
/// them blocked from its start.
#[derive(Debug)]
pub(super) struct Blocked {
    #[cfg(unix)]
    before: Option<libc::sigset_t>,
    /// Dropped by the thread that made it.
    not_send: std::marker::PhantomData<*const ()>,
}

impl Blocked {
    pub(super) fn new() -> Self {
        Self {
            #[cfg(unix)]
            before: block_all(),
            not_send: std::marker::PhantomData,
        }
    }
}

/// Blocks them; those that were blocked before. `None` where the system refuses: then all is as it was.
#[cfg(unix)]
fn block_all() -> Option<libc::sigset_t> {
    let mut all = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: a place for a set.
    unsafe { libc::sigfillset(all.as_mut_ptr()) };
    for fault in FAULTS {
        // SAFETY: a set that was filled.
        unsafe { libc::sigdelset(all.as_mut_ptr(), fault) };
    }
    // SAFETY: a set that was filled, and a place for one.
    let refused =
        unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, all.as_ptr(), before.as_mut_ptr()) };
    // SAFETY: filled by the call, which succeeded.
    (refused == 0).then(|| unsafe { before.assume_init() })
}

impl Drop for Blocked {
    fn drop(&mut self) {
        #[cfg(unix)]
        if let Some(before) = &self.before {
            // SAFETY: a set that the system gave.
            unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before, std::ptr::null_mut()) };
        }
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    fn mask() -> u64 {
        let status = std::fs::read_to_string("/proc/thread-self/status").expect("Linux");
        let mask = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).expect("a mask");
        u64::from_str_radix(mask.trim(), 16).expect("a number")
    }

    #[test]
    fn a_thread_that_is_made_meanwhile_takes_no_signals() {
        let before = mask();
        let blocked = Blocked::new();
        let inner = std::thread::spawn(mask).join().expect("no panic");
        drop(blocked);
        for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGUSR1, libc::SIGALRM] {
            assert_eq!(inner >> (signal - 1) & 1, 1, "{signal}");
        }
        for fault in FAULTS {
            assert_eq!(inner >> (fault - 1) & 1, before >> (fault - 1) & 1, "{fault}");
        }
        assert_eq!(mask(), before, "as it was");
    }
}
