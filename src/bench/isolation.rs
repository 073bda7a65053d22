//! What isolation costs and what it hides: released bytes zeroed (`pool.scrub`), and whether the
//! clock tells a salted tenant's prompts from misses.

use std::hint::black_box;
use std::path::Path;
use std::time::Instant;

use serde::Serialize;

use crate::cache::{BeginOptions, Cache, KeyPart, Namespace};
use crate::config::{Config, DeviceConfig, Geometry, Scrub, parse};
use crate::error::{CacheError, ConfigError, OpenError};
use crate::plan::Plan;

/// One class of prompts, as another tenant's clock sees it.
#[derive(Clone, Debug, Serialize)]
pub struct SaltTiming {
    /// `paged` or `contiguous`.
    pub mode: &'static str,
    /// What is timed against a miss.
    pub case: &'static str,
    /// Nanoseconds of `begin` and `release`: 10th, 50th and 90th percentile, of the case
    pub case_ns: [f64; 3],
    /// and of prompts that nobody has sent before.
    pub miss_ns: [f64; 3],
    /// Welch's t of the two, of the times below the 95th percentile of both together. Beyond ±4.5
    /// they differ, by the custom of such tests.
    pub t: f64,
    /// Calls of each.
    pub calls: usize,
}

/// What zeroing costs.
#[derive(Clone, Debug, Serialize)]
pub struct ScrubTiming {
    /// `paged` or `contiguous`.
    pub mode: &'static str,
    /// `off`, `on-release` or `on-reuse`.
    pub scrub: &'static str,
    /// Microseconds from `begin` to `release` of one sequence whose tokens are appended without K
    /// and V: bookkeeping and zeroing alone. The median.
    pub sequence_us: f64,
    /// Bytes zeroed in that time.
    pub zeroed_bytes: f64,
    /// 10⁹ bytes a second, by which it is longer than with `off`; 0 for `off`.
    pub zeroed_gbps: f64,
}

/// Why there are no figures.
#[derive(Debug, thiserror::Error)]
pub enum IsolationError {
    /// The configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A cache could not be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// A verb failed.
    #[error(transparent)]
    Cache(#[from] CacheError),
}

/// Tokens of the prompts that are timed.
const PROMPT: usize = 2049;

/// The same in whole memory pages of 4096 bytes.
const PADDED: usize = 3 * 1024;

fn source(
    mode: &str,
    scrub: Scrub,
    layers: u32,
    seqs: u32,
) -> Result<(Config, Geometry), IsolationError> {
    let hybrid = if mode == "hybrid" { ", hybrid = { contiguous_layers = [0] }" } else { "" };
    let text = format!(
        "model = {{ num_layers = {layers}, num_q_heads = 8, num_kv_heads = 8, head_dim = 128 }}\n\
         limits = {{ max_seqs = {seqs}, max_seq_len = 2304, max_batch_tokens = 2304 }}\n\
         cache = {{ mode = '{mode}', format = 'f16'{hybrid} }}\n\
         pool = {{ capacity = 'worst-case', scrub = '{}' }}",
        scrub.name()
    );
    let source = parse(&text, Path::new("isolation"), &[])?;
    Ok((source.config, source.geometry))
}

fn open(mode: &str, scrub: Scrub, layers: u32, seqs: u32) -> Result<Cache, IsolationError> {
    let (config, geometry) = source(mode, scrub, layers, seqs)?;
    let plan = Plan::new(&config, &geometry).map_err(OpenError::Plan)?;
    let device = DeviceConfig { threads: 1, ..config.device };
    Ok(Cache::open_on_cpu(plan, &device, None)?)
}

fn options(salt: u64) -> BeginOptions {
    let namespace = Namespace { salt: Some(KeyPart::number(salt)), ..Namespace::default() };
    BeginOptions { namespace, ..BeginOptions::default() }
}

/// Tokens that follow from a number.
fn prompt(seed: u64) -> Vec<u32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        // The upper half, and of that what a vocabulary has.
        u32::try_from(state >> 47).unwrap_or(0)
    };
    (0..PROMPT).map(|_| next()).collect()
}

/// A prompt, and as many tokens more as whole memory pages have.
fn padded(seed: u64) -> impl Iterator<Item = u32> {
    prompt(seed).into_iter().chain(std::iter::repeat_n(0, PADDED - PROMPT))
}

/// Appends a prompt's tokens without K and V.
fn fill(cache: &mut Cache, prompt: &[u32], salt: u64) -> Result<(), CacheError> {
    let begun = cache.begin(prompt, options(salt))?;
    let rest = &prompt[begun.cached_len as usize..];
    let count = u32::try_from(rest.len()).unwrap_or(u32::MAX);
    let mut step = cache.reserve_tokens(&[(begun.sequence, count)], rest)?;
    step.mark_all_appended();
    step.commit()?;
    cache.release(begun.sequence)
}

/// Nanoseconds of beginning and releasing a sequence.
fn timed(cache: &mut Cache, prompt: &[u32], salt: u64) -> Result<f64, CacheError> {
    let start = Instant::now();
    let begun = cache.begin(black_box(prompt), options(salt))?;
    cache.release(begun.sequence)?;
    #[expect(clippy::cast_precision_loss, reason = "nanoseconds of a moment")]
    Ok(start.elapsed().as_nanos() as f64)
}

/// Times a tenant's begins: of prompts that another tenant has in the cache, of its own that are,
/// and of prompts that are new, in turns, the order drawn for each pair. First, as a control, of
/// prompts of which neither is in the cache: what differs there is the measurement's own.
///
/// # Errors
/// A cache that does not open.
pub fn salt(quick: bool) -> Result<Vec<SaltTiming>, IsolationError> {
    let calls = if quick { 400 } else { 20_000 };
    let mut all = Vec::new();
    for (mode, layers) in [("paged", 1), ("contiguous", 1), ("hybrid", 2)] {
        let cases = [
            ("another miss", None),
            ("another tenant's prompt", Some(1)),
            ("the tenant's own prompt", Some(2)),
        ];
        for (case, owner) in cases {
            let mut cache = open(mode, Scrub::Off, layers, 8)?;
            // Each kind of prompt is as many texts, so that the processor's caches have as much of
            // the one as of the other. They lie in turns, and all begin at the same place of a
            // memory page: how fast a text is copied depends on that.
            let texts: Vec<u32> = (0..8).flat_map(padded).collect();
            let text = |kind: usize, n: usize| &texts[(2 * n + kind) * PADDED..][..PROMPT];
            if let Some(owner) = owner {
                (0..4).try_for_each(|n| fill(&mut cache, text(0, n), owner))?;
            }
            let (mut hits, mut misses) = (Vec::with_capacity(calls), Vec::with_capacity(calls));
            let mut draw = 88_172_645_463_325_252_u64;
            for call in 0..calls + 32 {
                draw ^= draw << 13;
                draw ^= draw >> 7;
                draw ^= draw << 17;
                let mut times = [0.0; 2];
                for turn in 0..2 {
                    let which = usize::from(draw & 1 == 1) ^ turn;
                    times[which] = timed(&mut cache, text(which, call % 4), 2)?;
                }
                // The first ones warm up.
                if call >= 32 {
                    hits.push(times[0]);
                    misses.push(times[1]);
                }
            }
            all.push(compare(mode, case, hits, misses));
        }
    }
    Ok(all)
}

fn compare(
    mode: &'static str,
    case: &'static str,
    case_ns: Vec<f64>,
    miss_ns: Vec<f64>,
) -> SaltTiming {
    let calls = case_ns.len();
    let mut together = [case_ns.clone(), miss_ns.clone()].concat();
    together.sort_by(f64::total_cmp);
    // What interrupts hit says nothing of the cache.
    let most = together[together.len() * 95 / 100];
    let kept = |times: &[f64]| times.iter().copied().filter(|t| *t <= most).collect::<Vec<_>>();
    let t = welch(&kept(&case_ns), &kept(&miss_ns));
    SaltTiming {
        mode,
        case,
        case_ns: percentiles(case_ns),
        miss_ns: percentiles(miss_ns),
        t,
        calls,
    }
}

fn percentiles(mut times: Vec<f64>) -> [f64; 3] {
    times.sort_by(f64::total_cmp);
    [10, 50, 90].map(|percent| times[(times.len() * percent / 100).min(times.len() - 1)])
}

/// Welch's t: the difference of two means, in units of its standard error.
fn welch(a: &[f64], b: &[f64]) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "a count of calls")]
    let moments = |x: &[f64]| {
        let n = x.len() as f64;
        let mean = x.iter().sum::<f64>() / n;
        let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / (n - 1.0);
        (mean, variance / n)
    };
    let ((mean_a, error_a), (mean_b, error_b)) = (moments(a), moments(b));
    let error = (error_a + error_b).sqrt();
    if error > 0.0 { (mean_a - mean_b) / error } else { 0.0 }
}

/// Times sequences of 2049 tokens, appended without K and V, whose blocks or slot others had
/// before, with and without zeroing.
///
/// # Errors
/// A cache that does not open.
pub fn scrub(quick: bool) -> Result<Vec<ScrubTiming>, IsolationError> {
    let (rounds, layers) = if quick { (5, 2) } else { (60, 32) };
    let mut all = Vec::new();
    for mode in ["paged", "contiguous"] {
        let modes = [Scrub::Off, Scrub::OnRelease, Scrub::OnReuse];
        let mut caches = Vec::new();
        for scrub in modes {
            let mut cache = open(mode, scrub, layers, 4)?;
            // Every block and slot has had an owner.
            for seed in 0..16 {
                fill(&mut cache, &prompt(seed), seed)?;
            }
            cache.clear_cached();
            caches.push((scrub, cache, Vec::new(), 0_u64));
        }
        for round in 0..rounds {
            for (_, cache, times, zeroed) in &mut caches {
                let text = prompt(1000 + round);
                let before = cache.stats().scrubbed_bytes.get();
                let start = Instant::now();
                fill(cache, &text, 7)?;
                // What is kept for reuse is zeroed when it goes.
                cache.clear_cached();
                times.push(start.elapsed().as_secs_f64() * 1e6);
                *zeroed = cache.stats().scrubbed_bytes.get() - before;
            }
        }
        let mut off_us = 0.0;
        for (scrub, _, times, zeroed) in caches {
            let sequence_us = percentiles(times)[1];
            #[expect(clippy::cast_precision_loss, reason = "bytes of a sequence")]
            let zeroed_bytes = zeroed as f64;
            if scrub == Scrub::Off {
                off_us = sequence_us;
            }
            let longer_us = sequence_us - off_us;
            let zeroed_gbps = if longer_us > 0.0 { zeroed_bytes / longer_us / 1e3 } else { 0.0 };
            let scrub = scrub.name();
            all.push(ScrubTiming { mode, scrub, sequence_us, zeroed_bytes, zeroed_gbps });
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every part runs, and zeroing zeroes. What the clock says is for who looks at it.
    #[test]
    fn both_run() {
        let timings = salt(true).expect("opens");
        assert_eq!(timings.len(), 9);
        assert!(timings.iter().all(|timing| timing.calls == 400 && timing.t.is_finite()));
        let timings = scrub(true).expect("opens");
        for timing in &timings {
            let zeroed = timing.zeroed_bytes > 0.0;
            assert_eq!(zeroed, timing.scrub != "off", "{timing:?}");
        }
    }

    #[test]
    fn t_is_that_of_the_textbook() {
        // Means 2 and 4, variances 1 and 4, three each: -2 / sqrt(5 / 3).
        let t = welch(&[1.0, 2.0, 3.0], &[2.0, 4.0, 6.0]);
        assert!((t + 2.0 / (5.0_f64 / 3.0).sqrt()).abs() < 1e-12, "{t}");
    }
}
