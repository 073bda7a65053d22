//! The serving loop of `csrc/examples`, under load.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

use super::{Linked, command, compile, file, run};

/// The service and its load, compiled once; none without a compiler.
fn programs() -> Option<(PathBuf, PathBuf)> {
    static PROGRAMS: OnceLock<Option<(PathBuf, PathBuf)>> = OnceLock::new();
    PROGRAMS
        .get_or_init(|| {
            let optimized = ["-O2"];
            let service = ["csrc/examples/service.cpp"];
            let service = compile("service", &service, &optimized, Linked::Shared)?;
            let load = compile("load", &["csrc/examples/load.cpp"], &optimized, Linked::Not)?;
            Some((service, load))
        })
        .clone()
}

/// A service that runs, and is ended with the value if the test fails in between.
struct Service {
    child: Child,
    port: String,
    metrics_port: String,
}

impl Service {
    fn start(program: &Path, arguments: &[&str]) -> Self {
        let mut child = command(program)
            .arg(file("csrc/examples/service.toml"))
            .args(arguments)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let mut out = BufReader::with_capacity(1, child.stdout.as_mut().unwrap());
        while !line.starts_with("serving") {
            line.clear();
            assert!(out.read_line(&mut line).unwrap() > 0, "it has ended");
        }
        let port = |from: &str| {
            let (_, rest) = line.split_once(from).unwrap_or_else(|| panic!("{line:?}"));
            rest.chars().take_while(char::is_ascii_digit).collect()
        };
        let (port, metrics_port) = (port("on 127.0.0.1:"), port("//127.0.0.1:"));
        Self { child, port, metrics_port }
    }

    /// The value of a metric.
    fn metric(&self, name: &str) -> u64 {
        let mut stream = TcpStream::connect(format!("127.0.0.1:{}", self.metrics_port)).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.0 200 OK\r\n"), "{answer}");
        let line = answer.lines().find(|line| line.split(' ').next() == Some(name));
        let line = line.unwrap_or_else(|| panic!("no {name} in\n{answer}"));
        line.split(' ').nth(1).unwrap().parse().unwrap()
    }

    /// Asks it to end as an operator would, and gives its last words.
    fn end(mut self) -> String {
        let id = self.child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
        let mut out = String::new();
        self.child.stdout.take().unwrap().read_to_string(&mut out).unwrap();
        let status = self.child.wait().unwrap();
        assert!(status.success(), "{status}: {out}");
        assert!(out.ends_with("nothing leaked\n"), "{out}");
        out
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        // It has ended already, unless a test has failed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A number of the service's summary.
fn number(summary: &str, before: &str) -> u64 {
    let (_, rest) = summary.split_once(before).unwrap_or_else(|| panic!("{before} in {summary}"));
    let digits: String = rest.trim_start().chars().take_while(char::is_ascii_digit).collect();
    digits.parse().unwrap()
}

#[test]
fn the_service_stands_its_load() {
    let Some((service, load)) = programs() else { return };
    let service = Service::start(&service, &["--verify", "--threads", "2"]);
    let asked = ["--port", &service.port, "--requests", "500", "--clients", "16"];
    print!("{}", run(&load, &asked));
    assert_eq!(service.metric("kvpool_sequences"), 0);
    assert!(service.metric("kvpool_prefix_hit_tokens_total") > 0, "system prompts are shared");
    assert!(service.metric("service_malformed_total") > 0);
    let summary = service.end();
    print!("{summary}");
    for counted in ["finished", "cancelled", "refused", "malformed lines", "of which reused"] {
        assert!(number(&summary, counted) > 0, "{counted}: {summary}");
    }
}

/// Blocks for two sequences of full length: preemption, and refusals that say why.
#[test]
fn the_service_stands_a_pool_that_is_too_small() {
    let Some((program, load)) = programs() else { return };
    let few = ["--verify", "--set", "pool.capacity=blocks:30"];
    let service = Service::start(&program, &few);
    print!("{}", run(&load, &["--port", &service.port, "--requests", "300", "--clients", "24"]));
    let summary = service.end();
    print!("{summary}");
    assert!(number(&summary, "preempted") > 0, "{summary}");

    let fewest = ["--set", "pool.capacity=blocks:6", "--set", "cache.watermark_blocks=0"];
    let short_queue = ["--max-waiting", "4"];
    let service = Service::start(&program, &[&fewest[..], &short_queue].concat());
    let asked = ["--port", &service.port, "--requests", "300", "--clients", "24"];
    print!("{}", run(&load, &[&asked[..], &["--may-refuse", "1"]].concat()));
    // Straight from the socket: the refusal has the library's status and words.
    let mut stream = TcpStream::connect(format!("127.0.0.1:{}", service.port)).unwrap();
    let prompt = "7 ".repeat(150);
    stream.write_all(format!("generate 1 90 {prompt}\n").as_bytes()).unwrap();
    let mut answer = String::new();
    BufReader::new(&stream).read_line(&mut answer).unwrap();
    assert!(answer.starts_with("refused 1 KVPOOL_NEVER_FITS "), "{answer}");
    drop(stream);
    print!("{}", service.end());
}

/// A signal while clients wait and run: they are told, and the cache is left clean.
#[test]
fn the_service_ends_cleanly_in_the_middle() {
    let Some((program, _)) = programs() else { return };
    let service = Service::start(&program, &["--grace-ms", "0"]);
    let mut clients = Vec::new();
    for _ in 0..40 {
        let mut stream = TcpStream::connect(format!("127.0.0.1:{}", service.port)).unwrap();
        stream.write_all(b"generate 1 200 1 2 3\n").unwrap();
        clients.push(stream);
    }
    let mut first = String::new();
    BufReader::new(&clients[0]).read_line(&mut first).unwrap();
    assert!(first.starts_with("token 1 "), "{first}");
    let summary = service.end();
    print!("{summary}");
    let told = clients.iter_mut().filter_map(|stream| {
        let mut said = String::new();
        stream.read_to_string(&mut said).ok()?;
        Some(said.contains("refused 1 SHUTTING_DOWN"))
    });
    assert!(told.filter(|told| *told).count() > 0, "{summary}");
}

/// A service that starts again finds what it had; a file that is none of its own does not stop it,
/// and stays.
#[test]
fn the_service_starts_warm() {
    let Some((program, _)) = programs() else { return };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("prefixes");
    let file = path.display().to_string();
    // Prompt tokens, and how many of them were found.
    let serve = |arguments: &[&str]| {
        let service = Service::start(&program, arguments);
        let mut stream = TcpStream::connect(format!("127.0.0.1:{}", service.port)).unwrap();
        let mut answers = BufReader::new(stream.try_clone().unwrap());
        let mut said = String::new();
        for n in 1..=4_u32 {
            let prompt: String = (0..100).map(|token| format!(" {}", 10 * n + token)).collect();
            stream.write_all(format!("generate {n} 5{prompt}\n").as_bytes()).unwrap();
            let mut line = String::new();
            while !line.starts_with("done") {
                line.clear();
                assert!(answers.read_line(&mut line).unwrap() > 0, "no answer");
                said += &line;
            }
        }
        drop((stream, answers));
        let summary = service.end();
        (said, number(&summary, "prompt tokens"), number(&summary, "of which reused"), summary)
    };
    let save = ["--save", file.as_str()];
    let (cold_said, tokens, cold, summary) = serve(&save);
    assert!(number(&summary, "saved") >= 4 * 96, "{summary}");
    assert_eq!((tokens, cold), (400, 0), "{summary}");
    let (warm_said, _, warm, summary) = serve(&save);
    assert_eq!(warm, 4 * 96, "{summary}");
    assert_eq!(warm_said, cold_said, "the same answers");
    // Other blocks.
    let other = [&save[..], &["--set", "cache.tokens_per_block=32"]].concat();
    let (other_said, _, found, summary) = serve(&other);
    assert_eq!(found, 4 * 96, "{summary}");
    assert_eq!(other_said, cold_said, "the same answers");
    let (.., nothing, _) = serve(&[]);
    assert_eq!(nothing, 0);
    std::fs::write(&path, "no save").unwrap();
    let (_, _, found, summary) = serve(&save);
    assert_eq!(found, 0, "{summary}");
    assert!(!summary.contains("saved"), "{summary}");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "no save");
}

#[test]
fn the_service_refuses_a_wrong_command_line() {
    let Some((program, _)) = programs() else { return };
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let config = file("csrc/examples/service.toml").display().to_string();
    for (arguments, code, words) in [
        (vec!["no-such-file.toml"], 2, "no-such-file.toml"),
        (vec![config.as_str(), "--set", "cache.format=int8"], 2, "int8"),
        (vec![config.as_str(), "--wrong", "1"], 2, "unknown option"),
        (vec![config.as_str(), "--port", port.as_str()], 1, "cannot listen"),
    ] {
        let output = command(&program).args(&arguments).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {said}");
        assert!(said.contains(words), "{arguments:?}: {said}");
    }
}
