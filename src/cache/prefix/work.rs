//! How much is looked up and compared for a prompt, counted in tests: what another tenant's prompt
//! costs must be what any miss costs.

/// Counts of this thread.
#[cfg(test)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::cache) struct Work {
    /// Places of the table that were followed to a node.
    pub(in crate::cache) nodes: u64,
    /// Tokens that were compared.
    pub(in crate::cache) tokens: u64,
}

#[cfg(test)]
thread_local! {
    static WORK: std::cell::Cell<Work> = const { std::cell::Cell::new(Work { nodes: 0, tokens: 0 }) };
}

/// What was counted since the last time.
#[cfg(test)]
pub(in crate::cache) fn take() -> Work {
    WORK.take()
}

/// Counts a node that is looked at.
#[inline(always)]
pub(in crate::cache) fn node() {
    #[cfg(test)]
    WORK.set(Work { nodes: WORK.get().nodes + 1, ..WORK.get() });
}

/// Counts tokens that are compared.
#[inline(always)]
pub(in crate::cache) fn compared(tokens: usize) {
    #[cfg(test)]
    WORK.set(Work { tokens: WORK.get().tokens + tokens as u64, ..WORK.get() });
    let _ = tokens;
}
