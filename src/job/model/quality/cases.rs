//! The formats of the cache that are measured, and the static scales of those that need them.

use super::{PIECE, begin, feed, open};
use crate::config::{Config, Format, Int8Config, ScaleKind, StaticScale, verify};
use crate::error::ModelError;
use crate::job::model::Model;

/// The formats that can be measured, by their names in a report.
pub const FORMATS: [&str; 9] = [
    "f32",
    "f16",
    "bf16",
    "int8/per-token-head",
    "int8/per-group-32",
    "int8/per-tensor",
    "int8/per-token-head+spread",
    "int8/per-group-32+spread",
    "int8/per-tensor+spread",
];

/// One format of the cache.
#[derive(Clone, Debug)]
pub(super) struct Case {
    pub(super) name: String,
    pub(super) config: Config,
    /// Whether K and V are turned before they are stored
    /// ([`Engine::spread`](super::super::Engine::spread)).
    pub(super) spreads: bool,
}

/// Formats that a model cannot have, and why.
pub(super) type LeftOut = Vec<(String, String)>;

/// The formats that the model can have, and those that it cannot, with the reason.
pub(super) fn cases(
    model: &Model,
    base: &Config,
    names: &[&str],
    calibration: &[u32],
) -> Result<(Vec<Case>, LeftOut), ModelError> {
    let int8 = |scale| Some(Int8Config { scale, ..Int8Config::default() });
    let per_tensor = |spreads| {
        let (k_scale, v_scale) = static_scales(model, base, calibration, spreads)?;
        let (k_scale, v_scale) = (Some(k_scale), Some(v_scale));
        Ok::<_, ModelError>(Some(Int8Config { scale: ScaleKind::PerTensor, k_scale, v_scale }))
    };
    let can_spread = model.file.geometry.head_dim.is_power_of_two();
    let (mut cases, mut left_out) = (Vec::new(), Vec::new());
    for name in names.iter().copied() {
        let (format, spreads) = match name.strip_suffix("+spread") {
            Some(format) => (format, true),
            None => (name, false),
        };
        if spreads && !can_spread {
            let problem = "model: its head_dim is no power of two".to_owned();
            left_out.push((name.to_owned(), problem));
            continue;
        }
        let (format, int8) = match format {
            "f32" => (Format::F32, None),
            "f16" => (Format::F16, None),
            "bf16" => (Format::Bf16, None),
            "int8/per-token-head" => (Format::Int8, int8(ScaleKind::PerTokenHead)),
            "int8/per-group-32" => (Format::Int8, int8(ScaleKind::PerGroup32)),
            _ => (Format::Int8, per_tensor(spreads)?),
        };
        let mut config = base.clone();
        config.cache.format = format;
        config.cache.int8 = int8;
        if spreads {
            // The engine rotates K by its position, so that it can turn it behind that.
            config.rope = None;
        }
        match verify(&config, &model.file.geometry) {
            Ok(()) => cases.push(Case { name: name.to_owned(), config, spreads }),
            Err(invalid) => {
                left_out.push((name.to_owned(), format!("{}: {}", invalid.key, invalid.problem)));
            }
        }
    }
    Ok((cases, left_out))
}

/// A scale for K and V of each layer: the largest magnitude of a window of text, divided by 127.
fn static_scales(
    model: &Model,
    base: &Config,
    window: &[u32],
    spreads: bool,
) -> Result<(StaticScale, StaticScale), ModelError> {
    let mut config = base.clone();
    config.cache.format = Format::F32;
    // The engine rotates, so that it sees K as it is stored.
    config.rope = None;
    let (mut engine, mut cache) = open(model, &config, spreads)?;
    engine.observe_extremes();
    let sequence = begin(&mut cache, window)?;
    for piece in window.chunks(PIECE) {
        feed(&mut engine, &mut cache, sequence, piece, &[])?;
    }
    let of = |which: usize| {
        let scales = engine.extremes().iter();
        StaticScale::PerLayer(
            scales.map(|most| (most[which] / 127.0).max(f32::MIN_POSITIVE)).collect(),
        )
    };
    Ok((of(0), of(1)))
}
