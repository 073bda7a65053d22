//! Between text and tokens, as the model's file has it.
//!
//! Two kinds. *Scored* (SentencePiece's form; llama2.c's `tokenizer.bin`, GGUF's `llama`):
//! characters are merged, the pair with the best score first; what has no piece becomes bytes.
//! *Byte-level* (GGUF's `gpt2`): words, cut out by a pattern, start as bytes and are merged by a
//! list of ranks. Either way special tokens (`<|im_start|>`) are found first.

mod load;
mod merge;
mod words;

use std::collections::{HashMap, HashSet};

use words::WordPattern;

/// A tokenizer.
#[derive(Debug)]
pub struct Tokenizer {
    /// What each token stands for.
    bytes: Vec<Vec<u8>>,
    /// The token of a piece, by the piece as the merges know it.
    ids: HashMap<Vec<u8>, u32>,
    specials: Specials,
    kind: Kind,
    /// The token that a text begins with, if one was trained on.
    bos: Option<u32>,
    /// Whether a text begins with it unless one says otherwise.
    adds_bos: bool,
    /// The tokens that end an answer.
    ends: Vec<u32>,
    /// Whether a blank behind the first token is left out, as llama2.c does it.
    strips_first_blank: bool,
}

/// How text becomes tokens.
#[derive(Debug)]
enum Kind {
    Scored {
        /// By token: its piece as the merges know it.
        pieces: Vec<Vec<u8>>,
        /// By token.
        scores: Vec<f32>,
        /// The token of each byte.
        byte_tokens: Vec<Option<u32>>,
        unknown: u32,
        /// Whether a blank is put before a text.
        adds_blank: bool,
        /// Whether pieces have ▁ for a blank.
        marks_blanks: bool,
    },
    ByteLevel {
        /// Rank and result of each merge of two tokens.
        merges: HashMap<(u32, u32), (u32, u32)>,
        /// The token of each byte.
        byte_tokens: Vec<u32>,
        pattern: WordPattern,
    },
}

/// Tokens that are found in a text before anything else is done to it.
#[derive(Debug, Default)]
struct Specials {
    /// Text, and whether it is taken as text where specials are not wanted.
    ids: HashMap<Vec<u8>, (u32, bool)>,
    /// Their lengths, the longest first.
    lengths: Vec<usize>,
    first_bytes: HashSet<u8>,
}

impl Specials {
    fn new(ids: HashMap<Vec<u8>, (u32, bool)>) -> Self {
        let mut lengths: Vec<usize> = ids.keys().map(Vec::len).collect();
        lengths.sort_unstable_by(|a, b| b.cmp(a));
        lengths.dedup();
        let first_bytes = ids.keys().filter_map(|text| text.first().copied()).collect();
        Self { ids, lengths, first_bytes }
    }

    /// The longest special that the text begins with.
    fn at(&self, text: &[u8], control: bool) -> Option<(usize, u32)> {
        if !self.first_bytes.contains(text.first()?) {
            return None;
        }
        self.lengths.iter().find_map(|len| {
            let (id, is_control) = self.ids.get(text.get(..*len)?)?;
            (control || !is_control).then_some((*len, *id))
        })
    }
}

impl Tokenizer {
    /// Tokens that there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The token that a text begins with, if one was trained on.
    #[must_use]
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// Whether a text begins with that token unless one says otherwise.
    #[must_use]
    pub fn adds_bos(&self) -> bool {
        self.adds_bos && self.bos.is_some()
    }

    /// Whether this token ends an answer.
    #[must_use]
    pub fn is_end(&self, token: u32) -> bool {
        self.ends.contains(&token)
    }

    /// The tokens of a prompt: that which a text begins with, if the model wants one, then the
    /// text's, special tokens in it taken as such. Never empty.
    #[must_use]
    pub fn prompt(&self, text: &str) -> Vec<u32> {
        let mut tokens = Vec::new();
        if self.adds_bos {
            tokens.extend(self.bos);
        }
        self.encode_into(text, true, &mut tokens);
        if tokens.is_empty() {
            // A model must be given something to go on from.
            tokens.push(self.bos.unwrap_or(0));
        }
        tokens
    }

    /// The tokens of a text. With `specials`, what reads as a control token becomes one.
    #[must_use]
    pub fn encode(&self, text: &str, specials: bool) -> Vec<u32> {
        let mut tokens = Vec::new();
        self.encode_into(text, specials, &mut tokens);
        tokens
    }

    fn encode_into(&self, text: &str, control: bool, tokens: &mut Vec<u32>) {
        let (bytes, mut from, mut at) = (text.as_bytes(), 0, 0);
        while at < bytes.len() {
            match self.specials.at(&bytes[at..], control) {
                Some((len, id)) => {
                    self.encode_plain(&text[from..at], from == 0, tokens);
                    tokens.push(id);
                    at += len;
                    from = at;
                }
                // Specials begin and end at characters, as all texts do.
                None => at += 1,
            }
        }
        self.encode_plain(&text[from..], from == 0, tokens);
    }

    /// The tokens of a text without specials.
    fn encode_plain(&self, text: &str, is_first: bool, tokens: &mut Vec<u32>) {
        if text.is_empty() {
            return;
        }
        match &self.kind {
            Kind::Scored { pieces, scores, byte_tokens, unknown, adds_blank, marks_blanks } => {
                let blank = if *adds_blank && is_first { " " } else { "" };
                let text = format!("{blank}{text}");
                let text = if *marks_blanks { text.replace(' ', "▁") } else { text };
                let mut symbols = Vec::new();
                for character in text.split_inclusive(|_: char| true) {
                    match self.ids.get(character.as_bytes()) {
                        Some(id) => symbols.push(*id),
                        None => symbols.extend(
                            character
                                .bytes()
                                .map(|b| byte_tokens[usize::from(b)].unwrap_or(*unknown)),
                        ),
                    }
                }
                let mut joined = Vec::new();
                merge::merge(&mut symbols, |a, b| {
                    joined.clear();
                    joined.extend_from_slice(&pieces[a as usize]);
                    joined.extend_from_slice(&pieces[b as usize]);
                    let id = *self.ids.get(&joined)?;
                    Some((merge::Priority::of_score(scores[id as usize]), id))
                });
                tokens.append(&mut symbols);
            }
            Kind::ByteLevel { merges, byte_tokens, pattern } => {
                for word in pattern.words(text) {
                    let mut symbols: Vec<u32> =
                        word.bytes().map(|byte| byte_tokens[usize::from(byte)]).collect();
                    merge::merge(&mut symbols, |a, b| {
                        let (rank, id) = merges.get(&(a, b))?;
                        Some((merge::Priority::of_rank(*rank), *id))
                    });
                    tokens.append(&mut symbols);
                }
            }
        }
    }

    /// What a token stands for.
    #[must_use]
    pub fn bytes(&self, token: u32) -> &[u8] {
        self.bytes.get(token as usize).map_or(&[], Vec::as_slice)
    }

    /// The text of tokens that follow `before`. What is no UTF-8 becomes U+FFFD.
    #[must_use]
    pub fn decode(&self, before: Option<u32>, tokens: &[u32]) -> String {
        let mut decoder = Decoder::new(before);
        let mut text: String = tokens.iter().map(|token| decoder.push(self, *token)).collect();
        text.push_str(&decoder.finish());
        text
    }
}

/// Turns tokens into text one by one, and keeps a character back until all its bytes are there.
#[derive(Clone, Debug)]
pub struct Decoder {
    before: Option<u32>,
    pending: Vec<u8>,
}

impl Decoder {
    /// A decoder of what follows this token.
    #[must_use]
    pub fn new(before: Option<u32>) -> Self {
        Self { before, pending: Vec::new() }
    }

    /// The text that is whole with one more token.
    pub fn push(&mut self, tokenizer: &Tokenizer, token: u32) -> String {
        let mut bytes = tokenizer.bytes(token);
        let first = self.before == tokenizer.bos && tokenizer.bos.is_some();
        if tokenizer.strips_first_blank && first {
            bytes = bytes.strip_prefix(b" ").unwrap_or(bytes);
        }
        self.before = Some(token);
        self.pending.extend_from_slice(bytes);
        let mut text = String::new();
        loop {
            match std::str::from_utf8(&self.pending) {
                Ok(valid) => {
                    text.push_str(valid);
                    self.pending.clear();
                    return text;
                }
                Err(error) => {
                    let (valid, rest) = self.pending.split_at(error.valid_up_to());
                    text.push_str(&String::from_utf8_lossy(valid));
                    let Some(bad) = error.error_len() else {
                        self.pending = rest.to_vec();
                        return text;
                    };
                    text.push(char::REPLACEMENT_CHARACTER);
                    self.pending = rest[bad..].to_vec();
                }
            }
        }
    }

    /// What is left: half a character, if anything.
    #[must_use]
    pub fn finish(self) -> String {
        String::from_utf8_lossy(&self.pending).into_owned()
    }
}
