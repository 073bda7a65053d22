//! The job of `[generate]`: each variant of a file completes the same prompts with the same model.
//!
//! `kvpool generate --batch` and `kvpool run` come here with one variant or several; what they
//! write is the same, line for line.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use serde::Serialize;
use serde_json::Value;

use super::super::random::scramble;
use super::batch::{self, Counts, Listener, Request};
use super::engine::{Engine, Timing};
use super::jsonl::{self, Defaults, Prompt, ToFile, Writer};
use super::weights::Model;
use crate::cache::Cache;
use crate::config::{CacheMode, Config, Source};
use crate::device::resolve_budget;
use crate::error::{ModelError, OpenError};
use crate::plan::Plan;
use crate::units::Bytes;

/// What the command line asks for beside the file.
#[derive(Clone, Copy, Debug)]
pub struct Options<'a> {
    /// The folder that the completions are written into.
    pub out: &'a Path,
    /// Whether to go on with the files that are there.
    pub resume: bool,
    /// Set from outside: end with what is done.
    pub stop: &'a AtomicBool,
}

/// Is told how a job gets on.
pub trait Observer {
    /// A variant begins; so many requests are left to do.
    fn variant(&mut self, name: &str, index: usize, of: usize, requests: usize);
    /// A request is done.
    fn request(&mut self);
}

/// What was done with a cache, and how long it took.
#[derive(Clone, Copy, Debug)]
pub struct Done {
    /// Counts of the batch.
    pub counts: Counts,
    /// Where the time went.
    pub timing: Timing,
    /// The pool, as planned and as allocated.
    pub pool_bytes: Bytes,
    /// K and V of one token in all layers.
    pub bytes_per_token: Bytes,
    /// Whether prefixes were reused: a plan may decline what the file asks for.
    pub prefix_reuse: bool,
    /// All of it.
    pub wall_s: f64,
}

/// One variant.
#[derive(Clone, Debug, Serialize)]
pub struct VariantRun {
    /// Its name.
    pub variant: String,
    /// How K and V were kept.
    pub mode: CacheMode,
    /// `f16`, `int8`, …
    pub format: String,
    /// The pool.
    pub pool_bytes: u64,
    /// K and V of one token in all layers, scales included.
    pub bytes_per_token: u64,
    /// Whether prefixes were shared.
    pub prefix_reuse: bool,
    /// Requests whose completions are in the file.
    pub requests: usize,
    /// Those that an earlier run had written; the figures below are of this run.
    pub requests_before: usize,
    /// Those of `requests` that can never be run; the file says why.
    pub refused: u64,
    /// Why the first of them cannot.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_refusal: Option<String>,
    /// Prompt tokens of all answers.
    pub prompt_tokens: u64,
    /// Those that were not computed.
    pub cached_tokens: u64,
    /// Tokens of answers.
    pub new_tokens: u64,
    /// Steps of the model.
    pub steps: u64,
    /// Answers at once at most.
    pub peak_running: usize,
    /// Answers that had to wait for blocks.
    pub preemptions: u64,
    /// Seconds that reading prompts took: each step's, by its rows.
    pub reading_s: f64,
    /// Seconds that writing took.
    pub writing_s: f64,
    /// Seconds in `append` and `attend`.
    pub attention_s: f64,
    /// Seconds in `reserve` and `commit`.
    pub manager_s: f64,
    /// All of it.
    pub wall_s: f64,
    /// Of all texts. `None` until all are there.
    pub checksum: Option<String>,
    /// Answers that are those of the first variant to the letter, and of how many.
    pub same_as_first: Option<(usize, usize)>,
    /// The share of an answer's text before the first difference from the first variant's, in the
    /// mean.
    pub same_until: Option<f64>,
    /// The file.
    pub completions: PathBuf,
}

/// What came out.
#[derive(Clone, Debug, Serialize)]
pub struct CompletionReport {
    /// The model's file.
    pub model: PathBuf,
    /// Prompts in the file.
    pub prompts: usize,
    /// How many variants there are; those that were not begun when the job was stopped are not
    /// below.
    pub variants: usize,
    /// Whether it was stopped.
    pub interrupted: bool,
    /// By variant.
    pub runs: Vec<VariantRun>,
}

/// Runs the job of a file.
///
/// # Errors
/// [`ModelError`]: the model, the prompts, a cache that cannot be opened, a file that cannot be
/// written. Before anything is computed, whatever can be known by then.
pub fn run(
    source: &Source,
    options: Options<'_>,
    observer: &mut dyn Observer,
) -> Result<CompletionReport, ModelError> {
    let Some(generate) = &source.config.generate else {
        return Err(ModelError::Setting("the file has no [generate]".to_owned()));
    };
    let model = super::load(source)?;
    let prompts = jsonl::read(&generate.prompts, &model.tokenizer, &Defaults::of(generate))?;
    let mut variants = source.variants();
    for (_, config) in &mut variants {
        // A plan that does not fit is refused before another variant has run for an hour.
        *config = super::rotated_as(config, source);
        resolve_budget(config).map_err(OpenError::from)?;
        Plan::new(config, &source.geometry)?;
    }
    let mut writers = Vec::new();
    for (index, (name, config)) in variants.iter().enumerate() {
        let path = options.out.join(file_name(index, name));
        let writer = Writer::open(&path, options.resume, &prompts, config)?;
        writers.push((path, writer));
    }
    let mut report = CompletionReport {
        model: model.file.path.clone(),
        prompts: prompts.len(),
        variants: variants.len(),
        interrupted: false,
        runs: Vec::new(),
    };
    let mut first = None;
    for (index, (path, mut writer)) in writers.into_iter().enumerate() {
        let (name, config) = &variants[index];
        let to_do = writer.to_do(&prompts);
        observer.variant(name, index, variants.len(), to_do.len());
        let mut told = || observer.request();
        let done = complete(&model, config, &to_do, &mut writer, options.stop, &mut told)?;
        let mut run = describe(name, config, &done, path);
        run.requests_before = prompts.len() - to_do.len();
        report.interrupted = done.counts.interrupted;
        if !report.interrupted {
            writer.finish()?;
        }
        compare(&mut run, &mut first, prompts.len())?;
        report.runs.push(run);
        if report.interrupted {
            break;
        }
    }
    Ok(report)
}

/// Opens a cache and an engine, and completes prompts; each completion is written when it is done.
///
/// # Errors
/// [`ModelError`]: the cache cannot be opened, the file cannot be written.
pub fn complete(
    model: &Model,
    config: &Config,
    prompts: &[Prompt],
    writer: &mut Writer,
    stop: &AtomicBool,
    told: &mut dyn FnMut(),
) -> Result<Done, ModelError> {
    let requests: Vec<Request> = prompts.iter().map(|prompt| prompt.request.clone()).collect();
    let mut listener = ToFile { prompts, writer, done: told };
    drive(model, config, &requests, &mut listener, stop)
}

/// Opens a cache and an engine, and runs requests.
///
/// # Errors
/// [`ModelError`]: the cache cannot be opened, or what the listener says.
pub fn drive(
    model: &Model,
    config: &Config,
    requests: &[Request],
    listener: &mut dyn Listener,
    stop: &AtomicBool,
) -> Result<Done, ModelError> {
    let mut config = config.clone();
    resolve_budget(&mut config).map_err(OpenError::from)?;
    let plan = Plan::new(&config, &model.file.geometry)?;
    let mut engine = Engine::new(model, &plan, &config.device)?;
    if super::spreads(&config) {
        engine.spread(&plan)?;
    }
    let mut cache = Cache::open_on_device(plan, &config.device, None)?;
    let began = Instant::now();
    let counts = batch::run(&mut engine, &mut cache, &model.tokenizer, requests, listener, stop)?;
    Ok(Done {
        counts,
        timing: engine.timing(),
        pool_bytes: cache.plan().pool_bytes,
        bytes_per_token: cache.plan().bytes_per_token,
        prefix_reuse: cache.plan().reuse.is_on(),
        wall_s: began.elapsed().as_secs_f64(),
    })
}

/// The file of a variant's completions: its name, without what a file system might take amiss.
fn file_name(index: usize, variant: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let name: String = variant.chars().map(|c| if plain(c) { c } else { '-' }).collect();
    // Two names may have become one.
    let number = if name == variant { String::new() } else { format!("-{}", index + 1) };
    format!("completions-{name}{number}.jsonl")
}

fn describe(name: &str, config: &Config, done: &Done, completions: PathBuf) -> VariantRun {
    let Done { counts, timing, .. } = done;
    VariantRun {
        variant: name.to_owned(),
        mode: config.cache.mode,
        format: crate::plan::KvFormat::of(config).name().to_owned(),
        pool_bytes: done.pool_bytes.get(),
        bytes_per_token: done.bytes_per_token.get(),
        prefix_reuse: done.prefix_reuse,
        requests: 0,
        requests_before: 0,
        refused: 0,
        first_refusal: None,
        prompt_tokens: counts.prompt_tokens,
        cached_tokens: counts.cached_tokens,
        new_tokens: counts.new_tokens,
        steps: counts.steps,
        peak_running: counts.peak_running,
        preemptions: counts.preemptions,
        reading_s: counts.reading_s,
        writing_s: timing.total_s - counts.reading_s,
        attention_s: timing.attention_s,
        manager_s: timing.manager_s,
        wall_s: done.wall_s,
        checksum: None,
        same_as_first: None,
        same_until: None,
        completions,
    }
}

/// Texts by line and number.
type Texts = BTreeMap<(u64, usize), String>;

/// Reads a variant's texts again, and compares them with those of the first.
fn compare(
    run: &mut VariantRun,
    first: &mut Option<Texts>,
    prompts: usize,
) -> Result<(), ModelError> {
    let failed = |problem: String| ModelError::file(&run.completions, problem);
    let content = std::fs::read_to_string(&run.completions).map_err(|e| failed(e.to_string()))?;
    let (mut texts, mut requests) = (Texts::new(), BTreeSet::new());
    for line in content.lines() {
        let value: Value = serde_json::from_str(line).map_err(|e| failed(e.to_string()))?;
        let of = value["line"].as_u64().unwrap_or_default();
        if !requests.insert(of) {
            continue;
        }
        if let Some(error) = value["error"].as_str() {
            run.refused += 1;
            run.first_refusal.get_or_insert_with(|| format!("line {of}: {error}"));
        }
        for (number, one) in value["completions"].as_array().into_iter().flatten().enumerate() {
            texts.insert((of, number), one["text"].as_str().unwrap_or_default().to_owned());
        }
    }
    run.requests = requests.len();
    if run.requests == prompts {
        let bytes = texts.values().flat_map(|text| text.bytes().map(u64::from).chain([256]));
        run.checksum =
            Some(format!("{:016x}", bytes.fold(0, |state, byte| scramble(state ^ byte))));
    }
    if let Some(first) = first {
        let pairs: Vec<_> =
            texts.iter().filter_map(|(key, text)| Some((text, first.get(key)?))).collect();
        let same = pairs.iter().filter(|(a, b)| a == b).count();
        let shares: f64 = pairs.iter().map(|(a, b)| common(a, b)).sum();
        run.same_as_first = Some((same, pairs.len()));
        let count = f64::from(u32::try_from(pairs.len()).unwrap_or(u32::MAX));
        run.same_until = (!pairs.is_empty()).then(|| shares / count);
    } else {
        *first = Some(texts);
    }
    Ok(())
}

/// The share of the longer text before the first difference.
fn common(a: &str, b: &str) -> f64 {
    let same = a.chars().zip(b.chars()).take_while(|(a, b)| a == b).count();
    let most = a.chars().count().max(b.chars().count());
    let [same, most] = [same, most].map(|count| u32::try_from(count).unwrap_or(u32::MAX));
    if most == 0 { 1.0 } else { f64::from(same) / f64::from(most) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_two_variants_are_two() {
        assert_eq!(file_name(0, "paged-f16"), "completions-paged-f16.jsonl");
        assert_eq!(file_name(1, "a/b 24 GiB"), "completions-a-b-24-GiB-2.jsonl");
        assert_ne!(file_name(1, "a b"), file_name(2, "a/b"));
    }

    #[test]
    fn what_texts_have_in_common_is_counted_in_characters() {
        for (a, b, share) in [
            ("", "", 1.0),
            ("abc", "abc", 1.0),
            ("äbcd", "äbxd", 0.5),
            ("ab", "abcd", 0.5),
            ("a", "", 0.0),
        ] {
            assert!((common(a, b) - share).abs() < 1e-12, "{a} {b}");
        }
    }
}
