//! The weights of a model file.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

use super::tokenizer::Tokenizer;
use crate::config::model_file::HEADER_BYTES;
use crate::config::model_file::gguf::{self, Header, Tensor};
use crate::config::{Architecture, ModelFile, ModelFormat};
use crate::device::cpu::{WeightFormat, Weights};
use crate::error::ModelError;

/// One layer.
#[derive(Debug)]
pub(super) struct Layer {
    /// `[dim]`
    pub(super) attention_norm: Vec<f32>,
    /// `[num_q_heads · head_dim, dim]`
    pub(super) q: Weights,
    /// `[num_kv_heads · head_dim, dim]`
    pub(super) k: Weights,
    /// `[num_kv_heads · head_dim, dim]`
    pub(super) v: Weights,
    /// `[dim, num_q_heads · head_dim]`
    pub(super) attention_out: Weights,
    /// `[dim]`
    pub(super) feed_norm: Vec<f32>,
    /// `[hidden_dim, dim]`
    pub(super) gate: Weights,
    /// `[hidden_dim, dim]`
    pub(super) up: Weights,
    /// `[dim, hidden_dim]`
    pub(super) down: Weights,
    /// What Gemma-3 has beyond Llama.
    pub(super) more_norms: Option<MoreNorms>,
}

/// Norms of Gemma-3.
#[derive(Debug)]
pub(super) struct MoreNorms {
    /// `[head_dim]`
    pub(super) q: Vec<f32>,
    /// `[head_dim]`
    pub(super) k: Vec<f32>,
    /// Behind attention. `[dim]`
    pub(super) attention_out: Vec<f32>,
    /// Behind the feed-forward part. `[dim]`
    pub(super) down: Vec<f32>,
}

/// A model: its weights and its tokenizer.
#[derive(Debug)]
pub struct Model {
    /// What its file says of it.
    pub file: ModelFile,
    /// Between text and tokens.
    pub tokenizer: Tokenizer,
    /// `[vocab_size, dim]`
    pub(super) embedding: Weights,
    /// `[vocab_size, dim]`; the embedding's where there is none.
    pub(super) output: Option<Weights>,
    /// `[dim]`
    pub(super) norm: Vec<f32>,
    pub(super) layers: Vec<Layer>,
}

impl Model {
    /// Loads the weights and the tokenizer of a file whose header was read.
    ///
    /// # Errors
    /// [`ModelError::File`]: it cannot be read, lacks a tensor, or has one of an unexpected shape
    /// or type; a llama2.c model without a `tokenizer`.
    pub fn load(file: ModelFile, tokenizer: Option<&Path>) -> Result<Self, ModelError> {
        match file.format {
            ModelFormat::Llama2C => {
                let Some(tokenizer) = tokenizer else {
                    return Err(ModelError::Setting(
                        "model.tokenizer is missing; a llama2.c model has no tokenizer inside"
                            .to_owned(),
                    ));
                };
                let tokenizer = Tokenizer::read_llama2c(tokenizer, file.vocab_size as usize)?;
                load_llama2c(file, tokenizer)
            }
            ModelFormat::Gguf => load_gguf(file),
        }
    }

    /// The matrix that gives a token's score.
    pub(super) fn output(&self) -> &Weights {
        self.output.as_ref().unwrap_or(&self.embedding)
    }

    /// Bytes that the weights take.
    #[must_use]
    pub fn weight_bytes(&self) -> u64 {
        let of_layer = |layer: &Layer| {
            let Layer { q, k, v, attention_out, gate, up, down, .. } = layer;
            [q, k, v, attention_out, gate, up, down].iter().map(|w| w.num_bytes()).sum::<usize>()
        };
        let output = self.output.as_ref().map_or(0, Weights::num_bytes);
        let layers = self.layers.iter().map(of_layer).sum::<usize>();
        (self.embedding.num_bytes() + output + layers) as u64
    }

    /// The same model with every matrix in f32. What it computes has the same bits.
    #[must_use]
    pub fn expanded(mut self) -> Self {
        self.embedding = self.embedding.expanded();
        self.output = self.output.map(|output| output.expanded());
        for layer in &mut self.layers {
            let Layer { q, k, v, attention_out, gate, up, down, .. } = layer;
            for weights in [q, k, v, attention_out, gate, up, down] {
                *weights = weights.expanded();
            }
        }
        self
    }
}

/// Rows and columns as the file's shapes have them.
struct Sizes {
    dim: usize,
    hidden: usize,
    q: usize,
    kv: usize,
    vocab: usize,
    head: usize,
    layers: usize,
}

impl Sizes {
    fn of(file: &ModelFile) -> Self {
        let geometry = &file.geometry;
        let head = geometry.head_dim as usize;
        Self {
            dim: file.dim as usize,
            hidden: file.hidden_dim as usize,
            q: geometry.num_q_heads as usize * head,
            kv: geometry.num_kv_heads as usize * head,
            vocab: file.vocab_size as usize,
            head,
            layers: geometry.num_layers as usize,
        }
    }
}

/// The weights of a llama2.c file, one after the other.
struct Numbers<'a> {
    path: &'a Path,
    rest: &'a [u8],
}

impl Numbers<'_> {
    fn take(&mut self, count: usize) -> Result<&[u8], ModelError> {
        let short = || ModelError::file(self.path, "ends before its last weight");
        let (bytes, rest) = self.rest.split_at_checked(4 * count).ok_or_else(short)?;
        self.rest = rest;
        Ok(bytes)
    }

    fn vector(&mut self, len: usize) -> Result<Vec<f32>, ModelError> {
        Ok(self.take(len)?.as_chunks::<4>().0.iter().map(|x| f32::from_le_bytes(*x)).collect())
    }

    fn matrix(&mut self, columns: usize, depth: usize) -> Result<Weights, ModelError> {
        let path = self.path;
        let bytes = self.take(columns * depth)?.to_vec();
        Weights::new(WeightFormat::F32, bytes, columns, depth)
            .ok_or_else(|| ModelError::file(path, "has a matrix of the wrong size"))
    }

    /// The same matrix of every layer.
    fn matrices(
        &mut self,
        layers: usize,
        columns: usize,
        depth: usize,
    ) -> Result<std::vec::IntoIter<Weights>, ModelError> {
        let all: Result<Vec<_>, _> = (0..layers).map(|_| self.matrix(columns, depth)).collect();
        Ok(all?.into_iter())
    }
}

fn load_llama2c(file: ModelFile, tokenizer: Tokenizer) -> Result<Model, ModelError> {
    let path = file.path.clone();
    let bytes = std::fs::read(&path).map_err(|error| ModelError::file(&path, error.to_string()))?;
    let rest = bytes.get(HEADER_BYTES..).unwrap_or_default();
    let mut numbers = Numbers { path: &path, rest };
    let Sizes { dim, hidden, q, kv, vocab, head, layers } = Sizes::of(&file);
    let embedding = numbers.matrix(vocab, dim)?;
    let attention_norms = numbers.vector(layers * dim)?;
    let mut qs = numbers.matrices(layers, q, dim)?;
    let mut ks = numbers.matrices(layers, kv, dim)?;
    let mut vs = numbers.matrices(layers, kv, dim)?;
    let mut attention_outs = numbers.matrices(layers, dim, q)?;
    let feed_norms = numbers.vector(layers * dim)?;
    let mut gates = numbers.matrices(layers, hidden, dim)?;
    let mut downs = numbers.matrices(layers, dim, hidden)?;
    let mut ups = numbers.matrices(layers, hidden, dim)?;
    let norm = numbers.vector(dim)?;
    // Cosines and sines of every position: the plan has its own.
    numbers.take(file.context_len as usize * head)?;
    let output = file.has_output.then(|| numbers.matrix(vocab, dim)).transpose()?;
    let norms = attention_norms.chunks(dim).zip(feed_norms.chunks(dim));
    let layers = norms.map_while(|(attention_norm, feed_norm)| {
        Some(Layer {
            attention_norm: attention_norm.to_vec(),
            q: qs.next()?,
            k: ks.next()?,
            v: vs.next()?,
            attention_out: attention_outs.next()?,
            feed_norm: feed_norm.to_vec(),
            gate: gates.next()?,
            up: ups.next()?,
            down: downs.next()?,
            more_norms: None,
        })
    });
    let layers = layers.collect();
    Ok(Model { file, tokenizer, embedding, output, norm, layers })
}

/// The tensors of a GGUF file.
struct Tensors<'a> {
    path: &'a Path,
    header: &'a Header,
    file: File,
    file_bytes: u64,
}

impl Tensors<'_> {
    fn find(&self, name: &str) -> Result<&Tensor, ModelError> {
        let tensor = self.header.tensors.get(name);
        tensor.ok_or_else(|| ModelError::file(self.path, format!("has no tensor {name:?}")))
    }

    fn matrix(&mut self, name: &str, columns: usize, depth: usize) -> Result<Weights, ModelError> {
        let wrong = |problem: String| ModelError::file(self.path, format!("{name}: {problem}"));
        let tensor = self.find(name)?;
        let mut expected = vec![depth as u64, columns as u64];
        if columns == 1 {
            expected.pop();
        }
        if tensor.shape != expected {
            return Err(wrong(format!("has the shape {:?}, expected {expected:?}", tensor.shape)));
        }
        let format = WeightFormat::of_gguf(tensor.kind).ok_or_else(|| {
            wrong(format!("is of GGUF's type {}, which this engine does not read", tensor.kind))
        })?;
        let bytes = format.row_bytes(depth).and_then(|bytes| bytes.checked_mul(columns));
        let bytes = bytes.ok_or_else(|| wrong("is no whole number of blocks".to_owned()))?;
        let (offset, end) = (tensor.offset, tensor.offset.saturating_add(bytes as u64));
        if end > self.file_bytes {
            return Err(wrong(format!(
                "ends at byte {end}, and the file has {}; it was cut off, get it again",
                self.file_bytes
            )));
        }
        let mut read = || -> std::io::Result<Vec<u8>> {
            let mut data = Vec::new();
            // A file of holes can be longer than any memory.
            data.try_reserve_exact(bytes)?;
            self.file.seek(SeekFrom::Start(offset))?;
            (&mut self.file).take(bytes as u64).read_to_end(&mut data)?;
            if data.len() < bytes {
                return Err(std::io::ErrorKind::UnexpectedEof.into());
            }
            Ok(data)
        };
        let data =
            read().map_err(|error| ModelError::file(self.path, format!("{name}: {error}")))?;
        Weights::new(format, data, columns, depth)
            .ok_or_else(|| ModelError::file(self.path, format!("{name}: is empty")))
    }

    fn vector(&mut self, name: &str, len: usize) -> Result<Vec<f32>, ModelError> {
        let matrix = self.matrix(name, 1, len)?;
        let mut vector = vec![0.0; len];
        matrix.row(0, &mut vector);
        Ok(vector)
    }
}

fn load_gguf(file: ModelFile) -> Result<Model, ModelError> {
    let path = file.path.clone();
    let failed = |problem: String| ModelError::file(&path, problem);
    let opened = File::open(&path).map_err(|error| failed(error.to_string()))?;
    let file_bytes = opened.metadata().map_err(|error| failed(error.to_string()))?.len();
    let mut reader = std::io::BufReader::with_capacity(1 << 20, &opened);
    let mut magic = [0; 4];
    reader.read_exact(&mut magic).map_err(|error| failed(error.to_string()))?;
    if magic != *gguf::MAGIC {
        return Err(failed("is no GGUF file any more".to_owned()));
    }
    let header = Header::read_after_magic(&mut reader, file_bytes).map_err(failed)?;
    let tokenizer = Tokenizer::of_gguf(&header, file.vocab_size as usize)
        .map_err(|problem| ModelError::file(&path, problem))?;
    if let Some(bias) = header.tensors.keys().find(|name| name.ends_with(".bias")) {
        return Err(ModelError::file(&path, format!("has {bias:?}; no bias was expected")));
    }
    let mut tensors = Tensors { path: &path, header: &header, file: opened, file_bytes };
    let sizes = Sizes::of(&file);
    let embedding = tensors.matrix("token_embd.weight", sizes.vocab, sizes.dim)?;
    let output = file
        .has_output
        .then(|| tensors.matrix("output.weight", sizes.vocab, sizes.dim))
        .transpose()?;
    let norm = tensors.vector("output_norm.weight", sizes.dim)?;
    let layers: Result<Vec<_>, _> = (0..sizes.layers)
        .map(|layer| gguf_layer(&mut tensors, &sizes, file.architecture, layer))
        .collect();
    let layers = layers?;
    Ok(Model { file, tokenizer, embedding, output, norm, layers })
}

fn gguf_layer(
    tensors: &mut Tensors<'_>,
    sizes: &Sizes,
    architecture: Architecture,
    layer: usize,
) -> Result<Layer, ModelError> {
    let Sizes { dim, hidden, q, kv, head, .. } = *sizes;
    let name = |part: &str| format!("blk.{layer}.{part}.weight");
    let more_norms = match architecture {
        Architecture::Llama => None,
        Architecture::Gemma3 => Some(MoreNorms {
            q: tensors.vector(&name("attn_q_norm"), head)?,
            k: tensors.vector(&name("attn_k_norm"), head)?,
            attention_out: tensors.vector(&name("post_attention_norm"), dim)?,
            down: tensors.vector(&name("post_ffw_norm"), dim)?,
        }),
    };
    Ok(Layer {
        attention_norm: tensors.vector(&name("attn_norm"), dim)?,
        q: tensors.matrix(&name("attn_q"), q, dim)?,
        k: tensors.matrix(&name("attn_k"), kv, dim)?,
        v: tensors.matrix(&name("attn_v"), kv, dim)?,
        attention_out: tensors.matrix(&name("attn_output"), dim, q)?,
        feed_norm: tensors.vector(&name("ffn_norm"), dim)?,
        gate: tensors.matrix(&name("ffn_gate"), hidden, dim)?,
        up: tensors.matrix(&name("ffn_up"), hidden, dim)?,
        down: tensors.matrix(&name("ffn_down"), dim, hidden)?,
        more_norms,
    })
}
