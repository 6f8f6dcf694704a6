//! `beelet logs`: what a container has printed.

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use beelet_proto::beelet as proto;
use clap::Args;
use jiff::{SignedDuration, Timestamp};

use super::again::again;
use super::args::{AgentArgs, ContainerArgs};
use super::{finish, plain, until};
use beelet_client::{Client, ClientError};

/// Arguments of `beelet logs`.
#[derive(Debug, Args)]
pub struct LogsArgs {
    #[command(flatten)]
    of: ContainerArgs,
    /// Go on with what is printed, until the container has ended; one that has not started is waited for.
    #[arg(short, long)]
    follow: bool,
    /// Of the container's instance before the current one.
    #[arg(short, long)]
    previous: bool,
    /// Only so many of the last lines.
    #[arg(long, value_name = "LINES")]
    tail: Option<u64>,
    /// Only what is not older than this, such as 90s, 10m or 1h30m.
    #[arg(long, value_name = "DURATION", value_parser = age, conflicts_with = "since_time")]
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

/// The pause between two looks at a container that has not started.
const PAUSE: Duration = Duration::from_millis(500);

/// Prints what comes; a followed log begins when its container starts, and goes on where it was when the
/// agent comes back.
async fn follow(args: &LogsArgs, mut client: Client, mut request: proto::LogsRequest) -> anyhow::Result<()> {
    let (mut shown, mut told) = (Shown::default(), BTreeSet::new());
    loop {
        let ended = match client.logs(request.clone()).await {
            Ok(pieces) => print(pieces, &mut shown).await?,
            Err(error) => Err(error),
        };
        let Err(error) = ended else { return Ok(()) };
        if let Some(why) = error.not_started().filter(|_| args.follow) {
            if told.insert(why.to_owned()) {
                eprintln!("{}; waiting for it", plain::line(why));
            }
            tokio::time::sleep(PAUSE).await;
            continue;
        }
        // Before the first line there is nothing to go on from.
        if !args.follow || shown.newest.is_none() && told.is_empty() {
            return Err(error.into());
        }
        client = again(&args.agent.socket, error).await?;
        if let Some(since) = shown.newest {
            request = proto::LogsRequest { tail: None, since_ns: Some(since + 1), ..request };
        }
    }
}

/// What was shown of a log.
#[derive(Debug, Default)]
struct Shown {
    /// When the last line was written.
    newest: Option<i64>,
    /// Which container it is of was said.
    chosen: bool,
}

/// An age as people write it.
fn age(text: &str) -> Result<SignedDuration, String> {
    if let Ok(age) = text.parse() {
        return Ok(age);
    }
    until::duration(text).and_then(|age| age.try_into().map_err(|_| format!("{text:?} is too long")))
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

/// Both outputs go to standard output, in the order they were written in, as in kubectl.
async fn print(
    mut pieces: tonic::Streaming<proto::LogsPiece>,
    shown: &mut Shown,
) -> anyhow::Result<Result<(), ClientError>> {
    let mut out = io::stdout();
    loop {
        let piece = match pieces.message().await {
            Ok(Some(piece)) => piece,
            Ok(None) => return Ok(Ok(())),
            Err(status) => return Ok(Err(status.into())),
        };
        if !piece.chosen.is_empty() && !std::mem::replace(&mut shown.chosen, true) {
            eprintln!("container {}; -c chooses another one", plain::line(&piece.chosen));
        }
        out.write_all(&piece.data)?;
        out.flush()?;
        if piece.time_ns != 0 {
            shown.newest = Some(piece.time_ns);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_age_is_read_as_people_write_it() {
        for (text, seconds) in [("90s", 90), ("10m", 600), ("1h30m", 5400), ("90", 90), ("1h", 3600)] {
            assert_eq!(age(text), Ok(SignedDuration::from_secs(seconds)), "{text}");
        }
        assert_eq!(age("10x").unwrap_err(), "\"10x\" is no time: write 90s, 5m or 1h30m");
    }
}
