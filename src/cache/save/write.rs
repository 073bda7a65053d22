//! Writing: blocks with their K and V, in the order in which they are wanted back.

use std::path::Path;

use super::file::Writer;
use super::format::{self, BlockHead, Header, Run, Shape, Span};
use super::{SaveOptions, Saved, buffer};
use crate::cache::Cache;
use crate::cache::prefix::NameWords;
use crate::error::SaveError;
use crate::units::Bytes;

/// Where the tokens of a block lie in one group.
#[derive(Clone, Copy, Debug)]
pub(super) enum Source {
    /// A block of exactly these tokens.
    Block(u32),
    /// The row of a slot, by position.
    Row(u32),
}

/// A save that is being written.
#[derive(Debug)]
pub(super) struct Saver<'a> {
    pub(super) cache: &'a Cache,
    writer: Writer,
    record: Vec<u8>,
    shape: Shape,
    /// Records of blocks so far.
    pub(super) blocks: u32,
    tokens: u64,
    pub(super) names: u32,
}

impl<'a> Saver<'a> {
    /// Begins a file. `most`: bytes of the largest record that is no block's.
    pub(super) fn create(
        cache: &'a Cache,
        path: &Path,
        options: &SaveOptions,
        holds: format::Holds,
        most: usize,
    ) -> Result<Self, SaveError> {
        let plan = &cache.plan;
        let shape = Shape::of(plan);
        let block_tokens = plan.tokens_per_block;
        let record = buffer(shape.max_record(block_tokens as usize).max(most))?;
        let mut writer = Writer::create(path)?;
        writer.write(&format::header(
            plan,
            &Header {
                holds,
                block_tokens,
                unsalted_only: options.unsalted_only,
                epoch: cache.reuse.as_ref().map_or(0, |reuse| reuse.epoch),
                model: options.model,
            },
        ))?;
        Ok(Self { cache, writer, record, shape, blocks: 0, tokens: 0, names: 0 })
    }

    /// Writes a record that is no block's.
    pub(super) fn put(
        &mut self,
        kind: u32,
        payload: impl FnOnce(&mut Vec<u8>),
    ) -> Result<(), SaveError> {
        Writer::frame(&mut self.record, kind);
        payload(&mut self.record);
        self.writer.seal(&mut self.record)
    }

    /// Writes a namespace, and gives the number that blocks know it by.
    pub(super) fn name(&mut self, words: &NameWords) -> Result<u32, SaveError> {
        self.put(format::NAME, |out| format::put_name(out, words))?;
        self.names += 1;
        Ok(self.names)
    }

    /// Writes a block of the tokens from `start` on, and gives its number. `source` says of each
    /// group where they lie, and which of them are there.
    pub(super) fn block(
        &mut self,
        head: &BlockHead,
        start: u32,
        ids: &[u32],
        source: &dyn Fn(usize) -> (Source, Span),
    ) -> Result<u32, SaveError> {
        let Self { cache, record, shape, .. } = self;
        let (plan, tokens) = (&cache.plan, head.tokens);
        Writer::frame(record, format::BLOCK);
        head.put(record);
        for token in 0..tokens as usize {
            format::put32(record, ids.get(token).copied().unwrap_or(0));
        }
        for place in &plan.layers {
            let (_, span) = source(place.group.index());
            format::put32(record, u32::from(span.head) | u32::from(span.from) << 16);
        }
        for place in &plan.layers {
            let group = place.group.index();
            let (source, span) = source(group);
            if span.is_empty(tokens) {
                continue;
            }
            let at = record.len();
            record.resize(at + shape.layer_bytes(tokens as usize), 0);
            let layout = &plan.groups[group].layout;
            let bytes = &mut record[at..];
            for part in span.parts(&(0..tokens)) {
                cache.each_run(group, source, start, part, &mut |run| {
                    shape.each_piece(layout, place.index, run, tokens, &mut |offset, range| {
                        Ok(cache.pool.device.read(offset, &mut bytes[range])?)
                    })
                })?;
            }
        }
        self.writer.seal(&mut self.record)?;
        self.blocks += 1;
        self.tokens += u64::from(tokens);
        Ok(self.blocks - 1)
    }

    /// Ends the file and puts it in its place.
    pub(super) fn finish(mut self) -> Result<Saved, SaveError> {
        let (blocks, tokens, names) = (self.blocks, self.tokens, self.names);
        self.put(format::END, |out| {
            format::put64(out, blocks.into());
            format::put64(out, tokens);
            format::put64(out, names.into());
        })?;
        let bytes = Bytes(self.writer.finish()?);
        Ok(Saved { bytes, blocks: blocks.into(), tokens })
    }
}

impl Cache {
    /// Calls `each` with the runs of memory that hold some tokens of a block that begins at
    /// position `start`.
    pub(super) fn each_run(
        &self,
        group: usize,
        source: Source,
        start: u32,
        part: std::ops::Range<u32>,
        each: &mut dyn FnMut(Run) -> Result<(), SaveError>,
    ) -> Result<(), SaveError> {
        if part.is_empty() {
            return Ok(());
        }
        match source {
            Source::Block(unit) => {
                let (token, len) = (part.start, part.end - part.start);
                each(Run { unit, unit_token: token, token, len })
            }
            Source::Row(slot) => {
                let view = self.view(group, slot);
                let (mut position, end) = (start + part.start, start + part.end);
                while position < end {
                    let len = view.run(position, end);
                    let (unit, unit_token) = view.place(position);
                    each(Run { unit, unit_token, token: position - start, len })?;
                    position += len;
                }
                Ok(())
            }
        }
    }
}
