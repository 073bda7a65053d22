//! `model.file`: a file with a model's weights, read as far as a plan needs it.
//!
//! Two formats: GGUF (architectures `llama` and `gemma3`), and llama2.c's legacy export. What is
//! read here is the header: the attention geometry, how K is rotated, and the sizes of the other
//! layers. The weights themselves are read by the model engine (feature `model`).

pub mod gguf;
mod llama2c;

use std::fs::File;
use std::io::{BufReader, ErrorKind, Read};
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::complaint::{Complaint, Refused};
use super::{Geometry, RopeConfig};
use crate::error::ConfigError;

pub use llama2c::HEADER_BYTES;

/// How a file is laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ModelFormat {
    /// Seven 32-bit numbers, then weights in f32. The tokenizer is another file.
    Llama2C,
    /// Named values and tensors, the tokenizer among them.
    Gguf,
}

/// What computes between the products.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Architecture {
    /// Norm before attention and before the feed-forward part, SwiGLU.
    Llama,
    /// Also norms behind them and on q and k, GELU, embeddings scaled by √dim.
    Gemma3,
}

/// What a model file says of its model.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ModelFile {
    /// The file.
    pub path: PathBuf,
    /// How it is laid out.
    pub format: ModelFormat,
    /// What the model computes.
    pub architecture: Architecture,
    /// What the cache has to know.
    pub geometry: Geometry,
    /// How K is rotated.
    pub rope: RopeConfig,
    /// Elements of a token's vector between layers.
    pub dim: u32,
    /// Elements inside the feed-forward part.
    pub hidden_dim: u32,
    /// Tokens that there are.
    pub vocab_size: u32,
    /// Positions that the model was trained on.
    pub context_len: u32,
    /// Added to the mean square before its root is taken.
    pub norm_eps: f32,
    /// Whether the output matrix is a tensor of its own; otherwise it is that of the embedding.
    pub has_output: bool,
}

impl ModelFile {
    /// Reads the header of a model file.
    ///
    /// # Errors
    /// [`ConfigError::Read`]: the file cannot be read, is of no known format, or describes a model
    /// that this engine does not compute.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        Self::read_header(path)
            .map_err(|problem| ConfigError::Read { path: path.to_owned(), problem })
    }

    fn read_header(path: &Path) -> Result<Self, String> {
        let file = File::open(path).map_err(|error| error.to_string())?;
        let metadata = file.metadata().map_err(|error| error.to_string())?;
        if metadata.is_dir() {
            return Err("is a directory; expected a model file".to_owned());
        }
        let mut file = BufReader::with_capacity(1 << 16, file);
        let mut magic = [0; 4];
        let read = file.read_exact(&mut magic);
        read.map_err(|error| unread(&error, "it is too short for a model file"))?;
        if magic == *gguf::MAGIC {
            let header = gguf::Header::read_after_magic(&mut file, metadata.len())?;
            return gguf::describe(path, &header);
        }
        llama2c::describe(path, magic, &mut file, metadata.len())
    }
}

/// Why bytes could not be read: the file has no more, or the system refuses.
fn unread(error: &std::io::Error, ended: &str) -> String {
    match error.kind() {
        ErrorKind::UnexpectedEof => ended.to_owned(),
        _ => error.to_string(),
    }
}

/// The geometry of `model.file`, and what else it says.
pub(super) fn resolve(path: &Path, sink_tokens: u32) -> Result<ModelFile, Refused> {
    let mut file = ModelFile::read(path)?;
    file.geometry.sink_tokens = sink_tokens;
    if file.format == ModelFormat::Gguf && sink_tokens > 0 {
        return Err(Complaint::with_help(
            "model.sink_tokens",
            "is given, and the model of model.file was trained without sinks",
            "remove it",
        )
        .into());
    }
    Ok(file)
}
