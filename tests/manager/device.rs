//! Memory that stores f32, and does so late when asked to: copies and appends wait in a queue and
//! are carried out in another order, as long as it is a legal one. What is read is up to date.
//! No attention is computed.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use kvpool::cache::Cache;
use kvpool::device::{
    AppendArgs, AppendCounts, AttendArgs, Device, DeviceInfo, NullDevice, TensorRef,
};
use kvpool::error::DeviceError;
use kvpool::plan::{Kv, Plan};

use crate::common::{Rng, Spec, on_cuda};

/// A cache on memory that does up to `most` calls late; where the tests run on a CUDA device, on
/// that: what it does late is up to the emulator.
pub(super) fn open_late(spec: &Spec, most: usize) -> Cache {
    if on_cuda() {
        return spec.open();
    }
    let plan = spec.plan();
    let (device, _) = TestDevice::open(&plan, most);
    Cache::open(plan, device).expect("opens")
}

/// A range of bytes: offset and length.
type Range = (u64, u64);

fn overlap(a: Range, b: Range) -> bool {
    a.0 < b.0 + b.1 && b.0 < a.0 + a.1
}

/// Something that was called and has not happened yet.
#[derive(Debug)]
enum Work {
    Copy { src: u64, dst: u64, len: u64 },
    Write(Vec<(u64, Vec<u8>)>),
}

impl Work {
    fn writes(&self, range: Range) -> bool {
        match self {
            Self::Copy { dst, len, .. } => overlap((*dst, *len), range),
            Self::Write(rows) => {
                rows.iter().any(|(at, bytes)| overlap((*at, bytes.len() as u64), range))
            }
        }
    }

    fn reads(&self, range: Range) -> bool {
        matches!(self, Self::Copy { src, len, .. } if overlap((*src, *len), range))
    }

    /// Whether this must happen before `later`, which was called after it.
    fn before(&self, later: &Self) -> bool {
        match later {
            Self::Copy { src, dst, len } => {
                self.writes((*src, *len)) || self.writes((*dst, *len)) || self.reads((*dst, *len))
            }
            Self::Write(rows) => rows.iter().any(|(at, bytes)| {
                let range = (*at, bytes.len() as u64);
                self.writes(range) || self.reads(range)
            }),
        }
    }
}

#[derive(Debug)]
struct Memory {
    bytes: Vec<u8>,
    queue: Vec<Work>,
    rng: u64,
}

impl Memory {
    fn apply(&mut self, work: &Work) {
        match work {
            Work::Copy { src, dst, len } => {
                let src = *src as usize..(*src + *len) as usize;
                self.bytes.copy_within(src, *dst as usize);
            }
            Work::Write(rows) => {
                for (at, bytes) in rows {
                    self.bytes[*at as usize..*at as usize + bytes.len()].copy_from_slice(bytes);
                }
            }
        }
    }

    /// Carries out one waiting piece of work, after what it must come after.
    fn force(&mut self, at: usize) {
        let mut needed = vec![at];
        for earlier in (0..at).rev() {
            if needed.iter().any(|&later| self.queue[earlier].before(&self.queue[later])) {
                needed.push(earlier);
            }
        }
        // The indices fall, so each `remove` leaves those that follow in place.
        let work: Vec<Work> = needed.iter().map(|&index| self.queue.remove(index)).collect();
        work.iter().rev().for_each(|work| self.apply(work));
    }

    /// Carries out everything that writes to a range.
    fn settle(&mut self, range: Range) {
        while let Some(at) = self.queue.iter().position(|work| work.writes(range)) {
            self.force(at);
        }
    }

    /// Puts work into the queue and carries out some of it, latest first or in any order.
    fn push(&mut self, work: Work, most: usize) {
        if most == 0 {
            return self.apply(&work);
        }
        self.queue.push(work);
        while self.queue.len() > most {
            let mut rng = Rng(self.rng);
            let at = rng.below(self.queue.len() as u64) as usize;
            self.rng = rng.next();
            self.force(at);
        }
    }
}

/// What the device saw, to be read from outside.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// Copies called.
    pub(crate) copies: AtomicU64,
    /// Writes that had to wait for a copy out of the same place.
    pub(crate) waited: AtomicU64,
}

/// The device.
#[derive(Debug)]
pub(crate) struct TestDevice {
    memory: RefCell<Memory>,
    fingerprint: u64,
    info: DeviceInfo,
    most: usize,
    seen: Arc<Seen>,
}

impl TestDevice {
    /// Memory for a plan. Up to `most` calls wait at a time; 0 = none.
    pub(crate) fn open(plan: &Plan, most: usize) -> (Box<dyn Device>, Arc<Seen>) {
        let null = NullDevice::open(plan);
        let seen = Arc::new(Seen::default());
        let bytes = vec![0xFF; plan.pool_bytes.0 as usize];
        let device = Self {
            memory: RefCell::new(Memory { bytes, queue: Vec::new(), rng: 1 }),
            fingerprint: plan.fingerprint(),
            info: null.info(),
            most,
            seen: Arc::clone(&seen),
        };
        (Box::new(device), seen)
    }

    fn check(&self, offset: u64, len: u64) -> Result<(), DeviceError> {
        let pool = self.info.pool_bytes;
        if offset.checked_add(len).is_some_and(|end| end <= pool.0) {
            return Ok(());
        }
        Err(DeviceError::OutOfRange { offset, len, pool })
    }

    fn push(&self, work: Work) {
        let mut memory = self.memory.borrow_mut();
        let overwrites = |waiting: &Work| match &work {
            Work::Copy { dst, len, .. } => waiting.reads((*dst, *len)),
            Work::Write(rows) => {
                rows.iter().any(|(at, bytes)| waiting.reads((*at, bytes.len() as u64)))
            }
        };
        if memory.queue.iter().any(overwrites) {
            self.seen.waited.fetch_add(1, Relaxed);
        }
        memory.push(work, self.most);
    }
}

impl Device for TestDevice {
    fn info(&self) -> DeviceInfo {
        self.info.clone()
    }

    fn plan_fingerprint(&self) -> u64 {
        self.fingerprint
    }

    fn base_ptr(&self) -> *mut u8 {
        self.memory.borrow_mut().bytes.as_mut_ptr()
    }

    fn append(&mut self, args: &AppendArgs<'_>) -> Result<AppendCounts, DeviceError> {
        let layout = args.layout;
        let dim = layout.head_dim as usize;
        let mut rows = Vec::new();
        for (kv, tensor) in [(Kv::K, args.k), (Kv::V, args.v)] {
            let TensorRef::F32(values) = tensor else { return Err(DeviceError::BadLayout) };
            let mut vectors = values.chunks(dim);
            for slot in args.token_slots {
                let per_unit = u64::from(layout.unit_tokens);
                let (unit, token) = ((slot / per_unit) as u32, (slot % per_unit) as u32);
                for head in 0..layout.num_kv_heads {
                    let at = layout.row(unit, args.layer, kv, head, token);
                    let vector = vectors.next().expect("the caller checks shapes");
                    let bytes: Vec<u8> = vector.iter().flat_map(|x| x.to_le_bytes()).collect();
                    self.check(at, bytes.len() as u64)?;
                    rows.push((at, bytes));
                }
            }
        }
        self.push(Work::Write(rows));
        Ok(AppendCounts::default())
    }

    fn attend(&mut self, _args: &mut AttendArgs<'_>) -> Result<(), DeviceError> {
        Ok(())
    }

    fn copy(&mut self, src: u64, dst: u64, len: u64) -> Result<(), DeviceError> {
        self.check(src, len)?;
        self.check(dst, len)?;
        assert!(!overlap((src, len), (dst, len)) || len == 0, "ranges of a copy overlap");
        self.seen.copies.fetch_add(1, Relaxed);
        self.push(Work::Copy { src, dst, len });
        Ok(())
    }

    fn fill(&mut self, offset: u64, len: u64, byte: u8) -> Result<(), DeviceError> {
        self.check(offset, len)?;
        self.push(Work::Write(vec![(offset, vec![byte; len as usize])]));
        Ok(())
    }

    fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        self.check(offset, bytes.len() as u64)?;
        self.push(Work::Write(vec![(offset, bytes.to_vec())]));
        Ok(())
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), DeviceError> {
        self.check(offset, out.len() as u64)?;
        let mut memory = self.memory.borrow_mut();
        memory.settle((offset, out.len() as u64));
        out.copy_from_slice(&memory.bytes[offset as usize..offset as usize + out.len()]);
        Ok(())
    }
}

/// The queue keeps order where order matters, and only there.
#[test]
fn late_work_comes_out_as_if_it_had_been_done_at_once() {
    let plan = Spec::default().plan();
    let (mut late, seen) = TestDevice::open(&plan, 12);
    let (mut prompt, _) = TestDevice::open(&plan, 0);
    let mut rng = Rng(3);
    let size = plan.pool_bytes.0.min(512);
    for round in 0..4000 {
        let len = 1 + rng.below(40);
        let (a, b) = (rng.below(size - len), rng.below(size - len));
        for device in [&mut late, &mut prompt] {
            if rng.0.is_multiple_of(3) || overlap((a, len), (b, len)) {
                device.fill(a, len, round as u8).expect("in range");
            } else {
                device.copy(a, b, len).expect("in range");
            }
        }
        if rng.below(16) == 0 {
            let (mut x, mut y) = (vec![0; len as usize], vec![0; len as usize]);
            late.read(b, &mut x).expect("in range");
            prompt.read(b, &mut y).expect("in range");
            assert_eq!(x, y, "round {round}");
        }
    }
    assert!(seen.waited.load(Relaxed) > 100);
}
