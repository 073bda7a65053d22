//! Requests in OpenAI's form, a JSON object a line: `{"messages": […]}` of a chat, `{"prompt": …}`
//! of a completion, or either as the `body` of a line of a batch (`custom_id`, `method`, `url`,
//! `body`).
//!
//! A chat is written out in ChatML, as most templates of today do but for the names of their marks:
//! `<|im_start|>role⏎content<|im_end|>⏎` for each message, and the beginning of the answer. Of a
//! prompt's tokens nothing is kept but a hash for each run of [`BLOCK_TOKENS`]: prompts that begin
//! alike have equal hashes there, so whole blocks are reused exactly as they would be, since no
//! block is shorter than such a run and each is a whole number of them. What a block that matches
//! in part gives is rounded down to runs.
//!
//! How long an answer was is not there. `workload.output_tokens` says it, cut off at the request's
//! `max_tokens`; without, an answer counts as long as it may become, and [`Requests::capped`] says
//! of how many that is so.

mod text;

use std::borrow::Cow;
use std::fmt::Write as _;
use std::path::Path;

use serde::Deserialize;

use super::{Row, json_problem, shortened};
use crate::config::{LengthDistribution, WorkloadConfig};
use crate::job::generator;
use crate::job::random::{Rng, mix};
pub(super) use text::Tokenizer;

/// The longest line, its end included: of a prompt of some million tokens.
pub(super) const MAX_LINE_BYTES: u64 = 1 << 23;

/// Tokens of one hash: the smallest `cache.tokens_per_block`.
pub(in crate::job) const BLOCK_TOKENS: u32 = 8;

/// What a line must have.
const EXPECTED: &str = "expected {\"messages\": [{\"role\": …, \"content\": …}, …]} or {\"prompt\": …}, alone or as the \
     \"body\" of a batch";

/// A line: the request itself, or the request of a batch.
#[derive(Deserialize)]
struct Line<'a> {
    #[serde(borrow)]
    body: Option<Body<'a>>,
    #[serde(flatten, borrow)]
    own: Body<'a>,
}

/// A request. What has nothing to do with its length is passed over.
#[derive(Deserialize, Default)]
struct Body<'a> {
    #[serde(borrow)]
    messages: Option<Vec<Message<'a>>>,
    #[serde(borrow)]
    prompt: Option<Prompt<'a>>,
    max_tokens: Option<u32>,
    max_completion_tokens: Option<u32>,
    n: Option<u32>,
}

#[derive(Deserialize)]
struct Message<'a> {
    #[serde(borrow)]
    role: Cow<'a, str>,
    /// Nothing where the model calls a tool.
    #[serde(borrow)]
    content: Option<Content<'a>>,
}

/// A text, or parts of which each must be one.
#[derive(Deserialize)]
#[serde(untagged, expecting = "content is no text, and no list of parts")]
enum Content<'a> {
    Text(#[serde(borrow)] Cow<'a, str>),
    Parts(#[serde(borrow)] Vec<Part<'a>>),
}

#[derive(Deserialize)]
struct Part<'a> {
    #[serde(rename = "type", borrow)]
    kind: Cow<'a, str>,
    #[serde(borrow)]
    text: Option<Cow<'a, str>>,
}

/// A text, its tokens, or a list of one text.
#[derive(Deserialize)]
#[serde(untagged, expecting = "prompt is no text, no list of tokens, and no list of texts")]
enum Prompt<'a> {
    Text(#[serde(borrow)] Cow<'a, str>),
    Tokens(Vec<u32>),
    Texts(#[serde(borrow)] Vec<Cow<'a, str>>),
}

/// Reads lines.
pub(super) struct Requests {
    tokenizer: Option<Tokenizer>,
    /// How long answers are that their requests do not end before.
    outputs: Option<(LengthDistribution, Rng)>,
    /// Requests whose answers count as long as `max_tokens` lets them become.
    capped: u64,
    text: String,
    ids: Vec<u32>,
}

impl std::fmt::Debug for Requests {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Requests").field("outputs", &self.outputs).finish_non_exhaustive()
    }
}

impl Requests {
    /// Loads the tokenizer, if the workload names one.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(super) fn new(config: &WorkloadConfig) -> Result<Self, String> {
        let tokenizer = config.tokenizer.as_deref().map(load).transpose()?;
        let outputs = config
            .output_tokens
            .map(|distribution| (distribution, Rng::new(config.seed, generator::LENGTHS)));
        Ok(Self { tokenizer, outputs, capped: 0, text: String::new(), ids: Vec::new() })
    }

    /// The request of a line and the hashes of its prompt, or what is wrong with it.
    pub(super) fn row(&mut self, line: &str, hash_ids: &mut Vec<u64>) -> Result<Row, String> {
        let Line { body, own } = serde_json::from_str(line).map_err(|error| {
            format!("{} in {:?}…; {EXPECTED}", json_problem(&error), shortened(line))
        })?;
        let body = body.unwrap_or(own);
        if body.n.is_some_and(|answers| answers != 1) {
            return Err("n is not 1; a request of a workload has one answer".to_owned());
        }
        self.tokenize(&body)?;
        let prompt_tokens = u32::try_from(self.ids.len()).unwrap_or(u32::MAX);
        if prompt_tokens == 0 {
            return Err("the prompt has no tokens".to_owned());
        }
        let output_tokens = self.output_tokens(body.max_completion_tokens.or(body.max_tokens))?;
        hash_ids.extend(self.ids.chunks(BLOCK_TOKENS as usize).map(hash));
        Ok(Row { arrival_ns: 0, prompt_tokens, output_tokens })
    }

    /// How long the answer is to a request that lets it become so long.
    fn output_tokens(&mut self, most: Option<u32>) -> Result<u32, String> {
        match (most, &mut self.outputs) {
            (Some(0), _) => Err("max_tokens is 0; expected a whole number from 1".to_owned()),
            (most, Some((distribution, rng))) => {
                Ok(generator::length(*distribution, rng).min(most.unwrap_or(u32::MAX)))
            }
            (Some(most), None) => {
                self.capped += 1;
                Ok(most)
            }
            (None, None) => Err(
                "has no max_tokens; give it, or say how long answers are with workload.output_tokens".to_owned(),
            ),
        }
    }

    /// Of how many requests `max_tokens` was taken for the length of the answer.
    pub(super) fn capped(&self) -> u64 {
        self.capped
    }

    /// Puts the tokens of the prompt into `ids`.
    fn tokenize(&mut self, body: &Body<'_>) -> Result<(), String> {
        self.ids.clear();
        self.text.clear();
        match (&body.messages, &body.prompt) {
            (Some(messages), None) => self.write_out(messages)?,
            (None, Some(Prompt::Text(text))) => self.text.push_str(text),
            (None, Some(Prompt::Texts(texts))) if texts.len() == 1 => self.text.push_str(&texts[0]),
            (None, Some(Prompt::Texts(texts))) => {
                return Err(format!(
                    "prompt is a list of {} texts; expected one a line",
                    texts.len()
                ));
            }
            (None, Some(Prompt::Tokens(tokens))) => {
                self.ids.extend_from_slice(tokens);
                return Ok(());
            }
            (Some(_), Some(_)) => {
                return Err("has messages and a prompt; expected one of them".to_owned());
            }
            (None, None) => return Err(format!("has no messages and no prompt; {EXPECTED}")),
        }
        let tokenizer = self.tokenizer.as_ref().ok_or(
            "the prompt is a text, whose tokens are counted by a tokenizer; give workload.tokenizer = \
             \"tokenizer.json\"",
        )?;
        tokenizer.encode(&self.text, &mut self.ids)
    }

    /// Writes a chat out.
    fn write_out(&mut self, messages: &[Message<'_>]) -> Result<(), String> {
        if messages.is_empty() {
            return Err("messages is an empty list".to_owned());
        }
        let text = &mut self.text;
        for Message { role, content } in messages {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "<|im_start|>{role}");
            match content {
                None => {}
                Some(Content::Text(own)) => text.push_str(own),
                Some(Content::Parts(parts)) => {
                    for Part { kind, text: own } in parts {
                        let own = own.as_ref().filter(|_| kind == "text").ok_or_else(|| {
                            format!(
                                "a message has a part of type {:?}; expected texts alone",
                                shortened(kind)
                            )
                        })?;
                        text.push_str(own);
                    }
                }
            }
            text.push_str("<|im_end|>\n");
        }
        text.push_str("<|im_start|>assistant\n");
        Ok(())
    }
}

/// A hash of a run of tokens and of how many they are.
fn hash(tokens: &[u32]) -> u64 {
    let start = tokens.len() as u64;
    tokens.iter().fold(start, |hash, token| mix(&[hash, u64::from(*token)]))
}

fn load(path: &Path) -> Result<Tokenizer, String> {
    Tokenizer::load(path)
        .map_err(|problem| format!("workload.tokenizer {}: {problem}", path.display()))
}

#[cfg(test)]
mod tests;
