//! `[[variant]]`: the settings that `kvpool run` compares.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use super::complaint::Complaint;
use super::keys::OVERRIDABLE;
use super::{
    Admission, CacheConfig, CacheMode, Capacity, Config, ContiguousLayers, Format, HybridConfig,
    KernelChoice, ScaleKind,
};

/// One `[[variant]]`: a name, and what it changes in the rest of the file.
///
/// A variant replaces the settings that belong to another mode or format: one that sets `format`
/// to something other than `int8` drops the file's `[cache.int8]`, one that sets `mode` to
/// something other than `hybrid` drops `[cache.hybrid]`, one that sets `scale` to something
/// other than `per-tensor` drops `k_scale` and `v_scale`, one whose mode or capacity leaves
/// nothing to divide drops `pool.typical_seq_len`, one that sets `admission` to something other
/// than `max-utilization` drops `watermark_blocks`, one that turns `prefix_reuse` off drops
/// `event_buffer`, and one that sets `mode` to `contiguous` drops both.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VariantConfig {
    /// Names it in reports; no two variants share a name.
    pub name: String,
    /// Replaces `cache.mode`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<CacheMode>,
    /// Replaces `cache.tokens_per_block`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens_per_block: Option<u32>,
    /// Replaces `cache.format`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<Format>,
    /// Replaces `cache.int8.scale`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scale: Option<ScaleKind>,
    /// Replaces `cache.hybrid.contiguous_layers`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub contiguous_layers: Option<ContiguousLayers>,
    /// Replaces `pool.capacity`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity: Option<Capacity>,
    /// Replaces `cache.admission`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub admission: Option<Admission>,
    /// Replaces `cache.watermark_blocks`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub watermark_blocks: Option<u32>,
    /// Replaces `cache.prefix_reuse`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefix_reuse: Option<bool>,
    /// Replaces `cache.event_buffer`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub event_buffer: Option<u32>,
    /// Replaces `device.threads`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub threads: Option<u32>,
    /// Replaces `device.kernel`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel: Option<KernelChoice>,
}

impl VariantConfig {
    /// The configuration that the variant runs with: `base` with its changes, and without the
    /// list of variants.
    #[must_use]
    pub fn apply(&self, base: &Config) -> Config {
        let mut config = Config { variant: Vec::new(), sweep: Vec::new(), ..base.clone() };
        let cache = &mut config.cache;
        cache.mode = self.mode.unwrap_or(cache.mode);
        if self.mode.is_some_and(|mode| mode != CacheMode::Hybrid) {
            cache.hybrid = None;
        }
        if let Some(layers) = &self.contiguous_layers {
            cache.hybrid = Some(HybridConfig { contiguous_layers: layers.clone() });
        }
        cache.format = self.format.unwrap_or(cache.format);
        if self.format.is_some_and(|format| format != Format::Int8) {
            cache.int8 = None;
        }
        if let Some(scale) = self.scale {
            let int8 = cache.int8.get_or_insert_default();
            int8.scale = scale;
            if scale != ScaleKind::PerTensor {
                int8.k_scale = None;
                int8.v_scale = None;
            }
        }
        cache.tokens_per_block = self.tokens_per_block.unwrap_or(cache.tokens_per_block);
        self.apply_sharing(cache);
        config.pool.capacity = self.capacity.unwrap_or(config.pool.capacity);
        let divided = matches!(
            config.pool.capacity,
            Capacity::Tokens(_) | Capacity::Budget(_) | Capacity::BudgetPercent(_)
        );
        let undivided = |mode| matches!(mode, CacheMode::Contiguous | CacheMode::Dynamic);
        let changed = self.mode.is_some_and(undivided) || self.capacity.is_some();
        if changed && (undivided(config.cache.mode) || !divided) {
            config.pool.typical_seq_len = None;
        }
        config.device.threads = self.threads.unwrap_or(config.device.threads);
        config.device.kernel = self.kernel.unwrap_or(config.device.kernel);
        config
    }

    /// The part of [`Self::apply`] about admission and reuse.
    fn apply_sharing(&self, cache: &mut CacheConfig) {
        let contiguous = matches!(self.mode, Some(CacheMode::Contiguous | CacheMode::Dynamic));
        let promising =
            self.admission.is_some_and(|admission| admission != Admission::MaxUtilization);
        if promising || contiguous {
            cache.watermark_blocks = 0;
        }
        if self.prefix_reuse == Some(false) || contiguous {
            cache.event_buffer = 0;
        }
        cache.admission = self.admission.unwrap_or(cache.admission);
        cache.watermark_blocks = self.watermark_blocks.unwrap_or(cache.watermark_blocks);
        cache.prefix_reuse = self.prefix_reuse.unwrap_or(cache.prefix_reuse);
        cache.event_buffer = self.event_buffer.unwrap_or(cache.event_buffer);
    }

    /// Whether the variant sets one of its own keys.
    fn sets(&self, key: &str) -> bool {
        match key {
            "mode" => self.mode.is_some(),
            "tokens_per_block" => self.tokens_per_block.is_some(),
            "format" => self.format.is_some(),
            "scale" => self.scale.is_some(),
            "contiguous_layers" => self.contiguous_layers.is_some(),
            "capacity" => self.capacity.is_some(),
            "admission" => self.admission.is_some(),
            "watermark_blocks" => self.watermark_blocks.is_some(),
            "prefix_reuse" => self.prefix_reuse.is_some(),
            "event_buffer" => self.event_buffer.is_some(),
            "threads" => self.threads.is_some(),
            "kernel" => self.kernel.is_some(),
            _ => false,
        }
    }

    /// Refuses a change that means nothing in the variant's own mode or format.
    pub(super) fn check(&self, effective: &Config) -> Result<(), Complaint> {
        if self.scale.is_some() && effective.cache.format != Format::Int8 {
            return Err(Complaint::with_help(
                "scale",
                format!("the variant's format is {}, which has no scales", effective.cache.format),
                "remove it, or give the variant format = \"int8\"",
            ));
        }
        if self.contiguous_layers.is_some() && effective.cache.mode != CacheMode::Hybrid {
            return Err(Complaint::with_help(
                "contiguous_layers",
                format!("the variant's mode is {}", effective.cache.mode),
                "remove it, or give the variant mode = \"hybrid\"",
            ));
        }
        Ok(())
    }

    /// A complaint about the effective configuration as one about this variant, which is the
    /// `index`th of the file.
    pub(super) fn own_complaint(&self, index: usize, complaint: Complaint) -> Complaint {
        let Complaint { key, problem, help } = complaint;
        // A list's index stays at the end.
        let own = OVERRIDABLE.iter().find_map(|(own, base)| {
            let rest = key.strip_prefix(base)?;
            (self.sets(own) && (rest.is_empty() || rest.starts_with('.')))
                .then(|| format!("variant.{index}.{own}{rest}"))
        });
        match own {
            Some(key) => Complaint { key, problem, help },
            None => Complaint {
                key: format!("variant.{index}"),
                problem: format!("with variant {:?}, {key}: {problem}", self.name),
                help,
            },
        }
    }
}

/// Refuses names that are empty or given twice.
pub(super) fn check_names(variants: &[VariantConfig]) -> Result<(), Complaint> {
    let mut seen = HashMap::new();
    for (index, variant) in variants.iter().enumerate() {
        let key = || format!("variant.{index}.name");
        if variant.name.trim().is_empty() {
            return Err(Complaint::new(key(), "is empty"));
        }
        if variant.name.chars().any(char::is_control) {
            return Err(Complaint::new(key(), "has a line break or another control character"));
        }
        if let Some(first) = seen.insert(variant.name.as_str(), index) {
            let problem = format!("{:?} is the name of variant.{first} too", variant.name);
            return Err(Complaint::new(key(), problem));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::{Int8Config, StaticScale, parse};
    use super::*;

    fn base() -> Config {
        let text = "
            model.preset = 'gemma-3-1b'
            limits = { max_seqs = 2, max_seq_len = 64, max_batch_tokens = 64 }
            [cache]
            mode = 'hybrid'
            format = 'int8'
            hybrid.contiguous_layers = 'windowed'
            int8 = { scale = 'per-tensor', k_scale = 0.5, v_scale = 0.25 }
        ";
        parse(text, Path::new("t.toml"), &[]).unwrap().config
    }

    #[test]
    fn a_variant_replaces_what_belongs_to_the_other_mode_or_format() {
        let variant = VariantConfig {
            mode: Some(CacheMode::Paged),
            format: Some(Format::F32),
            threads: Some(3),
            ..VariantConfig::default()
        };
        let config = variant.apply(&base());
        assert_eq!(config.cache.mode, CacheMode::Paged);
        assert_eq!((config.cache.hybrid, config.cache.int8), (None, None));
        assert_eq!((config.cache.format, config.device.threads), (Format::F32, 3));

        // Naming the mode and format that the file has drops nothing.
        let same = VariantConfig {
            mode: Some(CacheMode::Hybrid),
            format: Some(Format::Int8),
            ..VariantConfig::default()
        };
        assert_eq!(same.apply(&base()), base());
    }

    #[test]
    fn static_scales_stay_with_per_tensor_only() {
        let scaled = |scale| VariantConfig { scale: Some(scale), ..VariantConfig::default() };
        let static_scales = Int8Config {
            scale: ScaleKind::PerTensor,
            k_scale: Some(StaticScale::One(0.5)),
            v_scale: Some(StaticScale::One(0.25)),
        };
        let kept = scaled(ScaleKind::PerTensor).apply(&base());
        assert_eq!(kept.cache.int8, Some(static_scales));
        let dropped = scaled(ScaleKind::PerGroup32).apply(&base());
        let expected = Int8Config { scale: ScaleKind::PerGroup32, k_scale: None, v_scale: None };
        assert_eq!(dropped.cache.int8, Some(expected));
    }

    #[test]
    fn what_belongs_to_another_admission_or_to_reuse_is_dropped() {
        let mut base = base();
        base.cache.admission = Admission::MaxUtilization;
        (base.cache.watermark_blocks, base.cache.event_buffer) = (4, 64);
        let kept = VariantConfig { threads: Some(1), ..VariantConfig::default() }.apply(&base);
        assert_eq!((kept.cache.watermark_blocks, kept.cache.event_buffer), (4, 64));
        let off = VariantConfig {
            admission: Some(Admission::StaticBatch),
            prefix_reuse: Some(false),
            ..VariantConfig::default()
        };
        let dropped = off.apply(&base).cache;
        assert_eq!((dropped.watermark_blocks, dropped.event_buffer), (0, 0));
        assert_eq!((dropped.admission, dropped.prefix_reuse), (Admission::StaticBatch, false));
        let mode = Some(CacheMode::Contiguous);
        let dropped = VariantConfig { mode, ..VariantConfig::default() }.apply(&base).cache;
        assert_eq!((dropped.watermark_blocks, dropped.event_buffer), (0, 0));
        // What the variant itself says stays, for the check to refuse.
        let said = VariantConfig { watermark_blocks: Some(2), event_buffer: Some(3), ..off };
        let said = said.apply(&base).cache;
        assert_eq!((said.watermark_blocks, said.event_buffer), (2, 3));
    }

    #[test]
    fn complaints_name_the_variants_own_key() {
        let variant = VariantConfig { threads: Some(9999), ..VariantConfig::default() };
        let own = variant.own_complaint(2, Complaint::new("device.threads", "is too large"));
        assert_eq!(own.key, "variant.2.threads");
        let other = variant.own_complaint(2, Complaint::new("cache.int8.k_scale", "is missing"));
        assert_eq!(other.key, "variant.2");
        assert!(other.problem.contains("cache.int8.k_scale: is missing"));
    }
}
