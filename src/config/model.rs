//! `[model]` resolved: whichever way the model was named, its attention geometry in numbers.

use std::path::Path;

use serde::Serialize;

use super::complaint::{Complaint, Refused, nearest};
use super::presets::PRESETS;
use super::{ModelConfig, ModelFile, ModelFormat, hf, model_file};
use crate::units::counted;

/// What the cache has to know of a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Geometry {
    /// Transformer layers that keep K and V.
    pub num_layers: u32,
    /// Query heads in a layer.
    pub num_q_heads: u32,
    /// Key/value heads in a layer; divides `num_q_heads`.
    pub num_kv_heads: u32,
    /// Elements of one head's key or value vector.
    pub head_dim: u32,
    /// How many keys a query may see, itself included, for each layer; 0 = all.
    pub windows: Vec<u32>,
    /// How many tokens at the start of a sequence stay visible in every windowed layer.
    pub sink_tokens: u32,
}

/// One of the numbers of a geometry. Each source of a geometry has its own key for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// `num_layers`.
    Layers,
    /// `num_q_heads`.
    QHeads,
    /// `num_kv_heads`.
    KvHeads,
    /// `head_dim`.
    HeadDim,
}

impl Part {
    /// Its key in `[model]`.
    pub(super) const fn key(self) -> &'static str {
        match self {
            Self::Layers => "model.num_layers",
            Self::QHeads => "model.num_q_heads",
            Self::KvHeads => "model.num_kv_heads",
            Self::HeadDim => "model.head_dim",
        }
    }
}

impl Geometry {
    /// How many query heads share one KV head.
    #[must_use]
    pub fn q_heads_per_kv_head(&self) -> u32 {
        self.num_q_heads / self.num_kv_heads
    }

    /// A geometry of numbers that were not checked yet. `pattern` is repeated over the layers and
    /// must not be empty.
    pub(super) fn checked(
        [num_layers, num_q_heads, num_kv_heads, head_dim]: [u32; 4],
        pattern: &[u32],
        sink_tokens: u32,
    ) -> Result<Self, (Part, String)> {
        // The layers come first: the list of windows is as long as they are many.
        for (part, number, limit) in [
            (Part::Layers, num_layers, 4096),
            (Part::QHeads, num_q_heads, 1024),
            (Part::KvHeads, num_kv_heads, 1024),
        ] {
            if !(1..=limit).contains(&number) {
                return Err((part, format!("{number} is out of range (1 to {limit})")));
            }
        }
        if !num_q_heads.is_multiple_of(num_kv_heads) {
            let problem =
                format!("{num_q_heads} query heads are no multiple of {num_kv_heads} KV heads");
            return Err((Part::QHeads, problem));
        }
        if !(8..=1024).contains(&head_dim) || !head_dim.is_multiple_of(8) {
            let problem = format!("{head_dim} is not a multiple of 8 from 8 to 1024");
            return Err((Part::HeadDim, problem));
        }
        Ok(Self {
            num_layers,
            num_q_heads,
            num_kv_heads,
            head_dim,
            windows: repeated(pattern, num_layers),
            sink_tokens,
        })
    }
}

/// The pattern over so many layers; the last repetition may be cut off.
pub(super) fn repeated(pattern: &[u32], num_layers: u32) -> Vec<u32> {
    pattern.iter().copied().cycle().take(num_layers as usize).collect()
}

/// The geometry of `[model]`, and what `model.file` says where it is given. Relative paths start
/// from `folder`.
pub(super) fn resolve(
    model: &ModelConfig,
    folder: &Path,
) -> Result<(Geometry, Option<ModelFile>), Refused> {
    one_source(model)?;
    let mut file = None;
    let geometry = if let Some(name) = &model.preset {
        preset(name, model.sink_tokens)?
    } else if let Some(path) = &model.hf_config {
        hf::read(&folder.join(path), model.sink_tokens)?
    } else if let Some(path) = &model.file {
        let found = model_file::resolve(&folder.join(path), model.sink_tokens)?;
        let geometry = found.geometry.clone();
        file = Some(found);
        geometry
    } else {
        explicit(model)?
    };
    check_tokenizer(model, file.as_ref())?;
    if geometry.sink_tokens > 0 && geometry.windows.iter().all(|window| *window == 0) {
        return Err(Complaint::with_help(
            "model.sink_tokens",
            format!(
                "is {}, and no layer of the model has an attention window",
                geometry.sink_tokens
            ),
            "remove it, or give model.attention_window; without a window every token stays visible",
        )
        .into());
    }
    Ok((geometry, file))
}

/// A tokenizer belongs to a model file that has none inside.
fn check_tokenizer(model: &ModelConfig, file: Option<&ModelFile>) -> Result<(), Complaint> {
    if model.tokenizer.is_none() {
        return Ok(());
    }
    match file.map(|file| file.format) {
        Some(ModelFormat::Llama2C) => Ok(()),
        Some(ModelFormat::Gguf) => Err(Complaint::with_help(
            "model.tokenizer",
            "is given, and the GGUF file of model.file has a tokenizer inside",
            "remove it",
        )),
        None => Err(Complaint::with_help(
            "model.tokenizer",
            "is given without model.file",
            "remove it, or give model.file",
        )),
    }
}

/// Refuses a model that is described twice, or not at all.
fn one_source(model: &ModelConfig) -> Result<(), Complaint> {
    let numbers = [
        ("model.num_layers", model.num_layers.is_some()),
        ("model.num_q_heads", model.num_q_heads.is_some()),
        ("model.num_kv_heads", model.num_kv_heads.is_some()),
        ("model.head_dim", model.head_dim.is_some()),
        ("model.attention_window", model.attention_window.is_some()),
    ];
    let sources = [
        ("model.preset", model.preset.is_some()),
        ("model.hf_config", model.hf_config.is_some()),
        ("model.file", model.file.is_some()),
    ];
    let mut given = sources.iter().filter(|(_, given)| *given).map(|(key, _)| *key);
    let named = match (given.next(), given.next()) {
        (Some(first), Some(second)) => {
            return Err(Complaint::with_help(
                second,
                format!("{first} is given too, and each describes a whole model"),
                format!("keep one of {first} and {second}"),
            ));
        }
        (Some(named), None) => named,
        (None, _) => {
            if numbers.iter().all(|(_, given)| !given) {
                return Err(Complaint::with_help(
                    "model",
                    "names no model",
                    "give model.preset, model.hf_config, model.file, or model.num_layers, \
                     num_q_heads, num_kv_heads and head_dim",
                ));
            }
            return Ok(());
        }
    };
    match numbers.iter().find(|(_, given)| *given) {
        Some((key, _)) => Err(Complaint::with_help(
            *key,
            format!("{named} is given too, and it sets this number"),
            format!("remove {key}, or remove {named} and give all the model's numbers"),
        )),
        None => Ok(()),
    }
}

/// The geometry of a built-in model.
fn preset(name: &str, sink_tokens: u32) -> Result<Geometry, Complaint> {
    let Some(preset) = PRESETS.iter().find(|preset| preset.name == name) else {
        let names = || PRESETS.iter().map(|preset| preset.name);
        let all = names().collect::<Vec<_>>().join(", ");
        let help = match nearest(name, names()) {
            Some(near) => format!("did you mean {near:?}? expected one of {all}"),
            None => format!("expected one of {all}"),
        };
        let problem = format!("there is no preset {name:?}");
        return Err(Complaint::with_help("model.preset", problem, help));
    };
    Ok(Geometry { sink_tokens, ..preset.geometry() })
}

/// The geometry of the numbers in the file.
fn explicit(model: &ModelConfig) -> Result<Geometry, Complaint> {
    let needed = |number: Option<u32>, key: &str| {
        number.ok_or_else(|| {
            Complaint::new(key, "is missing; a model without preset, hf_config and file needs it")
        })
    };
    let num_layers = needed(model.num_layers, "model.num_layers")?;
    let numbers = [
        num_layers,
        needed(model.num_q_heads, "model.num_q_heads")?,
        needed(model.num_kv_heads, "model.num_kv_heads")?,
        needed(model.head_dim, "model.head_dim")?,
    ];
    let pattern = model.attention_window.as_deref().unwrap_or(&[0]);
    if pattern.is_empty() {
        return Err(Complaint::new("model.attention_window", "is an empty list"));
    }
    let geometry = Geometry::checked(numbers, pattern, model.sink_tokens)
        .map_err(|(part, problem)| Complaint::new(part.key(), problem))?;
    if pattern.len() > num_layers as usize {
        return Err(Complaint::new(
            "model.attention_window",
            format!(
                "has {}, and the model has {}",
                counted(pattern.len() as u64, "entry"),
                counted(num_layers.into(), "layer")
            ),
        ));
    }
    Ok(geometry)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers() -> ModelConfig {
        ModelConfig {
            num_layers: Some(5),
            num_q_heads: Some(8),
            num_kv_heads: Some(2),
            head_dim: Some(64),
            ..ModelConfig::default()
        }
    }

    fn refused(model: &ModelConfig) -> Complaint {
        match resolve(model, Path::new("")) {
            Err(Refused::Setting(complaint)) => complaint,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_pattern_is_repeated_over_the_layers() {
        for (window, windows) in [
            (None, [0, 0, 0, 0, 0]),
            (Some(vec![7]), [7; 5]),
            (Some(vec![7, 0]), [7, 0, 7, 0, 7]),
            (Some(vec![7, 7, 7, 0]), [7, 7, 7, 0, 7]),
            (Some(vec![1, 2, 3, 4, 0]), [1, 2, 3, 4, 0]),
        ] {
            let model = ModelConfig { attention_window: window, ..numbers() };
            assert_eq!(resolve(&model, Path::new("")).unwrap().0.windows, windows);
        }
        for window in [vec![], vec![1; 6]] {
            let model = ModelConfig { attention_window: Some(window), ..numbers() };
            assert_eq!(refused(&model).key, "model.attention_window");
        }
    }

    #[test]
    fn numbers_out_of_range_are_named() {
        type Change = fn(&mut ModelConfig);
        let cases: [(Change, &str); 10] = [
            (|m| m.num_layers = Some(0), "model.num_layers"),
            (|m| m.num_layers = Some(u32::MAX), "model.num_layers"),
            (|m| m.num_layers = None, "model.num_layers"),
            (|m| m.num_q_heads = Some(7), "model.num_q_heads"),
            (|m| m.num_q_heads = None, "model.num_q_heads"),
            (|m| m.num_kv_heads = Some(0), "model.num_kv_heads"),
            (|m| m.num_kv_heads = None, "model.num_kv_heads"),
            (|m| m.head_dim = Some(60), "model.head_dim"),
            (|m| m.head_dim = Some(1032), "model.head_dim"),
            (|m| m.sink_tokens = 4, "model.sink_tokens"),
        ];
        for (change, key) in cases {
            let mut model = numbers();
            change(&mut model);
            assert_eq!(refused(&model).key, key);
        }
    }

    #[test]
    fn a_model_is_described_once() {
        let both = ModelConfig {
            preset: Some("llama-3-8b".to_owned()),
            hf_config: Some("config.json".into()),
            ..ModelConfig::default()
        };
        assert_eq!(refused(&both).key, "model.hf_config");
        let mixed = ModelConfig { preset: Some("llama-3-8b".to_owned()), ..numbers() };
        assert_eq!(refused(&mixed).key, "model.num_layers");
        assert_eq!(refused(&ModelConfig::default()).key, "model");
        let slip = ModelConfig { preset: Some("llama-3-8B".to_owned()), ..ModelConfig::default() };
        assert!(refused(&slip).help.starts_with("did you mean \"llama-3-8b\"?"));
    }

    #[test]
    fn sinks_are_kept() {
        let model = ModelConfig {
            preset: Some("gpt-oss-20b".to_owned()),
            sink_tokens: 4,
            ..ModelConfig::default()
        };
        let (geometry, _) = resolve(&model, Path::new("")).unwrap();
        assert_eq!((geometry.sink_tokens, geometry.q_heads_per_kv_head()), (4, 8));
    }
}
