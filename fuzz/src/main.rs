//! The fuzz targets, in one program, so that a build generates code and links once. `KVPOOL_FUZZ`
//! names the target that runs.

#![no_main]

mod scratch;
mod targets;

use std::sync::LazyLock;

use libfuzzer_sys::{Corpus, fuzz_target};

/// A target, given an input; whether the input is one to go on from.
type Target = fn(&[u8]) -> Corpus;

static TARGET: LazyLock<Target> = LazyLock::new(|| {
    let name = std::env::var("KVPOOL_FUZZ").unwrap_or_default();
    let found = targets::ALL.iter().find(|(known, _)| *known == name);
    let (_, target) =
        found.unwrap_or_else(|| panic!("KVPOOL_FUZZ={name}: there is no such target"));
    *target
});

fuzz_target!(|input: &[u8]| -> Corpus { TARGET(input) });
