//! One answer: what is asked for, what is written of it, and when it ends. Of the cache nothing is
//! known here.

use super::sample::Sampling;
use super::tokenizer::{Decoder, Tokenizer};

/// What is asked for.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// The prompt's tokens, at least one.
    pub prompt: Vec<u32>,
    /// Answers to it.
    pub answers: u32,
    /// Tokens of an answer at most. As many as `limits.max_seq_len` leaves, if that is less.
    pub max_tokens: u32,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Texts that end an answer, and are not part of it.
    pub stop: Vec<String>,
    /// Whether the tokens that end an answer are passed over, and it goes on.
    pub ignore_ends: bool,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The model said so.
    End,
    /// One of the request's stop texts.
    Stop,
    /// It has as many tokens as it may.
    Length,
}

impl Finish {
    /// As files have it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::End => "end",
            Self::Stop => "stop",
            Self::Length => "length",
        }
    }
}

/// One answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Its text, without what ended it.
    pub text: String,
    /// Its tokens, with that which ended it.
    pub tokens: Vec<u32>,
    /// Why it ended.
    pub finish: Finish,
    /// Tokens of the prompt that were not computed for it: found in the cache, or another answer's.
    pub cached_tokens: u32,
}

/// What is written of an answer.
#[derive(Debug)]
pub(super) struct Written {
    /// Prompt and answer.
    pub(super) tokens: Vec<u32>,
    pub(super) text: String,
    /// Bytes of the text that were told.
    told: usize,
    decoder: Decoder,
    pub(super) cached_tokens: u32,
}

impl Written {
    /// Nothing yet, behind a prompt of which so many tokens were not computed.
    pub(super) fn new(prompt: &[u32], cached_tokens: u32) -> Self {
        Self {
            tokens: prompt.to_vec(),
            text: String::new(),
            told: 0,
            decoder: Decoder::new(prompt.last().copied()),
            cached_tokens,
        }
    }

    /// Adds a token, and says whether the answer ends with it. `limit`: tokens that prompt and
    /// answer may come to.
    pub(super) fn push(
        &mut self,
        tokenizer: &Tokenizer,
        request: &Request,
        limit: usize,
        token: u32,
    ) -> Option<Finish> {
        self.tokens.push(token);
        if tokenizer.is_end(token) && !request.ignore_ends {
            return Some(Finish::End);
        }
        let before = self.text.len();
        let more = self.decoder.push(tokenizer, token);
        self.text.push_str(&more);
        let longest = request.stop.iter().map(String::len).max().unwrap_or(0);
        let mut from = before.saturating_sub(longest);
        while !self.text.is_char_boundary(from) {
            from -= 1;
        }
        let stops = request.stop.iter().filter(|stop| !stop.is_empty());
        if let Some(at) = stops.filter_map(|stop| self.text[from..].find(stop)).min() {
            self.text.truncate(from + at);
            return Some(Finish::Stop);
        }
        let answer = self.tokens.len() - request.prompt.len();
        let is_last = answer >= request.max_tokens as usize || self.tokens.len() >= limit;
        is_last.then(|| {
            let rest = std::mem::replace(&mut self.decoder, Decoder::new(None)).finish();
            self.text.push_str(&rest);
            Finish::Length
        })
    }

    /// The text that was not told yet and will not be taken back. `ended`: nothing more will come.
    pub(super) fn tell(&mut self, stops: &[String], ended: bool) -> Option<&str> {
        let (from, to) = (self.told, if ended { self.text.len() } else { self.safe_len(stops) });
        self.told = to.max(from);
        self.text.get(from..to).filter(|text| !text.is_empty())
    }

    /// How much of the text cannot become part of a stop text any more.
    fn safe_len(&self, stops: &[String]) -> usize {
        let is_begun = |at: &usize| {
            self.text.is_char_boundary(*at)
                && stops.iter().any(|stop| stop.starts_with(&self.text[*at..]))
        };
        let longest = stops.iter().map(String::len).max().unwrap_or(0);
        let from = self.text.len().saturating_sub(longest);
        (from..self.text.len()).find(is_begun).unwrap_or(self.text.len())
    }
}
