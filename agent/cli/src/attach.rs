//! `beelet attach`: the streams of a container's own first process.

use std::io::{self, IsTerminal};
use std::process::ExitCode;

use beelet_proto::beelet as proto;
use beelet_proto::beelet::exec_input::Input;
use clap::Args;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::args::AgentArgs;
use super::exec::{QUEUE, converse, send};
use super::{block_on, failed};
use beelet_client::Client;

/// Arguments of `beelet attach`.
///
/// Shows what the container's first process prints from now on (`beelet logs` shows what it printed before);
/// with -i it gets what is typed, if its manifest says `stdin: true`. Ends with the container; Ctrl-C ends
/// the command alone, unless the container has a terminal, which gets it then.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  beelet attach web\n  beelet attach -it shell -c main")]
pub struct AttachArgs {
    /// The pod, with or without the node's name at its end.
    #[arg(value_name = "POD")]
    pod: String,
    /// The container; else the pod's default or first one.
    #[arg(short, long, value_name = "CONTAINER")]
    container: Option<String>,
    /// The pod's namespace; needed only where two pods have the name.
    #[arg(short, long, value_name = "NAMESPACE")]
    namespace: Option<String>,
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
    match block_on(attach(args)) {
        Ok(code) => ExitCode::from(u8::try_from(code).unwrap_or(1)),
        Err(error) => failed(&error),
    }
}

async fn attach(args: AttachArgs) -> anyhow::Result<i32> {
    let mut client = Client::connect(&args.agent.socket).await?;
    let terminal = args.tty && io::stdin().is_terminal();
    let (sender, receiver) = mpsc::channel(QUEUE);
    let start = proto::ExecStart {
        target: Some(proto::ContainerTarget {
            namespace: args.namespace.unwrap_or_default(),
            pod: args.pod,
            container: args.container.unwrap_or_default(),
        }),
        command: Vec::new(),
        stdin: args.stdin,
        tty: args.tty,
    };
    send(&sender, Input::Start(start)).await;
    let outputs = client.attach(ReceiverStream::new(receiver)).await?;
    eprintln!("attached: what is printed from now on is shown");
    converse(args.stdin, terminal, sender, outputs).await
}
