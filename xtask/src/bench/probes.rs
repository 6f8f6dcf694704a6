//! From a listener's coming or going inside a pod to the change of readiness at a client of the agent: from right
//! before listen(2) or close(2), by the pod's own clock reading, to the receipt of the event on the WatchPods stream.
//! The probe has the default settings (every 10 s, 3 failures), so a poll can't be the reason.

use super::Row;
use crate::progress::Step;
use anyhow::{Context as _, Result, bail};
use beelet_tests::agent::{Agent, Control, Options, monotonic_ns};
use beelet_tests::containerd::{Containerd, block_on};
use beelet_tests::manifests::{self, CONTROL, PORT};
use beelet_tests::pods::{PodView, Watch};
use beelet_tests::workdir::{self, PATIENCE, interrupted};
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

/// p99, in milliseconds.
const BOUND: f64 = 5.0;

/// Rounds before those that count: caches and lazily made connections.
const WARM_UP: usize = 5;

/// Measures `listen_to_ready` and `close_to_not_ready`.
pub(super) fn run(binary: &Path, quick: bool) -> Result<Vec<Row>> {
    let rounds = if quick { 250 } else { 2000 };
    let step = Step::start("probes: listeners opened and closed");
    let containerd = Containerd::start(&workdir::target_dir().join("bench/node"))?;
    let mut options = Options::on(&containerd);
    options.binary = Some(binary.to_path_buf());
    let agent = Agent::start(options)?;
    agent.apply("bench.yaml", manifests::serving("bench").to_string())?;
    let pod =
        agent.until("the pod to be ready", |watch| watch.pod("bench").filter(|pod| pod.ready()).cloned())?;
    let mut control = Control::connect(pod.ip().context("the pod has no address")?, CONTROL)?;

    let changes = watch_readiness(&agent)?;
    let (mut to_ready, mut to_not_ready) = (Vec::new(), Vec::new());
    for round in 0..WARM_UP + rounds {
        step.detail(&format!("{round} of {} rounds", WARM_UP + rounds));
        for (command, ready, samples) in [("close", false, &mut to_not_ready), ("open", true, &mut to_ready)]
        {
            let called = control.send(&format!("{command} {PORT}"))?;
            let received = next_change(&changes, ready)?;
            if round >= WARM_UP {
                samples.push(received.saturating_sub(called) as f64 / 1e6);
            }
        }
    }
    step.done(&format!("{rounds} rounds"));
    Ok(vec![
        Row::new("probes", "listen_to_ready", "ms", to_ready, BOUND),
        Row::new("probes", "close_to_not_ready", "ms", to_not_ready, BOUND),
    ])
}

/// A change of the pod's readiness, with the time at which it was received.
struct Change {
    ready: bool,
    at: u64,
}

/// Watches the pod on a thread of its own, which stamps every change as it arrives.
fn watch_readiness(agent: &Agent) -> Result<mpsc::Receiver<Change>> {
    let socket = agent.socket();
    let (sender, receiver) = mpsc::channel();
    let (watching, started) = mpsc::channel();
    std::thread::spawn(move || {
        let watched = block_on(async move {
            let mut watch = Watch::start(&socket).await?;
            let mut last = watch.pod("bench").is_some_and(PodView::ready);
            let _ = watching.send(());
            loop {
                watch.next().await?;
                let at = monotonic_ns();
                let ready = watch.pod("bench").is_some_and(PodView::ready);
                if ready != last && sender.send(Change { ready, at }).is_err() {
                    return Ok(());
                }
                last = ready;
            }
        });
        // The stream breaks when the agent ends; before that, whoever waits for a change says what is missing.
        watched.unwrap_or_default();
    });
    started.recv().context("could not watch the pods")?;
    Ok(receiver)
}

fn next_change(changes: &mpsc::Receiver<Change>, expected: bool) -> Result<u64> {
    let mut waited = Duration::ZERO;
    loop {
        let slice = Duration::from_millis(200);
        match changes.recv_timeout(slice) {
            Ok(Change { ready, at }) if ready == expected => return Ok(at),
            Ok(Change { ready, .. }) => {
                bail!("the pod became ready={ready}, and nothing had been done for that")
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => bail!("the agent's event stream broke"),
            Err(mpsc::RecvTimeoutError::Timeout) if interrupted() => bail!("interrupted"),
            Err(mpsc::RecvTimeoutError::Timeout) => waited += slice,
        }
        if waited > PATIENCE {
            bail!("waited {} s for the pod to become ready={expected}", PATIENCE.as_secs());
        }
    }
}
