//! What a child of `fork(2)` finds: locks that threads held which it does not have. It must wait
//! for none of them, so to it all objects are gone.

#[cfg(target_os = "linux")]
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether this process was forked from one that had opened a cache.
static FORKED: AtomicBool = AtomicBool::new(false);

/// Has forks noticed from now on: called when a cache is opened, since before that nothing is lost
/// in a fork. Where the system has no memory for that, a child is what it was without.
pub(super) fn watch_forks() {
    #[cfg(target_os = "linux")]
    {
        extern "C" fn in_the_child() {
            FORKED.store(true, Ordering::Relaxed);
        }
        static ONCE: Once = Once::new();
        // SAFETY: the handler stores a flag, which may be done in the child of a process with
        // threads, and it is there as long as the library is: the system drops it with that.
        ONCE.call_once(|| unsafe {
            libc::pthread_atfork(None, None, Some(in_the_child));
        });
    }
}

/// Whether objects were lost in a fork.
pub(super) fn is_forked() -> bool {
    FORKED.load(Ordering::Relaxed)
}
