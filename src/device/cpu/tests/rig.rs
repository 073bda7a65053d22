//! A device with sequences in it, fed with numbers that depend on nothing but the sequence's key
//! and the position.

use half::f16;

use super::super::super::{
    AppendArgs, AppendCounts, AttendArgs, BatchSeq, Device, TensorMut, TensorRef,
};
use super::super::{CpuDevice, kernel};
use crate::config::{
    Admission, CacheConfig, CacheMode, Config, DeviceConfig, Format, Geometry, Int8Config,
    KernelChoice, LimitsConfig, ModelConfig, PoolConfig, ScaleKind, StaticScale,
};
use crate::plan::{GroupLayout, Kv, NO_BLOCK, Plan, SeqView, visible};
use crate::units::LayerIdx;

/// Every format, with a number for its tolerances.
pub(super) const FORMATS: [(Format, Option<ScaleKind>); 6] = [
    (Format::F32, None),
    (Format::F16, None),
    (Format::Bf16, None),
    (Format::Int8, Some(ScaleKind::PerTokenHead)),
    (Format::Int8, Some(ScaleKind::PerGroup32)),
    (Format::Int8, Some(ScaleKind::PerTensor)),
];

/// What a rig is built from.
#[derive(Clone, Copy, Debug)]
pub(super) struct Params {
    pub(super) mode: CacheMode,
    pub(super) tokens_per_block: u32,
    pub(super) format: (Format, Option<ScaleKind>),
    pub(super) window: u32,
    pub(super) sinks: u32,
    pub(super) kv_heads: u32,
    pub(super) group: u32,
    pub(super) head_dim: u32,
    pub(super) max_seq_len: u32,
    pub(super) max_step_tokens: Option<u32>,
    pub(super) threads: u32,
    pub(super) kernel: KernelChoice,
}

impl Default for Params {
    fn default() -> Self {
        Self {
            mode: CacheMode::Contiguous,
            tokens_per_block: 16,
            format: FORMATS[1],
            window: 0,
            sinks: 0,
            kv_heads: 2,
            group: 3,
            head_dim: 64,
            max_seq_len: 1400,
            max_step_tokens: None,
            threads: 1,
            kernel: KernelChoice::Auto,
        }
    }
}

/// The layer that the tests use; the one before it stays poisoned.
const LAYER: u32 = 1;

/// Sequence slots of a rig.
pub(super) const SLOTS: u32 = 3;

pub(super) fn plan(params: &Params) -> Plan {
    let (format, scale) = params.format;
    let config = Config {
        model: ModelConfig::default(),
        limits: LimitsConfig {
            max_seqs: SLOTS,
            max_seq_len: params.max_seq_len,
            max_batch_tokens: 4096,
            max_step_tokens: params.max_step_tokens,
            max_rewind_tokens: 0,
        },
        cache: CacheConfig {
            mode: params.mode,
            tokens_per_block: params.tokens_per_block,
            format,
            admission: Admission::Guaranteed,
            prefix_reuse: false,
            event_buffer: 0,
            watermark_blocks: 0,
            int8: scale.map(|scale| Int8Config {
                scale,
                k_scale: static_scale(scale, 0.011),
                v_scale: static_scale(scale, 0.009),
            }),
            hybrid: None,
        },
        rope: None,
        pool: PoolConfig::default(),
        device: DeviceConfig::default(),
        workload: None,
        cost: None,
        goals: None,
        generate: None,
        variant: Vec::new(),
        sweep: Vec::new(),
    };
    let geometry = Geometry {
        num_layers: 2,
        num_q_heads: params.kv_heads * params.group,
        num_kv_heads: params.kv_heads,
        head_dim: params.head_dim,
        windows: vec![params.window; 2],
        sink_tokens: params.sinks,
    };
    Plan::new(&config, &geometry).expect("a plan")
}

/// A static scale, for the form that has them.
fn static_scale(kind: ScaleKind, value: f32) -> Option<StaticScale> {
    (kind == ScaleKind::PerTensor).then_some(StaticScale::One(value))
}

/// A number in -1..1 that depends on all its arguments.
pub(super) fn value(what: u32, key: u32, position: u32, i: usize) -> f32 {
    let i = u32::try_from(i).expect("small");
    let mut x = what.wrapping_mul(0x9E37_79B9) ^ key.wrapping_mul(0x85EB_CA6B);
    x = (x ^ position.wrapping_mul(0xC2B2_AE35)).wrapping_add(i.wrapping_mul(0x27D4_EB2F));
    x = (x ^ (x >> 15)).wrapping_mul(0x2C1B_3C6D);
    x = (x ^ (x >> 12)).wrapping_mul(0x297A_2D39);
    f32::from(u16::try_from((x ^ (x >> 15)) >> 16).expect("16 bits")) / 32768.0 - 1.0
}

/// Called with 0, 1 or 2 for K, V and Q, the sequence's key, the position, and the index of the
/// element in `[heads, head_dim]`.
pub(super) type Values = fn(u32, u32, u32, usize) -> f32;

/// A device, its sequences, and where their blocks are.
pub(super) struct Rig {
    pub(super) params: Params,
    pub(super) plan: Plan,
    pub(super) device: CpuDevice,
    pub(super) values: Values,
    /// Tokens and key of each slot.
    pub(super) seqs: [(u32, u32); SLOTS as usize],
    tables: Vec<u32>,
    free: Vec<u32>,
    pub(super) counts: AppendCounts,
}

/// Output and lse of an attend.
#[derive(Debug, PartialEq)]
pub(super) struct Answer {
    pub(super) out: Vec<f32>,
    pub(super) lse: Vec<f32>,
}

impl Answer {
    pub(super) fn bits(&self) -> Vec<u32> {
        self.out.iter().chain(&self.lse).map(|x| x.to_bits()).collect()
    }
}

impl Rig {
    pub(super) fn new(params: Params) -> Self {
        let plan = plan(&params);
        let config = DeviceConfig {
            threads: params.threads,
            kernel: params.kernel,
            ..DeviceConfig::default()
        };
        let mut device = CpuDevice::open(&plan, &config, None).expect("a device");
        device.fill(0, plan.pool_bytes.get(), 0xFF).expect("the whole pool");
        let group = &plan.groups[0];
        let units = group.layout.units;
        // Blocks in an order that has nothing to do with positions.
        let mut free: Vec<u32> = (0..units).collect();
        free.sort_by_key(|unit| unit.wrapping_mul(0x9E37_79B1));
        let tables = vec![NO_BLOCK; (SLOTS * group.max_blocks_per_seq) as usize];
        let seqs = [(0, 0); SLOTS as usize];
        let counts = AppendCounts::default();
        Self { params, plan, device, values: value, seqs, tables, free, counts }
    }

    pub(super) fn layout(&self) -> &GroupLayout {
        &self.plan.groups[0].layout
    }

    /// Begins a sequence.
    pub(super) fn begin(&mut self, slot: u32, key: u32) {
        self.seqs[slot as usize] = (0, key);
    }

    /// Gives blocks that have left the window back, poisoned, and takes those for `end` tokens.
    fn hold(&mut self, slot: u32, len: u32, end: u32) {
        let row = self.plan.groups[0].max_blocks_per_seq;
        let layout = self.plan.groups[0].layout.clone();
        let size = layout.unit_tokens;
        let (sinks, from) = visible(len, self.params.window, layout.sink_tokens);
        for block in 0..row {
            let entry = &mut self.tables[(slot * row + block) as usize];
            let gone = block * size >= sinks && (block + 1) * size <= from;
            if gone && *entry != NO_BLOCK {
                self.device.fill(layout.unit(*entry), layout.unit_bytes, 0xFF).expect("a block");
                self.free.push(std::mem::replace(entry, NO_BLOCK));
            }
        }
        for block in len / size..end.div_ceil(size) {
            let entry = &mut self.tables[(slot * row + block) as usize];
            if *entry == NO_BLOCK {
                *entry = self.free.pop().expect("a block is free");
            }
        }
    }

    /// Appends `tokens` tokens to a sequence, at most `chunk` in one step.
    pub(super) fn append(&mut self, slot: u32, tokens: u32, chunk: u32) {
        let mut left = tokens;
        while left > 0 {
            let n = left.min(chunk).min(self.plan.limits.max_step_tokens);
            self.step(slot, n);
            left -= n;
        }
    }

    fn step(&mut self, slot: u32, n: u32) {
        let (len, key) = self.seqs[slot as usize];
        if self.params.mode == CacheMode::Paged {
            self.hold(slot, len, len + n);
        }
        let per_token = (self.params.kv_heads * self.params.head_dim) as usize;
        let numbers = |what| -> Vec<f32> {
            (len..len + n)
                .flat_map(|position| (0..per_token).map(move |i| (what, position, i)))
                .map(|(what, position, i)| (self.values)(what, key, position, i))
                .collect()
        };
        let (k, v) = (numbers(0), numbers(1));
        let row = self.plan.groups[0].max_blocks_per_seq as usize;
        let table = &self.tables[slot as usize * row..][..row];
        let view = SeqView { layout: self.layout(), table, slot };
        let token_slots: Vec<u64> = (len..len + n).map(|at| view.token_slot(at)).collect();
        let counts = self
            .device
            .append(&AppendArgs {
                layout: &self.plan.groups[0].layout,
                layer: LAYER,
                scales: self.plan.scales_of(LayerIdx(LAYER)),
                token_slots: &token_slots,
                rope: None,
                positions: &[],
                k: TensorRef::F32(&k),
                v: TensorRef::F32(&v),
            })
            .expect("append");
        self.counts.add(counts);
        self.seqs[slot as usize].0 += n;
    }

    /// Overwrites the scales of a token's V vectors in the first slot.
    pub(super) fn break_v_scales(&mut self, position: u32, scale: u16) {
        let layout = self.plan.groups[0].layout.clone();
        let row = self.plan.groups[0].max_blocks_per_seq as usize;
        let view = SeqView { layout: &layout, table: &self.tables[..row], slot: 0 };
        let (unit, token) = view.place(position);
        for head in 0..layout.num_kv_heads {
            let at = layout.scales(unit, LAYER, Kv::V, head, token);
            let bytes = scale.to_le_bytes().repeat(layout.scales_per_row as usize);
            self.device.write(at, &bytes).expect("inside");
        }
    }

    /// Attends with the last `rows` positions of each of some slots.
    pub(super) fn attend(&mut self, batch: &[(u32, u32)]) -> Answer {
        self.attend_into(batch, false)
    }

    /// The same, with output in f16 where asked for.
    pub(super) fn attend_into(&mut self, batch: &[(u32, u32)], half: bool) -> Answer {
        let heads = self.params.kv_heads * self.params.group;
        let per_token = (heads * self.params.head_dim) as usize;
        let (mut seqs, mut q, mut row_start) = (Vec::new(), Vec::new(), 0);
        for &(slot, rows) in batch {
            let (len, key) = self.seqs[slot as usize];
            let first_position = len - rows;
            seqs.push(BatchSeq { slot, row_start, rows, first_position });
            row_start += rows;
            for position in first_position..len {
                q.extend((0..per_token).map(|i| (self.values)(2, key, position, i)));
            }
        }
        let mut out = vec![f32::from_bits(0xFFFF_FFFF); q.len()];
        let mut halves = vec![f16::NAN; q.len()];
        let mut lse = vec![f32::NAN; (row_start * heads) as usize];
        self.device
            .attend(&mut AttendArgs {
                layout: &self.plan.groups[0].layout,
                layer: LAYER,
                scales: self.plan.scales_of(LayerIdx(LAYER)),
                window: self.params.window,
                num_q_heads: heads,
                softmax_scale: 1.0
                    / f32::from(u16::try_from(self.params.head_dim).expect("small")).sqrt(),
                seqs: &seqs,
                tables: &self.tables,
                table_row: self.plan.groups[0].max_blocks_per_seq,
                q: TensorRef::F32(&q),
                out: if half { TensorMut::F16(&mut halves) } else { TensorMut::F32(&mut out) },
                lse: Some(&mut lse),
            })
            .expect("attend");
        if half {
            out = halves.iter().map(|x| x.to_f32()).collect();
        }
        Answer { out, lse }
    }

    /// Computes with other kernels from now on.
    pub(super) fn use_kernel(&mut self, choice: KernelChoice) {
        self.device.kernel = kernel::choose(choice).expect("a kernel that this CPU has");
    }

    /// All bytes of the pool.
    pub(super) fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.device.memory.bytes().len()];
        self.device.read(0, &mut bytes).expect("the whole pool");
        bytes
    }
}

/// The fast kernels that this CPU has.
pub(super) fn kernels() -> Vec<KernelChoice> {
    [KernelChoice::Portable, KernelChoice::Avx2, KernelChoice::Avx512, KernelChoice::Avx512Bf16]
        .into_iter()
        .filter(|choice| kernel::choose(*choice).is_ok())
        .collect()
}
