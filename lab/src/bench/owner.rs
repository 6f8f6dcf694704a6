//! Agent that runs the pods of a measured node: beelet, or a kubelet for comparison.

use anyhow::{Context as _, Result, bail};
use beelet_proto::cri;
use beelet_tests::agent::Agent;
use beelet_tests::containerd::{Containerd, Cri, block_on};
use beelet_tests::kubelet::Kubelet;
use beelet_tests::manifests::{self, PORT};
use beelet_tests::pods::PodView;
use beelet_tests::workdir::interrupted;
use serde_json::{Value, json};
use std::ops::Range;
use std::path::Path;
use std::time::{Duration, Instant};

use xtask::progress::Step;

/// Agent that has the node.
pub(super) enum Owner {
    Us(Box<Agent>),
    Kubelet(Kubelet),
}

impl Owner {
    pub(super) fn apply(&self, name: &str, manifest: &Value) -> Result<()> {
        match self {
            Self::Us(agent) => agent.apply(&format!("{name}.yaml"), manifest.to_string()),
            Self::Kubelet(kubelet) => kubelet.apply(manifest),
        }
    }

    pub(super) fn pid(&self) -> Result<u32> {
        match self {
            Self::Us(agent) => agent.pid().context("the agent has ended"),
            Self::Kubelet(kubelet) => Ok(kubelet.pid()),
        }
    }

    /// Applies idle pods of these numbers, with a TCP readiness probe per second, and waits until as many
    /// pods as the last number are ready. Returns the time until half of the new ones were ready.
    pub(super) fn fill(
        &self,
        containerd: &Containerd,
        numbers: Range<usize>,
        step: &Step,
    ) -> Result<Duration> {
        let (all, half, began) = (numbers.end, numbers.start.midpoint(numbers.end), Instant::now());
        let mut half_after = None;
        for n in numbers {
            let name = format!("idle{n}");
            let pod = manifests::serving(&name);
            let probe = json!({ "tcpSocket": { "port": PORT }, "periodSeconds": 1 });
            self.apply(&name, &manifests::with(pod, "readinessProbe", probe))?;
        }
        // Longer than a usual timeout: starting a hundred pods takes time.
        let deadline = Instant::now() + Duration::from_secs(60 + 3 * all as u64);
        loop {
            let ready = self.ready(containerd)?;
            step.detail(&format!("{ready} ready"));
            if ready >= half {
                let half_after = *half_after.get_or_insert_with(|| began.elapsed());
                if ready >= all {
                    return Ok(half_after);
                }
            }
            if Instant::now() > deadline || interrupted() {
                bail!("only {ready} of {all} pods became ready");
            }
            std::thread::sleep(Duration::from_secs(1));
        }
    }

    /// Returns the number of ready pods; for a kubelet, which is not queried to leave it undisturbed, that of
    /// running containers.
    fn ready(&self, containerd: &Containerd) -> Result<usize> {
        match self {
            Self::Us(agent) => {
                agent.inspect(|watch| watch.pods.values().filter(|pod| PodView::ready(pod)).count())
            }
            Self::Kubelet(_) => block_on(running(&containerd.socket())),
        }
    }
}
/// Returns the number of running containers.
async fn running(socket: &Path) -> Result<usize> {
    let mut cri = Cri::connect(socket).await?;
    let listed = cri.runtime.list_containers(cri::ListContainersRequest { filter: None }).await?;
    let runs = |container: &&cri::Container| container.state() == cri::ContainerState::ContainerRunning;
    Ok(listed.into_inner().containers.iter().filter(runs).count())
}

/// Waits for this time, unless a signal arrives.
pub(super) fn pause(time: Duration) -> Result<()> {
    let until = Instant::now() + time;
    while Instant::now() < until {
        if interrupted() {
            bail!("interrupted");
        }
        std::thread::sleep(Duration::from_millis(200).min(until.saturating_duration_since(Instant::now())));
    }
    Ok(())
}
