//! Compiles the CUDA kernels and embeds them, where there is an nvcc.
//!
//! | variable | meaning |
//! |---|---|
//! | `KVPOOL_CUDA` | `auto` (default): with nvcc if there is one; `require`: fail without it; `off`: never |
//! | `KVPOOL_NVCC` | this nvcc and no other |
//! | `CUDA_HOME`, `CUDA_PATH`, `CUDA_ROOT`, `CUDA_TOOLKIT_ROOT_DIR` | a toolkit's folder; then come `PATH`, `/usr/local/cuda` and the wheels of an active virtual environment |
//! | `KVPOOL_CUDA_ARCHS` | such as `80,90+ptx`; default in `build/archs.rs` |
//!
//! Each `csrc/inst/*.cu` becomes one fatbin. `cuda_images.rs`, written to `OUT_DIR` and included by
//! `src/device/cuda/images.rs`, names them, and says which nvcc made them, or why none did.
//!
//! The script runs again when a kernel or one of these variables changes, and not when `PATH`
//! does: after installing a toolkit, set one of them (`KVPOOL_CUDA=require` is a good one).

#[path = "build/archs.rs"]
mod archs;
#[path = "build/compile.rs"]
mod compile;
#[path = "build/nvcc.rs"]
mod nvcc;

use std::env;
use std::fmt::Write as _;
use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use nvcc::{Found, Machine, TOOLKIT_VARS, Version};

/// Its number is the ABI's for ever: of a version that is not compatible it would be another.
const SONAME: &str = "libkvpool.so.0";

/// What `KVPOOL_CUDA` asks for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Wanted {
    Auto,
    Require,
    Off,
}

/// Kernels that were compiled.
struct Compiled {
    found: Found,
    version: Version,
    archs: Vec<archs::Arch>,
    /// Names of the fatbins in `OUT_DIR`, without ending.
    images: Vec<String>,
}

fn main() {
    for var in ["KVPOOL_CUDA", "KVPOOL_NVCC", "KVPOOL_CUDA_ARCHS", "VIRTUAL_ENV"] {
        println!("cargo:rerun-if-env-changed={var}");
    }
    for var in TOOLKIT_VARS {
        println!("cargo:rerun-if-env-changed={var}");
    }
    for path in ["build.rs", "build", "csrc/inst", "csrc/kernels"] {
        println!("cargo:rerun-if-changed={path}");
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    name_shared_library(&out);
    choose_cpu_kernels();
    let wanted = match env::var("KVPOOL_CUDA").as_deref() {
        Err(_) | Ok("" | "auto") => Wanted::Auto,
        Ok("require") => Wanted::Require,
        Ok("off") => Wanted::Off,
        Ok(other) => fail(&format!("KVPOOL_CUDA={other}: expected auto, require or off")),
    };
    let text = match kernels(wanted, &out) {
        Ok(compiled) => compiled_text(&compiled),
        Err(Without::Refused(said)) => {
            fail(&format!("{said}\nKVPOOL_CUDA=off builds without the CUDA kernels"))
        }
        Err(Without::None(why)) if wanted == Wanted::Require => {
            fail(&format!("KVPOOL_CUDA=require, and {why}"))
        }
        Err(Without::None(why)) => {
            // Where nothing speaks for CUDA, nobody needs to hear of it on every build; `kvpool
            // doctor` and the CUDA device's error say it too.
            let kind = if wanted == Wanted::Auto && speaks_for_cuda() { "warning" } else { "note" };
            println!("cargo:{kind}=built without CUDA kernels: {why}");
            format!("{}pub(super) const BUILD: Build = Build::Without({why:?});\n", images(&[]))
        }
    };
    fs::write(out.join("cuda_images.rs"), text).expect("OUT_DIR can be written");
}

/// Gives the shared library its soname on Linux, where programs remember that and not the file: so
/// beside the library lies a link of that name, as there is where it is installed.
fn name_shared_library(out: &Path) {
    if env::var("CARGO_CFG_TARGET_OS").as_deref() != Ok("linux") {
        return;
    }
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,{SONAME}");
    // OUT_DIR is `<profile's folder>/build/kvpool-<hash>/out`.
    #[cfg(unix)]
    if let Some(profile) = out.ancestors().nth(3) {
        for folder in [profile.to_path_buf(), profile.join("deps")] {
            let link = folder.join(SONAME);
            // It is there from an earlier build, or the folder is of another shape: a program that
            // needs the link will say so.
            let _ = std::os::unix::fs::symlink("libkvpool.so", link);
        }
    }
}

/// Sets `x86_kernels`: the kernels for x86-64's vector instructions are built. A build of runs that
/// are not about them is much shorter without (`RUSTFLAGS="--cfg kvpool_portable"`, as
/// `fuzz/run.sh`).
fn choose_cpu_kernels() {
    let x86 = env::var("CARGO_CFG_TARGET_ARCH").as_deref() == Ok("x86_64");
    if x86 && env::var_os("CARGO_CFG_KVPOOL_PORTABLE").is_none() {
        println!("cargo:rustc-cfg=x86_kernels");
    }
}

/// Why there are no kernels.
enum Without {
    /// There is no nvcc to be had: an ordinary machine.
    None(String),
    /// There is one, and it fails, or a setting is wrong.
    Refused(String),
}

/// Finds nvcc and compiles the kernels.
fn kernels(wanted: Wanted, out: &Path) -> Result<Compiled, Without> {
    if wanted == Wanted::Off {
        return Err(Without::None("KVPOOL_CUDA=off".to_owned()));
    }
    let sources =
        compile::files(Path::new("csrc/inst"), &["cu"]).map_err(|error| refused(&error))?;
    if sources.is_empty() {
        return Err(Without::None("csrc/inst has no kernels".to_owned()));
    }
    let machine = Machine {
        var: &|name| env::var_os(name).filter(|value| !value.is_empty()),
        is_file: &|path| path.is_file(),
        entries: &|folder| {
            let entries = fs::read_dir(folder).into_iter().flatten();
            entries.filter_map(|entry| Some(entry.ok()?.path())).collect()
        },
    };
    let Some(found) = nvcc::find(&machine).map_err(Without::Refused)? else {
        return Err(Without::None(
            "no nvcc was found (KVPOOL_NVCC, CUDA_HOME, CUDA_PATH, CUDA_ROOT, \
             CUDA_TOOLKIT_ROOT_DIR, PATH, /usr/local/cuda, VIRTUAL_ENV)"
                .to_owned(),
        ));
    };
    println!("cargo:rerun-if-changed={}", found.path.display());
    let printed = nvcc::ask(&found.path, "--version").map_err(Without::Refused)?;
    let Some(version) = nvcc::version(&printed) else {
        let nvcc = found.path.display();
        return Err(Without::Refused(format!("{nvcc} --version names no release:\n{printed}")));
    };
    if version < nvcc::OLDEST {
        let Version { major, minor } = version;
        return Err(Without::None(format!(
            "{} is of CUDA {major}.{minor}, older than {}.{}",
            found.path.display(),
            nvcc::OLDEST.major,
            nvcc::OLDEST.minor,
        )));
    }
    let archs = wanted_archs(&found)?;
    let headers = compile::files(Path::new("csrc/kernels"), &["cuh", "h"])
        .map_err(|error| refused(&error))?;
    let job = compile::Job {
        nvcc: &found.path,
        arguments: arguments(&archs, version),
        version: &printed,
        headers: compile::hash_of(&headers).map_err(|error| refused(&error))?,
        out,
        parallel: env::var("NUM_JOBS").ok().and_then(|jobs| jobs.parse().ok()).unwrap_or(1),
    };
    compile::compile(&job, &sources).map_err(Without::Refused)?;
    let images = sources.iter().map(|source| compile::stem(source)).collect();
    Ok(Compiled { found, version, archs, images })
}

fn refused(error: &io::Error) -> Without {
    Without::Refused(error.to_string())
}

/// The architectures that are asked for and that the toolkit knows.
fn wanted_archs(found: &Found) -> Result<Vec<archs::Arch>, Without> {
    let list = env::var("KVPOOL_CUDA_ARCHS").ok().filter(|list| !list.trim().is_empty());
    let asked = archs::parse(list.as_deref().unwrap_or(archs::DEFAULT))
        .map_err(|said| Without::Refused(format!("KVPOOL_CUDA_ARCHS: {said}")))?;
    let codes = nvcc::ask(&found.path, "--list-gpu-code").map_err(Without::Refused)?;
    let (known, unknown) = archs::known(asked, &nvcc::codes(&codes));
    let unknown = unknown.join(", ");
    if known.is_empty() {
        let nvcc = found.path.display();
        return Err(Without::Refused(format!("{nvcc} knows none of the architectures {unknown}")));
    }
    if list.is_some() && !unknown.is_empty() {
        println!("cargo:warning=KVPOOL_CUDA_ARCHS: this nvcc does not know {unknown}");
    }
    Ok(known)
}

/// nvcc's arguments but for the files.
fn arguments(archs: &[archs::Arch], version: Version) -> Vec<String> {
    // Products and sums are fused where the source says so, and nowhere else: the same kernels
    // give the same bits on every GPU and on the emulated one. Warnings go to the logs, where
    // csrc/tests/machine_code.py allows none: a later nvcc that has more to say builds too.
    let fixed = "-fatbin -std=c++17 -O3 -fmad=false -prec-div=true -prec-sqrt=true -ftz=false \
                 -Icsrc/kernels -Xptxas -v";
    // A quarter of the bytes. Drivers before those of CUDA 13 may not know this form.
    let small = if version.major >= 13 { "--compress-mode=size" } else { "" };
    fixed
        .split_whitespace()
        .chain(small.split_whitespace())
        .map(str::to_owned)
        .chain(archs.iter().flat_map(|a| a.flags()))
        .collect()
}

/// Whether this machine has a GPU, or someone has named a toolkit: then it matters that no kernels
/// were built.
fn speaks_for_cuda() -> bool {
    let named = |var: &str| env::var_os(var).is_some_and(|value| !value.is_empty());
    TOOLKIT_VARS.into_iter().any(named) || Path::new("/proc/driver/nvidia/version").exists()
}

fn compiled_text(compiled: &Compiled) -> String {
    let Compiled { found, version, archs, images: names } = compiled;
    let names_of = |wanted: &dyn Fn(&archs::Arch) -> bool| {
        let names: Vec<&str> =
            archs.iter().filter(|arch| wanted(arch)).map(|arch| arch.name.as_str()).collect();
        format!("&{names:?}")
    };
    let list: Vec<String> = archs.iter().map(archs::Arch::text).collect();
    let mut text = images(names);
    let _ = writeln!(
        text,
        "pub(super) const BUILD: Build = Build::With {{ nvcc: {:?}, through: {:?}, version: ({}, {}), \
         archs: {}, ptx: {}, list: {:?} }};",
        found.path.display().to_string(),
        found.through,
        version.major,
        version.minor,
        names_of(&|_| true),
        names_of(&|arch| arch.ptx),
        list.join(","),
    );
    text
}

/// The table of fatbins. They lie beside the file that has this text.
fn images(names: &[String]) -> String {
    let mut text = "pub(super) static IMAGES: &[Image] = &[\n".to_owned();
    for name in names {
        let _ = writeln!(
            text,
            "    Image {{ name: {name:?}, bytes: include_bytes!(\"{name}.fatbin\") }},"
        );
    }
    text.push_str("];\n");
    text
}

fn fail(said: &str) -> ! {
    for line in said.lines() {
        println!("cargo:warning={line}");
    }
    // If it cannot be written, the status still tells.
    let _ = writeln!(io::stderr().lock(), "{said}");
    std::process::exit(1);
}
