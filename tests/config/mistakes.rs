//! Group 63: unknown and missing keys, wrong types, ranges and units.

use super::{GOOD, JOB, refused, refused_line, with_line};

#[test]
fn edge_63_unknown_keys() {
    let start = "unknown key; did you mean max_seqs? expected one of max_seqs, max_seq_len";
    refused_line(GOOD, 9, "max_seq = 4", "limits.max_seq", &[start]);
    refused_line(GOOD, 19, "frobnicate = 1", "pool.frobnicate", &["unknown key", "capacity"]);
    refused_line(GOOD, 18, "[pooling]", "pooling", &["unknown key; expected one of model, limits"]);
    refused_line(GOOD, 9, "limits = 4", "limits.limits", &["unknown key"]);
    refused_line(JOB, 16, "modes = 1", "variant.0.modes", &["did you mean mode?"]);
    let line = "prompt_tokens = { dist = \"uniform\", min = 16, maxi = 64 }";
    refused_line(JOB, 12, line, "workload.prompt_tokens.maxi", &["did you mean max?"]);
}

#[test]
fn edge_63_missing_keys() {
    let text = with_line(GOOD, 9, "");
    refused(&text, "t.toml:8: limits.max_seqs: is missing; expected a whole number from 1", &[]);
    refused("[model]\npreset = 'llama-3-8b'", "t.toml: limits: is missing; expected a table", &[]);
    let text = with_line(GOOD, 5, "");
    refused(&text, "t.toml:1: model.head_dim: is missing", &["expected a multiple of 8"]);
    let text = with_line(JOB, 15, "");
    refused(&text, "t.toml:14: variant.0.name: is missing", &["expected a name"]);
}

#[test]
fn edge_63_wrong_types_of_a_number() {
    let tokens = "expected a whole number from 1 to 1,048,576";
    for (value, shown) in [
        ("\"4\"", "found the string \"4\""),
        ("4.0", "found the float 4.0"),
        ("-1", "found the integer -1"),
        ("true", "found true"),
        ("[4]", "found a list"),
        ("{}", "found a table"),
        ("2026-01-01", "found the date 2026-01-01"),
        ("0", "0 is out of range"),
        ("1048577", "1048577 is out of range"),
        ("4294967296", "found the integer 4294967296"),
        ("99999999999999999999", ""),
    ] {
        let line = format!("max_seqs = {value}");
        refused_line(GOOD, 9, &line, "limits.max_seqs", &[shown, tokens]);
    }
}

#[test]
fn edge_63_ranges_and_choices() {
    for (line, text, key, parts) in [
        (2, "num_layers = 0", "model.num_layers", ["0 is out of range", "from 1 to 4096"]),
        (3, "num_q_heads = 7", "model.num_q_heads", ["no multiple of 2", "expected a whole"]),
        (5, "head_dim = 60", "model.head_dim", ["60 is not", "a multiple of 8"]),
        (10, "max_seq_len = 16777217", "limits.max_seq_len", ["out of range", "16,777,216"]),
        (11, "max_batch_tokens = 0", "limits.max_batch_tokens", ["out of range", "16,777,216"]),
        (14, "mode = \"pages\"", "cache.mode", ["found the string \"pages\"", "\"paged\""]),
        (15, "tokens_per_block = 24", "cache.tokens_per_block", ["24 is not", "8, 16, 32, 64"]),
        (16, "format = \"fp16\"", "cache.format", ["the string \"fp16\"", "\"bf16\""]),
        (16, "admission = \"batch\"", "cache.admission", ["\"batch\"", "\"static-batch\""]),
        (16, "prefix_reuse = 1", "cache.prefix_reuse", ["the integer 1", "expected true or false"]),
        (16, "event_buffer = 1048577", "cache.event_buffer", ["out of range", "1,048,576"]),
        (
            16,
            "event_buffer = true",
            "cache.event_buffer",
            ["found true", "a whole number of events"],
        ),
        (16, "watermark_blocks = -1", "cache.watermark_blocks", ["the integer -1", "of blocks"]),
        (22, "threads = 1025", "device.threads", ["1025 is out of range", "to 1024"]),
        (22, "kernel = \"sse\"", "device.kernel", ["the string \"sse\"", "\"avx2\""]),
        (22, "kind = \"gpu\"", "device.kind", ["the string \"gpu\"", "expected \"cpu\""]),
    ] {
        refused_line(GOOD, line, text, key, &parts);
    }
}

#[test]
fn edge_63_tables_where_tables_belong() {
    // serde would read a list as a struct, field by field.
    let text =
        GOOD.replace("[pool]\ncapacity = \"worst-case\"", "").replace("[device]\nthreads = 2", "");
    let text = format!("pool = [\"worst-case\"]\n{text}");
    refused(&text, "t.toml:1: pool: found a list; expected a table [pool]", &[]);
    let text = format!("variant = [[\"a\"]]\n{GOOD}");
    refused(&text, "t.toml:1: variant.0: found a list; expected a list of tables", &[]);
    let text = format!("{GOOD}[variant]\nname = \"a\"\n");
    refused(&text, "t.toml:23: variant: found a table; expected a list of tables", &[]);
}

#[test]
fn edge_63_wrong_units() {
    let forms = "expected \"worst-case\", \"tokens:N\", \"blocks:N\"";
    for (value, shown) in [
        ("\"budget:16 GiBs\"", "\"16 GiBs\" is not a size"),
        ("\"budget:0\"", "holds nothing"),
        ("\"budget:-4 GiB\"", "is not a size"),
        ("\"budget:99999999999 TiB\"", "is 16 EiB or more"),
        ("\"tokens:0\"", "holds nothing"),
        ("\"tokens:1.5\"", "is not a whole number"),
        ("\"blocks:-8\"", "is not a whole number"),
        ("\"blocks:99999999999999999999\"", "does not fit in 64 bits"),
        ("\"24 GiB\"", "is no capacity"),
        ("24", "found the integer 24"),
    ] {
        let line = format!("capacity = {value}");
        refused_line(GOOD, 19, &line, "pool.capacity", &[shown, forms]);
    }
    let size = "expected a number of bytes above 0, or a size such as \"24 GiB\"";
    for (value, shown) in [
        ("\"16 GiBs\"", "\"16 GiBs\" is not a size"),
        ("-1", "found the integer -1"),
        ("0", "0 is out of range"),
        ("\"16777215 TiB\"", "is out of range"),
        ("1.5", "found the float 1.5"),
        ("true", "found true"),
    ] {
        let line = format!("memory_limit = {value}");
        refused_line(GOOD, 22, &line, "device.memory_limit", &[shown, size]);
    }
}
