//! `beelet logs`: prints the logs of containers.

mod lines;
mod sources;

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use beelet_proto::beelet as proto;
use clap::Args;
use futures::{StreamExt as _, stream};
use jiff::{SignedDuration, Timestamp};
use tokio::sync::Mutex;

use self::lines::Lines;
use self::sources::{Choice, Containers, Source};
use super::again::again;
use super::args::{AgentArgs, pod_name};
use super::{complete, finish, is_broken_pipe, plain, until};
use beelet_client::{Client, ClientError};
use beelet_units::selector::Selector;

/// Arguments of `beelet logs`.
#[derive(Debug, Args)]
pub struct LogsArgs {
    /// Name of the pod; may omit the `-NODE` suffix of static pods.
    #[arg(value_name = "POD", value_parser = pod_name, add = complete::pods(),
          required_unless_present = "selector")]
    pod: Option<String>,
    /// Name of the container. Default: the pod's default container, else its first.
    #[arg(short, long, value_name = "CONTAINER", add = complete::containers())]
    container: Option<String>,
    /// Print the logs of all containers of the pod, init containers first.
    #[arg(long, conflicts_with = "container")]
    all_containers: bool,
    /// Label selector, e.g. `app=shop,tier!=db`: print the logs of all matching pods, by default the last 10
    /// lines each.
    #[arg(short = 'l', long, value_name = "SELECTOR", conflicts_with = "pod")]
    selector: Option<Selector>,
    /// Namespace of the pod. Required only if two pods have the same name.
    #[arg(short, long, value_name = "NAMESPACE", add = complete::namespaces())]
    namespace: Option<String>,
    /// Follow the log until the container terminates; wait for a container that has not started.
    #[arg(short, long)]
    follow: bool,
    /// Print the log of the container's previous instance.
    #[arg(short, long)]
    previous: bool,
    /// Number of lines to show from the end.
    #[arg(long, value_name = "LINES")]
    tail: Option<u64>,
    /// Show only lines newer than a duration, e.g. 90s, 10m or 1h30m.
    #[arg(long, value_name = "DURATION", value_parser = age, conflicts_with = "since_time")]
    since: Option<SignedDuration>,
    /// Show only lines since a time, e.g. 2026-11-21T19:00:00Z.
    #[arg(long, value_name = "TIME")]
    since_time: Option<Timestamp>,
    /// Prefix each line with its time.
    #[arg(long)]
    timestamps: bool,
    /// Prefix each line with its pod and container.
    #[arg(long)]
    prefix: bool,
    #[command(flatten)]
    agent: AgentArgs,
}

/// Prints the logs.
#[must_use]
pub fn run(args: &LogsArgs) -> ExitCode {
    finish(async {
        tokio::select! {
            done = logs(args) => done,
            interrupted = tokio::signal::ctrl_c() => interrupted.context("cannot wait for Ctrl-C"),
        }
    })
}

/// Number of last lines per pod with a selector, as in kubectl.
const TAIL_OF_SELECTED: u64 = 10;
/// Pause between two attempts to read the log of a container that has not started.
const PAUSE: Duration = Duration::from_millis(500);

async fn logs(args: &LogsArgs) -> anyhow::Result<()> {
    let request = args.request(Timestamp::now())?;
    let agent = Agent::connect(&args.agent.socket).await?;
    if !args.asks_for_several() {
        return print_all(&agent, request, &mut Shown::default()).await;
    }
    let (table, _) = agent.client.lock().await.1.pods.list().await?;
    let sources = args.choice(&args.selector.clone().unwrap_or_default()).of(&table)?;
    let print = |source: Source| {
        let prefix = if args.prefix { source.prefix() } else { String::new() };
        let mut shown = Shown { lines: Some(Lines::new(prefix)), ..Shown::default() };
        let request = proto::LogsRequest { target: Some(source.target()), ..request.clone() };
        let agent = &agent;
        async move { (source, print_all(agent, request, &mut shown).await) }
    };
    let all = sources.len();
    let at_once = if args.follow { all } else { 1 };
    let mut printed = stream::iter(sources).map(print).buffer_unordered(at_once);
    let mut missing = 0;
    while let Some((source, result)) = printed.next().await {
        let Err(error) = result else { continue };
        if all == 1 || is_broken_pipe(&error) {
            return Err(error);
        }
        // A failure of one log does not hide the others.
        eprintln!("{}", plain::line(&format!("{}: {error:#}", source.pod)));
        missing += 1;
    }
    if missing > 0 {
        bail!("{missing} of {all} logs are incomplete");
    }
    Ok(())
}

/// Connection to the agent, shared by all logs: if the agent exits, one of them waits for it and prints one
/// notice.
struct Agent<'a> {
    socket: &'a Path,
    /// Number of reconnections, and the current client.
    client: Mutex<(u64, Client)>,
}

impl<'a> Agent<'a> {
    async fn connect(socket: &'a Path) -> Result<Self, ClientError> {
        Ok(Self { socket, client: Mutex::new((0, Client::connect(socket).await?)) })
    }

    /// Reconnects, unless another log has done so since connection `life` failed with `why`.
    async fn again(&self, life: u64, why: ClientError) -> Result<(), ClientError> {
        let mut current = self.client.lock().await;
        if current.0 == life {
            *current = (life + 1, again(self.socket, why).await?);
        }
        Ok(())
    }
}

/// Prints a log to its end. A followed log begins when its container starts, and continues after the last
/// printed line when the agent returns.
async fn print_all(
    agent: &Agent<'_>,
    mut request: proto::LogsRequest,
    shown: &mut Shown,
) -> anyhow::Result<()> {
    let mut told = BTreeSet::new();
    loop {
        let (life, mut client) = agent.client.lock().await.clone();
        let ended = match client.containers.logs(request.clone()).await {
            Ok(pieces) => print(pieces, shown).await?,
            Err(error) => Err(error),
        };
        let Err(error) = ended else { return Ok(()) };
        if let Some(why) = error.not_started().filter(|_| request.follow) {
            if told.insert(why.to_owned()) {
                eprintln!("{}; waiting for it", plain::line(why));
            }
            tokio::time::sleep(PAUSE).await;
            continue;
        }
        // Before the first line, the position to continue from is unknown.
        if !request.follow || shown.newest.is_none() && told.is_empty() {
            return Err(error.into());
        }
        agent.again(life, error).await?;
        if let Some(since) = shown.newest {
            request = proto::LogsRequest { tail: None, since_ns: Some(since + 1), ..request };
        }
    }
}

/// State of a printed log.
#[derive(Debug, Default)]
struct Shown {
    /// Time of the last line.
    newest: Option<i64>,
    /// True once the chosen container's name has been printed.
    chosen: bool,
    /// Line buffer of a log that is printed among others; None for a single log.
    lines: Option<Lines>,
}

/// Parses an age such as `90s` or `1h30m`.
fn age(text: &str) -> Result<SignedDuration, String> {
    if let Ok(age) = text.parse() {
        return Ok(age);
    }
    until::duration(text).and_then(|age| age.try_into().map_err(|_| format!("{text:?} is too long")))
}

impl LogsArgs {
    /// Returns the request for each of the logs.
    fn request(&self, now: Timestamp) -> anyhow::Result<proto::LogsRequest> {
        let since = match self.since {
            Some(age) => Some(now.checked_sub(age).context("--since reaches too far back")?),
            None => self.since_time,
        };
        let since_ns = since.map(|since| i64::try_from(since.as_nanosecond())).transpose();
        let target = proto::ContainerTarget {
            namespace: self.namespace.clone().unwrap_or_default(),
            pod: self.pod.clone().unwrap_or_default(),
            container: self.container.clone().unwrap_or_default(),
        };
        Ok(proto::LogsRequest {
            target: Some(target),
            follow: self.follow,
            previous: self.previous,
            tail: self.tail.or(self.selector.is_some().then_some(TAIL_OF_SELECTED)),
            since_ns: since_ns.context("the time is out of range")?,
            timestamps: self.timestamps,
        })
    }

    /// Returns true if the command needs the pods first: for several logs, or for their names. The agent
    /// itself chooses the container of a single unnamed log.
    fn asks_for_several(&self) -> bool {
        self.all_containers || self.selector.is_some() || self.prefix
    }

    fn choice<'a>(&'a self, selector: &'a Selector) -> Choice<'a> {
        let containers = match &self.container {
            Some(name) => Containers::Named(name),
            None if self.all_containers => Containers::All,
            None => Containers::Default,
        };
        Choice {
            pod: self.pod.as_deref(),
            selector,
            namespace: self.namespace.as_deref().unwrap_or_default(),
            containers,
        }
    }
}

/// Prints standard output and standard error to standard output, in the order of writing, as kubectl does.
async fn print(
    mut pieces: tonic::Streaming<proto::LogsPiece>,
    shown: &mut Shown,
) -> anyhow::Result<Result<(), ClientError>> {
    let mut out = io::stdout();
    loop {
        let piece = match pieces.message().await {
            Ok(Some(piece)) => piece,
            Ok(None) => {
                shown.lines.as_mut().map_or(Ok(()), |lines| lines.end(&mut out))?;
                out.flush()?;
                return Ok(Ok(()));
            }
            Err(status) => return Ok(Err(status.into())),
        };
        if !piece.chosen.is_empty() && !std::mem::replace(&mut shown.chosen, true) {
            eprintln!("container {}; use -c to choose another", plain::line(&piece.chosen));
        }
        match &mut shown.lines {
            Some(lines) => lines.write(&piece.data, &mut out)?,
            None => out.write_all(&piece.data)?,
        }
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
        assert_eq!(age("10x").unwrap_err(), "\"10x\" is not a duration: use e.g. 90s, 5m or 1h30m");
    }
}
