//! A static pooled KV-cache runtime for large-language-model inference.
//!
//! One TOML file gives the model's geometry and the largest sequences. Everything that will ever
//! be needed is computed from it, allocated once, and never again. Each layer keeps its keys and
//! values **contiguous** (one run of memory for each sequence), **paged** (blocks of tokens, found
//! through a table), or, in a **hybrid** plan, some layers one way and some the other, in f32,
//! f16, bf16 or INT8. Attention gives the same bits whichever was chosen.
//!
//! ```text
//!   TOML ──▶ Config ──▶ Plan ──────▶ Pool + Cache ─▶ Step ──────▶ Device ─▶ kernel
//!            as written  every size   the one         reserve,     the bytes
//!                        and offset   allocation      then commit  and the arithmetic
//!
//!   pool:   │ layer group 0                     │ layer group 1      │
//!           │ block 0 │ block 1 │ block 2 │ ... │ slot 0 │ slot 1 │..│
//!   block:  [layer in group][K, V][kv head][token][head_dim], then the scales
//! ```
//!
//! # In fifteen lines
//!
//! ```
//! use kvpool::{cache::Cache, config, plan::Plan, units::LayerIdx};
//!
//! let text = "
//!     model = { num_layers = 1, num_q_heads = 4, num_kv_heads = 2, head_dim = 64 }
//!     limits = { max_seqs = 2, max_seq_len = 128, max_batch_tokens = 32 }
//!     cache = { mode = 'paged', format = 'f16' }";
//! let source = config::parse(text, "example.toml".as_ref(), &[])?;
//! let plan = Plan::new(&source.config, &source.geometry)?;
//! let mut cache = Cache::open_on_cpu(plan, &source.config.device, None)?;
//!
//! let sequence = cache.begin(&[1, 2, 3], Default::default())?.sequence;
//! let (k, v) = (vec![0.5; 3 * 2 * 64], vec![1.0; 3 * 2 * 64]);
//! let (q, mut out) = (vec![0.1; 3 * 4 * 64], vec![0.0; 3 * 4 * 64]);
//! let mut step = cache.reserve(&[(sequence, 3)])?;
//! assert_eq!(step.positions(), [0, 1, 2]);
//! step.append(LayerIdx(0), k[..].into(), v[..].into())?;
//! step.attend(LayerIdx(0), q[..].into(), (&mut out[..]).into(), Default::default())?;
//! step.commit()?;
//! assert!(out.iter().all(|x| (x - 1.0).abs() < 1e-6));
//! cache.release(sequence)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Words
//!
//! - **block**: the K and V of `tokens_per_block` tokens in all layers of a paged group; what the
//!   pool hands out. (Elsewhere also called a page.)
//! - **block table**: for each sequence slot a row of block ids, by position / `tokens_per_block`.
//! - **layer group**: the layers with the same kind, window and format.
//! - **sequence**: one run of tokens; an engine's *request* is one, or several with forks.
//! - **seq slot**: the fixed place of a sequence; a contiguous layer has one run of memory in each.
//! - **token slot**: one token's place in a group, `unit · unit_tokens + token`.
//! - **unit**: a block of a paged group, or a slot of a contiguous one.
//! - **step**: the transaction in which a batch of tokens enters the cache: reserve, append and
//!   attend layer by layer, commit or cancel.
//! - **release** is what the caller does to a sequence; **evict** is what the cache does to a
//!   block that is only kept for reuse.
//! - **window**: how many keys a query may see, itself included; **sinks** are the first tokens,
//!   which stay visible.
//! - **split**: the keys of positions `[512·i, 512·(i+1))`; attention is computed split by split
//!   and combined in order, which is why the bits never depend on how the work was shared out.
//!
//! # Promises
//!
//! Nothing is allocated after open, refusals included (but by `save` and `restore`, which say how
//! much). Bytes allocated are bytes planned. A verb
//! that is refused leaves no trace. A handle that was released is refused for ever. A freed
//! block's bytes are never seen by the next owner. Each of these has a test.

pub mod bench;
pub mod cache;
#[doc(hidden)]
pub mod capi;
#[cfg(feature = "cli")]
pub mod cli;

pub mod config;
pub mod device;
pub mod error;

pub mod job;
pub mod plan;
pub mod pool;
pub mod units;
