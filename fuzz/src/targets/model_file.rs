//! A model file, GGUF or llama2.c: its header, its weights, its tokenizer.

use std::sync::{LazyLock, Mutex};

use kvpool::config::{ModelFile, ModelFormat};
use kvpool::job::model::Model;
use libfuzzer_sys::Corpus;

use crate::scratch::Scratch;

static FILE: LazyLock<Mutex<Scratch>> = LazyLock::new(|| Mutex::new(Scratch::new("model")));
static PIECES: LazyLock<Mutex<Scratch>> = LazyLock::new(|| Mutex::new(Scratch::new("pieces")));

/// The tokenizer that a llama2.c file comes with: a letter or more a token.
fn tokenizer(vocab_size: u32) -> Vec<u8> {
    let mut bytes = 4_u32.to_le_bytes().to_vec();
    for id in 0..vocab_size {
        let piece = "aestin <>".repeat(2)[id as usize % 9..][..1 + id as usize / 9 % 9].to_owned();
        bytes.extend((id as f32).to_le_bytes());
        bytes.extend((piece.len() as u32).to_le_bytes());
        bytes.extend(piece.bytes());
    }
    bytes
}

/// Runs one input.
pub(super) fn run(input: &[u8]) -> Corpus {
    let mut scratch = FILE.lock().expect("one thread");
    let path = scratch.fill(input);
    match ModelFile::read(path) {
        Ok(file) => {
            let mut pieces = PIECES.lock().expect("one thread");
            let tokenizer = (file.format == ModelFormat::Llama2C && file.vocab_size <= 300)
                .then(|| pieces.fill(&tokenizer(file.vocab_size)));
            match Model::load(file, tokenizer) {
                Ok(model) => {
                    let tokens = model.tokenizer.prompt("It was <s>\n<|im_end|>é\0");
                    let vocabulary = model.file.vocab_size;
                    assert!(tokens.iter().all(|token| *token < vocabulary), "{tokens:?}");
                    let _ = model.tokenizer.decode(model.tokenizer.bos(), &tokens);
                }
                Err(error) => assert!(!error.to_string().is_empty()),
            }
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
    Corpus::Keep
}
