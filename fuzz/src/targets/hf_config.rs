//! A Hugging Face `config.json`.

use std::path::Path;
use std::sync::{LazyLock, Mutex};

use kvpool::config::parse;
use kvpool::plan::Plan;
use libfuzzer_sys::Corpus;

use crate::scratch::Scratch;

static FILE: LazyLock<Mutex<Scratch>> = LazyLock::new(|| Mutex::new(Scratch::new("hf")));

/// Runs one input.
pub(super) fn run(input: &[u8]) -> Corpus {
    let mut scratch = FILE.lock().expect("one thread");
    let path = scratch.fill(input).display().to_string();
    let text = format!(
        "model = {{ hf_config = '{path}' }}\n\
         limits = {{ max_seqs = 2, max_seq_len = 64, max_batch_tokens = 64 }}\n\
         cache = {{ mode = 'paged' }}"
    );
    match parse(&text, Path::new("fuzz.toml"), &[]) {
        Ok(source) => {
            let _ = Plan::new(&source.config, &source.geometry);
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
    Corpus::Keep
}
