//! Programs that look closer at single sentences of the header.

use std::process::Command;

use super::{Linked, compile, compiler, file, library_folder, run};

/// Compiles and runs a program, which says "ok" at its end.
fn passes(name: &str, source: &str, extra: &[&str]) {
    if let Some(program) = compile(name, &[source], extra, Linked::Shared) {
        let out = run(&program, &[]);
        print!("{out}");
        assert!(out.ends_with("ok\n"), "{name}: {out}");
    }
}

/// It counts what goes through its own malloc, which needs glibc's behind it.
#[test]
fn calls_allocate_nothing_and_refusals_leave_nothing() {
    if cfg!(all(target_os = "linux", target_env = "gnu")) {
        passes("quiet", "csrc/tests/capi/quiet.c", &[]);
    } else {
        println!("skipped: quiet.c is for Linux with glibc");
    }
}

#[test]
fn a_reader_comes_to_its_turn_beside_a_busy_engine() {
    passes("turns", "csrc/tests/capi/turns.cpp", &["-O2"]);
}

#[test]
fn what_is_in_braces_means_what_it_looks_like() {
    passes("braces", "csrc/tests/capi/braces.cpp", &["-O2"]);
}

/// Units with and without the compiler's exceptions, in either order of linking, in which the
/// linker takes the first of what both define.
#[test]
fn units_with_and_without_exceptions_are_one_program() {
    let Some(compiler) = compiler("mixed.cpp") else { return };
    let folder = tempfile::tempdir().unwrap();
    let include = file("csrc/include");
    let library = library_folder();
    for optimisation in ["-O0", "-O2"] {
        let object = |source: &str, extra: &[&str]| {
            let object = folder.path().join(source).with_extension("o");
            let output = Command::new(&compiler)
                .args([
                    "-std=c++17",
                    "-Wall",
                    "-Wextra",
                    "-Werror",
                    "-pedantic",
                    optimisation,
                    "-I",
                ])
                .arg(&include)
                .args(extra)
                .arg("-c")
                .arg(file("csrc/tests/capi").join(source))
                .arg("-o")
                .arg(&object)
                .output()
                .unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            object
        };
        let with = object("mixed.cpp", &[]);
        let without = object("mixed_plain.cpp", &["-fno-exceptions"]);
        for objects in [[&with, &without], [&without, &with]] {
            let program = folder.path().join("mixed");
            let output = Command::new(&compiler)
                .args(objects)
                .arg("-o")
                .arg(&program)
                .arg("-L")
                .arg(&library)
                .arg("-lkvpool")
                .output()
                .unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            assert_eq!(run(&program, &[]), "ok\n", "{optimisation} {objects:?}");
        }
    }
}
