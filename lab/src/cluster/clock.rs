//! Clock of a machine.

use anyhow::Result;

use super::machine::Machine;

/// Sets the clock of the agent, and restarts it; None: the right time. Linux has no namespace for the time of
/// day (time_namespaces(7)), so libfaketime changes what the agent reads; containerd and the pods keep the
/// right time.
pub(super) fn set(machine: &Machine, offset: Option<&str>) -> Result<()> {
    let file = "/etc/default/kubelet";
    let library = "/usr/lib/$(uname -m)-linux-gnu/faketime/libfaketimeMT.so.1";
    let script = match offset {
        None => format!("rm {file} 2>/dev/null && systemctl restart kubelet; true"),
        Some(_) => format!(
            "set -e; test -e {library} || {{ echo 'faketime is not installed' >&2; exit 1; }}; mkdir -p /etc/default; \
             echo \"export LD_PRELOAD={library} FAKETIME='$0' FAKETIME_DONT_FAKE_MONOTONIC=1\" > {file}; \
             systemctl restart kubelet"
        ),
    };
    machine.run(&["sh", "-c", &script, offset.unwrap_or_default()]).map(drop)
}
