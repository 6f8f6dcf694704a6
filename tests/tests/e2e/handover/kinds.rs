//! The pods of a hand-over: each QoS class, kind of probe, of volume and of container, as far as the
//! kubelet's version has them.

use std::path::PathBuf;

use beelet_tests::manifests::{self, CONTROL, PORT};
use serde_json::{Value, json};

/// Number of serving pods.
const SERVING: usize = 26;
/// Port of the HTTP server of a serving pod.
const HTTP: u16 = 8081;
/// First minor version whose API server and kubelet have sidecars without a feature gate.
const SIDECARS: u32 = 29;
/// First minor version whose kubelets keep the global mounts of CSI volumes in the folder of this version.
const GLOBAL_MOUNTS: u32 = 24;
/// Resource of Kubernetes' own sample plugin.
const RESOURCE: &str = "example.com/resource";
/// CSI driver.
pub(super) const DRIVER: &str = "shelf.example.com";
/// Claims of the CSI driver's volumes.
pub(super) const CLAIMS: [&str; 2] = ["shelf0", "shelf1"];

/// A pod of the API server.
#[derive(Debug)]
pub(super) struct Kind {
    /// The pod.
    pub pod: Value,
    /// The pod's work before and after the hand-over.
    pub then: Then,
}

/// The work of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Then {
    /// Its containers run, and are ready.
    Serves,
    /// Its first container runs, and the pod waits for the end of it.
    Starts,
    /// The pod has ended, with this phase.
    Ended(&'static str),
    /// Its container fails again and again.
    Crashes,
    /// Its image cannot be pulled.
    Waits,
    /// The pod is being deleted, and ignores its end until [`Facts::host`] has the file `go`.
    Leaves,
}

impl Kind {
    /// Returns the pod's name.
    pub(super) fn name(&self) -> &str {
        self.pod["metadata"]["name"].as_str().unwrap_or_default()
    }
}

/// Facts on which the pods depend.
#[derive(Debug)]
pub(super) struct Facts {
    /// Minor version of the kubelet and the API server.
    pub minor: u32,
    /// True if Kubernetes' sample device plugin is at hand.
    pub has_devices: bool,
    /// True if CSI volumes are among the pods' volumes: their way over has not been seen to succeed yet.
    pub has_csi: bool,
    /// Folder of the machine for hostPath volumes.
    pub host: PathBuf,
}

impl Facts {
    /// Returns true if there are claims, which need a kubelet that keeps CSI volumes where beelet keeps them.
    pub(super) fn has_claims(&self) -> bool {
        self.has_csi && self.minor >= GLOBAL_MOUNTS
    }

    /// Returns the pods.
    pub(super) fn pods(&self) -> Vec<Kind> {
        let is = |then| move |pod| Kind { pod: tokenless(pod), then };
        let mut all: Vec<Kind> =
            (0..SERVING).map(|number| self.serving(number)).map(is(Then::Serves)).collect();
        all.extend((0..4).map(|number| self.accompanied(number)).map(is(Then::Serves)));
        if self.has_devices {
            all.extend((0..2).map(with_device).map(is(Then::Serves)));
        }
        if self.has_csi {
            all.push(is(Then::Serves)(inline()));
        }
        if self.has_claims() {
            all.extend(CLAIMS.map(claiming).map(is(Then::Serves)));
        }
        let ends = |name, code: &str| ending(manifests::pod(name, &["/bin/sh", "-c", code]), "Never");
        all.extend([
            is(Then::Ended("Succeeded"))(ends("job0", "exit 0")),
            is(Then::Ended("Succeeded"))(ending(
                manifests::pod("job1", &["/bin/sh", "-c", "exit 0"]),
                "OnFailure",
            )),
            is(Then::Ended("Failed"))(ends("job2", "exit 4")),
            is(Then::Serves)(ends("once", "exec sleep 100000")),
            is(Then::Crashes)(manifests::pod("crashing", &["/bin/sh", "-c", "exit 3"])),
            is(Then::Waits)(without_image()),
            is(Then::Starts)(starting()),
            is(Then::Leaves)(self.leaving()),
        ]);
        all
    }

    /// Returns a serving pod of the QoS class, with the probes and the volumes that its number selects, with
    /// an init container and a hook.
    pub(super) fn serving(&self, number: usize) -> Value {
        let (tcp, http, control) = (PORT.to_string(), HTTP.to_string(), CONTROL.to_string());
        let command = ["/bin/testapp", "serve", "--tcp", &tcp, "--http", &http, "--control", &control];
        let mut pod = probed(manifests::pod(&format!("web{number}"), &command), number);
        pod = match number % 3 {
            0 => manifests::with_resources(pod, ("20m", "32Mi"), ("20m", "32Mi")),
            1 => manifests::with_resources(pod, ("10m", "16Mi"), ("", "64Mi")),
            _ => pod,
        };
        let image = pod["spec"]["containers"][0]["image"].clone();
        let init = json!({"name": "init", "image": image, "command": ["/bin/sh", "-c", "echo made > /data/file"],
            "volumeMounts": [{"name": "data", "mountPath": "/data"}]});
        pod["spec"]["initContainers"] = json!([init]);
        let mut volumes = vec![
            json!({"name": "data", "emptyDir": {}}),
            json!({"name": "settings", "configMap": {"name": "settings"}}),
            json!({"name": "about", "downwardAPI": {"items": [
                {"path": "name", "fieldRef": {"fieldPath": "metadata.name"}},
                {"path": "cpu", "resourceFieldRef": {"containerName": "main", "resource": "requests.cpu"}},
            ]}}),
        ];
        volumes.extend(if number.is_multiple_of(2) { self.even() } else { odd() });
        let mounts = volumes.iter().map(|volume| {
            let name = volume["name"].as_str().unwrap_or_default();
            json!({"name": name, "mountPath": format!("/{name}")})
        });
        let part = json!({"name": "data", "mountPath": "/part", "subPath": "part"});
        let mounts: Vec<Value> = mounts.chain([part]).collect();
        pod["spec"]["serviceAccountName"] = json!("default");
        pod["spec"]["volumes"] = volumes.into();
        let main = &mut pod["spec"]["containers"][0];
        main["volumeMounts"] = mounts.into();
        main["lifecycle"] =
            json!({"postStart": {"exec": {"command": ["/bin/sh", "-c", "echo x >> /data/hooks"]}}});
        pod
    }

    fn even(&self) -> Vec<Value> {
        vec![
            json!({"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}}),
            json!({"name": "host", "hostPath": {"path": self.host, "type": "Directory"}}),
            json!({"name": "word", "secret": {"secretName": "word"}}),
        ]
    }

    /// Returns a pod with a sidecar, or, for older versions, with a second container.
    fn accompanied(&self, number: usize) -> Value {
        let name = format!("pair{number}");
        let mut pod = manifests::with_resources(manifests::serving(&name), ("10m", "16Mi"), ("", ""));
        let image = pod["spec"]["containers"][0]["image"].clone();
        let mut other = json!({"name": "other", "image": image, "command": ["/bin/testapp", "pause"]});
        if self.minor < SIDECARS {
            if let Some(all) = pod["spec"]["containers"].as_array_mut() {
                all.push(other);
            }
            return pod;
        }
        other["restartPolicy"] = json!("Always");
        let init = json!({"name": "init", "image": image, "command": ["/bin/sh", "-c", "exit 0"]});
        pod["spec"]["initContainers"] = json!([other, init]);
        pod
    }

    /// Returns a pod for deletion.
    fn leaving(&self) -> Value {
        let script = "trap '' TERM; until [ -e /host/go ]; do sleep 0.2; done";
        let mut pod = manifests::pod("leaving", &["/bin/sh", "-c", script]);
        pod["spec"]["terminationGracePeriodSeconds"] = 3600.into();
        pod["spec"]["volumes"] = json!([{"name": "host", "hostPath": {"path": self.host}}]);
        pod["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "host", "mountPath": "/host"}]);
        pod
    }
}

fn odd() -> Vec<Value> {
    let name = json!([{"path": "name", "fieldRef": {"fieldPath": "metadata.name"}}]);
    vec![json!({"name": "all", "projected": {"sources": [
        {"configMap": {"name": "settings"}}, {"secret": {"name": "word"}}, {"downwardAPI": {"items": name}},
        {"serviceAccountToken": {"path": "token", "expirationSeconds": 3600}},
    ]}})]
}

/// Sets the probes that the number selects. A probe that fails once fails the test.
fn probed(pod: Value, number: usize) -> Value {
    let tcp = json!({"tcpSocket": {"port": PORT}, "periodSeconds": 5, "timeoutSeconds": 30});
    let get = json!({"httpGet": {"path": "/", "port": HTTP}, "periodSeconds": 5, "timeoutSeconds": 30});
    let command = json!(["/bin/testapp", "probe", "ok"]);
    let exec = json!({"exec": {"command": command}, "periodSeconds": 10, "timeoutSeconds": 30});
    let startup = json!({"tcpSocket": {"port": PORT}, "periodSeconds": 1, "failureThreshold": 100});
    let (kinds, probes): (&[&str], [&Value; 3]) = match number % 4 {
        0 => (&["readinessProbe"], [&tcp, &tcp, &tcp]),
        1 => (&["readinessProbe", "livenessProbe"], [&get, &get, &get]),
        2 => (&["readinessProbe", "livenessProbe"], [&exec, &tcp, &tcp]),
        _ => (&["readinessProbe", "livenessProbe", "startupProbe"], [&tcp, &exec, &startup]),
    };
    kinds.iter().zip(probes).fold(pod, |pod, (kind, probe)| manifests::with(pod, kind, probe.clone()))
}

/// Returns the pod without a token of its own: the control plane has no controller that issues one.
fn tokenless(mut pod: Value) -> Value {
    pod["spec"]["automountServiceAccountToken"] = false.into();
    pod["spec"]["enableServiceLinks"] = false.into();
    pod
}

fn with_device(number: usize) -> Value {
    let pod = manifests::pod(&format!("device{number}"), &["/bin/testapp", "pause"]);
    manifests::with(pod, "resources", json!({"limits": {RESOURCE: 1}}))
}

/// Returns a pod with a volume that its CSI driver makes for the pod alone.
fn inline() -> Value {
    shelved("inline", &json!({"csi": {"driver": DRIVER}}))
}

/// Returns a pod with the volume of a claim.
fn claiming(claim: &str) -> Value {
    shelved(&format!("claims-{claim}"), &json!({"persistentVolumeClaim": {"claimName": claim}}))
}

fn shelved(name: &str, volume: &Value) -> Value {
    let mut pod = manifests::serving(name);
    let mut volume = volume.clone();
    volume["name"] = json!("shelf");
    pod["spec"]["volumes"] = json!([volume]);
    pod["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "shelf", "mountPath": "/shelf"}]);
    pod
}

fn ending(mut pod: Value, policy: &str) -> Value {
    pod["spec"]["restartPolicy"] = policy.into();
    pod
}

fn without_image() -> Value {
    let pod = manifests::pod("no-image", &["/bin/testapp", "pause"]);
    manifests::with(pod, "image", json!("127.0.0.1:1/missing:1"))
}

fn starting() -> Value {
    let mut pod = manifests::pod("starting", &["/bin/testapp", "pause"]);
    let image = pod["spec"]["containers"][0]["image"].clone();
    pod["spec"]["initContainers"] = json!([
        {"name": "first", "image": image, "command": ["/bin/sh", "-c", "exec sleep 100000"]},
    ]);
    pod
}
