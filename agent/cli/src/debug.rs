//! `beelet debug`: adds an ephemeral container to a running pod.

use std::io::{self, IsTerminal};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::bail;
use beelet_model::table::PodTable;
use beelet_proto::beelet as proto;
use beelet_proto::beelet::exec_input::Input;
use clap::Args;
use k8s_openapi::api::core::v1 as core;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::args::{AgentArgs, pod_name};
use super::exec::{QUEUE, awaited, converse, send};
use super::{failed, plain, until};
use beelet_client::{Client, Event};

/// Arguments of `beelet debug`.
///
/// Adds an ephemeral container to a static pod. The container shares the pod's network and the names of its
/// volumes, and with --target sees the processes of another container. The container starts once and is
/// removed with the pod; its name stays taken until then. With -i the exit code is 0 once the streams have
/// ended, regardless of the container's exit code, as with `kubectl debug`; `beelet describe pod` shows the
/// container's exit code. For pods from an API server, use `kubectl debug`.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  beelet debug web --image busybox:1.36 -it\n  beelet debug web --image busybox:1.36 \
                        --target main -it -- sh\n  beelet debug web --image tools:1 -c capture -- tcpdump -w /tmp/out"
)]
pub struct DebugArgs {
    /// Name of the pod; may omit the `-NODE` suffix of static pods.
    #[arg(value_name = "POD", value_parser = pod_name)]
    pod: String,
    /// Image of the new container.
    #[arg(long, value_name = "IMAGE")]
    image: String,
    /// Container whose process namespace to share. Default: a namespace of its own.
    #[arg(long, value_name = "CONTAINER")]
    target: Option<String>,
    /// Name of the new container. Default: debugger, debugger-2 and so on.
    #[arg(short, long, value_name = "NAME")]
    container: Option<String>,
    /// Namespace of the pod. Required only if two pods have the same name.
    #[arg(short, long, value_name = "NAMESPACE")]
    namespace: Option<String>,
    /// Attach to the container and pass standard input to it.
    #[arg(short = 'i', long)]
    stdin: bool,
    /// Allocate a terminal for the container.
    #[arg(short, long, requires = "stdin")]
    tty: bool,
    /// Maximum time to wait until the container runs, e.g. `90s` or `5m`.
    #[arg(long, value_name = "TIME", value_parser = until::duration, default_value = "2m")]
    timeout: Duration,
    /// Command to run. Default: the command of the image.
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<String>,
    #[command(flatten)]
    agent: AgentArgs,
}

/// Adds the container and attaches to it with -i; the exit code is 0 once its streams have ended.
#[must_use]
pub fn run(args: DebugArgs) -> ExitCode {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let done = runtime.map_err(anyhow::Error::from).and_then(|runtime| runtime.block_on(debug(args)));
    match done {
        Ok(code) => ExitCode::from(u8::try_from(code).unwrap_or(1)),
        Err(error) => failed(&error),
    }
}

async fn debug(args: DebugArgs) -> anyhow::Result<i32> {
    let mut client = Client::connect(&args.agent.socket).await?;
    let namespace = args.namespace.unwrap_or_default();
    let target = |container: String| proto::ContainerTarget {
        namespace: namespace.clone(),
        pod: args.pod.clone(),
        container,
    };
    let request = proto::DebugRequest {
        target: Some(target(args.target.unwrap_or_default())),
        image: args.image,
        name: args.container.unwrap_or_default(),
        command: args.command,
        stdin: args.stdin,
        tty: args.tty,
    };
    let made = client.containers.debug(request).await?;
    let name = &made.container;
    eprintln!("{}", plain::line(&format!("container {name} added to pod {}", made.pod)));
    let exit = match tokio::time::timeout(args.timeout, started(&mut client, &made)).await {
        Ok(started) => started?,
        Err(_) => bail!(
            "container {name} is not running after {} s: see `beelet describe pod {}`",
            args.timeout.as_secs(),
            args.pod
        ),
    };
    if let Some(exit) = exit {
        eprintln!(
            "container {name} has already terminated (exit code {exit}); see `beelet logs {} -c {name}`",
            args.pod
        );
        return Ok(exit);
    }
    if !args.stdin {
        println!(
            "container {name} is running; use `beelet logs {0} -c {name}` or `beelet exec {0} -c {name} -- COMMAND`",
            args.pod
        );
        return Ok(0);
    }
    let (sender, receiver) = mpsc::channel(QUEUE);
    let start = proto::ExecStart {
        target: Some(target(name.clone())),
        command: Vec::new(),
        stdin: true,
        tty: args.tty,
    };
    send(&sender, Input::Start(start)).await;
    let outputs = awaited(client.containers.attach(ReceiverStream::new(receiver))).await?;
    if args.tty {
        eprintln!("If you don't see a command prompt, try pressing enter.");
    }
    converse(true, args.tty && io::stdin().is_terminal(), sender, outputs).await
}

/// Waits until the container has started, prints each waiting reason once, and returns the exit code if the
/// container has already terminated.
async fn started(client: &mut Client, made: &proto::DebugResponse) -> anyhow::Result<Option<i32>> {
    let mut watch = client.pods.watch().await?;
    let (mut table, mut is_synced, mut told) = (PodTable::default(), false, String::new());
    while let Some(event) = watch.next().await? {
        is_synced |= event == Event::Synced;
        event.apply(&mut table);
        let entry = table.pods.values().find(|entry| entry.pod.metadata.uid.as_ref() == Some(&made.uid));
        let Some(entry) = entry else {
            if is_synced {
                bail!("pod {} no longer exists", made.pod);
            }
            continue;
        };
        let status = entry.pod.status.as_ref();
        let all = status.and_then(|status| status.ephemeral_container_statuses.as_ref());
        let Some(status) = all.into_iter().flatten().find(|status| status.name == made.container) else {
            continue;
        };
        match status.state.as_ref() {
            Some(core::ContainerState { running: Some(_), .. }) => return Ok(None),
            Some(core::ContainerState { terminated: Some(ended), .. }) => return Ok(Some(ended.exit_code)),
            Some(core::ContainerState { waiting: Some(waiting), .. }) => {
                let message = waiting.message.clone().unwrap_or_default();
                if !message.is_empty() && told != message {
                    eprintln!(
                        "{}",
                        plain::line(&format!("container {} is waiting: {message}", made.container))
                    );
                    told = message;
                }
            }
            _ => {}
        }
    }
    bail!("the agent stopped while the container was starting")
}
