//! What the kernels move, against the least that they must: bytes and 32-byte sectors.

use kvpool::config::{CacheMode, Format, ScaleKind};
use kvpool::plan::Kv;
use kvpool::units::LayerIdx;

use super::driver::{reset_counters, traffic};
use crate::common::{FORMATS, Spec, append_step, begin, run_step};

/// Heads of a Llama, one layer.
fn spec(mode: CacheMode, format: Format, scale: ScaleKind) -> Spec {
    Spec {
        mode,
        format,
        scale,
        tokens_per_block: 16,
        windows: vec![0],
        num_q_heads: 8,
        num_kv_heads: 2,
        head_dim: 128,
        max_seqs: 2,
        max_seq_len: 1536,
        max_batch_tokens: 1536,
        max_step_tokens: Some(1536),
        ..Spec::default()
    }
}

/// Bytes of K and V of one token, scales included.
fn token_bytes(format: Format, scale: ScaleKind) -> f64 {
    let elements = 2.0 * 2.0 * 128.0;
    match (format, scale) {
        (Format::F32, _) => elements * 4.0,
        (Format::F16 | Format::Bf16, _) => elements * 2.0,
        (Format::Int8, ScaleKind::PerTokenHead) => elements + 2.0 * 2.0 * 2.0,
        (Format::Int8, ScaleKind::PerGroup32) => elements + elements / 32.0 * 2.0,
        (Format::Int8, ScaleKind::PerTensor) => elements,
    }
}

/// The sum over the kernels with these names; those that did not run have moved nothing.
fn moved(names: &[String]) -> [f64; 4] {
    let mut sum = [0.0; 4];
    for name in names {
        for (sum, number) in sum.iter_mut().zip(traffic(name)) {
            *sum += number as f64;
        }
    }
    sum
}

fn near(what: &str, got: f64, least: f64, factor: f64) {
    println!("{what}: {got} of at least {least}, {:.4}", got / least);
    assert!(got >= least * 0.999, "{what}: {got} is less than must be moved, {least}");
    assert!(got <= least * factor, "{what}: {got} is more than {factor} times {least}");
}

#[test]
#[ignore = "started by cuda::the_traffic_of_kernels_is_near_the_least"]
fn decode_append_and_copy_move_little_more_than_they_must() {
    for (format, scale) in FORMATS {
        for mode in [CacheMode::Paged, CacheMode::Contiguous] {
            let spec = spec(mode, format, scale);
            let mut cache = spec.open();
            let seq = begin(&mut cache, 0);
            let tags: Vec<u64> = (0..1536).collect();
            let each = token_bytes(format, scale);
            let name = format!("{format:?} {scale:?} {mode:?}");

            reset_counters();
            append_step(&mut cache, &[(seq, 1535)], &tags[..1535]).expect("fits");
            let names = ["f32", "f16", "bf16", "i8"].map(|f| format!("kvpool_append_f32_{f}"));
            let [read, written, sectors_read, sectors_written] = moved(&names);
            // The tensors, and a token slot of 8 bytes for K and for V of each token.
            let input = 1535.0 * (2.0 * 2.0 * 128.0 * 4.0 + 16.0);
            near(&format!("append {name}, read"), read, input, 1.02);
            near(&format!("append {name}, sectors read"), sectors_read, read / 32.0, 1.05);
            near(&format!("append {name}, written"), written, 1535.0 * each, 1.02);
            // A warp has one token, so each of its scales is a sector by itself.
            let scales = spec.plan().groups[0].layout.scales_per_row;
            let scale_sectors = if scales > 0 { 1535.0 * 2.0 * 2.0 } else { 0.0 };
            let least = (written - scale_sectors * 2.0 * f64::from(scales)) / 32.0 + scale_sectors;
            near(&format!("append {name}, sectors written"), sectors_written, least, 1.05);

            reset_counters();
            run_step(&mut cache, &[(seq, 1)], &tags[1535..]).expect("fits");
            let kernel = |fmt: &str| -> Vec<String> {
                ["w128", "t128x1", "t128x2"]
                    .iter()
                    .map(|end| format!("kvpool_attend_{fmt}_{end}"))
                    .collect()
            };
            let names: Vec<String> =
                ["f32", "f16", "bf16", "i8", "i8g"].iter().flat_map(|f| kernel(f)).collect();
            let [read, _, sectors, _] = moved(&names);
            // The queries of all heads, in f32; each split of the keys reads them again.
            let queries = 8.0 * 128.0 * 4.0;
            near(&format!("decode {name}, read"), read, 1536.0 * each + queries, 1.02);
            near(&format!("decode {name}, sectors"), sectors, read / 32.0, 1.05);
        }
    }
}

#[test]
#[ignore = "started by cuda::the_traffic_of_kernels_is_near_the_least"]
fn a_copied_block_is_read_and_written_once() {
    let spec = Spec {
        format: Format::Int8,
        scale: ScaleKind::PerTokenHead,
        tokens_per_block: 64,
        windows: vec![0; 4],
        num_q_heads: 4,
        num_kv_heads: 4,
        head_dim: 128,
        max_seq_len: 256,
        ..Spec::default()
    };
    let mut cache = spec.open();
    let seq = begin(&mut cache, 0);
    append_step(&mut cache, &[(seq, 40)], &(0..40).collect::<Vec<u64>>()).expect("fits");
    let fork = cache.fork(seq).expect("shares");
    reset_counters();
    append_step(&mut cache, &[(fork, 1)], &[99]).expect("copies on write");
    let [read, written, sectors_read, sectors_written] = moved(&["kvpool_copy_pairs".to_owned()]);
    // 40 tokens of 4 layers, K and V, 4 heads.
    let least = 40.0 * 4.0 * 2.0 * 4.0 * (128.0 + 2.0);
    near("copy, read", read, least, 1.02);
    near("copy, written", written, least, 1.02);
    near("copy, sectors read", sectors_read, least / 32.0, 1.05);
    near("copy, sectors written", sectors_written, least / 32.0, 1.05);
}

#[test]
#[ignore = "started by cuda::the_traffic_of_kernels_is_near_the_least"]
fn what_is_read_back_is_read_once() {
    for (format, scale) in FORMATS {
        for mode in [CacheMode::Paged, CacheMode::Contiguous] {
            let spec = spec(mode, format, scale);
            let mut cache = spec.open();
            let seq = begin(&mut cache, 0);
            append_step(&mut cache, &[(seq, 1000)], &(0..1000).collect::<Vec<u64>>())
                .expect("fits");
            let name = format!("{format:?} {scale:?} {mode:?}");
            let mut out = vec![0.0; 1000 * 2 * 128];
            reset_counters();
            cache.export(seq, LayerIdx(0), Kv::V, 0, 1000, &mut out).expect("held");
            let names = ["f32", "f16", "bf16", "i8"].map(|f| format!("kvpool_gather_{f}"));
            let [read, written, sectors_read, sectors_written] = moved(&names);
            // Half of what a token has, and a block's number of 4 bytes for each vector.
            let table = if mode == CacheMode::Paged { 1000.0 * 2.0 * 4.0 } else { 0.0 };
            let least = 1000.0 * token_bytes(format, scale) / 2.0;
            near(&format!("gather {name}, read"), read, least + table, 1.02);
            println!("gather {name}, sectors read: {sectors_read}, of bytes {}", read / 32.0);
            let written_least = 1000.0 * 2.0 * 128.0 * 4.0;
            near(&format!("gather {name}, written"), written, written_least, 1.0001);
            near(&format!("gather {name}, sectors"), sectors_written, written / 32.0, 1.05);
        }
    }
}
