//! What the types of the file cannot say: ranges, and settings that contradict each other.

use std::ops::RangeInclusive;

use super::complaint::Complaint;
use super::{
    Admission, CacheConfig, CacheMode, Capacity, Config, ContiguousLayers, DeviceConfig,
    DeviceKind, Format, Geometry, HybridConfig, Int8Config, KernelChoice, LimitsConfig, ScaleKind,
    StaticScale,
};
use crate::units::counted;

/// The most sequences; a sequence slot is addressed with fewer than 32 bits.
const MAX_SEQS: u32 = 1_048_576;
/// The most tokens of a sequence, a step or the sinks.
const MAX_TOKENS: u32 = 16_777_216;
/// The sizes of a block that the kernels are made for.
const TOKENS_PER_BLOCK: [u32; 5] = [MIN_TOKENS_PER_BLOCK, 16, 32, 64, MAX_TOKENS_PER_BLOCK];

/// Tokens of the smallest block.
pub const MIN_TOKENS_PER_BLOCK: u32 = 8;

/// Tokens of the largest block.
pub const MAX_TOKENS_PER_BLOCK: u32 = 128;
/// The most events that are kept; each is a record of the plan.
const MAX_EVENTS: u32 = 1_048_576;
/// The most worker threads.
const MAX_THREADS: u32 = 1024;

/// A setting that [`verify`] refuses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Invalid {
    /// The dotted key.
    pub key: String,
    /// What is wrong with it.
    pub problem: String,
    /// What was expected, or what to do.
    pub help: String,
}

/// Checks a configuration and a geometry that were made by hand, as [`super::load`] checks those
/// of a file. A plan is made of checked settings only.
///
/// # Errors
/// [`Invalid`] names the first setting that is out of range or contradicts another.
pub fn verify(config: &Config, geometry: &Geometry) -> Result<(), Invalid> {
    let numbers =
        [geometry.num_layers, geometry.num_q_heads, geometry.num_kv_heads, geometry.head_dim];
    let invalid = |key: &str, problem: String| {
        let Complaint { key, problem, help } = Complaint::new(key, problem);
        Invalid { key, problem, help }
    };
    Geometry::checked(numbers, &[0], geometry.sink_tokens)
        .map_err(|(part, problem)| invalid(part.key(), problem))?;
    if geometry.windows.len() != geometry.num_layers as usize {
        let problem = format!(
            "{} for {}",
            counted(geometry.windows.len() as u64, "window"),
            counted(geometry.num_layers.into(), "layer")
        );
        return Err(invalid("model.attention_window", problem));
    }
    check(config, geometry).map_err(|Complaint { key, problem, help }| Invalid {
        key,
        problem,
        help,
    })
}

/// Checks everything but the workload and the variants.
pub(super) fn check(config: &Config, geometry: &Geometry) -> Result<(), Complaint> {
    check_limits(&config.limits)?;
    // What lies behind the sinks, in whole blocks, is counted in 32 bits.
    in_range("model.sink_tokens", geometry.sink_tokens, 0..=MAX_TOKENS)?;
    check_cache(&config.cache, geometry)?;
    check_events(config, geometry)?;
    check_pool(config)?;
    check_rope(config, geometry)?;
    super::generate::check(config)?;
    super::job::check(config)?;
    check_device(&config.device)
}

/// A job makes its K up, and checks what attention makes of it: there is nothing to rotate.
fn check_rope(config: &Config, geometry: &Geometry) -> Result<(), Complaint> {
    let Some(rope) = &config.rope else { return Ok(()) };
    if config.workload.is_some() {
        return Err(Complaint::with_help(
            "rope",
            "rotates K, and a [workload] makes up K that it knows as it is stored",
            "remove [rope], or remove [workload]",
        ));
    }
    super::rope::check(rope, &config.model, geometry)
}

/// Settings of one kind of device are refused with another.
fn check_device(device: &DeviceConfig) -> Result<(), Complaint> {
    let DeviceConfig { kind, ordinal, threads, kernel, memory_limit: _ } = *device;
    in_range("device.threads", threads, 0..=MAX_THREADS)?;
    let of_cpu = [("device.threads", threads > 0), ("device.kernel", kernel != KernelChoice::Auto)];
    match kind {
        DeviceKind::Cpu if ordinal > 0 => {
            let problem = "it names a GPU, and device.kind is \"cpu\"".to_owned();
            Err(Complaint::new("device.ordinal", problem))
        }
        DeviceKind::Cpu => Ok(()),
        DeviceKind::Cuda => match of_cpu.into_iter().find(|(_, given)| *given) {
            Some((key, _)) => {
                let problem = "it is of the CPU's kernels, and device.kind is \"cuda\"".to_owned();
                Err(Complaint::new(key, problem))
            }
            None => Ok(()),
        },
    }
}

/// Which layers are contiguous, one entry a layer: all with `contiguous`, none with `paged`.
///
/// The config must have been checked, as [`super::load`] and [`super::parse`] do; layers that
/// `contiguous_layers` names wrongly count as paged.
#[must_use]
pub fn contiguous_set(config: &Config, geometry: &Geometry) -> Vec<bool> {
    let all = |contiguous| vec![contiguous; geometry.windows.len()];
    match config.cache.mode {
        // The baseline has no plan; each of its sequences has one run.
        CacheMode::Contiguous | CacheMode::Dynamic => all(true),
        CacheMode::Paged => all(false),
        CacheMode::Hybrid => {
            let HybridConfig { contiguous_layers } =
                config.cache.hybrid.clone().unwrap_or_default();
            named_layers(&contiguous_layers, geometry).unwrap_or_else(|_| all(false))
        }
    }
}

/// Refuses a number outside its range.
fn in_range(key: &str, number: u32, range: RangeInclusive<u32>) -> Result<(), Complaint> {
    if range.contains(&number) {
        return Ok(());
    }
    Err(Complaint::new(key, format!("{number} is out of range")))
}

fn check_limits(limits: &LimitsConfig) -> Result<(), Complaint> {
    in_range("limits.max_seqs", limits.max_seqs, 1..=MAX_SEQS)?;
    in_range("limits.max_seq_len", limits.max_seq_len, 1..=MAX_TOKENS)?;
    in_range("limits.max_batch_tokens", limits.max_batch_tokens, 1..=MAX_TOKENS)?;
    if let Some(step) = limits.max_step_tokens
        && !(1..=limits.max_batch_tokens).contains(&step)
    {
        let problem = format!(
            "{step} is out of range (limits.max_batch_tokens is {})",
            limits.max_batch_tokens
        );
        return Err(Complaint::new("limits.max_step_tokens", problem));
    }
    if limits.max_rewind_tokens > limits.max_seq_len {
        let problem = format!(
            "{} is out of range (limits.max_seq_len is {})",
            limits.max_rewind_tokens, limits.max_seq_len
        );
        return Err(Complaint::new("limits.max_rewind_tokens", problem));
    }
    Ok(())
}

/// `typical_seq_len` divides a capacity among paged groups; where nothing is divided it is refused.
fn check_pool(config: &Config) -> Result<(), Complaint> {
    let Some(len) = config.pool.typical_seq_len else { return Ok(()) };
    let key = "pool.typical_seq_len";
    if !(1..=config.limits.max_seq_len).contains(&len) {
        let most = config.limits.max_seq_len;
        return Err(Complaint::new(
            key,
            format!("{len} is out of range (limits.max_seq_len is {most})"),
        ));
    }
    let divided = matches!(
        config.pool.capacity,
        Capacity::Tokens(_) | Capacity::Budget(_) | Capacity::BudgetPercent(_)
    );
    if !divided || matches!(config.cache.mode, CacheMode::Contiguous | CacheMode::Dynamic) {
        let problem = "there is nothing to divide by it";
        let help = "leave it out (--set pool.typical_seq_len= does): it divides \"tokens:N\" or \"budget:SIZE\" among the layer groups of a paged or hybrid plan";
        return Err(Complaint::with_help(key, problem, help));
    }
    Ok(())
}

fn check_cache(cache: &CacheConfig, geometry: &Geometry) -> Result<(), Complaint> {
    if !TOKENS_PER_BLOCK.contains(&cache.tokens_per_block) {
        let problem = format!("{} is not a size that blocks can have", cache.tokens_per_block);
        return Err(Complaint::new("cache.tokens_per_block", problem));
    }
    check_sharing(cache)?;
    check_mode(cache)?;
    match (&cache.int8, cache.format) {
        (Some(int8), Format::Int8) => check_scales(int8, geometry)?,
        (Some(_), format) => {
            return Err(Complaint::with_help(
                "cache.int8",
                format!("holds scales, and cache.format = \"{format}\" has none"),
                "remove [cache.int8], or write cache.format = \"int8\"",
            ));
        }
        (None, _) => {}
    }
    if cache.mode == CacheMode::Hybrid {
        return check_hybrid(&cache.hybrid.clone().unwrap_or_default(), geometry);
    }
    if cache.hybrid.is_some() {
        return Err(Complaint::with_help(
            "cache.hybrid",
            format!("names contiguous layers, and cache.mode = \"{}\"", cache.mode),
            "remove [cache.hybrid], or write cache.mode = \"hybrid\"",
        ));
    }
    Ok(())
}

/// What is kept for reuse, what is told about it, and what admission leaves free.
fn check_sharing(cache: &CacheConfig) -> Result<(), Complaint> {
    let CacheConfig { event_buffer, watermark_blocks, .. } = *cache;
    in_range("cache.event_buffer", event_buffer, 0..=MAX_EVENTS)?;
    if event_buffer > 0 && !cache.prefix_reuse {
        return Err(Complaint::with_help(
            "cache.event_buffer",
            format!("is {event_buffer}, and cache.prefix_reuse = false has no events to keep"),
            "remove it, or write cache.prefix_reuse = true",
        ));
    }
    if watermark_blocks > 0 && cache.admission != Admission::MaxUtilization {
        return Err(Complaint::with_help(
            "cache.watermark_blocks",
            format!(
                "is {watermark_blocks}, and cache.admission = \"{}\" promises every block that a \
                 sequence needs",
                cache.admission
            ),
            "remove it, or write cache.admission = \"max-utilization\"",
        ));
    }
    Ok(())
}

/// A watermark is of blocks, and contiguous layers have none.
fn check_mode(cache: &CacheConfig) -> Result<(), Complaint> {
    let CacheConfig { watermark_blocks, mode, .. } = *cache;
    if watermark_blocks == 0 || !matches!(mode, CacheMode::Contiguous | CacheMode::Dynamic) {
        return Ok(());
    }
    let problem = format!("is {watermark_blocks}, and cache.mode = \"{mode}\" has no blocks");
    let help = "remove it, or write cache.mode = \"paged\" or \"hybrid\"";
    Err(Complaint::with_help("cache.watermark_blocks", problem, help))
}

/// Events are about blocks of the prefix index, which is over paged layers that see everything. A
/// window as long as the longest sequence is none.
fn check_events(config: &Config, geometry: &Geometry) -> Result<(), Complaint> {
    let events = config.cache.event_buffer;
    let indexed = |(contiguous, window): (bool, &u32)| {
        !contiguous && (*window == 0 || *window >= config.limits.max_seq_len)
    };
    let mut layers = contiguous_set(config, geometry).into_iter().zip(&geometry.windows);
    if events == 0 || layers.any(indexed) {
        return Ok(());
    }
    let why = match config.cache.mode {
        CacheMode::Contiguous => "cache.mode = \"contiguous\" has no blocks",
        CacheMode::Dynamic => "cache.mode = \"dynamic\" has no blocks",
        CacheMode::Paged | CacheMode::Hybrid => "every paged layer has a window",
    };
    Err(Complaint::with_help(
        "cache.event_buffer",
        format!("is {events}, and {why}, so there is no prefix index whose events could be kept"),
        "remove it, or make the layers without a window paged",
    ))
}

fn check_scales(int8: &Int8Config, geometry: &Geometry) -> Result<(), Complaint> {
    if int8.scale == ScaleKind::PerGroup32 && !geometry.head_dim.is_multiple_of(32) {
        return Err(Complaint::with_help(
            "cache.int8.scale",
            format!("groups of 32 do not divide the model's head_dim of {}", geometry.head_dim),
            "write \"per-token-head\" or \"per-tensor\"",
        ));
    }
    for (key, scale) in
        [("cache.int8.k_scale", &int8.k_scale), ("cache.int8.v_scale", &int8.v_scale)]
    {
        match (scale, int8.scale) {
            (Some(scale), ScaleKind::PerTensor) => check_static_scale(key, scale, geometry)?,
            (None, ScaleKind::PerTensor) => {
                return Err(Complaint::new(
                    key,
                    "is missing; cache.int8.scale = \"per-tensor\" needs it",
                ));
            }
            (Some(_), kind) => {
                return Err(Complaint::with_help(
                    key,
                    format!("cache.int8.scale = \"{kind}\" computes its scales from the data"),
                    "remove it, or write cache.int8.scale = \"per-tensor\"",
                ));
            }
            (None, _) => {}
        }
    }
    Ok(())
}

fn check_static_scale(
    key: &str,
    scale: &StaticScale,
    geometry: &Geometry,
) -> Result<(), Complaint> {
    let usable = |key: &str, scale: f32| {
        if scale.is_finite() && scale > 0.0 {
            return Ok(());
        }
        // Too large for f32 is infinite here, and too small is 0.
        Err(Complaint::new(
            key,
            format!("{scale} is no finite number above 0 (in single precision)"),
        ))
    };
    match scale {
        StaticScale::One(scale) => usable(key, *scale),
        StaticScale::PerLayer(scales) if scales.len() == geometry.windows.len() => scales
            .iter()
            .enumerate()
            .try_for_each(|(layer, scale)| usable(&format!("{key}.{layer}"), *scale)),
        StaticScale::PerLayer(scales) => {
            let problem = format!(
                "has {} for {}",
                counted(scales.len() as u64, "entry"),
                counted(geometry.windows.len() as u64, "layer")
            );
            Err(Complaint::new(key, problem))
        }
    }
}

fn check_hybrid(hybrid: &HybridConfig, geometry: &Geometry) -> Result<(), Complaint> {
    const KEY: &str = "cache.hybrid.contiguous_layers";
    let set = named_layers(&hybrid.contiguous_layers, geometry)
        .map_err(|problem| Complaint::new(KEY, problem))?;
    let shown = describe(&hybrid.contiguous_layers);
    // A plan with one kind of layer only is no hybrid. Most likely the wrong layers were named.
    if !set.contains(&true) {
        return Err(Complaint::with_help(
            KEY,
            format!("{shown} names no layer of this model, so every layer would be paged"),
            "name some layers, or write cache.mode = \"paged\"",
        ));
    }
    if !set.contains(&false) {
        return Err(Complaint::with_help(
            KEY,
            format!("{shown} names all {} layers, so none would be paged", set.len()),
            "name fewer layers, or write cache.mode = \"contiguous\"",
        ));
    }
    Ok(())
}

/// `contiguous_layers` as it was written.
fn describe(layers: &ContiguousLayers) -> String {
    match layers {
        ContiguousLayers::Named(name) => format!("{name:?}"),
        ContiguousLayers::List(_) => "the list".to_owned(),
    }
}

/// Which layers are named, one entry a layer; or what is wrong with the naming.
fn named_layers(layers: &ContiguousLayers, geometry: &Geometry) -> Result<Vec<bool>, String> {
    let num_layers = geometry.windows.len();
    let between = |from: usize, to: usize| -> Vec<bool> {
        (0..num_layers).map(|layer| (from..to).contains(&layer)).collect()
    };
    let name = match layers {
        ContiguousLayers::List(list) => return listed_layers(list, num_layers),
        ContiguousLayers::Named(name) => name.as_str(),
    };
    if name == "windowed" {
        return Ok(geometry.windows.iter().map(|window| *window > 0).collect());
    }
    if let Some(count) = name.strip_prefix("first:").and_then(|count| count.parse().ok()) {
        if !(1..=num_layers).contains(&count) {
            return Err(format!("{name:?} is out of range; the model has {num_layers} layers"));
        }
        return Ok(between(0, count));
    }
    let range = name.split_once("..").and_then(|(from, to)| {
        Some((from.trim().parse::<usize>().ok()?, to.trim().parse::<usize>().ok()?))
    });
    match range {
        Some((from, to)) if from >= to => Err(format!("{name:?} is an empty range of layers")),
        Some((_, to)) if to > num_layers => {
            Err(format!("{name:?} is out of range; the model has {num_layers} layers"))
        }
        Some((from, to)) => Ok(between(from, to)),
        None => Err(format!("{name:?} names no layers")),
    }
}

fn listed_layers(list: &[u32], num_layers: usize) -> Result<Vec<bool>, String> {
    if list.is_empty() {
        return Err("is an empty list".to_owned());
    }
    let mut set = vec![false; num_layers];
    for layer in list {
        match set.get_mut(*layer as usize) {
            Some(true) => return Err(format!("layer {layer} is listed twice")),
            Some(entry) => *entry = true,
            None => {
                return Err(format!(
                    "layer {layer} does not exist; the model has {num_layers}, counted from 0"
                ));
            }
        }
    }
    Ok(set)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(windows: &[u32]) -> Geometry {
        let num_layers = u32::try_from(windows.len()).unwrap();
        Geometry::checked([num_layers, 8, 2, 48], windows, 0).unwrap()
    }

    fn named(text: &str) -> ContiguousLayers {
        ContiguousLayers::Named(text.to_owned())
    }

    #[test]
    fn layers_are_named_in_four_ways() {
        let geometry = model(&[7, 0, 7, 0]);
        for (layers, set) in [
            (named("windowed"), [true, false, true, false]),
            (named("first:1"), [true, false, false, false]),
            (named("first:4"), [true; 4]),
            (named("1..3"), [false, true, true, false]),
            (ContiguousLayers::List(vec![3, 0]), [true, false, false, true]),
        ] {
            assert_eq!(named_layers(&layers, &geometry).unwrap(), set, "{layers:?}");
        }
        for layers in [
            named(""),
            named("all"),
            named("first:"),
            named("first:0"),
            named("first:5"),
            named("first:-1"),
            named("2..2"),
            named("3..1"),
            named("2..5"),
            named("..2"),
            ContiguousLayers::List(vec![]),
            ContiguousLayers::List(vec![4]),
            ContiguousLayers::List(vec![1, 1]),
        ] {
            assert!(named_layers(&layers, &geometry).is_err(), "{layers:?}");
        }
    }

    #[test]
    fn a_hybrid_of_one_kind_is_sent_to_that_mode() {
        let windowed = HybridConfig::default();
        let none = check_hybrid(&windowed, &model(&[0, 0])).unwrap_err();
        assert!(none.help.ends_with("write cache.mode = \"paged\""));
        let all = check_hybrid(&windowed, &model(&[7, 7])).unwrap_err();
        assert!(all.help.ends_with("write cache.mode = \"contiguous\""));
        assert_eq!(check_hybrid(&windowed, &model(&[7, 0])), Ok(()));
    }

    #[test]
    fn groups_of_32_need_a_head_dim_that_they_divide() {
        let int8 = Int8Config { scale: ScaleKind::PerGroup32, ..Int8Config::default() };
        let geometry = model(&[0]);
        assert_eq!(check_scales(&int8, &geometry).unwrap_err().key, "cache.int8.scale");
        let geometry = Geometry { head_dim: 64, ..geometry };
        assert_eq!(check_scales(&int8, &geometry), Ok(()));
    }
}
