//! From text to tokens, with Hugging Face's `tokenizers`.

use std::path::Path;

/// A tokenizer from a `tokenizer.json`.
#[cfg(feature = "model")]
pub(in crate::job::reader) struct Tokenizer(tokenizers::Tokenizer);

#[cfg(feature = "model")]
impl Tokenizer {
    /// Reads a file.
    ///
    /// # Errors
    /// It cannot be read, or is no tokenizer.
    pub(super) fn load(path: &Path) -> Result<Self, String> {
        let bytes = std::fs::read(path).map_err(|error| error.to_string())?;
        let mut tokenizer = tokenizers::Tokenizer::from_bytes(bytes)
            .map_err(|error| format!("is no tokenizer.json: {error}"))?;
        // Neither cuts a prompt off nor fills it up, whatever the file was saved with.
        tokenizer.with_truncation(None).map_err(|error| error.to_string())?;
        tokenizer.with_padding(None);
        Ok(Self(tokenizer))
    }

    /// Appends the tokens of a text, with those that the tokenizer puts around it.
    ///
    /// # Errors
    /// A text that it cannot cut up.
    pub(super) fn encode(&self, text: &str, ids: &mut Vec<u32>) -> Result<(), String> {
        let encoding = self.0.encode_fast(text, true);
        let encoding = encoding.map_err(|error| format!("the tokenizer fails: {error}"))?;
        ids.extend_from_slice(encoding.get_ids());
        Ok(())
    }
}

/// No tokenizer: this build has none.
#[cfg(not(feature = "model"))]
pub(in crate::job::reader) enum Tokenizer {}

#[cfg(not(feature = "model"))]
impl Tokenizer {
    /// Says how to build a program that has one.
    ///
    /// # Errors
    /// Always.
    pub(super) fn load(_path: &Path) -> Result<Self, String> {
        Err("this program is built without tokenizers; build it with `cargo build --release --features \
             model`, or give prompts as lists of tokens"
            .to_owned())
    }

    /// There is none to ask.
    pub(super) fn encode(&self, _text: &str, _ids: &mut Vec<u32>) -> Result<(), String> {
        match *self {}
    }
}
