//! A Hugging Face `config.json` read into a [`Geometry`].
//!
//! Such a file leaves out what its model class fills in: which layers are windowed, and for some
//! classes even the head counts. [`FAMILIES`] holds those defaults, as the `transformers` library
//! has them. Where a file says something that this cache cannot hold (a latent in place of K and
//! V, layers without K and V, layers that share them), it is refused by the name of the key.

mod json;

use std::path::Path;

use serde_json::Value;

use crate::error::ConfigError;
use crate::units::counted;

use self::json::Object;
use super::Geometry;
use super::complaint::{Complaint, Refused};
use super::model::Part;

/// The largest `config.json` that is read. Real ones have a few kilobytes; a tokenizer or a weight
/// index named by mistake has megabytes.
const MAX_BYTES: u64 = 1 << 20;

/// Which layers of a model class are windowed when the file has no `layer_types`.
#[derive(Clone, Copy)]
enum Layers {
    /// All of them.
    All,
    /// Layer i is full when `(i + 1) % period == 0`, the others are windowed.
    FullEvery(u32),
    /// Those from `max_window_layers` on, and only with `use_sliding_window = true`.
    FromIndex,
}

/// What a model class fills in for keys that the file does not have.
struct Family {
    /// Its `model_type`s.
    model_types: &'static [&'static str],
    layers: Layers,
    num_q_heads: Option<u32>,
    num_kv_heads: Option<u32>,
    head_dim: Option<u32>,
    sliding_window: Option<u32>,
}

/// A class without defaults of its own.
const PLAIN: Family = Family {
    model_types: &[],
    layers: Layers::All,
    num_q_heads: None,
    num_kv_heads: None,
    head_dim: None,
    sliding_window: None,
};

/// The model classes that know windows.
const FAMILIES: &[Family] = &[
    Family {
        model_types: &["gemma2"],
        layers: Layers::FullEvery(2),
        num_q_heads: Some(8),
        num_kv_heads: Some(4),
        head_dim: Some(256),
        sliding_window: Some(4096),
    },
    // The published 4B file has neither heads nor head_dim, the 12B one no head_dim.
    Family {
        model_types: &["gemma3", "gemma3_text"],
        layers: Layers::FullEvery(6),
        num_q_heads: Some(8),
        num_kv_heads: Some(4),
        head_dim: Some(256),
        sliding_window: Some(4096),
    },
    Family {
        model_types: &["gpt_oss"],
        layers: Layers::FullEvery(2),
        num_q_heads: Some(64),
        num_kv_heads: Some(8),
        head_dim: Some(64),
        sliding_window: Some(128),
    },
    Family {
        model_types: &["mistral"],
        num_kv_heads: Some(8),
        sliding_window: Some(4096),
        ..PLAIN
    },
    Family { model_types: &["mixtral"], num_kv_heads: Some(8), ..PLAIN },
    Family { model_types: &["phi3"], ..PLAIN },
    Family { model_types: &["starcoder2"], num_kv_heads: Some(2), ..PLAIN },
    Family {
        model_types: &["qwen2", "qwen2_moe", "qwen3_moe"],
        layers: Layers::FromIndex,
        sliding_window: Some(4096),
        ..PLAIN
    },
    Family {
        model_types: &["qwen3"],
        layers: Layers::FromIndex,
        head_dim: Some(128),
        sliding_window: Some(4096),
        ..PLAIN
    },
    // No windows, but a head_dim that is not hidden_size / heads.
    Family {
        model_types: &["gemma"],
        num_q_heads: Some(16),
        num_kv_heads: Some(16),
        head_dim: Some(256),
        ..PLAIN
    },
];

/// `max_window_layers` of the Qwen classes when the file does not have it.
const QWEN_MAX_WINDOW_LAYERS: u32 = 28;

/// Keys of models that this cache cannot hold, and why.
const UNSUPPORTED: &[(&str, &str)] = &[
    (
        "kv_lora_rank",
        "the model uses multi-head latent attention (MLA), which keeps one latent a token in place \
         of K and V heads",
    ),
    ("num_kv_shared_layers", "some layers have no K and V of their own and share another layer's"),
    ("cross_attention_layers", "some layers attend to an image and not to the sequence"),
    ("attention_chunk_size", "chunked attention is neither full nor a sliding window"),
    ("full_attention_interval", "most layers use linear attention and keep no K and V"),
    ("layers_block_type", "some layers are state-space layers and keep no K and V"),
    ("hybrid_override_pattern", "some layers are state-space layers and keep no K and V"),
    ("attn_layer_period", "some layers are state-space layers and keep no K and V"),
    ("attn_layer_indices", "some layers are state-space layers and keep no K and V"),
    ("hybrid_layer_ids", "some layers are state-space layers and keep no K and V"),
    ("block_types", "some layers are recurrent and keep no K and V"),
    ("_block_types", "some layers are recurrent and keep no K and V"),
    ("full_attn_idxs", "some layers are convolutions and keep no K and V"),
    ("attn_type_list", "some layers use linear attention and keep no K and V"),
    ("linear_attn_config", "some layers use linear attention and keep no K and V"),
];

/// Models without attention, whatever their files say of heads.
const WITHOUT_ATTENTION: &[&str] =
    &["mamba", "mamba2", "falcon_mamba", "rwkv", "rwkv5", "rwkv6", "rwkv7", "xlstm"];

/// What to do about a file that cannot be used.
const WRITE_NUMBERS: &str = "describe the layers that keep K and V with model.num_layers, num_q_heads, num_kv_heads, \
     head_dim and attention_window, or use another model";

/// The geometry that the file at `path` describes.
pub(super) fn read(path: &Path, sink_tokens: u32) -> Result<Geometry, Refused> {
    let text = super::load::read_text(path, MAX_BYTES).map_err(|error| match error {
        // The TOML names the file, so that is where the mistake most likely is.
        ConfigError::Read { path, problem } => Refused::Setting(Complaint::new(
            "model.hf_config",
            format!("{} cannot be read: {problem}", path.display()),
        )),
        other => Refused::Elsewhere(other),
    })?;
    Ok(geometry(&text, path, sink_tokens)?)
}

/// The geometry that `text` describes.
fn geometry(text: &str, path: &Path, sink_tokens: u32) -> Result<Geometry, ConfigError> {
    let root = json::parse(text, path)?;
    let whole = Object::root(&root, text, path)?;
    // Models with several parts keep the language model's numbers in a table of their own.
    let nested = whole.object("text_config")?;
    let object = nested.as_ref().unwrap_or(&whole);
    let model_type = match object.text("model_type")? {
        Some(model_type) => Some(model_type),
        None => whole.text("model_type")?,
    };
    refuse_unsupported(object)?;
    if model_type.is_some_and(|own| WITHOUT_ATTENTION.contains(&own)) {
        let problem = "its layers are recurrent or state-space layers and keep no K and V";
        return Err(object.refuse("model_type", problem, "use another model"));
    }
    let family = FAMILIES
        .iter()
        .find(|family| model_type.is_some_and(|own| family.model_types.contains(&own)));
    let defaults = family.unwrap_or(&PLAIN);

    let num_layers = object.required("num_hidden_layers", None)?;
    let num_q_heads = object.required("num_attention_heads", defaults.num_q_heads)?;
    // A null means one KV head for each query head; only an absent key takes the default.
    let num_kv_heads = match object.number("num_key_value_heads")? {
        Some(heads) => heads,
        None if object.has("num_key_value_heads") => num_q_heads,
        None => defaults.num_kv_heads.unwrap_or(num_q_heads),
    };
    let head_dim = match object.number("head_dim")?.or(defaults.head_dim) {
        Some(head_dim) => head_dim,
        None => divided_head_dim(object, num_q_heads)?,
    };
    let numbers = [num_layers, num_q_heads, num_kv_heads, head_dim];
    let mut geometry =
        Geometry::checked(numbers, &[0], sink_tokens).map_err(|(part, problem)| {
            let key = match part {
                Part::Layers => "num_hidden_layers",
                Part::QHeads => "num_attention_heads",
                Part::KvHeads => "num_key_value_heads",
                Part::HeadDim => "head_dim",
            };
            object.refuse(key, problem, "this cache cannot hold such a model")
        })?;
    geometry.windows = windows(object, family, model_type, num_layers)?;
    Ok(geometry)
}

/// Refuses models whose cache is something else than K and V in every layer.
fn refuse_unsupported(object: &Object<'_>) -> Result<(), ConfigError> {
    for (key, why) in UNSUPPORTED {
        // 0 and null are how a file says that its model does not use the feature.
        if object.get(key).is_some_and(|value| value.as_u64() != Some(0)) {
            return Err(object.refuse(key, *why, WRITE_NUMBERS));
        }
    }
    if object.flag("multi_query")? == Some(true) && !object.has("num_key_value_heads") {
        let problem = "is true, and num_key_value_heads is not there";
        return Err(object.refuse("multi_query", problem, WRITE_NUMBERS));
    }
    Ok(())
}

/// `hidden_size / num_attention_heads`.
fn divided_head_dim(object: &Object<'_>, num_q_heads: u32) -> Result<u32, ConfigError> {
    let Some(hidden_size) = object.number("hidden_size")? else {
        let help = "expected head_dim, or hidden_size to divide by num_attention_heads";
        return Err(object.refuse("head_dim", "is missing", help));
    };
    // 0 heads are refused later, with all the other ranges.
    if !hidden_size.is_multiple_of(num_q_heads.max(1)) {
        let problem = format!("{hidden_size} is no multiple of {num_q_heads} attention heads");
        let help = "expected a multiple of num_attention_heads, or head_dim";
        return Err(object.refuse("hidden_size", problem, help));
    }
    Ok(hidden_size / num_q_heads.max(1))
}

/// The window of each layer.
fn windows(
    object: &Object<'_>,
    family: Option<&Family>,
    model_type: Option<&str>,
    num_layers: u32,
) -> Result<Vec<u32>, ConfigError> {
    let full = || vec![0; num_layers as usize];
    let listed = listed_windows(object, num_layers)?;
    let window = match positive(object, "sliding_window")? {
        Some(window) => Some(window),
        None if object.has("sliding_window") => None,
        None => family.and_then(|family| family.sliding_window),
    };
    let uses = object.flag("use_sliding_window")?;
    if uses == Some(false) {
        return Ok(full());
    }
    if let Some(windowed) = listed {
        if !windowed.contains(&true) {
            return Ok(full());
        }
        let Some(window) = window else {
            let problem = "is missing, and layer_types has sliding_attention layers";
            let help = "expected their window in tokens";
            return Err(object.refuse("sliding_window", problem, help));
        };
        return Ok(windowed.into_iter().map(|own| if own { window } else { 0 }).collect());
    }
    let Some(window) = window else {
        return Ok(full());
    };
    let layers = if let Some(period) = positive(object, "sliding_window_pattern")? {
        Layers::FullEvery(period)
    } else if uses == Some(true) {
        Layers::FromIndex
    } else if let Some(family) = family {
        family.layers
    } else {
        let problem = format!(
            "is {window}, and nothing says which layers use it (model_type {:?} is not known)",
            model_type.unwrap_or("")
        );
        return Err(object.refuse("sliding_window", problem, WRITE_NUMBERS));
    };
    let first = match layers {
        Layers::FromIndex if uses == Some(true) => {
            let default = family.map(|_| QWEN_MAX_WINDOW_LAYERS);
            object.required("max_window_layers", default)?
        }
        // The Qwen classes only use windows when told to.
        Layers::FromIndex => num_layers,
        Layers::All | Layers::FullEvery(_) => 0,
    };
    let windowed = |layer: u32| match layers {
        Layers::All => true,
        Layers::FullEvery(period) => !(layer + 1).is_multiple_of(period),
        Layers::FromIndex => layer >= first,
    };
    Ok((0..num_layers).map(|layer| if windowed(layer) { window } else { 0 }).collect())
}

/// A number that means nothing when it is 0.
fn positive(object: &Object<'_>, key: &str) -> Result<Option<u32>, ConfigError> {
    match object.number(key)? {
        Some(0) => Err(object.refuse(key, "is 0", "expected a whole number above 0, or null")),
        number => Ok(number),
    }
}

/// Which layers are windowed by `layer_types`, if the file has it.
fn listed_windows(object: &Object<'_>, num_layers: u32) -> Result<Option<Vec<bool>>, ConfigError> {
    let Some(value) = object.get("layer_types") else {
        return Ok(None);
    };
    let expected = "expected a list of \"full_attention\" and \"sliding_attention\", one a layer";
    let Value::Array(types) = value else {
        return Err(object.refuse(
            "layer_types",
            format!("found {}", json::describe(value)),
            expected,
        ));
    };
    if types.len() != num_layers as usize {
        let problem = format!(
            "has {} for {}",
            counted(types.len() as u64, "entry"),
            counted(num_layers.into(), "layer")
        );
        return Err(object.refuse("layer_types", problem, expected));
    }
    let mut windowed = Vec::with_capacity(types.len());
    for (layer, kind) in types.iter().enumerate() {
        match kind.as_str() {
            Some("full_attention") => windowed.push(false),
            Some("sliding_attention") => windowed.push(true),
            _ => {
                let problem = format!(
                    "layer {layer} is {}, which keeps no K and V of the kind that this cache holds",
                    json::describe(kind)
                );
                return Err(object.refuse("layer_types", problem, expected));
            }
        }
    }
    Ok(Some(windowed))
}

#[cfg(test)]
mod tests;
