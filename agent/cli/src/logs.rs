//! `beelet logs`: what a container has printed.

use std::io::{self, Write};
use std::process::ExitCode;

use anyhow::Context;
use beelet_proto::beelet as proto;
use clap::Args;
use jiff::{SignedDuration, Timestamp};

use super::args::AgentArgs;
use super::printed;
use beelet_client::Client;

/// Arguments of `beelet logs`.
#[derive(Debug, Args)]
pub struct LogsArgs {
    /// The pod, with or without the node's name at its end.
    #[arg(value_name = "POD")]
    pod: String,
    /// The container; else the pod's default or first one.
    #[arg(short, long, value_name = "CONTAINER")]
    container: Option<String>,
    /// The pod's namespace; needed only where two pods have the name.
    #[arg(short, long, value_name = "NAMESPACE")]
    namespace: Option<String>,
    /// Go on with what is printed, until the container has ended.
    #[arg(short, long)]
    follow: bool,
    /// Of the container's instance before the current one.
    #[arg(short, long)]
    previous: bool,
    /// Only so many of the last lines.
    #[arg(long, value_name = "LINES")]
    tail: Option<u64>,
    /// Only what is not older than this, such as 90s, 10m or 1h30m.
    #[arg(long, value_name = "DURATION", conflicts_with = "since_time")]
    since: Option<SignedDuration>,
    /// Only what was printed since then, such as 2026-11-21T19:00:00Z.
    #[arg(long, value_name = "TIME")]
    since_time: Option<Timestamp>,
    /// With the time before each line.
    #[arg(long)]
    timestamps: bool,
    #[command(flatten)]
    agent: AgentArgs,
}

/// Prints them.
#[must_use]
pub fn run(args: &LogsArgs) -> ExitCode {
    printed(logs(args))
}

async fn logs(args: &LogsArgs) -> anyhow::Result<()> {
    let mut client = Client::connect(&args.agent.socket).await?;
    let pieces = client.logs(args.request(Timestamp::now())?).await?;
    tokio::select! {
        done = print(pieces) => done,
        interrupted = tokio::signal::ctrl_c() => interrupted.context("cannot wait for Ctrl-C"),
    }
}

impl LogsArgs {
    fn request(&self, now: Timestamp) -> anyhow::Result<proto::LogsRequest> {
        let since = match self.since {
            Some(age) => Some(now.checked_sub(age).context("--since reaches too far back")?),
            None => self.since_time,
        };
        let since_ns = since.map(|since| i64::try_from(since.as_nanosecond())).transpose();
        Ok(proto::LogsRequest {
            target: Some(proto::ContainerTarget {
                namespace: self.namespace.clone().unwrap_or_default(),
                pod: self.pod.clone(),
                container: self.container.clone().unwrap_or_default(),
            }),
            follow: self.follow,
            previous: self.previous,
            tail: self.tail,
            since_ns: since_ns.context("the time is too far away")?,
            timestamps: self.timestamps,
        })
    }
}

/// Both outputs go to standard output, in the order they were written in, as in kubectl.
async fn print(mut pieces: tonic::Streaming<proto::LogsPiece>) -> anyhow::Result<()> {
    let mut out = io::stdout();
    loop {
        let piece = pieces.message().await;
        let Some(piece) = piece.map_err(|status| anyhow::anyhow!("the agent: {}", status.message()))? else {
            return Ok(());
        };
        out.write_all(&piece.data)?;
        out.flush()?;
    }
}
