//! A real model through the cache. Its files are not part of the repository; where they are not at
//! hand, a test says so and does nothing.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
#![allow(clippy::cast_possible_truncation, reason = "small numbers of tests")]
#![allow(clippy::print_stderr, reason = "a skipped test is printed")]

mod files;
mod gguf;
mod run;
mod stories;

use std::path::{Path, PathBuf};

use kvpool::cache::{Cache, SeqHandle};
use kvpool::config::{self, Source};
use kvpool::job::model::{self, Engine, Model, StepInput};
use kvpool::plan::Plan;

/// A file that may be at hand: below `../shared/data`, or what `scripts/get-models.sh` has fetched.
pub(crate) fn at_hand(path: &str) -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let found = [root.join("../shared/data").join(path), root.join(path)];
    let found = found.into_iter().find(|path| path.exists());
    if found.is_none() {
        eprintln!("SKIPPED: {path} is not at hand");
    }
    found
}

/// A configuration of a model file, in a few words.
pub(crate) fn source(model: &str, rest: &str) -> Source {
    let text = format!("model = {model}\n{rest}");
    config::parse(&text, Path::new("test.toml"), &[]).expect("a good configuration")
}

/// A cache of a configuration, and an engine for it.
pub(crate) fn open<'m>(model: &'m Model, source: &Source) -> (Cache, Engine<'m>) {
    let config = model::config_of(source);
    let plan = Plan::new(&config, &source.geometry).expect("a plan");
    let engine = Engine::new(model, &plan, &config.device).expect("an engine");
    let cache = Cache::open_on_cpu(plan, &config.device, None).expect("opens");
    (cache, engine)
}

/// Gives a sequence tokens in one step, and the scores behind the last one.
pub(crate) fn feed(
    engine: &mut Engine<'_>,
    cache: &mut Cache,
    seq: SeqHandle,
    tokens: &[u32],
) -> Vec<f32> {
    let count = u32::try_from(tokens.len()).expect("few");
    let input = StepInput { seqs: &[(seq, count)], tokens, wanted: &[tokens.len() - 1] };
    engine.step(cache, input).expect("computes").to_vec()
}
