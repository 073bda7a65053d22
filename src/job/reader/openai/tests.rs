//! Forms of requests, what is refused, and that equal beginnings have equal hashes.

use proptest::prelude::*;

use super::*;
use crate::config::WorkloadKind;

fn requests(config: &WorkloadConfig) -> Requests {
    Requests::new(config).expect("no tokenizer, or a good one")
}

fn plain() -> Requests {
    requests(&WorkloadConfig::new(WorkloadKind::OpenaiJsonl))
}

/// A line's lengths and hashes.
fn row(requests: &mut Requests, line: &str) -> Result<(u32, u32, Vec<u64>), String> {
    let mut hashes = Vec::new();
    requests
        .row(line, &mut hashes)
        .map(|row| (row.prompt_tokens, row.output_tokens, hashes.clone()))
}

#[test]
fn lists_of_tokens_need_no_tokenizer() {
    let mut plain = plain();
    let tokens: Vec<u32> = (0..20).collect();
    let line = format!("{{\"prompt\": {tokens:?}, \"max_tokens\": 7, \"model\": \"m\", \"n\": 1}}");
    let (prompt, output, hashes) = row(&mut plain, &line).expect("a request");
    assert_eq!((prompt, output, hashes.len()), (20, 7, 3));
    let batch = format!(
        "{{\"custom_id\": \"a\", \"method\": \"POST\", \"url\": \"/v1/completions\", \"body\": {line}}}"
    );
    assert_eq!(row(&mut plain, &batch).expect("a request"), (prompt, output, hashes));
    let both = line.replace("\"max_tokens\": 7", "\"max_tokens\": 7, \"max_completion_tokens\": 9");
    assert_eq!(row(&mut plain, &both).expect("a request").1, 9, "the newer name counts");
}

#[test]
fn edge_63_what_is_no_request_is_refused() {
    for (line, words) in [
        ("{}", "has no messages and no prompt; expected {\"messages\""),
        ("x", "expected value at column 1 in \"x\""),
        ("{\"prompt\": 4, \"max_tokens\": 1}", "prompt is no text, no list of tokens, and no list"),
        ("{\"prompt\": [], \"max_tokens\": 1}", "the prompt has no tokens"),
        ("{\"prompt\": [-1], \"max_tokens\": 1}", "prompt is no text, no list of tokens"),
        ("{\"prompt\": [1]}", "has no max_tokens; give it, or say how long answers are"),
        ("{\"prompt\": [1], \"max_tokens\": 0}", "max_tokens is 0"),
        ("{\"prompt\": [1], \"max_tokens\": -2}", "invalid value: integer `-2`"),
        ("{\"prompt\": [1], \"max_tokens\": 2, \"n\": 3}", "n is not 1"),
        ("{\"prompt\": [\"a\", \"b\"], \"max_tokens\": 2}", "a list of 2 texts"),
        ("{\"prompt\": \"a\", \"max_tokens\": 2}", "give workload.tokenizer"),
        ("{\"messages\": [], \"max_tokens\": 2}", "messages is an empty list"),
        ("{\"messages\": [], \"prompt\": [1]}", "has messages and a prompt"),
        ("{\"body\": {\"input\": \"embed\"}}", "has no messages and no prompt"),
        (
            "{\"messages\": [{\"role\": \"user\", \"content\": [{\"type\": \"image_url\", \"image_url\": {}}]}]}",
            "a part of type \"image_url\"; expected texts alone",
        ),
    ] {
        let error = row(&mut plain(), line).expect_err(line);
        assert!(error.contains(words), "{line}: {error}");
    }
}

#[test]
fn outputs_are_drawn_and_at_most_what_requests_say() {
    let uniform = LengthDistribution::Uniform { min: 3, max: 90 };
    let drawing = WorkloadConfig {
        output_tokens: Some(uniform),
        ..WorkloadConfig::new(WorkloadKind::OpenaiJsonl)
    };
    let all = |seed| {
        let mut requests = requests(&WorkloadConfig { seed, ..drawing.clone() });
        (0..9)
            .map(|_| row(&mut requests, "{\"prompt\": [1]}").expect("drawn").1)
            .collect::<Vec<_>>()
    };
    assert_eq!(all(1), all(1));
    assert_ne!(all(1), all(2));
    assert!(all(1).iter().all(|output| (3..=90).contains(output)));
    let most = |most: u32| {
        let mut requests = requests(&drawing);
        let line = format!("{{\"prompt\": [1], \"max_tokens\": {most}}}");
        let outputs: Vec<u32> =
            (0..9).map(|_| row(&mut requests, &line).expect("drawn").1).collect();
        assert_eq!(requests.capped(), 0);
        outputs
    };
    let all = all(WorkloadConfig::new(WorkloadKind::OpenaiJsonl).seed);
    assert_eq!(most(500), all);
    assert_eq!(most(20), all.iter().map(|output| *output.min(&20)).collect::<Vec<_>>());
    // Without a distribution the limit is all that is known.
    let mut plain = plain();
    let said = row(&mut plain, "{\"prompt\": [1], \"max_tokens\": 500}");
    assert_eq!((said.expect("said").1, plain.capped()), (500, 1));
}

proptest! {
    #[test]
    fn hashes_are_equal_exactly_as_far_as_prompts_are(
        a in prop::collection::vec(0..3_u32, 1..40),
        b in prop::collection::vec(0..3_u32, 1..40),
        shared in 0..40_usize,
    ) {
        let b: Vec<u32> = a.iter().take(shared).chain(&b).copied().collect();
        let mut plain = plain();
        let mut hashes = |tokens: &Vec<u32>| {
            row(&mut plain, &format!("{{\"prompt\": {tokens:?}, \"max_tokens\": 1}}")).expect("a request").2
        };
        let [of_a, of_b] = [hashes(&a), hashes(&b)];
        for (index, (own, other)) in of_a.iter().zip(&of_b).enumerate() {
            let run = |tokens: &Vec<u32>| tokens[index * 8..tokens.len().min(index * 8 + 8)].to_vec();
            prop_assert_eq!(own == other, run(&a) == run(&b));
        }
    }
}

#[cfg(not(feature = "model"))]
#[test]
fn a_program_without_tokenizers_says_how_to_build_one() {
    let named = WorkloadConfig {
        tokenizer: Some("tokenizer.json".into()),
        ..WorkloadConfig::new(WorkloadKind::OpenaiJsonl)
    };
    let error = Requests::new(&named).expect_err("none");
    assert!(error.contains("tokenizer.json") && error.contains("--features model"), "{error}");
}

#[cfg(feature = "model")]
mod with_tokenizer {
    use super::*;

    /// One token a word or mark.
    const WORDS: &str = r#"{"version": "1.0", "truncation": {"direction": "Right", "max_length": 2,
        "strategy": "LongestFirst", "stride": 0}, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": {"?": 0, "one": 1, "two": 2, "user": 3}, "unk_token": "?"}}"#;

    fn tokenizing() -> (Requests, tempfile::TempDir) {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("tokenizer.json");
        std::fs::write(&path, WORDS).expect("written");
        let named = WorkloadConfig {
            tokenizer: Some(path),
            ..WorkloadConfig::new(WorkloadKind::OpenaiJsonl)
        };
        (requests(&named), folder)
    }

    #[test]
    fn texts_and_chats_are_counted() {
        let (mut requests, _folder) = tokenizing();
        let line = "{\"prompt\": \"one two one\", \"max_tokens\": 2}";
        let text = row(&mut requests, line).expect("a request");
        // The file was saved to cut off after two tokens, which is not for prompts.
        assert_eq!((text.0, text.1), (3, 2));
        let tokens = row(&mut requests, "{\"prompt\": [1, 2, 1], \"max_tokens\": 2}");
        assert_eq!(tokens.expect("a request"), text);
        let list = row(&mut requests, "{\"prompt\": [\"one two one\"], \"max_tokens\": 2}");
        assert_eq!(list.expect("a request"), text);
        let chat = |content: &str| {
            format!(
                "{{\"messages\": [{{\"role\": \"user\", \"content\": {content}}}], \"max_tokens\": 2}}"
            )
        };
        // "<|im_start|>": "<|", "im_start", "|>"; then the role, the words, the end and the
        // answer's beginning.
        let one = row(&mut requests, &chat("\"one \\\"two\\\"\"")).expect("a request");
        let parts = chat(
            "[{\"type\": \"text\", \"text\": \"one \"}, {\"type\": \"text\", \"text\": \"\\\"two\\\"\"}]",
        );
        assert_eq!(row(&mut requests, &parts).expect("a request"), one);
        // A mark behind a mark is one with it: "\"<|".
        assert_eq!(one.0, 3 + 1 + 4 + 2 + 3 + 1);
        let called = row(&mut requests, &chat("null")).expect("a message without a text");
        assert_eq!(called.0, 3 + 1 + 3 + 3 + 1);
        // A longer chat begins with the shorter one's whole runs.
        let more = chat("\"one \\\"two\\\"\"")
            .replace("}], ", "}, {\"role\": \"assistant\", \"content\": \"two two two\"}], ");
        let more = row(&mut requests, &more).expect("a request");
        assert!(more.0 > one.0 && more.2[0] == one.2[0]);
    }

    #[test]
    fn a_file_that_is_no_tokenizer_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |path: std::path::PathBuf| {
            let named = WorkloadConfig {
                tokenizer: Some(path),
                ..WorkloadConfig::new(WorkloadKind::OpenaiJsonl)
            };
            Requests::new(&named).expect_err("no tokenizer")
        };
        assert!(at(folder.path().join("none.json")).contains("none.json"));
        let path = folder.path().join("other.json");
        std::fs::write(&path, "{}").expect("written");
        assert!(at(path).contains("is no tokenizer.json"));
    }
}
