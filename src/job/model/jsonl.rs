//! Prompts from a file of JSON lines, completions to another.
//!
//! A prompt is `{"prompt": "…"}` and any of `id`, `n`, `max_tokens`, `temperature`, `top_p`,
//! `seed`, `stop`. A completion has the line's number, so that a run that was interrupted can go
//! on: each is written whole and at once when its request is done, and a line that was cut is
//! written again. When all are done the file is put into the order of the prompts. Nothing in it
//! depends on who ran beside whom, so that it is the same file however often the run was
//! interrupted.

use std::collections::{BTreeMap, HashSet};
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::super::output::replace_bytes;
use super::super::random::{mix, scramble};
use super::super::reader::json_problem;
use super::batch::{Answer, Listener, Request};
use super::sample::Sampling;
use super::tokenizer::Tokenizer;
use crate::config::{Config, GenerateConfig, MAX_ANSWERS};
use crate::error::{CacheError, ModelError};
use crate::units::{counted, grouped};

/// What lines leave out.
#[derive(Clone, Debug)]
pub struct Defaults {
    /// `n`
    pub answers: u32,
    /// `max_tokens`
    pub max_tokens: u32,
    /// `temperature`, `top_p`, `seed`
    pub sampling: Sampling,
    /// `stop`
    pub stop: Vec<String>,
    /// Whether answers go on behind the tokens that end them.
    pub ignore_ends: bool,
}

impl Default for Defaults {
    fn default() -> Self {
        Self {
            answers: 1,
            max_tokens: 256,
            sampling: Sampling::default(),
            stop: Vec::new(),
            ignore_ends: false,
        }
    }
}

impl Defaults {
    /// Those of a configuration.
    #[must_use]
    pub fn of(config: &GenerateConfig) -> Self {
        let GenerateConfig { answers, max_tokens, temperature, top_p, seed, .. } = *config;
        #[expect(clippy::cast_possible_truncation, reason = "the nearest f32")]
        let sampling = Sampling { temperature: temperature as f32, top_p: top_p as f32, seed };
        Self {
            answers,
            max_tokens,
            sampling,
            stop: config.stop.clone(),
            ignore_ends: config.ignore_end,
        }
    }

    /// A request with these settings.
    #[must_use]
    pub fn request(&self, tokenizer: &Tokenizer, prompt: &str) -> Request {
        Request {
            prompt: tokenizer.prompt(prompt),
            answers: self.answers,
            max_tokens: self.max_tokens,
            sampling: self.sampling,
            stop: self.stop.clone(),
            ignore_ends: self.ignore_ends,
        }
    }
}

/// One line of the file of prompts.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct PromptLine {
    prompt: String,
    id: Option<serde_json::Value>,
    n: Option<u32>,
    max_tokens: Option<u32>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    seed: Option<u64>,
    stop: Option<Vec<String>>,
}

/// A prompt of the file.
#[derive(Clone, Debug)]
pub struct Prompt {
    /// Its line, counted from 1.
    pub line: u64,
    /// What the file calls it.
    pub id: Option<serde_json::Value>,
    /// What is asked for.
    pub request: Request,
}

/// One line of the file of completions.
#[derive(Debug, Serialize)]
struct CompletionLine<'a> {
    line: u64,
    /// What it was made from.
    made_from: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a serde_json::Value>,
    prompt_tokens: usize,
    completions: Vec<CompletionText<'a>>,
    /// Why there are none.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

#[derive(Debug, Serialize)]
struct CompletionText<'a> {
    text: &'a str,
    tokens: usize,
    finish: &'static str,
}

/// A digest of what a request's answers depend on: the request, the model, and the cache's format.
/// Not its mode, and not who runs beside it.
fn made_from(request: &Request, config: &Config) -> String {
    // What is not named changes nothing that is written.
    let Request { prompt, answers, max_tokens, sampling, stop, ignore_ends } = request;
    let spreads = if super::spreads(config) { " spread" } else { "" };
    let settings = format!(
        "{answers} {max_tokens} {sampling:?} {stop:?} {ignore_ends} {:?} {:?} {:?} {:?} {}{spreads}",
        config.model,
        config.cache.format,
        config.cache.int8,
        config.device.kernel,
        config.limits.max_seq_len
    );
    let text = settings.bytes().fold(0, |state, byte| scramble(state ^ u64::from(byte)));
    let tokens = prompt.iter().fold(text, |state, token| mix(&[state, u64::from(*token)]));
    format!("{tokens:016x}")
}

/// Reads a file of prompts. Empty lines are passed over.
///
/// # Errors
/// [`ModelError::File`] with the line that is not as it must be, or when there is no prompt.
pub fn read(
    path: &Path,
    tokenizer: &Tokenizer,
    defaults: &Defaults,
) -> Result<Vec<Prompt>, ModelError> {
    let file = File::open(path).map_err(|error| {
        let missing = error.kind() == std::io::ErrorKind::NotFound && path.is_relative();
        let help = if missing { "; the path begins at the current directory" } else { "" };
        ModelError::file(path, format!("{error}{help}"))
    })?;
    let mut prompts = Vec::new();
    for (line, text) in (1..).zip(BufReader::new(file).lines()) {
        let failed = |problem: String| ModelError::File { path: path.to_owned(), line, problem };
        let text = text.map_err(|error| failed(error.to_string()))?;
        // Some editors begin a file with a mark of its byte order.
        let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
        if text.trim().is_empty() {
            continue;
        }
        let given: PromptLine = serde_json::from_str(text).map_err(|error| {
            failed(format!(
                "{}; expected an object such as {{\"prompt\": \"Once\", \"n\": 2}}",
                json_problem(&error)
            ))
        })?;
        let sampling = Sampling {
            temperature: given.temperature.unwrap_or(defaults.sampling.temperature),
            top_p: given.top_p.unwrap_or(defaults.sampling.top_p),
            seed: given.seed.unwrap_or(defaults.sampling.seed),
        };
        let answers = given.n.unwrap_or(defaults.answers);
        let max_tokens = given.max_tokens.unwrap_or(defaults.max_tokens);
        if let Some(problem) = sampling.problem() {
            return Err(failed(problem));
        }
        if !(1..=MAX_ANSWERS).contains(&answers) {
            return Err(failed(format!("n is {answers}; expected 1 to {MAX_ANSWERS}")));
        }
        if max_tokens == 0 {
            return Err(failed("max_tokens is 0; expected 1 or more".to_owned()));
        }
        let request = Request {
            answers,
            max_tokens,
            sampling,
            stop: given.stop.unwrap_or_else(|| defaults.stop.clone()),
            ..defaults.request(tokenizer, &given.prompt)
        };
        prompts.push(Prompt { line, id: given.id, request });
    }
    if prompts.is_empty() {
        let problem = "has no prompts; expected lines such as {\"prompt\": \"Once\", \"n\": 2}";
        return Err(ModelError::file(path, problem));
    }
    Ok(prompts)
}

/// Writes completions, each when it is done.
#[derive(Debug)]
pub struct Writer {
    path: PathBuf,
    file: File,
    /// Of each prompt's line.
    made_from: BTreeMap<u64, String>,
    done: HashSet<u64>,
    /// Of the prompts that are done, those without completions, and why.
    failed: BTreeMap<u64, String>,
}

impl Writer {
    /// Opens the file of the completions of prompts by a cache of a configuration. With `resume` it
    /// may be there; then the lines that are done are kept, and what was cut off at its end is
    /// taken away.
    ///
    /// # Errors
    /// [`ModelError::File`]: it cannot be written, is there already without `resume`, is no file of
    /// completions, or one of other prompts or settings.
    pub fn open(
        path: &Path,
        resume: bool,
        prompts: &[Prompt],
        config: &Config,
    ) -> Result<Self, ModelError> {
        let failed = |error: std::io::Error| {
            let exists = error.kind() == std::io::ErrorKind::AlreadyExists && path.is_file();
            let help = if exists { "; --resume goes on with it" } else { "" };
            ModelError::file(path, format!("{error}{help}"))
        };
        if path.exists() && !path.is_file() {
            let problem = "is no file; expected one that this command has written, or none";
            return Err(ModelError::file(path, problem));
        }
        let made_from: BTreeMap<u64, String> = (prompts.iter())
            .map(|prompt| (prompt.line, made_from(&prompt.request, config)))
            .collect();
        let path = path.to_owned();
        if !resume {
            let file = OpenOptions::new().write(true).create_new(true).open(&path);
            let file = file.map_err(failed)?;
            lock(&path, &file)?;
            return Ok(Self::empty(path, file, made_from));
        }
        let file = OpenOptions::new().read(true).append(true).create(true).open(&path);
        let file = file.map_err(failed)?;
        lock(&path, &file)?;
        let mut writer = Self::empty(path, file, made_from);
        let mut whole = 0;
        for (number, line) in (1..).zip(writer.lines()?) {
            whole += line.len() as u64 + 1;
            let Numbered { of, digest, error } = numbered(&line).ok_or_else(|| {
                let problem = "is no completion; expected a file that this command has written";
                writer.problem(number, problem)
            })?;
            if writer.made_from.get(&of).is_none_or(|own| digest.as_deref() != Some(own)) {
                let problem = format!(
                    "was made from another prompt than line {of} is now, by another model or with other \
                     settings; --resume needs the same ones"
                );
                return Err(writer.problem(number, &problem));
            }
            writer.done.insert(of);
            writer.failed.extend(error.map(|error| (of, error)));
        }
        writer.file.set_len(whole).map_err(failed)?;
        Ok(writer)
    }

    fn empty(path: PathBuf, file: File, made_from: BTreeMap<u64, String>) -> Self {
        Self { path, file, made_from, done: HashSet::new(), failed: BTreeMap::new() }
    }

    /// What there is to say about prompts that have no completions, those of an earlier run among
    /// them, and whether that is all of them. `None` where every prompt has.
    #[must_use]
    pub fn failures(&self) -> Option<(String, bool)> {
        let (line, first) = self.failed.first_key_value()?;
        let (count, all) = (self.failed.len(), self.made_from.len());
        let text = format!(
            "{} of {} can never run; {} says why; the first, line {line}: {first}",
            grouped(count as u64),
            counted(all as u64, "prompt"),
            self.path.display()
        );
        Some((text, count == all))
    }

    /// The prompts whose completions are not there yet.
    #[must_use]
    pub fn to_do(&self, prompts: &[Prompt]) -> Vec<Prompt> {
        prompts.iter().filter(|prompt| !self.done.contains(&prompt.line)).cloned().collect()
    }

    /// The file's lines without their line breaks; not what was cut off at its end.
    fn lines(&self) -> Result<Vec<Vec<u8>>, ModelError> {
        let failed = |error: std::io::Error| ModelError::file(&self.path, error.to_string());
        let mut reader = BufReader::new(File::open(&self.path).map_err(failed)?);
        let mut lines = Vec::new();
        loop {
            let mut line = Vec::new();
            reader.read_until(b'\n', &mut line).map_err(failed)?;
            if line.pop() != Some(b'\n') {
                return Ok(lines);
            }
            lines.push(line);
        }
    }

    fn problem(&self, line: u64, problem: &str) -> ModelError {
        ModelError::File { path: self.path.clone(), line, problem: problem.to_owned() }
    }

    fn write(
        &mut self,
        prompt: &Prompt,
        answers: &[Answer],
        error: Option<String>,
    ) -> Result<(), ModelError> {
        let completions = answers.iter().map(|answer| CompletionText {
            text: &answer.text,
            tokens: answer.tokens.len(),
            finish: answer.finish.name(),
        });
        let line = CompletionLine {
            line: prompt.line,
            made_from: self.made_from.get(&prompt.line).cloned().unwrap_or_default(),
            id: prompt.id.as_ref(),
            prompt_tokens: prompt.request.prompt.len(),
            completions: completions.collect(),
            error,
        };
        if let Some(error) = &line.error {
            self.failed.insert(prompt.line, error.clone());
        }
        let failed = |error: std::io::Error| ModelError::write(&self.path, error);
        let mut bytes = serde_json::to_vec(&line).map_err(|error| failed(error.into()))?;
        bytes.push(b'\n');
        // One write: whoever interrupts the program finds the line whole or not there.
        self.file.write_all(&bytes).map_err(failed)?;
        self.done.insert(prompt.line);
        Ok(())
    }

    /// Puts the file into the order of the prompts, each once, when all are done. Until that is
    /// complete the file stays as it was.
    ///
    /// # Errors
    /// [`ModelError::File`], [`ModelError::Write`].
    pub fn finish(self) -> Result<(), ModelError> {
        let mut lines = self.lines()?;
        let order = |line: &Vec<u8>| numbered(line).map_or(0, |line| line.of);
        let numbers: Vec<u64> = lines.iter().map(order).collect();
        if numbers.is_sorted_by(|a, b| a < b) {
            return Ok(());
        }
        lines.sort_by_key(order);
        // Versions before the lock let two programs write one file. They wrote the same.
        lines.dedup_by_key(|line| order(line));
        lines.iter_mut().for_each(|line| line.push(b'\n'));
        // A link to the file stays one.
        let failed = |error| ModelError::write(&self.path, error);
        let path = self.path.canonicalize().map_err(failed)?;
        replace_bytes(&path, &lines.concat()).map_err(failed)
    }
}

/// Keeps every other program from writing the same completions until this one closes the file.
/// Where the file system knows no locks there is nothing that could be done.
fn lock(path: &Path, file: &File) -> Result<(), ModelError> {
    let problem = "another program is writing it; wait until that one ends, or choose another file";
    if matches!(file.try_lock(), Err(TryLockError::WouldBlock)) {
        return Err(ModelError::file(path, problem));
    }
    // The other one may have ended just now, and have put its sorted lines in this file's place.
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        let place = |metadata: std::fs::Metadata| (metadata.dev(), metadata.ino());
        let (held, named) = (file.metadata().map(place), std::fs::metadata(path).map(place));
        if !matches!((held, named), (Ok(held), Ok(named)) if held == named) {
            return Err(ModelError::file(path, problem));
        }
    }
    Ok(())
}

/// What says whose a line of completions is.
struct Numbered {
    /// The number of the prompt's line.
    of: u64,
    /// What it was made from.
    digest: Option<String>,
    /// Why there are no completions.
    error: Option<String>,
}

fn numbered(line: &[u8]) -> Option<Numbered> {
    let value: serde_json::Value = serde_json::from_slice(line).ok()?;
    let text = |key: &str| value.get(key).and_then(|text| text.as_str()).map(str::to_owned);
    let of = value.get("line")?.as_u64()?;
    Some(Numbered { of, digest: text("made_from"), error: text("error") })
}

/// Writes what is done to a file.
pub struct ToFile<'a> {
    /// The requests, in the order in which they are run.
    pub prompts: &'a [Prompt],
    /// Where they go.
    pub writer: &'a mut Writer,
    /// Is called when a request is done.
    pub done: &'a mut dyn FnMut(),
}

impl Listener for ToFile<'_> {
    fn done(&mut self, request: usize, answers: Vec<Answer>) -> Result<(), ModelError> {
        self.writer.write(&self.prompts[request], &answers, None)?;
        (self.done)();
        Ok(())
    }

    fn refused(&mut self, request: usize, error: CacheError) -> Result<(), ModelError> {
        self.writer.write(&self.prompts[request], &[], Some(error.to_string()))?;
        (self.done)();
        Ok(())
    }
}
