//! Tests of in-tree volume types that were migrated to CSI drivers, and of removed types.

use super::*;

const DISKS: &str = "ebs.csi.aws.com";
const CLOUD: &str = "disk.csi.azure.com";

impl Member {
    /// Starts a driver of this name, and waits until the CSINode has it.
    async fn driver_called(&self, name: &str) -> CsiDriver {
        let driver = self.driver(|settings| name.clone_into(&mut settings.name));
        let has = |node: &Value| {
            let drivers = node["spec"]["drivers"].as_array();
            drivers.is_some_and(|drivers| drivers.iter().any(|driver| driver["name"] == name))
        };
        self.until_csi_node("the CSINode to name the driver", has).await;
        driver
    }

    fn never_attached(&self, driver: &str) {
        let spec = json!({"attachRequired": false});
        let path = format!("/apis/storage.k8s.io/v1/csidrivers/{driver}");
        self.api.put(&path, json!({"metadata": {"name": driver}, "spec": spec}));
    }
}

#[tokio::test]
async fn a_new_and_an_existing_csi_node_list_the_migrated_volume_types() {
    require!(root);
    let mut member = Member::start(FakeApi::start(), |options| options).await;
    let annotation = "storage.alpha.kubernetes.io/migrated-plugins";
    let of = |node: &Value| node["metadata"]["annotations"][annotation].as_str().map(str::to_owned);
    let made = member.until_csi_node("a CSINode with the list", |node| of(node).is_some()).await;
    let kinds = of(&made).unwrap();
    assert!(kinds.starts_with("kubernetes.io/aws-ebs,") && kinds.contains("kubernetes.io/portworx-volume"));
    member.scene.agent.kill9();
    let path = format!("{CSI_NODES}/{NODE}");
    let before = json!({"metadata": {"annotations": {annotation: "kubernetes.io/aws-ebs", "mine": "yes"}}});
    member.api.patch(&path, &before);
    member.scene.agent.resume().unwrap();
    let again = |node: &Value| of(node).as_deref() == Some(&kinds);
    let node = member.until_csi_node("a CSINode with the list again", again).await;
    assert_eq!(node["metadata"]["annotations"]["mine"], "yes");
    member.scene.is_well();
}

#[tokio::test]
async fn the_csi_driver_mounts_a_claims_volume_of_a_migrated_type() {
    require!(root);
    let member = Member::start(FakeApi::start(), |options| options).await;
    let driver = member.driver_called(DISKS).await;
    member.never_attached(DISKS);
    member.api.put(CLAIM, pending());
    let volume_id = "aws://us-west-2a/vol-02399794d890f9375";
    let disk = json!({"volumeID": volume_id, "fsType": "xfs", "partition": 1});
    bind(
        &member.api,
        CLAIM,
        &json!({"awsElasticBlockStore": disk, "accessModes": ["ReadWriteOnce"], "mountOptions": ["noatime"]}),
    );
    member.api.put(&path("web"), claiming("web"));
    member.until_running("web").await;
    let staged = &driver.calls("NodeStageVolume")[0];
    assert_eq!(
        (&staged["volume"], &staged["context"]),
        (&json!("vol-02399794d890f9375"), &json!({"partition": "1"}))
    );
    let mounted = member.mounted("web");
    assert!(mounted.ends_with("/volumes/kubernetes.io~csi/pv-1/mount"), "{mounted}");
    std::fs::write(Path::new(&mounted).join("written"), "1").unwrap();
    assert!(member.shelf().join("vol-02399794d890f9375/written").exists());
    member.api.delete(&path("web"));
    member.until_called(&driver, "NodeUnstageVolume", 1);
    member.until_nothing_is_mounted();
    member.scene.is_well();
}

#[tokio::test]
async fn a_pods_own_volume_of_a_migrated_type_is_attached_and_mounted_read_only_if_specified() {
    require!(root);
    let member = Member::start(FakeApi::start(), |options| options).await;
    let driver = member.driver_called(CLOUD).await;
    let uri = "/subscriptions/12/resourceGroups/23/providers/Microsoft.Compute/disks/name";
    let source =
        json!({"azureDisk": {"diskName": "name", "diskURI": uri, "readOnly": true, "kind": "Managed"}});
    member.api.put(&path("web"), pod_with("web", &source));
    let name = format!("kubernetes.io/csi/{CLOUD}^{uri}");
    let in_use =
        |api: &FakeApi| api.get(&own_node()).filter(|node| node["status"]["volumesInUse"] == json!([name]));
    member.api.wait_until("the volume to be in use", in_use).await;
    assert!(driver.calls("NodeStageVolume").is_empty(), "the volume is not attached yet");
    // The attachment as the controller creates it: without a PersistentVolume.
    let digest = {
        use sha2::Digest as _;
        let hash = sha2::Sha256::digest(format!("{uri}{CLOUD}{NODE}"));
        hash.iter().map(|byte| format!("{byte:02x}")).collect::<String>()
    };
    let attachment = format!("/apis/storage.k8s.io/v1/volumeattachments/csi-{digest}");
    let spec = json!({"attacher": CLOUD, "nodeName": NODE, "source": {"inlineVolumeSpec": {}}});
    let status = json!({"attached": true, "attachmentMetadata": {"lun": "3"}});
    member.api.put(&attachment, json!({"spec": spec, "status": status}));
    let attached = json!({"status": {"volumesAttached": [{"name": name, "devicePath": ""}]}});
    member.api.patch(&format!("{}/status", own_node()), &attached);
    member.until_running("web").await;
    let published = &driver.calls("NodePublishVolume")[0];
    assert_eq!((&published["volume"], &published["readOnly"]), (&json!(uri), &json!(true)));
    assert_eq!(published["publishContext"], json!({"lun": "3"}));
    // The volume's name is a path, and must be one component of the mount's path.
    let mounted = member.mounted("web");
    let part = uri.replace('/', "~");
    assert!(mounted.ends_with(&format!("/volumes/kubernetes.io~csi/{part}/mount")), "{mounted}");
    let container = member.scene.cri.container("web", "main").unwrap();
    let mount = container.config.mounts.iter().find(|mount| mount.container_path == "/data").unwrap();
    assert!(mount.readonly);
    member.api.delete(&path("web"));
    member.until_called(&driver, "NodeUnstageVolume", 1);
    member.until_nothing_is_mounted();
    member.scene.is_well();
}

#[tokio::test]
async fn a_pod_waits_for_a_volume_of_a_removed_type_and_other_pods_do_not() {
    require!(root);
    let member = Member::start(FakeApi::start(), |options| options).await;
    let rbd = json!({"rbd": {"monitors": ["m"], "image": "i"}});
    member.api.put(&path("own"), pod_with("own", &rbd));
    let words = "Unable to attach or mount volumes: unmounted volumes=[data], unattached volumes=[], failed to \
                 process volumes=[data]: failed to get Plugin from volumeSpec for volume \"data\" err=no volume \
                 plugin matched";
    member.until_event("FailedMount", words).await;
    member.api.put(CLAIM, pending());
    bind(&member.api, CLAIM, &json!({"cephfs": {"monitors": ["m"]}}));
    member.api.put(&path("web"), claiming("web"));
    member.until_event("FailedMount", "volume \"pv-1\" err=no volume plugin matched").await;
    let git = json!({"gitRepo": {"repository": "https://example.com/r.git"}});
    member.api.put(&path("git"), pod_with("git", &git));
    let words = "MountVolume.SetUp failed for volume \"data\" : git-repo volume plugin has been disabled";
    member.until_event("FailedMount", words).await;
    let kind = json!({"azureDisk": {"diskName": "d", "diskURI": "/d", "kind": "Shared"}});
    member.api.put(&path("shared"), pod_with("shared", &kind));
    member.until_event("FailedMount", "kind(Shared) is not supported in csi migration").await;
    member.api.put(&path("other"), pod("other"));
    member.until_running("other").await;
    member.scene.is_well();
}
