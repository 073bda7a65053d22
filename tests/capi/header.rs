//! What the header declares is what the library exports and what the programs use.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;

use super::{file, library_folder};

/// The text of a file, without C comments.
fn code(path: &str) -> String {
    let text = fs::read_to_string(file(path)).unwrap();
    let mut code = String::new();
    let mut rest = text.as_str();
    while let Some((before, comment)) = rest.split_once("/*") {
        code.push_str(before);
        rest = comment.split_once("*/").map_or("", |(_, after)| after);
    }
    code.push_str(rest);
    code.lines()
        .map(|line| line.split("//").next().unwrap_or_default())
        .collect::<Vec<_>>()
        .join("\n")
}

/// All names in a text.
fn names(text: &str) -> BTreeSet<&str> {
    text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').filter(|n| !n.is_empty()).collect()
}

/// The functions that the header declares, those that it defines left out.
fn functions(header: &str) -> BTreeSet<String> {
    let lines: Vec<&str> = header.lines().filter(|line| !line.starts_with('#')).collect();
    let mut found = BTreeSet::new();
    for declaration in lines.join("\n").split([';', '{', '}']) {
        if declaration.contains("KVPOOL_NOEXCEPT") && !declaration.contains("static inline") {
            let before = declaration.split('(').next().unwrap_or_default();
            let name = before.rsplit(|c: char| !c.is_ascii_alphanumeric() && c != '_').next();
            found.extend(name.filter(|name| name.starts_with("kvpool_")).map(str::to_owned));
        }
    }
    found
}

/// The macros that it defines for its users.
fn macros(header: &str) -> BTreeSet<String> {
    header
        .lines()
        .filter_map(|line| line.strip_prefix("#define "))
        .filter_map(|rest| rest.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').next())
        .filter(|name| !["KVPOOL_H", "KVPOOL_NOEXCEPT"].contains(name))
        .map(str::to_owned)
        .collect()
}

/// What is in one and not in the other.
fn missing<'a>(wanted: &'a BTreeSet<String>, there: &BTreeSet<&str>) -> Vec<&'a String> {
    wanted.iter().filter(|name| !there.contains(name.as_str())).collect()
}

#[test]
fn the_c_program_uses_every_function_and_macro() {
    let header = code("csrc/include/kvpool.h");
    let program = code("csrc/tests/capi/every_function.c") + &code("csrc/tests/capi/check.h");
    let used = names(&program);
    let (functions, macros) = (functions(&header), macros(&header));
    assert!(functions.len() > 60 && macros.len() > 10, "{functions:?} {macros:?}");
    assert_eq!(missing(&functions, &used), Vec::<&String>::new());
    assert_eq!(missing(&macros, &used), Vec::<&String>::new());
}

/// Every function is behind one of the C++ layer, and each of those is called by the program.
#[test]
fn the_cpp_layer_reaches_every_function() {
    let header = code("csrc/include/kvpool.h");
    let mut layer = String::new();
    for part in ["result", "values", "tensor", "owners", "cache"] {
        layer += &code(&format!("csrc/include/kvpool/{part}.hpp"));
    }
    assert_eq!(missing(&functions(&header), &names(&layer)), Vec::<&String>::new());
    // Statuses and other numbers, which are written as `KVPOOL_NAME = 1`.
    let constants: BTreeSet<String> = header
        .split([',', '{', '}'])
        .filter_map(|part| part.split_once(" = "))
        .map(|(name, _)| name.trim().to_owned())
        .filter(|name| name.starts_with("KVPOOL_") && names(name).len() == 1)
        .collect();
    assert!(constants.len() > 80, "{constants:?}");
    assert_eq!(missing(&constants, &names(&layer)), Vec::<&String>::new());

    let program =
        code("csrc/tests/capi/every_function.cpp") + &code("csrc/tests/capi/second_unit.cpp");
    let used = names(&program);
    let mut members = BTreeSet::new();
    for line in layer.lines().filter(|line| line.starts_with("    ") && !line.starts_with("     "))
    {
        let line = line.trim().trim_start_matches("static ").trim_start_matches("explicit ");
        let Some((result, rest)) = line.split_once("> ") else { continue };
        if result.starts_with("Result<") {
            members.extend(rest.split_once('(').map(|(name, _)| name.to_owned()));
        }
    }
    members.retain(|name| !["give_back", "made", "begin_all"].contains(&name.as_str()));
    assert!(members.len() > 55, "{members:?}");
    assert_eq!(missing(&members, &used), Vec::<&String>::new());
}

#[test]
fn the_library_exports_what_the_header_declares() {
    let header = code("csrc/include/kvpool.h");
    let library = library_folder().join("libkvpool.so");
    let output = match Command::new("nm").args(["-D", "--defined-only"]).arg(&library).output() {
        Ok(output) if cfg!(target_os = "linux") => output,
        _ => {
            println!("skipped: nm is not there, or this is not Linux");
            return;
        }
    };
    let listed = String::from_utf8(output.stdout).unwrap();
    let exported: BTreeSet<String> = listed
        .lines()
        .filter_map(|line| line.split_whitespace().nth(2))
        .map(str::to_owned)
        .collect();
    assert_eq!(exported, functions(&header));
}
