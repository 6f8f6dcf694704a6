//! Parts of the demo with running pods. Each function prints an event and checks it.

use super::{Demo, heading};
use anyhow::{Context as _, Result, bail};
use beelet_tests::agent::Control;
use beelet_tests::cgroup_values::{self, Expected};
use beelet_tests::pods::PodView;
use beelet_tests::{agent, guards};
use console::style;
use rustix::process::Signal;

/// Ports of examples/orders.yaml.
const PORT: u16 = 8080;
const CONTROL: u16 = 9000;

/// Delays by polling alone, given `periodSeconds` and the thresholds of examples/orders.yaml (the defaults:
/// 10 s, 3 failures, 1 success).
const POLLED_NOT_READY: &str = "20 to 30 s";
const POLLED_READY: &str = "up to 10 s";

/// Number of times that the listener is closed and opened again.
const ROUNDS: usize = 5;

/// Closes and opens a listener inside a pod; shows the time until its readiness follows.
pub(super) fn listener(demo: &mut Demo) -> Result<()> {
    heading("A listener inside the pod orders is closed and opened again (readiness probe: every 10 s)");
    println!("  {:<22} kernel event to status   system call to status   by periodSeconds alone", "");
    let pod = demo.wait("orders", "to be ready", PodView::ready)?;
    let mut control = Control::connect(pod.ip().context("the pod orders has no address")?, CONTROL)?;
    let mut slowest = 0;
    for _ in 0..ROUNDS {
        for (command, ready, polled) in [("close", false, POLLED_NOT_READY), ("open", true, POLLED_READY)] {
            let called = control.send(&format!("{command} {PORT}"))?;
            let what = if ready { "to be ready again" } else { "to be not ready" };
            let pod = demo.wait("orders", what, |pod| pod.ready() == ready)?;
            let edge = pod.edge.context("the pod's readiness changed, but not by a kernel event")?;
            if edge.ready != ready || edge.kernel_ns < called {
                bail!("the last kernel event is not the expected one: {edge:?}, called at {called}");
            }
            let (decided, total) = (edge.published_ns - edge.kernel_ns, edge.published_ns - called);
            slowest = slowest.max(total);
            let label = if ready { "opened: ready" } else { "closed: not ready" };
            println!("  {label:<22} {:>19} µs   {:>18} µs   {polled}", decided / 1000, total / 1000);
        }
    }
    demo.check(
        format!("readiness followed the listener {} times, each within 1 s", 2 * ROUNDS),
        slowest < 1_000_000_000,
    );
    demo.check("each time a kernel event was the reason, not a poll", true);
    Ok(())
}

/// Kills a container's process; shows the reaction of beelet.
pub(super) fn restart(demo: &mut Demo) -> Result<()> {
    heading("The container of the pod web is killed (SIGKILL)");
    let before = demo.wait("web", "to be ready", PodView::ready)?;
    let path = cgroup_values::pod_path(before.qos(), before.uid());
    let folder = demo.containerd.cgroup().folder("cpu", &path).context("no cgroup hierarchy is mounted")?;
    let serves = |pid: &rustix::process::Pid| {
        let command = std::fs::read(format!("/proc/{}/cmdline", pid.as_raw_nonzero())).unwrap_or_default();
        String::from_utf8_lossy(&command).contains("serve")
    };
    let pid = guards::processes_below(&folder).into_iter().find(serves);
    let pid = pid.with_context(|| format!("no process of the container in {}", folder.display()))?;
    let killed_at = agent::monotonic_ns();
    rustix::process::kill_process(pid, Signal::KILL).context("cannot kill the container's process")?;
    let after = demo.wait("web", "to run again", |pod| pod.restarts() == 1 && pod.ready())?;
    let took = agent::monotonic_ns() - killed_at;
    let server = after.container("server").context("the pod web has no container named server")?;
    let last = server.last_state.as_ref().and_then(|state| state.terminated.as_ref());
    let exit_code = last.map(|terminated| terminated.exit_code);
    println!(
        "  process {} killed; a new container runs and is ready {} ms later",
        pid.as_raw_nonzero(),
        took / 1_000_000
    );
    println!("  restarts: {}, last exit code: {}", after.restarts(), exit_code.unwrap_or_default());
    demo.check("the killed container was restarted in the same sandbox", before.ip() == after.ip());
    demo.check("its status has the exit code of the last one: 137", exit_code == Some(137));
    Ok(())
}

/// Shows the values in the three pods' cgroups.
pub(super) fn cgroups(demo: &mut Demo) -> Result<()> {
    const MIB: u64 = 1 << 20;
    heading("Each pod's cgroup has its QoS class's values");
    println!("  {:<8} {:<11} {:<24} {:>20} {:>20}", "POD", "QOS", "FILE", "EXPECTED", "FOUND");
    // Values that the kubelet writes for the manifests in examples/.
    let expected = [
        ("orders", Expected { shares: 256, quota: Some(25_000), memory: Some(64 * MIB) }),
        ("web", Expected { shares: 102, quota: Some(50_000), memory: Some(128 * MIB) }),
        ("batch", Expected { shares: 2, quota: None, memory: None }),
    ];
    let mut all = true;
    for (name, expected) in expected {
        let pod = demo.wait(name, "to exist", |_| true)?;
        let path = cgroup_values::pod_path(pod.qos(), pod.uid());
        for row in cgroup_values::check(demo.containerd.cgroup(), &path, expected)? {
            let mark = if row.ok() { style("ok").green() } else { style("FAILED").red().bold() };
            println!(
                "  {name:<8} {:<11} {:<24} {:>20} {:>20} {mark}",
                pod.qos(),
                row.file,
                row.expected,
                row.found
            );
            all &= row.ok();
        }
    }
    demo.check("the cgroups of all three pods have the values that the kubelet would write", all);
    Ok(())
}

/// Shows an operator's view.
pub(super) fn get_pods(demo: &mut Demo) -> Result<()> {
    heading("$ beelet get pods -o wide");
    let output = demo.agent.cli(&["get", "pods", "-o", "wide"]).output().context("cannot start beelet")?;
    let text = String::from_utf8_lossy(&output.stdout);
    for line in text.lines() {
        println!("  {line}");
    }
    eprint!("{}", String::from_utf8_lossy(&output.stderr));
    let names_all = super::PODS.iter().all(|name| text.contains(name));
    demo.check("`beelet get pods -o wide` lists all three", output.status.success() && names_all);
    Ok(())
}
