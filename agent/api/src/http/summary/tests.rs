use serde_json::{Value, json};

use super::*;
use crate::http::fixtures;

fn sizes() -> Sizes {
    let fs = fs(Path::new("/"));
    Sizes { node: fs.clone(), images: fs.clone(), containers: fs }
}

#[test]
fn the_summary_is_the_kubelets() {
    let summary = serde_json::to_value(of(&fixtures::pressure(), &sizes())).unwrap();
    assert_eq!(summary["node"]["nodeName"], "node-1");
    assert_eq!(summary["node"]["cpu"]["usageCoreNanoSeconds"], 100_000_000_000_u64);
    assert_eq!(summary["node"]["startTime"], "2017-07-14T02:40:00Z");
    let node = &summary["node"];
    assert_eq!((&node["network"]["name"], &node["network"]["txBytes"]), (&json!("eth0"), &json!(40)));
    assert_eq!((&node["memory"]["pageFaults"], &node["memory"]["rssBytes"]), (&json!(9), &json!(1 << 30)));
    let system = &node["systemContainers"][0];
    assert_eq!((&system["name"], &system["memory"]["workingSetBytes"]), (&json!("pods"), &json!(900)));
    assert_eq!(system["cpu"]["usageNanoCores"], 500_000_000);
    assert_eq!(system["cpu"]["psi"]["some"]["total"], 250_000_000);
    let pod = &summary["pods"][0];
    assert_eq!(pod["podRef"], json!({"name": "web", "namespace": "shop", "uid": "u"}));
    assert_eq!(pod["cpu"]["usageNanoCores"], 500_000_000);
    assert_eq!(pod["network"]["rxBytes"], 10);
    assert_eq!(pod["process_stats"]["process_count"], 2);
    let container = &pod["containers"][0];
    assert_eq!((&container["name"], &container["memory"]["availableBytes"]), (&json!("app"), &json!(3196)));
    assert_eq!(
        container["cpu"]["psi"]["some"],
        json!({"total": 250_000_000, "avg10": 12.5, "avg60": 0.0, "avg300": 0.0})
    );
    let used = |value: &Value| (value["usedBytes"].clone(), value["inodesUsed"].clone());
    let check = |value: &Value, bytes: u64, inodes: u64| {
        assert_eq!(used(value), (json!(bytes), json!(inodes)), "{value}");
        assert!(value["capacityBytes"].as_u64() > Some(0), "{value}");
    };
    check(&container["rootfs"], 4096, 2);
    check(&container["logs"], 8192, 1);
    check(&pod["volume"][0], 100, 3);
    assert_eq!(pod["volume"][0]["name"], "cache");
    let claimed = json!({
        "name": "data", "time": "2023-11-14T22:13:20Z", "pvcRef": {"name": "books", "namespace": "shop"},
        "capacityBytes": 1000, "availableBytes": 600, "usedBytes": 400, "inodes": 0, "inodesFree": 0,
        "inodesUsed": 0, "volumeHealthStats": {"abnormal": false},
    });
    assert_eq!(pod["volume"][1], claimed);
    check(&pod["ephemeral-storage"], 13_388, 7);
    check(&node["runtime"]["imageFs"], 1 << 20, 40);
    assert_eq!(node["swap"]["swapUsageBytes"], 6);
    assert_eq!(node["swap"]["swapAvailableBytes"], 4);
}

/// Every field exists in a recorded kubelet's summary at the same place, with the same type.
#[test]
fn no_field_is_unlike_a_recorded_kubelets() {
    let mut recorded: Value =
        serde_json::from_str(include_str!("../../../../tests/data/stats-summary-kubelet.json")).unwrap();
    // With measurements from the runtime that kubelet reported fewer container fields; types are equal
    // everywhere.
    recorded["pods"][0]["containers"][0]["memory"] = recorded["node"]["memory"].clone();
    recorded["pods"][0]["network"] = recorded["node"]["network"].clone();
    let ours = serde_json::to_value(of(&fixtures::pressure(), &sizes())).unwrap();
    let mut strange = Vec::new();
    unlike(&ours, &recorded, "", &mut strange);
    // Fields newer than that kubelet: KEP-4205 (1.36) and KEP-2400 (1.34).
    let later = ["/psi", "/io", "/swap", "/containerFs"];
    strange.retain(|path| !later.iter().any(|end| path.ends_with(end)));
    // That kubelet's pod had no volumes.
    strange.retain(|path| !["/pods/0/volume", "/pods/0/ephemeral-storage"].contains(&path.as_str()));
    assert_eq!(strange, Vec::<String>::new());
}

/// Every field of a recorded kubelet exists, except the ones that are known to be missing.
#[test]
fn what_a_recorded_kubelet_has_is_there_or_known_to_be_missing() {
    let recorded: Value =
        serde_json::from_str(include_str!("../../../../tests/data/stats-summary-kubelet.json")).unwrap();
    let ours = serde_json::to_value(of(&fixtures::pressure(), &sizes())).unwrap();
    let mut missing = Vec::new();
    unlike(&recorded, &ours, "", &mut missing);
    let dotted = |path: &String| path.trim_start_matches('/').replace("/0", "[]").replace('/', ".");
    let mut missing: Vec<String> = missing.iter().map(dotted).collect();
    let mut known: Vec<String> = LACKING.iter().map(|(path, _)| (*path).to_owned()).collect();
    missing.sort();
    known.sort();
    assert_eq!(missing, known);
}

fn unlike(ours: &Value, theirs: &Value, path: &str, strange: &mut Vec<String>) {
    match (ours, theirs) {
        (Value::Object(ours), Value::Object(theirs)) => {
            for (key, value) in ours {
                let path = format!("{path}/{key}");
                match theirs.get(key) {
                    Some(theirs) => unlike(value, theirs, &path, strange),
                    None => strange.push(path),
                }
            }
        }
        (Value::Array(ours), Value::Array(theirs)) => {
            if let (Some(ours), Some(theirs)) = (ours.first(), theirs.first()) {
                unlike(ours, theirs, &format!("{path}/0"), strange);
            }
        }
        (Value::String(_), Value::String(_)) | (Value::Number(_), Value::Number(_)) => {}
        _ => strange.push(path.to_owned()),
    }
}
