//! The display of the current step for a user who waits: on a terminal a spinner with the step's name and its
//! last line of output, elsewhere a plain line per step. The display writes to standard error, so a command's
//! standard output contains its result only.

use anyhow::{Context as _, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use std::collections::VecDeque;
use std::io::{BufRead as _, BufReader, IsTerminal as _, Read};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// The number of lines of a failed step's output that the error shows.
const SHOWN_LINES: usize = 40;

/// A step that a user waits for. [`Step::done`] finishes it. A step that is dropped before that disappears,
/// and the error that follows names the cause.
pub struct Step {
    name: String,
    since: Instant,
    bar: Option<ProgressBar>,
}

impl Step {
    /// Shows that `name` has begun.
    pub fn start(name: impl Into<String>) -> Step {
        let name = name.into();
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new_spinner();
            if let Ok(style) =
                ProgressStyle::with_template("{spinner:.cyan} {prefix} {elapsed:.dim} {wide_msg:.dim}")
            {
                bar.set_style(style);
            }
            bar.set_prefix(name.clone());
            bar.enable_steady_tick(Duration::from_millis(100));
            bar
        });
        if bar.is_none() {
            eprintln!(".. {name}");
        }
        Step { name, since: Instant::now(), bar }
    }

    /// Shows a detail next to the step's name, on terminals only.
    pub fn detail(&self, text: &str) {
        if let Some(bar) = &self.bar {
            bar.set_message(console::strip_ansi_codes(text).trim().to_owned());
        }
    }

    /// Finishes the step. `outcome` is a few words about its result, or empty.
    pub fn done(mut self, outcome: &str) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
        let mark = console::style("ok").green().for_stderr();
        let separator = if outcome.is_empty() { "" } else { ": " };
        eprintln!("{mark} {}{separator}{outcome} ({:.1} s)", self.name, self.since.elapsed().as_secs_f64());
    }

    /// Runs `command` as this step, shows its output next to the spinner, and returns its standard output. An
    /// error contains the command, its exit status and the end of its output.
    pub fn run(&self, command: &mut Command) -> Result<String> {
        let shown = crate::shell::display(command);
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("could not start `{shown}`"))?;
        let (sender, receiver) = mpsc::channel();
        let readers = [
            child.stdout.take().map(|pipe| read_lines(pipe, true, sender.clone())),
            child.stderr.take().map(|pipe| read_lines(pipe, false, sender)),
        ];
        let mut output = String::new();
        let mut last = VecDeque::with_capacity(SHOWN_LINES);
        for (is_stdout, line) in receiver {
            self.detail(&line);
            if is_stdout {
                output.push_str(&line);
                output.push('\n');
            }
            if last.len() == SHOWN_LINES {
                last.pop_front();
            }
            last.push_back(line);
        }
        for reader in readers.into_iter().flatten() {
            let _ = reader.join(); // the reader ends with its pipe and has sent all its lines
        }
        let status = child.wait().with_context(|| format!("could not wait for `{shown}`"))?;
        if !status.success() {
            let tail: Vec<String> = last.into();
            bail!("{} failed: `{shown}` ended with {status}:\n{}", self.name, tail.join("\n"));
        }
        Ok(output)
    }
}

impl Drop for Step {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Sends each line of `pipe`. `\r` ends a line too, because progress bars use it.
fn read_lines(
    pipe: impl Read + Send + 'static,
    is_stdout: bool,
    sender: mpsc::Sender<(bool, String)>,
) -> std::thread::JoinHandle<()> {
    std::thread::spawn(move || {
        for line in BufReader::new(pipe).split(b'\n').map_while(Result::ok) {
            let line = String::from_utf8_lossy(&line);
            let line = line.rsplit('\r').find(|part| !part.is_empty()).unwrap_or_default();
            if sender.send((is_stdout, line.to_owned())).is_err() {
                return;
            }
        }
    })
}
