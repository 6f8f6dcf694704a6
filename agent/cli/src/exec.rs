//! `beelet exec`: a command in a container, with the caller's standard streams and terminal.

use std::io::{self, IsTerminal, Read, Write};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use beelet_proto::beelet as proto;
use beelet_proto::beelet::exec_input::Input;
use beelet_proto::beelet::exec_output::Output;
use clap::Args;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::args::{AgentArgs, ContainerArgs};
use super::{exit_code, finish};
use beelet_client::Client;

/// Input on its way to the agent. What is typed faster waits.
pub(super) const QUEUE: usize = 16;
/// Most bytes of standard input in one message.
const PIECE: usize = 16 << 10;
/// How long a person waits without asking why.
const SILENCE: Duration = Duration::from_secs(2);

/// Arguments of `beelet exec`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  beelet exec web -- ls /data\n  beelet exec -it web -c main -- sh")]
pub struct ExecArgs {
    #[command(flatten)]
    of: ContainerArgs,
    /// Hand standard input on to the command.
    #[arg(short = 'i', long)]
    stdin: bool,
    /// Give the command a terminal; with -i, where standard input is one.
    #[arg(short, long)]
    tty: bool,
    #[command(flatten)]
    agent: AgentArgs,
    /// The command, after `--`.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<String>,
}

/// Runs it; the exit code is the command's.
#[must_use]
pub fn run(args: ExecArgs) -> ExitCode {
    finish(async { Ok(exit_code(exec(args).await?)) })
}

/// The terminal as keys come from it, without lines and signals of its own. Dropped, it is as it was.
struct RawTerminal;

impl RawTerminal {
    fn enter() -> anyhow::Result<Self> {
        crossterm::terminal::enable_raw_mode().context("cannot set up the terminal")?;
        Ok(Self)
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        // There is nobody left to tell.
        let _ = crossterm::terminal::disable_raw_mode();
    }
}

async fn exec(args: ExecArgs) -> anyhow::Result<i32> {
    let mut client = Client::connect(&args.agent.socket).await?;
    let terminal = args.tty && args.stdin && io::stdin().is_terminal();
    // As kubectl: a terminal would not show the command the end of a file or a pipe, and it would wait for
    // more.
    let tty = args.tty && (terminal || !args.stdin);
    if args.tty && !tty {
        eprintln!("standard input is no terminal, so the command gets none either");
    }
    let (sender, receiver) = mpsc::channel(QUEUE);
    let start =
        proto::ExecStart { target: Some(args.of.target()), command: args.command, stdin: args.stdin, tty };
    send(&sender, Input::Start(start)).await;
    let outputs = awaited(client.exec(ReceiverStream::new(receiver))).await?;
    converse(args.stdin, terminal, sender, outputs).await
}

/// Connects the caller's standard streams and terminal with a process; its exit code.
pub(super) async fn converse(
    stdin: bool,
    terminal: bool,
    sender: mpsc::Sender<proto::ExecInput>,
    mut outputs: tonic::Streaming<proto::ExecOutput>,
) -> anyhow::Result<i32> {
    let raw = if terminal { Some(RawTerminal::enter()?) } else { None };
    let keys = sender.clone();
    if stdin {
        // A thread of its own, for a read that nothing ends but a key; it ends with the program.
        std::thread::spawn(move || type_in(&keys));
    }
    let sizes = tokio::spawn(async move {
        if terminal {
            follow_size(&sender).await;
        }
    });
    let ended = print(&mut outputs).await;
    sizes.abort();
    drop(raw);
    ended
}

/// Waits for the streams of a container, and says after a while what is waited for: a runtime that hangs
/// answers only with the agent's deadline, and silence until then looks like a command that runs.
pub(super) async fn awaited<T>(call: impl Future<Output = T>) -> T {
    let notice = || {
        eprintln!(
            "waiting for the container runtime, which has not begun this yet; Ctrl-C gives up, `beelet get node` \
             says how the runtime is"
        );
    };
    after_a_while(call, notice).await
}

async fn after_a_while<T>(call: impl Future<Output = T>, notice: impl FnOnce()) -> T {
    let mut call = std::pin::pin!(call);
    match tokio::time::timeout(SILENCE, &mut call).await {
        Ok(ended) => ended,
        Err(_) => {
            notice();
            call.await
        }
    }
}

pub(super) async fn send(sender: &mpsc::Sender<proto::ExecInput>, input: Input) -> bool {
    sender.send(proto::ExecInput { input: Some(input) }).await.is_ok()
}

/// Hands standard input on until it ends, or nobody wants it.
fn type_in(sender: &mpsc::Sender<proto::ExecInput>) {
    let mut stdin = io::stdin().lock();
    let mut bytes = vec![0; PIECE];
    loop {
        let input = match stdin.read(&mut bytes) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Ok(0) | Err(_) => Input::StdinClosed(true),
            Ok(length) => Input::Stdin(bytes[..length].to_vec()),
        };
        let last = matches!(input, Input::StdinClosed(_));
        if sender.blocking_send(proto::ExecInput { input: Some(input) }).is_err() || last {
            return;
        }
    }
}

/// Tells the terminal's size, now and at each change.
async fn follow_size(sender: &mpsc::Sender<proto::ExecInput>) {
    let Ok(mut changes) = signal(SignalKind::window_change()) else { return };
    loop {
        if let Ok((columns, rows)) = crossterm::terminal::size() {
            let size = proto::TerminalSize { columns: columns.into(), rows: rows.into() };
            if !send(sender, Input::Resize(size)).await {
                return;
            }
        }
        if changes.recv().await.is_none() {
            return;
        }
    }
}

/// Prints the command's output; its exit code.
async fn print(outputs: &mut tonic::Streaming<proto::ExecOutput>) -> anyhow::Result<i32> {
    let (mut out, mut err) = (io::stdout(), io::stderr());
    loop {
        let output = outputs.message().await;
        let output = output.map_err(beelet_client::ClientError::from)?;
        match output.and_then(|output| output.output) {
            Some(Output::Stdout(bytes)) => {
                out.write_all(&bytes)?;
                out.flush()?;
            }
            Some(Output::Stderr(bytes)) => {
                err.write_all(&bytes)?;
                err.flush()?;
            }
            Some(Output::ExitCode(code)) => return Ok(code),
            None => bail!("the agent ended the command's output without its exit code"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_wait_is_explained_once_it_is_long() {
        async fn check(seconds: u64, explained: bool) {
            let mut told = false;
            let call = async {
                tokio::time::sleep(Duration::from_secs(seconds)).await;
                seconds
            };
            assert_eq!(after_a_while(call, || told = true).await, seconds);
            assert_eq!(told, explained, "{seconds} s");
        }
        check(0, false).await;
        check(1, false).await;
        check(12, true).await;
    }
}
