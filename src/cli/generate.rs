//! `kvpool generate`: text from a model, with all K and V in the cache.

use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

use clap::{Args, value_parser};

use super::{CliError, File, catch_signals, stop_flag};
use crate::config::{MAX_ANSWERS, Source};
use crate::error::ModelError;
use crate::job::model;
use crate::job::model::batch::{Answer, Listener};
use crate::job::model::completions::{Done, complete, drive};
use crate::job::model::jsonl::{self, Defaults, Writer};
use crate::units::counted;

/// What to write, and how.
#[derive(Debug, Args)]
pub(super) struct GenerateArgs {
    #[command(flatten)]
    file: File,
    /// Write on from this text, to the standard output
    #[arg(long, value_name = "TEXT", required_unless_present = "batch", conflicts_with = "batch")]
    prompt: Option<String>,
    /// Write on from the prompts of a file, a JSON object a line: {"prompt": "…"}, and any of id,
    /// n, max_tokens, temperature, top_p, seed, stop
    #[arg(long, value_name = "FILE", requires = "out")]
    batch: Option<PathBuf>,
    /// With --batch: the file of completions, a line each when it is done; it must not be there yet
    #[arg(long, value_name = "FILE", requires = "batch")]
    out: Option<PathBuf>,
    /// With --batch: go on with the file of completions of a run that was interrupted
    #[arg(long, requires = "batch")]
    resume: bool,
    /// Answers to a prompt [default: that of the file's [generate], or 1]
    #[arg(short, long = "answers", value_name = "N",
          value_parser = value_parser!(u32).range(1..=i64::from(MAX_ANSWERS)))]
    n: Option<u32>,
    /// Tokens of an answer at most [default: that of the file's [generate], or 256]
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..))]
    max_tokens: Option<u32>,
    /// Divides the scores of the tokens; 0 always takes the best [default: that of [generate], or
    /// 0]
    #[arg(long, value_name = "T")]
    temperature: Option<f32>,
    /// Consider only the most likely tokens, until their shares come to this [default: that of
    /// [generate], or 1]
    #[arg(long, value_name = "P")]
    top_p: Option<f32>,
    /// Where the chance comes from [default: that of [generate], or 0]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
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
        write(&mut out).and_then(|()| out.flush()).map_err(ModelError::Output)
    }
}

/// What the command line says, and where it says nothing the file's `[generate]`.
fn defaults(args: &GenerateArgs, source: &Source) -> Result<Defaults, ModelError> {
    let mut defaults = source.config.generate.as_ref().map(Defaults::of).unwrap_or_default();
    let sampling = &mut defaults.sampling;
    sampling.temperature = args.temperature.unwrap_or(sampling.temperature);
    sampling.top_p = args.top_p.unwrap_or(sampling.top_p);
    sampling.seed = args.seed.unwrap_or(sampling.seed);
    if let Some(problem) = sampling.problem() {
        return Err(ModelError::Setting(problem));
    }
    defaults.answers = args.n.unwrap_or(defaults.answers);
    defaults.max_tokens = args.max_tokens.unwrap_or(defaults.max_tokens);
    if !args.stop.is_empty() {
        defaults.stop.clone_from(&args.stop);
    }
    defaults.ignore_ends |= args.ignore_end;
    Ok(defaults)
}

pub(super) fn run(args: &GenerateArgs) -> Result<(), CliError> {
    let source = args.file.load()?;
    let defaults = defaults(args, &source)?;
    let model = model::load(&source)?;
    let config = model::config_of(&source);
    let mut failures = None;
    let done = match (&args.prompt, &args.batch, &args.out) {
        (Some(prompt), ..) => {
            let request = defaults.request(&model.tokenizer, prompt);
            let mut listener = ToTerminal { streams: defaults.answers == 1 };
            drive(&model, &config, &[request], &mut listener, &AtomicBool::new(false))?
        }
        (None, Some(prompts), Some(out)) => {
            let prompts = jsonl::read(prompts, &model.tokenizer, &defaults)?;
            let mut writer = Writer::open(out, args.resume, &prompts, &config)?;
            let to_do = writer.to_do(&prompts);
            catch_signals();
            let done = complete(&model, &config, &to_do, &mut writer, stop_flag(), &mut || {})?;
            failures = writer.failures();
            if !done.counts.interrupted {
                writer.finish()?;
            }
            done
        }
        // The command line does not let this through.
        _ => return Ok(()),
    };
    // If these cannot be written, the status still tells.
    let _ = report(&done);
    let mut problems = Vec::new();
    match failures {
        Some((failures, true)) => problems.push(failures),
        Some((failures, false)) => {
            let _ = writeln!(io::stderr(), "warning: {failures}");
        }
        None => {}
    }
    if done.counts.interrupted {
        let problem = "interrupted; what is done is in the file, --resume goes on with it";
        problems.push(problem.to_owned());
    }
    if problems.is_empty() { Ok(()) } else { Err(CliError::Problems(problems)) }
}

/// What the run did, to the standard error.
fn report(done: &Done) -> io::Result<()> {
    let Done { counts, timing, wall_s, .. } = *done;
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
