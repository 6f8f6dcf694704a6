//! Tests of volume claims of the API server's pods: waits, mounts, unmounts.

use beelet_tests::agent::{Options, http_get};
use beelet_tests::apiserver::FakeApi;
use beelet_tests::{guards, ports, require};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use serde_json::{Value, json};
use std::path::Path;

use super::scene::Member;
use super::workload::{path, pod};

const CLAIM: &str = "/api/v1/namespaces/default/persistentvolumeclaims/data";
const VOLUME: &str = "/api/v1/persistentvolumes/pv-1";

/// Returns a pod with a volume `data` of this source, which its container mounts.
pub(crate) fn pod_with(name: &str, source: &Value) -> Value {
    let mut pod = pod(name);
    let mut volume = source.clone();
    volume["name"] = "data".into();
    pod["spec"]["volumes"] = json!([volume]);
    pod["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "data", "mountPath": "/data"}]);
    pod
}

pub(crate) fn claiming(name: &str) -> Value {
    pod_with(name, &json!({"persistentVolumeClaim": {"claimName": "data"}}))
}

/// Binds the claim at `claim` to a PersistentVolume of this kind.
pub(crate) fn bind(api: &FakeApi, claim: &str, spec: &Value) {
    let found = api.patch(claim, &json!({"spec": {"volumeName": "pv-1"}, "status": {"phase": "Bound"}}));
    let mut spec = spec.clone();
    spec["claimRef"] = json!({"uid": found["metadata"]["uid"]});
    api.put(VOLUME, json!({"spec": spec}));
}

pub(crate) fn pending() -> Value {
    json!({"spec": {}, "status": {"phase": "Pending"}})
}

/// Address of the agent's HTTP server.
pub(crate) struct Pages(String);

impl Pages {
    /// Waits until a page contains `words`; returns the page.
    pub(crate) fn until(&self, member: &Member, path: &str, words: &str) -> String {
        member.scene.poll_until(&format!("{words} on {path}"), || {
            let page = http_get(&self.0, path).map_err(|error| error.to_string())?.1;
            if page.contains(words) { Ok(page) } else { Err(page) }
        })
    }
}

/// Starts a node that measures volumes each second.
pub(crate) async fn measuring(api: FakeApi) -> (Member, Pages) {
    let [port] = ports::free().unwrap();
    let options =
        |options: Options| options.kubelet("volumeStatsAggPeriod", "1s").kubelet("healthzPort", port);
    (Member::start(api, options).await, Pages(format!("127.0.0.1:{port}")))
}

impl Member {
    /// Waits until an event with this reason contains `words`.
    pub(crate) async fn until_event(&self, reason: &str, words: &str) {
        let matches = |event: &Value| {
            let text = |field: &str| event[field].as_str().unwrap_or_default().to_owned();
            event["reason"] == reason && (text("message") + &text("note")).contains(words)
        };
        let found = |api: &FakeApi| {
            let all = ["/api/v1/events", "/apis/events.k8s.io/v1/events"];
            all.iter().flat_map(|collection| api.all(collection)).any(|event| matches(&event)).then_some(())
        };
        self.api.wait_until(&format!("an event {reason}: {words}"), found).await;
    }

    /// Returns the path of the container's volume on the machine.
    pub(crate) fn mounted(&self, pod: &str) -> String {
        let container = self.scene.cri.container(pod, "main").unwrap();
        let mount = container.config.mounts.iter().find(|mount| mount.container_path == "/data").unwrap();
        mount.host_path.clone()
    }

    /// Waits until the pods' folders contain no mounts.
    pub(crate) fn until_nothing_is_mounted(&self) {
        let pods = self.scene.dir.path().join("agent/pods");
        self.scene.poll_until("no mounts in the pods' folders", || {
            let mounts = guards::mounts().map_err(|error| error.to_string())?;
            match mounts.iter().find(|mount| mount.path.starts_with(&pods)) {
                Some(mount) => Err(format!("{mount:?}")),
                None => Ok(()),
            }
        });
    }
}

#[tokio::test]
async fn a_pod_waits_until_its_claim_is_bound_and_unmounts_the_volume() {
    require!(root);
    let member = Member::start(FakeApi::start(), |options| options).await;
    let shelf = member.scene.dir.path().join("shelf");
    std::fs::create_dir(&shelf).unwrap();
    std::fs::write(shelf.join("kept"), "1").unwrap();
    member.api.put(&path("web"), claiming("web"));
    member
        .until_event("FailedMount", "error processing PVC default/data: failed to fetch PVC from API server")
        .await;
    member.api.put(CLAIM, pending());
    let words = "Unable to attach or mount volumes: unmounted volumes=[data], unattached volumes=[], failed to \
                 process volumes=[data]: error processing PVC default/data: PVC is not bound";
    member.until_event("FailedMount", words).await;
    // Other pods do not wait for the claim.
    member.api.put(&path("other"), pod("other"));
    member.until_running("other").await;
    bind(&member.api, CLAIM, &json!({"local": {"path": shelf}, "accessModes": ["ReadWriteOnce"]}));
    member.until_running("web").await;
    let mounted = member.mounted("web");
    assert!(mounted.ends_with("/volumes/kubernetes.io~local-volume/pv-1"), "{mounted}");
    assert_eq!(std::fs::read_to_string(Path::new(&mounted).join("kept")).unwrap(), "1");
    member.api.delete(&path("web"));
    member.until_stopped("web");
    member.until_nothing_is_mounted();
    assert_eq!(std::fs::read_to_string(shelf.join("kept")).unwrap(), "1");
    member.scene.is_well();
}

/// The API server accepts any text for these names.
#[tokio::test]
async fn an_invalid_reference_blocks_only_its_own_pod() {
    require!(root);
    let member = Member::start(FakeApi::start(), |options| options).await;
    member.api.put(
        &path("claiming"),
        pod_with("claiming", &json!({"persistentVolumeClaim": {"claimName": "../secrets"}})),
    );
    member.until_event("FailedMount", "invalid request: the name \"../secrets\" may not contain '/'").await;
    member.api.put(&path("spaced"), pod_with("spaced", &json!({"configMap": {"name": "a b,c=d&e%"}})));
    member.until_event("FailedMount", "configmap \"a b,c=d&e%\" not found: a name has only a-z").await;
    let long = "a".repeat(300_000);
    for (name, source, words) in [
        ("mapped", json!({"configMap": {"name": long}}), "a\" not found: no name is longer than 253 bytes"),
        (
            "secret",
            json!({"secret": {"secretName": long}}),
            "a\" not found: no name is longer than 253 bytes",
        ),
        ("claim", json!({"persistentVolumeClaim": {"claimName": long}}), "a\" is longer than 512 bytes"),
    ] {
        member.api.put(&path(name), pod_with(name, &source));
        member.until_event("FailedMount", words).await;
    }
    let token = json!({"projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}});
    let mut robot = pod_with("robot", &token);
    robot["spec"]["serviceAccountName"] = long.clone().into();
    member.api.put(&path("robot"), robot);
    member.until_event("FailedMount", "a\" is longer than 512 bytes").await;
    // An invalid name is like a missing object: pods with optional references start, without the registry's
    // secret.
    let mut optional = pod_with("optional", &json!({"configMap": {"name": long, "optional": true}}));
    optional["spec"]["imagePullSecrets"] = json!([{"name": long}]);
    member.api.put(&path("optional"), optional);
    member.until_running("optional").await;
    member.api.put(&path("other"), pod("other"));
    member.until_running("other").await;
    let stray = |path: &str| path.contains("secrets") || path.contains("..");
    assert!(!member.api.asked().iter().any(|asked| stray(&asked.path)), "{}", member.api.transcript());
    member.scene.is_well();
}

#[tokio::test]
async fn a_pod_without_its_token_reports_the_reason_and_starts_later() {
    require!(root);
    const ACCOUNT: &str = "/api/v1/namespaces/default/serviceaccounts/robot";
    let member = Member::start(FakeApi::start(), |options| options).await;
    let token = json!({"projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}});
    let mut pod = pod_with("web", &token);
    pod["spec"]["serviceAccountName"] = "robot".into();
    member.api.put(&path("web"), pod);
    let words = "MountVolume.SetUp failed for volume \"data\" : failed to fetch token: serviceaccounts \"robot\" not found";
    member.until_event("FailedMount", words).await;
    member.api.put(ACCOUNT, json!({}));
    member.until_running("web").await;
    member.scene.is_well();
}

#[tokio::test]
async fn a_pod_with_a_claim_survives_the_agent_and_starts_its_container_again_without_the_server() {
    require!(root);
    let mut member = Member::start(FakeApi::start(), |options| options).await;
    let shelf = member.scene.dir.path().join("shelf");
    std::fs::create_dir(&shelf).unwrap();
    member.api.put(CLAIM, pending());
    bind(&member.api, CLAIM, &json!({"hostPath": {"path": shelf}, "accessModes": ["ReadWriteOnce"]}));
    member.api.put(&path("web"), claiming("web"));
    member.until_running("web").await;
    assert_eq!(member.mounted("web"), shelf.display().to_string());
    member.scene.agent.kill9();
    member.scene.agent.resume().unwrap();
    member.scene.until_relisted();
    member.api.remove(CLAIM);
    let before = member.scene.cri.container("web", "main").unwrap().id;
    member.scene.cri.exit(&before, 1);
    member.scene.poll_until("another container", || {
        let now = member.scene.cri.container("web", "main").unwrap();
        if now.id != before && member.runs("web") { Ok(()) } else { Err(now.id) }
    });
    assert_eq!(member.mounted("web"), shelf.display().to_string());
    member.scene.is_well();
}

#[tokio::test]
async fn a_local_volume_reports_the_space_of_its_file_system_and_a_host_path_does_not() {
    require!(root);
    let (member, pages) = measuring(FakeApi::start()).await;
    let shelf = member.scene.dir.path().join("shelf");
    std::fs::create_dir(&shelf).unwrap();
    member.api.put(CLAIM, pending());
    bind(&member.api, CLAIM, &json!({"hostPath": {"path": shelf}}));
    member.api.put(&path("first"), claiming("first"));
    member.until_running("first").await;
    let local = "/api/v1/namespaces/default/persistentvolumeclaims/local";
    let found = member.api.put(local, json!({"spec": {"volumeName": "pv-2"}, "status": {"phase": "Bound"}}));
    let spec = json!({"local": {"path": shelf}, "claimRef": {"uid": found["metadata"]["uid"]}});
    member.api.put("/api/v1/persistentvolumes/pv-2", json!({"spec": spec}));
    let source = json!({"persistentVolumeClaim": {"claimName": "local"}});
    member.api.put(&path("second"), pod_with("second", &source));
    member.until_running("second").await;
    let name = "kubelet_volume_stats_capacity_bytes";
    let labels = "{namespace=\"default\",persistentvolumeclaim=\"local\"} ";
    let page = pages.until(&member, "/metrics", &format!("{name}{labels}"));
    let value = page.split_once(&format!("{name}{labels}")).unwrap().1.lines().next().unwrap();
    let expected = rustix::fs::statvfs(&shelf).unwrap();
    assert_eq!(value.parse::<u64>().unwrap(), expected.f_blocks * expected.f_frsize);
    assert_eq!(page.matches(&format!("{name}{{")).count(), 1, "{page}");
    member.scene.is_well();
}

#[tokio::test]
async fn a_volume_has_the_certificates_of_present_and_later_trust_bundles() {
    require!(root);
    let member = Member::start(FakeApi::start(), |options| options).await;
    let bundles = "/apis/certificates.k8s.io/v1beta1/clustertrustbundles";
    let block = |text: &str| format!("-----BEGIN CERTIFICATE-----\n{text}\n-----END CERTIFICATE-----\n");
    let of_signer = |text: &str| {
        json!({
            "metadata": {"labels": {"live": "yes"}},
            "spec": {"signerName": "example.com/ca", "trustBundle": block(text)},
        })
    };
    let named = json!({"clusterTrustBundle": {"name": "root", "path": "root.pem"}});
    let selected = json!({"clusterTrustBundle": {
        "signerName": "example.com/ca", "labelSelector": {"matchLabels": {"live": "yes"}}, "path": "ca.pem",
        "optional": true,
    }});
    let source = json!({"projected": {"sources": [named, selected]}});
    member.api.put(&path("web"), pod_with("web", &source));
    member.until_event("FailedMount", "\"root\" not found").await;
    let text = format!("# The root.\n{}{}", block("AQID"), block("AQID"));
    member.api.put(&format!("{bundles}/root"), json!({"spec": {"trustBundle": text}}));
    member.until_running("web").await;
    let volume = member.mounted("web");
    let file = |name: &str| std::fs::read_to_string(Path::new(&volume).join(name)).unwrap();
    assert_eq!((file("root.pem"), file("ca.pem")), (block("AQID"), String::new()));
    member.api.put(&format!("{bundles}/one"), of_signer("BAUG"));
    member.api.put(&format!("{bundles}/two"), of_signer("BwgJ"));
    let expected = block("BAUG") + &block("BwgJ");
    member.scene.poll_until("both certificates", || {
        let found = file("ca.pem");
        if found == expected { Ok(()) } else { Err(found) }
    });
    member.scene.is_well();
}

#[tokio::test]
async fn a_local_block_device_is_a_device_of_the_container() {
    require!(root);
    let member = Member::start(FakeApi::start(), |options| options).await;
    let disk = member.scene.dir.path().join("disk");
    // The device is never opened, so any device number works.
    let (mode, number) = (Mode::from_raw_mode(0o600), rustix::fs::makedev(7, 255));
    mknodat(CWD, &disk, FileType::BlockDevice, mode, number).unwrap();
    member.api.put(CLAIM, pending());
    let local = |path: &Path| json!({"local": {"path": path}, "volumeMode": "Block"});
    bind(&member.api, CLAIM, &local(member.scene.dir.path()));
    let mut block = claiming("web");
    block["spec"]["containers"][0]["volumeMounts"] = json!([]);
    block["spec"]["containers"][0]["volumeDevices"] = json!([{"name": "data", "devicePath": "/dev/data"}]);
    member.api.put(&path("web"), block);
    member.until_event("FailedMount", "is not a block device").await;
    bind(&member.api, CLAIM, &local(&disk));
    member.until_running("web").await;
    let container = member.scene.cri.container("web", "main").unwrap();
    let device = &container.config.devices[0];
    assert_eq!((device.container_path.as_str(), Path::new(&device.host_path)), ("/dev/data", disk.as_path()));
    assert_eq!(device.permissions, "mrw");
    member.api.delete(&path("web"));
    member.until_stopped("web");
    assert!(disk.exists());
    member.scene.is_well();
}

#[tokio::test]
async fn an_ephemeral_claim_must_be_the_pods_own() {
    require!(root);
    let member = Member::start(FakeApi::start(), |options| options).await;
    let shelf = member.scene.dir.path().join("shelf");
    std::fs::create_dir(&shelf).unwrap();
    let claim = "/api/v1/namespaces/default/persistentvolumeclaims/web-data";
    member.api.put(claim, pending());
    bind(&member.api, claim, &json!({"local": {"path": shelf}}));
    let source = json!({"ephemeral": {"volumeClaimTemplate": {"spec": {}}}});
    let made = member.api.put(&path("web"), pod_with("web", &source));
    member.until_event("FailedMount", "was not created for pod default/web (pod is not owner)").await;
    let uid = &made["metadata"]["uid"];
    let owner = json!({"apiVersion": "v1", "kind": "Pod", "name": "web", "uid": uid, "controller": true});
    member.api.patch(claim, &json!({"metadata": {"ownerReferences": [owner]}}));
    member.until_running("web").await;
    member.scene.is_well();
}

#[tokio::test]
async fn a_volume_of_another_node_is_not_mounted() {
    require!(root);
    let member = Member::start(FakeApi::start(), |options| options).await;
    let term = json!({"matchExpressions": [{"key": "zone", "operator": "In", "values": ["far"]}]});
    let affinity = json!({"required": {"nodeSelectorTerms": [term]}});
    member.api.put(CLAIM, pending());
    bind(&member.api, CLAIM, &json!({"local": {"path": "/tmp"}, "nodeAffinity": affinity}));
    member.api.put(&path("web"), claiming("web"));
    member.until_event("FailedMount", "no matching NodeSelectorTerms").await;
    assert!(!member.runs("web"));
    member.scene.is_well();
}
