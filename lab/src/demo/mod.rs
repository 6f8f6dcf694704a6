//! `cargo xtask demo`: runs beelet with three real pods, and verifies what it reports about them.
//!
//! The demo uses the tests' own harness (beelet-tests): a private containerd under the target folder, images
//! built without a registry, and complete removal at the end. Everything that it shows is also checked; the
//! exit code is 0 if all checks passed.

mod cluster;
mod devices;
mod show;
mod table;

use anyhow::{Context as _, Result, bail};
use beelet_tests::agent::{Agent, Options};
use beelet_tests::cluster::Cluster;
use beelet_tests::containerd::{Containerd, Leftovers, block_on, teardown};
use beelet_tests::pods::{PodView, Watch};
use beelet_tests::workdir::PATIENCE;
use beelet_tests::{images, requires, workdir};
use console::style;
use std::path::{Path, PathBuf};
use std::time::Instant;
use xtask::progress::Step;
use xtask::setup::{self, Part};
use xtask::shell;

/// Run three pods on a private containerd, and show how beelet reacts to kernel events.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Leave the demo running, and print commands for an inspection
    #[arg(long)]
    keep: bool,

    /// Also show devices: a device plugin, and a pod with one of its devices
    #[arg(long)]
    devices: bool,

    /// Show a cluster node instead: etcd, the API server that KUBE_APISERVER names, and beelet as its node
    #[arg(long, conflicts_with = "devices")]
    cluster: bool,

    /// Stop and remove a demo started with `--keep`
    #[arg(long, conflicts_with = "keep")]
    stop: bool,
}

/// Pods of the demo, with manifests in `examples/`.
const PODS: [&str; 3] = ["orders", "web", "batch"];

/// Running demo. The agent is dropped first.
struct Demo {
    agent: Agent,
    cluster: Option<Cluster>,
    containerd: Containerd,
    checks: Vec<(String, bool)>,
}

impl Demo {
    /// Records the result of a check.
    fn check(&mut self, what: impl Into<String>, ok: bool) {
        self.checks.push((what.into(), ok));
    }

    /// Waits until `condition` holds for the pod; returns the pod.
    fn wait(
        &self,
        name: &str,
        what: &str,
        condition: impl Fn(&PodView) -> bool + Send + Sync,
    ) -> Result<PodView> {
        let what = format!("{name} {what}");
        self.agent.until(&what, |watch| watch.pod(name).filter(|pod| condition(pod)).cloned())
    }
}

/// Runs `cargo xtask demo`.
pub(crate) fn run(args: &Args) -> Result<()> {
    let dir = folder();
    if args.stop {
        teardown(&dir)?;
        return nothing_left(&dir);
    }
    let since = Instant::now();
    workdir::heed_signals()?;
    setup::ensure(Part::Demo)?;
    if let Err(missing) = requires::containerd().and_then(|()| requires::bpf()) {
        bail!("cannot run the demo here: {missing}");
    }
    if args.cluster {
        setup::ensure(Part::Cluster)?;
        if let Err(missing) = requires::apiserver() {
            bail!("cannot run the demo here: {missing}");
        }
    }
    build()?;
    if args.devices {
        devices::build()?;
    }
    let mut demo = start(&dir, args)?;
    let shown = show_all(&mut demo, args);
    if args.keep && shown.is_ok() {
        return keep(demo);
    }
    let checks = std::mem::take(&mut demo.checks);
    let log = demo.agent.log();
    let step = Step::start("remove everything");
    drop(demo);
    let left = Leftovers::of(&dir)?;
    step.done(if left == Leftovers::default() { "nothing is left behind" } else { "" });
    if let Err(error) = shown {
        let last: Vec<&str> = log.lines().rev().take(20).collect();
        let last: Vec<&str> = last.into_iter().rev().collect();
        eprintln!("Last lines of the agent's log:\n{}\n", last.join("\n"));
        return Err(error);
    }
    summary(checks, &left, since)
}

/// Returns the folder of the demo's containerd and agent.
fn folder() -> PathBuf {
    workdir::target_dir().join("demo/node")
}

/// Returns the agent's binary: `BEELET_BIN`, or the one that [`build`] built.
fn binary() -> Result<PathBuf> {
    match std::env::var_os("BEELET_BIN") {
        // The agent starts in a folder of its own.
        Some(path) => std::path::absolute(&path).with_context(|| format!("{}", path.display())),
        None => Ok(workdir::target_dir().join("debug/beelet")),
    }
}

fn build() -> Result<()> {
    let step = Step::start("build beelet and the test app");
    // With this package's features, so that crates built for it are not rebuilt.
    if std::env::var_os("BEELET_BIN").is_none() {
        step.run(shell::cargo().args(["build", "--package", "beelet", "--package", "beelet-lab"]))?;
    }
    images::build_testapp()?;
    step.done("");
    Ok(())
}

/// Starts containerd and the agent, and copies the manifests into its folder.
fn start(dir: &Path, args: &Args) -> Result<Demo> {
    let step = Step::start("start a private containerd and build its images");
    let containerd = Containerd::start(dir)?;
    let (major, minor) = containerd.version();
    step.done(&format!("containerd {major}.{minor} at {}", containerd.socket().display()));

    let cluster = if args.cluster { Some(cluster::start(&containerd)?) } else { None };
    let step = Step::start("start beelet");
    let mut options = Options::on(&containerd).beelet("nodeName", "demo").http()?;
    options.binary = Some(binary()?);
    if let Some(cluster) = &cluster {
        let kubeconfig = cluster.node_kubeconfig("demo")?;
        options.arguments.extend(["--kubeconfig".to_owned(), kubeconfig.display().to_string()]);
    }
    let agent = Agent::start(options)?;
    step.done(&format!("process {}", agent.pid().unwrap_or_default()));
    for name in PODS.iter().filter(|_| !args.cluster) {
        let file = format!("{name}.yaml");
        let example = workdir::repository().join("examples").join(&file);
        let manifest =
            std::fs::read(&example).with_context(|| format!("cannot read {}", example.display()))?;
        agent.apply(&file, manifest)?;
    }
    Ok(Demo { agent, cluster, containerd, checks: Vec::new() })
}

/// Shows all parts of the demo in order.
fn show_all(demo: &mut Demo, args: &Args) -> Result<()> {
    if args.cluster {
        return cluster::show(demo);
    }
    heading("Three manifests are in the folder; beelet runs them (examples/*.yaml)");
    until_ready(demo)?;
    show::listener(demo)?;
    show::restart(demo)?;
    show::cgroups(demo)?;
    show::get_pods(demo)?;
    if args.devices { devices::show(demo) } else { Ok(()) }
}

/// Draws the live table until every pod is ready.
fn until_ready(demo: &mut Demo) -> Result<()> {
    let mut table = table::Table::new();
    let socket = demo.agent.socket();
    block_on(async {
        let mut watch = Watch::start(&socket).await?;
        let all_ready = |watch: &Watch| PODS.iter().all(|name| watch.pod(name).is_some_and(PodView::ready));
        watch
            .until("all pods to be ready", PATIENCE, |watch| {
                table.draw(watch);
                all_ready(watch).then_some(())
            })
            .await
    })?;
    demo.check("all three pods became ready", true);
    Ok(())
}

fn heading(text: &str) {
    println!("\n{}", style(text).bold());
}

/// Prints all checks; returns an error if one failed.
fn summary(mut checks: Vec<(String, bool)>, left: &Leftovers, since: Instant) -> Result<()> {
    checks.push((
        "nothing is left behind: no cgroup, mount, network, process or pin".into(),
        left.0.is_empty(),
    ));
    heading("Summary");
    for (what, ok) in &checks {
        let mark = if *ok { style("ok    ").green() } else { style("FAILED").red().bold() };
        println!("  {mark} {what}");
    }
    for what in &left.0 {
        println!("         left behind: {what}");
    }
    let wrong = checks.iter().filter(|(_, ok)| !ok).count();
    if wrong > 0 {
        bail!("{wrong} of {} checks failed", checks.len());
    }
    println!("\n  all {} checks passed in {:.0} s", checks.len(), since.elapsed().as_secs_f64());
    Ok(())
}

/// Leaves the demo running, and prints commands for an inspection.
fn keep(mut demo: Demo) -> Result<()> {
    let socket = demo.containerd.socket();
    let (config, log) = (demo.agent.config(), demo.agent.log_path());
    let (manifests, dir) = (demo.agent.manifests(), demo.agent.dir().to_path_buf());
    heading("The demo keeps running. Inspect it with:");
    println!("  export BEELET_CONFIG={} BEELET_SOCKET={}", config.display(), demo.agent.socket().display());
    println!("  {} get pods --watch", binary()?.display());
    println!("  ls {}      # add, change or remove a manifest", manifests.display());
    println!("  tail -f {}", log.display());
    println!("  ctr --address {} --namespace k8s.io containers list", socket.display());
    println!("  bpftool map show; ls -R {}", dir.join("bpf").display());
    println!("Stop it with:\n  cargo xtask demo --stop");
    if let Some(cluster) = &mut demo.cluster {
        println!("  kubectl --kubeconfig {} get pods,nodes -o wide", cluster.kubeconfig().display());
        cluster.keep();
    }
    demo.agent.keep();
    demo.containerd.keep();
    let wrong: Vec<&str> = demo.checks.iter().filter(|(_, ok)| !ok).map(|(what, _)| what.as_str()).collect();
    if !wrong.is_empty() {
        bail!("failed checks: {}", wrong.join("; "));
    }
    Ok(())
}

fn nothing_left(dir: &Path) -> Result<()> {
    let left = Leftovers::of(dir)?;
    if !left.0.is_empty() {
        bail!("left behind: {}", left.0.join(", "));
    }
    println!("removed the demo completely");
    Ok(())
}
