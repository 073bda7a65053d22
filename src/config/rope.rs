//! `[rope]`: rotary position encoding, applied to K on its way into the cache.

use serde::{Deserialize, Serialize};

use super::complaint::Complaint;
use super::{Geometry, ModelConfig};

/// `[rope]`: K is rotated by its position before it is stored. Without the table K is stored as it
/// comes. Queries are the engine's to rotate in either case.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RopeConfig {
    /// The base of the frequencies: pair `i` turns by `theta^(-2i / dims)` a position. Left out,
    /// everything is as `model.preset` has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub theta: Option<f64>,
    /// Elements of a vector that are rotated, from the first on. Default: `head_dim`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dims: Option<u32>,
    /// Which elements are a pair.
    #[serde(default)]
    pub style: RopeStyle,
    /// What is done to the frequencies for contexts longer than those trained on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scaling: Option<RopeScaling>,
    /// `theta` of the layers with an attention window, which are then not scaled. Default: they are
    /// as the others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window_theta: Option<f64>,
}

/// Which elements of a vector are rotated together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RopeStyle {
    /// Element `i` and element `i + dims / 2`, as in Hugging Face's checkpoints.
    #[default]
    Halves,
    /// Elements `2i` and `2i + 1`, as in the original checkpoints of Llama.
    Pairs,
}

/// How frequencies are scaled.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase", deny_unknown_fields)]
pub enum RopeScaling {
    /// All frequencies are divided by `factor`.
    Linear {
        /// At least 1.
        factor: f64,
    },
    /// As of Llama 3.1: long waves are divided by `factor`, short ones are not, and between them
    /// it is interpolated.
    Llama3 {
        /// At least 1.
        factor: f64,
        /// Waves longer than `original_max_position / low_freq_factor` are long.
        low_freq_factor: f64,
        /// Waves shorter than `original_max_position / high_freq_factor` are short.
        high_freq_factor: f64,
        /// Tokens of the context that was trained on.
        original_max_position: u32,
    },
    /// YaRN: pairs that turn often within the trained context are left, those that turn rarely
    /// are divided by `factor`, and between them it is interpolated. The vectors become longer
    /// by `0.1 · ln(factor) + 1`, which queries must become too.
    Yarn {
        /// At least 1.
        factor: f64,
        /// Tokens of the context that was trained on.
        original_max_position: u32,
        /// Turns within it from which on a pair is left.
        #[serde(default = "default_beta_fast")]
        beta_fast: f64,
        /// Turns within it up to which a pair is divided.
        #[serde(default = "default_beta_slow")]
        beta_slow: f64,
        /// Whether the ends of the interpolation are rounded outwards to whole pairs.
        #[serde(default = "default_truncate")]
        truncate: bool,
    },
}

fn default_beta_fast() -> f64 {
    32.0
}

fn default_beta_slow() -> f64 {
    1.0
}

fn default_truncate() -> bool {
    true
}

impl RopeConfig {
    /// With `theta` given, filled in from the preset where the file leaves it out.
    ///
    /// The config must have been checked, as [`super::load`] and [`super::verify`] do; one that
    /// names no base has none.
    #[must_use]
    pub fn resolved(&self, model: &ModelConfig) -> Self {
        if self.theta.is_some() {
            return self.clone();
        }
        model.preset.as_deref().and_then(of_preset).unwrap_or_default()
    }
}

/// What a built-in model does with K: facts of the models' public `config.json` files
/// (`rope_theta`, `rope_scaling`, `rope_local_base_freq`).
fn of_preset(name: &str) -> Option<RopeConfig> {
    let theta = |theta| RopeConfig { theta: Some(theta), ..RopeConfig::default() };
    let llama3 = |factor| RopeConfig {
        scaling: Some(RopeScaling::Llama3 {
            factor,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position: 8192,
        }),
        ..theta(500_000.0)
    };
    let gemma3 = |scaling| RopeConfig { scaling, window_theta: Some(1e4), ..theta(1e6) };
    Some(match name {
        "llama-2-7b" | "llama-2-13b" | "llama-2-70b" | "mistral-7b-v0.1" | "gemma-2-2b"
        | "gemma-2-9b" | "gemma-2-27b" | "phi-3-mini-4k" => theta(1e4),
        "llama-3-8b" | "llama-3-70b" => theta(500_000.0),
        "llama-3.1-8b" | "llama-3.1-70b" => llama3(8.0),
        "llama-3.2-1b" => llama3(32.0),
        "mistral-7b-v0.3" | "mixtral-8x7b-v0.1" | "qwen2.5-0.5b" | "qwen2.5-7b" | "qwen3-0.6b"
        | "qwen3-8b" | "qwen3-30b-a3b" => theta(1e6),
        "gemma-3-270m" | "gemma-3-1b" => gemma3(None),
        "gemma-3-4b" | "gemma-3-12b" | "gemma-3-27b" => {
            gemma3(Some(RopeScaling::Linear { factor: 8.0 }))
        }
        "gpt-oss-20b" | "gpt-oss-120b" => RopeConfig {
            scaling: Some(RopeScaling::Yarn {
                factor: 32.0,
                original_max_position: 4096,
                beta_fast: 32.0,
                beta_slow: 1.0,
                truncate: false,
            }),
            ..theta(150_000.0)
        },
        "phi-4" => theta(250_000.0),
        "smollm2-135m" => theta(1e5),
        "stories260k" => RopeConfig { style: RopeStyle::Pairs, ..theta(1e4) },
        // Its frequencies are a list, which is another one for long contexts.
        _ => return None,
    })
}

/// Refuses what no table can be made of.
pub(super) fn check(
    rope: &RopeConfig,
    model: &ModelConfig,
    geometry: &Geometry,
) -> Result<(), Complaint> {
    let Some(theta) = rope.theta else { return check_preset(rope, model) };
    base("rope.theta", theta)?;
    if let Some(window_theta) = rope.window_theta {
        base("rope.window_theta", window_theta)?;
        if geometry.windows.iter().all(|window| *window == 0) {
            return Err(Complaint::with_help(
                "rope.window_theta",
                format!("is {window_theta}, and no layer of the model has an attention window"),
                "remove it",
            ));
        }
    }
    let (dims, multiple) = match rope.style {
        RopeStyle::Halves => (rope.dims.unwrap_or(geometry.head_dim), 16),
        RopeStyle::Pairs => (rope.dims.unwrap_or(geometry.head_dim), 8),
    };
    if dims == 0 || dims > geometry.head_dim || !dims.is_multiple_of(multiple) {
        let style = if rope.style == RopeStyle::Halves { "halves" } else { "pairs" };
        return Err(Complaint::with_help(
            "rope.dims",
            format!("{dims} elements of {} cannot be rotated in {style}", geometry.head_dim),
            format!("expected a multiple of {multiple}, at most the model's head_dim"),
        ));
    }
    rope.scaling.as_ref().map_or(Ok(()), check_scaling)
}

/// Without a base everything is the preset's, and nothing else may be said.
fn check_preset(rope: &RopeConfig, model: &ModelConfig) -> Result<(), Complaint> {
    let Some(name) = &model.preset else {
        return Err(Complaint::new("rope.theta", "is missing; only a model.preset knows its own"));
    };
    if of_preset(name).is_none() {
        let problem = format!("is missing, and what {name:?} does is no setting of [rope]");
        return Err(Complaint::new("rope.theta", problem));
    }
    if *rope == RopeConfig::default() {
        return Ok(());
    }
    Err(Complaint::with_help(
        "rope",
        "changes what model.preset has, and leaves rope.theta out",
        "give rope.theta and everything else that counts, or leave [rope] empty",
    ))
}

/// A base of frequencies.
fn base(key: &str, theta: f64) -> Result<(), Complaint> {
    if theta.is_finite() && theta > 1.0 {
        return Ok(());
    }
    Err(Complaint::new(key, format!("is {theta}")))
}

fn check_scaling(scaling: &RopeScaling) -> Result<(), Complaint> {
    let refuse = |field: &str, problem: String, help: &str| {
        Err(Complaint::with_help(format!("rope.scaling.{field}"), problem, help))
    };
    let (factor, ends) = match *scaling {
        RopeScaling::Linear { factor } => (factor, None),
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position,
        } => {
            let fields = ["low_freq_factor", "high_freq_factor"];
            (factor, Some((fields, low_freq_factor, high_freq_factor, original_max_position)))
        }
        RopeScaling::Yarn { factor, original_max_position, beta_fast, beta_slow, .. } => {
            let fields = ["beta_slow", "beta_fast"];
            (factor, Some((fields, beta_slow, beta_fast, original_max_position)))
        }
    };
    if !(factor.is_finite() && factor >= 1.0) {
        return refuse("factor", format!("is {factor}"), "expected a finite number, 1 or more");
    }
    let Some(([low, high], less, more, position)) = ends else { return Ok(()) };
    if !(less.is_finite() && less > 0.0) {
        return refuse(low, format!("is {less}"), "expected a finite number above 0");
    }
    if !(more.is_finite() && more > less) {
        let help = format!("expected a finite number above {low}, which is {less}");
        return refuse(high, format!("is {more}"), &help);
    }
    if position == 0 {
        return refuse("original_max_position", "is 0".to_owned(), "expected a number of tokens");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::PRESETS;

    #[test]
    fn every_preset_but_one_knows_its_own_and_passes_the_checks() {
        let mut unknown = Vec::new();
        for preset in PRESETS {
            let model =
                ModelConfig { preset: Some(preset.name.to_owned()), ..ModelConfig::default() };
            let Some(rope) = of_preset(preset.name) else {
                unknown.push(preset.name);
                assert!(check(&RopeConfig::default(), &model, &preset.geometry()).is_err());
                continue;
            };
            assert_eq!(check(&rope, &model, &preset.geometry()), Ok(()), "{}", preset.name);
            assert_eq!(check(&RopeConfig::default(), &model, &preset.geometry()), Ok(()));
            assert_eq!(RopeConfig::default().resolved(&model), rope);
        }
        assert_eq!(unknown, ["phi-3-mini-128k"]);
    }
}
