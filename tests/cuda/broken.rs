//! A context that a kernel has ended. In a process of its own, whose context nobody else needs.

use kvpool::cache::{Cache, SeqHandle};
use kvpool::error::{CacheError, DeviceError, OpenError};
use kvpool::plan::Kv;
use kvpool::units::LayerIdx;

use super::driver::{Memory, counter, fail, kernels, live, reset_counters};
use crate::common::{Spec, begin, run_step, tensor};
use crate::faults;

/// A kernel that ends the context ends the cache with it: every verb that needs the device says so
/// from then on, closing leaves nothing behind, and the next cache works.
#[test]
#[ignore = "started by cuda::a_context_that_broke_is_told_until_the_cache_is_closed"]
fn a_context_that_broke() {
    let spec: Spec = faults::specs().remove(0);
    let good = faults::script(&mut spec.open());
    let before = live();
    let mut cache = spec.open();
    let a = begin(&mut cache, 0);
    run_step(&mut cache, &[(a, 2)], &[1, 2]).expect("works");
    let b = cache.fork(a).expect("fits");
    // CUDA_ERROR_ILLEGAL_ADDRESS, in the kernel that copies the shared block.
    fail(Some("kvpool_copy_pairs:1:700"));
    let mut refused = 0;
    for tag in 3..8 {
        let result = run_step(&mut cache, &[(a, 1), (b, 1)], &[tag, tag + 10]);
        assert!(matches!(result, Err(CacheError::Device(_))), "{:?}", result.err());
        cache.check_invariants().expect("invariants");
        refused += 1;
    }
    fail(None);
    assert_eq!((refused, cache.seq_len(a), cache.seq_len(b)), (5, Ok(2), Ok(2)));
    assert!(matches!(cache.synchronize(), Err(CacheError::Device(_))));
    let open = || Cache::open_on_device(spec.plan(), &spec.config().device, None);
    open().expect_err("nor does another cache open while the context is broken");
    cache.release(a).expect("alive: what needs no device works");
    drop(cache);
    assert_eq!(live(), before);
    assert!(faults::script(&mut open().expect("opens")).bits == good.bits);
}

/// Has every kernel run, by a step that copies on write, one that is prepared, reading back and
/// scrubbing; gives what came out, or the first error.
fn work(cache: &mut Cache, seqs: &mut Vec<SeqHandle>) -> Result<Vec<u32>, CacheError> {
    let a = begin(cache, 0);
    seqs.push(a);
    run_step(cache, &[(a, 2)], &[1, 2])?;
    let b = cache.fork(a)?;
    seqs.push(b);
    let outputs = run_step(cache, &[(a, 1), (b, 1)], &[3, 4])?;
    let mut read = vec![f32::NAN; 3 * 32];
    cache.export(a, LayerIdx(0), Kv::V, 0, 3, &mut read)?;
    let values = outputs.out.iter().flatten().chain(&read);
    let mut bits: Vec<u32> = values.map(|x| x.to_bits()).collect();
    let mut step = cache.reserve(&[(a, 1)])?;
    step.prepare()?;
    let mut kept = Vec::new();
    for layer in 0..2 {
        let of = |what, heads| Memory::of(&tensor(&[5], &[3], layer, what, heads, 32));
        let (k, v, q, out) = (of(0, 1), of(1, 1), of(2, 2), Memory::new(2 * 32 * 4));
        step.append_device(LayerIdx(layer), k.tensor(32), v.tensor(32))?;
        step.attend_device(LayerIdx(layer), q.tensor(64), out.tensor(64), None, None)?;
        kept.push([k, v, q, out]);
    }
    step.commit()?;
    cache.synchronize()?;
    bits.extend(kept.iter().flat_map(|of| of[3].read(64)).map(|x| x.to_bits()));
    cache.release(b)?;
    seqs.pop();
    cache.clear_cached();
    cache.synchronize()?;
    Ok(bits)
}

fn is_broken(error: &DeviceError) -> bool {
    matches!(error, DeviceError::CudaCall { code: 700, .. })
}

/// Each run of each kernel ends the context, in turn, from the first of an open on: it is said,
/// what needs no device works, closing leaves nothing behind, and the next cache works.
#[test]
#[ignore = "started by cuda::a_context_that_broke_is_told_until_the_cache_is_closed"]
fn edge_61_every_run_of_every_kernel_breaks_the_context() {
    let spec: Spec = faults::specs().remove(0);
    let open = || Cache::open_on_device(spec.plan(), &spec.config().device, None);
    // Memory of the test's own is in the context of a cache.
    let whole = || {
        let mut cache = open().expect("opens");
        super::driver::enter();
        let bits = work(&mut cache, &mut Vec::new()).expect("nothing fails");
        super::driver::forget();
        bits
    };
    let good = whole();
    assert_eq!(live(), [0; 8]);
    reset_counters();
    assert!(whole() == good);
    let all = kernels();
    let kinds = ["append", "attend", "combine", "copy_pairs", "gather", "fill"];
    assert!(kinds.iter().all(|kind| all.iter().any(|name| name.contains(kind))), "{all:?}");
    for kernel in all {
        for nth in 1.. {
            let before = counter("failures");
            // CUDA_ERROR_ILLEGAL_ADDRESS
            fail(Some(&format!("{kernel}:{nth}:700")));
            match open() {
                Err(OpenError::Device(error)) => assert!(is_broken(&error), "{kernel}: {error}"),
                Err(error) => panic!("{kernel}: {error}"),
                Ok(mut cache) => {
                    super::driver::enter();
                    let mut seqs = Vec::new();
                    let result = work(&mut cache, &mut seqs);
                    if counter("failures") == before {
                        fail(None);
                        assert!(result.expect("nothing has failed") == good);
                        super::driver::forget();
                        break;
                    }
                    let Err(CacheError::Device(error)) = result else { panic!("{kernel} {nth}") };
                    assert!(is_broken(&error), "{kernel}: {error}");
                    cache.check_invariants().expect("invariants");
                    assert!(matches!(cache.synchronize(), Err(CacheError::Device(_))));
                    for seq in seqs {
                        assert!(run_step(&mut cache, &[(seq, 1)], &[9]).is_err(), "{kernel}");
                        cache.release(seq).expect("what needs no device works");
                    }
                    cache.check_invariants().expect("invariants");
                    super::driver::forget();
                }
            }
            assert_eq!(counter("failures"), before + 1, "{kernel} {nth}");
            fail(None);
            assert_eq!(live(), [0; 8], "{kernel} {nth} left something behind");
            drop(open().expect("the next opens"));
        }
        assert!(whole() == good, "after {kernel}");
    }
}
