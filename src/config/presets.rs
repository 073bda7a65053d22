//! The built-in models.
//!
//! The numbers are facts of the models' public `config.json` files (`num_hidden_layers`,
//! `num_attention_heads`, `num_key_value_heads`, `head_dim`, `sliding_window`, `layer_types`,
//! `max_position_embeddings`). Models that keep a latent in place of K and V (multi-head latent
//! attention, such as DeepSeek-V3) are not among them: this cache cannot hold them.

use super::Geometry;
use super::model::repeated;

/// A built-in model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Preset {
    /// Its name in `model.preset`.
    pub name: &'static str,
    /// Transformer layers.
    pub num_layers: u32,
    /// Query heads in a layer.
    pub num_q_heads: u32,
    /// Key/value heads in a layer.
    pub num_kv_heads: u32,
    /// Elements of one head's vector.
    pub head_dim: u32,
    /// The attention windows, repeated over the layers; 0 = all keys.
    pub pattern: &'static [u32],
    /// The longest sequence that the model was made for, in tokens. `limits.max_seq_len` is what
    /// counts; this is for information.
    pub max_position: u32,
}

impl Preset {
    /// The geometry, without attention sinks.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        Geometry {
            num_layers: self.num_layers,
            num_q_heads: self.num_q_heads,
            num_kv_heads: self.num_kv_heads,
            head_dim: self.head_dim,
            windows: repeated(self.pattern, self.num_layers),
            sink_tokens: 0,
        }
    }
}

/// Every layer sees every key.
const FULL: &[u32] = &[0];

/// One row of the table: the name, [layers, query heads, KV heads, head_dim], windows, longest
/// sequence.
const fn model(
    name: &'static str,
    [num_layers, num_q_heads, num_kv_heads, head_dim]: [u32; 4],
    pattern: &'static [u32],
    max_position: u32,
) -> Preset {
    Preset { name, num_layers, num_q_heads, num_kv_heads, head_dim, pattern, max_position }
}

/// All built-in models, family by family.
pub static PRESETS: &[Preset] = &[
    model("llama-2-7b", [32, 32, 32, 128], FULL, 4096),
    model("llama-2-13b", [40, 40, 40, 128], FULL, 4096),
    model("llama-2-70b", [80, 64, 8, 128], FULL, 4096),
    model("llama-3-8b", [32, 32, 8, 128], FULL, 8192),
    model("llama-3-70b", [80, 64, 8, 128], FULL, 8192),
    model("llama-3.1-8b", [32, 32, 8, 128], FULL, 131_072),
    model("llama-3.1-70b", [80, 64, 8, 128], FULL, 131_072),
    model("llama-3.2-1b", [16, 32, 8, 64], FULL, 131_072),
    model("mistral-7b-v0.1", [32, 32, 8, 128], &[4096], 32768),
    model("mistral-7b-v0.3", [32, 32, 8, 128], FULL, 32768),
    model("mixtral-8x7b-v0.1", [32, 32, 8, 128], FULL, 32768),
    model("qwen2.5-0.5b", [24, 14, 2, 64], FULL, 32768),
    model("qwen2.5-7b", [28, 28, 4, 128], FULL, 131_072),
    model("qwen3-0.6b", [28, 16, 8, 128], FULL, 40960),
    model("qwen3-8b", [36, 32, 8, 128], FULL, 40960),
    model("qwen3-30b-a3b", [48, 32, 4, 128], FULL, 40960),
    model("gemma-2-2b", [26, 8, 4, 256], &[4096, 0], 8192),
    model("gemma-2-9b", [42, 16, 8, 256], &[4096, 0], 8192),
    model("gemma-2-27b", [46, 32, 16, 128], &[4096, 0], 8192),
    model("gemma-3-270m", [18, 4, 1, 256], &[512, 512, 512, 512, 512, 0], 32768),
    model("gemma-3-1b", [26, 4, 1, 256], &[512, 512, 512, 512, 512, 0], 32768),
    model("gemma-3-4b", [34, 8, 4, 256], &[1024, 1024, 1024, 1024, 1024, 0], 131_072),
    model("gemma-3-12b", [48, 16, 8, 256], &[1024, 1024, 1024, 1024, 1024, 0], 131_072),
    model("gemma-3-27b", [62, 32, 16, 128], &[1024, 1024, 1024, 1024, 1024, 0], 131_072),
    model("gpt-oss-20b", [24, 64, 8, 64], &[128, 0], 131_072),
    model("gpt-oss-120b", [36, 64, 8, 64], &[128, 0], 131_072),
    model("phi-3-mini-4k", [32, 32, 32, 96], &[2047], 4096),
    model("phi-3-mini-128k", [32, 32, 32, 96], &[262_144], 131_072),
    model("phi-4", [40, 40, 10, 128], FULL, 16384),
    model("smollm2-135m", [30, 9, 3, 64], FULL, 8192),
    model("stories260k", [5, 8, 4, 8], FULL, 512),
];

#[cfg(test)]
mod tests {
    use super::*;

    /// Name, KiB of one token in fp16 over all layers, GiB of 4096 tokens in fp16 with windows
    /// taken into account, and the same in int8 with one fp16 scale a token and head.
    #[rustfmt::skip]
    const PUBLISHED: &[(&str, f64, Option<f64>, Option<f64>)] = &[
        ("llama-2-7b", 512.0, Some(2.000), Some(1.016)),
        ("llama-2-13b", 800.0, Some(3.125), Some(1.587)),
        ("llama-2-70b", 320.0, Some(1.250), Some(0.635)),
        ("llama-3-8b", 128.0, Some(0.500), Some(0.254)),
        ("llama-3-70b", 320.0, Some(1.250), Some(0.635)),
        ("llama-3.1-8b", 128.0, Some(0.500), Some(0.254)),
        ("llama-3.1-70b", 320.0, Some(1.250), Some(0.635)),
        ("llama-3.2-1b", 32.0, Some(0.125), Some(0.064)),
        ("mistral-7b-v0.1", 128.0, Some(0.500), Some(0.254)),
        ("mistral-7b-v0.3", 128.0, Some(0.500), Some(0.254)),
        ("mixtral-8x7b-v0.1", 128.0, Some(0.500), Some(0.254)),
        ("qwen2.5-0.5b", 12.0, Some(0.047), Some(0.024)),
        ("qwen2.5-7b", 56.0, Some(0.219), Some(0.111)),
        ("qwen3-0.6b", 112.0, Some(0.438), Some(0.222)),
        ("qwen3-8b", 144.0, Some(0.562), Some(0.286)),
        ("qwen3-30b-a3b", 96.0, Some(0.375), Some(0.190)),
        ("gemma-2-2b", 104.0, Some(0.406), Some(0.205)),
        ("gemma-2-9b", 336.0, Some(1.312), Some(0.661)),
        ("gemma-2-27b", 368.0, Some(1.438), Some(0.730)),
        ("gemma-3-270m", 18.0, Some(0.019), Some(0.010)),
        ("gemma-3-1b", 26.0, Some(0.026), Some(0.013)),
        ("gemma-3-4b", 136.0, Some(0.191), Some(0.096)),
        ("gemma-3-12b", 384.0, Some(0.562), Some(0.283)),
        ("gemma-3-27b", 496.0, Some(0.719), Some(0.365)),
        ("gpt-oss-20b", 48.0, Some(0.097), Some(0.050)),
        ("gpt-oss-120b", 72.0, Some(0.145), Some(0.075)),
        ("phi-3-mini-4k", 384.0, Some(0.750), Some(0.383)),
        ("phi-3-mini-128k", 384.0, Some(1.500), Some(0.766)),
        ("phi-4", 200.0, Some(0.781), Some(0.397)),
        ("smollm2-135m", 22.5, Some(0.088), Some(0.045)),
        ("stories260k", 0.625, None, None),
    ];

    /// Bytes of K and V for a sequence of so many tokens, straight from the definition.
    fn kv_bytes(geometry: &Geometry, tokens: u64, bytes_per_head: u64) -> u64 {
        let mut bytes = 0;
        for window in &geometry.windows {
            let kept = if *window == 0 { tokens } else { tokens.min(u64::from(*window)) };
            bytes += 2 * u64::from(geometry.num_kv_heads) * kept * bytes_per_head;
        }
        bytes
    }

    #[expect(clippy::cast_precision_loss, reason = "the published figures have three decimals")]
    fn in_units(bytes: u64, unit: u64) -> f64 {
        bytes as f64 / unit as f64
    }

    #[test]
    fn sizes_are_the_published_ones() {
        assert_eq!(PUBLISHED.len(), PRESETS.len());
        for (name, kib_per_token, fp16_gib, int8_gib) in PUBLISHED {
            let preset = PRESETS.iter().find(|preset| preset.name == *name).unwrap();
            let geometry = preset.geometry();
            let head_dim = u64::from(geometry.head_dim);
            let kib = in_units(kv_bytes(&geometry, 1, 2 * head_dim), 1 << 10);
            assert!((kib - kib_per_token).abs() < 1e-9, "{name}: {kib} KiB");
            for (published, bytes_per_head) in [(fp16_gib, 2 * head_dim), (int8_gib, head_dim + 2)]
            {
                let gib = in_units(kv_bytes(&geometry, 4096, bytes_per_head), 1 << 30);
                // Published to three decimals, so half a unit of the third.
                assert!(
                    published.is_none_or(|published| (gib - published).abs() <= 0.000_501),
                    "{name}: {gib} GiB, published {published:?}"
                );
            }
        }
    }

    #[test]
    fn every_preset_is_a_valid_model() {
        for (index, preset) in PRESETS.iter().enumerate() {
            let Preset { name, num_layers, num_q_heads, num_kv_heads, head_dim, pattern, .. } =
                *preset;
            let numbers = [num_layers, num_q_heads, num_kv_heads, head_dim];
            assert_eq!(Geometry::checked(numbers, pattern, 0), Ok(preset.geometry()), "{name}");
            assert!(
                PRESETS[..index].iter().all(|other| other.name != name),
                "{name} is there twice"
            );
            assert!(
                name.chars().all(|c| matches!(c, 'a'..='z' | '0'..='9' | '-' | '.')),
                "{name} is not kebab-case"
            );
        }
    }

    #[test]
    fn windows_are_where_the_models_have_them() {
        let windowed = |name: &str| {
            let preset = PRESETS.iter().find(|preset| preset.name == name).unwrap();
            preset.geometry().windows.iter().filter(|window| **window > 0).count()
        };
        for (name, layers) in [
            ("gemma-2-2b", 13),
            ("gemma-3-1b", 22),
            ("gemma-3-4b", 29),
            ("gemma-3-27b", 52),
            ("gpt-oss-20b", 12),
            ("mistral-7b-v0.1", 32),
            ("mistral-7b-v0.3", 0),
        ] {
            assert_eq!(windowed(name), layers, "{name}");
        }
    }
}
