//! The target for answers of drivers about the devices of resource claims.

use std::collections::{BTreeMap, BTreeSet};

use arbitrary::Unstructured;
use beelet_devices::options::ContainerOptions;
use beelet_dra::answer::prepared;
use beelet_policy::dra::{ClaimInfo, ClaimKey, Device, Ledger, cdi_devices, checkpoint};
use beelet_proto::{
    cri,
    dra::v1::{self as wire, NodePrepareResourceResponse, NodePrepareResourcesResponse},
};
use k8s_openapi::api::core::v1::{Container, Pod};
use prost::Message as _;
use serde_json::json;

use crate::below;

const DRIVER: &str = "gpu.example.com";
/// Claims by name, and their UIDs.
const CLAIMS: [(&str, &str); 2] = [("a", "u-a"), ("b", "u-b")];
/// Maximum sizes of an error message about an answer, and of the record and the request for two claims.
const SENTENCE: usize = 8 << 10;
const RECORD: usize = 2 << 20;
const REQUEST: usize = 2 << 20;

/// Tests a driver's answer for two claims, once decoded from the bytes and once generated from them: accepted
/// devices are bounded, read back unchanged from the record, and a container gets each of the driver's
/// devices once, and no other device.
pub fn claim_devices(input: &[u8]) {
    if let Ok(answer) = NodePrepareResourcesResponse::decode(input) {
        of_driver(answer);
    }
    of_driver(made(&mut Unstructured::new(input)));
}

fn of_driver(answer: NodePrepareResourcesResponse) {
    let key = |name: &str| ClaimKey { namespace: "shop".to_owned(), name: name.to_owned() };
    let batch = CLAIMS.map(|(name, uid)| (key(name), uid.to_owned()));
    let found = match prepared(&batch, answer) {
        Ok(found) => found,
        Err(error) => return assert!(error.to_string().len() <= SENTENCE, "{error}"),
    };
    let claims = CLAIMS.map(|(name, uid)| {
        let drivers = BTreeMap::from([(DRIVER.to_owned(), Vec::new())]);
        (key(name), ClaimInfo { uid: uid.to_owned(), drivers, ..ClaimInfo::default() })
    });
    let mut ledger = Ledger::default();
    ledger.enter("pod", &claims).unwrap();
    let said: BTreeSet<String> = found.iter().flat_map(|(_, devices)| devices).flat_map(names).collect();
    for (key, devices) in found {
        ledger.set_devices(key, DRIVER, devices);
    }
    let record = checkpoint::write(&ledger).unwrap();
    assert!(record.len() <= RECORD, "a record of {} bytes", record.len());
    assert_eq!(checkpoint::read(&record).unwrap(), ledger);
    for requests in [&[""][..], &["gpu"], &["gpu/small", "nic", "gpu"]] {
        container_gets(&ledger, &said, requests);
    }
}

fn names(device: &Device) -> Vec<String> {
    device.cdi.clone()
}

/// Checks the devices of a container that names these requests of both claims.
fn container_gets(ledger: &Ledger, said: &BTreeSet<String>, requests: &[&str]) {
    let named = |(claim, _): &(&str, &str)| {
        let claim = (*claim).to_owned();
        requests.iter().map(move |request| json!({"name": claim, "request": request}))
    };
    let claims: Vec<_> = CLAIMS.iter().flat_map(named).collect();
    let container = json!({"name": "c", "resources": {"claims": claims}});
    let of_pod: Vec<_> =
        CLAIMS.iter().map(|(name, _)| json!({"name": name, "resourceClaimName": name})).collect();
    let pod = json!({"metadata": {"uid": "pod", "name": "web", "namespace": "shop"},
        "spec": {"containers": [container.clone()], "resourceClaims": of_pod}});
    let pod: Pod = serde_json::from_value(pod).unwrap();
    let container: Container = serde_json::from_value(container).unwrap();
    let devices = cdi_devices(ledger, &pod, &container).unwrap().unwrap();
    let own: BTreeSet<String> = devices.iter().cloned().collect();
    assert_eq!(own.len(), devices.len(), "a container gets a device twice");
    assert!(own.is_subset(said), "{own:?} of {said:?}");
    if requests == [""] {
        assert_eq!(&own, said, "a container with the whole claim lacks a device");
    }
    for by_annotation in [false, true] {
        let (mut options, mut config) = (ContainerOptions::default(), cri::ContainerConfig::default());
        options.add_cdi(devices.clone());
        options.add_cdi(devices.clone());
        options.apply(&mut config, by_annotation);
        assert_eq!(config.cdi_devices.len(), devices.len());
        assert!(config.encoded_len() <= REQUEST, "a request of {} bytes", config.encoded_len());
    }
}

/// Generates an answer from the input, mostly for the right claims.
fn made(from: &mut Unstructured<'_>) -> NodePrepareResourcesResponse {
    let mut claims = std::collections::HashMap::new();
    for (_, uid) in CLAIMS {
        if below(from, 16) < 15 {
            let error = if below(from, 16) == 15 { text(from) } else { String::new() };
            let count = repeated(from);
            let one = device(from);
            let devices = (0..count).map(|at| {
                let cdi_device_ids = one.cdi_device_ids.iter().map(|id| format!("{id}{at}")).collect();
                wire::Device { cdi_device_ids, ..one.clone() }
            });
            let mut devices: Vec<_> = devices.collect();
            devices.extend((0..below(from, 3)).map(|_| device(from)));
            claims.insert(uid.to_owned(), NodePrepareResourceResponse { devices, error });
        }
    }
    if below(from, 32) == 31 {
        claims.insert(text(from), NodePrepareResourceResponse::default());
    }
    NodePrepareResourcesResponse { claims }
}

fn device(from: &mut Unstructured<'_>) -> wire::Device {
    let requests = ["gpu", "gpu/small", "nic", "other"];
    let names = |from: &mut Unstructured<'_>| (0..below(from, 4)).map(|_| text(from)).collect::<Vec<_>>();
    wire::Device {
        pool_name: text(from),
        device_name: text(from),
        share_id: (below(from, 2) == 1).then(|| text(from)),
        request_names: (0..below(from, 3))
            .map(|_| requests[below(from, requests.len())].to_owned())
            .collect(),
        cdi_device_ids: names(from),
    }
}

/// Returns a small number mostly, and sometimes one above the limit of devices.
fn repeated(from: &mut Unstructured<'_>) -> usize {
    match below(from, 16) {
        15 => 200 + below(from, 100),
        _ => below(from, 4),
    }
}

/// Generates a name: plain, or of any characters, and sometimes long.
fn text(from: &mut Unstructured<'_>) -> String {
    match below(from, 8) {
        0 => from.arbitrary().unwrap_or_default(),
        1 => "x".repeat(below(from, 1100)),
        _ => format!("vendor.example/class=d{}", below(from, 8)),
    }
}
