//! Faults of a machine's network: on the other end of its cable, at the switch.

use std::process::Command;

use anyhow::{Context as _, Result};

use super::machine::{Machine, switch};
use super::programs::output;

/// Runs a command in the switch's network.
fn at_switch(words: &[&str]) -> Result<()> {
    let pid = switch()?.as_raw_nonzero().to_string();
    output(Command::new("nsenter").args(["-t", &pid, "-n", "--"]).args(words)).map(drop)
}

/// Cuts the machine's network, or heals it.
pub(super) fn cut(machine: &Machine, cut: bool) -> Result<()> {
    at_switch(&["ip", "link", "set", &format!("v{}", machine.name), if cut { "down" } else { "up" }])
}

/// Delays and drops the packets to the machine (tc-netem(8)); None heals.
pub(super) fn slow(machine: &Machine, how: Option<(&str, &str)>) -> Result<()> {
    let device = format!("v{}", machine.name);
    let Some((delay, loss)) = how else {
        // The device may have no discipline.
        let _ = at_switch(&["tc", "qdisc", "del", "dev", &device, "root"]);
        return Ok(());
    };
    at_switch(&["tc", "qdisc", "replace", "dev", &device, "root", "netem", "delay", delay, "loss", loss])
        .context("the kernel needs sch_netem (CONFIG_NET_SCH_NETEM)")
}
