//! Values and calls at the edges.

use half::{bf16, f16};

use super::super::super::{AppendArgs, AttendArgs, BatchSeq, Device, TensorMut, TensorRef};
use super::super::CpuDevice;
use super::rig::{FORMATS, Params, Rig, kernels, plan, value};
use crate::config::{CacheMode, DeviceConfig, Format, KernelChoice, ScaleKind};
use crate::error::DeviceError;
use crate::plan::{Kv, LayerScales, NO_BLOCK};
use crate::units::Bytes;

fn all_kernels() -> Vec<KernelChoice> {
    kernels().into_iter().chain([KernelChoice::Reference]).collect()
}

#[test]
fn no_finite_score_gives_zeros() {
    for kernel in all_kernels() {
        for threads in [1, 4] {
            let mut rig =
                Rig::new(Params { format: FORMATS[0], kernel, threads, ..Params::default() });
            rig.values = |what, key, position, i| match (what, i % 64) {
                (0, 0) => f32::NEG_INFINITY,
                (2, 0) => 1.0,
                _ => value(what, key, position, i),
            };
            rig.begin(0, 1);
            rig.append(0, 600, u32::MAX);
            let answer = rig.attend(&[(0, 2)]);
            assert!(answer.out.iter().all(|x| x.to_bits() == 0), "{kernel:?}");
            assert!(answer.lse.iter().all(|x| *x == f32::NEG_INFINITY), "{kernel:?}");
        }
    }
}

#[test]
fn scores_of_minus_infinity_are_left_out() {
    for kernel in kernels() {
        let mut rig = Rig::new(Params { format: FORMATS[0], ..Params::default() });
        // All of the first split, and every third key after it.
        rig.values = |what, key, position, i| match (what, i % 64) {
            (0, 0) if position < 512 || position % 3 == 0 => f32::NEG_INFINITY,
            (2, 0) => 1.0,
            _ => value(what, key, position, i),
        };
        rig.begin(0, 1);
        rig.append(0, 700, u32::MAX);
        rig.use_kernel(KernelChoice::Reference);
        let expected = rig.attend(&[(0, 2)]);
        rig.use_kernel(kernel);
        let got = rig.attend(&[(0, 2)]);
        for (got, expected) in got.out.iter().zip(&expected.out) {
            assert!((got - expected).abs() < 2e-5, "{kernel:?}: {got}, not {expected}");
        }
    }
}

#[test]
fn a_nan_query_spoils_its_own_row_only() {
    for (kernel, format) in
        all_kernels().into_iter().flat_map(|kernel| FORMATS.map(|format| (kernel, format)))
    {
        let clean = |what, key, position, i| value(what, key, position, i);
        let spoilt = |what, key, position, i| {
            if what == 2 && position == 598 && i == 3 {
                f32::NAN
            } else {
                value(what, key, position, i)
            }
        };
        let answer = |values| {
            let mut rig = Rig::new(Params { kernel, format, ..Params::default() });
            rig.values = values;
            rig.begin(0, 1);
            rig.append(0, 600, u32::MAX);
            rig.attend(&[(0, 3)])
        };
        let (expected, got) = (answer(clean), answer(spoilt));
        let head_dim = 64;
        for (head, (got, expected)) in
            got.out.chunks(head_dim).zip(expected.out.chunks(head_dim)).enumerate()
        {
            // Row 1 of 3 with 6 heads each; its first head has the NaN.
            if head == 6 {
                assert!(got.iter().all(|x| x.is_nan()), "{kernel:?} {format:?}");
            } else {
                assert!(got == expected, "{kernel:?} {format:?} {head}");
            }
        }
        assert!(got.lse[6].is_nan());
    }
}

#[test]
fn a_nan_value_spoils_the_rows_that_see_it_only() {
    // A token of NaN and infinity in the middle of rows that are computed together.
    let spoilt = |what, key, position, i| match (what, position) {
        (1, 590) => f32::NAN,
        (1, 595) => f32::INFINITY,
        _ => value(what, key, position, i),
    };
    for (kernel, window) in kernels().into_iter().flat_map(|k| [(k, 0), (k, 20)]) {
        for group in [1, 3, 4, 6] {
            let answer = |values| {
                let mut rig = Rig::new(Params { kernel, window, group, ..Params::default() });
                rig.values = values;
                rig.begin(0, 1);
                rig.append(0, 580, u32::MAX);
                rig.append(0, 20, u32::MAX);
                rig.attend(&[(0, 20)]).out
            };
            let (clean, got) = (answer(value as _), answer(spoilt));
            let per_row = clean.len() / 20;
            let rows = got.chunks(per_row).zip(clean.chunks(per_row));
            for (position, (got, clean)) in (580..600).zip(rows) {
                let sees = |token| token <= position && (window == 0 || token + window > position);
                if sees(590) || sees(595) {
                    assert!(got.iter().all(|x| !x.is_finite()), "{kernel:?} {position}");
                } else {
                    assert!(got == clean, "{kernel:?} {window} {group} {position}");
                }
            }
        }
    }
}

#[test]
fn a_broken_scale_spoils_the_rows_that_see_it_only() {
    // No append stores such a scale; a save that says anything may.
    let broken = [0xFFFF_u16, 0xFF00];
    for (kernel, window) in kernels().into_iter().flat_map(|k| [(k, 0), (k, 20)]) {
        for (format, head_dim) in FORMATS[3..5].iter().flat_map(|f| [(*f, 64), (*f, 32)]) {
            for (group, broken) in [1, 4, 8].into_iter().flat_map(|g| broken.map(|b| (g, b))) {
                let params =
                    Params { kernel, window, group, format, head_dim, ..Params::default() };
                let answer = |broken: Option<u16>| {
                    let mut rig = Rig::new(params);
                    rig.begin(0, 1);
                    rig.append(0, 580, u32::MAX);
                    rig.append(0, 20, u32::MAX);
                    if let Some(broken) = broken {
                        rig.break_v_scales(590, broken);
                    }
                    rig.attend(&[(0, 20)]).out
                };
                let (clean, got) = (answer(None), answer(Some(broken)));
                let per_row = clean.len() / 20;
                let rows = got.chunks(per_row).zip(clean.chunks(per_row));
                for (position, (got, clean)) in (580..600).zip(rows) {
                    let what = format!("{params:?} {broken:x} {position}");
                    if 590 <= position && (window == 0 || 590 + window > position) {
                        assert!(got.iter().all(|x| !x.is_finite()), "{what}");
                    } else {
                        assert!(got == clean, "{what}");
                    }
                }
            }
        }
    }
}

#[test]
fn edge_47_int8_counts_what_it_met() {
    let mut rig = Rig::new(Params { format: FORMATS[5], ..Params::default() });
    rig.values = |what, _, position, i| match (what, position, i) {
        (0, 3, 5) => f32::NAN,
        (1, 4, 6) => f32::INFINITY,
        (1, 5, 7) => 100.0,
        _ => 0.5,
    };
    rig.begin(0, 1);
    rig.append(0, 10, u32::MAX);
    assert_eq!((rig.counts.nonfinite, rig.counts.saturated), (2, 1));
}

/// One vector of one head, appended in each input type and read back.
fn stored(format: (Format, Option<ScaleKind>), tensor: TensorRef<'_>) -> (Vec<u8>, Vec<u8>) {
    let params = Params { format, kv_heads: 1, group: 1, head_dim: 8, ..Params::default() };
    let mut rig = Rig::new(params);
    let layout = rig.layout().clone();
    let scales = LayerScales { k: 1.0, v: 1.0 };
    let args = AppendArgs {
        layout: &layout,
        layer: 0,
        scales,
        token_slots: &[3],
        rope: None,
        positions: &[],
        k: tensor,
        v: tensor,
    };
    rig.device.append(&args).expect("append");
    let row = |kv| {
        let mut bytes = vec![0; 8 * layout.element_bytes as usize];
        rig.device.read(layout.row(0, 0, kv, 0, 3), &mut bytes).expect("a vector");
        bytes
    };
    (row(Kv::K), row(Kv::V))
}

#[test]
fn what_has_the_stored_type_is_stored_verbatim() {
    let halves: Vec<f16> =
        [0x7E01, 0xFC00, 0x0001, 0x8000, 0x7C01, 0x3C00, 0xFFFF, 0x03FF].map(f16::from_bits).into();
    let (k, v) = stored(FORMATS[1], TensorRef::F16(&halves));
    assert_eq!(k, v);
    assert!(
        k.as_chunks().0.iter().zip(&halves).all(|(b, h)| u16::from_le_bytes(*b) == h.to_bits())
    );
    let brains: Vec<bf16> = [0x7FC1, 0xFF80, 0x0001, 0x8000, 0x7F81, 0x3F80, 0xFFFF, 0x007F]
        .map(bf16::from_bits)
        .into();
    let (k, _) = stored(FORMATS[2], TensorRef::Bf16(&brains));
    assert!(
        k.as_chunks().0.iter().zip(&brains).all(|(b, h)| u16::from_le_bytes(*b) == h.to_bits())
    );
    let singles =
        [f32::from_bits(0x7FC0_0001), f32::INFINITY, 1e-45, -0.0, 1.0, 2.0, 3.0, f32::MAX];
    let (k, _) = stored(FORMATS[0], TensorRef::F32(&singles));
    assert!(
        k.as_chunks().0.iter().zip(singles).all(|(b, x)| u32::from_le_bytes(*b) == x.to_bits())
    );
    // From bf16 to f16 and INT8 by way of f32.
    let (k, _) = stored(FORMATS[1], TensorRef::Bf16(&[bf16::from_f32(1.5); 8]));
    assert_eq!(k, f16::from_f32(1.5).to_le_bytes().repeat(8));
    let (k, _) = stored(FORMATS[5], TensorRef::F16(&[f16::from_f32(-3.0); 8]));
    assert_eq!(k, [253; 8]);
}

#[test]
fn token_slots_beyond_the_pool_write_nothing() {
    let mut rig = Rig::new(Params::default());
    let before = rig.bytes();
    let layout = rig.layout().clone();
    let x = vec![1.0; 2 * 2 * 64];
    let beyond = u64::from(layout.units) * u64::from(layout.unit_tokens);
    for (layer, token_slots) in [(0, [0, beyond]), (0, [u64::MAX, 1]), (2, [0, 1])] {
        let error = rig
            .device
            .append(&AppendArgs {
                layout: &layout,
                layer,
                scales: LayerScales::default(),
                token_slots: &token_slots,
                rope: None,
                positions: &[],
                k: TensorRef::F32(&x),
                v: TensorRef::F32(&x),
            })
            .expect_err("outside");
        assert!(matches!(error, DeviceError::OutOfRange { .. }), "{error}");
    }
    assert!(rig.bytes() == before);
}

#[test]
fn tables_that_name_no_block_are_refused() {
    for kernel in all_kernels() {
        let params = Params { mode: CacheMode::Paged, kernel, ..Params::default() };
        let mut rig = Rig::new(params);
        let layout = rig.layout().clone();
        let row = rig.plan.groups[0].max_blocks_per_seq;
        let mut tables = vec![0; 3 * row as usize];
        tables[1] = NO_BLOCK;
        let q = vec![0.0; 6 * 64];
        let mut out = vec![7.0; 6 * 64];
        let error = rig
            .device
            .attend(&mut AttendArgs {
                layout: &layout,
                layer: 0,
                scales: LayerScales::default(),
                window: 0,
                num_q_heads: 6,
                softmax_scale: 1.0,
                seqs: &[BatchSeq { slot: 0, row_start: 0, rows: 1, first_position: 16 }],
                tables: &tables,
                table_row: row,
                q: TensorRef::F32(&q),
                out: TensorMut::F32(&mut out),
                lse: None,
            })
            .expect_err("no such block");
        assert!(matches!(error, DeviceError::OutOfRange { .. }), "{error}");
        assert!(out.iter().all(|x| x.to_bits() == 7.0_f32.to_bits()));
    }
}

#[test]
fn copies_fills_and_reads_stay_inside() {
    let mut rig = Rig::new(Params::default());
    let pool = rig.plan.pool_bytes.get();
    rig.device.fill(100, 50, 7).expect("inside");
    rig.device.copy(100, pool - 50, 50).expect("inside");
    let mut bytes = [0; 50];
    rig.device.read(pool - 50, &mut bytes).expect("inside");
    assert_eq!(bytes, [7; 50]);
    assert!(rig.device.fill(pool, 1, 0).is_err());
    assert!(rig.device.copy(0, pool - 49, 50).is_err());
    assert!(rig.device.read(u64::MAX, &mut bytes).is_err());
}

#[test]
fn what_is_allocated_is_what_the_plan_says() {
    for threads in [1, 2, 3] {
        for params in [Params::default(), Params { head_dim: 72, group: 17, ..Params::default() }] {
            let plan = plan(&params);
            let config = DeviceConfig { threads, ..DeviceConfig::default() };
            let device = CpuDevice::open(&plan, &config, None).expect("a device");
            let info = device.info();
            assert_eq!(info.workspace_bytes, plan.cpu_workspace_bytes(threads).expect("fits"));
            assert_eq!(info.pool_bytes, plan.pool_bytes);
            assert_eq!(info.threads, threads);
            assert_eq!(device.base_ptr().addr() % 4096, 0);
        }
    }
}

#[test]
fn the_best_kernel_is_chosen_and_named() {
    let names: Vec<&str> = kernels()
        .into_iter()
        // Chosen only where it is asked for.
        .filter(|kernel| *kernel != KernelChoice::Avx512Bf16)
        .map(|kernel| Rig::new(Params { kernel, ..Params::default() }).device.info().kernel)
        .collect();
    let auto = Rig::new(Params::default()).device.info();
    assert_eq!(names.last(), Some(&auto.kernel));
    assert_eq!(names.first(), Some(&"portable"));
    let mut last = (Bytes(0), Bytes(0));
    let plan = plan(&Params::default());
    let config = DeviceConfig { kernel: KernelChoice::Reference, ..DeviceConfig::default() };
    let device = CpuDevice::open(&plan, &config, Some(&mut |done, total| last = (done, total)));
    assert_eq!(device.expect("a device").info().kernel, "reference");
    assert_eq!(last, (plan.pool_bytes, plan.pool_bytes));
}
