//! The progress bar of `kvpool run`: on the standard error, and only when that is a terminal.
//!
//! It is drawn between steps by the thread that runs them, at most a few times a second. The job
//! does not count what drawing allocates.

use std::io::{IsTerminal, Write, stderr};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::catch_signals;
use crate::device::ResolvedBudget;
use crate::job::{Observer, Progress, Run};
use crate::units::Bytes;

/// Redraws a second.
const REDRAWS_PER_SECOND: u8 = 8;

/// Catches signals from the first variant on, when everything is loaded.
pub(super) struct CatchingSignals<'a>(pub(super) &'a mut dyn Observer);

impl Observer for CatchingSignals<'_> {
    fn variant(&mut self, name: &str, index: usize, of: usize) {
        catch_signals();
        self.0.variant(name, index, of);
    }
    fn resolved(&mut self, budget: &ResolvedBudget) {
        self.0.resolved(budget);
    }
    fn opening(&mut self, done: Bytes, total: Bytes) {
        self.0.opening(done, total);
    }
    fn step(&mut self, progress: &Progress) {
        self.0.step(progress);
    }
    fn finished(&mut self, run: &Run) {
        self.0.finished(run);
    }
}

/// Tells of budgets, and shows no bar.
pub(super) struct NoBars;

impl Observer for NoBars {
    fn variant(&mut self, _name: &str, _index: usize, _of: usize) {}
    fn resolved(&mut self, budget: &ResolvedBudget) {
        say(budget);
    }
    fn opening(&mut self, _done: Bytes, _total: Bytes) {}
    fn step(&mut self, _progress: &Progress) {}
    fn finished(&mut self, _run: &Run) {}
}

/// Writes what a budget has come to. If it cannot be written, the report still has the bytes.
fn say(budget: &ResolvedBudget) {
    let _ = writeln!(stderr().lock(), "{budget}");
}

/// One bar, for the variant that runs.
pub(super) struct Bars {
    bar: ProgressBar,
    /// Whether the bar shows memory that is made resident, and not tokens.
    opening: bool,
}

impl Bars {
    /// A bar, or `None` when the standard error is no terminal.
    pub(super) fn new() -> Option<Self> {
        stderr().is_terminal().then(|| Self { bar: ProgressBar::hidden(), opening: false })
    }

    fn style(&self, template: &str) {
        // The templates are ours; a bar in the default style would still be a bar.
        if let Ok(style) = ProgressStyle::with_template(template) {
            self.bar.set_style(style.progress_chars("=> "));
        }
    }
}

impl Observer for Bars {
    fn variant(&mut self, name: &str, index: usize, of: usize) {
        self.bar = ProgressBar::hidden();
        self.bar.set_length(1);
        self.bar.set_prefix(format!("[{}/{of}] {name}", index + 1));
        self.opening = true;
        self.style("{prefix}  opening the pool [{bar:30}] {bytes} of {total_bytes}");
        // Shown only now that it looks as it should.
        self.bar.set_draw_target(ProgressDrawTarget::stderr_with_hz(REDRAWS_PER_SECOND));
    }

    fn resolved(&mut self, budget: &ResolvedBudget) {
        self.bar.suspend(|| say(budget));
    }

    fn opening(&mut self, done: Bytes, total: Bytes) {
        self.bar.set_length(total.get());
        self.bar.set_position(done.get());
    }

    fn step(&mut self, progress: &Progress) {
        if self.opening {
            self.opening = false;
            // The style first: every other change may draw.
            self.style("{prefix}  [{bar:30}] {human_pos} of {human_len} tokens, {msg}, {eta} left");
            self.bar.set_length(progress.tokens_total);
            self.bar.reset();
        }
        // A message is a new string each time, so not at every step.
        if progress.steps % 16 == 1 {
            self.bar.set_message(format!("{} run, {} wait", progress.running, progress.waiting));
        }
        self.bar.set_position(progress.tokens_done);
    }

    fn finished(&mut self, _run: &Run) {
        self.bar.finish_and_clear();
    }
}
