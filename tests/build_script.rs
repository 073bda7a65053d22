//! The parts of the build script that look for nvcc and say what is compiled, on machines that
//! are made up.

#![allow(dead_code, reason = "the build script uses the rest")]

use std::ffi::OsString;
use std::path::{Path, PathBuf};

#[path = "../build/archs.rs"]
mod archs;
#[path = "../build/compile.rs"]
mod compile;
#[path = "../build/nvcc.rs"]
mod nvcc;

use archs::Arch;
use nvcc::{Found, Machine, Version};

/// Looks for nvcc on a machine with these variables and files.
fn find(vars: &[(&str, &str)], files: &[&str]) -> Result<Option<Found>, String> {
    nvcc::find(&Machine {
        var: &|name| {
            let found = vars.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| OsString::from(value))
        },
        is_file: &|path| files.iter().any(|file| Path::new(file) == path),
        entries: &|folder| {
            let inside = files.iter().filter_map(|file| Path::new(file).strip_prefix(folder).ok());
            let first = inside.filter_map(|rest| rest.components().next());
            first.map(|name| folder.join(name)).collect()
        },
    })
}

fn found(path: &str, through: &'static str) -> Result<Option<Found>, String> {
    Ok(Some(Found { path: PathBuf::from(path), through }))
}

#[test]
fn nvcc_is_looked_for_in_order() {
    let files = [
        "/own/nvcc",
        "/home/cuda/bin/nvcc",
        "/opt/cuda-root/bin/nvcc",
        "/path/nvcc",
        "/usr/local/cuda/bin/nvcc",
        "/venv/lib/python3.12/site-packages/nvidia/cu13/bin/nvcc",
    ];
    let mut vars = vec![
        ("KVPOOL_NVCC", "/own/nvcc"),
        ("CUDA_HOME", "/home/cuda"),
        ("CUDA_ROOT", "/opt/cuda-root"),
        ("PATH", "/nothing:/path"),
        ("VIRTUAL_ENV", "/venv"),
    ];
    for (through, path) in [
        ("KVPOOL_NVCC", files[0]),
        ("CUDA_HOME", files[1]),
        ("CUDA_ROOT", files[2]),
        ("PATH", files[3]),
    ] {
        assert_eq!(find(&vars, &files), found(path, through));
        vars.remove(0);
    }
    assert_eq!(find(&vars, &files), found(files[4], "usual folder"));
    assert_eq!(find(&vars, &files[5..]), found(files[5], "VIRTUAL_ENV"));
    assert_eq!(find(&[], &files[5..]), Ok(None), "the environment is not active");
}

#[test]
fn a_toolkit_variable_without_nvcc_is_passed_over_and_kvpool_nvcc_is_not() {
    let files = ["/usr/local/cuda/bin/nvcc"];
    let vars = [("CUDA_HOME", "/runtime-only")];
    assert_eq!(find(&vars, &files), found(files[0], "usual folder"));
    let error = find(&[("KVPOOL_NVCC", "/gone/nvcc")], &files).unwrap_err();
    assert!(error.contains("/gone/nvcc"), "{error}");
}

#[test]
fn the_latest_wheel_is_taken() {
    let files = [
        "/venv/lib/python3.11/site-packages/nvidia/cu13/bin/nvcc",
        "/venv/lib/python3.11/site-packages/nvidia/cu14/bin/nvcc",
        "/venv/lib/python3.11/site-packages/nvidia/cuda_runtime/lib/libcudart.so",
    ];
    assert_eq!(find(&[("VIRTUAL_ENV", "/venv")], &files), found(files[1], "VIRTUAL_ENV"));
}

#[test]
fn versions_and_codes_are_read_from_what_nvcc_prints() {
    let printed = "nvcc: NVIDIA (R) Cuda compiler driver\nCopyright (c) 2005-2025 NVIDIA Corporation\n\
                   Cuda compilation tools, release 13.0, V13.0.88\nBuild cuda_13.0.r13.0/compiler.0\n";
    assert_eq!(nvcc::version(printed), Some(Version { major: 13, minor: 0 }));
    assert_eq!(nvcc::version("release 11.8, V11.8.89"), Some(nvcc::OLDEST));
    assert!(nvcc::version("release 9.2, V9").unwrap() < nvcc::OLDEST);
    for odd in ["", "clang 18", "release x.y", "release 13"] {
        assert_eq!(nvcc::version(odd), None, "{odd}");
    }
    assert_eq!(nvcc::codes("sm_75\nsm_80\n sm_90a\ncompute_80\n"), ["75", "80", "90a"]);
}

fn arch(name: &str, ptx: bool) -> Arch {
    Arch { name: name.to_owned(), ptx }
}

#[test]
fn architectures_are_read_and_repeated_ones_joined() {
    assert_eq!(archs::parse("80, 90+ptx"), Ok(vec![arch("80", false), arch("90", true)]));
    assert_eq!(archs::parse("sm_86;86+ptx"), Ok(vec![arch("86", true)]));
    assert_eq!(archs::parse("90a"), Ok(vec![arch("90a", false)]));
    for (list, problem) in [("", "no architecture"), ("volta", "volta"), ("75", "older than sm_80")]
    {
        let error = archs::parse(list).unwrap_err();
        assert!(error.contains(problem), "{list}: {error}");
    }
    let text: Vec<_> = archs::parse(archs::DEFAULT).unwrap().iter().map(Arch::text).collect();
    assert_eq!(text.join(","), archs::DEFAULT);
}

#[test]
fn what_the_toolkit_does_not_know_is_left_out_and_ptx_is_kept() {
    let codes = ["80", "86"].map(str::to_owned);
    let (known, unknown) = archs::known(archs::parse(archs::DEFAULT).unwrap(), &codes);
    assert_eq!(known, [arch("80", false), arch("86", true)], "PTX of the last one that is known");
    assert_eq!(unknown, ["89", "90"]);
    assert_eq!(known[1].flags()[1], "arch=compute_86,code=[sm_86,compute_86]");
    assert_eq!(known[0].flags()[1], "arch=compute_80,code=sm_80");
    let (known, unknown) = archs::known(vec![arch("100", true)], &codes);
    assert!(known.is_empty() && unknown == ["100"]);
}

/// A compiler that copies its source, and then fails at one that says so: as if it were stopped.
#[cfg(unix)]
const COPIER: &str = "echo x >> \"$0.runs\"; cp \"$3\" \"$2\"; ! grep -q stop \"$3\"";

#[test]
#[cfg(unix)]
fn what_a_stopped_compiler_has_left_is_compiled_again() {
    let folder = tempfile::tempdir().unwrap();
    let [nvcc, source] = ["nvcc.sh", "one.cu"].map(|name| folder.path().join(name));
    std::fs::write(&nvcc, COPIER).unwrap();
    let compile = |text: &str| {
        std::fs::write(&source, text).unwrap();
        let job = compile::Job {
            nvcc: Path::new("/bin/sh"),
            arguments: vec![nvcc.display().to_string()],
            version: "release 13.0",
            headers: 0,
            out: folder.path(),
            parallel: 1,
        };
        compile::compile(&job, std::slice::from_ref(&source))
    };
    let image = || std::fs::read_to_string(folder.path().join("one.fatbin")).unwrap();
    let runs = || std::fs::read_to_string(folder.path().join("nvcc.sh.runs")).unwrap().len() / 2;
    compile("old").unwrap();
    compile("old").unwrap();
    assert_eq!((&*image(), runs()), ("old", 1), "what is there is not compiled again");
    compile("new, and stop").unwrap_err();
    assert_eq!(image(), "new, and stop");
    compile("old").unwrap();
    assert_eq!((&*image(), runs()), ("old", 3), "the sources are what they were");
}
