//! Tests of Dynamic Resource Allocation on a node: the agent prepares claims before a pod's sandbox, passes
//! their devices to its containers, and unprepares the claims before it reports the pod's end; also across
//! restarts of the agent and faults of the driver.

use std::path::PathBuf;

use beelet_proto::dra::health::HealthStatus;
use beelet_proto::podresources::{
    GetPodResourcesRequest, PodResources, pod_resources_lister_client::PodResourcesListerClient,
};
use beelet_tests::agent::NODE;
use beelet_tests::apiserver::FakeApi;
use beelet_tests::cri::Op;
use beelet_tests::dra_driver::{DraDriver, Fault, Settings};
use beelet_tests::require;
use serde_json::{Value, json};

use super::scene::{Member, status_of};
use super::storage::measuring;
use super::workload::{path, pod};

const DRIVER: &str = "gpu.example.com";
const CLAIMS: &str = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims";
const SLICES: &str = "/apis/resource.k8s.io/v1/resourceslices";
const PREPARE: &str = "v1.NodePrepareResources";
const UNPREPARE: &str = "v1.NodeUnprepareResources";

impl Member {
    fn registry(&self) -> PathBuf {
        self.scene.dir.path().join("agent/kubelet")
    }

    fn dra_driver(&self, change: impl FnOnce(&mut Settings)) -> DraDriver {
        let mut settings = Settings::named(DRIVER);
        change(&mut settings);
        let driver = DraDriver::start(&self.registry(), settings).unwrap();
        self.until_driver_registered(&driver);
        driver
    }

    fn until_driver_registered(&self, driver: &DraDriver) {
        self.scene.poll_until("the driver's registration", || match driver.registration() {
            Some((true, _)) => Ok(()),
            other => Err(format!("{other:?}")),
        });
    }

    fn until_asked(&self, driver: &DraDriver, method: &str, times: usize) {
        self.scene.poll_until(&format!("{times} calls of {method}"), || {
            let calls = driver.calls(method);
            if calls.len() >= times { Ok(()) } else { Err(format!("{calls:?}")) }
        });
    }

    /// Returns the CDI devices in the runtime's container.
    fn cdi(&self, pod: &str, container: &str) -> Vec<String> {
        let container = self.scene.cri.container(pod, container).unwrap();
        container.config.cdi_devices.into_iter().map(|device| device.name).collect()
    }

    /// Returns the record, as a kubelet would read it.
    fn record(&self) -> String {
        std::fs::read_to_string(self.registry().join("dra_manager_state")).unwrap_or_default()
    }

    fn until_no_claim_is_recorded(&self) {
        self.scene.poll_until("a record without claims", || {
            let record = self.record();
            if record.contains("ClaimUID") { Err(record) } else { Ok(()) }
        });
    }

    /// Creates a claim that is allocated, and reserved for these pods.
    fn claim(&self, name: &str, pods: &[&Value]) -> Value {
        let reserved = pods.iter().map(|pod| {
            let metadata = &pod["metadata"];
            json!({"resource": "pods", "name": metadata["name"], "uid": metadata["uid"]})
        });
        let result = json!({"driver": DRIVER, "pool": "pool", "device": "d", "request": "r"});
        let status = json!({
            "allocation": {"devices": {"results": [result]}},
            "reservedFor": reserved.collect::<Vec<_>>(),
        });
        self.api.put(&format!("{CLAIMS}/{name}"), json!({"spec": {}, "status": status}))
    }

    /// Creates a pod, and then the claim for which it waits.
    fn pod_with_claim(&self, name: &str, claim: &str) {
        let made = self.api.put(&path(name), using(name, claim));
        self.claim(claim, &[&made]);
    }

    async fn until_phase(&self, name: &str, phase: &str) {
        let found = |api: &FakeApi| api.get(&path(name)).filter(|pod| pod["status"]["phase"] == phase);
        self.api.wait_until(&format!("{name} to be {phase}"), found).await;
    }

    /// Waits until the pod's status in the API server has this health of the claim's device, with this
    /// message.
    async fn until_health(&self, name: &str, claim: &str, health: &str, message: Option<&str>) {
        let mut device = json!({"resourceID": format!("example.com/gpu={claim}"), "health": health});
        if let Some(message) = message {
            device["message"] = message.into();
        }
        let wanted = json!([{"name": "claim:gpu", "resources": [device]}]);
        let found = |api: &FakeApi| {
            let pod = api.get(&path(name))?;
            (pod["status"]["containerStatuses"][0]["allocatedResourcesStatus"] == wanted).then_some(())
        };
        self.api.wait_until(&format!("the device of {name} to be {health}"), found).await;
    }

    /// Returns the names of the slices.
    fn slices(&self) -> Vec<String> {
        let all = self.api.all(SLICES);
        all.iter().map(|slice| slice["metadata"]["name"].as_str().unwrap_or_default().to_owned()).collect()
    }
}

/// Returns a pod whose container uses a claim.
fn using(name: &str, claim: &str) -> Value {
    let mut pod = pod(name);
    pod["spec"]["resourceClaims"] = json!([{"name": "gpu", "resourceClaimName": claim}]);
    pod["spec"]["containers"][0]["resources"] = json!({"claims": [{"name": "gpu"}]});
    pod
}

fn slice(api: &FakeApi, name: &str, node: &str, driver: &str) {
    api.put(&format!("{SLICES}/{name}"), json!({"spec": {"nodeName": node, "driver": driver}}));
}

#[tokio::test]
async fn a_claim_is_prepared_once_reaches_its_containers_and_ends_with_its_last_pod() {
    require!(root);
    let (member, pages) = measuring(FakeApi::start()).await;
    let driver = member.dra_driver(|_| {});
    let one = member.api.put(&path("one"), using("one", "shared"));
    let mut second = using("two", "shared");
    let beside = json!({"name": "beside", "image": second["spec"]["containers"][0]["image"]});
    second["spec"]["containers"].as_array_mut().unwrap().push(beside);
    let two = member.api.put(&path("two"), second);
    member.until_event("FailedPrepareDynamicResources", "fetch ResourceClaim shared").await;
    member.claim("shared", &[&one, &two]);
    member.until_running("one").await;
    member.until_running("two").await;
    assert_eq!(driver.calls(PREPARE), [["shared"]]);
    for name in ["one", "two"] {
        assert_eq!(member.cdi(name, "main"), ["example.com/gpu=shared"]);
    }
    assert!(member.cdi("two", "beside").is_empty());
    assert!(member.record().contains("example.com/gpu=shared"), "{}", member.record());
    pages.until(&member, "/metrics", "dra_resource_claims_in_use{driver_name=\"<any>\"} 1");
    let resources = pod_resources(&member, "one").await;
    let claim = &resources.containers[0].dynamic_resources[0];
    assert_eq!((&*claim.claim_namespace, &*claim.claim_name), ("default", "shared"));
    let device = &claim.claim_resources[0];
    assert_eq!((&*device.driver_name, &*device.pool_name), (DRIVER, "pool"));
    assert_eq!(
        (&*device.device_name, &*device.cdi_devices[0].name),
        ("device-of-shared", "example.com/gpu=shared")
    );
    member.api.delete(&path("one"));
    member.until_deleted("one").await;
    assert!(driver.calls(UNPREPARE).is_empty());
    member.api.delete(&path("two"));
    member.until_deleted("two").await;
    assert_eq!(driver.calls(UNPREPARE), [["shared"]]);
    member.until_no_claim_is_recorded();
    let page = pages.until(&member, "/metrics", "dra_resource_claims_in_use{driver_name=\"<any>\"} 0");
    let called = "dra_grpc_operations_duration_seconds_count{driver_name=\"gpu.example.com\",\
                  method_name=\"/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources\",grpc_status_code=\"OK\"} 1";
    assert!(page.contains(called), "{page}");
    member.scene.is_well();
}

/// Queries the kubelet's pod resources API for a pod.
async fn pod_resources(member: &Member, pod: &str) -> PodResources {
    let socket = member.registry().join("pod-resources/kubelet.sock");
    let channel = beelet_tests::containerd::connect(&socket).await.unwrap();
    let name = GetPodResourcesRequest { pod_name: pod.to_owned(), pod_namespace: "default".to_owned() };
    PodResourcesListerClient::new(channel).get(name).await.unwrap().into_inner().pod_resources.unwrap()
}

impl Member {
    async fn until_deleted(&self, name: &str) {
        let gone = |api: &FakeApi| api.get(&path(name)).is_none().then_some(());
        self.api.wait_until(&format!("the deletion of {name}"), gone).await;
    }
}

#[tokio::test]
async fn a_claim_of_a_template_is_named_by_the_pods_status_and_must_be_its_own() {
    require!(root);
    let member = Member::start(FakeApi::start(), |options| options).await;
    let driver = member.dra_driver(|settings| settings.services.remove(0).clear());
    let mut wanted = using("web", "unused");
    wanted["spec"]["resourceClaims"] = json!([
        {"name": "gpu", "resourceClaimTemplateName": "gpus"},
        {"name": "none", "resourceClaimTemplateName": "nothing"},
    ]);
    let made = member.api.put(&path("web"), wanted);
    member.until_event("FailedPrepareDynamicResources", "ResourceClaim not created yet").await;
    let statuses = json!([{"name": "gpu", "resourceClaimName": "web-gpu-x"}, {"name": "none"}]);
    member
        .api
        .patch(&format!("{}/status", path("web")), &json!({"status": {"resourceClaimStatuses": statuses}}));
    member.claim("web-gpu-x", &[]);
    member.until_event("FailedPrepareDynamicResources", "(pod is not owner)").await;
    let owner = json!({
        "apiVersion": "v1", "kind": "Pod", "name": "web", "uid": made["metadata"]["uid"], "controller": true,
    });
    let claim = format!("{CLAIMS}/web-gpu-x");
    member.api.patch(&claim, &json!({"metadata": {"ownerReferences": [owner]}}));
    member.until_event("FailedPrepareDynamicResources", "is not allowed to use ResourceClaim").await;
    let user = json!({"resource": "pods", "name": "web", "uid": made["metadata"]["uid"]});
    member.api.patch(&format!("{claim}/status"), &json!({"status": {"reservedFor": [user]}}));
    member.until_running("web").await;
    // The agent uses the driver's only service that it supports.
    assert_eq!(driver.calls("v1beta1.NodePrepareResources"), [["web-gpu-x"]]);
    assert_eq!(member.cdi("web", "main"), ["example.com/gpu=web-gpu-x"]);
    let kept = member.api.get(&path("web")).unwrap();
    assert_eq!(kept["status"]["resourceClaimStatuses"], statuses);
    member.scene.is_well();
}

#[tokio::test]
async fn an_extended_resource_of_a_claim_waits_for_no_device_plugin() {
    require!(root);
    let member = Member::start(FakeApi::start(), |options| options).await;
    let driver = member.dra_driver(|_| {});
    let mut wanted = pod("web");
    let amount = json!({"example.com/gpu": "1"});
    wanted["spec"]["containers"][0]["resources"] = json!({"limits": amount, "requests": amount});
    let mapping = json!({"containerName": "main", "resourceName": "example.com/gpu", "requestName": "r-0"});
    wanted["status"]["extendedResourceClaimStatus"] =
        json!({"resourceClaimName": "made", "requestMappings": [mapping]});
    let made = member.api.put(&path("web"), wanted);
    member.claim("made", &[&made]);
    member.until_running("web").await;
    assert_eq!(driver.calls(PREPARE), [["made"]]);
    assert_eq!(member.cdi("web", "main"), ["example.com/gpu=made"]);
    member.scene.is_well();
}

#[tokio::test]
async fn a_pod_waits_for_its_driver_and_its_faults_and_other_pods_do_not() {
    require!(root);
    let member = Member::start(FakeApi::start(), |options| options).await;
    member.pod_with_claim("web", "big");
    member.until_event("FailedPrepareDynamicResources", "DRA driver gpu.example.com is not registered").await;
    // The claim was not recorded, so the pod can be deleted without the driver.
    assert!(!member.record().contains("ClaimUID"), "{}", member.record());
    let driver = member.dra_driver(|_| {});
    driver.spoil(PREPARE, Fault::Refuse("the shelf is locked".to_owned()));
    driver.spoil(PREPARE, Fault::Fail("no such device".to_owned()));
    driver.spoil(PREPARE, Fault::Skip);
    driver.spoil(PREPARE, Fault::Stranger);
    driver.spoil(PREPARE, Fault::Device("example.com/gpu=\n".to_owned()));
    for words in [
        "NodePrepareResources: rpc error: code = Internal desc = the shelf is locked",
        "NodePrepareResources failed for ResourceClaim big: no such device",
        "NodePrepareResources skipped 1 ResourceClaims",
        "NodePrepareResources returned result for unknown claim UID stranger",
        "is not a name",
    ] {
        member.until_event("FailedPrepareDynamicResources", words).await;
        if words.contains("locked") {
            member.api.put(&path("other"), pod("other"));
            member.until_running("other").await;
            assert_eq!(member.scene.cri.sandbox("web").map(|sandbox| sandbox.id), None);
        }
    }
    member.until_running("web").await;
    member.scene.is_well();
}

#[tokio::test]
async fn a_driver_registers_before_its_service_listens() {
    require!(root);
    let member = Member::start(FakeApi::start(), |options| options).await;
    let driver = member.dra_driver(|settings| settings.hidden = true);
    member.pod_with_claim("web", "big");
    member.until_event("FailedPrepareDynamicResources", "NodePrepareResources: rpc error").await;
    driver.show().unwrap();
    member.until_running("web").await;
    assert_eq!(driver.calls(PREPARE), [["big"]]);
    member.scene.is_well();
}

#[tokio::test]
async fn a_pod_has_not_ended_before_its_claims_are_unprepared() {
    require!(root);
    let member = Member::start(FakeApi::start(), |options| options).await;
    let driver = member.dra_driver(|_| {});
    let mut wanted = using("job", "big");
    wanted["spec"]["restartPolicy"] = "Never".into();
    let made = member.api.put(&path("job"), wanted);
    member.claim("big", &[&made]);
    member.until_running("job").await;
    driver.spoil(UNPREPARE, Fault::Fail("it is busy".to_owned()));
    let container = member.scene.cri.container("job", "main").unwrap().id;
    member.scene.cri.exit(&container, 0);
    member.until_event("FailedUnprepareDynamicResources", "failed for ResourceClaim big: it is busy").await;
    let phase = member.api.get(&path("job")).unwrap()["status"]["phase"].clone();
    if driver.calls(UNPREPARE).len() < 2 {
        assert_eq!(phase, "Running");
    }
    member.until_phase("job", "Succeeded").await;
    assert_eq!(driver.calls(UNPREPARE), [["big"], ["big"]]);
    assert!(member.scene.cri.count(Op::StopPodSandbox) > 0);
    member.until_no_claim_is_recorded();
    // A failing driver delays only the pod's end.
    member.pod_with_claim("web", "small");
    member.until_running("web").await;
    driver.spoil(UNPREPARE, Fault::Refuse("not now".to_owned()));
    member.api.delete(&path("web"));
    member.until_deleted("web").await;
    assert_eq!(driver.calls(UNPREPARE).len(), 4);
    member.scene.is_well();
}

#[tokio::test]
async fn claims_outlive_the_agent_and_those_of_deleted_pods_are_unprepared() {
    require!(root);
    let mut member = Member::start(FakeApi::start(), |options| options).await;
    let driver = member.dra_driver(|_| {});
    // The agent is killed during the preparation, so its outcome is unknown.
    driver.spoil(PREPARE, Fault::Hang);
    member.pod_with_claim("web", "big");
    member.until_asked(&driver, PREPARE, 1);
    assert!(member.record().contains("\\\"ClaimName\\\":\\\"big\\\""), "{}", member.record());
    member.scene.agent.kill9();
    member.scene.agent.resume().unwrap();
    member.until_running("web").await;
    let asked = driver.calls(PREPARE).len();
    // A container that starts again after a restart of the agent has its devices without the driver.
    member.scene.agent.kill9();
    member.scene.agent.resume().unwrap();
    let container = member.scene.cri.container("web", "main").unwrap().id;
    member.scene.cri.exit(&container, 1);
    member.scene.poll_until("another container", || match member.scene.cri.container("web", "main") {
        Some(now) if now.id != container => Ok(()),
        _ => Err("not yet".to_owned()),
    });
    assert_eq!(member.cdi("web", "main"), ["example.com/gpu=big"]);
    assert_eq!(driver.calls(PREPARE).len(), asked);
    // The pod is deleted while the agent is away.
    member.scene.agent.kill9();
    member.api.remove(&path("web"));
    member.scene.agent.resume().unwrap();
    member.until_asked(&driver, UNPREPARE, 1);
    member.until_no_claim_is_recorded();
    member.scene.is_well();
}

#[tokio::test]
async fn a_damaged_record_is_set_aside_and_rewritten() {
    require!(root);
    let mut member = Member::start(FakeApi::start(), |options| options).await;
    let driver = member.dra_driver(|_| {});
    member.pod_with_claim("web", "big");
    member.until_running("web").await;
    member.scene.agent.kill9();
    let file = member.registry().join("dra_manager_state");
    std::fs::write(&file, &member.record()[1..]).unwrap();
    member.scene.agent.resume().unwrap();
    member.until_event("ResourceClaimRecordCorrupt", "moved it to").await;
    member.until_driver_registered(&driver);
    let container = member.scene.cri.container("web", "main").unwrap().id;
    member.scene.cri.exit(&container, 1);
    member.scene.poll_until("the claim to be prepared again", || {
        let ready = member.record().contains("example.com/gpu=big");
        if ready { Ok(()) } else { Err(member.record()) }
    });
    member.until_running("web").await;
    member.scene.is_well();
}

#[tokio::test]
async fn of_two_plugins_of_a_driver_the_newer_is_used_and_either_may_end() {
    require!(root);
    let member = Member::start(FakeApi::start(), |options| options).await;
    let older = member.dra_driver(|_| {});
    let mut newer = member.dra_driver(|settings| settings.instance = "b".to_owned());
    member.pod_with_claim("one", "first");
    member.until_running("one").await;
    assert_eq!((older.calls(PREPARE).len(), newer.calls(PREPARE).len()), (0, 1));
    // The killed plugin's sockets stay; the agent uses the older plugin, which is connected.
    newer.kill();
    member.pod_with_claim("two", "second");
    member.until_running("two").await;
    assert_eq!(older.calls(PREPARE), [["second"]]);
    drop(newer);
    drop(older);
    member.pod_with_claim("three", "third");
    member.until_event("FailedPrepareDynamicResources", "is not registered").await;
    member.scene.is_well();
}

#[tokio::test]
async fn the_pods_status_has_the_health_of_claimed_devices_from_the_driver() {
    require!(root);
    let member = Member::start(FakeApi::start(), |options| options).await;
    let mut driver = member.dra_driver(|_| {});
    member.pod_with_claim("one", "first");
    member.until_running("one").await;
    member.until_health("one", "first", "Unknown", None).await;
    driver.say("first", HealthStatus::Healthy, "");
    member.until_health("one", "first", "Healthy", None).await;
    driver.say("first", HealthStatus::Unhealthy, "the fan stands still");
    member.until_health("one", "first", "Unhealthy", Some("the fan stands still")).await;
    // The newer plugin's report wins until that plugin ends.
    let newer = member.dra_driver(|settings| settings.instance = "b".to_owned());
    newer.say("first", HealthStatus::Healthy, "");
    member.until_health("one", "first", "Healthy", None).await;
    drop(newer);
    member.until_health("one", "first", "Unhealthy", Some("the fan stands still")).await;
    driver.kill();
    member.until_health("one", "first", "Unknown", None).await;
    member.scene.is_well();
}

#[tokio::test]
async fn a_plugin_without_a_known_service_gets_the_reason_of_its_rejection() {
    require!(root);
    let member = Member::start(FakeApi::start(), |options| options).await;
    let settings = Settings { services: vec!["v1alpha3.Node".to_owned()], ..Settings::named(DRIVER) };
    let driver = DraDriver::start(&member.registry(), settings).unwrap();
    let answer = member.scene.poll_until("an answer", || driver.registration().ok_or("not yet".to_owned()));
    assert!(!answer.0 && answer.1.contains("none of services supported by the plugin"), "{answer:?}");
    member.scene.is_well();
}

#[tokio::test]
async fn the_slices_of_drivers_that_are_away_are_removed() {
    require!(root);
    let api = FakeApi::start();
    slice(&api, "old", NODE, "old.example.com");
    slice(&api, "elsewhere", "other", "old.example.com");
    let member = Member::start(api, |options| options).await;
    let first = |api: &FakeApi| (api.all(SLICES).len() == 1).then_some(());
    member.api.wait_until("the removal of slices of drivers that never registered", first).await;
    assert_eq!(member.slices(), ["elsewhere"]);
    let driver = member.dra_driver(|_| {});
    slice(&member.api, "new", NODE, DRIVER);
    slice(&member.api, "others", NODE, "other.example.com");
    drop(driver);
    let gone = |api: &FakeApi| api.get(&format!("{SLICES}/new")).is_none().then_some(());
    member.api.wait_until("the removal of the ended driver's slices", gone).await;
    assert_eq!(member.slices(), ["elsewhere", "others"]);
    assert_eq!(
        status_of(&member.api.get(&super::scene::own_node()).unwrap(), "Ready").as_deref(),
        Some("True")
    );
    member.scene.is_well();
}
