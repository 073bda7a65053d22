//! The header's section "Config".

use std::ffi::c_char;
use std::sync::Arc;

use super::bindings::{kvpool_config_t, kvpool_status_t, kvpool_text_form_t};
use super::caller::Caller;
use super::failure::{CallError, Failure};
use super::object::guarded;
use super::registry::Registry;
use super::text::{Form, TextOut, json};
use crate::config::{self, Config, Source};

/// The configs of the process.
pub(super) static CONFIGS: Registry<Source> = Registry::new();

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpool_config_load(
    path: *const c_char,
    overrides: *const *const c_char,
    num_overrides: usize,
    out: *mut kvpool_config_t,
) -> kvpool_status_t {
    // SAFETY: the caller keeps to kvpool.h.
    let caller = unsafe { Caller::trusted() };
    guarded(|| {
        let path = caller.path("path", path)?;
        let overrides = caller.texts("overrides", overrides, num_overrides)?;
        let out = caller.place("out", out)?;
        let source = config::load(path, &overrides)?;
        out.set(CONFIGS.insert(Arc::new(source))?);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpool_config_parse(
    text: *const c_char,
    text_len: usize,
    name: *const c_char,
    overrides: *const *const c_char,
    num_overrides: usize,
    out: *mut kvpool_config_t,
) -> kvpool_status_t {
    // SAFETY: the caller keeps to kvpool.h.
    let caller = unsafe { Caller::trusted() };
    guarded(|| {
        let text = caller.slice("text", text.cast::<u8>(), text_len)?;
        let text = std::str::from_utf8(text)
            .map_err(|_| CallError::BadArgument { what: "text", problem: "is not UTF-8" })?;
        let name = caller.path("name", name)?;
        let overrides = caller.texts("overrides", overrides, num_overrides)?;
        let out = caller.place("out", out)?;
        let source = config::parse(text, name, &overrides)?;
        out.set(CONFIGS.insert(Arc::new(source))?);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn kvpool_config_destroy(config: kvpool_config_t) -> kvpool_status_t {
    guarded(|| {
        CONFIGS.remove(config)?;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpool_config_text(
    config: kvpool_config_t,
    form: kvpool_text_form_t,
    buffer: *mut c_char,
    capacity: usize,
    needed: *mut usize,
) -> kvpool_status_t {
    // SAFETY: the caller keeps to kvpool.h.
    let caller = unsafe { Caller::trusted() };
    guarded(|| {
        let source = CONFIGS.get(config)?;
        let text = match Form::of(form)? {
            Form::Text => toml_of(&source.config)?,
            Form::Json => json(&source.config)?,
        };
        TextOut { buffer, capacity, needed }.put(&caller, &text)
    })
}

/// A configuration as it would be written in a file.
pub(super) fn toml_of(config: &Config) -> Result<String, Failure> {
    toml::to_string_pretty(config).map_err(|error| Failure::Text(error.to_string()))
}
