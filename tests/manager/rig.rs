//! A cache with the fake engine beside it, for tests that say step by step what happens.

use kvpool::cache::{BeginOptions, Cache, SeqHandle};
use kvpool::device::TensorRef;
use kvpool::error::CacheError;
use kvpool::plan::Kv;
use kvpool::units::{GroupIdx, LayerIdx};

use super::device::open_late;
use super::text::{Ns, Stored, Text, check_contents, vector};
use crate::common::Spec;

pub(super) struct Rig {
    pub(super) cache: Cache,
    pub(super) spec: Spec,
    pub(super) epoch: u64,
    pub(super) stored: Option<Stored>,
}

/// A sequence and its tokens.
#[derive(Clone)]
pub(super) struct Line {
    pub(super) seq: SeqHandle,
    pub(super) text: Text,
    pub(super) cached_len: u32,
}

/// A pool in which a sequence of 64 tokens takes eight blocks.
pub(super) fn paged(blocks: u64) -> Spec {
    Spec {
        prefix_reuse: true,
        capacity: kvpool::config::Capacity::Blocks(blocks),
        max_seqs: 8,
        ..Spec::default()
    }
}

/// Options with a length alone.
pub(super) fn up_to(max_len: u32) -> BeginOptions {
    BeginOptions { max_len: Some(max_len), ..BeginOptions::default() }
}

/// Tokens `from..to`, each one another.
pub(super) fn tokens(from: u32, to: u32) -> Vec<u32> {
    (from..to).collect()
}

impl Rig {
    pub(super) fn new(spec: &Spec) -> Self {
        Self::on(spec, open_late(spec, 8))
    }

    pub(super) fn on(spec: &Spec, cache: Cache) -> Self {
        Self { cache, spec: spec.clone(), epoch: 0, stored: None }
    }

    pub(super) fn begin(
        &mut self,
        prompt: &[u32],
        ns: Ns,
        options: BeginOptions,
    ) -> Result<Line, CacheError> {
        let options = BeginOptions { namespace: ns.options(), ..options };
        let begun = self.cache.begin(prompt, options)?;
        self.cache.check_invariants().expect("invariants");
        let cached = &prompt[..begun.cached_len as usize];
        let text = Text::of(ns, self.epoch, self.spec.tokens_per_block, cached);
        let line = Line { seq: begun.sequence, text, cached_len: begun.cached_len };
        self.check(&line);
        Ok(line)
    }

    /// Appends tokens to some sequences, in one step.
    pub(super) fn feed(&mut self, lines: &mut [(&mut Line, &[u32])]) -> Result<(), CacheError> {
        let geometry = self.cache.plan().geometry.clone();
        let row = (geometry.num_kv_heads * geometry.head_dim) as usize;
        let batch: Vec<_> = lines.iter().map(|(line, new)| (line.seq, new.len() as u32)).collect();
        let ids: Vec<u32> = lines.iter().flat_map(|(_, new)| new.iter().copied()).collect();
        let mut hashes = Vec::new();
        let mut texts = Vec::new();
        for (line, new) in &*lines {
            let mut text = line.text.clone();
            new.iter().for_each(|token| text.push((*token).into()));
            hashes.extend_from_slice(&text.hashes[line.text.hashes.len()..]);
            texts.push(text);
        }
        let mut step = self.cache.reserve_tokens(&batch, &ids)?;
        for layer in 0..geometry.num_layers {
            let tensor = |kv| {
                let mut tensor = vec![0.0; hashes.len() * row];
                for (hash, out) in hashes.iter().zip(tensor.chunks_mut(row)) {
                    vector(*hash, layer, kv, out);
                }
                tensor
            };
            let (k, v) = (tensor(Kv::K), tensor(Kv::V));
            step.append(LayerIdx(layer), TensorRef::F32(&k), TensorRef::F32(&v))?;
        }
        step.commit()?;
        self.cache.check_invariants().expect("invariants");
        for ((line, _), text) in lines.iter_mut().zip(texts) {
            line.text = text;
        }
        lines.iter().for_each(|(line, _)| self.check(line));
        Ok(())
    }

    /// Computes what is left of a prompt.
    pub(super) fn prefill(&mut self, line: &mut Line, prompt: &[u32]) {
        let most = self.cache.plan().limits.max_step_tokens as usize;
        let from = line.text.tokens.len();
        for chunk in prompt[from..].chunks(most) {
            self.feed(&mut [(line, chunk)]).expect("promised");
        }
    }

    /// Begins a sequence that comes to its prompt and no further, and computes it.
    pub(super) fn run(&mut self, prompt: &[u32]) -> Line {
        self.run_in(prompt, Ns::default())
    }

    pub(super) fn run_in(&mut self, prompt: &[u32], ns: Ns) -> Line {
        let mut line = self.begin(prompt, ns, up_to(prompt.len() as u32)).expect("admitted");
        self.prefill(&mut line, prompt);
        line
    }

    /// The same, and releases it: what is shareable of it is cached.
    pub(super) fn pass(&mut self, prompt: &[u32]) -> u32 {
        let line = self.run(prompt);
        self.release(&line);
        line.cached_len
    }

    pub(super) fn release(&mut self, line: &Line) {
        self.cache.release(line.seq).expect("alive");
        self.cache.check_invariants().expect("invariants");
    }

    pub(super) fn fork(&mut self, line: &Line) -> Line {
        let seq = self.cache.fork(line.seq).expect("admitted");
        self.cache.check_invariants().expect("invariants");
        let line = Line { seq, ..line.clone() };
        self.check(&line);
        line
    }

    pub(super) fn truncate(&mut self, line: &mut Line, len: u32) {
        self.cache.truncate(line.seq, len).expect("held");
        self.cache.check_invariants().expect("invariants");
        line.text.truncate(len);
        self.check(line);
    }

    pub(super) fn check(&self, line: &Line) {
        check_contents(&self.cache, line.seq, &line.text, self.stored, &mut Vec::new());
    }

    /// How many tokens of a prompt a sequence of the plain namespace would find.
    pub(super) fn found(&self, prompt: &[u32]) -> u32 {
        self.cache.probe(prompt, &Ns::default().options()).cached_len
    }

    /// Whole blocks of `prompt` that are cached, the last token's too.
    pub(super) fn blocks_found(&self, prompt: &[u32]) -> u32 {
        let longer = [prompt, &[u32::MAX]].concat();
        self.cache.probe(&longer, &Ns::default().options()).full_blocks
    }

    /// Blocks of group 0: free, active, cached, promised.
    pub(super) fn blocks(&self) -> (u32, u32, u32, u32) {
        let blocks = self.cache.group_stats(GroupIdx(0)).expect("exists").blocks;
        (blocks.free, blocks.active, blocks.cached, blocks.promised)
    }
}
