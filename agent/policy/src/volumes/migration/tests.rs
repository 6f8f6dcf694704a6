//! The test cases of `csi-translation-lib` of Kubernetes 1.36 that apply to a node.

use serde_json::{Value, json};

use super::*;

/// Expects the translation of a pod's own volume in full, or the error's message.
#[track_caller]
fn check_pod(source: Value, namespace: &str, expected: Result<Value, &str>) {
    let mut volume = source;
    volume["name"] = json!("files");
    let volume: Volume = serde_json::from_value(volume).unwrap();
    assert!(is_migrated(&volume));
    let found = of_pod(&volume, namespace).unwrap();
    match expected {
        Ok(expected) => assert_eq!(serde_json::to_value(found.unwrap()).unwrap(), whole(expected)),
        Err(why) => assert!(found.clone().unwrap_err().to_string().contains(why), "{found:?}"),
    }
}

/// Completes an expected PersistentVolume with the implied fields.
fn whole(mut expected: Value) -> Value {
    expected["apiVersion"] = json!("v1");
    expected["kind"] = json!("PersistentVolume");
    expected
}

/// Returns the PersistentVolume that stands for a pod's own volume.
fn inline(name: &str, mode: &str, csi: Value) -> Value {
    json!({"metadata": {"name": name}, "spec": {"accessModes": [mode], "volumeMode": "Filesystem", "csi": csi}})
}

/// Expects the translation of a PersistentVolume; only the fields of `expected` count.
#[track_caller]
fn check_claim(metadata: Value, spec: Value, expected: Result<Value, &str>) {
    let volume = serde_json::from_value(json!({"metadata": metadata, "spec": spec})).unwrap();
    let found = of_claim(&volume).unwrap();
    match expected {
        Ok(expected) => {
            let found = serde_json::to_value(found.unwrap()).unwrap();
            for (key, value) in expected.as_object().unwrap() {
                assert_eq!(&found["spec"][key], value, "{key}");
            }
            let kept = spec.as_object().unwrap().keys().find(|key| {
                !["csi", "nodeAffinity", "accessModes", "claimRef"].contains(&key.as_str())
                    && found["spec"].get(key).is_some()
            });
            assert_eq!(kept, None, "the in-tree volume is still set");
            assert_eq!(of_claim(&serde_json::from_value(found).unwrap()), None);
        }
        Err(why) => assert!(found.clone().unwrap_err().to_string().contains(why), "{found:?}"),
    }
}

#[test]
fn a_pods_own_volume_is_translated_as_by_the_controller() {
    let disk = "projects/UNSPECIFIED/zones/UNSPECIFIED/disks/disk";
    check_pod(
        json!({"awsElasticBlockStore": {"volumeID": "aws://us-west-2a/vol-02399794d890f9375", "fsType": "ext4",
            "partition": 2}}),
        "shop",
        Ok(inline(
            "ebs.csi.aws.com-vol-02399794d890f9375",
            "ReadWriteOnce",
            json!({"driver": "ebs.csi.aws.com", "volumeHandle": "vol-02399794d890f9375", "fsType": "ext4",
                "volumeAttributes": {"partition": "2"}}),
        )),
    );
    check_pod(
        json!({"azureDisk": {"diskName": "diskname", "diskURI": "datadiskuri"}}),
        "",
        Ok(inline(
            "datadiskuri",
            "ReadWriteOnce",
            json!({"driver": "disk.csi.azure.com", "volumeHandle": "datadiskuri",
                "volumeAttributes": {"kind": "Managed"}}),
        )),
    );
    check_pod(
        json!({"azureDisk": {"diskName": "diskname", "diskURI": "datadiskuri", "kind": "Dedicated"}}),
        "",
        Err("kind(Dedicated) is not supported in csi migration"),
    );
    for (namespace, expected) in [("", "default"), ("test", "test")] {
        let handle = format!("#secretname#sharename#files#{expected}");
        check_pod(
            json!({"azureFile": {"secretName": "secretname", "shareName": "sharename", "readOnly": true}}),
            namespace,
            Ok(inline(
                &handle,
                "ReadWriteMany",
                json!({"driver": "file.csi.azure.com", "volumeHandle": handle, "readOnly": true,
                    "nodeStageSecretRef": {"name": "secretname", "namespace": expected},
                    "volumeAttributes": {"sharename": "sharename"}}),
            )),
        );
    }
    check_pod(
        json!({"cinder": {"volumeID": "volume-id", "fsType": "xfs"}}),
        "",
        Ok(inline(
            "cinder.csi.openstack.org-volume-id",
            "ReadWriteOnce",
            json!({"driver": "cinder.csi.openstack.org", "volumeHandle": "volume-id", "fsType": "xfs",
                "volumeAttributes": {}}),
        )),
    );
    for (read_only, mode) in [(false, "ReadWriteOnce"), (true, "ReadOnlyMany")] {
        let mut csi = json!({"driver": "pd.csi.storage.gke.io", "volumeHandle": disk,
            "volumeAttributes": {"partition": ""}});
        if read_only {
            csi["readOnly"] = json!(true);
        }
        let source = json!({"gcePersistentDisk": {"pdName": "disk", "readOnly": read_only}});
        check_pod(source, "", Ok(inline("pd.csi.storage.gke.io-disk", mode, csi)));
        check_pod(
            json!({"portworxVolume": {"volumeID": "ID", "fsType": "type", "readOnly": read_only}}),
            "ns",
            Ok(inline(
                "pxd.portworx.com-ID",
                mode,
                json!({"driver": "pxd.portworx.com", "volumeHandle": "ID", "fsType": "type",
                    "volumeAttributes": {}}),
            )),
        );
    }
    let path = "[vsanDatastore] volume/inlinevolume.vmdk";
    check_pod(
        json!({"vsphereVolume": {"volumePath": path, "fsType": "ext4", "storagePolicyName": "gold"}}),
        "",
        Ok(inline(
            &format!("csi.vsphere.vmware.com-{path}"),
            "ReadWriteOnce",
            json!({"driver": "csi.vsphere.vmware.com", "volumeHandle": path, "fsType": "ext4",
                "volumeAttributes": {"storagepolicyname": "gold"}}),
        )),
    );
}

#[test]
fn volumes_of_other_kinds_are_left_alone() {
    let other: Volume = serde_json::from_value(json!({"name": "files", "emptyDir": {}})).unwrap();
    assert!(!is_migrated(&other) && of_pod(&other, "").is_none());
    let other = serde_json::from_value(json!({"spec": {"nfs": {"server": "s", "path": "/"}}})).unwrap();
    assert!(of_claim(&other).is_none() && of_claim(&PersistentVolume::default()).is_none());
}

#[test]
fn a_volume_at_amazon_has_three_spellings() {
    let check =
        |written: &str, expected: Option<&str>| assert_eq!(aws_id(written).ok(), expected, "{written}");
    check("vol-02399794d890f9375", Some("vol-02399794d890f9375"));
    check("aws:///vol-02399794d890f9375", Some("vol-02399794d890f9375"));
    check("aws://us-west-2a/vol-02399794d890f9375", Some("vol-02399794d890f9375"));
    check("aws://us-west-2a/02399794d890f9375", None);
    check("aws://us-west-2a/vol-1/vol-2", None);
    check("aws://us-west-2a", None);
}

#[test]
fn a_storage_account_is_in_its_secrets_name() {
    let check = |secret: &str, expected: &str| assert_eq!(azure_account(secret), expected);
    check("azure-storage-account-st1-secret", "st1");
    check("azure-storage-account-st1-secret-secret", "st1-secret");
    check("azure-storage-account--secret", "azure-storage-account--secret");
    check("secretname", "secretname");
    check("secret-azure-storage-account-x", "secret-azure-storage-account-x");
}

#[test]
fn a_claims_volume_changes_only_its_driver() {
    check_claim(
        json!({"name": "pv"}),
        json!({"awsElasticBlockStore": {"volumeID": "vol01", "fsType": "ext3", "partition": 1, "readOnly": true},
            "accessModes": ["ReadWriteMany"]}),
        Ok(json!({"accessModes": ["ReadWriteMany"], "csi": {"driver": "ebs.csi.aws.com",
            "volumeHandle": "vol01", "fsType": "ext3", "readOnly": true, "volumeAttributes": {"partition": "1"}}})),
    );
    let uri = "/subscriptions/12/resourceGroups/23/providers/Microsoft.Compute/disks/name";
    let disk =
        json!({"cachingMode": "None", "diskName": "", "diskURI": uri, "fsType": "xfs", "readOnly": true});
    check_claim(
        json!({"name": "pv"}),
        json!({"azureDisk": disk}),
        Ok(json!({"csi": {"driver": "disk.csi.azure.com", "volumeHandle": uri, "fsType": "xfs",
            "readOnly": true,
            "volumeAttributes": {"cachingmode": "None", "fstype": "xfs", "kind": "Managed"}}})),
    );
    let mut shared = disk;
    shared["kind"] = json!("Shared");
    check_claim(json!({}), json!({"azureDisk": shared}), Err("kind(Shared) is not supported"));
    let secret = json!({"name": "s", "namespace": "vault"});
    check_claim(
        json!({"name": "pv", "annotations": {"openstorage.io/auth-secret-name": "s",
            "openstorage.io/auth-secret-namespace": "vault"}}),
        json!({"portworxVolume": {"volumeID": "ID1111", "fsType": "type"}}),
        Ok(json!({"csi": {"driver": "pxd.portworx.com", "volumeHandle": "ID1111", "fsType": "type",
            "volumeAttributes": {}, "controllerPublishSecretRef": secret, "nodeStageSecretRef": secret,
            "nodePublishSecretRef": secret, "controllerExpandSecretRef": secret,
            "nodeExpandSecretRef": secret}})),
    );
}

#[test]
fn a_share_of_a_claim_needs_the_namespace_of_its_secret() {
    let share = |namespace: Value| {
        let share = json!({"shareName": "sharename", "secretName": "azure-storage-account-st1-secret"});
        let mut spec = json!({"azureFile": share});
        if !namespace.is_null() {
            spec["azureFile"]["secretNamespace"] = namespace;
        }
        spec
    };
    let expected = |group: &str, namespace: &str| {
        json!({"csi": {"driver": "file.csi.azure.com",
            "volumeHandle": format!("{group}#st1#sharename#uuid#{namespace}"),
            "nodeStageSecretRef": {"name": "azure-storage-account-st1-secret", "namespace": namespace},
            "volumeAttributes": {"sharename": "sharename"}}})
    };
    let named = json!({"name": "uuid"});
    check_claim(named.clone(), share(Value::Null), Err("could not find a secret namespace"));
    check_claim(named.clone(), share(json!("")), Err("could not find a secret namespace"));
    check_claim(named.clone(), share(json!("vault")), Ok(expected("", "vault")));
    let mut bound = share(Value::Null);
    bound["claimRef"] = json!({"namespace": "shop"});
    check_claim(named, bound, Ok(expected("", "shop")));
    let group = json!({"name": "uuid", "annotations": {"kubernetes.io/azure-file-resource-group": "rg"}});
    check_claim(group, share(json!("vault")), Ok(expected("rg", "vault")));
}

#[test]
fn a_disk_at_google_is_named_by_the_zones_of_its_labels() {
    let check = |labels: Value, expected: Result<&str, &str>| {
        let expected = expected.map(|place| {
            json!({"csi": {"driver": "pd.csi.storage.gke.io", "fsType": "ext4",
                "volumeHandle": format!("projects/UNSPECIFIED/{place}/disks/test-disk"),
                "volumeAttributes": {"partition": ""}}})
        });
        let spec = json!({"gcePersistentDisk": {"pdName": "test-disk", "fsType": "ext4", "partition": 0}});
        check_claim(json!({"labels": labels}), spec, expected);
    };
    check(json!({}), Ok("zones/UNSPECIFIED"));
    check(json!({ZONE: "us-east1-a"}), Ok("zones/us-east1-a"));
    check(json!({OLD_ZONE: "us-east1-b", ZONE: "us-east1-a"}), Ok("zones/us-east1-b"));
    check(json!({ZONE: "europe-west1-b__europe-west1-c"}), Ok("regions/europe-west1"));
    check(json!({ZONE: "europe-west1-b__us-east1-c"}), Err("failed to get region from zones: multiple"));
    check(json!({ZONE: "europe__west"}), Err("zone in unexpected format"));
}

#[test]
fn a_disk_at_google_has_one_access_mode() {
    let check = |modes: &[&str], expected: &str| {
        let modes: Vec<String> = modes.iter().map(|&one| one.to_owned()).collect();
        assert_eq!(gce_mode(&modes), expected, "{modes:?}");
    };
    let (rox, rwo, rwx) = ("ReadOnlyMany", "ReadWriteOnce", "ReadWriteMany");
    check(&[rox], rox);
    check(&[rwo], rwo);
    check(&[rwx], rwo);
    check(&[rox, rwo], rwo);
    check(&[rwo, rwx], rwo);
    check(&[rwx, rox], rwo);
    check(&[rwx, rwo, rox], rwo);
    check(&["ReadWriteOncePod"], rwo);
}

/// Returns an affinity with terms of one requirement each.
fn affinity(terms: &[(&str, &[&str])]) -> Value {
    let terms: Vec<Value> = terms
        .iter()
        .map(|(key, values)| json!({"matchExpressions": [{"key": key, "operator": "In", "values": values}]}))
        .collect();
    json!({"required": {"nodeSelectorTerms": terms}})
}

#[test]
fn a_volumes_zones_get_the_drivers_names() {
    let check = |labels: Value, asked: &[(&str, &[&str])], expected: &[(&str, &[&str])]| {
        let mut spec = json!({"gcePersistentDisk": {"pdName": "test-disk"}});
        if !asked.is_empty() {
            spec["nodeAffinity"] = affinity(asked);
        }
        check_claim(json!({"labels": labels}), spec, Ok(json!({"nodeAffinity": affinity(expected)})));
    };
    let key = "topology.gke.io/zone";
    let two: &[&str] = &["europe-west1-b", "europe-west1-c"];
    let one: &[&str] = &["us-east-2a"];
    check(json!({OLD_ZONE: "us-east-1a", OLD_REGION: "us-east-1"}), &[], &[(key, &["us-east-1a"])]);
    check(json!({ZONE: "us-east-1a", REGION: "us-east-1"}), &[], &[(key, &["us-east-1a"])]);
    check(json!({}), &[(OLD_ZONE, one)], &[(key, one)]);
    check(json!({}), &[(key, one)], &[(key, one)]);
    check(json!({OLD_ZONE: "us-east-1a"}), &[(OLD_ZONE, one)], &[(key, one)]);
    check(json!({OLD_ZONE: "europe-west1-b__europe-west1-c"}), &[], &[(key, two)]);
    check(json!({}), &[(ZONE, two)], &[(key, two)]);
    check(json!({}), &[(ZONE, one), (ZONE, two)], &[(key, one), (key, two)]);
    // A former region label gets its current name.
    check(json!({}), &[(OLD_ZONE, one), (OLD_REGION, &["r"])], &[(key, one), (REGION, &["r"])]);
}

#[test]
fn vspheres_driver_has_its_own_name_for_regions_too() {
    let path = "[vsanDatastore] folder/disk.vmdk";
    let spec = json!({"vsphereVolume": {"volumePath": path, "fsType": "ext4", "storagePolicyName": "gold"}});
    let both = [
        json!({"key": "topology.csi.vmware.com/zone", "operator": "In", "values": ["z1"]}),
        json!({"key": "topology.csi.vmware.com/region", "operator": "In", "values": ["r1"]}),
    ];
    let expected = json!({
        "csi": {"driver": "csi.vsphere.vmware.com", "volumeHandle": path, "fsType": "ext4",
            "volumeAttributes": {"storagepolicyname": "gold"}},
        "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": both}]}},
    });
    for labels in [json!({OLD_ZONE: "z1", OLD_REGION: "r1"}), json!({ZONE: "z1", REGION: "r1"})] {
        check_claim(json!({"labels": labels}), spec.clone(), Ok(expected.clone()));
    }
}

#[test]
fn a_csi_node_names_the_kinds_once() {
    let mut node = crate::volumes::csi::new_node("n1", "u1");
    assert_eq!(changed_annotation(&node), None, "a new CSINode has the annotation");
    let all = node.metadata.annotations.clone().unwrap()[ANNOTATION].clone();
    assert_eq!(
        all,
        "kubernetes.io/aws-ebs,kubernetes.io/azure-disk,kubernetes.io/azure-file,kubernetes.io/cinder,\
         kubernetes.io/gce-pd,kubernetes.io/portworx-volume,kubernetes.io/vsphere-volume"
    );
    let mut turned: Vec<&str> = all.split(',').collect();
    turned.reverse();
    let mut check = |said: Option<String>, expected: Option<&str>| {
        node.metadata.annotations = said.map(|said| BTreeMap::from([(ANNOTATION.to_owned(), said)]));
        assert_eq!(changed_annotation(&node).as_deref(), expected);
    };
    check(Some(turned.join(",")), None);
    check(None, Some(&all));
    check(Some("kubernetes.io/aws-ebs".to_owned()), Some(&all));
}
