//! Every number of `edge_cases.md` has a test that carries it, and that runs.
//!
//! What counts is a function `edge_NN_…`
//!
//! - in a module that the library or a test program compiles without features, with `#[test]`
//!   directly in front of it;
//! - the same with `#[ignore = "started by NAME"]`, where the test NAME runs this program again and
//!   its arguments select it;
//! - of a test program without the harness, or of C or C++, that its `main` calls; of C and C++ a
//!   Rust test must name the program's file.
//!
//! A Rust test that does nothing but start such programs does not count: they do.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Groups of edge cases.
const GROUPS: u32 = 64;

/// What cargo compiles: the library, and the tests that need no feature.
const ROOTS: [&str; 4] = ["src/lib.rs", "tests/main.rs", "tests/no_alloc.rs", "tests/no_memory.rs"];

/// Conditions that hold on the systems on which all of this runs.
const HERE: [&str; 2] = ["#[cfg(unix)]", "#[cfg(target_os = \"linux\")]"];

/// A module's source, and its path from the root: `cuda::edges`.
struct Module {
    path: String,
    text: String,
}

/// A function of a source.
#[derive(Clone, Debug)]
struct Function {
    name: String,
    /// Directly in front of it, one a line.
    attributes: Vec<String>,
    /// From its first brace to its last.
    body: String,
}

/// A source without its comments. A line of Rust that has `//` in a text loses what is behind it,
/// which is in no test's way; a comment between `/*` and `*/` begins its line there.
fn without_comments(text: &str, is_rust: bool) -> String {
    let mut left = String::new();
    let mut in_block = false;
    for line in text.lines() {
        let mut rest = line;
        loop {
            if in_block {
                let Some(end) = rest.find("*/") else { break };
                rest = &rest[end + 2..];
                in_block = false;
            }
            let begins = rest.find("/*").filter(|at| !is_rust || rest[..*at].trim().is_empty());
            let slashes = rest.find("//").filter(|at| begins.is_none_or(|begins| *at < begins));
            let end = slashes.or(begins).unwrap_or(rest.len());
            left.push_str(&rest[..end]);
            if slashes.is_some() || begins.is_none() {
                break;
            }
            rest = &rest[end + 2..];
            in_block = true;
        }
        left.push('\n');
    }
    left
}

/// The functions of a source that is formatted: each ends with a brace as far in as its first line.
fn functions(text: &str, is_rust: bool) -> Vec<Function> {
    let text = without_comments(text, is_rust);
    let lines: Vec<&str> = text.lines().collect();
    let mut found = Vec::new();
    for (at, line) in lines.iter().enumerate() {
        let code = line.trim_start();
        let words = if is_rust { "fn " } else { "void " };
        let Some(rest) = ["", "static ", "pub ", "pub(crate) ", "unsafe "]
            .iter()
            .find_map(|before| code.strip_prefix(before)?.strip_prefix(words))
            .or_else(|| code.strip_prefix("int main(").map(|_| "main("))
        else {
            continue;
        };
        let name: String =
            rest.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect();
        let end = format!("{}}}", " ".repeat(line.len() - code.len()));
        // Of one that is a single line there is none that another could call.
        let is_open = line.trim_end().ends_with(['{', '(']);
        let length = lines[at + 1..].iter().take_while(|line| is_open && **line != end).count();
        let body = lines[at + 1..][..length].join("\n");
        let is_attribute = |line: &&&str| line.trim_start().starts_with("#[");
        let attributes = lines[..at].iter().rev().take_while(is_attribute);
        let attributes = attributes.map(|line| line.trim().to_owned()).collect();
        found.push(Function { name, attributes, body });
    }
    found
}

/// The numbers of `edge_02_03_what_it_is`; none of other names.
fn numbers(name: &str) -> Vec<u32> {
    let Some(rest) = name.strip_prefix("edge_") else { return Vec::new() };
    rest.split('_').map_while(|part| part.parse().ok()).collect()
}

/// Whether a text calls a function, rather than naming another whose name begins or ends alike.
fn calls(body: &str, name: &str) -> bool {
    body.match_indices(name).any(|(at, _)| {
        let before = body[..at].chars().next_back();
        body[at + name.len()..].starts_with('(')
            && !before.is_some_and(|c| c.is_ascii_alphanumeric() || c == '_')
    })
}

/// Puts a source and the modules that it declares into a list. Those that need a feature, another
/// compiler flag or another machine are left out.
fn walk(file: &Path, path: &str, is_root: bool, found: &mut Vec<Module>) {
    let text = fs::read_to_string(file).unwrap_or_else(|error| panic!("{file:?}: {error}"));
    let parent = file.parent().expect("a folder");
    let is_mod = is_root || file.ends_with("mod.rs");
    let folder = if is_mod { parent.to_owned() } else { file.with_extension("") };
    let lines: Vec<&str> = text.lines().collect();
    for (at, line) in lines.iter().enumerate() {
        let name = line
            .strip_prefix("pub mod ")
            .or_else(|| line.strip_prefix("pub(crate) mod "))
            .or_else(|| line.strip_prefix("pub(super) mod "))
            .or_else(|| line.strip_prefix("mod "))
            .and_then(|rest| rest.strip_suffix(';'));
        let before: Vec<_> =
            lines[..at].iter().rev().take_while(|line| line.starts_with("#[")).collect();
        let is_elsewhere = |line: &&str| {
            let other = line.starts_with("#[cfg") && *line != "#[cfg(test)]";
            other || line.starts_with("#[path")
        };
        let Some(name) = name.filter(|_| !before.iter().any(|line| is_elsewhere(line))) else {
            continue;
        };
        let file = folder.join(name).with_extension("rs");
        let file = if file.exists() { file } else { folder.join(name).join("mod.rs") };
        let path = if path.is_empty() { name.to_owned() } else { format!("{path}::{name}") };
        walk(&file, &path, false, found);
    }
    found.push(Module { path: path.to_owned(), text });
}

/// The texts in quotation marks of a source.
fn quoted(text: &str) -> Vec<&str> {
    text.split('"').skip(1).step_by(2).collect()
}

/// Whether a test that is ignored is run by another one, which its attribute names.
fn is_started(function: &Function, path: &str, by_name: &BTreeMap<String, Function>) -> bool {
    let reason =
        function.attributes.iter().find_map(|line| line.strip_prefix("#[ignore = \"started by "));
    let Some(starter) = reason.and_then(|reason| reason.strip_suffix("\"]")) else { return false };
    let Some(starter) = by_name.get(starter) else { return false };
    let runs = starter.attributes == ["#[test]"] && starter.body.contains("\"--ignored\"");
    let texts = quoted(&starter.body);
    let skips = |text: &&str| text.strip_prefix("--skip=").is_some_and(|part| path.contains(part));
    runs && texts.iter().any(|text| path.starts_with(text) && text.contains("::"))
        && !texts.iter().any(skips)
}

/// The names of the tests in a program that is made of these modules.
fn tests_of_modules(modules: &[Module]) -> Vec<String> {
    let mut all = Vec::new();
    for module in modules {
        for function in functions(&module.text, true) {
            let between = if module.path.is_empty() { "" } else { "::" };
            all.push((format!("{}{between}{}", module.path, function.name), function));
        }
    }
    let by_name: BTreeMap<String, Function> = all.iter().cloned().collect();
    let main = by_name.get("main").map(|main| main.body.clone()).unwrap_or_default();
    let mut names = Vec::new();
    for (path, function) in all {
        let is_test = function.attributes.iter().any(|line| line == "#[test]");
        let is_ignored = function.attributes.iter().any(|line| line.starts_with("#[ignore"));
        let body = &function.body;
        let is_starter = body.contains("\"csrc/tests/capi/") || calls(body, "again");
        // Compiled only under a condition that does not hold everywhere: a number is not to hang on
        // it.
        let is_elsewhere =
            |line: &String| line.starts_with("#[cfg") && !HERE.contains(&line.as_str());
        if function.attributes.iter().any(is_elsewhere) {
            continue;
        }
        let runs = match (is_test, is_ignored) {
            (true, false) => !is_starter,
            (true, true) => is_started(&function, &path, &by_name),
            (false, _) => calls(&main, &function.name) && function.name != "main",
        };
        if runs {
            names.push(function.name);
        }
    }
    names
}

/// The names of the functions that a C or C++ program calls.
fn tests_of_program(text: &str) -> Vec<String> {
    let functions = functions(text, false);
    let main = functions.iter().find(|function| function.name == "main");
    let main = main.map(|main| main.body.clone()).unwrap_or_default();
    let names = functions.into_iter().map(|function| function.name);
    names.filter(|name| name != "main" && calls(&main, name)).collect()
}

/// All tests by number.
fn tests() -> BTreeMap<u32, BTreeSet<String>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut names = Vec::new();
    let mut programs: BTreeSet<PathBuf> = BTreeSet::new();
    for file in ROOTS {
        let mut modules = Vec::new();
        walk(&root.join(file), "", true, &mut modules);
        // This one's examples.
        modules.retain(|module| module.path != "edge_cases");
        names.extend(tests_of_modules(&modules));
        let texts = modules.iter().filter(|module| module.path.starts_with("capi"));
        let texts = texts.flat_map(|module| quoted(&module.text));
        programs
            .extend(texts.filter(|text| text.starts_with("csrc/tests/capi/")).map(PathBuf::from));
    }
    for file in programs {
        let file = root.join(file);
        if file.extension().is_some_and(|ending| ending == "c" || ending == "cpp") {
            names.extend(tests_of_program(&fs::read_to_string(file).expect("a program")));
        }
    }
    let mut tests: BTreeMap<u32, BTreeSet<String>> = BTreeMap::new();
    for name in names {
        for number in numbers(&name) {
            tests.entry(number).or_default().insert(name.clone());
        }
    }
    tests
}

#[test]
fn every_group_has_a_test() {
    let tests = tests();
    let missing: Vec<u32> = (1..=GROUPS).filter(|number| !tests.contains_key(number)).collect();
    assert!(missing.is_empty(), "no test that runs is named edge_NN_… for {missing:?}");
    let beyond: Vec<_> = tests.keys().filter(|number| !(1..=GROUPS).contains(*number)).collect();
    assert!(beyond.is_empty(), "edge_cases.md ends before {beyond:?}");
    for (number, tests) in &tests {
        println!("{number}: {tests:?}");
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

/// A module of tests, as rustfmt writes it.
const EXAMPLE: &str = r##"
#[test]
fn edge_01_02_counts() {
    edge_03_helper();
}

fn edge_03_helper() {}

// #[test]
fn edge_04_is_switched_off() {}

/*
#[test]
fn edge_05_is_a_comment() {}
*/

#[test]
#[ignore = "slow"]
fn edge_06_is_ignored() {}

#[test]
#[ignore = "started by a::starts"]
fn edge_07_is_started() {}

#[test]
#[ignore = "started by a::starts"]
fn edge_08_is_skipped() {}

#[test]
fn starts() {
    again(&["a::edge", "--ignored", "--skip=edge_08"]);
}

#[test]
fn edge_09_starts_what_is_gone() {
    passes(&["csrc/tests/capi/none.c"]);
}

#[test]
#[cfg(any())]
fn edge_11_is_nowhere() {}

#[test]
#[cfg(unix)]
fn edge_12_is_here() {}

proptest! {
    #[test]
    fn edge_10_in_a_macro(x in any()) {
        edge_03_helper();
    }
}
"##;

#[test]
fn only_tests_that_run_count() {
    let of = |path: &str| {
        let module = Module { path: path.to_owned(), text: EXAMPLE.to_owned() };
        let names = tests_of_modules(&[module]);
        names.iter().flat_map(|name| numbers(name)).collect::<Vec<_>>()
    };
    assert_eq!(of("a"), [1, 2, 7, 12, 10]);
    assert_eq!(of("b"), [1, 2, 12, 10], "who starts the seventh is not there");
    let without =
        "fn main() {\n    edge_01_called();\n}\nfn edge_01_called() {}\nfn edge_02_not() {}";
    let module = Module { path: String::new(), text: without.to_owned() };
    assert_eq!(tests_of_modules(&[module]), ["edge_01_called"]);
    let program = "static void edge_01_called(void) {\n}\nstatic void edge_02_not(void) {\n}\n\
                   static void edge_03_off(void) {\n}\nint main(void) {\n    edge_01_called();\n    \
                   /* edge_02_not(); */\n    // edge_03_off();\n    return 0;\n}\n";
    assert_eq!(tests_of_program(program), ["edge_01_called"]);
}
