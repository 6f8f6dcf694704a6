//! Time from an edited manifest in which only a probe has changed to the changed readiness, as a client of
//! the agent sees it: the pod, its container and its address stay. The readiness probe moves between the
//! pod's open port and a closed one.

use super::Row;
use super::probes::{next_change, watch_readiness};
use anyhow::Result;
use beelet_tests::agent::{Agent, Options, monotonic_ns};
use beelet_tests::containerd::Containerd;
use beelet_tests::manifests::{self, PORT};
use beelet_tests::workdir;
use serde_json::json;
use std::path::Path;
use xtask::progress::Step;

/// Bound of the p99, in milliseconds.
const BOUND: f64 = 10.0;
/// Closed port.
const NOWHERE: u16 = 9;
/// Edits that are not measured.
const WARM_UP: usize = 4;

/// Returns the row.
pub(super) fn run(binary: &Path, quick: bool) -> Result<Row> {
    let edits = if quick { 40 } else { 400 };
    let containerd = Containerd::start(&workdir::target_dir().join("bench/edits"))?;
    let mut options = Options::on(&containerd);
    options.binary = Some(binary.to_path_buf());
    let agent = Agent::start(options)?;
    let manifest = |port: u16| {
        let probe = json!({ "tcpSocket": { "port": port }, "periodSeconds": 10, "failureThreshold": 1 });
        manifests::with(manifests::serving("edited"), "readinessProbe", probe).to_string()
    };
    agent.apply("edited.yaml", manifest(PORT))?;
    agent.until("the pod to be ready", |watch| watch.pod("edited").filter(|pod| pod.ready()).map(|_| ()))?;
    let changes = watch_readiness(&agent, "edited")?;
    let step = Step::start("probes: manifests edited");
    let mut samples = Vec::new();
    for edit in 0..WARM_UP + edits {
        let ready = edit % 2 == 1;
        let called = monotonic_ns();
        agent.apply("edited.yaml", manifest(if ready { PORT } else { NOWHERE }))?;
        let received = next_change(&changes, ready)?;
        if edit >= WARM_UP {
            samples.push(received.saturating_sub(called) as f64 / 1e6);
        }
    }
    step.done(&format!("{edits} edits"));
    Ok(Row::new("probes", "edited_probe_in_force", "ms", samples, BOUND))
}
