//! The one door through which the agent starts programs: tools of the machine's, drivers and plugins.
//!
//! No word from outside (a manifest, a driver, a client) can become an option of a program: a
//! [`Program`] is made of options that stand in the agent's own code, of their values, and of operands, and
//! an operand that looks like an option is refused before anything is started. No shell is ever asked.
//! Each program has a process group of its own, a deadline, and a bound for what is kept of its words; with
//! the deadline, or with the value that stands for it, the whole group is killed.

mod running;

use std::{
    ffi::{OsStr, OsString},
    fmt, io,
    path::Path,
    process::ExitStatus,
    time::Duration,
};

pub use self::running::Running;

/// A program with its arguments. What an option's name says is never a word from outside: it is `'static`.
#[derive(Clone)]
pub struct Program {
    path: OsString,
    arguments: Vec<OsString>,
    environment: Vec<(OsString, OsString)>,
    input: Vec<u8>,
    are_options_over: bool,
    /// The operand that would be an option.
    refused: Option<OsString>,
}

/// How long a program may take, and how much of its words is kept.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// The time after which it is killed, with its group.
    pub within: Duration,
    /// The most bytes of its standard output that are kept. More is read, and thrown away.
    pub output: usize,
    /// What becomes of its standard error.
    pub complaints: Complaints,
}

/// What becomes of a program's standard error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Complaints {
    /// Nobody reads it.
    Unheard,
    /// It is in the output, between the rest (`CombinedOutput` of Go).
    InOutput,
    /// So many bytes of it are kept by themselves.
    Apart(usize),
}

/// A program that has ended.
#[derive(Debug)]
pub struct Ended {
    /// How it ended.
    pub status: ExitStatus,
    /// The beginning of its output.
    pub output: Vec<u8>,
    /// It said more than what was kept of its output.
    pub is_cut: bool,
    /// The beginning of its standard error, if that is kept apart.
    pub complaints: Vec<u8>,
}

/// Why a program did not run to its end.
#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    /// A word from outside would be an option. Nothing was started.
    #[error("{program} is not started: its argument {word:?} would be read as an option")]
    Option {
        /// The program.
        program: String,
        /// The word.
        word: String,
    },
    /// It can't be started, or not be heard.
    #[error("cannot run {program}: {cause}; is it installed?")]
    Start {
        /// The program.
        program: String,
        /// Why.
        cause: io::Error,
    },
    /// It took too long, and was killed with its group.
    #[error("{program} took longer than {} s", .within.as_secs())]
    Late {
        /// The program.
        program: String,
        /// How long it had.
        within: Duration,
    },
}

impl ProgramError {
    /// Returns true if there is no such program.
    #[must_use]
    pub fn is_missing(&self) -> bool {
        matches!(self, Self::Start { cause, .. } if cause.kind() == io::ErrorKind::NotFound)
    }
}

impl Program {
    /// A tool of the machine's, found in PATH.
    #[must_use]
    pub fn tool(name: &'static str) -> Self {
        Self::at(Path::new(name))
    }

    /// The program at a path that the node's administrator has chosen; a bare name is found in PATH.
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

    /// Adds an option without a value, or a command of the program's: a word of the agent's own.
    #[must_use]
    pub fn flag(self, name: &'static str) -> Self {
        self.push(name)
    }

    /// Adds an option with a value, which may be any word: `--name=value`, or `-n value`, where getopt(3)
    /// takes the second word for the value whatever it begins with.
    #[must_use]
    pub fn setting(self, name: &'static str, value: impl AsRef<OsStr>) -> Self {
        if !name.starts_with("--") {
            return self.push(name).push(value);
        }
        let mut joined = OsString::from(name);
        joined.push("=");
        joined.push(value);
        self.push(joined)
    }

    /// Adds `--`: no operand after it is an option. Not all programs know it.
    #[must_use]
    pub fn end_of_options(mut self) -> Self {
        self.are_options_over = true;
        self.push("--")
    }

    /// Adds an operand. One that begins with a dash before the end of the options is refused: the program is
    /// not started.
    #[must_use]
    pub fn operand(mut self, word: impl AsRef<OsStr>) -> Self {
        let word = word.as_ref();
        if word.as_encoded_bytes().starts_with(b"-") && !self.are_options_over {
            self.refused.get_or_insert_with(|| word.to_owned());
        }
        self.push(word)
    }

    /// Adds words by their places, for a program whose protocol has no options (drivers of `flexVolume`).
    #[must_use]
    pub fn positional(self, words: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Self {
        words.into_iter().fold(self, Self::push)
    }

    /// Adds arguments as the node's administrator has written them in a configuration. Never words of a
    /// manifest, a driver or a client.
    #[must_use]
    pub fn configured(self, words: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Self {
        words.into_iter().fold(self, Self::push)
    }

    /// Sets a variable of its environment, which is the agent's otherwise.
    #[must_use]
    pub fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.environment.push((name.as_ref().to_owned(), value.as_ref().to_owned()));
        self
    }

    /// Says what is on its standard input. Without it there is nothing.
    #[must_use]
    pub fn input(mut self, bytes: Vec<u8>) -> Self {
        self.input = bytes;
        self
    }

    /// The arguments so far, as the program would get them.
    #[must_use]
    pub fn arguments(&self) -> &[OsString] {
        &self.arguments
    }

    fn push(mut self, word: impl AsRef<OsStr>) -> Self {
        self.arguments.push(word.as_ref().to_owned());
        self
    }

    /// Its name in sentences.
    #[must_use]
    pub fn name(&self) -> String {
        self.path.to_string_lossy().into_owned()
    }

    /// Runs it until it ends. A future that is dropped kills its group.
    ///
    /// For those that the program started, that live on after it and could still say something, nobody waits.
    ///
    /// # Errors
    /// It can't be started, or takes too long.
    pub async fn run(&self, bounds: Bounds) -> Result<Ended, ProgramError> {
        let running = self.start_with(bounds.complaints)?;
        match tokio::time::timeout(bounds.within, running.finish(&self.input, bounds)).await {
            Ok(ended) => ended.map_err(|cause| self.failed(cause)),
            // Dropped, it was killed.
            Err(_) => Err(ProgramError::Late { program: self.name(), within: bounds.within }),
        }
    }

    /// The same on a thread that may block, which is none of the async ones.
    ///
    /// # Errors
    /// As for [`Self::run`].
    pub fn run_blocking(&self, bounds: Bounds) -> Result<Ended, ProgramError> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.map_err(|cause| self.failed(cause))?.block_on(self.run(bounds))
    }

    /// Starts it, for a caller that reads its output piece by piece. Its complaints are heard by nobody, and
    /// it has no input. Must be called on a thread of an async runtime.
    ///
    /// # Errors
    /// It can't be started.
    pub fn start(&self) -> Result<Running, ProgramError> {
        self.start_with(Complaints::Unheard)
    }

    fn start_with(&self, complaints: Complaints) -> Result<Running, ProgramError> {
        if let Some(word) = &self.refused {
            let word = word.to_string_lossy().into_owned();
            return Err(ProgramError::Option { program: self.name(), word });
        }
        Running::start(self, complaints).map_err(|cause| self.failed(cause))
    }

    fn failed(&self, cause: io::Error) -> ProgramError {
        ProgramError::Start { program: self.name(), cause }
    }
}

impl fmt::Debug for Program {
    /// Its path alone: arguments, variables and input may be secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Program").field("path", &self.path).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
