//! A cluster by stock kubeadm: `init` on the first machine, `join` on the others, and the pods' network, a
//! bridge per machine with a route to each other machine's addresses.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, Result};
use beelet_tests::workdir;
use serde_json::{Value, json};

use super::machine::{Machine, cgroup};

/// Time for a node to become ready.
const PATIENCE: Duration = Duration::from_secs(300);
/// The token of joins. The cluster is reachable from this machine only.
const TOKEN: &str = "abcdef.0123456789abcdef";
/// The key that encrypts the control plane's keys for the join of further machines.
const KEY: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
/// Faults of the machine that kubeadm's checks find and that don't matter here: cgroup version 1, few CPUs
/// and little memory.
pub(super) const IGNORED: &str = "--ignore-preflight-errors=SystemVerification,NumCPU,Mem,Swap";
/// Like [`IGNORED`], for an upgrade: without `COREDNS` the cluster has no DNS to migrate.
pub(super) const IGNORED_BY_UPGRADE: &str = "--ignore-preflight-errors=SystemVerification,NumCPU,Mem,Swap,\
                                             CoreDNSUnsupportedPlugins,CoreDNSMigration";
/// Path of the administrator's kubeconfig on the first machine.
pub(crate) const ADMIN: &str = "/etc/kubernetes/admin.conf";

/// Runs kubectl with the administrator's rights, on the first machine.
pub(super) fn kubectl(first: &Machine, words: &[&str]) -> Result<String> {
    let mut all = vec!["kubectl", "--kubeconfig", ADMIN];
    all.extend_from_slice(words);
    first.run(&all)
}

/// Returns an object of the API as JSON.
pub(super) fn get(first: &Machine, words: &[&str]) -> Result<Value> {
    let mut all = vec!["get", "-o", "json"];
    all.extend_from_slice(words);
    let text = kubectl(first, &all)?;
    serde_json::from_str(&text).context("kubectl's answer")
}

/// Initializes the control plane.
pub(super) fn init(first: &Machine, version: &str, has_dns: bool) -> Result<()> {
    let config = first.file("init.yaml", &init_config(first, version))?;
    let mut words = vec!["kubeadm", "init", "--config", &config, "--upload-certs", "--skip-token-print"];
    words.extend([IGNORED, "-v1"]);
    if !has_dns {
        words.push("--skip-phases=addon/coredns");
    }
    first.run(&words).map(drop)
}

/// Joins a machine: as a worker, or with a control plane and an etcd of its own.
pub(super) fn join(machine: &Machine) -> Result<()> {
    let config = machine.file("join.yaml", &join_config(machine))?;
    machine.run(&["kubeadm", "join", "--config", &config, IGNORED, "-v1"]).map(drop)
}

/// Gives every machine its pods' network, as soon as the controllers have chosen its addresses.
pub(super) fn connect(first: &Machine, machines: &[Machine]) -> Result<()> {
    let known = || {
        let ranges = ranges(first).map_err(|error| error.to_string())?;
        let all = machines.iter().all(|machine| ranges.contains_key(&machine.name));
        if all { Ok(ranges) } else { Err("a Node has no podCIDR yet".to_owned()) }
    };
    let ranges = workdir::wait_for("the addresses of the pods", PATIENCE, known)?;
    for machine in machines {
        let Some(range) = ranges.get(&machine.name) else { continue };
        workdir::write(&machine.path("/etc/cni/net.d/10-lab.conflist"), network(range).to_string())?;
        for other in machines.iter().filter(|other| other.name != machine.name) {
            if let Some(range) = ranges.get(&other.name) {
                machine.run(&["ip", "route", "replace", range, "via", &other.address.to_string()])?;
            }
        }
    }
    Ok(())
}

/// Returns the addresses of each Node's pods.
fn ranges(first: &Machine) -> Result<BTreeMap<String, String>> {
    let nodes = get(first, &["nodes"])?;
    let one = |node: &Value| {
        Some((node["metadata"]["name"].as_str()?.to_owned(), node["spec"]["podCIDR"].as_str()?.to_owned()))
    };
    Ok(nodes["items"].as_array().into_iter().flatten().filter_map(one).collect())
}

/// Returns the status of a Node's condition; empty if the Node does not have the condition.
pub(super) fn condition(first: &Machine, name: &str, kind: &str) -> Result<String> {
    let node = get(first, &["node", name])?;
    let conditions = node["status"]["conditions"].as_array().into_iter().flatten();
    let found = conditions.filter(|one| one["type"] == kind).find_map(|one| one["status"].as_str());
    Ok(found.unwrap_or_default().to_owned())
}

/// Returns the status of a Node's condition Ready.
pub(super) fn ready(first: &Machine, name: &str) -> Result<String> {
    condition(first, name, "Ready")
}

/// Waits at most `patience` until a Node's condition has this status.
pub(super) fn until_condition(
    first: &Machine,
    name: &str,
    (kind, wanted): (&str, &str),
    patience: Duration,
) -> Result<()> {
    workdir::wait_for(&format!("{name} to be {kind}={wanted}"), patience, || {
        match condition(first, name, kind) {
            Ok(found) if found == wanted => Ok(()),
            Ok(found) => Err(format!("{kind} is {found:?}")),
            Err(error) => Err(error.to_string()),
        }
    })
}

/// Waits until the condition Ready of these machines' Nodes has this status.
pub(super) fn until_ready(first: &Machine, machines: &[Machine], wanted: &str) -> Result<()> {
    machines.iter().try_for_each(|one| until_condition(first, &one.name, ("Ready", wanted), PATIENCE))
}

fn network(range: &str) -> Value {
    json!({
        "cniVersion": "0.4.0",
        "name": "lab",
        "plugins": [
            {
                "type": "bridge", "bridge": "cni0", "isGateway": true, "hairpinMode": true, "ipMasq": false,
                "ipam": {
                    "type": "host-local", "ranges": [[{ "subnet": range }]], "routes": [{ "dst": "0.0.0.0/0" }],
                },
            },
            { "type": "portmap", "capabilities": { "portMappings": true }, "snat": true },
        ],
    })
}

/// Returns the registration of a machine's Node.
fn registration(machine: &Machine) -> String {
    format!(
        "nodeRegistration:\n  name: {name}\n  criSocket: unix:///run/containerd/containerd.sock\n  \
         kubeletExtraArgs:\n  - {{name: cgroup-root, value: /{cgroup}}}\n  - {{name: node-ip, value: {address}}}\n",
        name = machine.name,
        cgroup = cgroup(&machine.name),
        address = machine.address,
    )
}

/// Returns the configuration of `kubeadm init`. Certificates live for minutes, so that a test sees their
/// renewal: the signer dates them back by five minutes.
fn init_config(first: &Machine, version: &str) -> String {
    format!(
        "apiVersion: kubeadm.k8s.io/v1beta4\nkind: InitConfiguration\n\
         bootstrapTokens: [{{token: {TOKEN}, ttl: 24h0m0s}}]\n\
         localAPIEndpoint: {{advertiseAddress: {address}, bindPort: 6443}}\n\
         certificateKey: {KEY}\n{registration}---\n\
         apiVersion: kubeadm.k8s.io/v1beta4\nkind: ClusterConfiguration\nkubernetesVersion: {version}\n\
         controlPlaneEndpoint: control-plane:6443\n\
         networking: {{podSubnet: 10.244.0.0/16}}\n\
         controllerManager: {{extraArgs: [{{name: cluster-signing-duration, value: 15m0s}}]}}\n---\n\
         apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\nfailCgroupV1: false\n\
         failSwapOn: false\nserverTLSBootstrap: false\nrotateCertificates: true\n\
         evictionHard: {{memory.available: 100Mi, nodefs.available: 3%, imagefs.available: 3%}}\n\
         evictionPressureTransitionPeriod: 30s\n\
         imageGCHighThresholdPercent: 97\nimageGCLowThresholdPercent: 95\n---\n\
         apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nconntrack: {{maxPerCore: 0}}\n",
        address = first.address,
        registration = registration(first),
    )
}

fn join_config(machine: &Machine) -> String {
    let control = if machine.is_control() {
        let address = machine.address;
        format!(
            "controlPlane:\n  localAPIEndpoint: {{advertiseAddress: {address}, bindPort: 6443}}\n  \
             certificateKey: {KEY}\n"
        )
    } else {
        String::new()
    };
    format!(
        "apiVersion: kubeadm.k8s.io/v1beta4\nkind: JoinConfiguration\ndiscovery:\n  bootstrapToken:\n    \
         token: {TOKEN}\n    apiServerEndpoint: control-plane:6443\n    unsafeSkipCAVerification: true\n\
         {registration}{control}",
        registration = registration(machine),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configurations_name_the_machine_and_its_cgroup() {
        let (first, worker) = (Machine::control(0), Machine::worker(2));
        let init = init_config(&first, "v1.36.2");
        for part in [
            "advertiseAddress: 10.88.0.11",
            "name: cp\n",
            "value: /beelet-node-cp}",
            "kubernetesVersion: v1.36.2",
        ] {
            assert!(init.contains(part), "{part}: {init}");
        }
        assert_eq!(init.matches("---\n").count(), 3);
        let join = join_config(&worker);
        for part in ["apiServerEndpoint: control-plane:6443", "name: w2\n", "value: 10.88.0.13}"] {
            assert!(join.contains(part), "{part}: {join}");
        }
        assert!(!join.contains("controlPlane:"), "{join}");
        let second = join_config(&Machine::control(1));
        for part in ["controlPlane:\n", "name: cp2\n", "advertiseAddress: 10.88.0.201"] {
            assert!(second.contains(part), "{part}: {second}");
        }
        assert_eq!(network("10.244.1.0/24")["plugins"][0]["ipam"]["ranges"][0][0]["subnet"], "10.244.1.0/24");
    }
}
