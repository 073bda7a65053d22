//! The C interface from C and C++: programs of `csrc/tests/capi` and `csrc/examples`, compiled as
//! their users would and run against the library that lies beside this test program.
//!
//! The programs test edge cases by their numbers: `handles.c` 2, 3 and 8, `pointers.c` 57,
//! `threads.cpp` 59. Without a C or C++ compiler they are skipped, and that is printed.
//! `csrc/tests/capi.sh` runs the same programs under sanitizers and valgrind.

mod closer;
mod header;
mod programs;
mod service;

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A file of the repository.
fn file(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// Where cargo puts the libraries that it builds for this test program: beside it.
fn library_folder() -> PathBuf {
    let program = env::current_exe().unwrap();
    program.parent().unwrap().to_path_buf()
}

/// How a program gets the library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Linked {
    Shared,
    Static,
    /// It needs none.
    Not,
}

/// What a static link needs beside the library, as `csrc/cmake` has it too.
fn system_libraries() -> Vec<String> {
    let list = std::fs::read_to_string(file("csrc/cmake/static-libs.txt")).unwrap();
    list.split_whitespace().map(str::to_owned).collect()
}

/// The compiler for a source, by its ending and what `CC` and `CXX` say; none if it is not there.
fn compiler(source: &str) -> Option<String> {
    let (variable, usual) = if source.ends_with(".c") { ("CC", "cc") } else { ("CXX", "c++") };
    let compiler = env::var(variable).unwrap_or_else(|_| usual.to_owned());
    let answers = Command::new(&compiler).arg("--version").output();
    if answers.is_ok_and(|output| output.status.success()) {
        return Some(compiler);
    }
    println!("skipped: {compiler} does not run; {source} was not compiled");
    None
}

/// Compiles sources of one language, without a warning. None if there is no compiler for it.
fn compile(name: &str, sources: &[&str], extra: &[&str], linked: Linked) -> Option<PathBuf> {
    let compiler = compiler(sources[0])?;
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("capi");
    std::fs::create_dir_all(&folder).unwrap();
    let program = folder.join(name);
    let standard = if sources[0].ends_with(".c") { "-std=c11" } else { "-std=c++17" };
    let library = library_folder();
    let mut command = Command::new(compiler);
    command
        .args([standard, "-g", "-Wall", "-Wextra", "-Werror", "-pedantic", "-pthread", "-I"])
        .arg(file("csrc/include"))
        .args(extra)
        .args(sources.iter().map(|source| file(source)))
        .arg("-o")
        .arg(&program);
    match linked {
        Linked::Shared => {
            let rpath = format!("-Wl,-rpath,{}", library.display());
            command.arg("-L").arg(&library).args(["-lkvpool", &rpath]);
        }
        Linked::Static => {
            command.arg(library.join("libkvpool.a")).args(system_libraries());
        }
        Linked::Not => {}
    }
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}\n{said}");
    Some(program)
}

/// A program that finds the library of this build. Cargo's own search path has a folder before it
/// where that of the last `cargo build` lies, which may be older.
fn command(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.env("LD_LIBRARY_PATH", library_folder());
    command
}

/// Runs a program to its end, which must be a good one, and gives what it printed.
fn run(program: &Path, arguments: &[&str]) -> String {
    let output = command(program).args(arguments).output().unwrap();
    let out = String::from_utf8_lossy(&output.stdout).into_owned();
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program:?} {arguments:?}: {:?}\n{out}{err}", output.status);
    assert!(err.is_empty(), "{program:?} complains:\n{err}");
    out
}
