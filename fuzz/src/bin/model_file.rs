//! A model file, GGUF or llama2.c: its header, its weights, its tokenizer.

#![no_main]

use std::sync::{LazyLock, Mutex};

use kvpool::config::ModelFile;
use kvpool::job::model::Model;
use kvpool_fuzz::Scratch;
use libfuzzer_sys::fuzz_target;

static FILE: LazyLock<Mutex<Scratch>> = LazyLock::new(|| Mutex::new(Scratch::new("model")));

fuzz_target!(|input: &[u8]| {
    let mut scratch = FILE.lock().expect("one thread");
    let path = scratch.fill(input);
    match ModelFile::read(path) {
        Ok(file) => {
            if let Err(error) = Model::load(file, None) {
                assert!(!error.to_string().is_empty());
            }
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
});
