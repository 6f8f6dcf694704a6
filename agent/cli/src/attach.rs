//! `beelet attach`: the streams of a container's own first process.

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
/// Shows what the container's first process prints from now on (`beelet logs` shows what it printed before);
/// with -i it gets what is typed, if its manifest says `stdin: true`. Ends with the container; Ctrl-C ends
/// the command alone, unless the container has a terminal, which gets it then.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  beelet attach web\n  beelet attach -it shell -c main")]
pub struct AttachArgs {
    #[command(flatten)]
    of: ContainerArgs,
    /// Hand standard input on to the container.
    #[arg(short = 'i', long)]
    stdin: bool,
    /// Use the container's terminal, if it has one (`tty: true`).
    #[arg(short, long, requires = "stdin")]
    tty: bool,
    #[command(flatten)]
    agent: AgentArgs,
}

/// Attaches; the exit code is 0 when the container's streams have ended.
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
    let outputs = awaited(client.attach(ReceiverStream::new(receiver))).await?;
    eprintln!("attached: what is printed from now on is shown");
    converse(args.stdin, terminal, sender, outputs).await
}
