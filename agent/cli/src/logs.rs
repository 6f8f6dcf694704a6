//! `beelet logs`: what containers have printed.

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
    /// The pod, with or without the node's name at its end.
    #[arg(value_name = "POD", value_parser = pod_name, add = complete::pods(),
          required_unless_present = "selector")]
    pod: Option<String>,
    /// The container; else the pod's default or first one.
    #[arg(short, long, value_name = "CONTAINER", add = complete::containers())]
    container: Option<String>,
    /// All containers of the pod, those of its start first.
    #[arg(long, conflicts_with = "container")]
    all_containers: bool,
    /// Of all pods with such labels (`app=shop,tier!=db`): their last 10 lines, if --tail does not say how
    /// many.
    #[arg(short = 'l', long, value_name = "SELECTOR", conflicts_with = "pod")]
    selector: Option<Selector>,
    /// The pod's namespace; needed only where two pods have the name.
    #[arg(short, long, value_name = "NAMESPACE", add = complete::namespaces())]
    namespace: Option<String>,
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
    /// With the pod and the container before each line.
    #[arg(long)]
    prefix: bool,
    #[command(flatten)]
    agent: AgentArgs,
}

/// Prints them.
#[must_use]
pub fn run(args: &LogsArgs) -> ExitCode {
    finish(async {
        tokio::select! {
            done = logs(args) => done,
            interrupted = tokio::signal::ctrl_c() => interrupted.context("cannot wait for Ctrl-C"),
        }
    })
}

/// The last lines that are shown of each pod that a selector chooses, as in kubectl.
const TAIL_OF_SELECTED: u64 = 10;
/// The pause between two looks at a container that has not started.
const PAUSE: Duration = Duration::from_millis(500);

async fn logs(args: &LogsArgs) -> anyhow::Result<()> {
    let request = args.request(Timestamp::now())?;
    let agent = Agent::connect(&args.agent.socket).await?;
    if !args.asks_for_several() {
        return print_all(&agent, request, &mut Shown::default()).await;
    }
    let (table, _) = agent.client.lock().await.1.pods().await?;
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
        // What one container lacks does not keep the others' lines away.
        eprintln!("{}", plain::line(&format!("{}: {error:#}", source.pod)));
        missing += 1;
    }
    if missing > 0 {
        bail!("{missing} of {all} logs could not be printed to their end");
    }
    Ok(())
}

/// The way to the agent that all logs share: where it went away, one of them waits for it, and says so once.
struct Agent<'a> {
    socket: &'a Path,
    /// How often it came back, and the way to it.
    client: Mutex<(u64, Client)>,
}

impl<'a> Agent<'a> {
    async fn connect(socket: &'a Path) -> Result<Self, ClientError> {
        Ok(Self { socket, client: Mutex::new((0, Client::connect(socket).await?)) })
    }

    /// Connects again, if nobody has since the life that failed with `why`.
    async fn again(&self, life: u64, why: ClientError) -> Result<(), ClientError> {
        let mut current = self.client.lock().await;
        if current.0 == life {
            *current = (life + 1, again(self.socket, why).await?);
        }
        Ok(())
    }
}

/// Prints a log to its end; a followed one begins when its container starts, and goes on where it was when
/// the agent comes back.
async fn print_all(
    agent: &Agent<'_>,
    mut request: proto::LogsRequest,
    shown: &mut Shown,
) -> anyhow::Result<()> {
    let mut told = BTreeSet::new();
    loop {
        let (life, mut client) = agent.client.lock().await.clone();
        let ended = match client.logs(request.clone()).await {
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
        // Before the first line there is nothing to go on from.
        if !request.follow || shown.newest.is_none() && told.is_empty() {
            return Err(error.into());
        }
        agent.again(life, error).await?;
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
    /// Its lines among those of others; None: it is the only one.
    lines: Option<Lines>,
}

/// An age as people write it.
fn age(text: &str) -> Result<SignedDuration, String> {
    if let Ok(age) = text.parse() {
        return Ok(age);
    }
    until::duration(text).and_then(|age| age.try_into().map_err(|_| format!("{text:?} is too long")))
}

impl LogsArgs {
    /// What is asked of each of the logs.
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
            since_ns: since_ns.context("the time is too far away")?,
            timestamps: self.timestamps,
        })
    }

    /// The agent itself knows which container is meant by one that is not named; whoever wants more than one,
    /// or their names, has to look at the pods first.
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

/// Both outputs go to standard output, in the order they were written in, as in kubectl.
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
            eprintln!("container {}; -c chooses another one", plain::line(&piece.chosen));
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
        assert_eq!(age("10x").unwrap_err(), "\"10x\" is no time: write 90s, 5m or 1h30m");
    }
}
