//! The only door through which the agent starts programs: the machine's tools, drivers and plugins.
//!
//! No word from outside (a manifest, a driver, a client) can become an option of a program: a
//! [`Program`] consists of options from the agent's own code, of their values, and of operands, and an
//! operand that looks like an option is refused before the start. Must never use a shell. Each program has a
//! process group of its own, a timeout, and a limit on its kept output; at the timeout, or when its value is
//! dropped, the whole group is killed.

mod running;

use std::{
    ffi::{OsStr, OsString},
    fmt, io,
    path::Path,
    process::ExitStatus,
    time::Duration,
};

pub use self::running::Running;

/// A program with its arguments. Names of options are `'static`, so they never come from outside.
#[derive(Clone)]
pub struct Program {
    path: OsString,
    arguments: Vec<OsString>,
    environment: Vec<(OsString, OsString)>,
    input: Vec<u8>,
    are_options_over: bool,
    /// The operand that looks like an option, if any.
    refused: Option<OsString>,
}

/// Timeout of a program, and limits on its kept output.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Timeout, after which the program's group is killed.
    pub within: Duration,
    /// Maximum bytes of standard output to keep. More is read and discarded.
    pub output: usize,
    /// Handling of standard error.
    pub complaints: Complaints,
}

/// Handling of a program's standard error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Complaints {
    /// Discarded.
    Unheard,
    /// Mixed into the output (`CombinedOutput` of Go).
    InOutput,
    /// Kept separately, up to this number of bytes.
    Apart(usize),
}

/// Result of a program that has ended.
#[derive(Debug)]
pub struct Ended {
    /// Exit status.
    pub status: ExitStatus,
    /// Beginning of the output.
    pub output: Vec<u8>,
    /// True if the output was longer than the kept part.
    pub is_cut: bool,
    /// Beginning of the standard error, if kept separately.
    pub complaints: Vec<u8>,
}

/// Failure to run a program to its end.
#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    /// A word from outside looks like an option. The program was not started.
    #[error("{program} is not started: its argument {word:?} would be read as an option")]
    Option {
        /// The program.
        program: String,
        /// The word.
        word: String,
    },
    /// The program can't be started, or its output can't be read.
    #[error("cannot run {program}: {cause}; is it installed?")]
    Start {
        /// The program.
        program: String,
        /// The cause.
        cause: io::Error,
    },
    /// The program exceeded its timeout, and was killed with its group.
    #[error("{program} took longer than {} s", .within.as_secs())]
    Late {
        /// The program.
        program: String,
        /// The timeout.
        within: Duration,
    },
}

impl ProgramError {
    fn start(program: &Program, cause: io::Error) -> Self {
        Self::Start { program: program.name(), cause }
    }

    /// Returns true if the program does not exist.
    #[must_use]
    pub fn is_missing(&self) -> bool {
        matches!(self, Self::Start { cause, .. } if cause.kind() == io::ErrorKind::NotFound)
    }
}

impl Program {
    /// Returns a tool of the machine, found in PATH.
    #[must_use]
    pub fn tool(name: &'static str) -> Self {
        Self::at(Path::new(name))
    }

    /// Returns the program at a path chosen by the node's administrator; a bare name is found in PATH.
    #[must_use]
    pub fn at(path: &Path) -> Self {
        Self {
            path: path.as_os_str().to_owned(),
            arguments: Vec::new(),
            environment: Vec::new(),
            input: Vec::new(),
            are_options_over: false,
            refused: None,
        }
    }

    /// Adds an option without a value, or a subcommand: a word of the agent's own code.
    #[must_use]
    pub fn flag(mut self, name: &'static str) -> Self {
        self.arguments.push(name.into());
        self
    }

    /// Adds an option with a value, which may be any word: `--name=value`, or `-n value`, for which getopt(3)
    /// takes the second word as the value even if it begins with a dash.
    #[must_use]
    pub fn setting(mut self, name: &'static str, value: impl AsRef<OsStr>) -> Self {
        let value = value.as_ref();
        if name.starts_with("--") {
            let mut joined = OsString::from(name);
            joined.push("=");
            joined.push(value);
            self.arguments.push(joined);
        } else {
            self.arguments.extend([name.into(), value.to_owned()]);
        }
        self
    }

    /// Adds `--`, after which every word is an operand. Not all programs support it.
    #[must_use]
    pub fn end_of_options(mut self) -> Self {
        self.are_options_over = true;
        self.arguments.push("--".into());
        self
    }

    /// Adds an operand. If it begins with a dash before the end of the options, the program will refuse to
    /// start.
    #[must_use]
    pub fn operand(mut self, word: impl AsRef<OsStr>) -> Self {
        let word = word.as_ref();
        if word.as_encoded_bytes().starts_with(b"-") && !self.are_options_over {
            self.refused.get_or_insert_with(|| word.to_owned());
        }
        self.arguments.push(word.to_owned());
        self
    }

    /// Adds positional words, for a program whose protocol has no options (drivers of `flexVolume`).
    #[must_use]
    pub fn positional(mut self, words: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Self {
        self.arguments.extend(words.into_iter().map(|word| word.as_ref().to_owned()));
        self
    }

    /// Adds arguments from the node administrator's configuration. Must never be used for words of a
    /// manifest, a driver or a client.
    #[must_use]
    pub fn configured(mut self, words: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Self {
        self.arguments.extend(words.into_iter().map(|word| word.as_ref().to_owned()));
        self
    }

    /// Sets an environment variable in addition to the agent's environment.
    #[must_use]
    pub fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.environment.push((name.as_ref().to_owned(), value.as_ref().to_owned()));
        self
    }

    /// Sets the standard input, which is empty by default.
    #[must_use]
    pub fn input(mut self, bytes: Vec<u8>) -> Self {
        self.input = bytes;
        self
    }

    /// Returns the arguments so far, as the program would get them.
    #[must_use]
    pub fn arguments(&self) -> &[OsString] {
        &self.arguments
    }

    /// Returns the program's name for messages.
    #[must_use]
    pub fn name(&self) -> String {
        self.path.to_string_lossy().into_owned()
    }

    /// Runs the program until it ends. Dropping the future kills the program's group.
    ///
    /// Does not wait for children that outlive the program, even if they could still write to its output.
    ///
    /// # Errors
    /// The program can't be started, or exceeds its timeout.
    pub async fn run(&self, bounds: Bounds) -> Result<Ended, ProgramError> {
        let running = Running::start(self, bounds.complaints)?;
        match tokio::time::timeout(bounds.within, running.finish(&self.input, bounds)).await {
            Ok(ended) => ended.map_err(|cause| ProgramError::start(self, cause)),
            // The future was dropped, which killed the program.
            Err(_) => Err(ProgramError::Late { program: self.name(), within: bounds.within }),
        }
    }

    /// Runs the program as [`Self::run`] does, on a thread that may block (not an async one).
    ///
    /// # Errors
    /// As for [`Self::run`].
    pub fn run_blocking(&self, bounds: Bounds) -> Result<Ended, ProgramError> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.map_err(|cause| ProgramError::start(self, cause))?.block_on(self.run(bounds))
    }

    /// Starts the program, for a caller that reads its output piece by piece. Its standard error is
    /// discarded, and its standard input is empty. Must be called on a thread of an async runtime.
    ///
    /// # Errors
    /// The program can't be started.
    pub fn start(&self) -> Result<Running, ProgramError> {
        Running::start(self, Complaints::Unheard)
    }
}

impl fmt::Debug for Program {
    /// Shows only the path: arguments, variables and input may be secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Program").field("path", &self.path).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
