//! stories260K: a trained Llama of 260,000 parameters, whose greedy text is documented.

use std::fs;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

use kvpool::cache::{BeginOptions, Cache};
use kvpool::config::Source;
use kvpool::error::ModelError;
use kvpool::job::model::batch::{self, Answer, Finish, Listener, Request};
use kvpool::job::model::sample::{Sampling, best};
use kvpool::job::model::{Engine, Model, load};

use super::{at_hand, feed, open, source};

const MODES: [&str; 3] = [
    "mode = 'contiguous'",
    "mode = 'paged'",
    "mode = 'hybrid', hybrid = { contiguous_layers = [1, 3] }",
];

fn files() -> Option<(PathBuf, PathBuf)> {
    let folder = at_hand("models/stories260K")?;
    Some((folder.join("stories260K.bin"), folder.join("tok512.bin")))
}

fn configured(cache: &str) -> Option<Source> {
    let (file, tokenizer) = files()?;
    let model = format!("{{ file = {file:?}, tokenizer = {tokenizer:?} }}");
    let rest = format!(
        "limits = {{ max_seqs = 6, max_seq_len = 512, max_batch_tokens = 96, max_step_tokens = 64 }}
         cache = {{ {cache}, tokens_per_block = 8 }}
         device = {{ threads = 2 }}"
    );
    Some(source(&model, &rest))
}

/// The text that the model's page gives for greedy sampling.
fn documented() -> String {
    let page = at_hand("models/stories260K/stories260K.md").expect("beside the model");
    let page = fs::read_to_string(page).expect("a text");
    let from = page.find("-t 0.0\n").expect("the command") + "-t 0.0\n".len();
    let text = &page[from..];
    text[..text.find("\n```").expect("the end of the block")].to_owned()
}

/// Nobody stops a run here.
static NEVER: AtomicBool = AtomicBool::new(false);

#[derive(Default)]
struct Collected {
    answers: Vec<(usize, Vec<Answer>)>,
    told: Vec<(usize, u32, String)>,
}

impl Listener for Collected {
    fn text(&mut self, request: usize, answer: u32, text: &str) {
        self.told.push((request, answer, text.to_owned()));
    }

    fn done(&mut self, request: usize, answers: Vec<Answer>) -> Result<(), ModelError> {
        self.answers.push((request, answers));
        Ok(())
    }
}

impl Collected {
    fn of(&self, request: usize) -> &[Answer] {
        &self.answers.iter().find(|(of, _)| *of == request).expect("it is done").1
    }

    fn told(&self, request: usize, answer: u32) -> String {
        let told = self.told.iter().filter(|told| (told.0, told.1) == (request, answer));
        told.map(|told| told.2.as_str()).collect()
    }
}

fn request(model: &Model, prompt: &str, max_tokens: u32) -> Request {
    Request {
        prompt: model.tokenizer.prompt(prompt),
        answers: 1,
        max_tokens,
        sampling: Sampling::default(),
        stop: Vec::new(),
        ignore_ends: false,
    }
}

fn run(
    engine: &mut Engine<'_>,
    cache: &mut Cache,
    model: &Model,
    requests: &[Request],
) -> (Collected, batch::Counts) {
    let mut collected = Collected::default();
    let counts = batch::run(engine, cache, &model.tokenizer, requests, &mut collected, &NEVER)
        .expect("runs");
    cache.check_invariants().expect("sound");
    assert_eq!(cache.stats().seqs, 0);
    (collected, counts)
}

#[test]
fn the_documented_text_comes_out_alone_under_reuse_and_in_a_batch() {
    for mode in MODES {
        for format in ["f32", "f16"] {
            let Some(source) = configured(&format!("{mode}, format = '{format}'")) else { return };
            let expected = documented();
            let model = load(&source).expect("loads");
            let (mut cache, mut engine) = open(&model, &source);
            let greedy = request(&model, "", 256);

            let (alone, _) = run(&mut engine, &mut cache, &model, std::slice::from_ref(&greedy));
            let [answer] = alone.of(0) else { panic!("one answer") };
            assert_eq!(answer.text.trim_end(), expected, "{mode}, {format}");
            assert_eq!(alone.told(0, 0), answer.text);

            // What the first run has left in the cache begins this prompt.
            let prefix = &answer.tokens[..100];
            let mut again = greedy.clone();
            again.prompt.extend_from_slice(prefix);
            again.max_tokens -= 100;
            let mut others = [
                request(&model, "Once upon a time, there was a dog", 100),
                request(&model, "Tim", 60),
            ];
            others[1].sampling = Sampling { temperature: 1.0, top_p: 0.9, seed: 3 };
            others[1].answers = 3;
            let requests = [&others[..], &[again.clone(), greedy.clone()]].concat();
            let (batch, counts) = run(&mut engine, &mut cache, &model, &requests);
            assert!(batch.of(2)[0].cached_tokens >= 96, "{mode}, {format}: {counts:?}");
            assert_eq!(batch.of(2)[0].tokens, answer.tokens[100..], "{mode}, {format}");
            assert_eq!(batch.of(3)[0].text, answer.text, "{mode}, {format}");
            assert_eq!(counts.peak_running, 6);
        }
    }
}

#[test]
fn scores_are_the_same_bits_however_the_tokens_came_into_the_cache() {
    for mode in MODES {
        for format in ["f32", "f16", "int8"] {
            let Some(source) = configured(&format!("{mode}, format = '{format}'")) else { return };
            let model = load(&source).expect("loads");
            let (mut cache, mut engine) = open(&model, &source);
            let tokens =
                model.tokenizer.prompt("Once upon a time, there was a little girl named Lily.");
            let (head, tail) = tokens.split_at(tokens.len() - 5);
            let begin = |cache: &mut Cache, tokens: &[u32]| {
                cache.begin(tokens, BeginOptions::default()).expect("room")
            };

            // In one piece, into an empty cache.
            let fresh = begin(&mut cache, &tokens).sequence;
            let expected = feed(&mut engine, &mut cache, fresh, &tokens);
            // A shared prefix.
            let shared = begin(&mut cache, &tokens);
            assert!(shared.cached_len >= 8, "{mode}: {}", shared.cached_len);
            let rest = &tokens[shared.cached_len as usize..];
            assert_eq!(
                feed(&mut engine, &mut cache, shared.sequence, rest),
                expected,
                "{mode} {format}"
            );
            // A rewind, over tokens that were others.
            cache.truncate(fresh, head.len() as u32).expect("rewinds");
            feed(&mut engine, &mut cache, fresh, &[7, 8, 9]);
            cache.truncate(fresh, head.len() as u32).expect("rewinds");
            let fork = cache.fork(fresh).expect("room");
            assert_eq!(feed(&mut engine, &mut cache, fresh, tail), expected, "{mode} {format}");
            // A fork.
            assert_eq!(feed(&mut engine, &mut cache, fork, tail), expected, "{mode} {format}");
            // Chunks, and nothing to share.
            for seq in [fresh, shared.sequence, fork] {
                cache.release(seq).expect("alive");
            }
            cache.reset().expect("empty");
            let chunked = begin(&mut cache, &tokens);
            assert_eq!(chunked.cached_len, 0);
            let mut last = Vec::new();
            for chunk in tokens.chunks(3) {
                last = feed(&mut engine, &mut cache, chunked.sequence, chunk);
            }
            assert_eq!(last, expected, "{mode} {format}");
        }
    }
}

#[test]
fn modes_give_the_same_bits_and_a_rotation_in_the_engine_the_same_as_one_in_the_cache() {
    let mut scores = Vec::new();
    for mode in MODES {
        let Some(mut source) = configured(&format!("{mode}, format = 'f16'")) else { return };
        let model = load(&source).expect("loads");
        let tokens = model.tokenizer.prompt("Lily had a red ball and a dog");
        for rotates in ["cache", "engine"] {
            if rotates == "engine" {
                // `config_of` would fill it in again.
                source.model_file = None;
                source.config.rope = None;
            }
            let (mut cache, mut engine) = open(&model, &source);
            assert_eq!(cache.plan().rope.is_some(), rotates == "cache");
            let seq = cache.begin(&tokens, BeginOptions::default()).expect("room").sequence;
            scores.push(feed(&mut engine, &mut cache, seq, &tokens));
        }
    }
    assert!(scores.iter().all(|one| *one == scores[0]));
}

#[test]
fn an_engine_that_counts_positions_itself_writes_nonsense() {
    let Some(mut source) = configured("mode = 'paged', format = 'f32'") else { return };
    let model = load(&source).expect("loads");
    source.model_file = None;
    source.config.rope = None;
    let mut texts = Vec::new();
    for loses in [false, true] {
        let (mut cache, mut engine) = open(&model, &source);
        if loses {
            engine.lose_positions();
        }
        let (collected, _) = run(&mut engine, &mut cache, &model, &[request(&model, "", 120)]);
        texts.push(collected.of(0)[0].text.clone());
    }
    assert!(documented().starts_with(&texts[0]));
    // The words of the right text that the wrong one has at the same place: only the first few.
    let equal = texts[0].split(' ').zip(texts[1].split(' ')).filter(|(a, b)| a == b).count();
    let words = texts[0].split(' ').count();
    assert!(words > 40 && equal < words / 3, "{equal} of {words}: {}", texts[1]);
}

#[test]
fn answers_do_not_depend_on_the_pool_or_on_preemptions() {
    let Some(roomy) = configured("mode = 'paged', format = 'f16'") else { return };
    let model = load(&roomy).expect("loads");
    let mut requests: Vec<Request> = ["Tim had a", "", "The big dog", "Once upon"]
        .iter()
        .map(|prompt| request(&model, prompt, 120))
        .collect();
    for (seed, request) in (1..).zip(&mut requests) {
        request.sampling = Sampling { temperature: 0.9, top_p: 0.9, seed };
        request.answers = 2;
    }
    let (mut cache, mut engine) = open(&model, &roomy);
    let (expected, counts) = run(&mut engine, &mut cache, &model, &requests);
    assert_eq!(counts.preemptions, 0);
    let cache = "mode = 'paged', format = 'f16', admission = 'max-utilization'";
    let Some(mut tight) = configured(cache) else { return };
    tight.config.pool.capacity = kvpool::config::Capacity::Blocks(40);
    let (mut cache, mut engine) = open(&model, &tight);
    let (got, counts) = run(&mut engine, &mut cache, &model, &requests);
    assert!(counts.preemptions > 0, "{counts:?}");
    for request in 0..requests.len() {
        for (got, expected) in got.of(request).iter().zip(expected.of(request)) {
            assert_eq!((&got.text, got.finish), (&expected.text, expected.finish));
        }
        assert_ne!(got.of(request)[0].text, got.of(request)[1].text);
    }
}

#[test]
fn an_answer_ends_at_a_stop_text_and_never_shows_part_of_it() {
    let Some(source) = configured("mode = 'paged', format = 'f16'") else { return };
    let model = load(&source).expect("loads");
    let (mut cache, mut engine) = open(&model, &source);
    let mut stopped = request(&model, "", 200);
    stopped.stop = vec!["ball. She wanted".to_owned(), "never said".to_owned()];
    let (collected, _) = run(&mut engine, &mut cache, &model, &[stopped]);
    let [answer] = collected.of(0) else { panic!("one answer") };
    assert_eq!(answer.finish, Finish::Stop);
    assert!(answer.text.ends_with("she saw a big, red "), "{}", answer.text);
    assert_eq!(collected.told(0, 0), answer.text);
}

#[test]
fn text_goes_to_tokens_and_back() {
    let Some(source) = configured("mode = 'paged'") else { return };
    let model = load(&source).expect("loads");
    let tokenizer = &model.tokenizer;
    for text in ["Once upon a time", "  two  blanks", "Grüße, 世界 🦀", "\n\ttabs\u{0}", "x"]
    {
        let tokens = tokenizer.prompt(text);
        assert_eq!(tokens[0], 1);
        assert_eq!(tokenizer.decode(Some(1), &tokens[1..]), text, "{tokens:?}");
    }
    // The reference program's tokens of this text.
    assert_eq!(tokenizer.prompt("Once upon a time"), [1, 403, 407, 261, 378]);
    assert_eq!(tokenizer.prompt(""), [1]);
}

#[test]
fn a_token_that_does_not_exist_is_refused_and_changes_nothing() {
    let Some(source) = configured("mode = 'paged'") else { return };
    let model = load(&source).expect("loads");
    let (mut cache, mut engine) = open(&model, &source);
    let seq = cache.begin(&[1], BeginOptions::default()).expect("room").sequence;
    let input = kvpool::job::model::StepInput { seqs: &[(seq, 1)], tokens: &[512], wanted: &[0] };
    let error = engine.step(&mut cache, input).expect_err("there are 512");
    assert_eq!(error.to_string(), "there is no token 512; the model has 512");
    assert_eq!(cache.seq_len(seq), Ok(0));
    assert_eq!(best(&feed(&mut engine, &mut cache, seq, &[1])), 403);
}

/// Four prompts that begin with the same 100 tokens and come at once: the first reads them, the
/// others wait that long, and find them. Without reuse nobody waits.
#[test]
fn what_another_is_reading_is_waited_for_and_read_once() {
    let Some(source) = configured("mode = 'paged', format = 'f16'") else { return };
    let model = load(&source).expect("loads");
    let long = "Lily and her dog went to the park. They saw a big tree. ".repeat(5);
    let requests: Vec<Request> = ["The dog", "The tree", "Lily", "They"]
        .iter()
        .map(|end| request(&model, &format!("{long}{end}"), 20))
        .collect();
    let common = model.tokenizer.prompt(&long).len() as u64 - 8;
    assert!(common > 80, "{common}");
    let (mut cache, mut engine) = open(&model, &source);
    let (with, counts) = run(&mut engine, &mut cache, &model, &requests);
    assert!(counts.cached_tokens >= 3 * (common - 8), "{counts:?}, {common}");
    assert_eq!(counts.peak_running, 4);

    let Some(source) = configured("mode = 'paged', format = 'f16', prefix_reuse = false") else {
        return;
    };
    let (mut cache, mut engine) = open(&model, &source);
    let (without, counts) = run(&mut engine, &mut cache, &model, &requests);
    assert_eq!((counts.cached_tokens, counts.peak_running), (0, 4));
    for request in 0..4 {
        assert_eq!(with.of(request)[0].text, without.of(request)[0].text);
    }
}
