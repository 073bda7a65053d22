//! `[generate]`: prompts that a model completes.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::Config;
use super::complaint::Complaint;

/// The most answers to one prompt.
pub const MAX_ANSWERS: u32 = 1024;

/// `[generate]`. What a line of the file of prompts says itself goes before what stands here.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GenerateConfig {
    /// What completes the prompts.
    pub engine: GenerateEngine,
    /// The file of prompts, a JSON object a line. A relative path starts from the current
    /// directory, since prompts usually do not lie beside the configuration.
    pub prompts: PathBuf,
    /// Answers to a prompt.
    #[serde(default = "one")]
    pub answers: u32,
    /// Tokens of an answer at most.
    #[serde(default = "default_max_tokens")]
    pub max_tokens: u32,
    /// Divides the scores of the tokens; 0 always takes the best.
    #[serde(default)]
    pub temperature: f64,
    /// Only the most likely tokens are considered, until their shares come to this.
    #[serde(default = "whole")]
    pub top_p: f64,
    /// Where the chance comes from.
    #[serde(default)]
    pub seed: u64,
    /// Texts that end an answer.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stop: Vec<String>,
    /// Whether an answer goes on behind the tokens that end one.
    #[serde(default)]
    pub ignore_end: bool,
    /// Whether Q, K and V are turned by a Walsh-Hadamard matrix before they are stored, and outputs
    /// back: INT8 then loses less. The engine rotates K by its position itself, in front of that.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub spread: bool,
}

/// What completes prompts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GenerateEngine {
    /// The model of `model.file`, on the CPU (feature `model`).
    Model,
}

fn one() -> u32 {
    1
}

fn default_max_tokens() -> u32 {
    256
}

fn whole() -> f64 {
    1.0
}

/// Refuses settings that are out of range, and a file without a model or with a workload beside it.
pub(super) fn check(config: &Config) -> Result<(), Complaint> {
    let Some(generate) = &config.generate else { return Ok(()) };
    if config.workload.is_some() {
        return Err(Complaint::with_help(
            "generate",
            "a [workload] is given too, and `kvpool run` runs one of them",
            "remove [generate] or [workload]",
        ));
    }
    if config.model.file.is_none() {
        return Err(Complaint::with_help(
            "generate",
            "needs a model's weights, and [model] names no file with them",
            "give model.file, the path of a GGUF or llama2.c model",
        ));
    }
    let GenerateConfig { answers, max_tokens, temperature, top_p, .. } = *generate;
    let out_of_range = |key: &str, value: &dyn std::fmt::Display| {
        Err(Complaint::new(format!("generate.{key}"), format!("{value} is out of range")))
    };
    if !(1..=MAX_ANSWERS).contains(&answers) {
        return out_of_range("answers", &answers);
    }
    if max_tokens == 0 {
        return out_of_range("max_tokens", &max_tokens);
    }
    if !(temperature.is_finite() && temperature >= 0.0) {
        return out_of_range("temperature", &temperature);
    }
    if !(top_p > 0.0 && top_p <= 1.0) {
        return out_of_range("top_p", &top_p);
    }
    Ok(())
}
