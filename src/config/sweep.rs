//! `[[sweep]]`: variants as the product of lists.

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};

use super::complaint::Complaint;
use super::variant::VariantConfig;
use super::{Admission, CacheMode, Capacity, ContiguousLayers, Format};

/// The most variants that all sweeps may come to.
const MAX_VARIANTS: usize = 4096;

/// One `[[sweep]]`: a list for each setting, of which every combination is a variant. A setting
/// that means nothing in a combination's mode (the tokens of a block where every layer is
/// contiguous) is left out of it, and combinations that are then the same are one.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SweepConfig {
    /// The names of its variants begin with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Values of `cache.mode`.
    #[serde(default, deserialize_with = "listed", skip_serializing_if = "Vec::is_empty")]
    pub mode: Vec<CacheMode>,
    /// Values of `cache.tokens_per_block`.
    #[serde(default, deserialize_with = "listed", skip_serializing_if = "Vec::is_empty")]
    pub tokens_per_block: Vec<u32>,
    /// Values of `cache.format`.
    #[serde(default, deserialize_with = "listed", skip_serializing_if = "Vec::is_empty")]
    pub format: Vec<Format>,
    /// Values of `pool.capacity`.
    #[serde(default, deserialize_with = "listed", skip_serializing_if = "Vec::is_empty")]
    pub capacity: Vec<Capacity>,
    /// Values of `cache.admission`.
    #[serde(default, deserialize_with = "listed", skip_serializing_if = "Vec::is_empty")]
    pub admission: Vec<Admission>,
    /// Values of `cache.prefix_reuse`.
    #[serde(default, deserialize_with = "listed", skip_serializing_if = "Vec::is_empty")]
    pub prefix_reuse: Vec<bool>,
    /// Values of `cache.hybrid.contiguous_layers`.
    #[serde(default, deserialize_with = "listed", skip_serializing_if = "Vec::is_empty")]
    pub contiguous_layers: Vec<ContiguousLayers>,
}

/// Reads a list that is not empty: one without values would be no list at all.
fn listed<'de, D: Deserializer<'de>, T: Deserialize<'de>>(from: D) -> Result<Vec<T>, D::Error> {
    let list = Vec::deserialize(from)?;
    if list.is_empty() {
        let help = "give it values, or leave it out for the file's own";
        let complaint = Complaint::with_help("", "is an empty list", help);
        return Err(D::Error::custom(complaint.into_serde_text()));
    }
    Ok(list)
}

/// The values of a list, or the one "as the file has it".
fn values<T: Clone>(list: &[T]) -> Vec<Option<T>> {
    if list.is_empty() { vec![None] } else { list.iter().cloned().map(Some).collect() }
}

impl SweepConfig {
    /// Refuses a sweep over nothing, and one that is too large behind so many variants of others.
    /// Gives how many there are with its own.
    pub(super) fn check(&self, index: usize, before: usize) -> Result<usize, Complaint> {
        let lens = [
            self.mode.len(),
            self.tokens_per_block.len(),
            self.format.len(),
            self.capacity.len(),
            self.admission.len(),
            self.prefix_reuse.len(),
            self.contiguous_layers.len(),
        ];
        let key = format!("sweep.{index}");
        if lens.iter().all(|len| *len == 0) {
            return Err(Complaint::with_help(
                key,
                "has no list",
                "give one, such as tokens_per_block = [16, 32, 64], or remove the sweep",
            ));
        }
        let product =
            lens.iter().try_fold(1_usize, |product, len| product.checked_mul(*len.max(&1)));
        let all = product.and_then(|product| before.checked_add(product));
        all.filter(|all| *all <= MAX_VARIANTS).ok_or_else(|| {
            let problem = match before {
                0 => "comes to more than 4,096 variants",
                _ => "comes to more than 4,096 variants with those before it",
            };
            Complaint::with_help(key, problem, "shorten its lists")
        })
    }

    /// The variants of the sweep, each once. `base` is the mode of the file.
    pub(super) fn variants(&self, base: CacheMode) -> Vec<VariantConfig> {
        let mut variants: Vec<VariantConfig> = Vec::new();
        for mode in values(&self.mode) {
            let effective = mode.unwrap_or(base);
            let blocks = matches!(effective, CacheMode::Paged | CacheMode::Hybrid);
            let kept = |of: bool| move |index: usize| of || index == 0;
            for format in values(&self.format) {
                for capacity in values(&self.capacity) {
                    for (_, tokens_per_block) in
                        (0..).zip(values(&self.tokens_per_block)).filter(|(i, _)| kept(blocks)(*i))
                    {
                        for (_, layers) in (0..)
                            .zip(values(&self.contiguous_layers))
                            .filter(|(i, _)| kept(effective == CacheMode::Hybrid)(*i))
                        {
                            self.add(
                                &mut variants,
                                &VariantConfig {
                                    mode,
                                    format,
                                    capacity,
                                    tokens_per_block: tokens_per_block.filter(|_| blocks),
                                    contiguous_layers: layers
                                        .filter(|_| effective == CacheMode::Hybrid),
                                    ..VariantConfig::default()
                                },
                                effective,
                            );
                        }
                    }
                }
            }
        }
        variants
    }

    /// The combination with every admission and with reuse on and off.
    fn add(&self, variants: &mut Vec<VariantConfig>, plain: &VariantConfig, mode: CacheMode) {
        // The baseline has neither.
        let pooled = mode != CacheMode::Dynamic;
        for admission in values(&self.admission) {
            for prefix_reuse in values(&self.prefix_reuse) {
                let mut variant = VariantConfig {
                    admission: admission.filter(|_| pooled),
                    prefix_reuse: prefix_reuse.filter(|_| pooled),
                    ..plain.clone()
                };
                variant.name = self.name_of(&variant);
                if !variants.contains(&variant) {
                    variants.push(variant);
                }
            }
        }
    }

    /// A name made of the settings whose lists have more than one value.
    fn name_of(&self, variant: &VariantConfig) -> String {
        let mut parts: Vec<String> = self.name.iter().cloned().collect();
        let mut push = |listed: usize, part: Option<String>| {
            if listed > 1 {
                parts.extend(part);
            }
        };
        push(self.mode.len(), variant.mode.map(|mode| mode.to_string()));
        push(self.tokens_per_block.len(), variant.tokens_per_block.map(|n| format!("b{n}")));
        push(self.format.len(), variant.format.map(|format| format.to_string()));
        push(self.capacity.len(), variant.capacity.map(short_capacity));
        push(
            self.admission.len(),
            variant.admission.map(|admission| match admission {
                Admission::Guaranteed => "guaranteed".to_owned(),
                Admission::MaxUtilization => "max-util".to_owned(),
                Admission::StaticBatch => "static".to_owned(),
            }),
        );
        push(
            self.prefix_reuse.len(),
            variant.prefix_reuse.map(
                |on| {
                    if on { "reuse".to_owned() } else { "no-reuse".to_owned() }
                },
            ),
        );
        push(
            self.contiguous_layers.len(),
            variant.contiguous_layers.as_ref().map(|l| match l {
                ContiguousLayers::Named(name) => name.replace(':', ""),
                ContiguousLayers::List(list) => format!("{}-layers", list.len()),
            }),
        );
        if parts.is_empty() { "sweep".to_owned() } else { parts.join("-") }
    }
}

/// A capacity as part of a name.
fn short_capacity(capacity: Capacity) -> String {
    match capacity {
        Capacity::Budget(bytes) => {
            let units =
                [(1_u64 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
            let found = units.iter().find(|(unit, _)| bytes.get().is_multiple_of(*unit));
            found.map_or_else(
                || format!("{}B", bytes.get()),
                |(unit, name)| format!("{}{name}", bytes.get() / unit),
            )
        }
        other => other.to_string().replace(':', ""),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_combination_is_a_variant_once() {
        let sweep = SweepConfig {
            mode: vec![CacheMode::Contiguous, CacheMode::Paged],
            tokens_per_block: vec![16, 32],
            prefix_reuse: vec![true, false],
            ..SweepConfig::default()
        };
        let names: Vec<_> =
            sweep.variants(CacheMode::Paged).into_iter().map(|variant| variant.name).collect();
        assert_eq!(
            names,
            [
                "contiguous-reuse",
                "contiguous-no-reuse",
                "paged-b16-reuse",
                "paged-b16-no-reuse",
                "paged-b32-reuse",
                "paged-b32-no-reuse"
            ]
        );
        assert_eq!(sweep.check(0, 0), Ok(8));
        assert_eq!(sweep.check(0, 4088), Ok(4096));
        let many = sweep.check(1, 4089).unwrap_err();
        assert!(many.problem.ends_with("4,096 variants with those before it"), "{many:?}");
        assert_eq!(SweepConfig::default().check(3, 0).unwrap_err().key, "sweep.3");
        let large = SweepConfig {
            tokens_per_block: vec![16; 100],
            capacity: vec![Capacity::Tokens(1); 100],
            ..sweep
        };
        assert!(large.check(0, 0).unwrap_err().problem.contains("4,096"));
    }

    #[test]
    fn names_say_what_differs() {
        let budget = |gib: u64| Capacity::Budget(crate::units::Bytes(gib << 30));
        let sweep = SweepConfig {
            name: Some("a".to_owned()),
            format: vec![Format::F16],
            capacity: vec![budget(1), budget(2048), Capacity::Tokens(7)],
            contiguous_layers: vec![ContiguousLayers::Named("first:2".to_owned())],
            ..SweepConfig::default()
        };
        let variants = sweep.variants(CacheMode::Hybrid);
        let names: Vec<_> = variants.iter().map(|variant| variant.name.as_str()).collect();
        assert_eq!(names, ["a-1GiB", "a-2TiB", "a-tokens7"]);
        assert!(variants[0].contiguous_layers.is_some());
        assert!(sweep.variants(CacheMode::Paged)[0].contiguous_layers.is_none());
        // The baseline has no blocks, no promises and nothing to reuse.
        let dynamic = SweepConfig {
            mode: vec![CacheMode::Dynamic],
            tokens_per_block: vec![16, 32],
            admission: vec![Admission::Guaranteed, Admission::StaticBatch],
            prefix_reuse: vec![true, false],
            ..SweepConfig::default()
        };
        assert_eq!(dynamic.variants(CacheMode::Paged).len(), 1);
    }
}
