//! `beelet exec`: a command in a container, with the caller's standard streams and terminal.

use std::io::{self, IsTerminal, Read, Write};
use std::process::ExitCode;

use anyhow::{Context, bail};
use beelet_proto::beelet as proto;
use beelet_proto::beelet::exec_input::Input;
use beelet_proto::beelet::exec_output::Output;
use clap::Args;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::args::AgentArgs;
use super::{block_on, failed};
use beelet_client::Client;

/// Input on its way to the agent. What is typed faster waits.
pub(super) const QUEUE: usize = 16;
/// Most bytes of standard input in one message.
const PIECE: usize = 16 << 10;

/// Arguments of `beelet exec`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  beelet exec web -- ls /data\n  beelet exec -it web -c main -- sh")]
pub struct ExecArgs {
    /// The pod, with or without the node's name at its end.
    #[arg(value_name = "POD")]
    pod: String,
    /// The container; else the pod's default or first one.
    #[arg(short, long, value_name = "CONTAINER")]
    container: Option<String>,
    /// The pod's namespace; needed only where two pods have the name.
    #[arg(short, long, value_name = "NAMESPACE")]
    namespace: Option<String>,
    /// Hand standard input on to the command.
    #[arg(short = 'i', long)]
    stdin: bool,
    /// Give the command a terminal.
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
    match block_on(exec(args)) {
        Ok(code) => ExitCode::from(u8::try_from(code).unwrap_or(1)),
        Err(error) => failed(&error),
    }
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
    if args.tty && !terminal {
        eprintln!(
            "standard input is no terminal, or -i is missing: the command's terminal has no size of yours"
        );
    }
    let (sender, receiver) = mpsc::channel(QUEUE);
    let start = proto::ExecStart {
        target: Some(proto::ContainerTarget {
            namespace: args.namespace.unwrap_or_default(),
            pod: args.pod,
            container: args.container.unwrap_or_default(),
        }),
        command: args.command,
        stdin: args.stdin,
        tty: args.tty,
    };
    send(&sender, Input::Start(start)).await;
    let outputs = client.exec(ReceiverStream::new(receiver)).await?;
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
        let output = output.map_err(|status| anyhow::anyhow!("the agent: {}", status.message()))?;
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
