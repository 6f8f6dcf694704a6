//! The node of a real cluster: etcd, kube-apiserver, containerd, the agent.

#![allow(clippy::unwrap_used, clippy::panic)] // a failure in a helper fails the test

use beelet_tests::agent::{Agent, Control, NODE, Options};
use beelet_tests::cluster::{Cluster, User, ask, condition};
use beelet_tests::containerd::{Containerd, block_on};
use beelet_tests::manifests::{self, CONTROL, PORT};
use beelet_tests::require;
use http::Method;
use serde_json::{Value, json};

/// The agent, its cluster, and the runtime, which is dropped last.
pub(crate) struct Scene {
    pub(crate) agent: Agent,
    pub(crate) cluster: Cluster,
    pub(crate) containerd: Containerd,
}

impl Scene {
    /// Starts an agent that is a node of a cluster.
    pub(crate) fn start() -> Scene {
        Scene::start_at("192.0.2.7", |options, _| options)
    }

    /// Starts a node with this address, and with options of the test's own.
    pub(crate) fn start_at(address: &str, change: impl FnOnce(Options, &Cluster) -> Options) -> Scene {
        Scene::start_on(Containerd::start_for_test().unwrap(), address, change)
    }

    /// Starts a node on a runtime of the test's own.
    fn start_on(
        containerd: Containerd,
        address: &str,
        change: impl FnOnce(Options, &Cluster) -> Options,
    ) -> Scene {
        let cluster = Cluster::start(containerd.dir()).unwrap();
        let kubeconfig = cluster.node_kubeconfig(NODE).unwrap();
        let mut options = Options::on(&containerd);
        options.arguments.extend(["--kubeconfig".to_owned(), kubeconfig.display().to_string()]);
        options.arguments.extend(["--node-ip".to_owned(), address.to_owned()]);
        let agent = Agent::start(change(options, &cluster)).unwrap();
        let scene = Scene { agent, cluster, containerd };
        scene.until("the Node", &format!("/api/v1/nodes/{NODE}"), |node| condition(node, "Ready"));
        scene
    }

    /// Waits until `wanted` is true for an object, which is null while it doesn't exist.
    pub(crate) fn until(
        &self,
        what: &str,
        path: &str,
        wanted: impl Fn(&Value) -> bool + Send + Sync,
    ) -> Value {
        let found = self.cluster.until(what, path, |object| wanted(object).then(|| object.clone()));
        found.unwrap_or_else(|error| panic!("{error:#}\n{}", self.agent.log()))
    }

    pub(crate) fn until_ready(&self, name: &str, ready: bool) -> Value {
        let wanted = |pod: &Value| pod.is_object() && condition(pod, "Ready") == ready;
        self.until(&format!("{name}: Ready={ready}"), &Cluster::pod(name), wanted)
    }

    pub(crate) fn until_gone(&self, name: &str) {
        self.until(&format!("{name} to be deleted"), &Cluster::pod(name), Value::is_null);
    }

    /// Returns a connection to the test app of a pod.
    pub(crate) fn control(&self, pod: &Value) -> Control {
        Control::connect(pod["status"]["podIP"].as_str().unwrap(), CONTROL).unwrap()
    }

    /// Checks that the API server refused no request of the node for lack of rights.
    pub(crate) fn nothing_was_forbidden(&self) {
        let asked = self.cluster.asked_by(NODE).unwrap();
        assert!(!asked.is_empty());
        let forbidden: Vec<_> = asked.iter().filter(|(.., code)| [401, 403].contains(code)).collect();
        assert!(forbidden.is_empty(), "{forbidden:?}");
    }
}

/// Returns a pod that serves, without a token: this cluster has no controller that issues one.
fn serving(name: &str) -> Value {
    let mut pod = manifests::serving(name);
    pod["spec"]["automountServiceAccountToken"] = false.into();
    pod["spec"]["enableServiceLinks"] = false.into();
    pod
}

#[test]
fn the_control_plane_serves_an_admin_and_keeps_a_node_to_its_own() {
    require!(apiserver);
    let mut cluster = Cluster::start_for_test().unwrap();
    cluster.create("/api/v1/namespaces", &json!({ "metadata": { "name": "mine" } })).unwrap();
    let pod = json!({
        "metadata": { "name": "web" },
        "spec": { "containers": [{ "name": "main", "image": "web:1" }] },
    });
    assert_eq!(cluster.run("n", &pod).unwrap()["spec"]["nodeName"], "n");

    let kubeconfig = cluster.node_kubeconfig("n").unwrap();
    let get = |path: &str| {
        block_on(async { ask(&Cluster::client(&kubeconfig)?, Method::GET, path, "", &Value::Null).await })
    };
    let pods = get("/api/v1/pods?fieldSelector=spec.nodeName%3Dn").unwrap();
    assert_eq!(pods["items"][0]["metadata"]["name"], "web");
    let refused = get("/api/v1/namespaces/default/secrets").unwrap_err();
    assert!(format!("{refused:#}").contains("forbidden"), "{refused:#}");
    let asked = cluster.asked_by("n").unwrap();
    let row = |verb: &str, resource: &str, code| (verb.to_owned(), resource.to_owned(), code);
    assert_eq!(asked, [row("list", "pods", 200), row("list", "secrets", 403)]);

    // The API server returns with its earlier objects.
    cluster.kill_server();
    assert!(cluster.get("/readyz").is_err());
    cluster.start_server().unwrap();
    cluster.until("the pod", &Cluster::pod("web"), |pod| pod["metadata"]["uid"].as_str().map(drop)).unwrap();
    assert!(cluster.kubeconfig_of(&User::Admin).unwrap().contains("https://127.0.0.1:"));
}

#[test]
fn a_pod_of_the_api_runs_follows_its_listener_and_ends() {
    require!(containerd, bpf, apiserver);
    let scene = Scene::start();
    scene.cluster.run(NODE, &serving("web")).unwrap();
    let pod = scene.until_ready("web", true);
    assert_eq!(pod["status"]["phase"], "Running");
    let mut control = scene.control(&pod);
    for _ in 0..2 {
        control.send(&format!("close {PORT}")).unwrap();
        scene.until_ready("web", false);
        control.send(&format!("open {PORT}")).unwrap();
        scene.until_ready("web", true);
    }
    scene.cluster.delete(&Cluster::pod("web"), None).unwrap();
    scene.until_gone("web");
    scene.nothing_was_forbidden();
}

#[test]
fn a_pod_runs_on_while_the_api_server_is_away_and_its_status_arrives_after() {
    require!(containerd, bpf, apiserver);
    let mut scene = Scene::start();
    scene.cluster.run(NODE, &serving("web")).unwrap();
    let before = scene.until_ready("web", true);
    let mut control = scene.control(&before);
    scene.cluster.kill_server();
    control.send(&format!("close {PORT}")).unwrap();
    let said = |ready| {
        scene
            .agent
            .until(&format!("web: ready={ready}"), |watch| {
                watch.pod("web").filter(|pod| pod.ready() == ready).map(drop)
            })
            .unwrap();
    };
    said(false);
    let _ = control.send("exit 3"); // the process ends before it can answer
    scene
        .agent
        .until("web to be restarted", |watch| watch.pod("web").filter(|pod| pod.restarts() == 1).map(drop))
        .unwrap();
    said(true);
    scene.cluster.start_server().unwrap();
    let restarted =
        |pod: &Value| pod["status"]["containerStatuses"][0]["restartCount"] == 1 && condition(pod, "Ready");
    let after = scene.until("the status of the outage", &Cluster::pod("web"), restarted);
    assert_eq!(after["metadata"]["uid"], before["metadata"]["uid"]);
    assert_eq!(after["status"]["podIP"], before["status"]["podIP"]);
    let last = &after["status"]["containerStatuses"][0]["lastState"]["terminated"];
    assert_eq!(last["exitCode"], 3, "{after:#}");
    scene.cluster.delete(&Cluster::pod("web"), None).unwrap();
    scene.until_gone("web");
    scene.nothing_was_forbidden();
}

#[test]
fn a_killed_agent_finds_its_pods_again_and_ends_those_that_were_deleted_meanwhile() {
    require!(containerd, bpf, apiserver);
    let mut scene = Scene::start();
    for name in ["stays", "goes"] {
        scene.cluster.run(NODE, &serving(name)).unwrap();
    }
    let before = scene.until_ready("stays", true);
    scene.until_ready("goes", true);
    scene.agent.kill9();
    scene.cluster.delete(&Cluster::pod("goes"), None).unwrap();
    scene.agent.resume().unwrap();
    scene.until_gone("goes");
    let mut control = scene.control(&before);
    control.send(&format!("close {PORT}")).unwrap();
    let after = scene.until_ready("stays", false);
    let container = |pod: &Value| pod["status"]["containerStatuses"][0]["containerID"].clone();
    assert_eq!(container(&after), container(&before));
    assert_eq!(after["status"]["containerStatuses"][0]["restartCount"], 0);
    scene.nothing_was_forbidden();
}

#[test]
fn a_debugger_joins_a_running_pod_and_its_target() {
    require!(containerd, bpf, apiserver);
    let scene = Scene::start();
    scene.cluster.run(NODE, &serving("web")).unwrap();
    scene.until_ready("web", true);
    let debugger = json!({
        "name": "debug", "image": beelet_tests::images::APP, "command": ["/bin/testapp", "pause"], "targetContainerName": "main",
    });
    let path = format!("{}/ephemeralcontainers", Cluster::pod("web"));
    // Servers before 1.22 take only the list, the others the pod. Each ignores the other form.
    let added = json!([debugger]);
    scene
        .cluster
        .patch(&path, &json!({ "ephemeralContainers": added, "spec": { "ephemeralContainers": added } }))
        .unwrap();
    let runs = |pod: &Value| pod["status"]["ephemeralContainerStatuses"][0]["state"]["running"].is_object();
    let pod = scene.until("web: its debugger", &Cluster::pod("web"), runs);
    let namespace = |status: &Value| {
        let uid = pod["metadata"]["uid"].as_str().unwrap();
        let pod = beelet_tests::cgroup_values::pod_path(pod["status"]["qosClass"].as_str().unwrap(), uid);
        let id = status["containerID"].as_str().unwrap().split("//").nth(1).unwrap();
        let dir = scene.containerd.cgroup().folder("pids", &format!("{pod}/{id}")).unwrap();
        let process = beelet_tests::guards::processes_below(&dir)[0];
        std::fs::read_link(format!("/proc/{}/ns/pid", process.as_raw_nonzero())).unwrap()
    };
    let (own, debugger) =
        (&pod["status"]["containerStatuses"][0], &pod["status"]["ephemeralContainerStatuses"][0]);
    assert_eq!(namespace(own), namespace(debugger));
    assert!(condition(&pod, "Ready"));
    scene.cluster.delete(&Cluster::pod("web"), None).unwrap();
    scene.until_gone("web");
    scene.nothing_was_forbidden();
}

impl Scene {
    /// Creates a claim that is bound to a new PersistentVolume of this kind, as controllers would.
    fn bind(&self, claim: &str, spec: &Value) {
        let (volume, mut spec) = (format!("pv-{claim}"), spec.clone());
        let (modes, amount) = (json!(["ReadWriteOnce"]), json!({ "storage": "1Gi" }));
        let class = spec["storageClassName"].as_str().unwrap_or_default().to_owned();
        let claims = "/api/v1/namespaces/default/persistentvolumeclaims";
        let wanted = json!({
            "metadata": { "name": claim },
            "spec": {
                "volumeName": volume, "storageClassName": class, "accessModes": modes,
                "resources": { "requests": amount },
            },
        });
        let made = self.cluster.create(claims, &wanted).unwrap();
        spec["accessModes"] = modes.clone();
        spec["capacity"] = amount.clone();
        spec["claimRef"] = json!({
            "apiVersion": "v1", "kind": "PersistentVolumeClaim", "namespace": "default", "name": claim,
            "uid": made["metadata"]["uid"],
        });
        let volume = json!({ "metadata": { "name": volume }, "spec": spec });
        self.cluster.create("/api/v1/persistentvolumes", &volume).unwrap();
        let bound = json!({ "status": { "phase": "Bound", "accessModes": modes, "capacity": amount } });
        self.cluster.patch(&format!("{claims}/{claim}/status"), &bound).unwrap();
    }
}

#[test]
fn claims_of_a_folder_and_of_a_csi_driver_are_mounted_and_unmounted() {
    use beelet_tests::csi_driver::{CsiDriver, Settings};
    require!(containerd, bpf, apiserver);
    let scene = Scene::start();
    let (shelf, folder) = (scene.containerd.dir().join("shelf"), scene.containerd.dir().join("folder"));
    std::fs::create_dir_all(&folder).unwrap();
    let settings = Settings::named("shelf.example.com");
    let driver = CsiDriver::start(&scene.agent.dir().join("kubelet"), &shelf, settings).unwrap();
    let object = json!({ "metadata": { "name": "shelf.example.com" }, "spec": { "attachRequired": false } });
    scene.cluster.create("/apis/storage.k8s.io/v1/csidrivers", &object).unwrap();
    let here = json!({ "matchExpressions": [{ "key": "kubernetes.io/hostname", "operator": "In", "values": [NODE] }] });
    scene.bind(
        "folder",
        &json!({
            "local": { "path": folder }, "nodeAffinity": { "required": { "nodeSelectorTerms": [here] } },
        }),
    );
    scene.bind("shelf", &json!({ "csi": { "driver": "shelf.example.com", "volumeHandle": "disk-1" } }));
    let mut pod = crate::node::script(
        "web",
        "
        echo folder > /folder/said; echo shelf > /shelf/said; echo part > /part/said
        until [ -e /folder/go ]; do sleep 0.05; done",
    );
    pod["spec"]["automountServiceAccountToken"] = false.into();
    pod["spec"]["enableServiceLinks"] = false.into();
    pod["spec"]["volumes"] = json!([
        { "name": "folder", "persistentVolumeClaim": { "claimName": "folder" } },
        { "name": "shelf", "persistentVolumeClaim": { "claimName": "shelf" } },
    ]);
    pod["spec"]["containers"][0]["volumeMounts"] = json!([
        { "name": "folder", "mountPath": "/folder" },
        { "name": "shelf", "mountPath": "/shelf" },
        { "name": "shelf", "mountPath": "/part", "subPath": "a/b" },
    ]);
    scene.cluster.run(NODE, &pod).unwrap();
    let phase = |wanted: &'static str| move |pod: &Value| pod["status"]["phase"] == wanted;
    scene.until("web to run", &Cluster::pod("web"), phase("Running"));
    let said = [folder.join("said"), shelf.join("disk-1/said"), shelf.join("disk-1/a/b/said")];
    for (file, words) in said.iter().zip(["folder\n", "shelf\n", "part\n"]) {
        let read = || std::fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()));
        let is_said = || read().and_then(|text| if text == words { Ok(()) } else { Err(text) });
        beelet_tests::workdir::wait_for("the container's output", beelet_tests::workdir::PATIENCE, is_said)
            .unwrap();
    }
    std::fs::write(folder.join("go"), "").unwrap();
    // The pod's volumes are released as soon as its containers have ended.
    scene.until("web to end", &Cluster::pod("web"), |pod| {
        ["Succeeded", "Failed"].iter().any(|phase| pod["status"]["phase"] == *phase)
    });
    let given_back = || {
        let order = driver.order();
        if order.last().is_some_and(|last| last == "NodeUnstageVolume") {
            Ok(())
        } else {
            Err(format!("{order:?}"))
        }
    };
    beelet_tests::workdir::wait_for("the volume to be unstaged", beelet_tests::workdir::PATIENCE, given_back)
        .unwrap();
    scene.cluster.delete(&Cluster::pod("web"), None).unwrap();
    scene.until_gone("web");
    assert!(said.iter().all(|file| file.exists()));
    scene.nothing_was_forbidden();
}

#[test]
fn a_claims_devices_are_in_its_container_and_unprepared_before_the_pod_ends() {
    use beelet_tests::dra_driver::{DraDriver, Settings};
    require!(containerd_2, bpf, resource_claims);
    let containerd = Containerd::start_version_2_for_test().unwrap();
    let scene = Scene::start_on(containerd, "192.0.2.7", |options, _| options);
    let spec = json!({
        "cdiVersion": "0.6.0",
        "kind": "example.com/gpu",
        "devices": [{ "name": "big", "containerEdits": {
            "env": ["BY_CDI=the claim"],
            "deviceNodes": [{ "path": "/dev/by-cdi", "hostPath": "/dev/null" }],
        }}],
    });
    let file = scene.containerd.cdi_dir().join("example.json");
    beelet_tests::workdir::write(&file, spec.to_string()).unwrap();
    let kubelet_dir = scene.agent.dir().join("kubelet");
    let driver = DraDriver::start(&kubelet_dir, Settings::named("gpu.example.com")).unwrap();
    let slice = json!({
        "metadata": { "name": "slice" },
        "spec": {
            "nodeName": NODE, "driver": "gpu.example.com", "devices": [{ "name": "d" }],
            "pool": { "name": "pool", "generation": 1, "resourceSliceCount": 1 },
        },
    });
    let registered = || {
        driver
            .registration()
            .filter(|(well, _)| *well)
            .map(drop)
            .ok_or("the driver is not registered".to_owned())
    };
    let patience = beelet_tests::workdir::PATIENCE;
    beelet_tests::workdir::wait_for("the driver to be registered", patience, registered).unwrap();
    scene.cluster.create("/apis/resource.k8s.io/v1/resourceslices", &slice).unwrap();
    let mut pod = crate::node::script(
        "web",
        "test \"$BY_CDI\" = 'the claim' && test -c /dev/by-cdi && echo x > /dev/by-cdi",
    );
    pod["spec"]["automountServiceAccountToken"] = false.into();
    pod["spec"]["enableServiceLinks"] = false.into();
    pod["spec"]["resourceClaims"] = json!([{ "name": "gpu", "resourceClaimName": "big" }]);
    pod["spec"]["containers"][0]["resources"] = json!({ "claims": [{ "name": "gpu", "request": "r" }] });
    let claims = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims";
    let request = json!({ "name": "r", "exactly": { "deviceClassName": "gpu.example.com" } });
    let claim = json!({ "metadata": { "name": "big" }, "spec": { "devices": { "requests": [request] } } });
    scene.cluster.create(claims, &claim).unwrap();
    let made = scene.cluster.run(NODE, &pod).unwrap();
    let result = json!({ "request": "r", "driver": "gpu.example.com", "pool": "pool", "device": "d" });
    let status = json!({ "status": {
        "allocation": { "devices": { "results": [result] } },
        "reservedFor": [{ "resource": "pods", "name": "web", "uid": made["metadata"]["uid"] }],
    }});
    scene.cluster.patch(&format!("{claims}/big/status"), &status).unwrap();
    scene.until("web to end well", &Cluster::pod("web"), |pod| pod["status"]["phase"] == "Succeeded");
    assert_eq!(driver.calls("v1.NodePrepareResources"), [["big"]]);
    assert_eq!(driver.calls("v1.NodeUnprepareResources"), [["big"]]);
    scene.cluster.delete(&Cluster::pod("web"), None).unwrap();
    scene.until_gone("web");
    drop(driver);
    scene.until("the slice to be deleted", "/apis/resource.k8s.io/v1/resourceslices/slice", Value::is_null);
    scene.nothing_was_forbidden();
}

#[test]
fn a_claims_volume_grows_while_its_pod_runs_and_the_claim_and_both_events_say_so() {
    use beelet_tests::csi_driver::{CsiDriver, Settings};
    require!(containerd, bpf, apiserver);
    let mut scene = Scene::start();
    let shelf = scene.containerd.dir().join("shelf");
    let settings = Settings { expands: true, ..Settings::named("shelf.example.com") };
    let driver = CsiDriver::start(&scene.agent.dir().join("kubelet"), &shelf, settings).unwrap();
    let object = json!({ "metadata": { "name": "shelf.example.com" }, "spec": { "attachRequired": false } });
    scene.cluster.create("/apis/storage.k8s.io/v1/csidrivers", &object).unwrap();
    let class = json!({
        "metadata": { "name": "grows" }, "provisioner": "shelf.example.com", "allowVolumeExpansion": true,
    });
    scene.cluster.create("/apis/storage.k8s.io/v1/storageclasses", &class).unwrap();
    let source = json!({ "driver": "shelf.example.com", "volumeHandle": "disk-1" });
    scene.bind("shelf", &json!({ "csi": source, "storageClassName": "grows" }));
    let mut pod = crate::node::script("web", "until [ -e /shelf/go ]; do sleep 0.05; done");
    pod["spec"]["automountServiceAccountToken"] = false.into();
    pod["spec"]["enableServiceLinks"] = false.into();
    pod["spec"]["volumes"] = json!([{ "name": "shelf", "persistentVolumeClaim": { "claimName": "shelf" } }]);
    pod["spec"]["containers"][0]["volumeMounts"] = json!([{ "name": "shelf", "mountPath": "/shelf" }]);
    scene.cluster.run(NODE, &pod).unwrap();
    let runs = |pod: &Value| pod["status"]["phase"] == "Running";
    scene.until("web to run", &Cluster::pod("web"), runs);
    assert!(driver.calls("NodeExpandVolume").is_empty());
    // These changes are those of a user and of the resizer. A starting agent checks claims at once.
    scene.agent.kill9();
    let claim = "/api/v1/namespaces/default/persistentvolumeclaims/shelf";
    let larger = json!({ "storage": "2Gi" });
    scene.cluster.patch(claim, &json!({ "spec": { "resources": { "requests": larger } } })).unwrap();
    let volume = json!({ "spec": { "capacity": larger } });
    scene.cluster.patch("/api/v1/persistentvolumes/pv-shelf", &volume).unwrap();
    let pending = json!({ "status": {
        "allocatedResources": larger, "allocatedResourceStatuses": { "storage": "NodeResizePending" },
        "conditions": [{ "type": "FileSystemResizePending", "status": "True" }],
    } });
    scene.cluster.patch(&format!("{claim}/status"), &pending).unwrap();
    scene.agent.resume().unwrap();
    let grown = scene
        .until("the claim to have grown", claim, |claim| claim["status"]["capacity"]["storage"] == "2Gi");
    assert!(grown["status"]["conditions"].as_array().is_none_or(Vec::is_empty), "{grown:#}");
    assert_eq!(grown["status"]["allocatedResourceStatuses"]["storage"], Value::Null);
    let asked = driver.calls("NodeExpandVolume");
    assert_eq!((asked.len(), &asked[0]["bytes"]), (1, &json!(2_i64 << 30)));
    for kind in ["Pod", "PersistentVolumeClaim"] {
        let events = "/api/v1/namespaces/default/events?fieldSelector=";
        let wanted = format!("{events}reason=FileSystemResizeSuccessful,involvedObject.kind={kind}");
        let is_told = || match scene.cluster.get(&wanted).map_err(|error| format!("{error:#}"))? {
            events if events["items"].as_array().is_some_and(|all| all.len() == 1) => Ok(()),
            events => Err(format!("{events:#}")),
        };
        beelet_tests::workdir::wait_for(kind, beelet_tests::workdir::PATIENCE, is_told).unwrap();
    }
    assert!(runs(&scene.cluster.get(&Cluster::pod("web")).unwrap()));
    std::fs::write(shelf.join("disk-1/go"), "").unwrap();
    scene.until("web to end", &Cluster::pod("web"), |pod| pod["status"]["phase"] == "Succeeded");
    scene.cluster.delete(&Cluster::pod("web"), None).unwrap();
    scene.until_gone("web");
    scene.nothing_was_forbidden();
}

#[test]
fn a_volume_has_the_certificates_of_the_servers_trust_bundles_and_gets_those_that_come() {
    require!(containerd, bpf, trust_bundles);
    let scene = Scene::start();
    let bundles = "/apis/certificates.k8s.io/v1beta1/clustertrustbundles";
    let [root, one, two] = ["root", "one", "two"]
        .map(|name| beelet_tests::apiserver::Authority::new(name).unwrap().pem().trim().to_owned());
    let of_signer = |name: &str, certificate: &str| {
        let spec = json!({ "signerName": "example.com/ca", "trustBundle": certificate });
        let metadata = json!({ "name": format!("example.com:ca:{name}"), "labels": { "live": "yes" } });
        scene.cluster.create(bundles, &json!({ "metadata": metadata, "spec": spec })).unwrap();
    };
    let named = json!({ "metadata": { "name": "root" }, "spec": { "trustBundle": root } });
    scene.cluster.create(bundles, &named).unwrap();
    of_signer("one", &one);
    let script = "until [ $(grep -c BEGIN /trust/ca.pem) = 2 ]; do sleep 0.1; done
        cat /trust/root.pem /trust/ca.pem > /dev/termination-log";
    let mut pod = crate::node::script("web", script);
    pod["spec"]["automountServiceAccountToken"] = false.into();
    pod["spec"]["enableServiceLinks"] = false.into();
    let labels = json!({ "matchLabels": { "live": "yes" } });
    pod["spec"]["volumes"] = json!([{ "name": "trust", "projected": { "sources": [
        { "clusterTrustBundle": { "name": "root", "path": "root.pem" } },
        { "clusterTrustBundle": { "signerName": "example.com/ca", "labelSelector": labels, "path": "ca.pem" } },
    ] } }]);
    pod["spec"]["containers"][0]["volumeMounts"] = json!([{ "name": "trust", "mountPath": "/trust" }]);
    scene.cluster.run(NODE, &pod).unwrap();
    scene.until("web to run", &Cluster::pod("web"), |pod| pod["status"]["phase"] == "Running");
    of_signer("two", &two);
    let ended = scene.until("web to end", &Cluster::pod("web"), |pod| pod["status"]["phase"] == "Succeeded");
    let said = &ended["status"]["containerStatuses"][0]["state"]["terminated"]["message"];
    let said = said.as_str().unwrap();
    assert!([root, one, two].iter().all(|certificate| said.contains(certificate)), "{said}");
    assert_eq!(said.matches("BEGIN CERTIFICATE").count(), 3);
    scene.nothing_was_forbidden();
}
