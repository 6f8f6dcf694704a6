use serde_json::{Value, json};

use super::{checkpoint::CheckpointError, *};

fn pod(spec: Value, status: Value) -> Pod {
    let metadata = json!({"name": "web", "namespace": "shop", "uid": "u-1"});
    serde_json::from_value(json!({"metadata": metadata, "spec": spec, "status": status})).unwrap()
}

/// Returns a pod with a named claim and one from a template, and containers that use them.
fn usual() -> Pod {
    pod(
        json!({
            "resourceClaims": [
                {"name": "gpu", "resourceClaimName": "big"},
                {"name": "net", "resourceClaimTemplateName": "nets"},
            ],
            "initContainers": [{"name": "i", "resources": {"claims": [{"name": "net"}]}}],
            "containers": [
                {"name": "a", "resources": {"claims": [{"name": "gpu", "request": "one"}, {"name": "net"}]}},
                {"name": "b"},
            ],
        }),
        json!({"resourceClaimStatuses": [{"name": "net", "resourceClaimName": "web-net-x"}]}),
    )
}

fn key_of(name: &str) -> ClaimKey {
    ClaimKey { namespace: "shop".to_owned(), name: name.to_owned() }
}

fn device(name: &str, requests: &[&str], cdi: &[&str]) -> Device {
    let all = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    Device {
        pool: "n1".to_owned(),
        name: name.to_owned(),
        share: None,
        requests: all(requests),
        cdi: all(cdi),
    }
}

fn info(uid: &str, devices: Vec<Device>) -> ClaimInfo {
    ClaimInfo {
        uid: uid.to_owned(),
        drivers: [("gpu.example.com".to_owned(), devices)].into(),
        ..Default::default()
    }
}

#[test]
fn a_driver_is_called_by_the_first_service_that_both_know() {
    let check = |supported: &[&str], expected: Option<&str>| {
        let supported: Vec<String> = supported.iter().map(|one| (*one).to_owned()).collect();
        assert_eq!(service(&supported).ok(), expected, "{supported:?}");
    };
    check(&["v1.DRAPlugin"], Some("v1.DRAPlugin"));
    check(&["v1alpha1.DRAResourceHealth", "v1.DRAPlugin", "v1beta1.DRAPlugin"], Some("v1.DRAPlugin"));
    check(&["v1beta1.DRAPlugin", "v1.DRAPlugin"], Some("v1beta1.DRAPlugin"));
    check(&["1.0.0"], None);
    check(&[], None);
}

#[test]
fn a_drivers_name_is_a_domains() {
    let check = |name: &str, expected: bool| assert_eq!(is_driver_name(name), expected, "{name:?}");
    check("gpu.nvidia.com", true);
    check("a", true);
    check("", false);
    check("a..b", false);
    check("GPU.Example.com", true);
    check("a,b", false);
    check("-a", false);
    check(&"a".repeat(64), false);
}

#[test]
fn a_pods_claims_are_known_by_their_names_and_those_of_templates_by_its_status() {
    let wanted_of = |pod: &Pod| {
        let all = wanted(pod)
            .map_err(|error| error.to_string())?
            .into_iter()
            .map(|wanted| (wanted.key.name, wanted.is_own));
        Ok::<_, String>(all.collect::<Vec<_>>())
    };
    assert_eq!(wanted_of(&usual()).unwrap(), [("big".to_owned(), false), ("web-net-x".to_owned(), true)]);
    let mut unmade = usual();
    unmade.status = None;
    assert_eq!(
        wanted_of(&unmade).unwrap_err(),
        "pod \"shop/web\", spec.resourceClaim \"net\": ResourceClaim not created yet"
    );
    // The status names no claim, as none was needed.
    let mut needless = usual();
    needless.status.as_mut().unwrap().resource_claim_statuses.as_mut().unwrap()[0].resource_claim_name = None;
    assert_eq!(wanted_of(&needless).unwrap(), [("big".to_owned(), false)]);
    let empty = pod(json!({"containers": [], "resourceClaims": [{"name": "x"}]}), json!({}));
    assert!(wanted_of(&empty).unwrap_err().ends_with("none of the supported fields are set"));
}

#[test]
fn a_claim_is_for_the_pod_that_it_is_reserved_for_once_it_is_allocated() {
    let check = |metadata: Value, status: Value, is_own: bool, expected: Result<&[&str], &str>| {
        let claim =
            serde_json::from_value(json!({"metadata": metadata, "spec": {}, "status": status})).unwrap();
        let found = accept(&usual(), &Wanted { key: key_of("big"), is_own }, &claim);
        let found = found.map(|info| info.drivers.into_keys().collect::<Vec<_>>());
        let expected = expected.map(|names| names.iter().map(|n| (*n).to_owned()).collect::<Vec<_>>());
        assert_eq!(found.map_err(|error| error.to_string()), expected.map_err(str::to_owned));
    };
    let (metadata, reserved) =
        (json!({"uid": "c-1"}), json!([{"resource": "pods", "name": "web", "uid": "u-1"}]));
    let result = |driver: &str| json!({"driver": driver, "pool": "p", "device": "d", "request": "r"});
    let results = json!({"devices": {"results": [result("b"), result("a"), result("b")]}});
    check(metadata.clone(), json!({"reservedFor": reserved, "allocation": results}), false, Ok(&["a", "b"]));
    check(metadata.clone(), json!({"reservedFor": reserved}), false, Err("ResourceClaim big: not allocated"));
    check(
        metadata.clone(),
        json!({"reservedFor": [{"resource": "pods", "name": "web", "uid": "u-0"}], "allocation": results}),
        false,
        Err("pod web (u-1) is not allowed to use ResourceClaim big (c-1)"),
    );
    let status = json!({"reservedFor": reserved, "allocation": results});
    let owned = |uid: &str| {
        let owner = json!({"apiVersion": "v1", "kind": "Pod", "name": "web", "uid": uid, "controller": true});
        json!({"uid": "c-1", "ownerReferences": [owner]})
    };
    check(owned("u-1"), status.clone(), true, Ok(&["a", "b"]));
    check(
        owned("u-0"),
        status.clone(),
        true,
        Err("ResourceClaim shop/big was not created for pod shop/web (pod is not owner)"),
    );
    check(json!({}), status, false, Err("ResourceClaim big has no UID"));
}

#[test]
fn a_container_gets_the_devices_of_the_requests_that_it_names() {
    let gpu = vec![
        device("d1", &["one"], &["v/c=1", "v/c=common"]),
        device("d2", &["two/small"], &["v/c=2", "v/c=common"]),
        device("d3", &[], &["v/c=3"]),
    ];
    let claims = [
        (key_of("big"), info("c-1", gpu)),
        (key_of("web-net-x"), info("c-2", vec![device("n", &[], &["v/net=1"])])),
    ];
    let (mut ledger, mut of_another) = (Ledger::default(), Ledger::default());
    ledger.enter("u-1", &claims).unwrap();
    of_another.enter("u-2", &claims).unwrap();
    let of = |ledger: &Ledger, claims: Value| {
        let container =
            serde_json::from_value(json!({"name": "x", "resources": {"claims": claims}})).unwrap();
        cdi_devices(ledger, &usual(), &container).unwrap().map(|devices| devices.join(" "))
    };
    let check = |claims: Value, expected: &str| assert_eq!(of(&ledger, claims).as_deref(), Some(expected));
    check(json!([]), "");
    check(json!([{"name": "gpu"}]), "v/c=1 v/c=common v/c=2 v/c=3");
    check(json!([{"name": "gpu", "request": "one"}]), "v/c=1 v/c=common v/c=3");
    check(json!([{"name": "gpu", "request": "two"}]), "v/c=2 v/c=common v/c=3");
    check(json!([{"name": "gpu", "request": "two/large"}]), "v/c=2 v/c=common v/c=3");
    check(json!([{"name": "net"}, {"name": "gpu", "request": "none"}]), "v/c=3 v/net=1");
    check(json!([{"name": "other"}]), "");
    assert_eq!(of(&Ledger::default(), json!([{"name": "gpu"}])), None);
    assert_eq!(of(&of_another, json!([{"name": "gpu"}])), None);
}

#[test]
fn a_running_pod_keeps_its_claim_although_the_ledger_lacks_it() {
    let check = |statuses: Value, claim: &str, expected: bool| {
        let mut pod = usual();
        pod.status.as_mut().unwrap().container_statuses = serde_json::from_value(statuses).unwrap();
        assert_eq!(runs_with(&pod, &key_of(claim)), expected, "{claim}");
    };
    let one = |id: Value| json!([{"name": "a", "image": "", "imageID": "", "ready": true, "restartCount": 0, "containerID": id}]);
    check(one(json!("x://1")), "big", true);
    check(one(json!("x://1")), "web-net-x", true);
    check(one(json!("x://1")), "other", false);
    check(one(Value::Null), "big", false);
    check(Value::Null, "big", false);
    let mut ledger = Ledger::default();
    ledger.enter("u-2", &[(key_of("big"), info("c-1", Vec::new()))]).unwrap();
    ledger.share(&key_of("big"), ["u-1".to_owned()]);
    ledger.share(&key_of("other"), ["u-1".to_owned()]);
    assert_eq!(ledger.leaving("u-2"), Unprepared { shared: vec![key_of("big")], ..Default::default() });
    ledger.leave("u-2", &key_of("big"));
    assert_eq!(ledger.of_pod("u-1"), [key_of("big")]);
}

#[test]
fn an_extended_resource_may_be_a_claims() {
    let resources = |amount: &str| json!({"requests": {"example.com/gpu": amount, "cpu": "1"}});
    let mappings = json!([
        {"containerName": "a", "resourceName": "example.com/gpu", "requestName": "r-0"},
        {"containerName": "a", "resourceName": "cpu", "requestName": "r-1"},
        {"containerName": "b", "resourceName": "example.com/gpu", "requestName": "r-2"},
    ]);
    let pod = pod(
        json!({"containers": [{"name": "a", "resources": resources("1")}, {"name": "b", "resources": resources("0")}]}),
        json!({"extendedResourceClaimStatus": {"resourceClaimName": "ext", "requestMappings": mappings}}),
    );
    assert!(has_claims(&pod));
    assert_eq!(wanted(&pod).unwrap(), [Wanted { key: key_of("ext"), is_own: false }]);
    let containers = &pod.spec.as_ref().unwrap().containers;
    assert_eq!(of_container(&pod, &containers[0]).unwrap(), [(key_of("ext"), vec!["r-0"])]);
    assert_eq!(of_container(&pod, &containers[1]).unwrap(), []);
    assert!(is_claimed(&pod, "a", "example.com/gpu"));
    assert!(!is_claimed(&pod, "c", "example.com/gpu"));
    // The node provides cpu, even if a status names a claim for it.
    assert!(!is_claimed(&pod, "a", "cpu"));
}

#[test]
fn a_claim_is_unprepared_with_its_last_pod_and_prepared_once() {
    let mut ledger = Ledger::default();
    let claims = [(key_of("big"), info("c-1", Vec::new()))];
    let keys: BTreeSet<ClaimKey> = [key_of("big")].into();
    ledger.enter("u-1", &claims).unwrap();
    assert_eq!(ledger.unprepared(&keys)["gpu.example.com"], [(key_of("big"), "c-1".to_owned())]);
    ledger.set_devices(&key_of("big"), "gpu.example.com", vec![device("d", &[], &["v/c=1"])]);
    ledger.set_prepared(&keys);
    assert_eq!(ledger.in_use(), ([("gpu.example.com".to_owned(), 1)].into(), 1));
    ledger.enter("u-2", &claims).unwrap();
    assert!(ledger.unprepared(&keys).is_empty());
    assert_eq!(ledger.leaving("u-1"), Unprepared { shared: vec![key_of("big")], ..Default::default() });
    ledger.leave("u-1", &key_of("big"));
    let last = vec![(key_of("big"), "c-1".to_owned(), vec!["gpu.example.com".to_owned()])];
    assert_eq!(ledger.leaving("u-2"), Unprepared { last, ..Default::default() });
    assert_eq!(ledger.leaving("u-1"), Unprepared::default());
    // Another claim has the same name by now.
    let other = [(key_of("small"), info("c-3", Vec::new())), (key_of("big"), info("c-2", Vec::new()))];
    let why = ledger.enter("u-3", &other).unwrap_err().to_string();
    assert!(why.contains("different UID c-1 still exists"), "{why}");
    assert_eq!(ledger.get(&key_of("small")), None);
    ledger.leave("u-2", &key_of("big"));
    assert_eq!(ledger, Ledger::default());
}

#[test]
fn a_drivers_answer_is_bounded() {
    let check = |devices: &[Device], expected: bool| assert_eq!(check_devices(devices).is_ok(), expected);
    check(&[device("d", &["r"], &["v/c=1"])], true);
    check(&[device("d", &[], &[""])], false);
    check(&[device("d", &[], &["v/c=1\n"])], false);
    check(&[device("d\"", &[], &[])], false);
    check(&[device("d", &["r\\"], &[])], false);
    check(&[device("d", &[], &["v/c=gerät"])], true);
    check(&[device(&"d".repeat(MAX_NAME + 1), &[], &[])], false);
    check(&[device("d", &[], &["v/c=1"; MAX_NAMES + 1])], false);
    check(&vec![device("d", &[], &[]); MAX_DEVICES], true);
    check(&vec![device("d", &[], &[]); MAX_DEVICES + 1], false);
    // 63 names of 1,024 bytes, plus a pool and a device name; one more name exceeds the bound.
    let long = "c".repeat(MAX_NAME);
    check(&[device("d", &[], &vec![long.as_str(); 63])], true);
    check(&[device("d", &[], &vec![long.as_str(); 64])], false);
}

/// A record of a 1.36 kubelet (`pkg/kubelet/cm/dra/state/checkpointer_test.go`).
const KUBELETS: &str = r#"{"Data":"{\"kind\":\"DRACheckpoint\",\"apiVersion\":\"checkpoint.dra.kubelet.k8s.io/v1\",\"ClaimInfoStateList\":[{\"ClaimUID\":\"067798be-454e-4be4-9047-1aa06aea63f7\",\"ClaimName\":\"example\",\"Namespace\":\"default\",\"PodUIDs\":{\"139cdb46-f989-4f17-9561-ca10cfb509a6\":{}},\"DriverState\":{\"test-driver.cdi.k8s.io\":{\"Devices\":[{\"PoolName\":\"worker-1\",\"DeviceName\":\"dev-1\",\"ShareID\":null,\"RequestNames\":[\"test request\"],\"CDIDeviceIDs\":[\"example.com/example=cdi-example\"]}]}}}]}","Checksum":2570581864}"#;

#[test]
fn the_record_is_the_kubelets() {
    let ledger = checkpoint::read(KUBELETS.as_bytes()).unwrap();
    let key = ClaimKey { namespace: "default".to_owned(), name: "example".to_owned() };
    let info = ledger.get(&key).unwrap();
    assert_eq!(info.drivers["test-driver.cdi.k8s.io"][0].cdi, ["example.com/example=cdi-example"]);
    assert_eq!(ledger.pods().len(), 1);
    assert!(!info.prepared);
    assert_eq!(String::from_utf8(checkpoint::write(&ledger).unwrap()).unwrap(), KUBELETS);
    let empty = checkpoint::write(&Ledger::default()).unwrap();
    assert_eq!(checkpoint::read(&empty).unwrap(), Ledger::default());
}

#[test]
fn a_damaged_record_is_refused() {
    let check = |text: &str, expected: fn(&CheckpointError) -> bool| {
        let error = checkpoint::read(text.as_bytes()).unwrap_err();
        assert!(expected(&error), "{text:.40}: {error}");
    };
    check("", |error| matches!(error, CheckpointError::Malformed(_)));
    check(&KUBELETS[..100], |error| matches!(error, CheckpointError::Malformed(_)));
    check(&KUBELETS.replace("dev-1", "dev-2"), |error| matches!(error, CheckpointError::Checksum { .. }));
    // Kubelets 1.30 to 1.33 wrote another version.
    let old = r#"{"Data":"{\"kind\":\"X\",\"apiVersion\":\"v0\"}","Checksum":0}"#;
    let CheckpointError::Checksum { computed, .. } = checkpoint::read(old.as_bytes()).unwrap_err() else {
        panic!()
    };
    let old = old.replace(":0}", &format!(":{computed}}}"));
    check(&old, |error| matches!(error, CheckpointError::Unusable(_)));
}
