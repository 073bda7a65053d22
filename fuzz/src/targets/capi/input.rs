//! What an input is: a cache, and calls. The corpora are these types as bytes: another order of
//! fields or variants would make other calls of every file in them.

use std::ptr::null_mut;

use arbitrary::Arbitrary;
use kvpool::capi::*;

use super::super::combinations;
use super::zeroed;

/// What a call is made with.
#[derive(Clone, Copy, Debug, Arbitrary)]
pub(super) enum Which {
    /// One that was given out, and may have ended since.
    Known(u8),
    /// Two words that nobody gave out.
    Forged(u64, u64),
    Zero,
}

#[derive(Clone, Debug, Arbitrary)]
pub(super) enum Op {
    Begin {
        prompt: Prompt,
        options: Options,
        broken: Broken,
    },
    BeginBatch(Vec<(Prompt, Options)>),
    CheckAdmission(Prompt, Options),
    CanAdmit(Prompt, Options),
    BeginReserved(Which),
    CancelReservation(Which),
    CancelReservations,
    Fork(Which),
    Truncate(Which, u8),
    Release(Which),
    SeqInfo(Which, Broken),
    Preempt,
    Reset,
    Reserve {
        items: Vec<(Which, u8)>,
        tokens: bool,
        short: bool,
    },
    Append {
        step: Which,
        layer: u8,
        broken: Broken,
    },
    Attend {
        step: Which,
        layer: u8,
        broken: Broken,
        scale: f32,
    },
    MarkAll(Which),
    View(Which),
    Group(Which, u8),
    Csr(Which, u8),
    Commit(Which),
    Cancel(Which),
    Probe(Prompt, Options),
    Pin(Which),
    Unpin(Which),
    Retention(Which, Vec<(u32, u32, u8)>),
    Time(u64),
    Epoch(u8),
    ClearCached,
    Poll,
    Resync,
    Stats(Broken),
    GroupStats(u8),
    Export {
        seq: Which,
        layer: u8,
        part: i32,
        from: u8,
        to: u8,
        len: u16,
    },
    Read {
        offset: u64,
        len: u8,
    },
    BlockOf(Which, u8, u8),
    Text(bool, u8),
    Check,
    SavePrefixes(bool),
    RestorePrefixes,
    SaveSequence(Which, Broken),
    RestoreSequence {
        key: Option<u8>,
        max_len: u8,
        broken: Broken,
    },
    Lend {
        layer: u8,
        part: u8,
    },
    DeleteView(u8),
    Describe {
        what: u8,
        index: u8,
        broken: Broken,
    },
    NamespaceNumbers(Options),
    LastError(Broken),
    OfThePlan {
        what: u8,
        index: u8,
        count: u8,
    },
    MarkOne(Which, u8),
    CancelStep,
    /// What only a GPU has, and a CPU refuses.
    OfAGpu {
        what: u8,
        step: Which,
        group: u8,
    },
    /// Behind which every handle is stale.
    Close(u8),
    ReleaseLater(Which),
    UnpinLater(Which),
    CancelLater(Which),
    CancelReservationLater(Which),
}

#[derive(Clone, Copy, Debug, Arbitrary)]
pub(super) enum Broken {
    No,
    Null,
    Size(u8),
}

impl Broken {
    /// A struct's size, as this call gives it.
    pub(super) fn size(self, size: usize) -> usize {
        match self {
            Self::Size(other) => usize::from(other),
            _ => size,
        }
    }
    pub(super) fn place<T>(self, place: &mut T) -> *mut T {
        if matches!(self, Self::Null) { null_mut() } else { place }
    }
}

/// Tokens: the start of one of a few texts.
#[derive(Clone, Copy, Debug, Arbitrary)]
pub(super) struct Prompt {
    text: u8,
    len: u8,
}

impl Prompt {
    pub(super) fn tokens(self) -> Vec<u32> {
        (0..u32::from(self.len) % 70)
            .map(|at| (at * 7 + u32::from(self.text) % 3 * (at / 20)) % 5)
            .collect()
    }
}

#[derive(Clone, Copy, Debug, Arbitrary)]
pub(super) struct Options {
    pub(super) given: bool,
    key: Option<u8>,
    max_len: u8,
    lookahead: u8,
    salt: Option<u8>,
    salt_from: u8,
}

impl Options {
    pub(super) fn build(self) -> kvpool_begin_options_t {
        let mut options: kvpool_begin_options_t = zeroed();
        options.size = size_of::<kvpool_begin_options_t>();
        options.key = self.key.unwrap_or(0).into();
        options.has_key = self.key.is_some().into();
        options.max_len = self.max_len.into();
        options.lookahead_tokens = u32::from(self.lookahead) % 8;
        if let Some(salt) = self.salt {
            options.name_space.salt.kind = KVPOOL_KEY_IS_NUMBER;
            options.name_space.salt.number = salt.into();
        }
        options.name_space.salt_from = self.salt_from.into();
        options
    }
}

#[derive(Debug, Arbitrary)]
pub(crate) struct Input {
    pub(super) mode: u8,
    pub(super) format: u8,
    pub(super) admission: u8,
    pub(super) scrub: u8,
    pub(super) windows: u8,
    /// What another thread does beside it, in one input of four.
    pub(super) two: u8,
    pub(super) beside: Vec<Op>,
    pub(super) ops: Vec<Op>,
}

impl Input {
    /// Inputs of no calls, of all shapes.
    pub(super) fn shapes() -> impl Iterator<Item = Self> {
        combinations([3, 5, 3, 3, 3]).map(|[mode, format, admission, scrub, windows]| Self {
            mode,
            format,
            admission,
            scrub,
            windows,
            two: 0,
            beside: Vec::new(),
            ops: Vec::new(),
        })
    }
}
