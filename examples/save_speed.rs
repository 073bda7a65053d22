//! How fast prefixes are saved and restored, beside a plain file of as many bytes.
//!
//!     cargo run --release --example save_speed [FOLDER] [MIB]
//!
//! An 8B model's geometry in f16 and INT8 (8 of its 32 layers), MIB of K and V in blocks of 16 and
//! slots; the file lies in FOLDER (default: the folder for temporary files). "Plain" writes a file
//! of as many bytes, MIB by MIB, and flushes it, or reads it. Each figure is the best of three.

#![allow(clippy::print_stdout, reason = "an example that reports")]
#![allow(clippy::unwrap_used, reason = "an example that cannot go on ends")]

use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use kvpool::cache::{BeginOptions, Cache, RestoreOptions, SaveOptions};
use kvpool::config;
use kvpool::plan::Plan;

const PROMPT: u32 = 2048;

fn open(mode: &str, format: &str, tokens: u64) -> Cache {
    let seqs = tokens / u64::from(PROMPT);
    let text = format!(
        "model = {{ num_layers = 8, num_q_heads = 32, num_kv_heads = 8, head_dim = 128 }}
         limits = {{ max_seqs = {seqs}, max_seq_len = {PROMPT}, max_batch_tokens = {PROMPT} }}
         cache = {{ mode = '{mode}', format = '{format}' }}"
    );
    let source = config::parse(&text, "example.toml".as_ref(), &[]).unwrap();
    let plan = Plan::new(&source.config, &source.geometry).unwrap();
    Cache::open_on_cpu(plan, &source.config.device, None).unwrap()
}

/// Fills the cache with prompts that differ, and releases them.
fn fill(cache: &mut Cache) {
    let seqs: Vec<_> = (0..cache.plan().limits.max_seqs)
        .map(|n| {
            let prompt: Vec<u32> = (0..PROMPT).map(|at| n * PROMPT + at).collect();
            let seq = cache.begin(&prompt, BeginOptions::default()).unwrap().sequence;
            let mut step = cache.reserve(&[(seq, PROMPT)]).unwrap();
            step.mark_all_appended();
            step.commit().unwrap();
            seq
        })
        .collect();
    seqs.into_iter().for_each(|seq| cache.release(seq).unwrap());
}

/// The shortest of three times, in seconds.
fn best(mut call: impl FnMut()) -> f64 {
    let time = |()| {
        let start = Instant::now();
        call();
        start.elapsed().as_secs_f64()
    };
    [(); 3].map(time).into_iter().fold(f64::INFINITY, f64::min)
}

fn plain_write(path: &Path, bytes: u64) {
    let chunk = vec![7_u8; 1 << 20];
    let mut file = File::create(path).unwrap();
    let mut left = bytes;
    while left > 0 {
        let len = left.min(1 << 20);
        file.write_all(&chunk[..usize::try_from(len).unwrap()]).unwrap();
        left -= len;
    }
    file.sync_all().unwrap();
}

fn plain_read(path: &Path) {
    let mut chunk = vec![0_u8; 1 << 20];
    let mut file = File::open(path).unwrap();
    while file.read(&mut chunk).unwrap() > 0 {}
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let folder = arguments.next().map_or_else(std::env::temp_dir, PathBuf::from);
    let mib: u64 = arguments.next().map_or(256, |mib| mib.parse().unwrap());
    let (path, plain) = (folder.join("kvpool-save-speed"), folder.join("kvpool-plain"));
    println!("mode        format  MiB    save  plain write   restore  plain read, GB/s");
    for mode in ["paged", "contiguous"] {
        for format in ["f16", "int8"] {
            let per_token = if format == "f16" { 32 << 10 } else { (16 << 10) + 256 };
            let mut cache = open(mode, format, (mib << 20) / per_token);
            fill(&mut cache);
            let mut bytes = 0;
            let save = best(|| {
                bytes = cache.save_prefixes(&path, &SaveOptions::default()).unwrap().bytes.get();
            });
            let write = best(|| plain_write(&plain, bytes));
            let restore = best(|| {
                cache.reset().unwrap();
                cache.clear_cached();
                let restored = cache.restore_prefixes(&path, &RestoreOptions::default()).unwrap();
                assert_eq!(restored.dropped_tokens, 0);
            });
            let read = best(|| plain_read(&path));
            #[expect(clippy::cast_precision_loss, reason = "a speed")]
            let speed = |seconds: f64| bytes as f64 / seconds / 1e9;
            println!(
                "{mode:<11} {format:<6} {:>4} {:>7.2} {:>12.2} {:>9.2} {:>11.2}",
                bytes >> 20,
                speed(save),
                speed(write),
                speed(restore),
                speed(read)
            );
        }
    }
    std::fs::remove_file(&path).unwrap();
    std::fs::remove_file(&plain).unwrap();
}
