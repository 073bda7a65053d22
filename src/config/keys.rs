//! What every key of the file expects, in one table.
//!
//! Errors of the TOML's types and of the checks take their help from here, so a key is described
//! the same way whatever is wrong with its value.

/// Each key, and what it expects. Indexes of lists are left out.
const EXPECTED: &[(&str, &str)] = &[
    (
        "model",
        "expected a table [model] with a preset, an hf_config, a file, or the model's numbers",
    ),
    ("model.preset", "expected the name of a built-in model, such as \"llama-3-8b\""),
    ("model.hf_config", "expected the path of a Hugging Face config.json, from this file's folder"),
    ("model.file", "expected the path of a GGUF or llama2.c model, from this file's folder"),
    ("model.tokenizer", "expected the path of a llama2.c tokenizer, from this file's folder"),
    ("model.num_layers", "expected a whole number from 1 to 4096"),
    ("model.num_q_heads", "expected a whole number from 1 to 1024, a multiple of num_kv_heads"),
    ("model.num_kv_heads", "expected a whole number from 1 to 1024 that divides num_q_heads"),
    ("model.head_dim", "expected a multiple of 8 from 8 to 1024"),
    (
        "model.attention_window",
        "expected a list of window lengths in tokens (0 = all), such as [4096] or [4096, 0]: one, a \
         pattern that is repeated over the layers, or one a layer",
    ),
    ("model.sink_tokens", "expected a whole number of tokens from 0 to 16,777,216"),
    ("limits", "expected a table [limits] with max_seqs, max_seq_len and max_batch_tokens"),
    ("limits.max_seqs", "expected a whole number from 1 to 1,048,576"),
    ("limits.max_seq_len", "expected a whole number of tokens from 1 to 16,777,216"),
    ("limits.max_batch_tokens", "expected a whole number of tokens from 1 to 16,777,216"),
    (
        "limits.max_step_tokens",
        "expected a whole number of tokens from 1 to limits.max_batch_tokens",
    ),
    ("limits.max_rewind_tokens", "expected a whole number of tokens from 0 to limits.max_seq_len"),
    ("cache", "expected a table [cache] with mode"),
    (
        "cache.mode",
        "expected \"contiguous\", \"paged\" or \"hybrid\" (in a job with workload.compute = \"none\" also \"dynamic\")",
    ),
    ("cache.tokens_per_block", "expected 8, 16, 32, 64 or 128"),
    ("cache.format", "expected \"f32\", \"f16\", \"bf16\" or \"int8\""),
    ("cache.admission", "expected \"guaranteed\", \"max-utilization\" or \"static-batch\""),
    ("cache.watermark_blocks", "expected a whole number of blocks, 0 or more"),
    ("cache.prefix_reuse", "expected true or false"),
    ("cache.event_buffer", "expected a whole number of events from 0 (keep none) to 1,048,576"),
    ("cache.int8", "expected a table [cache.int8]"),
    ("cache.int8.scale", "expected \"per-token-head\", \"per-group-32\" or \"per-tensor\""),
    ("cache.int8.k_scale", "expected a finite number above 0, or a list of one for each layer"),
    ("cache.int8.v_scale", "expected a finite number above 0, or a list of one for each layer"),
    ("cache.hybrid", "expected a table [cache.hybrid]"),
    (
        "cache.hybrid.contiguous_layers",
        "expected \"windowed\", \"first:N\", \"A..B\" (B not included), or a list of layers counted from 0",
    ),
    ("rope", "expected a table [rope]"),
    ("rope.theta", "expected a finite number above 1, such as 500000.0, or none with model.preset"),
    ("rope.dims", "expected a multiple of 8 (of 16 for \"halves\"), at most the model's head_dim"),
    ("rope.style", "expected \"halves\" or \"pairs\""),
    (
        "rope.scaling",
        "expected { kind = \"linear\", factor = 8.0 }, { kind = \"llama3\", … } or { kind = \"yarn\", … }",
    ),
    ("rope.window_theta", "expected a finite number above 1, such as 10000.0"),
    ("pool", "expected a table [pool]"),
    ("pool.capacity", super::capacity::FORMS),
    ("pool.typical_seq_len", "expected a whole number of tokens from 1 to limits.max_seq_len"),
    ("pool.scrub", "expected \"off\", \"on-release\" or \"on-reuse\""),
    ("device", "expected a table [device]"),
    ("device.kind", "expected \"cpu\" or \"cuda\""),
    ("device.ordinal", "expected the number of a GPU, from 0, with device.kind = \"cuda\""),
    ("device.threads", "expected a whole number from 0 (one for each core) to 1024"),
    (
        "device.kernel",
        "expected \"auto\", \"reference\", \"portable\", \"avx2\", \"avx512\" or \"avx512-bf16\"",
    ),
    ("device.memory_limit", "expected a number of bytes above 0, or a size such as \"24 GiB\""),
    ("workload", "expected a table [workload] with kind"),
    (
        "workload.kind",
        "expected \"generator\", \"azure-csv\", \"mooncake-jsonl\", \"lengths-csv\" or \"openai-jsonl\"",
    ),
    ("workload.compute", "expected \"attention\" or \"none\""),
    ("workload.seed", "expected a whole number from 0 to 9,223,372,036,854,775,807"),
    ("workload.requests", "expected a whole number from 1 to 10,000,000"),
    ("workload.path", "expected the path of a trace, from the current directory"),
    ("workload.tokenizer", "expected the path of a tokenizer.json, from the current directory"),
    ("workload.prompt_tokens", super::length::DISTRIBUTIONS),
    ("workload.output_tokens", super::length::DISTRIBUTIONS),
    ("workload.shared_prefix_tokens", super::length::DISTRIBUTIONS),
    ("workload.answers", super::length::DISTRIBUTIONS),
    ("workload.num_shared_prefixes", "expected a whole number from 1 to 1,000,000"),
    (
        "workload.turns",
        "expected how many turns a conversation has: { dist = \"fixed\", value = 4 }, { dist = \"uniform\", \
         min = 1, max = 8 } or { dist = \"lognormal\", median = 3, sigma = 0.5, min = 1, max = 12 }",
    ),
    ("workload.max_open_conversations", "expected a whole number, 1 or more"),
    ("workload.think_ms", super::length::DISTRIBUTIONS),
    ("workload.tool_calls", super::length::DISTRIBUTIONS),
    ("workload.tool_tokens", super::length::DISTRIBUTIONS),
    ("workload.tool_ms", super::length::DISTRIBUTIONS),
    ("workload.arrivals", "expected \"at-once\", \"trace\", \"poisson\" or \"bursts\""),
    ("workload.time_scale", "expected a number above 0, at most 1,000,000"),
    ("workload.requests_per_s", "expected how many arrive in a second, from 0.000001 to 1,000,000"),
    ("workload.burst_requests", "expected a whole number from 1 to 10,000,000"),
    ("workload.columns", "expected a table [workload.columns]"),
    ("workload.columns.prompt", "expected the name of a column, as the file's first line has it"),
    ("workload.columns.output", "expected the name of a column, as the file's first line has it"),
    ("workload.columns.arrival", "expected the name of a column, as the file's first line has it"),
    ("workload.columns.arrival_unit", "expected \"ns\", \"us\", \"ms\", \"s\" or \"datetime\""),
    ("workload.hash_block_tokens", "expected a whole number of tokens from 1 to 1,048,576"),
    ("workload.skip_damaged_lines", "expected true or false"),
    ("workload.length_scale", "expected a number above 0, at most 1"),
    ("workload.check_samples", "expected a whole number from 0 to 1,000,000"),
    ("generate", "expected a table [generate] with engine and prompts"),
    ("generate.engine", "expected \"model\""),
    ("generate.prompts", "expected the path of a file of prompts, from the current directory"),
    ("generate.answers", "expected a whole number from 1 to 1024"),
    ("generate.max_tokens", "expected a whole number of tokens, 1 or more"),
    ("generate.temperature", "expected a finite number, 0 or more"),
    ("generate.top_p", "expected a number above 0, at most 1"),
    ("generate.seed", "expected a whole number from 0 to 9,223,372,036,854,775,807"),
    ("generate.stop", "expected a list of texts"),
    ("generate.ignore_end", "expected true or false"),
    ("generate.spread", "expected true or false"),
    ("cost", "expected a table [cost] with bandwidth, step_us and weight_bytes"),
    (
        "cost.bandwidth",
        "expected how many bytes a second the device's memory moves, 1 MB or more, such as \"3.35 TB\"",
    ),
    ("cost.step_us", "expected a number of microseconds, 0 or more, at most 1,000,000,000"),
    ("cost.token_us", "expected a number of microseconds, 0 or more, at most 1,000,000,000"),
    ("cost.weight_bytes", "expected a number of bytes, or a size such as \"16 GB\""),
    ("goals", "expected a table [goals] with first_token_ms and token_ms"),
    ("goals.first_token_ms", "expected a number of milliseconds above 0"),
    ("goals.token_ms", "expected a number of milliseconds above 0"),
    ("sweep", "expected a list of tables, each opened with [[sweep]]"),
    ("sweep.name", "expected a name that the names of its variants begin with"),
    ("variant", "expected a list of tables, each opened with [[variant]]"),
    ("variant.name", "expected a name that no other variant of the file has"),
];

/// The keys of the workload whose value is a distribution.
const DISTRIBUTED: [&str; 9] = [
    "prompt_tokens",
    "output_tokens",
    "shared_prefix_tokens",
    "answers",
    "turns",
    "think_ms",
    "tool_calls",
    "tool_tokens",
    "tool_ms",
];

/// The fields of a distribution.
const DISTRIBUTION: &[(&str, &str)] = &[
    ("dist", "expected \"fixed\", \"uniform\", \"lognormal\" or \"bimodal\""),
    ("value", "expected a whole number"),
    ("min", "expected a whole number, at most max"),
    ("max", "expected a whole number, at least min"),
    ("median", "expected a finite number above 0"),
    ("sigma", "expected a finite number, 0 or more"),
    ("second_median", "expected a finite number above 0"),
    ("second_share", "expected a number from 0 to 1"),
];

/// The settings that a variant can override: the variant's key, and the setting's own.
pub(super) const OVERRIDABLE: &[(&str, &str)] = &[
    ("mode", "cache.mode"),
    ("tokens_per_block", "cache.tokens_per_block"),
    ("format", "cache.format"),
    ("scale", "cache.int8.scale"),
    ("contiguous_layers", "cache.hybrid.contiguous_layers"),
    ("capacity", "pool.capacity"),
    ("admission", "cache.admission"),
    ("watermark_blocks", "cache.watermark_blocks"),
    ("prefix_reuse", "cache.prefix_reuse"),
    ("event_buffer", "cache.event_buffer"),
    ("threads", "device.threads"),
    ("kernel", "device.kernel"),
];

/// The places that hold a table. serde would also take a list there, and read its entries in the
/// order of the struct's fields.
pub(super) const TABLES: &[&str] = &[
    "model",
    "limits",
    "cache",
    "cache.int8",
    "cache.hybrid",
    "rope",
    "rope.scaling",
    "pool",
    "device",
    "workload",
    "workload.prompt_tokens",
    "workload.output_tokens",
    "workload.shared_prefix_tokens",
    "workload.answers",
    "workload.turns",
    "workload.think_ms",
    "workload.tool_calls",
    "workload.tool_tokens",
    "workload.tool_ms",
    "workload.columns",
    "generate",
    "cost",
    "goals",
];

/// What the dotted key expects, as `expected …`.
pub(super) fn expected(key: &str) -> Option<&'static str> {
    let parts: Vec<&str> = key.split('.').filter(|part| part.parse::<usize>().is_err()).collect();
    if let ["variant" | "sweep", field] = parts[..]
        && let Some((_, base)) = OVERRIDABLE.iter().find(|(own, _)| *own == field)
    {
        return expected(base);
    }
    if let ["workload", distribution, field] = parts[..]
        && DISTRIBUTED.contains(&distribution)
    {
        return DISTRIBUTION.iter().find(|(own, _)| *own == field).map(|(_, text)| *text);
    }
    let plain = parts.join(".");
    EXPECTED.iter().find(|(own, _)| *own == plain).map(|(_, text)| *text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indexes_and_variants_find_their_setting() {
        assert_eq!(expected("model.attention_window.3"), expected("model.attention_window"));
        assert_eq!(expected("variant.2.threads"), expected("device.threads"));
        assert_eq!(expected("variant.0"), expected("variant"));
        for distribution in DISTRIBUTED {
            assert!(expected(&format!("workload.{distribution}")).is_some());
            assert!(expected(&format!("workload.{distribution}.sigma")).is_some());
        }
        for (own, base) in OVERRIDABLE {
            assert!(expected(base).is_some(), "{own}");
        }
        assert_eq!(expected("limits.max_seq"), None);
        for table in TABLES {
            assert!(expected(table).is_some(), "{table}");
        }
    }
}
