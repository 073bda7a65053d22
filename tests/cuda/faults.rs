//! Calls of the driver that fail while a cache works: each in turn, what they leave, and what is
//! given back all the same.

use kvpool::cache::{Cache, StepId};
use kvpool::config::{Format, Scrub};
use kvpool::device::CudaStream;
use kvpool::error::DeviceError;
use kvpool::units::{GroupIdx, LayerIdx};

use super::driver::{self, Memory, counter, fail, last_failure, live};
use crate::common::{Spec, tensor};
use crate::faults;
use crate::walk::{Faults, Told, Walk};

/// Makes any call of the driver fail with a code.
struct OfTheDriver {
    code: u32,
    before: u64,
}

impl Faults for OfTheDriver {
    fn arm(&mut self, nth: u64) {
        self.before = counter("failures");
        fail(Some(&format!("*:{nth}:{}", self.code)));
    }

    fn disarm(&mut self) -> Option<String> {
        fail(None);
        (counter("failures") > self.before).then(last_failure)
    }

    fn is_thorough(&self) -> bool {
        false
    }

    fn is_told(&self, call: &str, error: DeviceError) -> bool {
        matches!(error, DeviceError::CudaCall { call: named, code, .. }
            if named == call && code == self.code)
    }
}

/// A verb of an open step, which stays open.
fn resumed<T>(
    cache: &mut Cache,
    step: StepId,
    verb: impl FnOnce(&mut kvpool::cache::Step<'_>) -> Result<T, kvpool::error::CacheError>,
) -> Result<T, Told> {
    let mut step = cache.resume(step)?;
    let result = verb(&mut step);
    step.detach();
    Ok(result?)
}

/// Steps whose tensors are in device memory, prepared and not, with their tables, in two streams.
fn verbs_of_the_device(walk: &mut Walk<'_>, cache: &mut Cache) {
    let geometry = cache.plan().geometry.clone();
    let (kv_heads, q_heads) = (geometry.num_kv_heads, geometry.num_q_heads);
    let groups = cache.plan().groups.len() as u32;
    let (seq, _) = walk.begin(cache, &[900, 901, 902]);
    for (prepare, ids) in [(false, [900, 901]), (true, [902, 903])] {
        let step = walk.reserve(cache, &[(seq, 2)], &ids);
        let positions = resumed(cache, step, |step| Ok(step.positions().to_vec())).unwrap();
        if prepare {
            walk.verb(cache, "prepare", |cache| resumed(cache, step, |step| step.prepare()));
        }
        for group in (0..groups).map(GroupIdx) {
            walk.verb(cache, "upload_tables", |cache| {
                resumed(cache, step, |step| step.upload_tables(group, true, true))
            });
        }
        let tags = ids.map(u64::from);
        let mut results = Vec::new();
        for layer in (0..geometry.num_layers).map(LayerIdx) {
            let of = |what, heads| {
                let data = tensor(&tags, &positions, layer.0, what, heads, geometry.head_dim);
                (Memory::of(&data), data.len())
            };
            let ((k, kv_len), (v, _), (q, q_len)) =
                (of(0, kv_heads), of(1, kv_heads), of(2, q_heads));
            let out = Memory::of(&vec![f32::NAN; q_len]);
            walk.verb(cache, "append_device", |cache| {
                resumed(cache, step, |step| {
                    step.append_device(layer, k.tensor(kv_len), v.tensor(kv_len))
                })
            });
            walk.verb(cache, "attend_device", |cache| {
                resumed(cache, step, |step| {
                    step.attend_device(layer, q.tensor(q_len), out.tensor(q_len), None, None)
                })
            });
            results.push((out, q_len, [k, v, q]));
        }
        walk.verb(cache, "commit", |cache| Ok(cache.resume(step)?.commit()?));
        walk.verb(cache, "synchronize", |cache| Ok(cache.synchronize()?));
        for (out, len, _) in &results {
            walk.bits.extend(out.read(*len).iter().map(|x| x.to_bits()));
        }
        walk.verb(cache, "set_stream", |cache| {
            // SAFETY: the default stream.
            Ok(cache.set_stream(unsafe { CudaStream::new(std::ptr::null_mut()) })?)
        });
    }
    walk.release(cache, seq);
}

/// Every call of the driver that any verb makes fails, in turn, until the verb has made them all:
/// the error names it, everything is as before, and in the end nothing is left.
#[test]
#[ignore = "started by cuda::the_tests_of_the_device_run_on_the_emulated_device"]
fn edge_61_every_call_of_every_verb_fails() {
    driver::enter();
    let folder = tempfile::tempdir().unwrap();
    let before = live();
    for spec in faults::specs() {
        let spec = Spec { scrub: Scrub::Off, ..spec };
        let run = |faults: Option<&mut dyn Faults>| {
            let mut cache = spec.open();
            let mut walk = Walk::new(faults);
            walk.verbs_of_the_host(&mut cache, folder.path());
            verbs_of_the_device(&mut walk, &mut cache);
            (walk.bits, walk.failed, walk.verbs)
        };
        let good = run(None);
        // CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, CUDA_ERROR_OUT_OF_MEMORY: one of them for each.
        let code = if spec.format == Format::F16 { 701 } else { 2 };
        let (bits, failed, verbs) = run(Some(&mut OfTheDriver { code, before: 0 }));
        assert!(bits == good.0, "{spec:?}: another result");
        // Contexts, streams, events, copies both ways, launches.
        assert!(failed.len() >= 9 && verbs.len() >= 13, "{failed:?}, {verbs:?}");
        for call in
            ["cuEventSynchronize", "cuStreamIsCapturing", "cuStreamWaitEvent", "cuLaunchKernel"]
        {
            assert!(failed.contains_key(call), "{call} did not fail: {failed:?}");
        }
        assert_eq!(live(), before, "{spec:?}: left behind");
    }
}

/// What cannot be given back is lost, and nothing else: whoever gives it back has nobody to tell.
#[test]
#[ignore = "started by cuda::the_tests_of_the_device_run_on_the_emulated_device"]
fn edge_61_what_cannot_be_given_back_ends_nothing() {
    let spec: Spec = faults::specs().remove(0);
    let good = faults::script(&mut spec.open());
    let context = driver::current_context();
    for call in super::errors::GIVES_BACK {
        for nth in 1.. {
            let before = counter("failures");
            let mut cache = spec.open();
            // CUDA_ERROR_LAUNCH_FAILED
            fail(Some(&format!("{call}:{nth}:719")));
            if nth == 1 {
                assert!(faults::script(&mut cache).bits == good.bits, "{call}");
            }
            drop(cache);
            fail(None);
            while driver::current_context() != context {
                driver::leave();
            }
            drop(spec.open());
            if counter("failures") == before {
                break;
            }
        }
    }
}
