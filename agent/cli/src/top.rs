//! `beelet top`: live resource usage and waits of pods and containers.
//!
//! On a terminal the command draws a screen; otherwise, or with `--once`, it prints one table; with `-o json`
//! it prints one snapshot. The screen is redrawn only when a snapshot from the agent arrives or a key is
//! pressed.

mod app;
mod causes;
mod columns;
mod draw;
mod row;
mod rows;
mod screen;
mod table;

use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use beelet_proto::beelet::SignalSnapshot;
use clap::{Args, ValueEnum};

use self::causes::Causes;
use self::columns::{COLUMNS, Column};
use self::row::Row;
use self::rows::{Trends, View, Window, rows};
use super::args::{AgentArgs, Output, pod_name};
use super::{complete, finish};
use beelet_client::signals::Client;

/// Arguments of `beelet top`.
#[derive(Debug, Args)]
pub struct TopArgs {
    /// Kind, as for `kubectl top`: prints one table and exits.
    #[arg(value_enum, value_name = "KIND")]
    kind: Option<Kind>,
    /// Show only this pod; its name may omit the `-NODE` suffix of static pods. With the kind node: name of
    /// the node.
    #[arg(value_name = "NAME", value_parser = pod_name, add = complete::pods())]
    name: Option<String>,
    /// Show only pods in this namespace.
    #[arg(short, long, value_name = "NAMESPACE", add = complete::namespaces(), default_value = "", hide_default_value = true)]
    namespace: String,
    /// Print one table and exit (the default if standard output is not a terminal).
    #[arg(long)]
    once: bool,
    /// Output format; implies --once.
    #[arg(short, long, value_enum)]
    output: Option<Output>,
    /// Column to sort by, largest first.
    #[arg(long, value_enum, default_value_t = Column::Cpu)]
    sort: Column,
    /// Reverse the sort order.
    #[arg(long)]
    reverse: bool,
    /// Show only rows whose name or state contains TEXT.
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    filter: String,
    /// Averaging window of rates.
    #[arg(long, value_enum, default_value_t = Window::Ten)]
    window: Window,
    /// Show containers in addition to pods.
    #[arg(short, long)]
    expand: bool,
    #[command(flatten)]
    agent: AgentArgs,
}

/// A kind that `kubectl top` takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Kind {
    /// Pods.
    #[value(aliases = ["pods", "po"])]
    Pod,
    /// The machine, with its pods.
    #[value(aliases = ["nodes", "no"])]
    Node,
}

impl TopArgs {
    fn view(&self) -> View {
        View {
            window: self.window,
            sort: self.sort,
            reversed: self.reverse,
            filter: self.filter.clone(),
            expanded: std::collections::HashSet::new(),
            all_expanded: self.expand,
            whole: self.namespace.is_empty() && self.name.is_none(),
        }
    }
}

/// Runs the screen or prints one table.
#[must_use]
pub fn run(args: &TopArgs) -> ExitCode {
    let once = args.once || args.kind.is_some() || args.output.is_some() || !io::stdout().is_terminal();
    finish(async { if once { print_once(args).await } else { watch(args).await } })
}

async fn watch(args: &TopArgs) -> anyhow::Result<()> {
    // The connection comes before the screen, so that its error appears as plain text.
    let mut client = Client::connect(&args.agent.socket).await?;
    let snapshots = client.snapshots(&args.namespace).await?;
    screen::run(app::App::new(args.view()), args, snapshots).await
}

async fn print_once(args: &TopArgs) -> anyhow::Result<()> {
    let mut snapshot = tokio::select! {
        snapshot = with_rates(args) => snapshot?,
        interrupted = tokio::signal::ctrl_c() => return interrupted.context("cannot wait for Ctrl-C"),
    };
    if let Some(name) = &args.name {
        select(&mut snapshot, args.kind, name)?;
    }
    let text = match args.output {
        Some(Output::Json) => format!("{}\n", serde_json::to_string_pretty(&snapshot)?),
        _ => {
            if causes::are_wanted(&snapshot) {
                Causes::ask(&args.agent.socket).await.apply_to(&mut snapshot);
            }
            table(&snapshot, &args.view())
        }
    };
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()?;
    Ok(())
}

/// Keeps the pod of this name, or with the kind node all pods.
///
/// # Errors
/// No pod has the name, or the node has another one.
fn select(snapshot: &mut SignalSnapshot, kind: Option<Kind>, name: &str) -> anyhow::Result<()> {
    if kind == Some(Kind::Node) {
        if !name.eq_ignore_ascii_case(&snapshot.node) {
            bail!("node {name:?} not found; the node of this agent is {:?}", snapshot.node);
        }
        return Ok(());
    }
    keep(snapshot, name);
    if snapshot.pods.is_empty() {
        bail!("pod {name:?} not found; `beelet get pods` lists all pods");
    }
    Ok(())
}

/// Removes the pods that have another name. The name may omit the node's suffix.
fn keep(snapshot: &mut SignalSnapshot, name: &str) {
    let whole = format!("{name}-{}", snapshot.node.to_lowercase());
    snapshot.pods.retain(|pod| pod.name == name || pod.name == whole);
}

/// Returns a snapshot with rates: usually the second one, unless the agent was measuring already.
async fn with_rates(args: &TopArgs) -> anyhow::Result<SignalSnapshot> {
    /// Maximum snapshots to wait for: a node may have no measurable container.
    const TRIES: usize = 3;
    let mut client = Client::connect(&args.agent.socket).await?;
    let mut snapshots = client.snapshots(&args.namespace).await?;
    let mut last = None;
    for _ in 0..TRIES {
        let next = tokio::time::timeout(Duration::from_secs(15), snapshots.message()).await;
        let next = next.context("the agent sent no snapshot within 15 s: run `beelet doctor`")?;
        let snapshot = next.map_err(beelet_client::ClientError::from)?.context("the agent stopped")?;
        let running = || snapshot.pods.iter().flat_map(|pod| &pod.containers).filter(|c| c.usage.is_some());
        let has_rates = running().all(|container| container.last_10s.is_some());
        // Without containers every rate is present, but the first snapshot may have been too early.
        if has_rates && (last.is_some() || running().next().is_some()) {
            return Ok(snapshot);
        }
        last = Some(snapshot);
    }
    last.context("the agent stopped")
}

/// Returns a table for people and for `grep`: all columns, untruncated, without colours.
fn table(snapshot: &SignalSnapshot, view: &View) -> String {
    let rows = rows(snapshot, view, &Trends::default());
    let shown = || COLUMNS.iter().filter(|info| info.column != Column::Trend);
    let name = |row: &Row| if row.is_pod { row.name.clone() } else { format!("  {}", row.name) };
    let widest = rows.iter().map(|row| name(row).chars().count()).max().unwrap_or(0);
    let widest = widest.max(Column::Name.title().len());
    let mut text = format!("{:widest$}", Column::Name.title());
    for info in shown() {
        text += &format!(" {:>width$}", info.title, width = usize::from(info.width));
    }
    text += &format!(" {}\n", Column::State.title());
    for row in &rows {
        text += &format!("{:widest$}", name(row));
        for info in shown() {
            text += &format!(" {:>width$}", (info.cell)(row).0, width = usize::from(info.width));
        }
        text += &format!(" {}", row.state);
        if !row.why.is_empty() && row.why != row.state {
            text += &format!("  {}", row.why);
        }
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::rows::tests::{snapshot, view};
    use super::*;

    #[test]
    fn a_pods_name_may_omit_the_nodes_suffix() {
        let mut snapshot = snapshot(&[("shop", "web-n1", 0.25, 1.0), ("shop", "web-2-n1", 0.5, 1.0)]);
        snapshot.node = "N1".to_owned();
        keep(&mut snapshot, "web");
        let names: Vec<&str> = snapshot.pods.iter().map(|pod| pod.name.as_str()).collect();
        assert_eq!(names, ["web-n1"]);
        keep(&mut snapshot, "web-n1");
        assert_eq!(snapshot.pods.len(), 1);
    }

    #[test]
    fn the_name_of_the_kind_node_is_the_nodes() {
        let mut snapshot = snapshot(&[("shop", "web-n1", 0.25, 1.0), ("shop", "db", 0.5, 1.0)]);
        snapshot.node = "n1".to_owned();
        select(&mut snapshot, Some(Kind::Node), "n1").unwrap();
        assert_eq!(snapshot.pods.len(), 2);
        assert!(select(&mut snapshot, Some(Kind::Node), "web").unwrap_err().to_string().contains("\"n1\""));
        select(&mut snapshot, Some(Kind::Pod), "web").unwrap();
        assert_eq!(snapshot.pods.len(), 1);
        assert!(select(&mut snapshot, Some(Kind::Pod), "n1").is_err());
    }

    #[test]
    fn printed_once_it_has_every_pod_every_column_and_no_colours() {
        let snapshot = snapshot(&[("shop", "web", 0.25, 1200.0), ("shop", "db", 0.5, 5.0)]);
        let text = table(&snapshot, &View { all_expanded: true, ..view() });
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 7);
        assert!(
            lines[0].starts_with("POD / CONTAINER RDY   CPU% THR%") && lines[0].ends_with("AGE STATE"),
            "{text}"
        );
        assert!(lines[1].starts_with("shop/db") && lines[1].contains(" yes  100.0   25"), "{text}");
        assert!(lines[2].starts_with("  app ") && lines[2].ends_with(" Running"), "{text}");
        assert!(!text.contains('\u{1b}'));
    }
}
