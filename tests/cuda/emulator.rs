//! Builds the stand-in for the driver's library (`csrc/emulator`) with the host's C++ compiler,
//! once for the same sources. Shared with `tests/no_alloc.rs` and `tests/no_memory.rs`.

use std::collections::hash_map::DefaultHasher;
use std::fs;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use crate::common::DEVICE_VAR;

/// This test program once more, on the emulated device; `None`, and printed, where that cannot run.
pub(crate) fn this_program() -> Option<Command> {
    if !cfg!(all(target_arch = "x86_64", target_os = "linux")) {
        println!("skipped: the emulator runs on Linux on x86-64 only");
        return None;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.env("LD_LIBRARY_PATH", folder()).env(DEVICE_VAR, "cuda").envs(sanitizer_variables());
    Some(command)
}

/// The files of some folders with these endings, in order.
fn files(folder: &Path, ending: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap_or_else(|error| panic!("{folder:?}: {error}"));
    let paths = entries.map(|entry| entry.unwrap().path());
    let mut paths: Vec<PathBuf> =
        paths.filter(|path| path.extension().is_some_and(|found| found == ending)).collect();
    paths.sort();
    paths
}

/// Whether the emulator is built with AddressSanitizer (`.ci/run` does so once).
fn with_address_sanitizer() -> bool {
    std::env::var_os("KVPOOL_EMU_ASAN").is_some()
}

/// What a process needs so that it can load a library with AddressSanitizer; nothing without.
fn sanitizer_variables() -> Vec<(&'static str, String)> {
    if !with_address_sanitizer() {
        return Vec::new();
    }
    let output = Command::new(compiler()).arg("-print-file-name=libasan.so").output().unwrap();
    let library = String::from_utf8(output.stdout).unwrap().trim().to_owned();
    // Leaks are counted by the tests themselves; this process has some that are Rust's.
    vec![("LD_PRELOAD", library), ("ASAN_OPTIONS", "detect_leaks=0".to_owned())]
}

fn compiler() -> String {
    std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned())
}

/// What the compiler is told beside the files.
fn arguments() -> Vec<&'static str> {
    let mut arguments =
        "-std=c++17 -O2 -ffp-contract=off -DKVPOOL_EMULATED -fPIC -fvisibility=hidden -I."
            .split(' ')
            .collect::<Vec<_>>();
    if with_address_sanitizer() {
        arguments.extend(["-g", "-fsanitize=address"]);
    }
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("f16c") {
        arguments.push("-march=x86-64-v3");
    }
    arguments
}

/// The folder that has `libcuda.so` of the emulator; it is built where it is not there yet.
pub(crate) fn folder() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (emulator, kernels, inst) =
        (root.join("csrc/emulator"), root.join("csrc/kernels"), root.join("csrc/inst"));
    let mut sources = files(&emulator, "cpp");
    sources.extend(files(&inst, "cu"));
    let mut inputs = sources.clone();
    inputs.extend(files(&emulator, "hpp"));
    inputs.extend(files(&kernels, "cuh"));
    inputs.extend(files(&kernels, "h"));
    let compiler = compiler();
    let mut hasher = DefaultHasher::new();
    (&compiler, arguments()).hash(&mut hasher);
    for path in &inputs {
        fs::read(path).unwrap().hash(&mut hasher);
    }
    let parent = Path::new(env!("CARGO_TARGET_TMPDIR"));
    // `.ci/run` finds the one without by its name.
    let name = if with_address_sanitizer() { "asan-emulated-driver" } else { "emulated-driver" };
    let folder = parent.join(format!("{name}-{:016x}", hasher.finish()));
    let library = folder.join("libcuda.so");
    // One process builds; others wait for it.
    fs::create_dir_all(parent).unwrap();
    let lock = fs::File::create(parent.join("emulator.lock")).unwrap();
    lock.lock().unwrap();
    if !library.exists() {
        fs::create_dir_all(&folder).unwrap();
        let objects = compile(&compiler, root, &sources, &folder);
        let linked = folder.join("libcuda.so.new");
        run(Command::new(&compiler)
            .args(if with_address_sanitizer() { &["-fsanitize=address"][..] } else { &[] })
            .args(["-shared", "-Wl,-soname,libcuda.so.1", "-o"])
            .arg(&linked)
            .args(objects)
            .args(["-lpthread"]));
        fs::rename(linked, &library).unwrap();
    }
    folder
}

/// A folder with the same library under a disguise: without the symbol by which the emulator makes
/// itself known, so that it is taken for a real driver.
pub(crate) fn disguised() -> PathBuf {
    let emulator = folder();
    let folder = emulator.join("disguised");
    fs::create_dir_all(&folder).unwrap();
    let script = folder.join("symbols");
    fs::write(&script, "{ global: cu*; local: *; };\n").unwrap();
    run(Command::new(compiler())
        .args(["-shared", "-Wl,-soname,libcuda.so.1", "-o"])
        .arg(folder.join("libcuda.so"))
        .arg(format!("-Wl,--version-script={}", script.display()))
        .args(files(&emulator, "o"))
        .args(["-lpthread"]));
    folder
}

/// Compiles every source to an object, a few at a time.
fn compile(compiler: &str, root: &Path, sources: &[PathBuf], folder: &Path) -> Vec<PathBuf> {
    let next = AtomicUsize::new(0);
    let objects = Mutex::new(Vec::new());
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(source) = sources.get(next.fetch_add(1, Relaxed)) {
                    let object = folder.join(source.file_name().unwrap()).with_extension("o");
                    run(Command::new(compiler)
                        .current_dir(root)
                        .args(arguments())
                        .args(["-x", "c++", "-c", "-o"])
                        .arg(&object)
                        .arg(source));
                    objects.lock().unwrap().push(object);
                }
            });
        }
    });
    objects.into_inner().unwrap()
}

fn run(command: &mut Command) {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}\n{said}");
}
