//! `beelet cordon`, `beelet uncordon` and `beelet drain`: takes the pods off a cluster's node, from the node
//! itself. The agent need not run.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::bail;
use beelet_cluster::{client::Client, drain, drain::Step, kubeconfig};
use beelet_policy::node::drain::Options;
use beelet_units::selector::Selector;
use clap::Args;

use super::{finish, plain, print::print, until};

/// Kubeconfigs of a node, in the order of the search: kubeadm's, and the one of distributions without it.
const KUBECONFIGS: [&str; 2] = ["/etc/kubernetes/kubelet.conf", "/var/lib/kubelet/kubeconfig"];

/// The Node, and the identity that changes it.
#[derive(Debug, Args)]
struct NodeArgs {
    /// Name of the Node. Default: the node of the kubeconfig's client certificate, or the host name.
    #[arg(value_name = "NODE")]
    node: Option<String>,
    /// Kubeconfig for the API server. Default: the node's own, /etc/kubernetes/kubelet.conf or
    /// /var/lib/kubelet/kubeconfig.
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
}

/// Arguments of `beelet cordon` and `beelet uncordon`.
///
/// Exit codes: 0 if the Node is in the wanted state, 1 on failure.
#[derive(Debug, Args)]
pub struct CordonArgs {
    #[command(flatten)]
    node: NodeArgs,
}

/// Arguments of `beelet drain`.
///
/// Exit codes: 0 if the pods have left, 1 if a pod may not be evicted, on timeout and on failure. The Node
/// stays cordoned in each case.
#[derive(Debug, Args)]
#[command(
    after_help = "Pods of DaemonSets and static pods stay. PodDisruptionBudgets are respected: a refused eviction is repeated.

Examples:
  beelet drain --timeout=10m
  beelet drain --delete-emptydir-data --force
  beelet drain w1 --kubeconfig /etc/kubernetes/admin.conf --dry-run
  beelet uncordon"
)]
pub struct DrainArgs {
    #[command(flatten)]
    node: NodeArgs,
    /// Maximum time to wait, e.g. `90s` or `5m`; 0: no limit.
    #[arg(long, value_name = "TIME", value_parser = until::duration, default_value = "0")]
    timeout: Duration,
    /// Grace period of the pods in seconds. Default: the period of each pod.
    #[arg(long, value_name = "SECONDS")]
    grace_period: Option<u64>,
    /// Evict also pods that no controller creates again.
    #[arg(long)]
    force: bool,
    /// Evict also pods with emptyDir volumes, whose data are lost.
    #[arg(long)]
    delete_emptydir_data: bool,
    /// Evict only pods that this label selector selects.
    #[arg(long, value_name = "SELECTOR")]
    pod_selector: Option<Selector>,
    /// Change nothing; print the pods that would stay and those that may not be evicted.
    #[arg(long)]
    dry_run: bool,
    /// Accepted for scripts of kubectl: pods of DaemonSets always stay.
    #[arg(long, hide = true)]
    ignore_daemonsets: bool,
}

/// Cordons the Node.
#[must_use]
pub fn cordon(args: &CordonArgs) -> ExitCode {
    finish(set_schedulable(args, false))
}

/// Uncordons the Node.
#[must_use]
pub fn uncordon(args: &CordonArgs) -> ExitCode {
    finish(set_schedulable(args, true))
}

/// Drains the Node.
#[must_use]
pub fn run(args: &DrainArgs) -> ExitCode {
    finish(drain(args))
}

async fn set_schedulable(args: &CordonArgs, schedulable: bool) -> anyhow::Result<()> {
    let (client, node) = connect(&args.node).await?;
    let changed = drain::set_unschedulable(&client, &node, !schedulable).await?;
    say(&node, false, Step::Schedulable(schedulable, changed));
    Ok(())
}

async fn drain(args: &DrainArgs) -> anyhow::Result<()> {
    let (client, node) = connect(&args.node).await?;
    let task = drain::Task {
        node: node.clone(),
        options: Options {
            force: args.force,
            delete_empty_dir_data: args.delete_emptydir_data,
            selector: args.pod_selector.clone().unwrap_or_default(),
        },
        grace_seconds: args.grace_period,
        timeout: (!args.timeout.is_zero()).then_some(args.timeout),
        dry_run: args.dry_run,
    };
    drain::drain(&client, &task, &mut |step| say(&node, args.dry_run, step)).await?;
    let done = if args.dry_run { "can be drained" } else { "drained" };
    print(&format!("node/{} {done}\n", plain::line(&node)))?;
    Ok(())
}

/// Prints a step as one line. A drain goes on if the reader of standard output has closed it.
fn say(node: &str, dry_run: bool, step: Step) {
    let dry = if dry_run { " (dry run)" } else { "" };
    let line = match step {
        Step::Schedulable(schedulable, changed) => {
            let word = if schedulable { "uncordoned" } else { "cordoned" };
            let already = if changed || dry_run { "" } else { "already " };
            format!("node/{node} {already}{word}{dry}")
        }
        Step::Stays(pod, why) => format!("pod {pod} stays: {why}"),
        Step::Loses(pod, loss) => format!("warning: pod {pod}: {loss}"),
        Step::Evicted(pod) => format!("evicting pod {pod}"),
        Step::Refused(pod, why) => format!("pod {pod} is not evicted yet: {why}"),
        Step::Left(pod) => format!("pod {pod} has left"),
        Step::Failed(why) => format!("warning: {why}; retrying"),
    };
    let _ = print(&format!("{}\n", plain::line(&line)));
}

/// Returns a client and the Node's name.
async fn connect(args: &NodeArgs) -> anyhow::Result<(Client, String)> {
    let own = || KUBECONFIGS.map(PathBuf::from).into_iter().find(|path| path.exists());
    let Some(kubeconfig) = args.kubeconfig.clone().or_else(own) else {
        bail!(
            "no kubeconfig: neither {} nor {} exists; name one with --kubeconfig. A node without an API server \
             has no evictions: `beelet delete` ends its pods",
            KUBECONFIGS[0],
            KUBECONFIGS[1]
        );
    };
    let client = drain::open(&kubeconfig).await?;
    let node = match &args.node {
        Some(node) => node.clone(),
        None => own_name(&kubeconfig)?,
    };
    Ok((client, node))
}

/// Returns the name of the node of a kubeconfig, or else the host's name as a kubelet would write it.
fn own_name(kubeconfig: &Path) -> anyhow::Result<String> {
    Ok(kubeconfig::node_name(kubeconfig)?
        .unwrap_or_else(|| rustix::system::uname().nodename().to_string_lossy().trim().to_ascii_lowercase()))
}
