//! Programs that are compiled, linked and run.

use super::{Linked, compile, compiler, file, library_folder, run, system_libraries};
use std::process::Command;

const C_SOURCES: [&str; 2] = ["csrc/tests/capi/every_function.c", "csrc/tests/capi/second_unit.c"];
const CPP_SOURCES: [&str; 2] =
    ["csrc/tests/capi/every_function.cpp", "csrc/tests/capi/second_unit.cpp"];

/// Compiles and runs a test program, which says "ok" at its end.
fn passes(name: &str, sources: &[&str], extra: &[&str], linked: Linked) {
    if let Some(program) = compile(name, sources, extra, linked) {
        let out = run(&program, &[]);
        print!("{out}");
        assert!(out.ends_with("ok\n"), "{name}: {out}");
    }
}

#[test]
fn a_c_program_uses_every_function() {
    passes("every_function_c", &C_SOURCES, &[], Linked::Shared);
}

#[test]
fn a_cpp_program_uses_every_function() {
    passes("every_function_cpp", &CPP_SOURCES, &[], Linked::Shared);
    let without = ["-fno-exceptions", "-fno-rtti", "-O2"];
    passes("every_function_without_exceptions", &CPP_SOURCES, &without, Linked::Shared);
}

#[test]
fn the_cpp_layer_refuses_a_wrong_library_and_a_value_that_is_not_there() {
    let sources = ["csrc/tests/capi/refusals.cpp"];
    passes("refusals", &sources, &[], Linked::Shared);
    let Some(program) = compile("refusals_abort", &sources, &[], Linked::Shared) else { return };
    let output = Command::new(program).arg("abort").output().unwrap();
    assert_eq!(output.status.code(), None, "it ends by a signal");
    let said = String::from_utf8_lossy(&output.stderr);
    let begins = "kvpool: kvpool::Status::wrong_library: the program was compiled for ABI version";
    assert!(said.starts_with(begins), "{said}");
}

#[test]
fn a_cpp_program_is_linked_statically() {
    passes("every_function_static", &CPP_SOURCES, &[], Linked::Static);
    passes("every_function_c_static", &C_SOURCES, &[], Linked::Static);
}

/// What rustc says a static link needs is what the packages say.
#[test]
fn the_static_link_line_is_rustcs() {
    let folder = tempfile::tempdir().unwrap();
    let empty = folder.path().join("empty.rs");
    std::fs::write(&empty, "").unwrap();
    let rustc = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".to_owned());
    let output = Command::new(rustc)
        .args(["--crate-type", "staticlib", "--print", "native-static-libs", "-o"])
        .arg(folder.path().join("empty.a"))
        .arg(&empty)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    let (_, list) = said.split_once("native-static-libs:").expect("rustc names them");
    let list: Vec<&str> = list.lines().next().unwrap_or_default().split_whitespace().collect();
    if cfg!(all(target_os = "linux", target_env = "gnu")) {
        assert_eq!(system_libraries(), list);
    } else {
        println!("skipped: the list is for Linux with glibc; here it is {list:?}");
    }
}

#[test]
fn edge_02_03_08_handles_from_c() {
    passes("handles", &["csrc/tests/capi/handles.c"], &[], Linked::Shared);
}

#[test]
fn edge_57_pointers_sizes_and_a_thousand_caches() {
    passes("pointers", &["csrc/tests/capi/pointers.c"], &[], Linked::Shared);
}

#[test]
fn edge_59_threads_on_one_cache() {
    passes("threads", &["csrc/tests/capi/threads.cpp"], &[], Linked::Shared);
}

#[test]
fn the_first_programs_run() {
    let said = "the attention of the third token begins with 1.000\n";
    let version = concat!("kvpool ", env!("CARGO_PKG_VERSION"), ": ");
    for (name, source, version) in [
        ("hello_c", "csrc/examples/hello.c", ""),
        ("hello_cpp", "csrc/examples/hello.cpp", version),
    ] {
        let Some(program) = compile(name, &[source], &[], Linked::Shared) else { continue };
        assert_eq!(run(&program, &[]), [version, said].concat(), "{name}");
    }
}

/// Programs remember the library by its soname, of which a link lies beside it.
#[test]
fn the_shared_library_has_its_soname() {
    if !cfg!(target_os = "linux") {
        println!("skipped: sonames are of Linux");
        return;
    }
    let library = library_folder();
    let link = std::fs::read_link(library.join("libkvpool.so.0")).unwrap();
    assert_eq!(link.to_str(), Some("libkvpool.so"));
    let Some(program) = compile("hello_soname", &["csrc/examples/hello.c"], &[], Linked::Shared)
    else {
        return;
    };
    match Command::new("readelf").arg("-d").arg(&program).output() {
        Ok(output) => {
            let dynamic = String::from_utf8_lossy(&output.stdout).into_owned();
            assert!(dynamic.contains("Shared library: [libkvpool.so.0]"), "{dynamic}");
        }
        Err(_) => println!("skipped: readelf is not there"),
    }
}

/// Each part of the layer can be included by itself.
#[test]
fn every_header_stands_alone() {
    let Some(compiler) = compiler("header.hpp") else { return };
    for entry in std::fs::read_dir(file("csrc/include/kvpool")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|ending| ending != "hpp") {
            continue;
        }
        let output = Command::new(&compiler)
            .args(["-std=c++17", "-Wall", "-Wextra", "-Werror", "-pedantic", "-fsyntax-only"])
            .args(["-x", "c++", "-include"])
            .arg(&path)
            .arg("/dev/null")
            .output()
            .unwrap();
        assert!(output.status.success(), "{path:?}\n{}", String::from_utf8_lossy(&output.stderr));
    }
}
