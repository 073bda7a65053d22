//! That every function has the signature that csrc/include/kvpool.h declares: made by csrc/bindings.sh.

use super::bindings::*;
use super::dlpack::DLManagedTensor;

const _: unsafe extern "C" fn(kvpool_status_t) -> *const ::core::ffi::c_char =
    super::kvpool_status_name;
const _: unsafe extern "C" fn(*mut kvpool_error_t, usize) -> kvpool_status_t =
    super::kvpool_last_error;
const _: unsafe extern "C" fn() -> u32 = super::kvpool_abi_version;
const _: unsafe extern "C" fn() -> *const ::core::ffi::c_char = super::kvpool_version;
const _: unsafe extern "C" fn(
    *const ::core::ffi::c_char,
    *const *const ::core::ffi::c_char,
    usize,
    *mut kvpool_config_t,
) -> kvpool_status_t = super::kvpool_config_load;
const _: unsafe extern "C" fn(
    *const ::core::ffi::c_char,
    usize,
    *const ::core::ffi::c_char,
    *const *const ::core::ffi::c_char,
    usize,
    *mut kvpool_config_t,
) -> kvpool_status_t = super::kvpool_config_parse;
const _: unsafe extern "C" fn(kvpool_config_t) -> kvpool_status_t = super::kvpool_config_destroy;
const _: unsafe extern "C" fn(
    kvpool_config_t,
    kvpool_text_form_t,
    *mut ::core::ffi::c_char,
    usize,
    *mut usize,
) -> kvpool_status_t = super::kvpool_config_text;
const _: unsafe extern "C" fn(kvpool_config_t, *mut kvpool_plan_t) -> kvpool_status_t =
    super::kvpool_plan_new;
const _: unsafe extern "C" fn(kvpool_plan_t) -> kvpool_status_t = super::kvpool_plan_destroy;
const _: unsafe extern "C" fn(kvpool_plan_t, *mut kvpool_plan_info_t, usize) -> kvpool_status_t =
    super::kvpool_plan_get_info;
const _: unsafe extern "C" fn(
    kvpool_plan_t,
    u32,
    *mut kvpool_group_info_t,
    usize,
) -> kvpool_status_t = super::kvpool_plan_get_group;
const _: unsafe extern "C" fn(kvpool_plan_t, u32, *mut kvpool_layer_t, usize) -> kvpool_status_t =
    super::kvpool_plan_get_layer;
const _: unsafe extern "C" fn(
    kvpool_plan_t,
    kvpool_text_form_t,
    *mut ::core::ffi::c_char,
    usize,
    *mut usize,
) -> kvpool_status_t = super::kvpool_plan_text;
const _: unsafe extern "C" fn(kvpool_plan_t, u32, u32, *mut u32) -> kvpool_status_t =
    super::kvpool_plan_blocks_for;
const _: unsafe extern "C" fn(
    kvpool_plan_t,
    u32,
    *const u32,
    usize,
    u32,
    *const f32,
    *mut f32,
    usize,
) -> kvpool_status_t = super::kvpool_plan_rotate;
const _: unsafe extern "C" fn(kvpool_plan_t, *mut kvpool_cache_t) -> kvpool_status_t =
    super::kvpool_cache_open;
const _: unsafe extern "C" fn(kvpool_cache_t) -> kvpool_status_t = super::kvpool_cache_close;
const _: unsafe extern "C" fn(kvpool_cache_t, *mut kvpool_plan_info_t, usize) -> kvpool_status_t =
    super::kvpool_cache_get_plan_info;
const _: unsafe extern "C" fn(
    kvpool_cache_t,
    u32,
    *mut kvpool_group_info_t,
    usize,
) -> kvpool_status_t = super::kvpool_cache_get_group;
const _: unsafe extern "C" fn(kvpool_cache_t, u32, *mut kvpool_layer_t, usize) -> kvpool_status_t =
    super::kvpool_cache_get_layer;
const _: unsafe extern "C" fn(
    kvpool_cache_t,
    kvpool_text_form_t,
    *mut ::core::ffi::c_char,
    usize,
    *mut usize,
) -> kvpool_status_t = super::kvpool_cache_text;
const _: unsafe extern "C" fn(kvpool_cache_t, *mut kvpool_device_info_t, usize) -> kvpool_status_t =
    super::kvpool_cache_get_device;
const _: unsafe extern "C" fn(
    kvpool_cache_t,
    *mut *mut ::core::ffi::c_void,
    *mut u64,
) -> kvpool_status_t = super::kvpool_cache_get_pool;
const _: unsafe extern "C" fn(
    kvpool_cache_t,
    u32,
    kvpool_part_t,
    *mut *mut DLManagedTensor,
) -> kvpool_status_t = super::kvpool_cache_dlpack;
const _: unsafe extern "C" fn(kvpool_cache_t, *mut ::core::ffi::c_void) -> kvpool_status_t =
    super::kvpool_cache_set_stream;
const _: unsafe extern "C" fn(kvpool_cache_t) -> kvpool_status_t = super::kvpool_cache_synchronize;
const _: unsafe extern "C" fn(
    kvpool_cache_t,
    *const u32,
    usize,
    *const kvpool_begin_options_t,
    *mut kvpool_begun_t,
    usize,
) -> kvpool_status_t = super::kvpool_cache_begin;
const _: unsafe extern "C" fn(
    kvpool_cache_t,
    *const kvpool_begin_item_t,
    usize,
    *mut kvpool_begun_t,
    usize,
) -> kvpool_status_t = super::kvpool_cache_begin_batch;
const _: unsafe extern "C" fn(kvpool_cache_t, kvpool_seq_t, *mut kvpool_seq_t) -> kvpool_status_t =
    super::kvpool_cache_fork;
const _: unsafe extern "C" fn(kvpool_cache_t, kvpool_seq_t, u32) -> kvpool_status_t =
    super::kvpool_cache_truncate;
const _: unsafe extern "C" fn(kvpool_cache_t, kvpool_seq_t) -> kvpool_status_t =
    super::kvpool_cache_release;
const _: unsafe extern "C" fn(kvpool_cache_t, kvpool_seq_t) -> kvpool_status_t =
    super::kvpool_cache_release_later;
const _: unsafe extern "C" fn(
    kvpool_cache_t,
    kvpool_seq_t,
    *mut kvpool_seq_info_t,
    usize,
) -> kvpool_status_t = super::kvpool_seq_get_info;
const _: unsafe extern "C" fn(kvpool_cache_t, *mut kvpool_preempted_t, usize) -> kvpool_status_t =
    super::kvpool_cache_preempt_youngest;
const _: unsafe extern "C" fn(kvpool_cache_t) -> kvpool_status_t = super::kvpool_cache_reset;
const _: unsafe extern "C" fn(
    kvpool_cache_t,
    *const u32,
    usize,
    *const kvpool_begin_options_t,
    *mut kvpool_estimate_t,
    usize,
) -> kvpool_status_t = super::kvpool_cache_check_admission;
const _: unsafe extern "C" fn(
    kvpool_cache_t,
    *const u32,
    usize,
    *const kvpool_begin_options_t,
    *mut kvpool_reservation_t,
    *mut kvpool_estimate_t,
    usize,
) -> kvpool_status_t = super::kvpool_cache_can_admit;
const _: unsafe extern "C" fn(
    kvpool_cache_t,
    kvpool_reservation_t,
    *mut kvpool_begun_t,
    usize,
) -> kvpool_status_t = super::kvpool_cache_begin_reserved;
const _: unsafe extern "C" fn(kvpool_cache_t, kvpool_reservation_t) -> kvpool_status_t =
    super::kvpool_cache_cancel_reservation;
const _: unsafe extern "C" fn(kvpool_cache_t, kvpool_reservation_t) -> kvpool_status_t =
    super::kvpool_cache_cancel_reservation_later;
const _: unsafe extern "C" fn(kvpool_cache_t, *mut u32) -> kvpool_status_t =
    super::kvpool_cache_cancel_reservations;
const _: unsafe extern "C" fn(kvpool_cache_t, *mut u32) -> kvpool_status_t =
    super::kvpool_cache_reservations;
const _: unsafe extern "C" fn(
    kvpool_cache_t,
    *const kvpool_step_item_t,
    usize,
    *const u32,
    usize,
    *mut kvpool_step_t,
) -> kvpool_status_t = super::kvpool_cache_reserve;
const _: unsafe extern "C" fn(
    kvpool_cache_t,
    kvpool_step_t,
    *mut kvpool_step_view_t,
    usize,
) -> kvpool_status_t = super::kvpool_step_get_view;
const _: unsafe extern "C" fn(
    kvpool_cache_t,
    kvpool_step_t,
    u32,
    *mut kvpool_step_group_t,
    usize,
) -> kvpool_status_t = super::kvpool_step_get_group;
const _: unsafe extern "C" fn(
    kvpool_cache_t,
    kvpool_step_t,
    u32,
    *mut kvpool_step_csr_t,
    usize,
) -> kvpool_status_t = super::kvpool_step_get_csr;
const _: unsafe extern "C" fn(
    kvpool_cache_t,
    kvpool_step_t,
    u32,
    *const kvpool_tensor_t,
    *const kvpool_tensor_t,
) -> kvpool_status_t = super::kvpool_step_append;
const _: unsafe extern "C" fn(kvpool_cache_t, kvpool_step_t, u32) -> kvpool_status_t =
    super::kvpool_step_mark_appended;
const _: unsafe extern "C" fn(kvpool_cache_t, kvpool_step_t) -> kvpool_status_t =
    super::kvpool_step_mark_all_appended;
const _: unsafe extern "C" fn(
    kvpool_cache_t,
    kvpool_step_t,
    u32,
    *const kvpool_tensor_t,
    *const kvpool_tensor_t,
    *const kvpool_attend_options_t,
) -> kvpool_status_t = super::kvpool_step_attend;
const _: unsafe extern "C" fn(kvpool_cache_t, kvpool_step_t) -> kvpool_status_t =
    super::kvpool_step_prepare;
const _: unsafe extern "C" fn(
    kvpool_cache_t,
    kvpool_step_t,
    u32,
    kvpool_tables_t,
    *mut kvpool_step_device_t,
    usize,
) -> kvpool_status_t = super::kvpool_step_get_device;
const _: unsafe extern "C" fn(kvpool_cache_t, kvpool_step_t) -> kvpool_status_t =
    super::kvpool_step_commit;
const _: unsafe extern "C" fn(kvpool_cache_t, kvpool_step_t) -> kvpool_status_t =
    super::kvpool_step_cancel;
const _: unsafe extern "C" fn(kvpool_cache_t, kvpool_step_t) -> kvpool_status_t =
    super::kvpool_step_cancel_later;
const _: unsafe extern "C" fn(kvpool_cache_t, *mut u32) -> kvpool_status_t =
    super::kvpool_cache_cancel_step;
const _: unsafe extern "C" fn(
    kvpool_cache_t,
    *const u32,
    usize,
    *const kvpool_namespace_t,
    *mut kvpool_probe_t,
    usize,
) -> kvpool_status_t = super::kvpool_cache_probe;
const _: unsafe extern "C" fn(kvpool_cache_t, kvpool_seq_t, *mut kvpool_pin_t) -> kvpool_status_t =
    super::kvpool_cache_pin;
const _: unsafe extern "C" fn(kvpool_cache_t, kvpool_pin_t) -> kvpool_status_t =
    super::kvpool_cache_unpin;
const _: unsafe extern "C" fn(kvpool_cache_t, kvpool_pin_t) -> kvpool_status_t =
    super::kvpool_cache_unpin_later;
const _: unsafe extern "C" fn(
    kvpool_cache_t,
    kvpool_seq_t,
    *const kvpool_retention_t,
    usize,
) -> kvpool_status_t = super::kvpool_cache_set_retention;
const _: unsafe extern "C" fn(kvpool_cache_t, u64) -> kvpool_status_t =
    super::kvpool_cache_set_time_ms;
const _: unsafe extern "C" fn(kvpool_cache_t, u64) -> kvpool_status_t =
    super::kvpool_cache_set_epoch;
const _: unsafe extern "C" fn(kvpool_cache_t) -> kvpool_status_t = super::kvpool_cache_clear_cached;
const _: unsafe extern "C" fn(
    kvpool_cache_t,
    *const ::core::ffi::c_char,
    *const kvpool_save_options_t,
    *mut kvpool_saved_t,
    usize,
) -> kvpool_status_t = super::kvpool_cache_save_prefixes;
const _: unsafe extern "C" fn(
    kvpool_cache_t,
    *const ::core::ffi::c_char,
    *const kvpool_restore_options_t,
    *mut kvpool_restored_t,
    usize,
) -> kvpool_status_t = super::kvpool_cache_restore_prefixes;
const _: unsafe extern "C" fn(
    kvpool_cache_t,
    kvpool_seq_t,
    *const ::core::ffi::c_char,
    *const kvpool_save_options_t,
    *mut kvpool_saved_t,
    usize,
) -> kvpool_status_t = super::kvpool_cache_save_sequence;
const _: unsafe extern "C" fn(
    kvpool_cache_t,
    *const ::core::ffi::c_char,
    *const kvpool_restore_options_t,
    *mut kvpool_begun_t,
    usize,
) -> kvpool_status_t = super::kvpool_cache_restore_sequence;
const _: unsafe extern "C" fn(
    kvpool_cache_t,
    kvpool_event_fn,
    *mut ::core::ffi::c_void,
    *mut u64,
    *mut u64,
) -> kvpool_status_t = super::kvpool_cache_poll_events;
const _: unsafe extern "C" fn(
    kvpool_cache_t,
    kvpool_event_fn,
    *mut ::core::ffi::c_void,
    *mut u64,
) -> kvpool_status_t = super::kvpool_cache_resync_events;
const _: unsafe extern "C" fn(
    kvpool_cache_t,
    *const kvpool_namespace_t,
    *mut u32,
) -> kvpool_status_t = super::kvpool_cache_namespace_numbers;
const _: unsafe extern "C" fn(kvpool_cache_t, *mut kvpool_stats_t, usize) -> kvpool_status_t =
    super::kvpool_cache_stats;
const _: unsafe extern "C" fn(
    kvpool_cache_t,
    u32,
    *mut kvpool_group_stats_t,
    usize,
) -> kvpool_status_t = super::kvpool_cache_group_stats;
const _: unsafe extern "C" fn(kvpool_cache_t, *mut u64) -> kvpool_status_t =
    super::kvpool_cache_evictions;
const _: unsafe extern "C" fn(kvpool_cache_t) -> kvpool_status_t = super::kvpool_cache_check;
const _: unsafe extern "C" fn(kvpool_cache_t, *mut u64) -> kvpool_status_t =
    super::kvpool_cache_digest;
const _: unsafe extern "C" fn(
    kvpool_cache_t,
    kvpool_seq_t,
    u32,
    kvpool_part_t,
    u32,
    u32,
    *mut f32,
    usize,
) -> kvpool_status_t = super::kvpool_cache_export;
const _: unsafe extern "C" fn(
    kvpool_cache_t,
    u64,
    *mut ::core::ffi::c_void,
    usize,
) -> kvpool_status_t = super::kvpool_cache_read;
const _: unsafe extern "C" fn(
    kvpool_cache_t,
    kvpool_seq_t,
    u32,
    u32,
    *mut kvpool_block_t,
) -> kvpool_status_t = super::kvpool_cache_block_of;
const _: unsafe extern "C" fn(kvpool_cache_t, kvpool_block_t, *mut u32) -> kvpool_status_t =
    super::kvpool_cache_block_refs;
