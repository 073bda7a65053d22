//! One file a target.

mod capi;
mod config;
mod hf_config;
mod model_file;
mod restore;
mod trace;

use arbitrary::{Arbitrary, Unstructured};
use libfuzzer_sys::Corpus;

use super::Target;

/// The targets by name.
pub(crate) const ALL: [(&str, Target); 7] = [
    ("capi", |input| structured(input, capi::run)),
    ("config", config::run),
    ("hf_config", hf_config::run),
    ("model_file", model_file::run),
    ("restore", |input| structured(input, restore::run)),
    ("shapes", |_| shapes()),
    ("trace", trace::run),
];

/// Runs a target whose input is a value.
fn structured<T: for<'a> Arbitrary<'a>>(input: &[u8], run: fn(&T)) -> Corpus {
    match T::arbitrary_take_rest(Unstructured::new(input)) {
        Ok(value) => {
            run(&value);
            Corpus::Keep
        }
        Err(_) => Corpus::Reject,
    }
}

/// Not a target to fuzz: whether each cache that `capi` and `restore` choose from can be opened, so
/// that no part of their inputs is spent on nothing. To be run once, on any file.
fn shapes() -> Corpus {
    capi::open_all();
    restore::open_all();
    Corpus::Keep
}

/// Every combination of one choice of each of so many.
fn combinations<const N: usize>(counts: [u8; N]) -> impl Iterator<Item = [u8; N]> {
    let all: u32 = counts.iter().map(|count| u32::from(*count)).product();
    (0..all).map(move |number| {
        let mut rest = number;
        counts.map(|count| {
            let choice = rest % u32::from(count);
            rest /= u32::from(count);
            u8::try_from(choice).expect("below a count")
        })
    })
}
