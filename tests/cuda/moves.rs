//! Bytes that move without a step: reading back and filling, by a kernel each.

use kvpool::cache::{Cache, SeqHandle};
use kvpool::config::{CacheMode, Format, ScaleKind};
use kvpool::plan::Kv;
use kvpool::units::LayerIdx;

use super::driver::{counter, launches, reset_counters};
use crate::common::{FORMATS, MODES, Spec, append_step, assert_same_bits, begin};

const HEADS: u32 = 2;
const DIM: u32 = 64;

/// A layer that sees everything, and one with a window and sinks; steps of at most 24 tokens.
fn spec(mode: CacheMode, format: Format, scale: ScaleKind) -> Spec {
    Spec {
        mode,
        format,
        scale,
        windows: vec![0, 40],
        sink_tokens: 3,
        num_q_heads: 8,
        num_kv_heads: HEADS,
        head_dim: DIM,
        max_seqs: 2,
        max_seq_len: 240,
        max_batch_tokens: 24,
        max_step_tokens: Some(24),
        ..Spec::default()
    }
}

/// A sequence of 220 tokens behind another of five.
fn filled(cache: &mut Cache) -> SeqHandle {
    let (first, seq) = (begin(cache, 0), begin(cache, 0));
    append_step(cache, &[(first, 5)], &[900, 901, 902, 903, 904]).expect("fits");
    let tags: Vec<u64> = (0..220).collect();
    for part in tags.chunks(24) {
        append_step(cache, &[(seq, part.len() as u32)], part).expect("fits");
    }
    seq
}

fn gathers() -> u64 {
    ["f32", "f16", "bf16", "i8"].iter().map(|f| launches(&format!("kvpool_gather_{f}"))).sum()
}

#[test]
#[ignore = "started by cuda::the_tests_of_the_device_run_on_the_emulated_device"]
fn what_is_exported_equals_the_cpus_and_is_gathered_in_few_launches() {
    for (format, scale) in FORMATS {
        for mode in MODES {
            let spec = spec(mode, format, scale);
            let (mut gpu, mut cpu) = (spec.open(), spec.open_on_cpu());
            let (on_gpu, on_cpu) = (filled(&mut gpu), filled(&mut cpu));
            // The staging has room for 24 rows of results: 97 tokens of K or V.
            let room = 24 * 8 * (DIM + 1) / (HEADS * DIM);
            for (layer, from, to) in [
                (0, 0, 220),
                (0, 7, 8),
                (0, 30, 33),
                (0, 97, 194),
                (1, 0, 3),
                (1, 200, 220),
                (0, 9, 9),
            ] {
                for kv in [Kv::K, Kv::V] {
                    let what = format!("{format:?} {scale:?} {mode:?} layer {layer} {from}..{to}");
                    let len = ((to - from) * HEADS * DIM) as usize;
                    let (mut got, mut want) = (vec![f32::NAN; len], vec![f32::NAN; len]);
                    reset_counters();
                    gpu.export(on_gpu, LayerIdx(layer), kv, from, to, &mut got).expect("held");
                    assert_eq!(gathers(), u64::from((to - from).div_ceil(room)), "{what}");
                    assert_eq!(counter("allocations"), 0, "{what}");
                    cpu.export(on_cpu, LayerIdx(layer), kv, from, to, &mut want).expect("held");
                    assert_same_bits(&got, &want, &what);
                }
            }
        }
    }
}

#[test]
#[ignore = "started by cuda::the_tests_of_the_device_run_on_the_emulated_device"]
fn what_is_filled_equals_the_cpus_and_takes_few_launches() {
    for (format, scale) in FORMATS {
        for mode in MODES {
            // 40 layers of two heads: 160 runs of K and V, and as many of scales, of each token.
            let windows = [vec![0; 20], vec![40; 20]].concat();
            let spec = Spec { windows, ..spec(mode, format, scale) };
            let (mut gpu, mut cpu) = (spec.open(), spec.open_on_cpu());
            filled(&mut gpu);
            filled(&mut cpu);
            let scales = gpu.plan().groups.iter().any(|group| group.layout.scales_per_row > 0);
            reset_counters();
            gpu.poison_unused(0xA5).expect("inside");
            cpu.poison_unused(0xA5).expect("inside");
            let filled = launches("kvpool_fill");
            let all = |cache: &Cache| {
                let mut bytes = vec![0; usize::try_from(cache.plan().pool_bytes.get()).unwrap()];
                cache.read_bytes(0, &mut bytes).expect("inside");
                bytes
            };
            assert!(all(&gpu) == all(&cpu), "{format:?} {scale:?} {mode:?}");
            // At most 256 runs a launch; half of the layers are in a group of their own. What is
            // not in use are a few stretches of a unit.
            let units: u32 = gpu.plan().groups.iter().map(|g| g.layout.units).sum();
            let most = if scales && gpu.plan().groups.len() == 1 { 2 } else { 1 };
            assert!(filled > 0 && filled <= u64::from(units) * 3 * most, "{filled}, {units} units");
        }
    }
}
