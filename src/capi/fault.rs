//! For tests: a panic within the next verb, as a defect would cause it.

use std::cell::Cell;

thread_local! {
    static ARMED: Cell<bool> = const { Cell::new(false) };
}

/// The next verb of any cache that this thread calls panics while it runs.
pub(super) fn panic_in_next_verb() {
    ARMED.set(true);
}

/// Where a verb panics when it was asked to.
pub(super) fn point() {
    assert!(!ARMED.take(), "a panic that a test asked for");
}
