//! Fleet of real agents on one machine: the API server, etcd, the controllers and the scheduler are
//! Kubernetes' own; only the container runtimes are in memory. The agents have no kernel programs
//! (`bpf: off`), which a machine shares. `KUBE_APISERVER`, `ETCD`, `KUBE_CONTROLLER_MANAGER` and
//! `KUBE_SCHEDULER` name the programs.
//!
//! - `agent_rss`, `agent_cpu`: of each agent, at rest with one pod.
//! - `rest_requests`, `rest_watches`: requests per minute and open watches of each node, at rest.
//! - `rest_apiserver`, `rest_etcd`: their CPU time per node, without that of an empty cluster.
//! - `roll_*`: rolling update of a DaemonSet with one pod on each node, a tenth of the nodes at once.
//! - `outage_agent_cpu`: of each agent while the API server is away. `outage_back`: from the server's start
//!   until each node has renewed its lease. `outage_requests`: of each node in the first minute.
//!   `outage_peak`: requests of all nodes in the busiest second, divided by the nodes.
//! - `paper_*`: larger fleets by arithmetic, from the rows at rest: requests per second, and CPUs.
//!
//! The requests by verb and resource are printed on standard error. They come from the audit log, where a
//! watch counts once, at its start.

mod audit;
mod nodes;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use beelet_tests::cluster::{Cluster, Controllers};
use beelet_tests::images;
use beelet_tests::machine::{cpu_of, resident_kib};
use beelet_tests::requires;
use beelet_tests::workdir::interrupted;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::{Value, json};

use super::Row;
use super::owner::pause;
use audit::{Audit, Kind};
use nodes::Fleet;
use xtask::progress::Step;

/// Number of agents unless `--nodes` has another one.
const NODES: usize = 50;
const QUICK: usize = 5;
/// Bound of `outage_peak`: a node needs about this many requests to be up to date again, so that a storm
/// would be more than all nodes at once.
const PEAK: f64 = 10.0;
/// Sizes of the fleets on paper, with the names of their rows.
const PAPER: [(f64, &str, &str, &str); 2] = [
    (5_000.0, "paper_5000_requests", "paper_5000_apiserver", "paper_5000_etcd"),
    (130_000.0, "paper_130k_requests", "paper_130k_apiserver", "paper_130k_etcd"),
];

/// Times of the phases.
struct Times {
    settle: Duration,
    rest: Duration,
    outage: Duration,
}

/// CPU time so far, in milliseconds.
struct Used {
    agents: Vec<f64>,
    server: f64,
    etcd: f64,
}

impl Used {
    fn now(cluster: &Cluster, fleet: &Fleet) -> Result<Used> {
        let ms = |pid: u32| anyhow::Ok(cpu_of(pid)?.as_secs_f64() * 1e3);
        let (server, etcd) = cluster.pids();
        Ok(Used {
            agents: fleet.pids()?.into_iter().map(ms).collect::<Result<_>>()?,
            // A killed server has used no more.
            server: server.map_or(Ok(0.0), ms)?,
            etcd: etcd.map_or(Ok(0.0), ms)?,
        })
    }

    fn since(&self, before: &Used) -> Used {
        let agents = self.agents.iter().zip(&before.agents).map(|(now, before)| now - before).collect();
        Used { agents, server: self.server - before.server, etcd: self.etcd - before.etcd }
    }
}

/// Adds all rows.
pub(super) fn run(binary: &Path, quick: bool, count: Option<usize>, rows: &mut Vec<Row>) -> Result<()> {
    if let Err(missing) = requires::apiserver().and_then(|()| requires::controllers()) {
        eprintln!("fleet: not measured: {missing}");
        return Ok(());
    }
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit })
        .context("cannot raise the limit of open files to its maximum")?;
    let count = count.unwrap_or(if quick { QUICK } else { NODES });
    let seconds = |quickly, fully| Duration::from_secs(if quick { quickly } else { fully });
    let times = Times { settle: seconds(10, 60), rest: seconds(20, 120), outage: seconds(20, 120) };
    let mut cluster = Cluster::start_for_test()?;
    let _controllers = Controllers::start(&cluster)?;
    let empty = empty_cluster(&cluster, &times)?;
    let fleet = Fleet::start(binary, count, &cluster)?;
    deploy(&cluster, &fleet, "1")?;
    let rest = at_rest(&cluster, &fleet, &empty, &times, rows)?;
    let roll = roll(&cluster, &fleet, rows)?;
    let outage = outage(&mut cluster, &fleet, &times, rows)?;
    print(&rest, &roll, &outage, count, times.rest);
    Ok(())
}

/// Returns the CPU time per millisecond of a cluster without nodes.
fn empty_cluster(cluster: &Cluster, times: &Times) -> Result<Used> {
    let step = Step::start("fleet: a cluster without nodes");
    let none = Fleet::default();
    pause(times.settle)?;
    let (before, began) = (Used::now(cluster, &none)?, Instant::now());
    pause(times.rest)?;
    let used = Used::now(cluster, &none)?.since(&before);
    let ms = began.elapsed().as_secs_f64() * 1e3;
    step.done("");
    Ok(Used { agents: Vec::new(), server: used.server / ms, etcd: used.etcd / ms })
}

/// Requests of the nodes in a phase, by verb and resource.
type Requests = BTreeMap<Kind, usize>;

fn at_rest(
    cluster: &Cluster,
    fleet: &Fleet,
    empty: &Used,
    times: &Times,
    rows: &mut Vec<Row>,
) -> Result<Requests> {
    let count = fleet.count() as f64;
    let step = Step::start(format!("fleet: {count} nodes at rest"));
    pause(times.settle)?;
    let (mark, before, began) = (Audit::mark(cluster)?, Used::now(cluster, fleet)?, Instant::now());
    pause(times.rest)?;
    let used = Used::now(cluster, fleet)?.since(&before);
    let minutes = began.elapsed().as_secs_f64() / 60.0;
    let asked = Audit::since(cluster, mark)?;
    let mib = |pid: u32| anyhow::Ok(resident_kib(pid)? as f64 / 1024.0);
    let resident = fleet.pids()?.into_iter().map(mib).collect::<Result<Vec<f64>>>()?;
    let per_node = |all: f64, empty: f64| (all / minutes - empty * 60e3) / count;
    let (server, etcd) = (per_node(used.server, empty.server), per_node(used.etcd, empty.etcd));
    let requests: Vec<f64> = asked.per_node(fleet).into_iter().map(|all| all / minutes).collect();
    let mean = requests.iter().sum::<f64>() / count;
    let row = |name, unit, samples| Row::unbound("fleet", name, unit, samples);
    rows.extend([
        row("nodes", "", vec![count]),
        row("agent_rss", "MiB", resident),
        row("agent_cpu", "ms/min", used.agents.iter().map(|ms| ms / minutes).collect()),
        row("rest_requests", "per min", requests),
        row("rest_watches", "", Audit::since(cluster, 0)?.open_watches(fleet)),
        row("rest_apiserver", "ms/min/node", vec![server]),
        row("rest_etcd", "ms/min/node", vec![etcd]),
    ]);
    let (pid, pid_etcd) = cluster.pids();
    for (name, pid) in [("apiserver_rss", pid), ("etcd_rss", pid_etcd)] {
        rows.extend(pid.map(mib).transpose()?.map(|mib| row(name, "MiB", vec![mib])));
    }
    for (nodes, requests, of_server, of_etcd) in PAPER {
        rows.extend([
            row(requests, "per s", vec![mean / 60.0 * nodes]),
            row(of_server, "CPUs", vec![server / 60e3 * nodes]),
            row(of_etcd, "CPUs", vec![etcd / 60e3 * nodes]),
        ]);
    }
    step.done(&format!("{mean:.1} requests per minute and node"));
    Ok(asked.by_kind())
}

/// Updates the DaemonSet's pods.
fn roll(cluster: &Cluster, fleet: &Fleet, rows: &mut Vec<Row>) -> Result<Requests> {
    let step = Step::start("fleet: rolling update of a DaemonSet");
    let (mark, before, began) = (Audit::mark(cluster)?, Used::now(cluster, fleet)?, Instant::now());
    deploy(cluster, fleet, "2")?;
    let (took, count) = (began.elapsed().as_secs_f64(), fleet.count() as f64);
    let used = Used::now(cluster, fleet)?.since(&before);
    let asked = Audit::since(cluster, mark)?;
    let row = |name, unit, samples| Row::unbound("fleet", name, unit, samples);
    rows.extend([
        row("roll_time", "s", vec![took]),
        row("roll_requests", "per node", asked.per_node(fleet)),
        row("roll_agent_cpu", "ms", used.agents),
        row("roll_apiserver", "ms/node", vec![used.server / count]),
        row("roll_etcd", "ms/node", vec![used.etcd / count]),
    ]);
    step.done(&format!("{took:.1} s"));
    Ok(asked.by_kind())
}

/// Kills the API server, and starts it again.
fn outage(cluster: &mut Cluster, fleet: &Fleet, times: &Times, rows: &mut Vec<Row>) -> Result<Requests> {
    let step = Step::start(format!("fleet: API server away for {} s", times.outage.as_secs()));
    cluster.kill_server();
    let before = Used::now(cluster, fleet)?;
    pause(times.outage)?;
    let used = Used::now(cluster, fleet)?.since(&before);
    let minutes = times.outage.as_secs_f64() / 60.0;
    let mark = Audit::mark(cluster)?;
    let began = jiff::Timestamp::now();
    cluster.start_server()?;
    pause(Duration::from_secs(60))?;
    let asked = Audit::since(cluster, mark)?;
    let count = fleet.count() as f64;
    let renewed = asked.first_renewals(fleet, began);
    if renewed.len() < fleet.count() {
        bail!("only {} of {count} nodes renewed their lease after the outage", renewed.len());
    }
    let row = |name, unit, samples| Row::unbound("fleet", name, unit, samples);
    rows.extend([
        row("outage_agent_cpu", "ms/min", used.agents.iter().map(|ms| ms / minutes).collect()),
        row("outage_back", "s", renewed),
        row("outage_requests", "per node", asked.per_node(fleet)),
        Row::one("fleet", "outage_peak", "per s, node", asked.busiest_second() as f64 / count, PEAK),
    ]);
    step.done("");
    Ok(asked.by_kind())
}

/// Applies a version of the DaemonSet, and waits until a pod of this version runs on each node.
fn deploy(cluster: &Cluster, fleet: &Fleet, version: &str) -> Result<()> {
    let step = Step::start(format!("fleet: version {version} of the DaemonSet"));
    let collection = "/apis/apps/v1/namespaces/default/daemonsets";
    let path = format!("{collection}/web");
    let change = json!({ "spec": { "template": { "metadata": { "labels": { "version": version } } } } });
    if version == "1" {
        cluster.create(collection, &daemon_set(version))?;
    } else {
        cluster.patch(&path, &change)?;
    }
    let (began, most) = (Instant::now(), Duration::from_secs(300 + 3 * fleet.count() as u64));
    loop {
        let set = cluster.get(&path)?;
        let number = |field: &str| set["status"][field].as_u64().and_then(|n| usize::try_from(n).ok());
        let is_newest = set["status"]["observedGeneration"] == set["metadata"]["generation"];
        let (updated, ready) = (number("updatedNumberScheduled"), number("numberReady"));
        step.detail(&format!("{} updated, {} ready", updated.unwrap_or(0), ready.unwrap_or(0)));
        if is_newest && updated == Some(fleet.count()) && ready == Some(fleet.count()) {
            step.done("");
            return Ok(());
        }
        if began.elapsed() > most || interrupted() {
            bail!("the DaemonSet did not roll out: {}", set["status"]);
        }
        // A client that asks rarely costs the server little.
        std::thread::sleep(Duration::from_secs(1));
    }
}

fn daemon_set(version: &str) -> Value {
    json!({
        "apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": { "name": "web" },
        "spec": {
            "selector": { "matchLabels": { "app": "web" } },
            "updateStrategy": { "type": "RollingUpdate", "rollingUpdate": { "maxUnavailable": "10%" } },
            "template": {
                "metadata": { "labels": { "app": "web", "version": version } },
                "spec": {
                    "terminationGracePeriodSeconds": 1,
                    "containers": [{ "name": "web", "image": images::APP, "imagePullPolicy": "IfNotPresent" }],
                },
            },
        },
    })
}

/// Prints the requests by verb and resource; not among the rows, which programs parse.
fn print(rest: &Requests, roll: &Requests, outage: &Requests, count: usize, time: Duration) {
    let kinds: BTreeSet<&Kind> = rest.keys().chain(roll.keys()).chain(outage.keys()).collect();
    eprintln!("requests per node:");
    eprintln!(
        "{:<8} {:<28} {:>12} {:>12} {:>12}",
        "VERB", "RESOURCE", "REST, HOUR", "UPDATE", "AFTER OUTAGE"
    );
    let hours = time.as_secs_f64() / 3600.0;
    for kind in kinds {
        let of = |all: &Requests, by: f64| all.get(kind).map_or(0.0, |n| *n as f64 / by);
        let (rest, count) = (of(rest, hours * count as f64), count as f64);
        eprintln!(
            "{:<8} {:<28} {rest:>12.1} {:>12.2} {:>12.2}",
            kind.0,
            kind.1,
            of(roll, count),
            of(outage, count)
        );
    }
}
