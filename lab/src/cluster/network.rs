//! Faults of a machine's network: on the other end of its cable, at the switch.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result};
use beelet_tests::requires::find_program;

use super::machine::{Machine, end, folder, help, switch};
use super::programs::output;

/// The cable of a kernel without netem, as a program (see the file).
const CABLE: &str = include_str!("cable.py");

/// Returns a command in the switch's network.
fn enter(words: &[&str]) -> Result<Command> {
    let pid = switch()?.as_raw_nonzero().to_string();
    let mut command = Command::new("nsenter");
    command.args(["-t", &pid, "-n", "--"]).args(words);
    Ok(command)
}

fn at_switch(words: &[&str]) -> Result<()> {
    output(&mut enter(words)?).map(drop)
}

/// Cuts the machine's network, or heals it.
pub(super) fn cut(machine: &Machine, cut: bool) -> Result<()> {
    at_switch(&["ip", "link", "set", &format!("v{}", machine.name), if cut { "down" } else { "up" }])
}

/// Delay and loss of the packets to a machine.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slow {
    /// Delay of each packet.
    pub(super) delay: Duration,
    /// Share of lost packets, in percent.
    pub(super) loss: f64,
}

/// Returns the folder with the record of the cable's program.
fn record(machine: &Machine) -> PathBuf {
    folder().join(format!("cable-{}", machine.name))
}

/// Delays and drops the packets to the machine; None heals. A kernel without netem (tc-netem(8)) has no queue
/// that delays, so there a program carries the packets between the cable and the switch.
pub(super) fn slow(machine: &Machine, how: Option<Slow>) -> Result<()> {
    let (cable, inner, outer) =
        (format!("v{}", machine.name), format!("c{}", machine.name), format!("s{}", machine.name));
    // The device may have no discipline, and the cable no program.
    let _ = at_switch(&["tc", "qdisc", "del", "dev", &cable, "root"]);
    if record(machine).exists() {
        end(&record(machine))?;
        at_switch(&["ip", "link", "del", &inner])?;
        at_switch(&["ip", "link", "set", &cable, "master", "br0"])?;
    }
    let Some(Slow { delay, loss }) = how else { return Ok(()) };
    let (ms, percent) = (delay.as_millis().to_string(), loss.to_string());
    let (delay, share) = (format!("{ms}ms"), format!("{percent}%"));
    if at_switch(&["tc", "qdisc", "add", "dev", &cable, "root", "netem", "delay", &delay, "loss", &share])
        .is_ok()
    {
        return Ok(());
    }
    find_program("python3").context("this kernel has no netem; the program in its place needs python3")?;
    at_switch(&["ip", "link", "add", &inner, "type", "veth", "peer", "name", &outer])?;
    at_switch(&["ip", "link", "set", &inner, "up"])?;
    at_switch(&["ip", "link", "set", &cable, "nomaster"])?;
    help(&record(machine), &mut enter(&["python3", "-c", CABLE, &inner, &cable, &ms, &percent])?)?;
    at_switch(&["ip", "link", "set", &outer, "master", "br0", "up"])
}
