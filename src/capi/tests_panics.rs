//! Edge case 58 in the middle of things: a device that panics while a verb or a reader is at work.

use std::ops::Range;
use std::ptr::{from_mut, null};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::object::{CACHES, Object};
use super::plan::PLANS;
use super::tests::{begin, open, plan_with, stats};
use super::*;
use crate::cache::Cache;
use crate::device::{AppendArgs, AppendCounts, AttendArgs, Device, DeviceInfo, NullDevice};
use crate::error::DeviceError;
use crate::plan::GroupLayout;

/// A device of which one call panics, or all from then on.
#[derive(Debug)]
struct Panicking {
    inner: NullDevice,
    /// How many calls are left until then.
    left: AtomicU64,
    for_good: bool,
}

impl Panicking {
    fn call(&self) {
        let left = self.left.load(Relaxed);
        if left != 1 || !self.for_good {
            self.left.store(left.wrapping_sub(1), Relaxed);
        }
        assert!(left != 1, "the device is at its end");
    }
}

impl Device for Panicking {
    fn info(&self) -> DeviceInfo {
        self.inner.info()
    }

    fn plan_fingerprint(&self) -> u64 {
        self.inner.plan_fingerprint()
    }

    fn base_ptr(&self) -> *mut u8 {
        self.inner.base_ptr()
    }

    fn append(&mut self, args: &AppendArgs<'_>) -> Result<AppendCounts, DeviceError> {
        self.call();
        self.inner.append(args)
    }

    fn attend(&mut self, args: &mut AttendArgs<'_>) -> Result<(), DeviceError> {
        self.call();
        self.inner.attend(args)
    }

    fn copy(&mut self, src: u64, dst: u64, len: u64) -> Result<(), DeviceError> {
        self.inner.copy(src, dst, len)
    }

    fn queue_copy(
        &mut self,
        layout: &GroupLayout,
        src_unit: u32,
        dst_unit: u32,
        tokens: Range<u32>,
    ) -> Result<u64, DeviceError> {
        self.call();
        self.inner.queue_copy(layout, src_unit, dst_unit, tokens)
    }

    fn submit(&mut self) -> Result<(), DeviceError> {
        self.call();
        self.inner.submit()
    }

    fn synchronize(&mut self) -> Result<AppendCounts, DeviceError> {
        self.call();
        self.inner.synchronize()
    }

    fn fill(&mut self, offset: u64, len: u64, byte: u8) -> Result<(), DeviceError> {
        self.call();
        self.inner.fill(offset, len, byte)
    }

    fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        self.call();
        self.inner.write(offset, bytes)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), DeviceError> {
        self.call();
        self.inner.read(offset, out)
    }
}

/// A cache whose device panics in its n-th call, and in all later ones if it does so for good. What
/// is released it zeroes.
fn panicking(n: u64, for_good: bool) -> kvpool_cache_t {
    let handle = plan_with(&[c"pool.scrub='on-release'"]);
    let planned = PLANS.get(handle).expect("made just now");
    let (plan, config) = (planned.plan.clone(), planned.config.clone());
    let inner = NullDevice::open(&plan);
    let device = Panicking { inner, left: AtomicU64::new(n), for_good };
    let cache = Cache::open(plan.clone(), Box::new(device)).expect("opens");
    assert_eq!(kvpool_plan_destroy(handle), KVPOOL_OK);
    CACHES.insert(Object::new(cache, plan, config).expect("room")).expect("room")
}

type Said = Vec<(&'static str, kvpool_status_t)>;

/// A step of a sequence, from beginning to end.
fn step(cache: kvpool_cache_t, sequence: kvpool_seq_t, tokens: &[u32], said: &mut Said) {
    let num_tokens = u32::try_from(tokens.len()).expect("few");
    let items = [kvpool_step_item_t { sequence, num_tokens, reserved: 0 }];
    let mut step = kvpool_step_t { word: [0, 0] };
    let (ids, n) = (tokens.as_ptr(), tokens.len());
    // SAFETY: items and their number, tokens and theirs, a place.
    let status = unsafe { kvpool_cache_reserve(cache, items.as_ptr(), 1, ids, n, &raw mut step) };
    said.push(("reserve", status));
    let [mut row, mut out] = [(); 2].map(|()| vec![0.0_f32; 16 * tokens.len()]);
    let tensor = |row: &mut Vec<f32>| kvpool_tensor_t {
        data: row.as_mut_ptr().cast(),
        len: row.len() as u64,
        dtype: KVPOOL_F32,
        memory: KVPOOL_HOST,
    };
    let (row, out) = (tensor(&mut row), tensor(&mut out));
    // SAFETY: tensors of the shape, which live as long as the call.
    let status = unsafe { kvpool_step_append(cache, step, 0, &raw const row, &raw const row) };
    said.push(("append", status));
    let (q, out) = (&raw const row, &raw const out);
    // SAFETY: as above, and no options.
    said.push(("attend", unsafe { kvpool_step_attend(cache, step, 0, q, out, null()) }));
    said.push(("commit", kvpool_step_commit(cache, step)));
}

/// Every verb that has something to do for the device, and the readers of its memory.
fn script(cache: kvpool_cache_t) -> Said {
    let prompt: Vec<u32> = (0..20).collect();
    let mut said = Said::new();
    let (status, first) = begin(cache, &prompt);
    said.push(("begin", status));
    step(cache, first.sequence, &prompt, &mut said);
    let mut fork = kvpool_seq_t { word: [0, 0] };
    // SAFETY: a place.
    said.push(("fork", unsafe { kvpool_cache_fork(cache, first.sequence, &raw mut fork) }));
    // A copy on write.
    step(cache, fork, &[7], &mut said);
    // 12 tokens of a block: a copy.
    let (status, other) = begin(cache, &[&prompt[..12], &[90, 91]].concat());
    said.push(("begin", status));
    let mut row = [0.0_f32; 16];
    let (part, out) = (KVPOOL_K, row.as_mut_ptr());
    let seq = first.sequence;
    // SAFETY: a place for 16 elements.
    said.push(("export", unsafe { kvpool_cache_export(cache, seq, 0, part, 3, 4, out, 16) }));
    let out = from_mut(&mut row).cast();
    // SAFETY: a place for 64 bytes.
    said.push(("read", unsafe { kvpool_cache_read(cache, 0, out, 64) }));
    said.push(("synchronize", kvpool_cache_synchronize(cache)));
    said.push(("truncate", kvpool_cache_truncate(cache, fork, 3)));
    for seq in [first.sequence, fork, other.sequence] {
        said.push(("release", kvpool_cache_release(cache, seq)));
    }
    said.push(("stats", stats(cache)));
    said
}

/// Whichever call of the device panics, its verb or reader says so, all later ones say that the
/// cache is of no use any more, and others are not concerned.
#[test]
fn edge_58_a_panic_in_the_middle_of_a_verb_or_a_reader() {
    for for_good in [false, true] {
        panics_wherever_it_may(for_good);
    }
}

fn panics_wherever_it_may(for_good: bool) {
    let mut where_it_was = Vec::new();
    for n in 1.. {
        let (broken, sound) = (panicking(n, for_good), open());
        let said = script(broken);
        let Some(at) = said.iter().position(|(_, status)| *status == KVPOOL_PANIC) else {
            assert!(said.iter().all(|(_, status)| *status == KVPOOL_OK), "{said:?}");
            assert_eq!(kvpool_cache_close(broken), KVPOOL_OK);
            assert_eq!(kvpool_cache_close(sound), KVPOOL_OK);
            break;
        };
        assert!(said[..at].iter().all(|(_, status)| *status == KVPOOL_OK), "{n}: {said:?}");
        assert!(said[at + 1..].iter().all(|(_, status)| *status == KVPOOL_POISONED), "{said:?}");
        where_it_was.push(said[at].0);
        assert_eq!(begin(sound, &[1, 2, 3]).0, KVPOOL_OK);
        assert_eq!(kvpool_cache_check(sound), KVPOOL_OK);
        assert_eq!(kvpool_cache_close(broken), KVPOOL_OK);
        assert_eq!(stats(broken), KVPOOL_STALE_HANDLE);
        assert_eq!(kvpool_cache_close(sound), KVPOOL_OK);
    }
    for verb in ["begin", "reserve", "append", "attend", "export", "read", "synchronize"] {
        assert!(where_it_was.contains(&verb), "{where_it_was:?}");
    }
}
