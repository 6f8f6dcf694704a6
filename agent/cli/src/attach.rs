//! `beelet attach`: the streams of a container's main process.

use std::io::{self, IsTerminal};
use std::process::ExitCode;

use beelet_proto::beelet as proto;
use beelet_proto::beelet::exec_input::Input;
use clap::Args;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::args::{AgentArgs, ContainerArgs};
use super::exec::{QUEUE, awaited, converse, send};
use super::{exit_code, finish};
use beelet_client::Client;

/// Arguments of `beelet attach`.
///
/// Prints the output of the container's main process from now on; `beelet logs` prints earlier output. With
/// -i, standard input is sent to the process if its manifest sets `stdin: true`. The command exits with the
/// container. Ctrl-C ends only the command, unless the container has a terminal, which then receives the key.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  beelet attach web\n  beelet attach -it shell -c main")]
pub struct AttachArgs {
    #[command(flatten)]
    of: ContainerArgs,
    /// Pass standard input to the container.
    #[arg(short = 'i', long)]
    stdin: bool,
    /// Use the container's terminal, if it has one (`tty: true`).
    #[arg(short, long, requires = "stdin")]
    tty: bool,
    #[command(flatten)]
    agent: AgentArgs,
}

/// Attaches; the exit code is 0 once the container's streams have ended.
#[must_use]
pub fn run(args: AttachArgs) -> ExitCode {
    finish(async { Ok(exit_code(attach(args).await?)) })
}

async fn attach(args: AttachArgs) -> anyhow::Result<i32> {
    let mut client = Client::connect(&args.agent.socket).await?;
    let terminal = args.tty && io::stdin().is_terminal();
    let (sender, receiver) = mpsc::channel(QUEUE);
    let start = proto::ExecStart {
        target: Some(args.of.target()),
        command: Vec::new(),
        stdin: args.stdin,
        tty: args.tty,
    };
    send(&sender, Input::Start(start)).await;
    let outputs = awaited(client.containers.attach(ReceiverStream::new(receiver))).await?;
    eprintln!("attached; showing output from now on");
    converse(args.stdin, terminal, sender, outputs).await
}
