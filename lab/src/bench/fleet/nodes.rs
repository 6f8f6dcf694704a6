//! Agents of a fleet, each with a container runtime in memory, a cgroup and a folder of its own.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context as _, Result};
use beelet_tests::agent::{Agent, Options};
use beelet_tests::cluster::{Cluster, condition};
use beelet_tests::cri::FakeCri;
use beelet_tests::guards::CgroupRoot;
use beelet_tests::{images, workdir};
use serde_json::Value;
use xtask::progress::Step;

/// Agent and its dependencies, dropped in this order.
struct Node {
    agent: Agent,
    _runtime: FakeCri,
    _cgroup: CgroupRoot,
}

/// Agents of a fleet, and their files, which are dropped after them.
#[derive(Default)]
pub(super) struct Fleet {
    names: Vec<String>,
    nodes: Vec<Node>,
    _folder: Option<tempfile::TempDir>,
}

impl Fleet {
    /// Starts agents one after the other, and waits until their Nodes are ready.
    pub(super) fn start(binary: &Path, count: usize, cluster: &Cluster) -> Result<Fleet> {
        let folder = tempfile::tempdir().context("cannot create a folder for the nodes")?;
        let (step, began) = (Step::start(format!("fleet: {count} agents")), Instant::now());
        let (mut names, mut nodes) = (Vec::new(), Vec::new());
        for number in 0..count {
            let name = format!("n{number:03}");
            step.detail(&name);
            nodes.push(start(binary, &folder.path().join(&name), &name, cluster)?);
            names.push(name);
        }
        for name in &names {
            let ready = |node: &Value| condition(node, "Ready").then_some(());
            cluster.until(&format!("{name} to be ready"), &format!("/api/v1/nodes/{name}"), ready)?;
        }
        step.done(&format!("{:.1} s", began.elapsed().as_secs_f64()));
        Ok(Fleet { names, nodes, _folder: Some(folder) })
    }

    /// Returns a fleet without agents, for tests of what is counted by node.
    #[cfg(test)]
    pub(super) fn of_names(names: &[&str]) -> Fleet {
        Fleet { names: names.iter().map(|name| (*name).to_owned()).collect(), ..Fleet::default() }
    }

    /// Returns the names of the Nodes.
    pub(super) fn names(&self) -> &[String] {
        &self.names
    }

    /// Returns the number of nodes.
    pub(super) fn count(&self) -> usize {
        self.names.len()
    }

    /// Returns the agents' process ids.
    pub(super) fn pids(&self) -> Result<Vec<u32>> {
        let pid = |node: &Node| node.agent.pid().context("an agent has ended");
        self.nodes.iter().map(pid).collect()
    }
}

fn start(binary: &Path, dir: &Path, name: &str, cluster: &Cluster) -> Result<Node> {
    std::fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let runtime = FakeCri::absent_at(&dir.join("cri.sock"));
    runtime.come_back();
    runtime.add_image(images::APP);
    runtime.change(|world| world.streams_events = true);
    let cgroup = CgroupRoot::new(&workdir::unique("fleet"))?;
    let mut options = Options::at(dir, "agent", &runtime.endpoint(), &cgroup);
    options = options.kubelet("podPidsLimit", -1).beelet("nodeName", name).beelet("bpf", "off");
    options.binary = Some(binary.to_path_buf());
    options.mount_bpffs = false;
    let kubeconfig = cluster.node_kubeconfig(name)?.display().to_string();
    options.arguments.extend(["--kubeconfig".to_owned(), kubeconfig]);
    let agent = Agent::start(options).with_context(|| format!("the agent {name}"))?;
    Ok(Node { agent, _runtime: runtime, _cgroup: cgroup })
}
