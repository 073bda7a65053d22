//! Decode steps through the C interface, for `kvpool bench capi`.
//!
//! The functions are called through pointers that the compiler cannot see through, as a C program
//! calls those of a library: what is measured is the border, not what inlining would make of it.

use std::hint::black_box;
use std::ptr::null;

use super::bindings::*;
use super::config::{kvpool_config_destroy, kvpool_config_parse};
use super::last_error::kvpool_last_error;
use super::open::{kvpool_cache_close, kvpool_cache_open};
use super::plan::{kvpool_plan_destroy, kvpool_plan_new};
use super::sequence::{kvpool_cache_begin, kvpool_cache_release};
use super::step::{kvpool_cache_reserve, kvpool_step_commit, kvpool_step_mark_appended};

type Reserve = unsafe extern "C" fn(
    kvpool_cache_t,
    *const kvpool_step_item_t,
    usize,
    *const u32,
    usize,
    *mut kvpool_step_t,
) -> kvpool_status_t;
type MarkAppended = extern "C" fn(kvpool_cache_t, kvpool_step_t, u32) -> kvpool_status_t;
type Commit = extern "C" fn(kvpool_cache_t, kvpool_step_t) -> kvpool_status_t;

/// What the C interface said when it failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct SaidNo(pub String);

fn checked(status: kvpool_status_t) -> Result<(), SaidNo> {
    if status == KVPOOL_OK {
        return Ok(());
    }
    // SAFETY: the struct consists of numbers and of bytes.
    let mut error: kvpool_error_t = unsafe { std::mem::zeroed() };
    // SAFETY: a place for an error, and its size.
    unsafe { kvpool_last_error(&raw mut error, size_of::<kvpool_error_t>()) };
    let bytes: Vec<u8> =
        error.message.iter().map(|c| c.to_ne_bytes()[0]).take_while(|b| *b != 0).collect();
    Err(SaidNo(String::from_utf8_lossy(&bytes).into_owned()))
}

/// Running sequences of a cache with one layer, behind C handles.
#[derive(Debug)]
pub struct Decode {
    cache: kvpool_cache_t,
    /// One token of each sequence, or, in its first step, its prompt.
    items: Vec<kvpool_step_item_t>,
    step: kvpool_step_t,
    reserve: Reserve,
    mark_appended: MarkAppended,
    commit: Commit,
}

impl Decode {
    /// Opens the cache of a configuration.
    ///
    /// # Errors
    /// What the C interface says.
    pub fn open(toml: &str) -> Result<Self, SaidNo> {
        let zero = [0, 0];
        let mut config = kvpool_config_t { word: zero };
        let (text, name) = (toml.as_ptr().cast(), c"bench".as_ptr());
        // SAFETY: a text and its length, a C string, no overrides, a place for a handle.
        let status =
            unsafe { kvpool_config_parse(text, toml.len(), name, null(), 0, &raw mut config) };
        checked(status)?;
        let mut plan = kvpool_plan_t { word: zero };
        // SAFETY: a place for a handle.
        let planned = checked(unsafe { kvpool_plan_new(config, &raw mut plan) });
        checked(kvpool_config_destroy(config))?;
        planned?;
        let mut cache = kvpool_cache_t { word: zero };
        // SAFETY: a place for a handle.
        let opened = checked(unsafe { kvpool_cache_open(plan, &raw mut cache) });
        checked(kvpool_plan_destroy(plan))?;
        opened?;
        Ok(Self {
            cache,
            items: Vec::new(),
            step: kvpool_step_t { word: zero },
            reserve: black_box(kvpool_cache_reserve),
            mark_appended: black_box(kvpool_step_mark_appended),
            commit: black_box(kvpool_step_commit),
        })
    }

    /// Begins a sequence, and appends its prompt.
    ///
    /// # Errors
    /// What the C interface says.
    pub fn begin(&mut self, prompt: &[u32]) -> Result<(), SaidNo> {
        let size = size_of::<kvpool_begun_t>();
        let sequence = kvpool_seq_t { word: [0, 0] };
        let mut begun = kvpool_begun_t { size, sequence, cached_len: 0, limit: 0 };
        let cache = self.cache;
        // SAFETY: a prompt and its length, no options, a place and its size.
        let status = unsafe {
            kvpool_cache_begin(cache, prompt.as_ptr(), prompt.len(), null(), &raw mut begun, size)
        };
        checked(status)?;
        // Prompts are short.
        let num_tokens = u32::try_from(prompt.len()).unwrap_or(u32::MAX) - begun.cached_len;
        let items = [kvpool_step_item_t { sequence: begun.sequence, num_tokens, reserved: 0 }];
        let mut step = kvpool_step_t { word: [0, 0] };
        // SAFETY: items and their number, no tokens, a place for a handle.
        let status =
            unsafe { kvpool_cache_reserve(cache, items.as_ptr(), 1, null(), 0, &raw mut step) };
        checked(status)?;
        checked(kvpool_step_mark_appended(cache, step, 0))?;
        checked(kvpool_step_commit(cache, step))?;
        self.items.push(kvpool_step_item_t { num_tokens: 1, ..items[0] });
        Ok(())
    }

    /// Reserves one token of each sequence. `[num_seqs]`
    ///
    /// # Errors
    /// What the C interface says.
    pub fn reserve(&mut self, tokens: &[u32]) -> Result<(), SaidNo> {
        let (items, step) = (&self.items, &raw mut self.step);
        // SAFETY: items and tokens and their numbers, a place for a handle.
        checked(unsafe {
            (self.reserve)(
                self.cache,
                items.as_ptr(),
                items.len(),
                tokens.as_ptr(),
                tokens.len(),
                step,
            )
        })
    }

    /// Marks the step as appended, and commits it.
    ///
    /// # Errors
    /// What the C interface says.
    pub fn commit(&mut self) -> Result<(), SaidNo> {
        checked((self.mark_appended)(self.cache, self.step, 0))?;
        checked((self.commit)(self.cache, self.step))
    }

    /// Releases all sequences.
    ///
    /// # Errors
    /// What the C interface says.
    pub fn release(&mut self) -> Result<(), SaidNo> {
        let mut items = self.items.drain(..);
        items.try_for_each(|item| checked(kvpool_cache_release(self.cache, item.sequence)))
    }
}

impl Drop for Decode {
    fn drop(&mut self) {
        // There is nobody to tell.
        let _ = kvpool_cache_close(self.cache);
    }
}
