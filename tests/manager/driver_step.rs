//! The driver's steps: tokens with known ids and without, whole, cancelled, leaked.

use kvpool::cache::{Cache, SeqHandle, Step};
use kvpool::device::TensorRef;
use kvpool::error::CacheError;
use kvpool::plan::Kv;
use kvpool::units::LayerIdx;

use super::driver::Driver;
use super::text::{Text, UNKNOWN, vector};

/// A step that was thought out and not called yet.
struct Planned {
    /// Index into the live sequences, and the sequence's text with the step's tokens.
    texts: Vec<(usize, Text)>,
    batch: Vec<(SeqHandle, u32)>,
    /// The ids, when they are given to the cache.
    tokens: Option<Vec<u32>>,
    /// Whether nothing about the step is against the rules.
    valid: bool,
}

impl Driver {
    /// Some of the live sequences, each with some tokens.
    fn plan_step(&mut self) -> Planned {
        let given = !self.chance(6);
        let limits = self.cache.plan().limits.clone();
        let mut planned = Planned {
            texts: Vec::new(),
            batch: Vec::new(),
            tokens: given.then(Vec::new),
            valid: true,
        };
        for at in 0..self.live.len() {
            if self.rng.below(5) < 2 {
                continue;
            }
            let live = self.live[at].clone();
            let room = live.limit.saturating_sub(live.text.len());
            let mut n = 1 + self.rng.below(u64::from(limits.max_step_tokens)) as u32;
            if !self.chance(8) {
                n = n.min(room);
            }
            if n == 0 {
                continue;
            }
            planned.valid &= n <= room && n <= limits.max_step_tokens;
            let mut text = live.text.clone();
            for position in live.text.len() as usize..(live.text.len() + n) as usize {
                let announced = live.prompt.get(position).copied();
                let token = match announced {
                    Some(token) if !given || !self.chance(256) => u64::from(token),
                    _ if given => self.next_token(position).into(),
                    _ => {
                        self.unknown += 1;
                        UNKNOWN + self.unknown
                    }
                };
                planned.valid &= announced.is_none_or(|announced| u64::from(announced) == token);
                if let Some(tokens) = &mut planned.tokens {
                    tokens.push(token as u32);
                }
                text.push(token);
            }
            planned.batch.push((live.seq, n));
            planned.texts.push((at, text));
        }
        let total: u32 = planned.batch.iter().map(|(_, n)| n).sum();
        planned.valid &= total <= limits.max_batch_tokens;
        planned
    }

    /// A whole step. Under guaranteed admission one that keeps to the rules succeeds.
    pub(super) fn step(&mut self) -> Result<(), CacheError> {
        let planned = self.plan_step();
        let promised = self.promised();
        let contents = self.checks.contents;
        let mut tensors = std::mem::take(&mut self.tensors);
        let before: Vec<u32> =
            planned.texts.iter().map(|(at, _)| self.live[*at].text.len()).collect();
        let result = self.call(|cache| {
            let step = reserve(cache, &planned)?;
            if contents { write(step, &planned, &before, &mut tensors) } else { skip(step) }
        });
        self.tensors = tensors;
        if let Err(error) = result {
            assert!(!(planned.valid && promised), "what was promised is not there: {error}");
            return Err(error);
        }
        for (at, text) in planned.texts {
            let live = &mut self.live[at];
            for len in live.text.len()..text.len() {
                self.committed.insert(text.hash_before(len as usize + 1));
                let position = len as usize;
                if live.prompt.get(position).is_some_and(|t| u64::from(*t) != text.tokens[position])
                {
                    live.prompt.truncate(position);
                }
            }
            live.high_water = live.high_water.max(text.len());
            live.text = text;
            self.check_one(at);
        }
        Ok(())
    }

    /// A step that comes to nothing: cancelled half way with junk written, or leaked. What it took
    /// goes back; only what it evicted is gone.
    pub(super) fn cancel_step(&mut self) -> Result<(), CacheError> {
        let planned = self.plan_step();
        let gone = |cache: &Cache| cache.stats().evictions + cache.stats().blocks_withdrawn;
        let before = (self.cache.state_digest(), gone(&self.cache));
        let leak = self.chance(4);
        let contents = self.checks.contents;
        let geometry = self.cache.plan().geometry.clone();
        self.call(|cache| {
            let mut step = reserve(cache, &planned)?;
            let row = (geometry.num_kv_heads * geometry.head_dim) as usize;
            let junk = vec![f32::NAN; step.num_tokens() * row];
            if contents {
                step.append(LayerIdx(0), (&junk[..]).into(), (&junk[..]).into())?;
            }
            if leak {
                std::mem::forget(step);
                // The next verb undoes it.
                cache.reserve(&[]).map(Step::cancel)?;
            }
            Ok::<_, CacheError>(())
        })?;
        if gone(&self.cache) == before.1 && !leak {
            assert_eq!(self.cache.state_digest(), before.0, "a cancelled step left a trace");
        }
        for at in 0..self.live.len() {
            self.check_one(at);
        }
        Ok(())
    }
}

fn reserve<'a>(cache: &'a mut Cache, planned: &Planned) -> Result<Step<'a>, CacheError> {
    match &planned.tokens {
        Some(tokens) => cache.reserve_tokens(&planned.batch, tokens),
        None => cache.reserve(&planned.batch),
    }
}

/// Writes what belongs to the step's tokens in every layer, and commits.
fn write(
    mut step: Step<'_>,
    planned: &Planned,
    before: &[u32],
    tensors: &mut [Vec<f32>; 2],
) -> Result<(), CacheError> {
    let geometry = &step.plan().geometry;
    let row = (geometry.num_kv_heads * geometry.head_dim) as usize;
    let layers = geometry.num_layers;
    let positions = step.positions().iter().copied();
    let want = planned.texts.iter().zip(before).flat_map(|((_, text), from)| *from..text.len());
    assert!(positions.eq(want), "rows are in the order of the reservation");
    for layer in 0..layers {
        for (kv, tensor) in [Kv::K, Kv::V].into_iter().zip(&mut *tensors) {
            tensor.resize(step.num_tokens() * row, 0.0);
            let hashes = planned.texts.iter().zip(before);
            let hashes = hashes.flat_map(|((_, text), from)| &text.hashes[*from as usize..]);
            for (hash, out) in hashes.zip(tensor.chunks_mut(row)) {
                vector(*hash, layer, kv, out);
            }
        }
        let [k, v] = &*tensors;
        step.append(LayerIdx(layer), TensorRef::F32(k), TensorRef::F32(v))?;
    }
    step.commit()
}

/// Commits without writing anything.
pub(super) fn skip(mut step: Step<'_>) -> Result<(), CacheError> {
    for layer in 0..step.plan().geometry.num_layers {
        step.mark_appended(LayerIdx(layer))?;
    }
    step.commit()
}
