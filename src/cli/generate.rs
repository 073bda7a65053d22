//! `kvpool generate`: text from a model, with all K and V in the cache.

use std::io::{self, Write};
use std::path::PathBuf;
use std::time::Instant;

use clap::{Args, value_parser};

use super::{CliError, File};
use crate::cache::Cache;
use crate::config::Source;
use crate::device::resolve_budget;
use crate::error::ModelError;
use crate::job::model::batch::{self, Answer, Counts, Listener, Request};
use crate::job::model::jsonl::{self, Defaults, ToFile, Writer};
use crate::job::model::sample::Sampling;
use crate::job::model::{self, Engine, Model};
use crate::plan::Plan;
use crate::units::counted;

/// What to write, and how.
#[derive(Debug, Args)]
pub(super) struct GenerateArgs {
    #[command(flatten)]
    file: File,
    /// Write on from this text, to the standard output
    #[arg(long, value_name = "TEXT", required_unless_present = "batch", conflicts_with = "batch")]
    prompt: Option<String>,
    /// Write on from the prompts of a file, a JSON object a line: {"prompt": "…"}, and any of id, n,
    /// max_tokens, temperature, top_p, seed, stop
    #[arg(long, value_name = "FILE", requires = "out")]
    batch: Option<PathBuf>,
    /// With --batch: the file of completions, a line each when it is done; it must not be there yet
    #[arg(long, value_name = "FILE", requires = "batch")]
    out: Option<PathBuf>,
    /// With --batch: go on with the file of completions of a run that was interrupted
    #[arg(long, requires = "batch")]
    resume: bool,
    /// Answers to a prompt
    #[arg(short, long = "answers", value_name = "N", default_value_t = 1,
          value_parser = value_parser!(u32).range(1..=1024))]
    n: u32,
    /// Tokens of an answer at most
    #[arg(long, value_name = "N", default_value_t = 256,
          value_parser = value_parser!(u32).range(1..))]
    max_tokens: u32,
    /// Divides the scores of the tokens; 0 always takes the best
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    temperature: f32,
    /// Consider only the most likely tokens, until their shares come to this
    #[arg(long, value_name = "P", default_value_t = 1.0)]
    top_p: f32,
    /// Where the chance comes from
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// A text that ends an answer; can be given more than once
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Go on behind the tokens that end an answer
    #[arg(long)]
    ignore_end: bool,
}

/// Writes answers to the standard output: one as it comes, several one after the other.
struct ToTerminal {
    streams: bool,
}

impl Listener for ToTerminal {
    fn text(&mut self, _request: usize, _answer: u32, text: &str) {
        if self.streams {
            let mut out = io::stdout().lock();
            // Whoever stops reading gets no more; the end of the run tells.
            let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
        }
    }

    fn done(&mut self, _request: usize, answers: Vec<Answer>) -> Result<(), ModelError> {
        let mut out = io::stdout().lock();
        let write = |out: &mut io::StdoutLock<'_>| -> io::Result<()> {
            if self.streams {
                return writeln!(out);
            }
            for (number, answer) in (1..).zip(&answers) {
                writeln!(out, "--- {number}\n{}", answer.text)?;
            }
            Ok(())
        };
        write(&mut out).map_err(|error| {
            ModelError::Setting(format!("the standard output cannot be written: {error}"))
        })
    }
}

pub(super) fn run(args: &GenerateArgs) -> Result<(), CliError> {
    let source = args.file.load()?;
    let sampling = Sampling { temperature: args.temperature, top_p: args.top_p, seed: args.seed };
    if let Some(problem) = sampling.problem() {
        return Err(ModelError::Setting(problem).into());
    }
    let defaults = Defaults {
        answers: args.n,
        max_tokens: args.max_tokens,
        sampling,
        stop: args.stop.clone(),
        ignore_ends: args.ignore_end,
    };
    let model = model::load(&source)?;
    let began = Instant::now();
    let (counts, timing) = match (&args.prompt, &args.batch, &args.out) {
        (Some(prompt), ..) => {
            let request = defaults.request(&model.tokenizer, prompt);
            let mut listener = ToTerminal { streams: args.n == 1 };
            drive(&source, &model, &[request], &mut listener)?
        }
        (None, Some(prompts), Some(out)) => {
            let mut prompts = jsonl::read(prompts, &model.tokenizer, &defaults)?;
            let (writer, done) = Writer::open(out, args.resume)?;
            prompts.retain(|prompt| !done.contains(&prompt.line));
            let requests: Vec<Request> =
                prompts.iter().map(|prompt| prompt.request.clone()).collect();
            drive(&source, &model, &requests, &mut ToFile { prompts: &prompts, writer })?
        }
        // The command line does not let this through.
        _ => return Ok(()),
    };
    let wall_s = began.elapsed().as_secs_f64();
    report(&counts, timing, wall_s)?;
    Ok(())
}

/// Opens cache and engine, and runs the requests.
fn drive(
    source: &Source,
    model: &Model,
    requests: &[Request],
    listener: &mut dyn Listener,
) -> Result<(Counts, model::Timing), ModelError> {
    let mut config = model::config_of(source);
    resolve_budget(&mut config).map_err(crate::error::OpenError::from)?;
    let plan = Plan::new(&config, &source.geometry)?;
    let mut engine = Engine::new(model, &plan, &config.device)?;
    let mut cache = Cache::open_on_device(plan, &config.device, None)?;
    let counts = batch::run(&mut engine, &mut cache, &model.tokenizer, requests, listener)?;
    Ok((counts, engine.timing()))
}

/// What the run did, to the standard error.
fn report(counts: &Counts, timing: model::Timing, wall_s: f64) -> io::Result<()> {
    let model::Timing { attention_s, manager_s, total_s } = timing;
    let percent = |part: f64| if total_s > 0.0 { 100.0 * part / total_s } else { 0.0 };
    let preempted = match counts.preemptions {
        0 => String::new(),
        count => format!(", {}", counted(count, "preemption")),
    };
    writeln!(
        io::stderr(),
        "{} in {wall_s:.2} s, {} at once at most, {} of {} in the cache{preempted}; of the model's time {:.0} % \
         attention, {:.1} % the cache's manager",
        counted(counts.new_tokens, "new token"),
        counts.peak_running,
        counts.cached_tokens,
        counted(counts.prompt_tokens, "prompt token"),
        percent(attention_s),
        percent(manager_s),
    )
}
