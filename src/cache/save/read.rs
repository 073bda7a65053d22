//! Reading: the whole file is checked before anything of the cache changes, and every record again
//! when it is used.

use std::ops::Range;
use std::path::Path;

use super::file::{Frame, Reader};
use super::format::{self, BlockHead, FRAME, Header, Holds, Shape, Span};
use super::{RestoreOptions, buffer, out_of_memory};
use crate::cache::prefix::NameWords;
use crate::cache::retention::Retention;
use crate::error::{CacheError, SaveError};
use crate::plan::{NO_BLOCK, Plan, SAVE_ENTRY_BYTES};
use crate::pool::MAX_PRIORITY;

/// A block of the file, as the table has it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    /// Where its record begins.
    pub(super) at: u64,
    pub(super) parent: u32,
    /// The position of its first token.
    pub(super) start: u32,
    pub(super) tokens: u32,
    pub(super) name: u32,
    /// The last block of this cache that holds nothing but tokens of its chain, up to its end.
    pub(super) block: u32,
    /// The last block of its chain up to which slots could take it, as far as layers without a
    /// window go.
    pub(super) usable: u32,
    /// Its tokens, from the first on, that are in this cache.
    pub(super) covered: u16,
    /// Whether others go on from it.
    pub(super) has_children: bool,
    /// Whether it cannot be taken, and nothing that goes on from it.
    pub(super) dropped: bool,
    /// Whether a chain that can be used up to here was looked at.
    pub(super) seen: bool,
}

const _: () = assert!(size_of::<Entry>() as u64 <= SAVE_ENTRY_BYTES);

/// What the file of a sequence says of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct SequenceHead {
    pub(super) len: u32,
    pub(super) high_water: u32,
    pub(super) limit: u32,
    pub(super) lookahead: u32,
    pub(super) known: u32,
    /// Whether others may share with it; without, `name` and `salt_from` mean nothing.
    pub(super) shares: bool,
    pub(super) salt_from: u32,
    /// Salt, adapter, model.
    pub(super) name: NameWords,
    pub(super) retentions: [Option<Retention>; 4],
    /// Where its record begins.
    pub(super) at: u64,
}

/// A file that was found to be whole.
#[derive(Debug)]
pub(super) struct Table {
    pub(super) header: Header,
    /// The first blocks, as many as there is room for.
    pub(super) entries: Vec<Entry>,
    /// The first namespaces.
    pub(super) names: Vec<NameWords>,
    /// All blocks and tokens of the file.
    pub(super) tokens: u64,
    pub(super) sequence: Option<SequenceHead>,
}

/// What there is room for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    pub(super) entries: usize,
    pub(super) names: usize,
}

/// A file, and the record that was read last.
#[derive(Debug)]
pub(super) struct Loader {
    reader: Reader,
    /// Frame and payload.
    record: Vec<u8>,
    shape: Shape,
    most: usize,
    max_seq_len: u32,
    /// Where that record begins; `u64::MAX` for none.
    loaded: u64,
}

impl Loader {
    /// Opens a file and reads its header.
    pub(super) fn open(
        plan: &Plan,
        path: &Path,
        holds: Holds,
        options: &RestoreOptions,
        epoch: Option<u64>,
    ) -> Result<(Self, Header, u64), SaveError> {
        let mut reader = Reader::open(path)?;
        let bytes = read_header(&mut reader)?;
        let header = format::read_header(plan, &bytes)?;
        if header.holds != holds {
            let (found, wanted) = (header.holds.name(), holds.name());
            return Err(SaveError::OtherKind { found, wanted });
        }
        if header.model != options.model {
            return Err(SaveError::OtherModel);
        }
        // A cache that shares nothing has no epochs.
        if let Some(expected) = epoch.filter(|epoch| *epoch != header.epoch) {
            return Err(SaveError::OtherEpoch { found: header.epoch, expected });
        }
        let shape = Shape::of(plan);
        let mut most = shape.max_record(header.block_tokens as usize);
        if holds == Holds::Sequence {
            most = most.max(format::SEQUENCE_FIXED + 4 * plan.limits.max_seq_len as usize);
        }
        // `Reader::payload` has the frame before a payload, and its checksum behind it.
        let record = buffer(FRAME + most + format::CHECKSUM)?;
        let first = bytes.len() as u64;
        let max_seq_len = plan.limits.max_seq_len;
        Ok((Self { reader, record, shape, most, max_seq_len, loaded: u64::MAX }, header, first))
    }

    /// Reads the whole file once.
    pub(super) fn verify(
        &mut self,
        header: Header,
        first: u64,
        room: Room,
    ) -> Result<Table, SaveError> {
        let mut table =
            Table { header, entries: Vec::new(), names: Vec::new(), tokens: 0, sequence: None };
        // What the file can have at most, or what there is room for.
        let least = (FRAME + format::BLOCK_FIXED + format::CHECKSUM) as u64;
        let can = usize::try_from(self.reader.len() / least).unwrap_or(usize::MAX);
        let entries = room.entries.min(can);
        let failed = |_| out_of_memory(entries as u64 * SAVE_ENTRY_BYTES);
        table.entries.try_reserve_exact(entries).map_err(failed)?;
        let names = room.names.min(can);
        let failed = |_| out_of_memory((names * format::NAME_BYTES) as u64);
        table.names.try_reserve_exact(names).map_err(failed)?;
        let (mut at, mut blocks, mut count) = (first, 0_u32, 0_u32);
        loop {
            let frame = self.load(at)?;
            match frame.kind {
                format::NAME => {
                    let right = frame.len == format::NAME_BYTES as u64;
                    let words = format::get_name(&self.record, FRAME).filter(|_| right);
                    let words = words.ok_or(frame.damaged("a namespace that cannot be"))?;
                    count += 1;
                    if table.names.len() < names {
                        table.names.push(words);
                    }
                }
                format::BLOCK => {
                    self.note_block(&frame, &mut table, entries, blocks, count)?;
                    blocks = blocks
                        .checked_add(1)
                        .filter(|n| *n != NO_BLOCK)
                        .ok_or(frame.damaged("too many blocks"))?;
                }
                format::SEQUENCE if header.holds == Holds::Sequence && table.sequence.is_none() => {
                    table.sequence = Some(self.sequence(&frame)?);
                }
                format::END => {
                    let payload = &self.record[FRAME..];
                    let counts = [blocks.into(), table.tokens, count.into()];
                    let same = (0..3).all(|n| format::get64(payload, 8 * n) == counts[n]);
                    if !same || payload.len() != format::END_BYTES {
                        return Err(frame.damaged("other counts than the file has"));
                    }
                    if frame.end() != self.reader.len() {
                        return Err(frame.damaged("bytes behind the end"));
                    }
                    return check_sequence(table, &frame);
                }
                _ => return Err(frame.damaged("an unknown kind of record")),
            }
            at = frame.end();
        }
    }

    /// Checks a block and puts it into the table, if there is room.
    fn note_block(
        &mut self,
        frame: &Frame,
        table: &mut Table,
        room: usize,
        number: u32,
        names: u32,
    ) -> Result<(), SaveError> {
        let block_tokens = table.header.block_tokens;
        let head = self.check_block(frame, block_tokens)?;
        table.tokens += u64::from(head.tokens);
        if head.name > names || head.parent().is_some_and(|parent| parent >= number) {
            return Err(frame.damaged("a block that goes on from none of the file"));
        }
        let mut start = 0;
        match head.parent() {
            // A chain begins in a namespace. (A sequence's is said elsewhere.)
            None if head.name == 0 && table.header.holds == Holds::Prefixes => {
                return Err(frame.damaged("a chain without a namespace"));
            }
            None => {}
            Some(parent) => {
                // What has no room is dropped, with all that goes on from it.
                let Some(parent) = table.entries.get_mut(parent as usize) else { return Ok(()) };
                if parent.tokens != block_tokens {
                    return Err(frame.damaged("a block that goes on from a part of one"));
                }
                parent.has_children = true;
                start = parent.start + parent.tokens;
                if start > i32::MAX.cast_unsigned() {
                    return Err(frame.damaged("a chain that is too long"));
                }
            }
        }
        if table.entries.len() < room {
            table.entries.push(Entry {
                at: frame.at,
                parent: head.parent,
                start,
                tokens: head.tokens,
                name: head.name,
                block: NO_BLOCK,
                usable: NO_BLOCK,
                covered: 0,
                has_children: false,
                dropped: false,
                seen: false,
            });
        }
        Ok(())
    }

    /// Reads a record, unless it is the one that was read last.
    pub(super) fn load(&mut self, at: u64) -> Result<Frame, SaveError> {
        if self.loaded == at {
            let len = (self.record.len() - FRAME) as u64;
            return Ok(Frame { at, kind: format::get32(&self.record, 0), len });
        }
        self.loaded = u64::MAX;
        let frame = self.reader.frame(at, &mut self.record)?;
        if frame.len > self.most as u64 {
            // Longer than any sequence, or no sequence: that is not read to the end to say so.
            let longest = format::SEQUENCE_FIXED as u64 + 4 * u64::from(i32::MAX.unsigned_abs());
            if frame.kind == format::SEQUENCE && frame.len <= longest {
                self.reader.skim(&frame, &mut self.record, self.most)?;
            }
            return Err(self.too_long(&frame, longest));
        }
        self.reader.payload(&frame, &mut self.record)?;
        self.loaded = at;
        Ok(frame)
    }

    /// The error for a record that is longer than there is room for, and of a sequence only if it
    /// is whole.
    fn too_long(&self, frame: &Frame, longest: u64) -> SaveError {
        if frame.kind != format::SEQUENCE || frame.len > longest {
            return frame.damaged("an impossible length");
        }
        let wanted = frame.len.saturating_sub(format::SEQUENCE_FIXED as u64) / 4;
        let (limit, knob) = (self.max_seq_len, "limits.max_seq_len");
        CacheError::SequenceTooLong { wanted, limit, knob }.into()
    }

    /// Reads the record of a block.
    pub(super) fn block(
        &mut self,
        entry: &Entry,
        block_tokens: u32,
    ) -> Result<Block<'_>, SaveError> {
        let frame = self.load(entry.at)?;
        let head = self.check_block(&frame, block_tokens)?;
        if frame.kind != format::BLOCK || head.tokens != entry.tokens || head.parent != entry.parent
        {
            return Err(frame.damaged("another block than before"));
        }
        Ok(Block { payload: &self.record[FRAME..], shape: self.shape, head })
    }

    /// Reads the ids and spans of a block alone, as the file has them now: to decide by, not to
    /// keep. K and V of long chains are many times as much.
    pub(super) fn head(&mut self, entry: &Entry) -> Result<Block<'_>, SaveError> {
        let heads = format::BLOCK_FIXED + self.shape.head_bytes(entry.tokens as usize);
        if self.loaded != entry.at {
            self.loaded = u64::MAX;
            let frame = self.reader.frame(entry.at, &mut self.record)?;
            self.record.resize(FRAME + heads, 0);
            if frame.len < heads as u64 {
                return Err(frame.damaged("another block than before"));
            }
            self.reader.read(&mut self.record[FRAME..], "a record")?;
        }
        let payload = &self.record[FRAME..];
        let head = BlockHead::get(payload);
        if head.tokens != entry.tokens {
            return Err(SaveError::Damaged { at: entry.at, problem: "another block than before" });
        }
        Ok(Block { payload, shape: self.shape, head })
    }

    /// Whether the lengths of a block that is loaded agree.
    fn check_block(&self, frame: &Frame, block_tokens: u32) -> Result<BlockHead, SaveError> {
        let payload = &self.record[FRAME..];
        let head = BlockHead::get(payload);
        let tokens = head.tokens as usize;
        let heads = format::BLOCK_FIXED + self.shape.head_bytes(tokens);
        if tokens == 0
            || head.tokens > block_tokens
            || head.class > MAX_PRIORITY
            || payload.len() < heads
        {
            return Err(frame.damaged("numbers of a block that cannot be"));
        }
        let block = Block { payload, shape: self.shape, head };
        let mut bytes = heads;
        for layer in 0..self.shape.layers {
            let span = block.span(layer);
            if span.head >= span.from && span != Span::WHOLE || u32::from(span.from) > head.tokens {
                return Err(frame.damaged("tokens of a layer that cannot be"));
            }
            if !span.is_empty(head.tokens) {
                bytes += self.shape.layer_bytes(tokens);
            }
        }
        if payload.len() != bytes {
            return Err(frame.damaged("another length than its layers have"));
        }
        Ok(head)
    }

    /// Reads the record of a sequence.
    fn sequence(&self, frame: &Frame) -> Result<SequenceHead, SaveError> {
        let payload = &self.record[FRAME..];
        let bad = |problem| Err(frame.damaged(problem));
        if payload.len() < format::SEQUENCE_FIXED {
            return bad("a sequence that is too short");
        }
        let number = |n: usize| format::get32(payload, 4 * n);
        let known = number(4);
        let Some(name) = format::get_name(payload, 32) else {
            return bad("a namespace that cannot be");
        };
        if payload.len() != format::SEQUENCE_FIXED + 4 * known as usize || number(5) > 1 {
            return bad("another number of tokens than it has");
        }
        let mut retentions = [None; 4];
        for (n, range) in retentions.iter_mut().enumerate() {
            let at = 32 + format::NAME_BYTES + 24 * n;
            let [from, to, priority] = [0, 4, 16].map(|by| format::get32(payload, at + by));
            let duration = format::get64(payload, at + 8);
            let priority = u8::try_from(priority).ok().filter(|number| *number <= MAX_PRIORITY);
            let Some(priority) = priority else { return bad("a priority above 100") };
            let duration_ms = Some(duration).filter(|duration| *duration != u64::MAX);
            *range = (from < to).then_some(Retention { from, to, priority, duration_ms });
        }
        let head = SequenceHead {
            len: number(0),
            high_water: number(1),
            limit: number(2),
            lookahead: number(3),
            known,
            shares: number(5) == 1,
            salt_from: number(6),
            name,
            retentions,
            at: frame.at,
        };
        if head.len > head.high_water
            || head.high_water > i32::MAX.cast_unsigned()
            || head.limit < head.len
        {
            return bad("lengths that cannot be");
        }
        Ok(head)
    }

    /// The token ids of a sequence.
    pub(super) fn sequence_ids(
        &mut self,
        head: &SequenceHead,
    ) -> Result<impl Iterator<Item = u32> + '_, SaveError> {
        let frame = self.load(head.at)?;
        if frame.kind != format::SEQUENCE || self.sequence(&frame)?.known != head.known {
            return Err(frame.damaged("another sequence than before"));
        }
        let ids = &self.record[FRAME + format::SEQUENCE_FIXED..];
        Ok(ids.as_chunks::<4>().0.iter().map(|id| u32::from_le_bytes(*id)))
    }
}

/// Whether a file that has ended is of one piece.
fn check_sequence(table: Table, frame: &Frame) -> Result<Table, SaveError> {
    if table.header.holds != Holds::Sequence {
        return Ok(table);
    }
    let chain = table.entries.iter().enumerate().all(|(at, entry)| {
        let before = at.checked_sub(1).map_or(NO_BLOCK, |at| u32::try_from(at).unwrap_or(NO_BLOCK));
        entry.parent == before
    });
    match &table.sequence {
        Some(head) if chain && u64::from(head.len) == table.tokens => Ok(table),
        _ => Err(frame.damaged("blocks that are not the sequence's")),
    }
}

/// Reads the header's bytes; its checksum is right.
fn read_header(reader: &mut Reader) -> Result<Vec<u8>, SaveError> {
    let mut bytes = buffer(format::FIXED)?;
    bytes.resize(16, 0);
    reader.read(&mut bytes, "the header")?;
    if bytes[..8] != format::MAGIC {
        return Err(SaveError::NotASave);
    }
    let found = format::get32(&bytes, 8);
    if found != format::VERSION {
        return Err(SaveError::OtherVersion { found, supported: format::VERSION });
    }
    let len = format::get32(&bytes, 12) as usize;
    let bad = SaveError::Damaged { at: 0, problem: "an impossible length of the header" };
    if !(format::FIXED + format::CHECKSUM..=format::MAX_HEADER).contains(&len) {
        return Err(bad);
    }
    if len as u64 > reader.len() {
        return Err(SaveError::Truncated { at: reader.len(), part: "the header" });
    }
    bytes.try_reserve_exact(len).map_err(|_| out_of_memory(len as u64))?;
    bytes.resize(len, 0);
    reader.read(&mut bytes[16..], "the header")?;
    let end = len - format::CHECKSUM;
    if format::checksum(&bytes[..end]) != format::get64(&bytes, end) {
        return Err(SaveError::Damaged { at: 0, problem: "a wrong checksum of the header" });
    }
    Ok(bytes)
}

/// The record of a block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block<'a> {
    payload: &'a [u8],
    shape: Shape,
    pub(super) head: BlockHead,
}

impl<'a> Block<'a> {
    /// The id of a token.
    pub(super) fn id(&self, token: u32) -> u32 {
        format::get32(self.payload, format::BLOCK_FIXED + 4 * token as usize)
    }

    /// Which of its tokens a layer has.
    pub(super) fn span(&self, layer: usize) -> Span {
        let at = format::BLOCK_FIXED + 4 * (self.head.tokens as usize + layer);
        let both = format::get32(self.payload, at);
        let half = |bits: u32| u16::try_from(bits & 0xFFFF).unwrap_or(0);
        Span { head: half(both), from: half(both >> 16) }
    }

    /// K, V and scales of each layer that has any of its tokens.
    pub(super) fn layers(&self) -> impl Iterator<Item = (usize, Span, &'a [u8])> {
        let (block, tokens) = (*self, self.head.tokens as usize);
        let bytes = self.shape.layer_bytes(tokens);
        let mut at = format::BLOCK_FIXED + self.shape.head_bytes(tokens);
        (0..self.shape.layers).filter_map(move |layer| {
            let span = block.span(layer);
            if span.is_empty(block.head.tokens) {
                return None;
            }
            let range: Range<usize> = at..at + bytes;
            at = range.end;
            Some((layer, span, &block.payload[range]))
        })
    }

    pub(super) const fn shape(&self) -> Shape {
        self.shape
    }
}
