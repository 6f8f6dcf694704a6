//! Tests of CSI drivers on a node: registration, staging, publishing and unpublishing of volumes, also across
//! restarts of the agent and faults of the driver.

use std::path::{Path, PathBuf};

use beelet_tests::agent::NODE;
use beelet_tests::apiserver::{FakeApi, Verb};
use beelet_tests::csi_driver::{CsiDriver, Settings};
use beelet_tests::require;
use serde_json::{Value, json};
use tonic::Code;

use super::scene::{Member, own_node};
use super::storage::{bind, claiming, measuring, pending, pod_with};
use super::workload::{path, pod};

mod migrated;

const DRIVER: &str = "shelf.example.com";
const CLAIM: &str = "/api/v1/namespaces/default/persistentvolumeclaims/data";
const OBJECT: &str = "/apis/storage.k8s.io/v1/csidrivers/shelf.example.com";
const CSI_NODES: &str = "/apis/storage.k8s.io/v1/csinodes";

impl Member {
    fn kubelet_dir(&self) -> PathBuf {
        self.scene.dir.path().join("agent/kubelet")
    }

    fn shelf(&self) -> PathBuf {
        self.scene.dir.path().join("shelf")
    }

    /// Starts a driver.
    fn driver(&self, change: impl FnOnce(&mut Settings)) -> CsiDriver {
        let mut settings = Settings::named(DRIVER);
        change(&mut settings);
        CsiDriver::start(&self.kubelet_dir(), &self.shelf(), settings).unwrap()
    }

    /// Waits until `wanted` accepts the CSINode.
    async fn until_csi_node(&self, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let path = format!("{CSI_NODES}/{NODE}");
        self.api.wait_until(what, |api| api.get(&path).filter(|node| wanted(node))).await
    }

    async fn until_registered(&self) -> Value {
        let has = |node: &Value| node["spec"]["drivers"][0]["name"] == DRIVER;
        self.until_csi_node("the CSINode to name the driver", has).await
    }

    /// Waits until the driver has received this number of calls.
    fn until_called(&self, driver: &CsiDriver, method: &str, times: usize) {
        self.scene.poll_until(&format!("{times} calls of {method}"), || {
            let count = driver.calls(method).len();
            if count >= times { Ok(()) } else { Err(format!("{count}: {:?}", driver.order())) }
        });
    }
}

/// Returns a PersistentVolume of the driver.
fn of_driver(more: &Value) -> Value {
    let mut source = json!({"driver": DRIVER, "volumeHandle": "disk-1", "fsType": "ext4"});
    source.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    json!({"csi": source, "accessModes": ["ReadWriteOnce"]})
}

fn not_attached(api: &FakeApi, more: &Value) {
    let mut spec = json!({"attachRequired": false});
    spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    api.put(OBJECT, json!({"metadata": {"name": DRIVER}, "spec": spec}));
}

#[tokio::test]
async fn a_driver_is_on_the_csi_node_and_the_node_until_it_ends() {
    require!(root);
    let member = Member::start(FakeApi::start(), |options| options).await;
    let empty = |node: &Value| node["spec"]["drivers"].as_array().is_some_and(Vec::is_empty);
    let made = member.until_csi_node("a CSINode without drivers", empty).await;
    let node = member.api.get(&own_node()).unwrap();
    assert_eq!(made["metadata"]["ownerReferences"][0]["uid"], node["metadata"]["uid"]);
    let driver = member.driver(|settings| {
        settings.topology = [("topology.shelf.example.com/rack".to_owned(), "r1".to_owned())].into();
        settings.max_volumes = 7;
    });
    let registered = member.until_registered().await;
    let entry = &registered["spec"]["drivers"][0];
    assert_eq!(entry["nodeID"], "id-of-shelf.example.com");
    assert_eq!(entry["topologyKeys"], json!(["topology.shelf.example.com/rack"]));
    assert_eq!(entry["allocatable"]["count"], 7);
    assert_eq!(driver.registration(), Some((true, String::new())));
    let node = member.api.get(&own_node()).unwrap();
    let annotations = &node["metadata"]["annotations"];
    assert_eq!(
        annotations["csi.volume.kubernetes.io/nodeid"],
        "{\"shelf.example.com\":\"id-of-shelf.example.com\"}"
    );
    assert_eq!(annotations["volumes.kubernetes.io/controller-managed-attach-detach"], "true");
    assert_eq!(node["metadata"]["labels"]["topology.shelf.example.com/rack"], "r1");
    drop(driver);
    member.until_csi_node("the CSINode to be without the driver", empty).await;
    member.scene.is_well();
}

#[tokio::test]
async fn a_volume_is_staged_once_published_per_pod_and_unstaged_with_the_last() {
    require!(root);
    let member = Member::start(FakeApi::start(), |options| options).await;
    let driver = member.driver(|_| {});
    member.until_registered().await;
    not_attached(&member.api, &json!({"podInfoOnMount": true}));
    member.api.put("/api/v1/namespaces/vault/secrets/key", json!({"data": {"k": "aHVzaA=="}}));
    member.api.put(CLAIM, pending());
    let reference =
        json!({"nodeStageSecretRef": {"name": "key", "namespace": "vault"}, "volumeAttributes": {"a": "b"}});
    bind(&member.api, CLAIM, &of_driver(&reference));
    let made = member.api.put(&path("one"), claiming("one"));
    member.api.put(&path("two"), claiming("two"));
    member.until_running("one").await;
    member.until_running("two").await;
    let staged = driver.calls("NodeStageVolume");
    assert_eq!(staged.len(), 1, "{staged:?}");
    assert_eq!(staged[0]["secrets"], json!({"k": "hush"}));
    let digest = "plugins/kubernetes.io/csi/shelf.example.com/";
    assert!(staged[0]["path"].as_str().unwrap().contains(digest), "{staged:?}");
    let published = driver.calls("NodePublishVolume");
    let uid = made["metadata"]["uid"].as_str().unwrap();
    let of_one = published.iter().find(|one| one["context"]["csi.storage.k8s.io/pod.name"] == "one").unwrap();
    assert!(
        of_one["path"].as_str().unwrap().ends_with(&format!("/{uid}/volumes/kubernetes.io~csi/pv-1/mount"))
    );
    assert_eq!(
        (&of_one["context"]["a"], &of_one["mode"], &of_one["staged"]),
        (&json!("b"), &json!(1), &staged[0]["path"])
    );
    assert_eq!(member.mounted("one"), of_one["path"].as_str().unwrap());
    // Both pods have the same volume.
    std::fs::write(Path::new(&member.mounted("one")).join("file"), "1").unwrap();
    assert!(Path::new(&member.mounted("two")).join("file").exists());
    member.api.delete(&path("one"));
    member.until_called(&driver, "NodeUnpublishVolume", 1);
    member.until_stopped("one");
    assert!(driver.calls("NodeUnstageVolume").is_empty());
    member.api.delete(&path("two"));
    member.until_called(&driver, "NodeUnstageVolume", 1);
    member.until_nothing_is_mounted();
    assert!(member.shelf().join("disk-1/file").exists());
    let left = member.kubelet_dir().join(digest);
    member.scene.poll_until("the removal of the records", || {
        let count = std::fs::read_dir(&left).map(Iterator::count).unwrap_or(0);
        if count == 0 { Ok(()) } else { Err(format!("{count} in {}", left.display())) }
    });
    member.scene.is_well();
}

#[tokio::test]
async fn a_volume_is_reported_in_use_and_then_mounted_once_it_is_attached() {
    require!(root);
    let member = Member::start(FakeApi::start(), |options| options).await;
    let driver = member.driver(|_| {});
    member.until_registered().await;
    member.api.put(CLAIM, pending());
    bind(&member.api, CLAIM, &of_driver(&json!({})));
    member.api.put(&path("web"), claiming("web"));
    let name = "kubernetes.io/csi/shelf.example.com^disk-1";
    let in_use =
        |api: &FakeApi| api.get(&own_node()).filter(|node| node["status"]["volumesInUse"] == json!([name]));
    member.api.wait_until("the volume to be in use", in_use).await;
    assert!(driver.calls("NodeStageVolume").is_empty());
    // The attacher derives the attachment's name from handle, driver and node.
    let digest = {
        use sha2::Digest as _;
        let hash = sha2::Sha256::digest(format!("disk-1{DRIVER}{NODE}"));
        hash.iter().map(|byte| format!("{byte:02x}")).collect::<String>()
    };
    let attachment = format!("/apis/storage.k8s.io/v1/volumeattachments/csi-{digest}");
    let spec = json!({"attacher": DRIVER, "nodeName": NODE, "source": {"persistentVolumeName": "pv-1"}});
    let status = json!({"attached": true, "attachmentMetadata": {"lun": "7"}});
    member.api.put(&attachment, json!({"spec": spec, "status": status}));
    let attached = json!({"status": {"volumesAttached": [{"name": name, "devicePath": ""}]}});
    member.api.patch(&format!("{}/status", own_node()), &attached);
    member.until_running("web").await;
    assert_eq!(driver.calls("NodeStageVolume")[0]["publishContext"], json!({"lun": "7"}));
    member.api.delete(&path("web"));
    member.until_called(&driver, "NodeUnstageVolume", 1);
    let free = |api: &FakeApi| {
        let node = api.get(&own_node())?;
        node["status"]["volumesInUse"].as_array().is_none_or(Vec::is_empty).then_some(())
    };
    member.api.wait_until("the volume to be no longer in use", free).await;
    member.scene.is_well();
}

#[tokio::test]
async fn an_inline_volume_needs_a_driver_that_supports_it_and_gets_its_secret_and_tokens() {
    require!(root);
    let member = Member::start(FakeApi::start(), |options| options).await;
    let driver = member.driver(|settings| settings.stages = false);
    member.until_registered().await;
    let source = json!({"csi": {
        "driver": DRIVER, "readOnly": true, "volumeAttributes": {"a": "b"}, "nodePublishSecretRef": {"name": "key"},
    }});
    member.api.put("/api/v1/namespaces/default/secrets/key", json!({"data": {"k": "aHVzaA=="}}));
    let mut own = pod_with("web", &source);
    own["spec"]["serviceAccountName"] = "robot".into();
    member.api.put(&path("web"), own);
    member.until_event("FailedMount", "not supported by driver").await;
    let tokens = json!([{"audience": "vault", "expirationSeconds": 600}]);
    let more =
        json!({"volumeLifecycleModes": ["Ephemeral"], "podInfoOnMount": true, "tokenRequests": tokens});
    member.api.put("/api/v1/namespaces/default/serviceaccounts/robot", json!({}));
    not_attached(&member.api, &more);
    member.until_running("web").await;
    let published = driver.calls("NodePublishVolume");
    let asked = published.last().unwrap();
    assert!(asked["volume"].as_str().unwrap().starts_with("csi-"), "{asked}");
    assert_eq!((&asked["readOnly"], &asked["secrets"]), (&json!(true), &json!({"k": "hush"})));
    let context = &asked["context"];
    assert_eq!((&context["a"], &context["csi.storage.k8s.io/ephemeral"]), (&json!("b"), &json!("true")));
    let tokens: Value =
        serde_json::from_str(context["csi.storage.k8s.io/serviceAccount.tokens"].as_str().unwrap()).unwrap();
    assert!(tokens["vault"]["token"].is_string(), "{tokens}");
    assert!(driver.calls("NodeStageVolume").is_empty());
    member.api.delete(&path("web"));
    member.until_called(&driver, "NodeUnpublishVolume", 1);
    member.until_nothing_is_mounted();
    member.scene.is_well();
}

#[tokio::test]
async fn a_pod_waits_for_its_driver_and_its_faults_and_other_pods_do_not() {
    require!(root);
    let member = Member::start(FakeApi::start(), |options| options).await;
    not_attached(&member.api, &json!({}));
    member.api.put(CLAIM, pending());
    bind(&member.api, CLAIM, &of_driver(&json!({})));
    member.api.put(&path("web"), claiming("web"));
    member.until_event("FailedMount", "not found in the list of registered CSI drivers").await;
    let driver = member.driver(|_| {});
    driver.refuse("NodeStageVolume", Code::Internal, "the shelf is locked");
    driver.refuse("NodePublishVolume", Code::Unavailable, "come back later");
    member.until_event("FailedMount", "rpc error: code = Internal desc = the shelf is locked").await;
    member.api.put(&path("other"), pod("other"));
    member.until_running("other").await;
    member.until_running("web").await;
    // A failing driver unpublishes nothing, and delays only its own pod.
    driver.refuse("NodeUnpublishVolume", Code::Internal, "the shelf is in use");
    member.api.delete(&path("web"));
    member.until_called(&driver, "NodeUnstageVolume", 1);
    assert_eq!(driver.calls("NodeUnpublishVolume").len(), 2);
    member.until_nothing_is_mounted();
    member.scene.is_well();
}

#[tokio::test]
async fn volumes_of_a_killed_agent_are_unpublished_and_unstaged() {
    require!(root);
    let mut member = Member::start(FakeApi::start(), |options| options).await;
    let driver = member.driver(|_| {});
    member.until_registered().await;
    not_attached(&member.api, &json!({}));
    member.api.put(CLAIM, pending());
    bind(&member.api, CLAIM, &of_driver(&json!({})));
    // The agent is killed during the publishing, so its outcome is unknown.
    driver.hang("NodePublishVolume");
    member.api.put(&path("web"), claiming("web"));
    member.until_called(&driver, "NodePublishVolume", 1);
    member.scene.agent.kill9();
    member.scene.agent.resume().unwrap();
    member.until_running("web").await;
    // The agent is killed while the pod runs, and the pod is deleted before the restart.
    let before = member.mounted("web");
    assert!(Path::new(&before).exists());
    member.scene.agent.kill9();
    member.api.delete(&path("web"));
    member.scene.agent.resume().unwrap();
    member.until_called(&driver, "NodeUnstageVolume", 1);
    member.until_nothing_is_mounted();
    assert_eq!(member.api.count(Verb::Delete, &format!("{CSI_NODES}/*")), 0);
    member.scene.is_well();
}

#[tokio::test]
async fn the_drivers_stats_and_condition_of_a_claims_volume_are_reported() {
    require!(root);
    let (member, pages) = measuring(FakeApi::start()).await;
    let driver = member.driver(|settings| settings.measures = true);
    member.until_registered().await;
    not_attached(&member.api, &json!({}));
    member.api.put(CLAIM, pending());
    bind(&member.api, CLAIM, &of_driver(&json!({})));
    for name in ["one", "two"] {
        member.api.put(&path(name), claiming(name));
        member.until_running(name).await;
    }
    let sample = |name: &str, value: u64| {
        format!(
            "kubelet_volume_stats_{name}{{namespace=\"default\",persistentvolumeclaim=\"data\"}} {value}\n"
        )
    };
    let all = [
        ("capacity_bytes", 1000),
        ("available_bytes", 600),
        ("used_bytes", 400),
        ("inodes", 50),
        ("inodes_free", 30),
        ("inodes_used", 20),
        ("health_status_abnormal", 0),
    ];
    for (name, value) in all {
        let page = pages.until(&member, "/metrics", &sample(name, value));
        assert_eq!(page.matches(&format!("kubelet_volume_stats_{name}{{")).count(), 1, "{page}");
    }
    let published = driver.calls("NodePublishVolume");
    let asked = &driver.calls("NodeGetVolumeStats")[0];
    assert!(published.iter().any(|one| one["path"] == asked["path"]), "{asked}");
    let summary = pages.until(&member, "/stats/summary", "pvcRef");
    let summary: Value = serde_json::from_str(&summary).unwrap();
    let volumes = summary["pods"].as_array().unwrap().iter().flat_map(|pod| pod["volume"].as_array());
    let volume = volumes.flatten().find(|volume| volume["name"] == "data").unwrap();
    assert_eq!(volume["pvcRef"], json!({"name": "data", "namespace": "default"}));
    assert_eq!((&volume["usedBytes"], &volume["inodesFree"]), (&json!(400), &json!(30)));
    driver.trouble("the shelf burns");
    member.until_event("VolumeConditionAbnormal", "Volume data: the shelf burns").await;
    pages.until(&member, "/metrics", &sample("health_status_abnormal", 1));
    // A driver that hangs delays only its own stats.
    driver.hang("NodeGetVolumeStats");
    member.api.put(&path("other"), pod("other"));
    member.until_running("other").await;
    member.scene.is_well();
}

#[tokio::test]
async fn a_running_pods_volume_is_republished_with_new_tokens_if_the_driver_requires_it() {
    require!(root);
    let mut member = Member::start(FakeApi::start(), |options| options).await;
    let driver = member.driver(|_| {});
    member.until_registered().await;
    let tokens = json!([{"audience": "vault", "expirationSeconds": 600}]);
    not_attached(&member.api, &json!({"requiresRepublish": true, "tokenRequests": tokens}));
    member.api.put("/api/v1/namespaces/default/serviceaccounts/robot", json!({}));
    member.api.put(CLAIM, pending());
    bind(&member.api, CLAIM, &of_driver(&json!({})));
    let mut web = claiming("web");
    web["spec"]["serviceAccountName"] = "robot".into();
    member.api.put(&path("web"), web);
    member.until_running("web").await;
    // A single failure of the driver does not affect the pod.
    driver.refuse("NodePublishVolume", Code::Internal, "the shelf is locked");
    member.until_called(&driver, "NodePublishVolume", 2);
    let published = driver.calls("NodePublishVolume");
    assert_eq!(published[0]["path"], published[1]["path"]);
    for asked in &published {
        let tokens = asked["context"]["csi.storage.k8s.io/serviceAccount.tokens"].as_str().unwrap();
        assert!(tokens.contains("vault"), "{tokens}");
    }
    assert_eq!(driver.calls("NodeStageVolume").len(), 1);
    assert!(member.runs("web") && Path::new(&member.mounted("web")).exists());
    // A new agent publishes at once, without waiting for its period: the volume's token may have expired.
    member.scene.agent.kill9();
    let before = driver.calls("NodePublishVolume").len();
    member.scene.agent.resume().unwrap();
    member.until_called(&driver, "NodePublishVolume", before + 1);
    member.scene.is_well();
}

/// Returns the status of a claim of 1 GiB whose volume now has 2 GiB, and whose file system the node must
/// grow.
fn to_grow() -> Value {
    json!({"status": {
        "capacity": {"storage": "1Gi"}, "allocatedResources": {"storage": "2Gi"},
        "allocatedResourceStatuses": {"storage": "NodeResizePending"},
        "conditions": [{"type": "FileSystemResizePending", "status": "True"}],
    }})
}

/// Changes the claim's status.
fn set_status(api: &FakeApi, status: &Value) {
    api.patch(&format!("{CLAIM}/status"), status);
}

/// Waits until `wanted` accepts the claim.
async fn until_claim(member: &Member, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
    member.api.wait_until(what, |api| api.get(CLAIM).filter(|claim| wanted(&claim["status"]))).await
}

#[tokio::test]
async fn a_volume_grows_before_its_pod_starts_and_while_it_runs() {
    require!(root);
    let mut member = Member::start(FakeApi::start(), |options| options).await;
    let driver = member.driver(|settings| settings.expands = true);
    member.until_registered().await;
    not_attached(&member.api, &json!({}));
    member.api.put(CLAIM, pending());
    let mut volume = of_driver(&json!({"nodeExpandSecretRef": {"name": "key", "namespace": "vault"}}));
    volume["capacity"] = json!({"storage": "2Gi"});
    member.api.put("/api/v1/namespaces/vault/secrets/key", json!({"data": {"k": "aHVzaA=="}}));
    bind(&member.api, CLAIM, &volume);
    set_status(&member.api, &to_grow());
    // The pod waits until its volume is as large as its claim.
    driver.refuse("NodeExpandVolume", Code::Internal, "the shelf is being painted");
    member.api.put(&path("web"), claiming("web"));
    member.until_event("FailedMount", "the shelf is being painted").await;
    member.until_running("web").await;
    let asked = &driver.calls("NodeExpandVolume")[1];
    assert_eq!((&asked["bytes"], &asked["secrets"]), (&json!(2_i64 << 30), &json!({"k": "hush"})));
    assert_eq!(asked["staged"], driver.calls("NodeStageVolume")[0]["path"]);
    assert_eq!(asked["path"], driver.calls("NodePublishVolume")[0]["path"]);
    let has = |size: &'static str| move |status: &Value| status["capacity"]["storage"] == size;
    let grown = until_claim(&member, "the claim to have grown", has("2Gi")).await;
    let status = &grown["status"];
    assert_eq!(status["allocatedResourceStatuses"]["storage"], Value::Null, "{status}");
    assert_eq!(status["conditions"], json!([]), "{status}");
    member.until_event("FileSystemResizeSuccessful", "NodeExpandVolume succeeded for volume \"pv-1\"").await;
    // The volume grows again, while the pod runs. A new agent checks the claim at once.
    member.scene.agent.kill9();
    volume["capacity"] = json!({"storage": "3Gi"});
    bind(&member.api, CLAIM, &volume);
    let mut more = to_grow();
    more["status"]["capacity"] = json!({"storage": "2Gi"});
    more["status"]["allocatedResources"] = json!({"storage": "3Gi"});
    set_status(&member.api, &more);
    member.scene.agent.resume().unwrap();
    until_claim(&member, "the claim to have grown again", has("3Gi")).await;
    assert_eq!(driver.calls("NodeExpandVolume").len(), 3);
    // An infeasible expansion is recorded, and not requested again.
    member.scene.agent.kill9();
    volume["capacity"] = json!({"storage": "4Gi"});
    bind(&member.api, CLAIM, &volume);
    more["status"]["capacity"] = json!({"storage": "3Gi"});
    more["status"]["allocatedResources"] = json!({"storage": "4Gi"});
    set_status(&member.api, &more);
    driver.refuse("NodeExpandVolume", Code::OutOfRange, "the shelf ends here");
    member.scene.agent.resume().unwrap();
    let infeasible =
        |status: &Value| status["allocatedResourceStatuses"]["storage"] == "NodeResizeInfeasible";
    let claim = until_claim(&member, "the claim to be infeasible", infeasible).await;
    let all = claim["status"]["conditions"].as_array().unwrap();
    let failed = all.iter().find(|condition| condition["type"] == "NodeResizeError").unwrap();
    let message = failed["message"].as_str().unwrap();
    assert!(message.ends_with("code = OutOfRange desc = the shelf ends here"), "{message}");
    member.until_event("VolumeResizeFailed", "the shelf ends here").await;
    assert!(member.runs("web"));
    member.scene.is_well();
}

#[tokio::test]
async fn a_block_volume_is_a_device_of_the_container() {
    require!(root);
    let member = Member::start(FakeApi::start(), |options| options).await;
    let driver = member.driver(|_| {});
    member.until_registered().await;
    not_attached(&member.api, &json!({}));
    member.api.put(CLAIM, pending());
    let mut volume = of_driver(&json!({}));
    volume["volumeMode"] = "Block".into();
    bind(&member.api, CLAIM, &volume);
    let mut block = claiming("web");
    block["spec"]["containers"][0]["volumeMounts"] = json!([]);
    block["spec"]["containers"][0]["volumeDevices"] = json!([{"name": "data", "devicePath": "/dev/data"}]);
    let made = member.api.put(&path("web"), block);
    member.until_running("web").await;
    let uid = made["metadata"]["uid"].as_str().unwrap();
    let plugin = member.kubelet_dir().join("plugins/kubernetes.io/csi/volumeDevices");
    let container = member.scene.cri.container("web", "main").unwrap();
    let device = &container.config.devices[0];
    let expected = plugin.join("publish/pv-1").join(uid).display().to_string();
    assert_eq!((device.container_path.as_str(), &device.host_path), ("/dev/data", &expected));
    assert_eq!(device.permissions, "mrw");
    let staged = driver.calls("NodeStageVolume")[0]["path"].clone();
    assert_eq!(staged, plugin.join("staging/pv-1").display().to_string());
    member.api.delete(&path("web"));
    member.until_called(&driver, "NodeUnstageVolume", 1);
    member.scene.poll_until("the removal of the volume", || {
        if Path::new(&expected).exists() { Err(expected.clone()) } else { Ok(()) }
    });
    // A block volume is refused as a mounted one.
    member.api.put(&path("other"), claiming("other"));
    member
        .until_event("FailedMount", "volume data has volumeMode Block, but is specified in volumeMounts")
        .await;
    member.scene.is_well();
}
