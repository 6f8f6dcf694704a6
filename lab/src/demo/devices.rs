//! `cargo xtask demo --devices`: a device plugin registers, a pod waits for it and gets its device, the
//! plugin is killed and returns.

use std::process::Command;

use anyhow::{Context as _, Result};
use beelet_tests::device_plugin::SamplePlugin;
use beelet_tests::pods::PodView;
use beelet_tests::workdir::{self, PATIENCE, wait_for};

use super::{Demo, heading};
use xtask::progress::Step;
use xtask::shell;

const RESOURCE: &str = "example.com/sample";

/// Builds the sample plugin.
pub(super) fn build() -> Result<()> {
    let step = Step::start("build the sample device plugin");
    let bin = ["build", "--package", "beelet-tests", "--bin", "sample_device_plugin"];
    step.run(shell::cargo().args(bin))?;
    step.done("");
    Ok(())
}

/// Shows the device part of the demo.
pub(super) fn show(demo: &mut Demo) -> Result<()> {
    heading("A pod requests a device before its plugin has registered (examples/train.yaml)");
    let example = workdir::repository().join("examples/train.yaml");
    let manifest = std::fs::read(&example).with_context(|| format!("cannot read {}", example.display()))?;
    demo.agent.apply("train.yaml", manifest)?;
    let waiting = |pod: &PodView| {
        let state = pod.container("trainer").and_then(|c| c.state.clone()).and_then(|state| state.waiting);
        state.filter(|waiting| waiting.reason.as_deref() == Some("WaitingForDevices"))
    };
    let pod = demo.wait("train", "to wait", |pod| waiting(pod).is_some())?;
    let message = waiting(&pod).and_then(|waiting| waiting.message).unwrap_or_default();
    println!("  train is {}: {message}", pod.phase());
    demo.check("a pod without its device plugin waits and reports it", pod.phase() == "Pending");

    heading("The plugin registers: two devices, on the kubelet's socket");
    let binary = workdir::target_dir().join("debug/sample_device_plugin");
    let dir = demo.agent.dir().join("kubelet/device-plugins");
    let arguments = ["--device", "/dev/null:/dev/sample", "--devices", "dev-1@0 dev-2@0"];
    let plugin = SamplePlugin::registered(&binary, &dir, &arguments)?;
    let pod = demo.wait("train", "to be ready", PodView::ready)?;
    print(&demo.agent.cli(&["devices"]).output()?.stdout);
    let said = said(demo, &pod)?;
    said.lines().for_each(|line| println!("  train: {line}"));
    demo.check("its container sees the device node", said.contains("/dev/sample"));
    demo.check("and the plugin's environment variable", said.contains("SAMPLE_DEVICES=dev-"));

    heading("The plugin is killed and returns");
    plugin.kill9();
    health(demo, "Unknown")?;
    print(&demo.agent.cli(&["devices"]).output()?.stdout);
    let _plugin = SamplePlugin::registered(&binary, &dir, &arguments)?;
    health(demo, "Healthy")?;
    print(&demo.agent.cli(&["get", "node"]).output()?.stdout);
    let after = demo.wait("train", "to exist", |_| true)?;
    let same = after.restarts() == 0 && after.uid() == pod.uid();
    demo.check("the pod kept its device and was not restarted", same);
    demo.agent.remove("train.yaml")?;
    demo.agent.until("train to be gone", |watch| watch.pod("train").is_none().then_some(()))
}

fn print(text: &[u8]) {
    String::from_utf8_lossy(text).lines().for_each(|line| println!("  {line}"));
}

/// Returns the container's output, without timestamps.
fn said(demo: &Demo, pod: &PodView) -> Result<String> {
    let name = pod.pod.metadata.name.as_deref().unwrap_or_default();
    let log = demo.agent.dir().join(format!("logs/default_{name}_{}/trainer/0.log", pod.uid()));
    let text = wait_for("the container's output", PATIENCE, || {
        let text = std::fs::read_to_string(&log).unwrap_or_default();
        if text.contains("SAMPLE_DEVICES") { Ok(text) } else { Err("no output yet") }
    })?;
    let words = text.lines().map(|line| line.splitn(4, ' ').nth(3).unwrap_or(line));
    Ok(words.collect::<Vec<_>>().join("\n"))
}

fn health(demo: &Demo, expected: &str) -> Result<()> {
    wait_for(&format!("the devices to be {expected}"), PATIENCE, || {
        let output =
            Command::output(&mut demo.agent.cli(&["devices", RESOURCE])).map_err(|e| e.to_string())?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        if text.contains(expected) { Ok(()) } else { Err(text) }
    })
}
