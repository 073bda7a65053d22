//! The repository's own rules: which folder may use which, and where `unsafe` may stand.

use std::fs;
use std::path::{Path, PathBuf};

/// From the bottom to the top: a folder may use those before it.
const LAYERS: [&str; 11] =
    ["units", "error", "config", "plan", "device", "pool", "cache", "capi", "bench", "job", "cli"];

/// Every Rust file under a folder.
fn rust_files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            rust_files(&path, found);
        } else if path.extension().is_some_and(|ext| ext == "rs") {
            found.push(path);
        }
    }
}

/// Path below `src/`, and text without comments.
fn sources() -> Vec<(String, String)> {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    rust_files(&src, &mut files);
    assert!(files.len() > 20, "only {} files found", files.len());
    files
        .iter()
        .map(|path| {
            let text = fs::read_to_string(path).expect("a file");
            let code: Vec<&str> =
                text.lines().map(|line| line.split("//").next().unwrap_or_default()).collect();
            let name = path.strip_prefix(&src).expect("below src").display().to_string();
            (name.replace('\\', "/"), code.join("\n"))
        })
        .collect()
}

#[test]
fn imports_go_one_way() {
    let mut edges = 0;
    for (name, code) in sources() {
        let own = name.split(['/', '.']).next().unwrap_or_default();
        let Some(rank) = LAYERS.iter().position(|layer| *layer == own) else {
            continue;
        };
        for (other_rank, other) in LAYERS.iter().enumerate() {
            if code.contains(&format!("crate::{other}::"))
                || code.contains(&format!("crate::{other};"))
            {
                assert!(other_rank <= rank, "{name} uses crate::{other}, which lies above it");
                edges += usize::from(other_rank < rank);
            }
        }
        assert!(!code.contains("use crate::{"), "{name}: name the folder in each `use crate::`");
    }
    assert!(edges > 20, "only {edges} uses found: does the test still see them?");
}

#[test]
fn unsafe_stands_in_device_and_capi_only() {
    let mut seen = 0;
    for (name, code) in sources() {
        let uses =
            code.contains("unsafe {") || code.contains("unsafe fn") || code.contains("unsafe impl");
        assert!(!uses || name.starts_with("device/") || name.starts_with("capi/"), "{name}");
        seen += usize::from(uses);
    }
    assert!(seen > 0, "the CPU device has some: does the test still see it?");
}

#[test]
fn the_library_names_no_crate_of_the_command_line() {
    for (name, code) in sources() {
        let outside = !name.starts_with("cli/") && name != "main.rs";
        for krate in ["clap::", "indicatif::", "comfy_table::"] {
            assert!(!(outside && code.contains(krate)), "{name} uses {krate}");
        }
    }
}
