//! `beelet get pods`: what runs here, from the agent's own socket.

pub(super) mod columns;
pub(super) mod node;
pub(super) mod objects;
pub(super) mod pod;

use std::io::{self, IsTerminal};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, bail};
use clap::{Args, Subcommand, ValueEnum};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;

use self::columns::Columns;
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
    /// The pods of this machine.
    #[command(visible_aliases = ["pod", "po"])]
    Pods(PodsArgs),
    /// The ConfigMaps of the manifests' folder.
    #[command(name = "configmaps", visible_aliases = ["configmap", "cm"])]
    ConfigMaps(objects::ObjectsArgs),
    /// The Secrets of the manifests' folder; their values only with -o json or yaml.
    #[command(visible_alias = "secret")]
    Secrets(objects::ObjectsArgs),
    /// The PriorityClasses of the manifests' folder.
    #[command(name = "priorityclasses", visible_aliases = ["priorityclass", "pc"])]
    PriorityClasses(objects::ObjectsArgs),
    /// The RuntimeClasses of the manifests' folder.
    #[command(name = "runtimeclasses", visible_alias = "runtimeclass")]
    RuntimeClasses(objects::ObjectsArgs),
    /// The runtime's images: `beelet images ls`.
    #[command(visible_alias = "image")]
    Images(crate::args::ShownArgs),
    /// What happened to pods, and what went wrong: `beelet events`.
    #[command(visible_aliases = ["event", "ev"])]
    Events(crate::events::EventsArgs),
    /// What this machine has, and what pods may have of it.
    #[command(visible_alias = "nodes")]
    Node(node::NodeArgs),
}

#[derive(Debug, Args)]
struct PodsArgs {
    /// Only these pods, with or without the node's name at their end.
    #[arg(value_name = "NAME", value_parser = pod_name, add = complete::pods())]
    names: Vec<String>,
    /// Only pods of this namespace.
    #[arg(short, long, value_name = "NAMESPACE", add = complete::namespaces())]
    namespace: Option<String>,
    /// Pods of all namespaces. The default; here for the habit.
    #[arg(short = 'A', long, conflicts_with = "namespace")]
    all_namespaces: bool,
    /// Only pods with such labels (`app=shop,tier!=db`).
    #[arg(short = 'l', long, value_name = "SELECTOR")]
    selector: Option<Selector>,
    /// How they are shown.
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    output: Output,
    /// After all pods, show each one again when it changes, until interrupted.
    #[arg(short, long)]
    watch: bool,
    #[command(flatten)]
    agent: AgentArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Output {
    /// One line per pod.
    Table,
    /// The same with addresses, QoS class, how long the last readiness change took from the kernel's event,
    /// and why a pod isn't ready.
    Wide,
    /// A v1.PodList; with --watch one v1.Pod per line.
    Json,
    /// A v1.PodList; with --watch one document per pod.
    Yaml,
}

/// Shows them.
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
        let (table, notice) = client.pods().await?;
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
        self.output == Output::Wide
    }

    fn columns(&self) -> Columns {
        Columns::new(if self.is_wide() { pod::WIDE } else { pod::NARROW })
    }

    fn row(&self, entry: &PodEntry, warnings: &Warnings) -> Vec<String> {
        pod::row(entry, Timestamp::now(), self.is_wide().then_some(warnings))
    }
}

fn show(args: &PodsArgs, table: &PodTable, warnings: &Warnings) -> anyhow::Result<()> {
    let chosen: Vec<&Arc<PodEntry>> =
        table.pods.iter().filter(|(name, entry)| args.wants(name, entry)).map(|(_, entry)| entry).collect();
    let is_shown = |wanted: &&String| chosen.iter().any(|one| one.is_called(&PodName::of(&one.pod), wanted));
    if let Some(missing) = args.names.iter().find(|name| !is_shown(name)) {
        bail!("there is no pod {missing:?}; `beelet get pods` shows all");
    }
    let list = || beelet_codec::list::<Pod>(chosen.iter().map(|entry| &entry.pod));
    let text = match args.output {
        Output::Json => format!("{:#}\n", list()),
        Output::Yaml => beelet_codec::yaml(&list()).context("the pods")?,
        Output::Table | Output::Wide if chosen.is_empty() => {
            eprintln!("No pods found.");
            String::new()
        }
        Output::Table | Output::Wide => {
            let rows: Vec<_> = chosen.iter().map(|entry| args.row(entry, warnings)).collect();
            args.columns().table(&rows)
        }
    };
    print(&text)?;
    show_rejected(&table.rejected);
    Ok(())
}

/// The watch: all pods first, then each that changes, also over restarts of the agent.
async fn follow(args: &PodsArgs, mut client: Client) -> anyhow::Result<()> {
    let mut watcher = Watcher { args, columns: args.columns(), shown: None };
    loop {
        let why = watcher.watch(&mut client).await?;
        client = again(&args.agent.socket, why).await?;
    }
}

/// What a watch has shown.
struct Watcher<'a> {
    args: &'a PodsArgs,
    columns: Columns,
    /// None before the first time that all pods were told.
    shown: Option<PodTable>,
}

impl Watcher<'_> {
    /// Shows what comes; why nothing comes any more.
    async fn watch(&mut self, client: &mut Client) -> anyhow::Result<ClientError> {
        let mut watch = match client.watch().await {
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
                Event::Notice(notice) if notice.is_empty() => eprintln!("Pods are shown as they are again."),
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

    /// Shows what is there: all of it at first, later what is not as it was shown.
    fn catch_up(&mut self, table: PodTable) -> anyhow::Result<()> {
        let before = self.shown.take();
        if before.is_none() {
            let wanted = table.pods.iter().filter(|(name, entry)| self.args.wants(name, entry));
            wanted.for_each(|(_, entry)| self.columns.fit(&self.args.row(entry, &Warnings::default())));
            if matches!(self.args.output, Output::Table | Output::Wide) {
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

/// One pod as the watch shows it.
fn one(args: &PodsArgs, columns: &mut Columns, entry: &PodEntry) -> anyhow::Result<String> {
    Ok(match args.output {
        Output::Json => format!("{}\n", entry.pod.to_value()),
        Output::Yaml => format!("---\n{}", beelet_codec::yaml(&entry.pod.to_value()).context("the pod")?),
        Output::Table | Output::Wide => {
            // What events know comes with the table alone.
            let row = args.row(entry, &Warnings::default());
            columns.fit(&row);
            columns.line(&row)
        }
    })
}

/// Why pods may not be as they are shown goes to standard error, too.
pub(super) fn show_notice(notice: &str) {
    if !notice.is_empty() {
        eprintln!("Pods are shown as they were last known: {notice}");
    }
}

/// Manifests that could not become pods go to standard error, so that standard output has only pods.
fn show_rejected(rejected: &[RejectedManifest]) {
    if rejected.is_empty() {
        return;
    }
    let style = console::Style::new().for_stderr().red();
    let style = if io::stderr().is_terminal() { style } else { console::Style::new() };
    eprintln!("{}", style.apply_to("Rejected manifests:"));
    rejected.iter().flat_map(reasons).for_each(|line| eprintln!("  {line}"));
}

/// A line for each reason.
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
