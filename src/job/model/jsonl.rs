//! Prompts from a file of JSON lines, completions to another.
//!
//! A prompt is `{"prompt": "…"}` and any of `id`, `n`, `max_tokens`, `temperature`, `top_p`, `seed`,
//! `stop`. A completion has the line's number, so that a run that was interrupted can go on: each is
//! written whole and at once when its request is done, and a line that was cut is written again.

use std::collections::HashSet;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::batch::{Answer, Listener, Request};
use super::sample::Sampling;
use super::tokenizer::Tokenizer;
use crate::error::{CacheError, ModelError};

/// The most answers to one prompt.
const MAX_ANSWERS: u32 = 1024;

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

impl Defaults {
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
    cached_tokens: u32,
}

/// Reads a file of prompts. Empty lines are passed over.
///
/// # Errors
/// [`ModelError::File`] with the line that is not as it must be.
pub fn read(
    path: &Path,
    tokenizer: &Tokenizer,
    defaults: &Defaults,
) -> Result<Vec<Prompt>, ModelError> {
    let file = File::open(path).map_err(|error| ModelError::file(path, error.to_string()))?;
    let mut prompts = Vec::new();
    for (line, text) in (1..).zip(BufReader::new(file).lines()) {
        let failed = |problem: String| ModelError::File { path: path.to_owned(), line, problem };
        let text = text.map_err(|error| failed(error.to_string()))?;
        if text.trim().is_empty() {
            continue;
        }
        let given: PromptLine = serde_json::from_str(&text).map_err(|error| {
            failed(format!(
                "{error}; expected an object such as {{\"prompt\": \"Once\", \"n\": 2}}"
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
    Ok(prompts)
}

/// Writes completions, each when it is done.
#[derive(Debug)]
pub struct Writer {
    path: PathBuf,
    file: File,
}

impl Writer {
    /// Opens a file of completions. With `resume` it may be there, and the lines of prompts that it
    /// has are given; what was cut off at its end is taken away.
    ///
    /// # Errors
    /// [`ModelError::File`]: it cannot be written, is there already without `resume`, or is no file of
    /// completions.
    pub fn open(path: &Path, resume: bool) -> Result<(Self, HashSet<u64>), ModelError> {
        let failed = |error: std::io::Error| {
            let exists = error.kind() == std::io::ErrorKind::AlreadyExists;
            let help = if exists { "; --resume goes on with it" } else { "" };
            ModelError::file(path, format!("{error}{help}"))
        };
        let mut done = HashSet::new();
        if !resume {
            let file =
                OpenOptions::new().write(true).create_new(true).open(path).map_err(failed)?;
            return Ok((Self { path: path.to_owned(), file }, done));
        }
        let file = OpenOptions::new().read(true).append(true).create(true).open(path);
        let file = file.map_err(failed)?;
        let (mut whole, mut reader) = (0, BufReader::new(&file));
        let mut text = Vec::new();
        for line in 1.. {
            text.clear();
            let read = reader.read_until(b'\n', &mut text).map_err(failed)?;
            if text.last() != Some(&b'\n') {
                break;
            }
            let number = serde_json::from_slice::<serde_json::Value>(&text)
                .ok()
                .and_then(|value| value.get("line")?.as_u64());
            let problem = "is no completion; expected a file that this command has written";
            done.insert(number.ok_or_else(|| ModelError::File {
                path: path.to_owned(),
                line,
                problem: problem.to_owned(),
            })?);
            whole += read as u64;
        }
        file.set_len(whole).map_err(failed)?;
        Ok((Self { path: path.to_owned(), file }, done))
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
            cached_tokens: answer.cached_tokens,
        });
        let line = CompletionLine {
            line: prompt.line,
            id: prompt.id.as_ref(),
            prompt_tokens: prompt.request.prompt.len(),
            completions: completions.collect(),
            error,
        };
        let failed = |error: std::io::Error| ModelError::file(&self.path, error.to_string());
        let mut bytes = serde_json::to_vec(&line).map_err(|error| failed(error.into()))?;
        bytes.push(b'\n');
        // One write: whoever interrupts the program finds the line whole or not there.
        self.file.write_all(&bytes).map_err(failed)
    }
}

/// Writes what is done to a file.
#[derive(Debug)]
pub struct ToFile<'a> {
    /// The requests, in the order in which they are run.
    pub prompts: &'a [Prompt],
    /// Where they go.
    pub writer: Writer,
}

impl Listener for ToFile<'_> {
    fn done(&mut self, request: usize, answers: Vec<Answer>) -> Result<(), ModelError> {
        self.writer.write(&self.prompts[request], &answers, None)
    }

    fn refused(&mut self, request: usize, error: CacheError) -> Result<(), ModelError> {
        self.writer.write(&self.prompts[request], &[], Some(error.to_string()))
    }
}
