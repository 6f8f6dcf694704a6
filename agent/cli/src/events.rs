//! `beelet events`: events of pods and of the node.

use std::process::ExitCode;

use anyhow::Context;
use beelet_proto::beelet as proto;
use clap::{Args, ValueEnum};
use jiff::Timestamp;

use super::again::again;
use super::args::{Output, ShownArgs, pod_name};
use super::get::columns::Columns;
use super::get::pod::age;
use super::print::print;
use super::{complete, finish};
use beelet_client::{Client, ClientError};

const TITLES: &[&str] = &["LAST SEEN", "TYPE", "REASON", "OBJECT", "COUNT", "MESSAGE"];

/// Arguments of `beelet events`.
#[derive(Debug, Args)]
pub struct EventsArgs {
    /// Show only events of this pod; its name may omit the `-NODE` suffix of static pods.
    #[arg(long = "for", value_name = "POD", value_parser = pod_name, add = complete::pods())]
    pod: Option<String>,
    /// Show only events of pods in this namespace.
    #[arg(short, long, value_name = "NAMESPACE", add = complete::namespaces())]
    namespace: Option<String>,
    /// Show only events of this type.
    #[arg(long, value_enum)]
    r#type: Option<Type>,
    /// Watch for new events after listing the recorded ones, until interrupted.
    #[arg(short, long)]
    watch: bool,
    #[command(flatten)]
    shown: ShownArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Type {
    /// Normal event.
    Normal,
    /// Warning event.
    Warning,
}

/// Prints the events.
#[must_use]
pub fn run(args: &EventsArgs) -> ExitCode {
    finish(events(args))
}

pub(super) async fn events(args: &EventsArgs) -> anyhow::Result<()> {
    let mut client = Client::connect(&args.shown.agent.socket).await?;
    let wanted = proto::ListEventsRequest {
        watch: args.watch,
        namespace: args.namespace.clone().unwrap_or_default(),
        pod: args.pod.clone().unwrap_or_default(),
        uid: String::new(),
    };
    if !args.watch {
        let mut kept = client.events.kept(wanted).await?;
        kept.retain(|event| args.wants(event));
        if let Some(pod) = args.pod.as_deref().filter(|_| kept.is_empty()) {
            // A misspelt pod name must not look like a pod without events.
            let namespace = args.namespace.as_deref().unwrap_or_default();
            client.pods.list().await?.0.find(namespace, pod).map_err(anyhow::Error::msg)?;
        }
        return table(args, &mut Columns::new(TITLES), &kept);
    }
    tokio::select! {
        done = follow(args, client, wanted) => done,
        interrupted = tokio::signal::ctrl_c() => interrupted.context("cannot wait for Ctrl-C"),
    }
}

/// Prints the recorded events, then each new one, also across restarts of the agent.
async fn follow(
    args: &EventsArgs,
    mut client: Client,
    wanted: proto::ListEventsRequest,
) -> anyhow::Result<()> {
    let mut watcher = Watcher { args, columns: Columns::new(TITLES), newest: None };
    loop {
        let why = watcher.watch(&mut client, wanted.clone()).await?;
        client = again(&args.shown.agent.socket, why).await?;
    }
}

/// State of a watch.
struct Watcher<'a> {
    args: &'a EventsArgs,
    columns: Columns,
    /// Time of the newest printed event; None before the first.
    newest: Option<i64>,
}

impl Watcher<'_> {
    /// Prints the stream's events and returns the reason of its end.
    async fn watch(
        &mut self,
        client: &mut Client,
        wanted: proto::ListEventsRequest,
    ) -> anyhow::Result<ClientError> {
        let mut stream = match client.events.list(wanted).await {
            Ok(stream) => stream,
            Err(error) => return Ok(error),
        };
        // The recorded events are printed together, so that the columns fit all of them.
        let (mut kept, mut synced) = (Vec::new(), false);
        loop {
            let event = match stream.message().await {
                Ok(Some(event)) => event,
                Ok(None) => return Ok(ClientError::Gone),
                Err(status) => return Ok(status.into()),
            };
            if event.synced {
                synced = true;
                self.catch_up(std::mem::take(&mut kept))?;
            } else if self.args.wants(&event) && synced {
                self.newest = self.newest.max(Some(event.last_ns));
                print(&one(self.args, &mut self.columns, &event)?)?;
            } else if self.args.wants(&event) {
                kept.push(event);
            }
        }
    }

    /// Prints the recorded events that have not been printed before.
    fn catch_up(&mut self, mut kept: Vec<proto::Event>) -> anyhow::Result<()> {
        let is_first = self.newest.is_none();
        kept.retain(|event| Some(event.last_ns) > self.newest);
        self.newest = kept.iter().map(|event| event.last_ns).max().max(self.newest).or(Some(0));
        if is_first {
            return table(self.args, &mut self.columns, &kept);
        }
        kept.iter().try_for_each(|event| Ok(print(&one(self.args, &mut self.columns, event)?)?))
    }
}

impl EventsArgs {
    fn wants(&self, event: &proto::Event) -> bool {
        match self.r#type {
            Some(Type::Normal) => event.r#type == "Normal",
            Some(Type::Warning) => event.r#type == "Warning",
            None => true,
        }
    }
}

fn table(args: &EventsArgs, columns: &mut Columns, events: &[proto::Event]) -> anyhow::Result<()> {
    if args.shown.output == Output::Table {
        if events.is_empty() && !args.watch {
            eprintln!("No events found.");
            return Ok(());
        }
        events.iter().for_each(|event| columns.fit(&row(event, Timestamp::now())));
        print(&columns.header())?;
    }
    for event in events {
        print(&one(args, columns, event)?)?;
    }
    Ok(())
}

fn one(args: &EventsArgs, columns: &mut Columns, event: &proto::Event) -> anyhow::Result<String> {
    if args.shown.output == Output::Json {
        return Ok(format!("{}\n", json(event)?));
    }
    let row = row(event, Timestamp::now());
    columns.fit(&row);
    Ok(columns.line(&row))
}

fn row(event: &proto::Event, now: Timestamp) -> Vec<String> {
    vec![
        last_seen(event, now),
        event.r#type.clone(),
        event.reason.clone(),
        object(event),
        event.count.to_string(),
        event.message.clone(),
    ]
}

/// Returns the time since the event, as kubectl prints it.
pub(super) fn last_seen(event: &proto::Event, now: Timestamp) -> String {
    let time = |ns: i64| Timestamp::from_nanosecond(ns.into()).unwrap_or_default();
    age(time(event.last_ns), now)
}

/// Returns `pod/web-n1`, `pod/web-n1/main` or `node/n1`.
fn object(event: &proto::Event) -> String {
    let container = if event.container.is_empty() { String::new() } else { format!("/{}", event.container) };
    format!("{}/{}{container}", event.object_kind.to_lowercase(), event.name)
}

fn json(event: &proto::Event) -> anyhow::Result<String> {
    let time = |ns: i64| Timestamp::from_nanosecond(ns.into()).unwrap_or_default();
    let value = serde_json::json!({
        "involvedObject": {
            "kind": event.object_kind,
            "namespace": event.namespace,
            "name": event.name,
            "uid": event.uid,
            "container": event.container,
        },
        "type": event.r#type,
        "reason": event.reason,
        "message": event.message,
        "firstTimestamp": time(event.first_ns),
        "lastTimestamp": time(event.last_ns),
        "count": event.count,
    });
    serde_json::to_string(&value).context("cannot convert the event to JSON")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_when_what_and_of_whom() {
        let event = proto::Event {
            object_kind: "Pod".to_owned(),
            name: "web-n1".to_owned(),
            container: "main".to_owned(),
            r#type: "Warning".to_owned(),
            reason: "BackOff".to_owned(),
            message: "Back-off restarting".to_owned(),
            last_ns: 1_700_000_000_000_000_000,
            count: 3,
            ..Default::default()
        };
        let now = Timestamp::from_second(1_700_000_090).unwrap();
        assert_eq!(
            row(&event, now),
            ["90s", "Warning", "BackOff", "pod/web-n1/main", "3", "Back-off restarting"]
        );
        let node =
            proto::Event { object_kind: "Node".to_owned(), name: "n1".to_owned(), ..Default::default() };
        assert_eq!(object(&node), "node/n1");
        assert!(json(&event).unwrap().contains("\"lastTimestamp\":\"2023-11-14T22:13:20Z\""));
    }
}
