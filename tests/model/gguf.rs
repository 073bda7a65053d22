//! Models from GGUF files: SmolLM2-135M-Instruct (Llama) and Gemma-3-270M (windows, two rotations).

use kvpool::cache::BeginOptions;
use kvpool::config::{Architecture, CacheMode, RopeStyle, Source};
use kvpool::job::model::load;
use kvpool::plan::GroupKind;

use super::{at_hand, feed, open, source};

const SMOLLM2: &str = "models/SmolLM2-135M-Instruct.Q4_1.gguf";
const GEMMA3: &str = "models/gemma-3-270m-q4_k_m.gguf";

fn configured(path: &str, cache: &str) -> Option<Source> {
    let path = at_hand(path)?;
    let rest = format!(
        "limits = {{ max_seqs = 3, max_seq_len = 1024, max_batch_tokens = 256, max_step_tokens = 128, max_rewind_tokens = 64 }}
         cache = {{ {cache} }}"
    );
    Some(source(&format!("{{ file = {path:?} }}"), &rest))
}

/// What llama.cpp makes of each text, control tokens taken as such.
#[rustfmt::skip]
const OF_SMOLLM2: &[(&str, &[u32])] = &[
    ("Hello world", &[19556, 905]),
    ("it's  two\n\n three 2024!", &[269, 506, 216, 827, 1116, 1296, 216, 34, 32, 34, 36, 17]),
    ("Grüße, 世界 🦀 x", &[27302, 7170, 34878, 85, 28, 216, 7906, 240, 178, 239, 230, 15107, 116, 218, 1792]),
    ("def f(a):\n    return a+1\n", &[1604, 275, 24, 81, 727, 472, 1003, 253, 27, 33, 198]),
    ("  leading and trailing  ", &[216, 2899, 284, 35079, 256]),
    ("<|im_start|>user\nHi<|im_end|>\n", &[1, 4093, 198, 26843, 2, 198]),
    ("He said \"don't\" -- twice...\t\tok", &[3681, 1137, 476, 12420, 982, 18, 3009, 6757, 2026, 197, 197, 2231]),
    ("a\u{a0}b  \n\n\n  c", &[81, 15442, 82, 256, 1116, 3805, 265]),
    ("<start_of_turn>user\nHi<end_of_turn>\n", &[44, 3738, 79, 1714, 79, 20589, 46, 4093, 198, 26843, 44, 486, 79, 1714, 79, 20589, 46, 198]),
    ("<h1>x</h1>\n\n\n\ny", &[44, 88, 33, 46, 104, 9617, 88, 33, 46, 16506, 198, 105]),
];

#[rustfmt::skip]
const OF_GEMMA3: &[(&str, &[u32])] = &[
    ("Hello world", &[9259, 1902]),
    ("it's  two\n\n three 2024!", &[509, 236789, 236751, 138, 13498, 108, 1806, 236743, 236778, 236771, 236778, 236812, 236888]),
    ("Grüße, 世界 🦀 x", &[9322, 236959, 16756, 236764, 84679, 236743, 248714, 1123]),
    ("def f(a):\n    return a+1\n", &[2063, 517, 236769, 236746, 1473, 107, 140, 2060, 496, 236862, 236770, 107]),
    ("  leading and trailing  ", &[138, 26016, 532, 45330, 138]),
    ("<|im_start|>user\nHi<|im_end|>\n", &[236820, 236909, 548, 236779, 3041, 111038, 2364, 107, 10979, 236820, 236909, 548, 236779, 643, 111038, 107]),
    ("He said \"don't\" -- twice...\t\tok", &[2209, 1176, 623, 13246, 236789, 236745, 236775, 2617, 10911, 1390, 255969, 680]),
    ("नमस्ते मित्र", &[226767, 29291]),
    ("a\u{a0}b  \n\n\n  c", &[236746, 432, 398, 236763, 138, 109, 138, 236755]),
    ("<start_of_turn>user\nHi<end_of_turn>\n", &[105, 2364, 107, 10979, 106, 107]),
    ("<h1>x</h1>\n\n\n\ny", &[184, 236781, 191, 110, 236762]),
];

#[test]
fn tokens_are_those_of_an_independent_program() {
    for (path, cases) in [(SMOLLM2, OF_SMOLLM2), (GEMMA3, OF_GEMMA3)] {
        let Some(source) = configured(path, "mode = 'paged'") else { continue };
        let model = load(&source).expect("loads");
        for (text, tokens) in cases {
            assert_eq!(model.tokenizer.encode(text, true), *tokens, "{path}: {text:?}");
            assert_eq!(model.tokenizer.decode(None, tokens), *text, "{path}");
        }
        let control = model.tokenizer.encode("<|im_end|><end_of_turn>", false);
        assert!(control.len() > 2 && !control.iter().any(|token| model.tokenizer.is_end(*token)));
    }
}

#[test]
fn the_plan_comes_from_the_file() {
    if let Some(source) = configured(SMOLLM2, "mode = 'paged'") {
        let file = source.model_file.as_ref().expect("given");
        let preset = kvpool::config::PRESETS.iter().find(|one| one.name == "smollm2-135m");
        assert_eq!(source.geometry, preset.expect("built in").geometry());
        assert_eq!(
            (file.architecture, file.dim, file.context_len),
            (Architecture::Llama, 576, 8192)
        );
        let rope = source.config.rope.as_ref().expect("filled in");
        assert_eq!((rope.theta, rope.style), (Some(1e5), RopeStyle::Pairs));
    }
    if let Some(source) = configured(GEMMA3, "mode = 'hybrid', format = 'f16'") {
        let preset = kvpool::config::PRESETS.iter().find(|one| one.name == "gemma-3-270m");
        assert_eq!(source.geometry, preset.expect("built in").geometry());
        let rope = source.config.rope.as_ref().expect("filled in");
        assert_eq!((rope.theta, rope.window_theta), (Some(1e6), Some(1e4)));
        let model = load(&source).expect("loads");
        let (cache, _) = open(&model, &source);
        let plan = cache.plan();
        assert_eq!(plan.mode, CacheMode::Hybrid);
        for group in &plan.groups {
            let ring = group.window == Some(512);
            assert_eq!(group.kind == GroupKind::Contiguous, ring, "{group:?}");
        }
    }
}

/// Text that is longer than Gemma's window.
fn text(model: &kvpool::job::model::Model, len: usize) -> Vec<u32> {
    let story: String =
        (0..120).map(|i| format!("Chapter {i}: the {i}th day was like no other. ")).collect();
    model.tokenizer.prompt(&story)[..len].to_vec()
}

#[test]
fn scores_are_the_same_bits_in_every_mode_behind_the_window_and_after_a_rewind() {
    for (path, len) in [(SMOLLM2, 150), (GEMMA3, 700)] {
        for format in ["f16", "int8"] {
            let mut scores: Vec<Vec<f32>> = Vec::new();
            for mode in ["paged", "hybrid", "contiguous"] {
                let hybrid = if mode == "hybrid" && path == SMOLLM2 {
                    ", hybrid = { contiguous_layers = 'first:9' }"
                } else {
                    ""
                };
                let cache = format!("mode = '{mode}', format = '{format}'{hybrid}");
                let Some(source) = configured(path, &cache) else { continue };
                let model = load(&source).expect("loads");
                let (mut cache, mut engine) = open(&model, &source);
                let tokens = text(&model, len);
                let begun = cache.begin(&tokens, BeginOptions::default()).expect("room");
                let mut last = Vec::new();
                let step = if mode == "paged" { 128 } else { 100 };
                for chunk in tokens.chunks(step) {
                    last = feed(&mut engine, &mut cache, begun.sequence, chunk);
                }
                let at = len - 20;
                cache.truncate(begun.sequence, at as u32).expect("within the rewind");
                feed(&mut engine, &mut cache, begun.sequence, &[5, 6, 7]);
                cache.truncate(begun.sequence, at as u32).expect("within the rewind");
                let again = feed(&mut engine, &mut cache, begun.sequence, &tokens[at..]);
                assert_eq!(again, last, "{path}, {cache:?}", cache = cache.plan().mode);
                cache.check_invariants().expect("sound");
                scores.push(last);
            }
            assert!(scores.iter().all(|one| *one == scores[0]), "{path}, {format}");
        }
    }
}

#[test]
fn a_file_that_was_cut_off_says_so_with_its_numbers() {
    let Some(path) = at_hand(SMOLLM2) else { return };
    let whole = std::fs::read(path).expect("reads");
    let folder = tempfile::tempdir().expect("a folder");
    let cut = folder.path().join("cut.gguf");
    // Inside of the header, of the tensors, and just before the end of the last of them.
    for (len, says) in [
        (1000, "its header is damaged"),
        (50_000_000, "and the file has 50000000; it was cut off"),
        (whole.len() - 64, "it was cut off"),
    ] {
        std::fs::write(&cut, &whole[..len]).expect("writes");
        let config = folder.path().join("cut.toml");
        let text = "model = { file = 'cut.gguf' }
            limits = { max_seqs = 1, max_seq_len = 64, max_batch_tokens = 8 }
            cache = { mode = 'paged' }";
        std::fs::write(&config, text).expect("writes");
        let problem = match kvpool::config::load(&config, &[]) {
            Ok(source) => load(&source).expect_err("it is not whole").to_string(),
            Err(error) => error.to_string(),
        };
        assert!(problem.contains(says) && problem.contains("cut.gguf"), "{len}: {problem}");
    }
}
