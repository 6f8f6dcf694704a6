//! CPUs that never go idle.

use anyhow::{Context as _, Result};
use beelet_tests::guards::Process;
use std::process::{Command, Stdio};

/// One process a CPU that runs while nobody else wants to (`SCHED_IDLE`), until the value is dropped. A hypervisor gives an
/// idle CPU to others and back when it pleases, so on a shared machine each wake-up waits for that first: tens of
/// milliseconds, which no program on it can do anything about. Whatever is measured preempts these at once.
pub(super) struct Awake(#[expect(dead_code, reason = "they go with it")] Vec<Process>);

impl Awake {
    pub(super) fn keep() -> Result<Awake> {
        let cpus = std::thread::available_parallelism()?.get();
        let spinners = (0..cpus).map(|_| {
            let mut command = Command::new("setpriv");
            command.args(["--pdeathsig", "KILL", "chrt", "--idle", "0", "sh", "-c", "while :; do :; done"]);
            let child = command.stdin(Stdio::null()).spawn();
            Ok(Process(child.context("could not keep a CPU awake: is util-linux installed?")?))
        });
        Ok(Awake(spinners.collect::<Result<_>>()?))
    }
}
