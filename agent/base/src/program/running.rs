//! A running program: its process group and its pipes.

use std::{
    convert::Infallible,
    future::pending,
    io::{self, PipeReader, PipeWriter},
    os::fd::OwnedFd,
    process::{ExitStatus, Stdio},
};

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _},
    net::unix::pipe::Receiver,
    process::{Child, Command},
};

use super::{Bounds, Complaints, Ended, Program, ProgramError};

/// Bytes per read: the capacity of a pipe on most machines, see pipe(7).
const PIECE: usize = 64 << 10;
/// Maximum reads of a pipe after the program's end: enough for a full pipe, also with pages of 64 KiB.
const LAST_PIECES: usize = 16;

/// A running program. Dropping the value before the program's end kills its process group.
#[derive(Debug)]
pub struct Running {
    child: Child,
    output: Option<Receiver>,
    complaints: Option<Receiver>,
}

impl Running {
    /// Starts a program in a group of its own.
    ///
    /// # Errors
    /// An argument looks like an option, or the program can't be started.
    pub(super) fn start(program: &Program, complaints: Complaints) -> Result<Self, ProgramError> {
        if let Some(word) = &program.refused {
            let word = word.to_string_lossy().into_owned();
            return Err(ProgramError::Option { program: program.name(), word });
        }
        Self::start_checked(program, complaints).map_err(|cause| ProgramError::start(program, cause))
    }

    fn start_checked(program: &Program, complaints: Complaints) -> io::Result<Self> {
        let (output, writer) = io::pipe()?;
        let (errors, error_writer) = match complaints {
            Complaints::Unheard => (None, Stdio::null()),
            Complaints::InOutput => (None, Stdio::from(writer.try_clone()?)),
            Complaints::Apart(_) => {
                let (reader, writer) = io::pipe()?;
                (Some(reader), Stdio::from(writer))
            }
        };
        let child = spawn(program, writer, error_writer)?;
        // From here on dropping the value kills the program.
        let mut running = Self { child, output: None, complaints: None };
        running.output = Some(receiver(output)?);
        running.complaints = errors.map(receiver).transpose()?;
        Ok(running)
    }

    /// Returns the standard output; `None` after the first call. The caller must read it until its end, or
    /// until this value is dropped.
    pub fn output(&mut self) -> Option<impl AsyncRead + Unpin + Send + use<>> {
        self.output.take()
    }

    /// Writes the input and reads the output until the program ends.
    pub(super) async fn finish(mut self, input: &[u8], bounds: Bounds) -> io::Result<Ended> {
        let most = match bounds.complaints {
            Complaints::Apart(most) => most,
            _ => 0,
        };
        let mut output = Ear::new(self.output.take(), bounds.output);
        let mut complaints = Ear::new(self.complaints.take(), most);
        let stdin = self.child.stdin.take();
        let write = async {
            if let Some(mut stdin) = stdin {
                // The program need not read its input.
                let _ = stdin.write_all(input).await;
            }
        };
        let talk = async {
            let ((), never, _) = tokio::join!(write, output.listen(), complaints.listen());
            never
        };
        let status: ExitStatus = tokio::select! {
            status = self.child.wait() => status?,
            never = talk => match never {},
        };
        output.last_words();
        complaints.last_words();
        Ok(Ended { status, output: output.text, is_cut: output.is_cut, complaints: complaints.text })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // A program that was waited for has no pid here: another process may have it by now.
        let pid = self.child.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
        if let Some(pid) = pid {
            // The runtime waits for its end.
            let _ = kill_process_group(pid, Signal::KILL);
        }
    }
}

/// Spawns the program. Dropping the command closes our copies of the program's ends of the pipes, which would
/// otherwise never end.
fn spawn(program: &Program, output: PipeWriter, complaints: Stdio) -> io::Result<Child> {
    let stdin = if program.input.is_empty() { Stdio::null() } else { Stdio::piped() };
    let mut command = Command::new(&program.path);
    command
        .args(&program.arguments)
        .envs(program.environment.iter().map(|(name, value)| (name, value)))
        .stdin(stdin)
        .stdout(output)
        .stderr(complaints)
        .process_group(0);
    command.spawn()
}

fn receiver(pipe: PipeReader) -> io::Result<Receiver> {
    Receiver::from_owned_fd(OwnedFd::from(pipe))
}

/// Collects the output of a pipe.
struct Ear {
    /// `None` after the pipe's end.
    pipe: Option<Receiver>,
    text: Vec<u8>,
    /// Maximum bytes to keep.
    most: usize,
    is_cut: bool,
}

impl Ear {
    fn new(pipe: Option<Receiver>, most: usize) -> Self {
        Self { pipe, text: Vec::new(), most, is_cut: false }
    }

    /// Reads the pipe to its end, and then waits forever: the end of the output is not the program's end.
    async fn listen(&mut self) -> Infallible {
        let mut piece = vec![0; PIECE];
        while let Some(pipe) = &mut self.pipe {
            match pipe.read(&mut piece).await {
                Ok(0) | Err(_) => self.pipe = None,
                Ok(count) => self.keep(piece.get(..count).unwrap_or_default()),
            }
        }
        pending().await
    }

    /// Reads the rest of the pipe. The number of reads is limited, because other processes may still write to
    /// the pipe without end. Bypasses the runtime, which may not have seen yet that the pipe is readable.
    fn last_words(&mut self) {
        let Some(pipe) = self.pipe.take() else { return };
        let mut piece = vec![0; PIECE];
        for _ in 0..LAST_PIECES {
            match rustix::io::read(&pipe, &mut piece[..]) {
                Ok(0) | Err(_) => return,
                Ok(count) => self.keep(piece.get(..count).unwrap_or_default()),
            }
        }
    }

    fn keep(&mut self, piece: &[u8]) {
        let room = self.most.saturating_sub(self.text.len());
        self.is_cut |= piece.len() > room;
        self.text.extend_from_slice(piece.get(..room).unwrap_or(piece));
    }
}
