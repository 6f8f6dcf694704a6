//! `beelet exec`: runs a command in a container with the caller's standard streams and terminal.

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

/// Messages queued for the agent; faster input blocks.
pub(super) const QUEUE: usize = 16;
/// Maximum bytes of standard input per message.
const PIECE: usize = 16 << 10;
/// Time after which a pending call prints a notice.
const SILENCE: Duration = Duration::from_secs(2);

/// Arguments of `beelet exec`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  beelet exec web ls /data\n  beelet exec -it web -c main -- sh")]
pub struct ExecArgs {
    #[command(flatten)]
    of: ContainerArgs,
    /// Pass standard input to the command.
    #[arg(short = 'i', long)]
    stdin: bool,
    /// Allocate a terminal for the command; with -i only if standard input is a terminal.
    #[arg(short, long)]
    tty: bool,
    #[command(flatten)]
    agent: AgentArgs,
    /// Command to run. `--` must precede it if its first word begins with a hyphen.
    #[arg(trailing_var_arg = true, required = true, value_name = "COMMAND")]
    command: Vec<String>,
}

/// Runs the command; the exit code is that of the command.
#[must_use]
pub fn run(args: ExecArgs) -> ExitCode {
    finish(async { Ok(exit_code(exec(args).await?)) })
}

/// The terminal in raw mode: keys arrive unprocessed, without signals. Dropping it restores the mode.
struct RawTerminal;

impl RawTerminal {
    fn enter() -> anyhow::Result<Self> {
        crossterm::terminal::enable_raw_mode().context("cannot set up the terminal")?;
        Ok(Self)
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        // An error cannot be reported here.
        let _ = crossterm::terminal::disable_raw_mode();
    }
}

async fn exec(args: ExecArgs) -> anyhow::Result<i32> {
    let mut client = Client::connect(&args.agent.socket).await?;
    let terminal = args.tty && args.stdin && io::stdin().is_terminal();
    // As kubectl does: a terminal would hide the end of a file or a pipe from the command, which would then
    // wait for more input.
    let tty = args.tty && (terminal || !args.stdin);
    if args.tty && !tty {
        eprintln!("standard input is not a terminal: not allocating one for the command");
    }
    let (sender, receiver) = mpsc::channel(QUEUE);
    let start =
        proto::ExecStart { target: Some(args.of.target()), command: args.command, stdin: args.stdin, tty };
    send(&sender, Input::Start(start)).await;
    let outputs = awaited(client.containers.exec(ReceiverStream::new(receiver))).await?;
    converse(args.stdin, terminal, sender, outputs).await
}

/// Connects the caller's standard streams and terminal with a process and returns its exit code.
pub(super) async fn converse(
    stdin: bool,
    terminal: bool,
    sender: mpsc::Sender<proto::ExecInput>,
    mut outputs: tonic::Streaming<proto::ExecOutput>,
) -> anyhow::Result<i32> {
    let raw = if terminal { Some(RawTerminal::enter()?) } else { None };
    let keys = sender.clone();
    if stdin {
        // The read has its own thread because only a key ends it; the thread ends with the program.
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

/// Waits for the streams of a container and prints a notice after a while: an unresponsive runtime fails only
/// at the agent's deadline, and until then silence looks like a running command.
pub(super) async fn awaited<T>(call: impl Future<Output = T>) -> T {
    let notice = || {
        eprintln!(
            "waiting for the container runtime to start this; press Ctrl-C to give up, or run `beelet get node` \
             to see the runtime's condition"
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

/// Sends standard input until it ends or the receiver closes.
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

/// Sends the terminal's size now and after each change.
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

/// Prints the command's output and returns its exit code.
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
            None => bail!("the agent ended the command's output without an exit code"),
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        exec: ExecArgs,
    }

    #[test]
    fn the_command_begins_after_the_pod_or_after_two_hyphens() {
        let check = |line: &str, container: Option<&str>, command: &[&str]| {
            let parsed = Line::try_parse_from(line.split(' ')).map(|line| line.exec).unwrap();
            assert_eq!(
                (parsed.of.container.as_deref(), parsed.of.pod.as_str()),
                (container, "web"),
                "{line}"
            );
            assert_eq!(parsed.command, command, "{line}");
        };
        check("exec web ls -l /data", None, &["ls", "-l", "/data"]);
        check("exec web -- ls -l", None, &["ls", "-l"]);
        check("exec -it web -c main -- sh -c id -- x", Some("main"), &["sh", "-c", "id", "--", "x"]);
        check("exec web -c main env -i", Some("main"), &["env", "-i"]);
        check("exec web -- -odd", None, &["-odd"]);
        assert!(Line::try_parse_from(["exec", "web"]).is_err());
    }

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
