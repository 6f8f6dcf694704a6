//! `beelet plan WHAT`: prints the agent's decisions for scenarios, with reasons. Needs no privilege and no
//! daemon, and reads only its input.

mod stream;

use std::{
    fs::File,
    io::{self, BufRead, BufReader, ErrorKind, IsTerminal, Write},
    path::{Path, PathBuf},
    process::ExitCode,
};

use beelet_plan::{Input, PlanError, WHATS, What};
use clap::{Args, builder::PossibleValuesParser};
use serde_json::Value;

use super::USAGE;
use beelet_codec::document::{self, Document, Limits};
use stream::{Chunk, Scenarios, Syntax};

/// Large reads, because an input may have a gigabyte.
const BUFFER: usize = 1 << 18;
/// Maximum printed errors; further errors are counted, because a wrong input is often wrong everywhere.
const MOST_MESSAGES: u64 = 20;

/// Limits of a YAML document.
const YAML_LIMITS: Limits = Limits { bytes: 1 << 30, nodes: 100_000_000 };

/// Arguments of `beelet plan`.
#[derive(Debug, Args)]
#[command(
    about = "Compute the agent's decisions for scenarios",
    long_about = "Compute the agent's decisions for scenarios, without privileges or a running agent.\n\n\
        The input is one scenario, a JSON array of scenarios, JSON Lines, or a YAML stream. The output has one JSON object \
        per scenario and line, in order. Exit codes: 0 if every scenario was decided, 2 if some input is invalid.",
    after_help = "See docs/plan.md for an example of each WHAT."
)]
pub struct PlanArgs {
    /// Decision to compute.
    #[arg(value_name = "WHAT", value_parser = PossibleValuesParser::new(WHATS.iter().map(|what| {
        clap::builder::PossibleValue::new(what.name).help(what.about)
    })))]
    what: String,
    /// Scenarios in YAML or JSON; `-` reads standard input.
    #[arg(short, long, value_name = "FILE", default_value = "-")]
    file: PathBuf,
}

/// Decides every scenario of the input.
#[must_use]
pub fn run(args: &PlanArgs) -> ExitCode {
    let Some(what) = beelet_plan::what(&args.what) else {
        eprintln!("error: unknown decision {:?}", args.what);
        return ExitCode::from(USAGE);
    };
    if args.file == Path::new("-") {
        if io::stdin().is_terminal() {
            eprintln!("reading scenarios from the terminal; press Ctrl-D to finish");
        }
        return answer_all(what, "standard input", BufReader::with_capacity(BUFFER, io::stdin().lock()));
    }
    match File::open(&args.file) {
        Ok(file) => {
            answer_all(what, &args.file.display().to_string(), BufReader::with_capacity(BUFFER, file))
        }
        Err(error) => {
            eprintln!("error: cannot read {}: {error}", args.file.display());
            ExitCode::from(USAGE)
        }
    }
}

fn answer_all(what: &What, source: &str, input: impl BufRead) -> ExitCode {
    let mut report = Report { source, scenarios: 0, errors: 0, output: io::stdout().lock() };
    match report.answer_stream(what, Scenarios::new(input)) {
        Ok(()) if report.errors == 0 => ExitCode::SUCCESS,
        Ok(()) => {
            if report.errors > MOST_MESSAGES {
                eprintln!("error: {source}: {} more errors", report.errors - MOST_MESSAGES);
            }
            ExitCode::from(USAGE)
        }
        // A closed standard output (`| head`) is not an error: its reader has seen enough.
        Err(error) if error.kind() == ErrorKind::BrokenPipe => ExitCode::from(USAGE),
        Err(error) => {
            eprintln!("error: cannot write the decisions: {error}");
            ExitCode::from(USAGE)
        }
    }
}

struct Report<'a, W> {
    source: &'a str,
    /// Number of scenarios read.
    scenarios: u64,
    errors: u64,
    output: W,
}

impl<W: Write> Report<'_, W> {
    /// Decides all valid scenarios and reports the others; fails only on a write error.
    fn answer_stream(&mut self, what: &What, mut scenarios: Scenarios<impl BufRead>) -> io::Result<()> {
        loop {
            match scenarios.next() {
                Ok(None) => return self.output.flush(),
                Ok(Some(chunk)) => self.answer_chunk(what, &chunk)?,
                Err(error) => {
                    self.complain(&format!("{}: {error}", self.source));
                    return self.output.flush();
                }
            }
        }
    }

    fn answer_chunk(&mut self, what: &What, chunk: &Chunk) -> io::Result<()> {
        if chunk.syntax == Syntax::Yaml {
            return self.answer_yaml(what, chunk, None);
        }
        match what.answer(Input::Json(&chunk.text)) {
            // A YAML flow mapping looks like JSON at first.
            Err(error) if error.not_json.is_some() => self.answer_yaml(what, chunk, Some(&error)),
            answer => {
                self.scenarios += 1;
                self.write_answer(answer, |error| match place_in_json(&chunk.text, error.field.path()) {
                    Some((1, column)) => (chunk.line, chunk.column + column - 1),
                    Some((line, column)) => (chunk.line + line - 1, column),
                    None => (chunk.line, chunk.column),
                })
            }
        }
    }

    /// Decides the documents of a YAML chunk. `as_json` is the JSON reader's error, shown if the chunk is not
    /// YAML either.
    fn answer_yaml(&mut self, what: &What, chunk: &Chunk, as_json: Option<&PlanError>) -> io::Result<()> {
        let first_line = chunk.line - 1;
        let documents = match std::str::from_utf8(&chunk.text) {
            Ok(text) => document::parse_within(text, YAML_LIMITS)
                .map_err(|error| (error.line, error.column, error.message)),
            Err(error) => {
                let line = chunk.text[..error.valid_up_to()].iter().filter(|byte| **byte == b'\n').count()
                    as u64
                    + 1;
                Err((line, 1, "is not UTF-8".to_owned()))
            }
        };
        match (documents, as_json) {
            (Ok(documents), _) => {
                for document in documents {
                    self.answer_document(what, document, first_line)?;
                }
            }
            (Err(_), Some(json)) => {
                let (line, column) = json.not_json.unwrap_or((1, 1));
                let column = if line == 1 { chunk.column + column.saturating_sub(1) } else { column };
                self.unreadable(first_line + line, column, &json.to_string());
            }
            (Err((line, column, message)), None) => self.unreadable(first_line + line, column, &message),
        }
        Ok(())
    }

    fn unreadable(&mut self, line: u64, column: u64, message: &str) {
        self.scenarios += 1;
        self.complain(&format!("{}:{line}:{column}: scenario {}: {message}", self.source, self.scenarios));
    }

    /// Decides a document, which is a scenario or a list of scenarios.
    fn answer_document(&mut self, what: &What, document: Document, first_line: u64) -> io::Result<()> {
        let Document { value, lines } = document;
        let (list, items) = match value {
            Value::Array(items) => (true, items),
            one => (false, vec![one]),
        };
        for (index, item) in items.into_iter().enumerate() {
            self.scenarios += 1;
            let answer = what.answer(Input::Tree(item));
            self.write_answer(answer, |error| {
                let root = if list { format!("[{index}]") } else { String::new() };
                let path = error.field.clone().under(&root);
                let (line, column) = lines.locate(path.path()).unwrap_or((1, 1));
                (first_line + line, column)
            })?;
        }
        Ok(())
    }

    fn write_answer(
        &mut self,
        answer: Result<String, PlanError>,
        place: impl FnOnce(&PlanError) -> (u64, u64),
    ) -> io::Result<()> {
        match answer {
            Ok(line) => writeln!(self.output, "{line}"),
            Err(error) => {
                if self.errors >= MOST_MESSAGES {
                    // Locating the error would cost more than reading the scenario.
                    self.errors += 1;
                    return Ok(());
                }
                let (line, column) = place(&error);
                let name = error.scenario.as_ref().map(|name| format!(" ({name:?})")).unwrap_or_default();
                let message = format!(
                    "{}:{line}:{column}: scenario {}{name}: {}",
                    self.source, self.scenarios, error.field
                );
                self.complain(&message);
                Ok(())
            }
        }
    }

    fn complain(&mut self, message: &str) {
        self.errors += 1;
        if self.errors <= MOST_MESSAGES {
            eprintln!("error: {message}");
        }
    }
}

/// Returns the line and column of a field in a JSON text.
fn place_in_json(text: &[u8], path: &str) -> Option<(u64, u64)> {
    let documents = document::parse_within(std::str::from_utf8(text).ok()?, YAML_LIMITS).ok()?;
    documents.first()?.locate(path)
}
