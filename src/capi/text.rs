//! Texts that are copied into the caller's buffer.

use std::ffi::c_char;

use super::bindings::{KVPOOL_JSON, KVPOOL_TEXT, kvpool_text_form_t};
use super::caller::Caller;
use super::failure::{CallError, Failure};

/// How a text is asked for.
pub(super) enum Form {
    Text,
    Json,
}

impl Form {
    pub(super) fn of(form: kvpool_text_form_t) -> Result<Self, CallError> {
        match form {
            KVPOOL_TEXT => Ok(Self::Text),
            KVPOOL_JSON => Ok(Self::Json),
            _ => Err(CallError::BadArgument {
                what: "form",
                problem: "is neither KVPOOL_TEXT nor KVPOOL_JSON",
            }),
        }
    }
}

/// Where a text goes.
pub(super) struct TextOut {
    pub(super) buffer: *mut c_char,
    pub(super) capacity: usize,
    pub(super) needed: *mut usize,
}

impl TextOut {
    /// Copies a text and its final NUL, or says how much room it takes.
    pub(super) fn put(self, caller: &Caller, text: &str) -> Result<(), Failure> {
        let Self { buffer, capacity, needed } = self;
        // A NUL within the text would end it early; no text of ours has one.
        let wanted = text.len() + 1;
        if buffer.is_null() && capacity == 0 {
            caller.place("needed", needed)?.set(wanted);
            return Ok(());
        }
        let needed = caller.maybe_place("needed", needed)?;
        let buffer = caller.slice_mut("buffer", buffer, capacity)?;
        let Some((end, chars)) = buffer.get_mut(..wanted).and_then(<[c_char]>::split_last_mut)
        else {
            return Err(CallError::BufferTooSmall { wanted, capacity }.into());
        };
        for (char, byte) in chars.iter_mut().zip(text.bytes()) {
            *char = c_char::from_ne_bytes([byte]);
        }
        *end = 0;
        needed.set(wanted);
        Ok(())
    }
}

/// A value as JSON.
pub(super) fn json<T: serde::Serialize>(value: &T) -> Result<String, Failure> {
    serde_json::to_string_pretty(value).map_err(|error| Failure::Text(error.to_string()))
}
