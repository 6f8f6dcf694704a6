//! `beelet get`: lists pods and other objects of this machine.

pub(super) mod columns;
mod format;
pub(super) mod node;
pub(super) mod objects;
mod path;
pub(super) mod pod;

use std::io::{self, IsTerminal};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, bail};
use clap::{Args, Subcommand};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use serde_json::Value;

use self::columns::Columns;
use self::format::Format;
use super::again::again;
use super::args::{AgentArgs, pod_name};
use super::print::print;
use super::{complete, finish, plain, why::Warnings};
use beelet_client::{Client, ClientError, Event};
use beelet_codec::ApiType as _;
use beelet_model::table::{PodEntry, PodName, PodTable, RejectedManifest};
use beelet_units::selector::Selector;

/// Arguments of `beelet get`.
#[derive(Debug, Args)]
pub struct GetArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// List pods.
    #[command(visible_aliases = ["pod", "po"])]
    Pods(PodsArgs),
    /// List ConfigMaps from the manifest directory.
    #[command(name = "configmaps", visible_aliases = ["configmap", "cm"])]
    ConfigMaps(objects::ObjectsArgs),
    /// List Secrets from the manifest directory; values only with -o json or yaml.
    #[command(visible_alias = "secret")]
    Secrets(objects::ObjectsArgs),
    /// List PriorityClasses from the manifest directory.
    #[command(name = "priorityclasses", visible_aliases = ["priorityclass", "pc"])]
    PriorityClasses(objects::ObjectsArgs),
    /// List RuntimeClasses from the manifest directory.
    #[command(name = "runtimeclasses", visible_alias = "runtimeclass")]
    RuntimeClasses(objects::ObjectsArgs),
    /// List the runtime's images, as `beelet images ls`.
    #[command(visible_alias = "image")]
    Images(crate::args::ShownArgs),
    /// List events, as `beelet events`.
    #[command(visible_aliases = ["event", "ev"])]
    Events(crate::events::EventsArgs),
    /// Show the node's capacity, allocatable resources and conditions.
    #[command(visible_alias = "nodes")]
    Node(node::NodeArgs),
}

#[derive(Debug, Args)]
struct PodsArgs {
    /// Show only these pods; a name may omit the `-NODE` suffix of static pods.
    #[arg(value_name = "NAME", value_parser = pod_name, add = complete::pods())]
    names: Vec<String>,
    /// Show only pods in this namespace.
    #[arg(short, long, value_name = "NAMESPACE", add = complete::namespaces())]
    namespace: Option<String>,
    /// Show pods in all namespaces. This is the default; accepted for compatibility with kubectl.
    #[arg(short = 'A', long, conflicts_with = "namespace")]
    all_namespaces: bool,
    /// Label selector, e.g. `app=shop,tier!=db`.
    #[arg(short = 'l', long, value_name = "SELECTOR")]
    selector: Option<Selector>,
    /// Output format: table, wide, json, yaml, name, jsonpath=TEMPLATE or custom-columns=TITLE:PATH,...
    #[arg(short, long, value_name = "FORMAT", default_value = "table", add = complete::formats())]
    output: Format,
    /// Omit the line of titles.
    #[arg(long)]
    no_headers: bool,
    /// Add a column with the pods' labels.
    #[arg(long)]
    show_labels: bool,
    /// Path of the field to sort by, e.g. `.metadata.creationTimestamp`.
    #[arg(long, value_name = "PATH", conflicts_with = "watch")]
    sort_by: Option<path::Path>,
    /// Watch for changes after listing the pods, until interrupted.
    #[arg(short, long)]
    watch: bool,
    #[command(flatten)]
    agent: AgentArgs,
}

/// Prints the objects.
#[must_use]
pub fn run(args: &GetArgs) -> ExitCode {
    finish(async {
        match &args.what {
            What::Pods(args) => get(args).await,
            What::Node(args) => node::get(args).await,
            What::ConfigMaps(args) => objects::get("ConfigMap", args).await,
            What::Secrets(args) => objects::get("Secret", args).await,
            What::PriorityClasses(args) => objects::get("PriorityClass", args).await,
            What::RuntimeClasses(args) => objects::get("RuntimeClass", args).await,
            What::Images(args) => crate::images::list(args).await,
            What::Events(args) => crate::events::events(args).await,
        }
    })
}

async fn get(args: &PodsArgs) -> anyhow::Result<()> {
    let mut client = Client::connect(&args.agent.socket).await?;
    if !args.watch {
        let (table, notice) = client.pods.list().await?;
        let warnings = if args.is_wide() { Warnings::read(&mut client).await? } else { Warnings::default() };
        show(args, &table, &warnings)?;
        show_notice(&notice);
        return Ok(());
    }
    tokio::select! {
        done = follow(args, client) => done,
        interrupted = tokio::signal::ctrl_c() => interrupted.context("cannot wait for Ctrl-C"),
    }
}

impl PodsArgs {
    fn wants(&self, name: &PodName, entry: &PodEntry) -> bool {
        let has_labels = |selector: &Selector| selector.matches(entry.pod.metadata.labels.as_ref());
        self.namespace.as_ref().is_none_or(|namespace| *namespace == name.namespace)
            && (self.names.is_empty() || self.names.iter().any(|wanted| entry.is_called(name, wanted)))
            && self.selector.as_ref().is_none_or(has_labels)
    }

    fn is_wide(&self) -> bool {
        self.output == Format::Wide
    }

    fn columns(&self) -> Columns {
        let mut titles = if self.is_wide() { pod::WIDE } else { pod::NARROW }.to_vec();
        titles.extend(self.show_labels.then_some("LABELS"));
        Columns::new(&titles).titled(!self.no_headers)
    }

    fn row(&self, entry: &PodEntry, warnings: &Warnings) -> Vec<String> {
        let mut row = pod::row(entry, Timestamp::now(), self.is_wide().then_some(warnings));
        row.extend(self.show_labels.then(|| pod::labels(&entry.pod)));
        row
    }
}

fn show(args: &PodsArgs, table: &PodTable, warnings: &Warnings) -> anyhow::Result<()> {
    let chosen = table.pods.iter().filter(|(name, entry)| args.wants(name, entry));
    let mut chosen: Vec<&Arc<PodEntry>> = chosen.map(|(_, entry)| entry).collect();
    let is_shown = |wanted: &&String| chosen.iter().any(|one| one.is_called(&PodName::of(&one.pod), wanted));
    if let Some(missing) = args.names.iter().find(|name| !is_shown(name)) {
        bail!("pod {missing:?} not found; `beelet get pods` lists all pods");
    }
    if let Some(path) = &args.sort_by {
        chosen.sort_by(|a, b| path.compare(&a.pod.to_value(), &b.pod.to_value()));
    }
    let text = if !args.output.is_table() {
        let values: Vec<Value> = chosen.iter().map(|entry| entry.pod.to_value()).collect();
        let list = |_: &[Value]| beelet_codec::list::<Pod>(chosen.iter().map(|entry| &entry.pod));
        args.output.text(&values, args.names.len() == 1, !args.no_headers, list)?
    } else if chosen.is_empty() {
        eprintln!("No pods found.");
        String::new()
    } else {
        let rows: Vec<_> = chosen.iter().map(|entry| args.row(entry, warnings)).collect();
        args.columns().table(&rows)
    };
    print(&text)?;
    show_rejected(&table.rejected);
    Ok(())
}

/// Prints all pods, then each changed pod, also across restarts of the agent.
async fn follow(args: &PodsArgs, mut client: Client) -> anyhow::Result<()> {
    let mut watcher = Watcher { args, columns: args.columns(), shown: None };
    loop {
        let why = watcher.watch(&mut client).await?;
        client = again(&args.agent.socket, why).await?;
    }
}

/// State of a watch.
struct Watcher<'a> {
    args: &'a PodsArgs,
    columns: Columns,
    /// The printed pods; None before the first complete list.
    shown: Option<PodTable>,
}

impl Watcher<'_> {
    /// Prints the stream's changes and returns the reason of its end.
    async fn watch(&mut self, client: &mut Client) -> anyhow::Result<ClientError> {
        let mut watch = match client.pods.watch().await {
            Ok(watch) => watch,
            Err(error) => return Ok(error),
        };
        let mut table = PodTable::default();
        let mut synced = false;
        loop {
            let event = match watch.next().await {
                Ok(Some(event)) => event,
                Ok(None) => return Ok(ClientError::Gone),
                Err(error) => return Ok(error),
            };
            match &event {
                Event::Synced => {
                    synced = true;
                    self.catch_up(std::mem::take(&mut table))?;
                    continue;
                }
                Event::Rejected(rejected) if synced => show_rejected(rejected),
                Event::Notice(notice) if notice.is_empty() => eprintln!("showing current pods again"),
                Event::Notice(notice) => show_notice(notice),
                Event::Added(name, entry) | Event::Modified(name, entry) | Event::Deleted(name, entry)
                    if synced =>
                {
                    self.show(name, entry)?;
                }
                _ => {}
            }
            event.apply(self.shown.as_mut().filter(|_| synced).unwrap_or(&mut table));
        }
    }

    /// Prints all pods the first time, later only the pods that have changed.
    fn catch_up(&mut self, table: PodTable) -> anyhow::Result<()> {
        let before = self.shown.take();
        if before.is_none() {
            let wanted = table.pods.iter().filter(|(name, entry)| self.args.wants(name, entry));
            wanted.for_each(|(_, entry)| self.columns.fit(&self.args.row(entry, &Warnings::default())));
            if self.args.output.is_table() {
                print(&self.columns.header())?;
            }
        }
        let before = before.unwrap_or_default();
        for (name, entry) in &table.pods {
            if before.pods.get(name).is_none_or(|old| old.pod != entry.pod) {
                self.show(name, entry)?;
            }
        }
        for (name, entry) in before.pods.iter().filter(|(name, _)| !table.pods.contains_key(*name)) {
            self.show(name, entry)?;
        }
        if before.rejected != table.rejected {
            show_rejected(&table.rejected);
        }
        self.shown = Some(table);
        Ok(())
    }

    fn show(&mut self, name: &PodName, entry: &PodEntry) -> anyhow::Result<()> {
        if self.args.wants(name, entry) {
            print(&one(self.args, &mut self.columns, entry)?)?;
        }
        Ok(())
    }
}

/// Returns the text of one pod in a watch.
fn one(args: &PodsArgs, columns: &mut Columns, entry: &PodEntry) -> anyhow::Result<String> {
    let value = || entry.pod.to_value();
    Ok(match &args.output {
        Format::Json => format!("{}\n", value()),
        Format::Yaml => {
            let text = beelet_codec::yaml(&value()).context("cannot convert the pod to YAML")?;
            format!("---\n{text}")
        }
        Format::Table | Format::Wide => {
            // Reasons from events appear only without --watch.
            let row = args.row(entry, &Warnings::default());
            columns.fit(&row);
            columns.line(&row)
        }
        // A watch prints no titles of custom columns, because their widths are unknown.
        other => other.text(&[value()], true, false, |_| Value::Null)?,
    })
}

/// Prints to standard error why the pods may be outdated.
pub(super) fn show_notice(notice: &str) {
    if !notice.is_empty() {
        eprintln!("showing the last known state of pods: {notice}");
    }
}

/// Prints rejected manifests to standard error, so that standard output has only pods.
fn show_rejected(rejected: &[RejectedManifest]) {
    if rejected.is_empty() {
        return;
    }
    let style = console::Style::new().for_stderr().red();
    let style = if io::stderr().is_terminal() { style } else { console::Style::new() };
    eprintln!("{}", style.apply_to("Rejected manifests:"));
    rejected.iter().flat_map(reasons).for_each(|line| eprintln!("  {line}"));
}

/// Returns one line per reason.
fn reasons(rejected: &RejectedManifest) -> Vec<String> {
    rejected.reasons().iter().map(|line| plain::line(line).into_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_of_a_rejected_manifest_cannot_leave_its_line() {
        let rejected = RejectedManifest { file: "/m/web.yaml".into(), message: "web.yaml: \u{1b}[2J".into() };
        assert_eq!(reasons(&rejected), ["/m/web.yaml: \\u{1b}[2J"]);
    }
}
