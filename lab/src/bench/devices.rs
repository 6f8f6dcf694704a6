//! Cost of devices: choosing devices for a container out of 1,000 on 8 NUMA nodes, and admitting pods with
//! devices, beyond the plugin's own time (the time of a call by a client that does nothing else). The
//! overhead consists of the decision, the hops between the agent's tasks, and the checkpoint. The checkpoint
//! is written to memory here, so a disk's fsync is not included, as the row names indicate. A sample of an
//! admission is the average of 100 pods. Measured by `bench/src/bin/devices.rs`, which contains the agent's
//! own code.

use super::Row;
use anyhow::{Context as _, Result};
use beelet_tests::workdir;
use std::process::Command;
use xtask::progress::Step;
use xtask::shell;

/// Bound of the p99, in milliseconds.
const BOUND: f64 = 1.0;

/// Rows, with the driver's names for them.
const ROWS: [(&str, &str); 5] = [
    ("decision_of_1000", "decision"),
    ("decision_of_two_restricted", "decision_of_two_restricted"),
    ("decision_of_two_single_numa_node", "decision_of_two_single_numa_node"),
    ("admission_overhead_without_disk", "admission"),
    ("admission_overhead_without_disk_single_numa_node", "admission_single_numa_node"),
];

/// Measures the [`ROWS`].
pub(super) fn run(quick: bool) -> Result<Vec<Row>> {
    let step = Step::start("devices: decisions and admissions");
    step.run(shell::cargo().args([
        "build",
        "--release",
        "--package",
        "beelet",
        "--package",
        "bench",
        "--bin",
        "bench-devices",
    ]))?;
    let rounds = if quick { "10" } else { "100" };
    let driver = workdir::target_dir().join("release/bench-devices");
    let output = Command::new(&driver).arg(rounds).output().context("cannot start the bench's driver")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let measured: serde_json::Value = serde_json::from_str(&text)
        .with_context(|| format!("the bench's driver failed: {}", String::from_utf8_lossy(&output.stderr)))?;
    let samples = |name: &str| -> Vec<f64> {
        measured[name].as_array().into_iter().flatten().filter_map(serde_json::Value::as_f64).collect()
    };
    step.done(&format!("{rounds} rounds"));
    Ok(ROWS.map(|(row, name)| Row::new("devices", row, "ms", samples(name), BOUND)).into())
}
