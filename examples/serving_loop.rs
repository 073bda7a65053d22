//! What a serving engine does with the cache, on made-up keys and values: requests that begin
//! alike, continuous batching, decoding, and a router that asks from another thread.
//!
//!     cargo run --release --example serving_loop

#![allow(
    clippy::print_stdout,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "an example, of few tokens, that shows what it does"
)]

use std::error::Error;

use kvpool::cache::{BeginOptions, Begun, Cache, KeyPart, Namespace, SeqHandle, Step};
use kvpool::config;
use kvpool::error::CacheError;
use kvpool::plan::Plan;
use kvpool::units::LayerIdx;

const TOML: &str = "
    model = { num_layers = 2, num_q_heads = 4, num_kv_heads = 2, head_dim = 64 }
    limits = { max_seqs = 8, max_seq_len = 256, max_batch_tokens = 64 }
    cache = { mode = 'paged', format = 'f16', event_buffer = 256 }
    pool = { capacity = 'blocks:64' }";

/// A request that runs.
struct Running {
    sequence: SeqHandle,
    /// Prompt and output.
    tokens: Vec<u32>,
    /// Of these, how many are in the cache.
    done: usize,
    wanted: usize,
}

fn main() -> Result<(), Box<dyn Error>> {
    let source = config::parse(TOML, "example.toml".as_ref(), &[])?;
    let plan = Plan::new(&source.config, &source.geometry)?;
    let mut cache = Cache::open_on_cpu(plan, &source.config.device, None)?;

    // One tenant's requests: the same system prompt, then a question each.
    let namespace = Namespace { salt: Some(KeyPart::bytes(b"tenant-7")?), ..Default::default() };
    let options = |prompt: &[u32]| BeginOptions {
        max_len: Some(prompt.len() as u32 + 24),
        namespace,
        ..Default::default()
    };
    let system: Vec<u32> = (0..48).collect();
    let question = |number: u32| (0..10).map(move |at| 1000 + 10 * number + at);
    let prompts: Vec<Vec<u32>> =
        (0..3).map(|number| system.iter().copied().chain(question(number)).collect()).collect();

    let router = cache.prober().expect("a paged plan that shares prefixes");
    for prompt in &prompts {
        // All or nothing, and what one of a batch matched is not evicted for another.
        let mut begun: Vec<Begun> = Vec::with_capacity(1);
        cache.begin_batch(&[(prompt, options(prompt))], &mut begun)?;
        let cached = begun[0].cached_len as usize;
        println!("{} prompt tokens, {cached} of them cached", prompt.len());
        let mut running = [Running {
            sequence: begun[0].sequence,
            tokens: prompt.clone(),
            done: cached,
            wanted: prompt.len() + 20,
        }];
        while running.iter().any(|request| request.done < request.wanted) {
            step(&mut cache, &mut running)?;
        }
        for request in running {
            cache.release(request.sequence)?;
        }
    }
    let (prompt, elsewhere) = (prompts[0].clone(), Namespace::default());
    let found = std::thread::spawn(move || {
        (router.probe(&prompt, &namespace).cached_len, router.probe(&prompt, &elsewhere).cached_len)
    });
    let (own, other) = found.join().expect("a probe does not panic");
    println!("the first prompt again: {own} tokens are cached, {other} for another tenant");

    let stats = cache.stats();
    println!("{} of {} prompt tokens hit", stats.prefix_hit_tokens, stats.prefix_query_tokens);
    let mut stored = 0;
    let polled = cache.poll_events(&mut |_| stored += 1);
    assert_eq!((polled.delivered, polled.lost), (stored, 0));
    cache.check_invariants()?;
    Ok(())
}

/// One step of all requests: a chunk of a prompt, or the last token that was sampled.
fn step(cache: &mut Cache, running: &mut [Running]) -> Result<(), CacheError> {
    let mut batch = Vec::new();
    let mut tokens = Vec::new();
    for request in running.iter_mut() {
        let chunk = (request.tokens.len() - request.done).min(32);
        tokens.extend_from_slice(&request.tokens[request.done..request.done + chunk]);
        batch.push((request.sequence, chunk as u32));
        request.done += chunk;
    }
    let mut step = cache.reserve_tokens(&batch, &tokens)?;
    let mut sampled = 0;
    for layer in 0..2 {
        sampled = compute(&mut step, LayerIdx(layer))?;
    }
    step.commit()?;
    for request in running {
        if request.done == request.tokens.len() && request.done < request.wanted {
            request.tokens.push(sampled);
        }
    }
    Ok(())
}

/// Stands for a layer of a model. The position encoding comes from `step.positions()`: with a
/// shared prefix, a sequence's first token here is not its first token.
fn compute(step: &mut Step<'_>, layer: LayerIdx) -> Result<u32, CacheError> {
    let wave = |width: usize| -> Vec<f32> {
        let positions = step.positions().iter();
        positions
            .flat_map(|p| (0..width).map(move |at| (*p as f32 * 0.1 + at as f32).sin()))
            .collect()
    };
    let (kv, q) = (wave(2 * 64), wave(4 * 64));
    let mut out = vec![0.0; q.len()];
    step.append(layer, kv[..].into(), kv[..].into())?;
    step.attend(layer, q[..].into(), (&mut out[..]).into(), Default::default())?;
    Ok((out[out.len() - 1].abs() * 100.0) as u32)
}
