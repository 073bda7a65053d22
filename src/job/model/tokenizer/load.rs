//! Tokenizers from files.

use std::collections::HashMap;
use std::path::Path;

use super::words::WordPattern;
use super::{Kind, Specials, Tokenizer};
use crate::config::model_file::gguf::{Header, Value};
use crate::error::ModelError;

/// GGUF's kinds of tokens.
const UNKNOWN: i64 = 2;
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;
const BYTE: i64 = 6;

/// Control tokens that end an answer, by their text.
const ENDS: [&str; 6] =
    ["<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<end_of_turn>", "</s>", "<|end|>"];

impl Tokenizer {
    /// Reads llama2.c's `tokenizer.bin`: the longest piece's length, then for each token a score,
    /// its piece's length and the piece.
    ///
    /// # Errors
    /// [`ModelError::File`]: it cannot be read, or has not `vocab_size` tokens.
    pub fn read_llama2c(path: &Path, vocab_size: usize) -> Result<Self, ModelError> {
        let bytes =
            std::fs::read(path).map_err(|error| ModelError::file(path, error.to_string()))?;
        llama2c(&bytes, vocab_size).map_err(|problem| ModelError::file(path, problem))
    }

    /// The tokenizer inside a GGUF file.
    ///
    /// # Errors
    /// What is missing, or not known.
    pub fn of_gguf(header: &Header, vocab_size: usize) -> Result<Self, String> {
        let pieces = texts(header, "tokenizer.ggml.tokens")?;
        if pieces.len() != vocab_size {
            return Err(format!("has {} tokens and {vocab_size} embeddings", pieces.len()));
        }
        let kinds = if header.values.contains_key("tokenizer.ggml.token_type") {
            items(header, "tokenizer.ggml.token_type", "whole numbers", |kind| match kind {
                Value::Int(kind) => Some(*kind),
                _ => None,
            })?
        } else {
            vec![1; pieces.len()]
        };
        if kinds.len() != pieces.len() {
            return Err("has not one type for each token".to_owned());
        }
        match header.text("tokenizer.ggml.model") {
            Some("llama") => scored(header, &pieces, &kinds),
            Some("gpt2") => byte_level(header, &pieces, &kinds),
            Some(other) => Err(format!("has a tokenizer of the kind {other:?}")),
            None => Err("has no tokenizer".to_owned()),
        }
    }
}

/// A list whose items are all of one kind.
fn items<'h, T>(
    header: &'h Header,
    key: &str,
    kind: &str,
    item: impl Fn(&'h Value) -> Option<T>,
) -> Result<Vec<T>, String> {
    let list = header.list(key).ok_or_else(|| format!("has no list {key:?}"))?;
    let all: Option<Vec<T>> = list.iter().map(item).collect();
    all.ok_or_else(|| format!("its {key:?} is no list of {kind}"))
}

/// A list of texts.
fn texts<'h>(header: &'h Header, key: &str) -> Result<Vec<&'h str>, String> {
    items(header, key, "texts", |value| match value {
        Value::Text(text) => Some(text.as_str()),
        _ => None,
    })
}

/// A token that the file may name, of so many.
fn token(header: &Header, key: &str, count: usize) -> Result<Option<u32>, String> {
    let key = format!("tokenizer.ggml.{key}");
    match header.whole(&key)? {
        Some(id) if id as usize >= count => {
            Err(format!("its {key:?} is {id}, and it has {count} tokens"))
        }
        id => Ok(id),
    }
}

/// `<0x0A>` as the byte that it stands for.
fn byte_of(piece: &[u8]) -> Option<u8> {
    let digits = piece.strip_prefix(b"<0x")?.strip_suffix(b">")?;
    u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()
}

fn llama2c(bytes: &[u8], vocab_size: usize) -> Result<Tokenizer, String> {
    let short = || format!("has not the {vocab_size} tokens of the model");
    let mut rest = bytes.get(4..).ok_or_else(short)?;
    let (mut scores, mut pieces) = (Vec::new(), Vec::new());
    for _ in 0..vocab_size {
        let (head, tail) = rest.split_at_checked(8).ok_or_else(short)?;
        let score = f32::from_le_bytes([head[0], head[1], head[2], head[3]]);
        let len = u32::from_le_bytes([head[4], head[5], head[6], head[7]]) as usize;
        let (piece, tail) = tail.split_at_checked(len).ok_or_else(short)?;
        scores.push(score);
        pieces.push(piece.to_vec());
        rest = tail;
    }
    if !rest.is_empty() {
        return Err(format!("has more than the {vocab_size} tokens of the model"));
    }
    let mut byte_tokens = vec![None; 256];
    let mut stands_for = pieces.clone();
    let mut ids = HashMap::new();
    for (id, piece) in (0..).zip(&pieces) {
        if let Some(byte) = byte_of(piece) {
            byte_tokens[usize::from(byte)] = Some(id);
            stands_for[id as usize] = vec![byte];
        }
        ids.insert(piece.clone(), id);
    }
    Ok(Tokenizer {
        bytes: stands_for,
        ids,
        specials: Specials::default(),
        kind: Kind::Scored {
            pieces,
            scores,
            byte_tokens,
            unknown: 0,
            adds_blank: true,
            marks_blanks: false,
        },
        bos: Some(1).filter(|_| vocab_size > 1),
        adds_bos: true,
        // It was trained on stories one after the other, so the next one's begin ends one, too.
        ends: vec![1, 2],
        strips_first_blank: true,
    })
}

/// What both kinds of GGUF have in common: beginning, ends, specials.
fn with_specials(
    header: &Header,
    pieces: &[&str],
    kinds: &[i64],
    mut tokenizer: Tokenizer,
) -> Result<Tokenizer, String> {
    let mut specials = HashMap::new();
    for ((id, piece), kind) in (0..).zip(pieces).zip(kinds) {
        let control = *kind == CONTROL || *kind == UNKNOWN;
        if (control || *kind == USER_DEFINED) && !piece.is_empty() {
            specials.insert(piece.as_bytes().to_vec(), (id, control));
            if matches!(tokenizer.kind, Kind::ByteLevel { .. }) {
                // These are not spelt in the characters that stand for bytes.
                tokenizer.bytes[id as usize] = piece.as_bytes().to_vec();
            }
        }
        if *kind == CONTROL && ENDS.contains(piece) {
            tokenizer.ends.push(id);
        }
    }
    tokenizer.ends.extend(token(header, "eos_token_id", pieces.len())?);
    tokenizer.specials = Specials::new(specials);
    tokenizer.bos = token(header, "bos_token_id", pieces.len())?;
    Ok(tokenizer)
}

fn scored(header: &Header, pieces: &[&str], kinds: &[i64]) -> Result<Tokenizer, String> {
    #[expect(clippy::cast_possible_truncation, reason = "they were f32 in the file")]
    let score = |score: &Value| match score {
        Value::Float(score) => Some(*score as f32),
        _ => None,
    };
    let scores = items(header, "tokenizer.ggml.scores", "floats", score)?;
    if scores.len() != pieces.len() {
        return Err("has not one score for each token".to_owned());
    }
    let mut byte_tokens = vec![None; 256];
    let mut ids = HashMap::new();
    let mut stands_for = Vec::with_capacity(pieces.len());
    for ((id, piece), kind) in (0..).zip(pieces).zip(kinds) {
        match byte_of(piece.as_bytes()).filter(|_| *kind == BYTE) {
            Some(byte) => {
                byte_tokens[usize::from(byte)] = Some(id);
                stands_for.push(vec![byte]);
            }
            None => {
                stands_for.push(piece.replace('▁', " ").into_bytes());
                ids.insert(piece.as_bytes().to_vec(), id);
            }
        }
    }
    let unknown = token(header, "unknown_token_id", pieces.len())?;
    let blank_first = header.flag("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
    let tokenizer = Tokenizer {
        bytes: stands_for,
        ids,
        specials: Specials::default(),
        kind: Kind::Scored {
            pieces: pieces.iter().map(|piece| piece.as_bytes().to_vec()).collect(),
            scores,
            byte_tokens,
            unknown: unknown.unwrap_or(0),
            adds_blank: blank_first,
            marks_blanks: true,
        },
        bos: None,
        adds_bos: header.flag("tokenizer.ggml.add_bos_token")?.unwrap_or(true),
        ends: Vec::new(),
        strips_first_blank: blank_first,
    };
    with_specials(header, pieces, kinds, tokenizer)
}

/// The byte that each character of a byte-level piece stands for: printable ones for themselves,
/// the others for characters from U+0100 on.
fn bytes_of_characters() -> HashMap<char, u8> {
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let others = (0..=255).filter(|byte| !printable(*byte));
    let others = others.zip(0x100..).filter_map(|(byte, c)| Some((char::from_u32(c)?, byte)));
    (0..=255)
        .filter(|byte| printable(*byte))
        .map(|byte| (char::from(byte), byte))
        .chain(others)
        .collect()
}

fn byte_level(header: &Header, pieces: &[&str], kinds: &[i64]) -> Result<Tokenizer, String> {
    let name = header.word("tokenizer.ggml.pre")?.unwrap_or("default");
    let pattern = WordPattern::named(name)
        .ok_or_else(|| format!("cuts words as {name:?} does, which is not known here"))?;
    let characters = bytes_of_characters();
    let spelt = |piece: &str| piece.chars().map(|c| characters.get(&c).copied()).collect();
    let mut ids = HashMap::new();
    let mut stands_for = Vec::with_capacity(pieces.len());
    for (id, piece) in (0..).zip(pieces) {
        let bytes: Option<Vec<u8>> = spelt(piece);
        stands_for.push(bytes.unwrap_or_else(|| piece.as_bytes().to_vec()));
        ids.insert(piece.as_bytes().to_vec(), id);
    }
    let mut byte_tokens = vec![u32::MAX; 256];
    for (c, byte) in &characters {
        let id = ids.get(c.to_string().as_bytes());
        // A byte that was never seen in training has no token; what begins a text stands for it.
        byte_tokens[usize::from(*byte)] = id.copied().unwrap_or(0);
    }
    let mut merges = HashMap::new();
    for (rank, merge) in (0..).zip(texts(header, "tokenizer.ggml.merges")?) {
        let (left, right) =
            merge.split_once(' ').ok_or_else(|| format!("merge {rank} is {merge:?}"))?;
        let id = |piece: &str| ids.get(piece.as_bytes()).copied();
        if let (Some(a), Some(b), Some(both)) = (id(left), id(right), id(&format!("{left}{right}")))
        {
            merges.insert((a, b), (rank, both));
        }
    }
    let tokenizer = Tokenizer {
        bytes: stands_for,
        ids,
        specials: Specials::default(),
        kind: Kind::ByteLevel { merges, byte_tokens, pattern },
        bos: None,
        adds_bos: header.flag("tokenizer.ggml.add_bos_token")?.unwrap_or(false),
        ends: Vec::new(),
        strips_first_blank: false,
    };
    with_specials(header, pieces, kinds, tokenizer)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn known(tokenizer: &Tokenizer) {
        for text in ["", "a", "é<s>", "a a"] {
            let tokens = tokenizer.prompt(text);
            let all = tokens.iter().all(|token| (*token as usize) < tokenizer.len());
            assert!(!tokens.is_empty() && all, "{text:?}: {tokens:?}");
        }
    }

    /// Nothing beyond the embeddings is looked up, and what is of no use is not taken for absent.
    #[test]
    fn every_token_is_one_of_the_vocabulary() {
        let texts = ["a", "<s>"].map(|text| Value::Text(text.to_owned()));
        let mut values: BTreeMap<String, Value> = [
            ("tokens", Value::List(texts.to_vec())),
            ("scores", Value::List(vec![Value::Float(0.0); 2])),
            ("token_type", Value::List(vec![Value::Int(1), Value::Int(CONTROL)])),
            ("merges", Value::List(Vec::new())),
            ("unknown_token_id", Value::Uint(1)),
            ("bos_token_id", Value::Uint(1)),
            ("eos_token_id", Value::Uint(0)),
        ]
        .map(|(key, value)| (format!("tokenizer.ggml.{key}"), value))
        .into();
        for kind in ["llama", "gpt2"] {
            values.insert("tokenizer.ggml.model".to_owned(), Value::Text(kind.to_owned()));
            let header = Header { values: values.clone(), tensors: BTreeMap::new() };
            known(&Tokenizer::of_gguf(&header, 2).expect("a tokenizer"));
            let of = |key: &str| key != "unknown_token_id" || kind == "llama";
            for (key, value, says) in [
                ("unknown_token_id", Value::Uint(2), "is 2, and it has 2 tokens"),
                ("bos_token_id", Value::Uint(u32::MAX.into()), "is 4294967295, and it has 2"),
                ("eos_token_id", Value::Int(-1), "is -1; expected a whole number"),
                ("add_bos_token", Value::Int(1), "is 1; expected true or false"),
                ("token_type", Value::List(vec![Value::Bool(true); 2]), "is no list of whole"),
            ] {
                let key = format!("tokenizer.ggml.{key}");
                let mut others = values.clone();
                others.insert(key.clone(), value);
                let header = Header { values: others, tensors: BTreeMap::new() };
                if of(key.trim_start_matches("tokenizer.ggml.")) {
                    let error = Tokenizer::of_gguf(&header, 2).expect_err("of no use");
                    assert!(error.starts_with(&format!("its {key:?} {says}")), "{error}");
                }
            }
        }
        for (kind, key) in [("llama", "add_space_prefix"), ("gpt2", "pre"), ("llama", "scores")] {
            values.insert("tokenizer.ggml.model".to_owned(), Value::Text(kind.to_owned()));
            let mut others = values.clone();
            others.insert(format!("tokenizer.ggml.{key}"), Value::List(vec![Value::Int(0); 2]));
            let header = Header { values: others, tensors: BTreeMap::new() };
            let error = Tokenizer::of_gguf(&header, 2).expect_err("of no use");
            assert!(error.contains(key), "{error}");
        }
        let one = [&1_u32.to_le_bytes()[..], &[0; 4], &1_u32.to_le_bytes(), b"a"].concat();
        known(&llama2c(&one, 1).expect("a tokenizer"));
    }
}
