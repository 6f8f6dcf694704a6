//! The start: settings against the machine, and the state that an earlier agent or a kubelet left.
//!
//! The kubelet refuses to start with a state file of another policy, another machine or other settings.
//! Here the agent starts, records what changed, and keeps for the pods what still fits.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex},
};

use beelet_policy::pinning::{PinningError, Pins, cpus, memory};
use beelet_state::{ForeignFile, events::NodeEvents};
use tokio::sync::watch;
use tracing::warn;

use super::{
    Book, Desk, Files, OpenError, Parts, Pinning, Task,
    hardware::{Hardware, managers},
    machine::MachineTopology,
};

/// The kubelet's names of the state files.
const CPU_STATE: &str = "cpu_manager_state";
const MEMORY_STATE: &str = "memory_manager_state";
/// The end of the name of a state file that was replaced.
const REPLACED: &str = ".replaced";

impl Pinning {
    /// Opens the pins as an earlier agent or a kubelet left them, and returns the task that keeps them.
    /// Without any policy the task is missing. Blocks.
    ///
    /// # Errors
    /// The settings do not fit this machine. The message names the field.
    pub fn open(parts: Parts) -> Result<(Self, Option<Task>), OpenError> {
        let file = |name: &str| ForeignFile::of_node(parts.folder.join(name));
        let files = [file(CPU_STATE), file(MEMORY_STATE)];
        let events = NodeEvents::new(parts.events.clone(), &parts.node_name);
        if !parts.settings.is_on() {
            switch_off(&files, &events);
            return Ok((Self(None), None));
        }
        let source = parts.machine.clone();
        let source =
            source.ok_or_else(|| OpenError::new("cpuManagerPolicy", "the machine's CPUs are unknown"))?;
        let machine = source.read();
        let machine = machine.map_err(|error| {
            let remedy = "set cpuManagerPolicy: none, memoryManagerPolicy: None and topologyManagerPolicy: none to run \
                          without CPUs and NUMA nodes";
            OpenError::new("cpuManagerPolicy", format!("{error}; {remedy}"))
        })?;
        let (pins, lost) = open_pins(&parts.settings, &machine, &files, &events)?;
        parts.metrics.show(&pins);
        let mut written = [pins.cpus.file(), pins.memory.file()];
        for (file, text) in files.iter().zip(&mut written) {
            if let Err(error) = file.replace(text.as_bytes()) {
                // The task tries again, and no pod is pinned before it succeeds.
                warn!(%error, "cannot write the state of CPUs and memory");
                text.clear();
            }
        }
        let [cpus, memory] = files;
        let desk = Arc::new(Desk {
            book: Mutex::new(Book::new(pins, lost)),
            changes: watch::Sender::new(0),
            gates: parts.settings.gates,
            period: parts.settings.reconcile_period,
            hardware: Hardware::new(source, parts.settings, events, machine),
            files: Files { cpus, memory, written: Mutex::new(written) },
            active: parts.active,
            requests: parts.requests,
            metrics: parts.metrics,
            events: parts.events,
        });
        let task = Task {
            desk: Arc::clone(&desk),
            runtime: parts.runtime,
            cgroups: parts.cgroups,
            cgroup_config: parts.cgroup_config,
            table: parts.table,
        };
        Ok((Self(Some(desk)), Some(task)))
    }
}

fn open_pins(
    settings: &beelet_config::Pinning,
    machine: &MachineTopology,
    files: &[ForeignFile; 2],
    events: &NodeEvents,
) -> Result<(Pins, BTreeSet<String>), OpenError> {
    let of = |field: &'static str| move |error: PinningError| OpenError::new(field, error.to_string());
    let mut pins = managers(settings, machine)?;
    let mut lost = BTreeSet::new();
    if let Some(found) = read(&files[0], events)
        && let Err(why) = pins.cpus.start(Some(&found))
    {
        let pods = cpus::restart::recover(&mut pins.cpus, &found).map_err(of("cpuManagerPolicy"))?;
        let kept = pins.cpus.state().containers.len();
        record_change(events, "CPUStateChanged", (&files[0], &found), &why, (kept, pods.len()));
        lost.extend(pods);
    } else if pins.cpus.state().shared.is_empty() {
        pins.cpus.start(None).map_err(of("cpuManagerPolicy"))?;
    }
    if let Some(found) = read(&files[1], events)
        && let Err(why) = pins.memory.start(Some(&found))
    {
        let pods = memory::restart::recover(&mut pins.memory, &found).map_err(of("memoryManagerPolicy"))?;
        let kept = pins.memory.state().containers.len();
        record_change(events, "MemoryStateChanged", (&files[1], &found), &why, (kept, pods.len()));
        lost.extend(pods);
    } else if pins.memory.state().ledger.nodes.is_empty() {
        pins.memory.start(None).map_err(of("memoryManagerPolicy"))?;
    }
    Ok((pins, lost))
}

/// The text of a state file; one that can't be read is set aside.
fn read(file: &ForeignFile, events: &NodeEvents) -> Option<String> {
    let trouble = match file.read() {
        Ok(None) => return None,
        Ok(Some(bytes)) => match String::from_utf8(bytes) {
            Ok(text) => return Some(text),
            Err(_) => "the file is not text".to_owned(),
        },
        Err(error) => error.to_string(),
    };
    let aside = match file.set_aside() {
        Ok(place) => format!("the file is kept as {}", place.display()),
        Err(error) => format!("the file can't be set aside: {error}"),
    };
    let message = format!("{}: {trouble}; {aside}", file.path().display());
    events.warning("PinningStateUnreadable", &message);
    None
}

/// Logs that the state did not fit, and the pods that lost their assignments.
fn record_change(
    events: &NodeEvents,
    reason: &str,
    (file, found): (&ForeignFile, &str),
    why: &PinningError,
    (kept, lost): (usize, usize),
) {
    let aside = keep_beside(file, found);
    let message = format!(
        "{} does not fit the configuration or the machine: {why}; {kept} pods keep what they have, {lost} pods do not \
         (events of these pods follow); {aside}",
        file.path().display()
    );
    events.warning(reason, &message);
}

/// Keeps the content of a file beside it. The file itself stays until it is replaced: a killed agent finds
/// one of the two states there.
fn keep_beside(file: &ForeignFile, content: &str) -> String {
    let mut place = file.path().as_os_str().to_owned();
    place.push(REPLACED);
    let copy = ForeignFile::of_node(place.into());
    match copy.replace(content.as_bytes()) {
        Ok(()) => format!("the old file is kept as {}", copy.path().display()),
        Err(error) => format!("the old file can't be kept: {error}"),
    }
}

/// Replaces the state files of an agent that pinned, so that a kubelet can start with them. Containers keep
/// the CPUs that they were created with until they start again.
fn switch_off(files: &[ForeignFile; 2], events: &NodeEvents) {
    for (file, none) in files.iter().zip([CPUS_OFF, MEMORY_OFF]) {
        let Ok(Some(bytes)) = file.read() else { continue };
        let text = String::from_utf8_lossy(&bytes);
        if text.contains("\"policyName\":\"none\"") || text.contains("\"policyName\":\"None\"") {
            continue;
        }
        let message = format!(
            "{} is of another policy than the configuration's: containers that run keep the CPUs and the memory nodes \
             that they have until they start again",
            file.path().display()
        );
        events.warning("PinningSwitchedOff", &message);
        keep_beside(file, &text);
        if let Err(error) = file.replace(none.as_bytes()) {
            warn!(%error, "a kubelet may refuse to start with this state file");
        }
    }
}

/// The state files of the policies `none` and `None`; the kubelet accepts files without a checksum.
const CPUS_OFF: &str = r#"{"policyName":"none","defaultCpuSet":"","checksum":0}"#;
const MEMORY_OFF: &str = r#"{"policyName":"None","machineState":null,"checksum":0}"#;
