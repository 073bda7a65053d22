//! A context that a kernel has ended. In a process of its own, whose context nobody else needs.

use kvpool::cache::Cache;
use kvpool::error::CacheError;

use super::driver::{counter, fail};
use crate::common::{Spec, begin, run_step};
use crate::faults;

/// A kernel that ends the context ends the cache with it: every verb that needs the device says so
/// from then on, closing leaves nothing behind, and the next cache works.
#[test]
#[ignore = "started by cuda::a_context_that_broke_is_told_until_the_cache_is_closed"]
fn a_context_that_broke() {
    let spec: Spec = faults::specs().remove(0);
    let good = faults::script(&mut spec.open());
    let live = || ["live_bytes", "live_host_bytes", "live_modules", "live_events"].map(counter);
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
