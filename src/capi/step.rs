//! The header's section "Steps".

use std::ptr::null;

use super::bindings::*;
use super::caller::Caller;
use super::failure::{CallError, Failure};
use super::handle::{self, of_step, seq, seq_or_nobodys};
use super::later::Ended;
use super::object::{give_back_later, step_verb, verb, verb_beside_step};
use super::tensor::{Attend, Given, pool_bytes};
use crate::cache::{AttendOptions, SeqHandle, Step, StepItem};
use crate::device::BatchSeq;
use crate::error::CacheError;
use crate::plan::GroupKind;
use crate::units::{GroupIdx, LayerIdx};

// The caller's entries are read where they are: to copy them first takes a tenth of a decode step.
impl StepItem for kvpool_step_item_t {
    #[inline]
    fn sequence(&self) -> SeqHandle {
        seq_or_nobodys(self.sequence)
    }

    #[inline]
    fn num_tokens(&self) -> u32 {
        self.num_tokens
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpool_cache_reserve(
    cache: kvpool_cache_t,
    items: *const kvpool_step_item_t,
    num_items: usize,
    tokens: *const u32,
    num_tokens: usize,
    out: *mut kvpool_step_t,
) -> kvpool_status_t {
    // SAFETY: the caller keeps to kvpool.h.
    let caller = unsafe { Caller::trusted() };
    verb(cache, |open| {
        let items = caller.slice("items", items, num_items)?;
        Caller::unused("items", items.iter().fold(0, |all, item| all | item.reserved))?;
        let out = caller.place("out", out)?;
        let tokens = if tokens.is_null() && num_tokens == 0 {
            None
        } else {
            Some(caller.slice("tokens", tokens, num_tokens)?)
        };
        let step = open.cache.reserve_items(items, tokens);
        match step.map(Step::detach) {
            Ok(step) => out.set(of_step(step)),
            Err(error) => {
                let index = open.cache.refused_item();
                // What is no handle of a sequence is told as that, and not as another cache's.
                let handle = index.map_or(Ok(()), |index| seq(items[index].sequence).map(drop));
                let failure = handle.map_or_else(Failure::from, |()| error.into());
                return Err(match index {
                    Some(index) => failure.of_item(index),
                    None => failure,
                });
            }
        }
        Ok(())
    })
}

// The header's struct is the one that a step has.
const _: () = assert!(
    size_of::<kvpool_batch_seq_t>() == size_of::<BatchSeq>()
        && align_of::<kvpool_batch_seq_t>() == align_of::<BatchSeq>()
        && std::mem::offset_of!(BatchSeq, slot) == std::mem::offset_of!(kvpool_batch_seq, slot)
        && std::mem::offset_of!(BatchSeq, row_start)
            == std::mem::offset_of!(kvpool_batch_seq, row_start)
        && std::mem::offset_of!(BatchSeq, rows) == std::mem::offset_of!(kvpool_batch_seq, rows)
        && std::mem::offset_of!(BatchSeq, first_position)
            == std::mem::offset_of!(kvpool_batch_seq, first_position)
);

/// The length of a list of a step, which the plan bounds far below this.
fn count(len: usize) -> u32 {
    u32::try_from(len).unwrap_or(u32::MAX)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpool_step_get_view(
    cache: kvpool_cache_t,
    step: kvpool_step_t,
    out: *mut kvpool_step_view_t,
    out_size: usize,
) -> kvpool_status_t {
    // SAFETY: the caller keeps to kvpool.h.
    let caller = unsafe { Caller::trusted() };
    step_verb(cache, step, |step| {
        let out = caller.out("out", out, out_size)?;
        out.set(kvpool_step_view_t {
            size: 0,
            num_tokens: count(step.num_tokens()),
            num_seqs: count(step.seqs().len()),
            positions: step.positions().as_ptr(),
            seq_lens: step.seq_lens().as_ptr(),
            seqs: step.seqs().as_ptr().cast(),
        });
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpool_step_get_group(
    cache: kvpool_cache_t,
    step: kvpool_step_t,
    group: u32,
    out: *mut kvpool_step_group_t,
    out_size: usize,
) -> kvpool_status_t {
    // SAFETY: the caller keeps to kvpool.h.
    let caller = unsafe { Caller::trusted() };
    step_verb(cache, step, |step| {
        let out = caller.out("out", out, out_size)?;
        let group = GroupIdx(group);
        let token_slots = step.token_slots(group)?.as_ptr();
        let paged = step.plan().groups[group.index()].kind == GroupKind::Paged;
        let (block_table, block_table_row) = if paged {
            let (table, row) = step.block_table(group)?;
            (table.as_ptr(), row)
        } else {
            (null(), 0)
        };
        out.set(kvpool_step_group_t {
            size: 0,
            token_slots,
            block_table,
            block_table_row,
            reserved: 0,
        });
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpool_step_get_csr(
    cache: kvpool_cache_t,
    step: kvpool_step_t,
    group: u32,
    out: *mut kvpool_step_csr_t,
    out_size: usize,
) -> kvpool_status_t {
    // SAFETY: the caller keeps to kvpool.h.
    let caller = unsafe { Caller::trusted() };
    step_verb(cache, step, |step| {
        let out = caller.out("out", out, out_size)?;
        let csr = match step.csr(GroupIdx(group)) {
            Err(CacheError::CsrNotBuilt) => {
                step.build_csr();
                step.csr(GroupIdx(group))?
            }
            csr => csr?,
        };
        out.set(kvpool_step_csr_t {
            size: 0,
            kv_indptr: csr.kv_indptr.as_ptr(),
            kv_indices: csr.kv_indices.as_ptr(),
            kv_last_block_len: csr.kv_last_block_len.as_ptr(),
            kv_first_position: csr.kv_first_position.as_ptr(),
            num_indices: count(csr.kv_indices.len()),
            reserved: 0,
        });
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpool_step_append(
    cache: kvpool_cache_t,
    step: kvpool_step_t,
    layer: u32,
    k: *const kvpool_tensor_t,
    v: *const kvpool_tensor_t,
) -> kvpool_status_t {
    // SAFETY: the caller keeps to kvpool.h.
    let caller = unsafe { Caller::trusted() };
    step_verb(cache, step, |step| {
        let k = Given::of(&caller, "k", k)?;
        let v = Given::of(&caller, "v", v)?.beside(&k)?;
        let layer = LayerIdx(layer);
        let pool = pool_bytes(step.plan(), step.pool_ptr());
        k.apart_from_bytes(pool, "the pool")?;
        v.apart_from_bytes(pool, "the pool")?;
        if k.on_device {
            return Ok(step.append_device(layer, k.device(), v.device())?);
        }
        Ok(step.append(layer, k.host(&caller)?, v.host(&caller)?)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn kvpool_step_mark_appended(
    cache: kvpool_cache_t,
    step: kvpool_step_t,
    layer: u32,
) -> kvpool_status_t {
    step_verb(cache, step, |step| Ok(step.mark_appended(LayerIdx(layer))?))
}

#[unsafe(no_mangle)]
pub extern "C" fn kvpool_step_mark_all_appended(
    cache: kvpool_cache_t,
    step: kvpool_step_t,
) -> kvpool_status_t {
    step_verb(cache, step, |step| {
        step.mark_all_appended();
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpool_step_attend(
    cache: kvpool_cache_t,
    step: kvpool_step_t,
    layer: u32,
    q: *const kvpool_tensor_t,
    out: *const kvpool_tensor_t,
    options: *const kvpool_attend_options_t,
) -> kvpool_status_t {
    // SAFETY: the caller keeps to kvpool.h.
    let caller = unsafe { Caller::trusted() };
    step_verb(cache, step, |step| {
        let q = Given::of(&caller, "q", q)?;
        let out = Given::of(&caller, "out", out)?.beside(&q)?;
        let Attend { softmax_scale, lse } = Attend::of(&caller, options)?;
        let lse = lse.map(|lse| lse.beside(&q)).transpose()?;
        out.apart_from(&q)?;
        if let Some(lse) = &lse {
            lse.apart_from(&q)?;
            lse.apart_from(&out)?;
        }
        let pool = pool_bytes(step.plan(), step.pool_ptr());
        for tensor in [Some(&out), Some(&q), lse.as_ref()].into_iter().flatten() {
            tensor.apart_from_bytes(pool, "the pool")?;
        }
        let layer = LayerIdx(layer);
        if q.on_device {
            let lse = lse.map(|lse| lse.device());
            return Ok(step.attend_device(layer, q.device(), out.device(), lse, softmax_scale)?);
        }
        let lse = lse.map(|lse| lse.host_f32(&caller)).transpose()?;
        let options = AttendOptions { softmax_scale, lse };
        Ok(step.attend(layer, q.host(&caller)?, out.host_mut(&caller)?, options)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn kvpool_step_prepare(
    cache: kvpool_cache_t,
    step: kvpool_step_t,
) -> kvpool_status_t {
    step_verb(cache, step, |step| Ok(step.prepare()?))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpool_step_get_device(
    cache: kvpool_cache_t,
    step: kvpool_step_t,
    group: u32,
    wanted: u32,
    out: *mut kvpool_step_device_t,
    out_size: usize,
) -> kvpool_status_t {
    // SAFETY: the caller keeps to kvpool.h.
    let caller = unsafe { Caller::trusted() };
    step_verb(cache, step, |step| {
        let out = caller.out("out", out, out_size)?;
        const CSR: u32 = KVPOOL_TABLES_CSR.cast_unsigned();
        const DENSE: u32 = KVPOOL_TABLES_DENSE.cast_unsigned();
        if wanted & !(CSR | DENSE) != 0 {
            let problem = "has bits that mean nothing";
            return Err(CallError::BadArgument { what: "tables", problem }.into());
        }
        let (csr, dense) = (wanted & CSR != 0, wanted & DENSE != 0);
        let tables = step.upload_tables(GroupIdx(group), csr, dense)?;
        let at = |address: u64| -> *const u32 {
            std::ptr::without_provenance(usize::try_from(address).unwrap_or_default())
        };
        out.set(kvpool_step_device_t {
            size: 0,
            positions: at(tables.positions),
            seq_lens: at(tables.seq_lens),
            token_slots: at(tables.token_slots).cast(),
            block_table: at(tables.block_table),
            kv_indptr: at(tables.kv_indptr),
            kv_indices: at(tables.kv_indices),
            kv_last_block_len: at(tables.kv_last_block_len),
            kv_first_position: at(tables.kv_first_position),
            block_table_row: tables.block_table_row,
            reserved: 0,
        });
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn kvpool_step_commit(
    cache: kvpool_cache_t,
    step: kvpool_step_t,
) -> kvpool_status_t {
    verb_beside_step(cache, |open| Ok(open.cache.resume(handle::step(step)?)?.commit()?))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpool_cache_cancel_step(
    cache: kvpool_cache_t,
    cancelled: *mut u32,
) -> kvpool_status_t {
    // SAFETY: the caller keeps to kvpool.h.
    let caller = unsafe { Caller::trusted() };
    verb_beside_step(cache, |open| {
        let cancelled = caller.maybe_place("cancelled", cancelled)?;
        cancelled.set(open.cache.cancel_open_step().into());
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn kvpool_step_cancel(
    cache: kvpool_cache_t,
    step: kvpool_step_t,
) -> kvpool_status_t {
    verb_beside_step(cache, |open| {
        Step::cancel(open.cache.resume(handle::step(step)?)?);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn kvpool_step_cancel_later(
    cache: kvpool_cache_t,
    step: kvpool_step_t,
) -> kvpool_status_t {
    give_back_later(cache, || {
        let step = handle::step(step)?;
        Ok((step.parts().0, Ended::Step(step)))
    })
}
