//! A configuration, and overrides behind a line of "--": whatever it is, it is refused in words, or
//! becomes a plan; and the effective configuration says the same when it is read again.

use std::path::Path;

use kvpool::config::parse;
use kvpool::plan::Plan;
use libfuzzer_sys::Corpus;

use crate::scratch::names_a_device;

/// Runs one input.
pub(super) fn run(input: &[u8]) -> Corpus {
    let Ok(text) = std::str::from_utf8(input) else { return Corpus::Reject };
    if names_a_device(input) {
        return Corpus::Reject;
    }
    let (text, overrides) = text.split_once("\n--\n").unwrap_or((text, ""));
    let overrides: Vec<String> = overrides.lines().map(str::to_owned).collect();
    let source = match parse(text, Path::new("fuzz.toml"), &overrides) {
        Ok(source) => source,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return Corpus::Keep;
        }
    };
    let effective = toml::to_string_pretty(&source.config).expect("what was read can be written");
    let again = parse(&effective, Path::new("fuzz.toml"), &[]).unwrap_or_else(|error| {
        panic!("the effective configuration is refused: {error}\n{effective}")
    });
    assert_eq!(again.config, source.config, "{effective}");
    for (_, config) in source.variants().iter().take(4) {
        match Plan::new(config, &source.geometry) {
            Ok(plan) => {
                // Text and numbers of plans that no machine has memory for, too.
                if plan.geometry.num_layers < 512 {
                    let _ = plan.explain();
                }
                let _ = plan.cpu_workspace_bytes(4);
                let _ = plan.cuda_workspace();
            }
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    }
    Corpus::Keep
}
