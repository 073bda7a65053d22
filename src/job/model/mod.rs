//! Real models through the cache: an engine, as a user of this library would write one.
//!
//! All K and V lie in a [`Cache`](crate::cache::Cache) and pass through its public verbs. What the
//! engine does on its own is multiply, norm, rotate queries and sample.
//!
//! - [`Model`]: a file's weights and its [`tokenizer`].
//! - [`Engine`]: one step of a model. Its file is what `docs/bring-your-own-engine.md` walks
//!   through.
//! - [`sample`]: from scores to a token.
//! - [`batch`]: many requests at once: continuous batching, shared prefixes, several answers to one
//!   prompt, stops.
//! - [`completions`]: the job of `[generate]`, over the variants of a file.
//! - [`jsonl`]: prompts from a file, completions to a file that a later run can go on with.
//! - [`quality`]: what a cache format costs in perplexity.
//! - [`speed`]: how fast a model reads and writes.

mod answer;
pub mod batch;
pub mod completions;
mod engine;
pub mod jsonl;
pub mod quality;
pub mod sample;
pub mod speed;
pub mod tokenizer;
mod weights;

pub use engine::{Engine, StepInput, Timing};
pub use weights::Model;

use crate::config::{Config, Source};
use crate::error::ModelError;

/// Loads the model of a configuration.
///
/// # Errors
/// [`ModelError::NoModelFile`], or what is wrong with the file.
pub fn load(source: &Source) -> Result<Model, ModelError> {
    let Some(file) = &source.model_file else {
        return Err(ModelError::NoModelFile { path: source.path.clone() });
    };
    let folder = source.path.parent().unwrap_or(std::path::Path::new(""));
    let tokenizer = source.config.model.tokenizer.as_ref().map(|path| folder.join(path));
    Model::load(file.clone(), tokenizer.as_deref())
}

/// The configuration of a source, with K rotated as the model file says even where a workload kept
/// it from being filled in.
#[must_use]
pub fn config_of(source: &Source) -> Config {
    rotated_as(&source.config, source)
}

/// Whether the engine is to turn K and V before they are stored ([`Engine::spread`]).
fn spreads(config: &Config) -> bool {
    config.generate.as_ref().is_some_and(|generate| generate.spread)
}

/// The same for a variant's configuration. Where the engine spreads K, it rotates it too.
fn rotated_as(config: &Config, source: &Source) -> Config {
    let mut config = config.clone();
    config.workload = None;
    if spreads(&config) {
        config.rope = None;
    } else if let Some(file) = &source.model_file {
        config.rope = Some(file.rope.clone());
    }
    config
}
