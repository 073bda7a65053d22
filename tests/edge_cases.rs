//! Every number of `edge_cases.md` has a test that carries it.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Groups of edge cases.
const GROUPS: u32 = 64;

/// What comes with saving and restoring (`src/cache/save/`), and not before.
const OF_SAVING: [u32; 2] = [54, 55];

fn source_files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        let is_source =
            |ext: &std::ffi::OsStr| ["rs", "c", "cpp", "hpp", "h"].iter().any(|e| ext == *e);
        if path.is_dir() {
            source_files(&path, found);
        } else if path.extension().is_some_and(is_source) {
            found.push(path);
        }
    }
}

/// The names of functions with a number in a source: after `fn` in Rust, after `void` or a macro's
/// parenthesis in C and C++.
fn numbered(text: &str) -> Vec<(u32, String)> {
    let mut names = Vec::new();
    for (at, _) in text.match_indices("edge_") {
        let before = text[..at].trim_end_matches(' ');
        let is_definition = ["fn", "void", "(", "int"].iter().any(|word| before.ends_with(word));
        let name: String =
            text[at..].chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect();
        let number = name.split('_').nth(1).and_then(|number| number.parse().ok());
        if let (true, Some(number)) = (is_definition, number) {
            names.push((number, name));
        }
    }
    names
}

/// All tests by number, with the file that each lies in.
fn tests() -> BTreeMap<u32, Vec<(String, PathBuf)>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    for folder in ["tests", "src", "csrc/tests"] {
        source_files(&root.join(folder), &mut files);
    }
    let mut tests: BTreeMap<u32, Vec<(String, PathBuf)>> = BTreeMap::new();
    for path in files {
        let text = fs::read_to_string(&path).expect("a file");
        for (number, name) in numbered(&text) {
            tests.entry(number).or_default().push((name, path.clone()));
        }
    }
    tests
}

#[test]
fn every_group_has_a_test() {
    let tests = tests();
    let saves = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/cache/save").exists();
    let missing: Vec<u32> = (1..=GROUPS)
        .filter(|number| !tests.contains_key(number))
        .filter(|number| saves || !OF_SAVING.contains(number))
        .collect();
    assert!(missing.is_empty(), "no test is named edge_NN_… for {missing:?}");
    let beyond: Vec<_> = tests.keys().filter(|number| !(1..=GROUPS).contains(*number)).collect();
    assert!(beyond.is_empty(), "edge_cases.md ends before {beyond:?}");
    for (number, tests) in &tests {
        println!("{number}: {}", tests.len());
    }
}

#[test]
fn the_list_has_every_number_once() {
    let list = include_str!("edge_cases.md");
    let numbers: Vec<u32> = list
        .lines()
        .filter_map(|line| line.strip_prefix("| ")?.split(" | ").next()?.parse().ok())
        .collect();
    assert_eq!(numbers, (1..=GROUPS).collect::<Vec<_>>());
}

#[test]
fn a_number_that_is_missing_would_be_seen() {
    let found = numbered("fn edge_17_a() {}\nlet x = edge_18_b();\nstatic void edge_19_c(void)");
    let numbers: Vec<u32> = found.iter().map(|(number, _)| *number).collect();
    assert_eq!(numbers, [17, 19]);
}
