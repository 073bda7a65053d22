//! `model.file`: a plan from a file with weights, and files that are none.

use std::fs;
use std::path::Path;

use kvpool::config::{Architecture, ModelFormat, RopeStyle, Source, load};
use kvpool::plan::Plan;

/// The rest of a configuration.
const REST: &str = "
limits = { max_seqs = 2, max_seq_len = 64, max_batch_tokens = 32 }
cache = { mode = 'paged', format = 'f16' }
";

/// A llama2.c file: dim, hidden_dim, layers, heads, KV heads, vocabulary, length.
fn llama2c(numbers: [i32; 7]) -> Vec<u8> {
    let [dim, hidden, layers, heads, kv_heads, vocab, len] = numbers.map(i64::from);
    let head = dim / heads;
    let layer = 2 * dim + 2 * dim * dim + 2 * dim * kv_heads * head + 3 * dim * hidden;
    let embedding = vocab.abs() * dim;
    let output = if vocab < 0 { embedding } else { 0 };
    let weights = embedding + layers * layer + dim + len * head + output;
    let header = numbers.iter().flat_map(|number| number.to_le_bytes());
    header.chain(std::iter::repeat_n(0, weights as usize * 4)).collect()
}

/// A text with its length.
fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

/// The header of a GGUF file with an embedding of 100 tokens, and no weights.
fn gguf(architecture: &str, numbers: &[(&str, u32)]) -> Vec<u8> {
    let mut bytes = b"GGUF\x03\0\0\0".to_vec();
    bytes.extend(1_u64.to_le_bytes());
    bytes.extend((numbers.len() as u64 + 1).to_le_bytes());
    bytes.extend(text("general.architecture"));
    bytes.extend(8_u32.to_le_bytes());
    bytes.extend(text(architecture));
    for (key, number) in numbers {
        bytes.extend(text(&format!("{architecture}.{key}")));
        bytes.extend(4_u32.to_le_bytes());
        bytes.extend(number.to_le_bytes());
    }
    bytes.extend(text("token_embd.weight"));
    bytes.extend(2_u32.to_le_bytes());
    bytes.extend([64_u64, 100].iter().flat_map(|size| size.to_le_bytes()));
    bytes.extend(0_u32.to_le_bytes());
    bytes.extend(0_u64.to_le_bytes());
    bytes
}

const NUMBERS: &[(&str, u32)] = &[
    ("block_count", 7),
    ("embedding_length", 64),
    ("attention.head_count", 4),
    ("attention.head_count_kv", 2),
    ("attention.key_length", 32),
    ("attention.sliding_window", 24),
    ("feed_forward_length", 96),
    ("context_length", 512),
];

/// Loads a configuration whose `model.file` has these bytes; `more` follows in `[model]`.
fn with(bytes: &[u8], more: &str, rest: &str) -> Result<Source, String> {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("weights")).unwrap();
    fs::write(folder.path().join("weights/m.bin"), bytes).unwrap();
    let path = folder.path().join("c.toml");
    fs::write(&path, format!("model = {{ file = 'weights/m.bin'{more} }}{rest}")).unwrap();
    load(&path, &[])
        .map_err(|error| error.to_string().replace(&folder.path().display().to_string(), "FOLDER"))
}

#[test]
fn a_llama2c_file_gives_geometry_and_rotation() {
    for vocab in [100, -100] {
        let source = with(&llama2c([64, 96, 3, 8, 4, vocab, 128]), "", REST).unwrap();
        let geometry = &source.geometry;
        assert_eq!((geometry.num_layers, geometry.num_q_heads, geometry.num_kv_heads), (3, 8, 4));
        assert_eq!((geometry.head_dim, &geometry.windows[..]), (8, &[0, 0, 0][..]));
        let file = source.model_file.as_ref().unwrap();
        assert_eq!((file.format, file.vocab_size), (ModelFormat::Llama2C, 100));
        assert_eq!(file.has_output, vocab < 0);
        let plan = Plan::new(&source.config, geometry).unwrap();
        assert_eq!(plan.rope.unwrap().style, RopeStyle::Pairs);
    }
}

#[test]
fn a_gguf_file_gives_windows_and_two_rotations() {
    let source = with(&gguf("gemma3", NUMBERS), "", REST).unwrap();
    assert_eq!(source.geometry.windows, [24, 24, 24, 24, 24, 0, 24]);
    assert_eq!(source.geometry.head_dim, 32);
    let file = source.model_file.as_ref().unwrap();
    assert_eq!((file.architecture, file.vocab_size), (Architecture::Gemma3, 100));
    assert_eq!(Plan::new(&source.config, &source.geometry).unwrap().rope.unwrap().tables.len(), 2);
    let source = with(&gguf("llama", NUMBERS), "", REST).unwrap();
    assert_eq!(source.geometry.windows, [0; 7]);
}

#[test]
fn what_is_printed_can_be_read_again() {
    let bytes = llama2c([64, 96, 3, 8, 4, 100, 128]);
    let source = with(&bytes, "", REST).unwrap();
    let rope = toml::to_string(&source.config.rope).unwrap();
    let again = with(&bytes, "", &format!("{REST}\n[rope]\n{rope}")).unwrap();
    assert_eq!(again.config, source.config);
}

#[test]
fn files_that_are_no_models_are_refused() {
    let cases: &[(Vec<u8>, &str)] = &[
        (vec![], "it is too short for a model file"),
        (vec![1; 10], "it is neither a GGUF file nor a legacy export of llama2.c: it is too short"),
        (b"# a readme that somebody has named by mistake".to_vec(), "its dim would be"),
        (llama2c([64, 96, 3, 8, 4, 100, 128])[..5000].to_vec(), "it would have"),
        (llama2c([60, 96, 3, 4, 2, 100, 128]), "15 is not a multiple of 8"),
        (gguf("llama", NUMBERS)[..200].to_vec(), "header is damaged"),
        (
            gguf("mamba", NUMBERS),
            "it is a model of the architecture \"mamba\"; expected \"llama\" or",
        ),
        (gguf("llama", &NUMBERS[1..]), "it has no number \"llama.block_count\""),
    ];
    for (bytes, problem) in cases {
        let error = with(bytes, "", REST).unwrap_err();
        assert!(error.starts_with("FOLDER/weights/m.bin: cannot be read: "), "{error}");
        assert!(error.contains(problem), "{error}: expected {problem}");
    }
}

#[test]
fn settings_that_contradict_the_file_are_refused() {
    let bytes = llama2c([64, 96, 3, 8, 4, 100, 128]);
    let error = with(&bytes, ", num_layers = 3", REST).unwrap_err();
    assert!(error.contains("model.num_layers: model.file is given too"), "{error}");
    let error = with(&bytes, ", preset = 'llama-3-8b'", REST).unwrap_err();
    assert!(error.contains("model.file: model.preset is given too"), "{error}");
    let error = with(&bytes, "", &format!("{REST}\n[rope]\ntheta = 500.0")).unwrap_err();
    assert!(
        error.contains("rope: is not as the model of model.file rotates; remove [rope]"),
        "{error}"
    );
    let long = REST.replace("max_seq_len = 64", "max_seq_len = 129");
    let error = with(&bytes, "", &long).unwrap_err();
    assert!(
        error
            .contains("limits.max_seq_len: is 129, and the model of model.file was trained on 128")
    );
    let error = with(&gguf("llama", NUMBERS), ", tokenizer = 't.bin'", REST).unwrap_err();
    assert!(error.contains("model.tokenizer: is given, and the GGUF file"), "{error}");
    let text = format!("model = {{ preset = 'llama-3-8b', tokenizer = 't.bin' }}{REST}");
    let error = kvpool::config::parse(&text, Path::new("t.toml"), &[]).unwrap_err().to_string();
    assert!(error.contains("model.tokenizer: is given without model.file"), "{error}");
}
