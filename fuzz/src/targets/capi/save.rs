//! The header's section "Save and restore".

use std::ffi::{CStr, CString};
use std::path::PathBuf;
use std::ptr::null;
use std::sync::LazyLock;

use kvpool::capi::*;

use super::handles::Handles;
use super::input::Broken;
use super::zeroed;
use crate::scratch::Scratch;

/// Where saves go, of this process.
pub(super) fn file() -> PathBuf {
    Scratch::path_of("capi")
}

fn path() -> &'static CStr {
    static PATH: LazyLock<CString> = LazyLock::new(|| {
        let path = file();
        CString::new(path.to_str().expect("plain")).expect("no NUL")
    });
    &PATH
}

pub(super) fn save_prefixes(cache: kvpool_cache_t, unsalted_only: bool) -> kvpool_status_t {
    let mut options: kvpool_save_options_t = zeroed();
    options.size = size_of::<kvpool_save_options_t>();
    options.unsalted_only = unsalted_only.into();
    let mut out: kvpool_saved_t = zeroed();
    let size = size_of::<kvpool_saved_t>();
    // SAFETY: a C string, options, a place and its size.
    unsafe { kvpool_cache_save_prefixes(cache, path().as_ptr(), &options, &mut out, size) }
}

pub(super) fn restore_prefixes(cache: kvpool_cache_t) -> kvpool_status_t {
    let mut out: kvpool_restored_t = zeroed();
    let size = size_of::<kvpool_restored_t>();
    // SAFETY: a C string, no options, a place and its size.
    unsafe { kvpool_cache_restore_prefixes(cache, path().as_ptr(), null(), &mut out, size) }
}

pub(super) fn save_sequence(
    cache: kvpool_cache_t,
    seq: kvpool_seq_t,
    broken: Broken,
) -> kvpool_status_t {
    let mut out: kvpool_saved_t = zeroed();
    let place = broken.place(&mut out);
    let size = broken.size(size_of::<kvpool_saved_t>());
    // SAFETY: a C string, no options, a place or NULL; any size but the place's is refused.
    unsafe { kvpool_cache_save_sequence(cache, seq, path().as_ptr(), null(), place, size) }
}

pub(super) fn restore_sequence(
    cache: kvpool_cache_t,
    key: Option<u8>,
    max_len: u8,
    broken: Broken,
    handles: &mut Handles,
) -> kvpool_status_t {
    let mut options: kvpool_restore_options_t = zeroed();
    options.size = broken.size(size_of::<kvpool_restore_options_t>());
    options.key = key.unwrap_or(0).into();
    options.has_key = key.is_some().into();
    options.max_len = max_len.into();
    let mut out: kvpool_begun_t = zeroed();
    let size = size_of::<kvpool_begun_t>();
    let path = path().as_ptr();
    // SAFETY: a C string, options whose size is refused if it is not theirs, a place and its size.
    let status = unsafe { kvpool_cache_restore_sequence(cache, path, &options, &mut out, size) };
    if status == KVPOOL_OK {
        handles.seqs.push(out.sequence);
    }
    status
}
