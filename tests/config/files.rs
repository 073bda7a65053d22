//! Group 63: texts and files that are no configuration, and `--set`.

use std::fs;
use std::path::Path;

use kvpool::config::{CacheMode, Capacity, load, parse};
use kvpool::error::Origin;

use super::{GOOD, INT8, JOB, read, refused, refused_line, with_line};

#[test]
fn edge_63_duplicate_keys() {
    let text = with_line(GOOD, 10, "max_seqs = 5");
    refused(
        &text,
        "t.toml:10: limits.max_seqs: duplicate key, given on line 9 already; expected",
        &[],
    );
    let text = with_line(GOOD, 18, "[limits]");
    refused(&text, "t.toml:18: limits: duplicate key, given on line 8 already; expected", &[]);
}

#[test]
fn edge_63_duplicate_keys_of_inline_tables_and_variants() {
    let line = "prompt_tokens = { dist = \"fixed\", value = 1, value = 2 }";
    refused_line(JOB, 12, line, "workload.prompt_tokens.value", &["duplicate key; expected"]);
    let text = with_line(JOB, 16, "name = \"c\"");
    refused(&text, "t.toml:16: variant.name: duplicate key", &[]);
}

#[test]
fn edge_63_syntax() {
    refused(&with_line(GOOD, 9, "max_seqs = "), "t.toml:9: is no TOML: ", &[]);
    refused(&with_line(GOOD, 9, "max_seqs 4"), "t.toml:9: is no TOML: ", &["expected"]);
    refused(&with_line(GOOD, 14, "mode = \"paged"), "t.toml:14: is no TOML: ", &[]);
    let deep = format!("a = {}", "[".repeat(100_000));
    refused(&deep, "t.toml:1: is no TOML: ", &[]);
}

#[test]
fn edge_63_files_that_are_no_configuration() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("c.toml");
    let message = |content: &[u8]| {
        fs::write(&path, content).unwrap();
        load(&path, &[]).unwrap_err().to_string()
    };
    let at = |rest: &str| format!("{}{rest}", path.display());

    for empty in ["", "\n\n", "# nothing\n", "\u{feff}"] {
        let found = message(empty.as_bytes());
        let expected = ": has no settings; expected at least [model], [limits] and [cache]";
        assert_eq!(found, at(expected), "{empty:?}");
    }
    let latin1 = message(b"[model]\n# caf\xe9\n");
    assert_eq!(latin1, at(":2: byte 0xe9 is not UTF-8; expected a text file in UTF-8"));
    let junk = message(&vec![b'x'; 10_000_000]);
    let expected =
        ": cannot be read: it is too large; expected a configuration of at most 1,048,576 bytes";
    assert_eq!(junk, at(expected));
    // The limit itself is fine, and just as quick.
    let mut padded = GOOD.to_owned();
    padded.push('#');
    padded.push_str(&"x".repeat((1 << 20) - padded.len()));
    fs::write(&path, &padded).unwrap();
    assert!(load(&path, &[]).is_ok());
    padded.push('x');
    assert!(read(&padded).unwrap_err().to_string().contains("too large"));

    let directory = load(folder.path(), &[]).unwrap_err().to_string();
    assert!(directory.ends_with("cannot be read: is a directory; expected a file"), "{directory}");
    let missing = load(&folder.path().join("none.toml"), &[]).unwrap_err().to_string();
    assert!(missing.contains("none.toml: cannot be read: "), "{missing}");
}

#[test]
fn edge_63_a_hugging_face_file_is_reported_by_its_own_lines() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("c.toml");
    let text = with_line(JOB, 2, "hf_config = \"m/config.json\"");
    fs::write(&path, &text).unwrap();
    let message = || load(&path, &[]).unwrap_err().to_string();
    let at_toml = format!("{}:2: model.hf_config: ", path.display());
    assert!(message().starts_with(&at_toml), "{}", message());
    assert!(message().contains("cannot be read"), "{}", message());

    let json = folder.path().join("m/config.json");
    fs::create_dir(folder.path().join("m")).unwrap();
    fs::write(&json, "{\n\"num_hidden_layers\": true }").unwrap();
    let expected = format!(
        "{}:2: num_hidden_layers: found true; expected a whole number of at most 32 bits",
        json.display()
    );
    assert_eq!(message(), expected);

    let model = "{ \"model_type\": \"gpt_oss\", \"num_hidden_layers\": 24, \"hidden_size\": 2880 }";
    fs::write(&json, model).unwrap();
    let source = load(&path, &[]).unwrap();
    assert_eq!(source.geometry.windows[..3], [128, 0, 128]);
    assert_eq!(source.geometry.q_heads_per_kv_head(), 8);
}

proptest::proptest! {
    /// Whatever is done to a file, it is read or refused with its name; nothing panics.
    #[test]
    fn edge_63_any_damage_is_reported(
        file in 0_usize..3,
        at in 0_usize..400,
        len in 0_usize..12,
        inserted in "[\\[\\]{}=\"'.,#\n a-z0-9_é-]{0,6}",
    ) {
        let text = [GOOD, INT8, JOB][file];
        let start = at.min(text.len());
        let end = (start + len).min(text.len());
        let damaged = format!("{}{inserted}{}", &text[..start], &text[end..]);
        if let Err(error) = read(&damaged) {
            let message = error.to_string();
            proptest::prop_assert!(message.starts_with("t.toml"), "{}", message);
            proptest::prop_assert!(!message.contains('\u{1f}'), "{}", message);
        }
    }
}

#[test]
fn edge_63_overrides() {
    let with = |argument: &str| parse(GOOD, Path::new("t.toml"), &[argument.to_owned()]);
    let source = with("cache.mode=contiguous").unwrap();
    assert_eq!(source.config.cache.mode, CacheMode::Contiguous);
    assert_eq!(source.origin("cache.mode"), Origin::Override);
    let path = Path::new("t.toml").to_owned();
    assert_eq!(source.origin("cache.format"), Origin::File { path, line: 16 });

    for (argument, start) in [
        ("limits.max_seq=4", "--set: limits.max_seq: unknown key; did you mean max_seqs?"),
        ("limits.max_seqs=0", "--set: limits.max_seqs: 0 is out of range; expected a whole"),
        ("limits.max_seqs=many", "--set: limits.max_seqs: found the string \"many\"; expected"),
        ("limits=4", "--set: limits: found the integer 4; expected a table [limits]"),
        ("limits.max_seqs.x=4", "--set \"limits.max_seqs.x=4\": limits.max_seqs is the integer 4"),
        ("limits.max_seqs", "--set \"limits.max_seqs\": has no =; write --set key=value"),
        ("pool.capacity=16 GiBs", "--set: pool.capacity: \"16 GiBs\" is no capacity; expected"),
        ("cache.int8.scale=per-tensor", "--set: cache.int8: holds scales"),
    ] {
        let message = with(argument).unwrap_err().to_string();
        assert!(message.starts_with(start), "{message}\n{start}");
    }
    // A whole file can be given this way.
    let arguments = [
        "model.preset=llama-3-8b",
        "limits={ max_seqs = 1, max_seq_len = 8, max_batch_tokens = 8 }",
        "cache.mode=paged",
        "variant.0.name=only",
        "variant.0.capacity=tokens:64",
    ];
    let source = parse("", Path::new("t.toml"), &arguments.map(str::to_owned)).unwrap();
    let variants = source.variants();
    assert_eq!(variants[0].0, "only");
    assert_eq!(variants[0].1.pool.capacity, Capacity::Tokens(64));
}
