//! `beelet logs`: what a container has printed.

use std::io::{self, Write};
use std::process::ExitCode;

use anyhow::Context;
use beelet_proto::beelet as proto;
use clap::Args;
use jiff::{SignedDuration, Timestamp};

use super::again::again;
use super::args::{AgentArgs, ContainerArgs};
use super::finish;
use beelet_client::{Client, ClientError};

/// Arguments of `beelet logs`.
#[derive(Debug, Args)]
pub struct LogsArgs {
    #[command(flatten)]
    of: ContainerArgs,
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
    finish(logs(args))
}

async fn logs(args: &LogsArgs) -> anyhow::Result<()> {
    let client = Client::connect(&args.agent.socket).await?;
    let request = args.request(Timestamp::now())?;
    tokio::select! {
        done = follow(args, client, request) => done,
        interrupted = tokio::signal::ctrl_c() => interrupted.context("cannot wait for Ctrl-C"),
    }
}

/// Prints what comes; a followed log goes on where it was when the agent comes back.
async fn follow(args: &LogsArgs, mut client: Client, mut request: proto::LogsRequest) -> anyhow::Result<()> {
    let mut newest = None;
    loop {
        let ended = match client.logs(request.clone()).await {
            Ok(pieces) => print(pieces, &mut newest).await?,
            Err(error) => Err(error),
        };
        let Err(error) = ended else { return Ok(()) };
        // Before the first line there is nothing to go on from.
        let Some(since) = newest.filter(|_| args.follow) else { return Err(error.into()) };
        client = again(&args.agent.socket, error).await?;
        request = proto::LogsRequest { tail: None, since_ns: Some(since + 1), ..request };
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
            target: Some(self.of.target()),
            follow: self.follow,
            previous: self.previous,
            tail: self.tail,
            since_ns: since_ns.context("the time is too far away")?,
            timestamps: self.timestamps,
        })
    }
}

/// Both outputs go to standard output, in the order they were written in, as in kubectl. `newest` is when the
/// last line was written.
async fn print(
    mut pieces: tonic::Streaming<proto::LogsPiece>,
    newest: &mut Option<i64>,
) -> anyhow::Result<Result<(), ClientError>> {
    let mut out = io::stdout();
    loop {
        let piece = match pieces.message().await {
            Ok(Some(piece)) => piece,
            Ok(None) => return Ok(Ok(())),
            Err(status) => return Ok(Err(status.into())),
        };
        out.write_all(&piece.data)?;
        out.flush()?;
        if piece.time_ns != 0 {
            *newest = Some(piece.time_ns);
        }
    }
}
