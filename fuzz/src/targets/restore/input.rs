//! What an input is: a save, what is changed in it, and the caches on both sides. The corpora are
//! these types as bytes: another order of fields or variants would make another input of every file
//! in them.

use arbitrary::Arbitrary;

#[derive(Debug, Arbitrary)]
pub(crate) struct Input {
    pub(super) model: u8,
    pub(super) old: Shape,
    pub(super) new: Shape,
    /// What the cache has that the file is for.
    pub(super) before: u8,
    pub(super) sequence: bool,
    pub(super) file: File,
    pub(super) edits: Vec<Edit>,
    /// The file ends here.
    pub(super) cut: Option<u16>,
    pub(super) key: Option<u8>,
    pub(super) max_len: Option<u8>,
}

/// What may differ between the cache of a save and that of its restore.
#[derive(Clone, Copy, Debug, Default, Arbitrary)]
pub(super) struct Shape {
    pub(super) mode: u8,
    pub(super) per_block: u8,
    pub(super) longest: u8,
    pub(super) blocks: u8,
    pub(super) scrub: u8,
}

#[derive(Debug, Arbitrary)]
pub(super) enum File {
    /// What the old cache writes, having run so many texts.
    Saved(u8),
    Records(Vec<Record>),
}

#[derive(Clone, Copy, Debug, Arbitrary)]
pub(super) struct Edit {
    /// Of which record, and where in it.
    pub(super) record: u8,
    pub(super) at: u8,
    pub(super) byte: u8,
    /// Its checksum stays wrong.
    pub(super) wrong: bool,
}

#[derive(Clone, Copy, Debug, Arbitrary)]
pub(super) enum Record {
    Name(Name),
    Block { parent: u8, name: u8, tokens: u8, text: u8, class: u8, limit: u16, spans: [Span; 3] },
    Sequence(Sequence),
}

/// Salt, adapter, model.
#[derive(Clone, Copy, Debug, Arbitrary)]
pub(super) struct Name(pub(super) [u8; 3]);

#[derive(Clone, Copy, Debug, Arbitrary)]
pub(super) enum Span {
    Whole,
    None,
    Parts(u8, u8),
}

#[derive(Clone, Copy, Debug, Arbitrary)]
pub(super) struct Sequence {
    pub(super) len: u8,
    pub(super) longer: u8,
    pub(super) limit: u8,
    pub(super) lookahead: u8,
    pub(super) known: u8,
    pub(super) text: u8,
    pub(super) shares: bool,
    pub(super) salt_from: u8,
    pub(super) name: Name,
    /// From, to, priority, time limit.
    pub(super) retentions: [(u8, u8, u8, u8); 4],
}
