//! Publishes a volume to a pod: waits until the volume is attached, then makes the driver stage and publish
//! it.

use std::{collections::BTreeMap, path::PathBuf, sync::Arc, time::Duration};

use beelet_base::{
    blocking::blocking,
    folder::{PRIVATE, make_folder},
};
use beelet_model::storage::{Published, Storage};
use beelet_policy::{
    pod::references::TokenReference,
    volumes::{
        claims,
        csi::{self as policy, Ownership},
    },
};
use beelet_proto::csi::{
    NodePublishVolumeRequest, NodeStageVolumeRequest, VolumeCapability,
    volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume, access_mode::Mode},
};
use k8s_openapi::{
    ByteString,
    api::{
        core::v1::{CSIPersistentVolumeSource, CSIVolumeSource, Node, PersistentVolume, Pod},
        storage::v1::CSIDriver,
    },
};
use tokio::time::timeout;

use crate::{
    Csi, Error, VolumeId,
    driver::{Abilities, Driver},
    folders::one_part,
    lock,
    records::{self, VolumeRecord, digest},
};

/// Time that a volume may take to be attached before the pod's worker gets an error.
const ATTACH: Duration = Duration::from_secs(120);
/// Requested lifetime of a token in seconds if the driver names none.
const TOKEN_SECONDS: i64 = 3600;
/// Key of the pod's tokens in the volume's context or secrets.
const TOKENS: &str = "csi.storage.k8s.io/serviceAccount.tokens";

/// The definition of a volume.
#[derive(Clone, Copy, Debug)]
pub enum Source<'a> {
    /// Inline volume (`csi:` in the pod's spec).
    Inline(&'a CSIVolumeSource),
    /// PersistentVolume of a claim.
    Persistent(&'a PersistentVolume, &'a CSIPersistentVolumeSource),
}

/// A volume that a pod needs.
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'a> {
    /// Pod that needs the volume.
    pub pod: &'a Pod,
    /// Name of the PersistentVolume, or of the volume in the pod.
    pub name: &'a str,
    /// Definition of the volume.
    pub source: Source<'a>,
    /// The pod only reads the volume.
    pub read_only: bool,
    /// Pod's group for volumes.
    pub group: Option<i64>,
    /// The pod has the volume already, which is published again unless it was released in the meantime.
    pub again: bool,
}

/// Facts about an inline or persistent volume that the driver needs.
pub(crate) struct Facts<'a> {
    pub(crate) wanted: Wanted<'a>,
    pub(crate) id: VolumeId,
    pub(crate) object: Option<CSIDriver>,
    pub(crate) abilities: Abilities,
    /// Parameters of the attachment.
    pub(crate) publish_context: BTreeMap<String, String>,
}

impl Facts<'_> {
    fn persistent(&self) -> Option<(&PersistentVolume, &CSIPersistentVolumeSource)> {
        match self.wanted.source {
            Source::Inline(_) => None,
            Source::Persistent(volume, source) => Some((volume, source)),
        }
    }

    fn file_system(&self) -> &str {
        let of = match self.wanted.source {
            Source::Inline(source) => source.fs_type.as_deref(),
            Source::Persistent(_, source) => source.fs_type.as_deref(),
        };
        of.unwrap_or_default()
    }

    fn is_block(&self) -> bool {
        let spec = self.persistent().and_then(|(volume, _)| volume.spec.as_ref());
        spec.and_then(|spec| spec.volume_mode.as_deref()) == Some("Block")
    }

    pub(crate) fn record(&self, node: &str) -> VolumeRecord {
        let inline = self.persistent().is_none();
        VolumeRecord {
            driver_name: self.id.driver.clone(),
            volume_handle: self.id.handle.clone(),
            spec_volume: self.wanted.name.to_owned(),
            node_name: node.to_owned(),
            attachment: format!("csi-{}", digest(&[&self.id.handle, &self.id.driver, node])),
            volume_lifecycle_mode: if inline { "Ephemeral" } else { "Persistent" }.to_owned(),
            block: self.is_block(),
        }
    }

    fn modes(&self) -> Option<&[String]> {
        let (volume, _) = self.persistent()?;
        Some(volume.spec.as_ref().and_then(|spec| spec.access_modes.as_deref()).unwrap_or_default())
    }

    fn context(&self) -> BTreeMap<String, String> {
        let of = match self.wanted.source {
            Source::Inline(source) => &source.volume_attributes,
            Source::Persistent(_, source) => &source.volume_attributes,
        };
        of.clone().unwrap_or_default()
    }

    pub(crate) fn capability(&self) -> VolumeCapability {
        let mode = self.modes().and_then(<[String]>::first).map_or("ReadWriteOnce", String::as_str);
        let options = self.persistent().and_then(|(volume, _)| volume.spec.as_ref()?.mount_options.clone());
        let group = self.wanted.group.filter(|_| self.abilities.gives_to_group);
        let mount = MountVolume {
            fs_type: self.file_system().to_owned(),
            mount_flags: options.unwrap_or_default(),
            volume_mount_group: group.map(|group| group.to_string()).unwrap_or_default(),
        };
        let access =
            if self.is_block() { AccessType::Block(BlockVolume {}) } else { AccessType::Mount(mount) };
        VolumeCapability {
            access_type: Some(access),
            access_mode: Some(AccessMode {
                mode: access_mode(mode, self.abilities.knows_single_pods).into(),
            }),
        }
    }

    fn gives_to_group(&self) -> bool {
        let of = Ownership {
            driver: self.object.as_ref(),
            file_system: self.file_system(),
            modes: self.modes(),
            read_only: self.wanted.read_only,
        };
        self.wanted.group.is_some()
            && !self.is_block()
            && !self.abilities.gives_to_group
            && policy::is_given_to_group(&of)
    }
}

/// Returns CSI's access mode. A driver that does not distinguish single pods gets the mode of single nodes.
fn access_mode(mode: &str, knows_single_pods: bool) -> Mode {
    match mode {
        "ReadOnlyMany" => Mode::MultiNodeReaderOnly,
        "ReadWriteMany" => Mode::MultiNodeMultiWriter,
        "ReadWriteOncePod" if knows_single_pods => Mode::SingleNodeSingleWriter,
        "ReadWriteOnce" if knows_single_pods => Mode::SingleNodeMultiWriter,
        "ReadWriteOnce" | "ReadWriteOncePod" => Mode::SingleNodeWriter,
        _ => Mode::Unknown,
    }
}

impl Csi {
    /// Publishes a volume to a pod. Idempotent: a repeated call calls the driver again.
    ///
    /// # Errors
    /// The volume is not attached, or the driver fails.
    pub async fn publish(&self, storage: &dyn Storage, wanted: Wanted<'_>) -> Result<Published, Error> {
        let uid = wanted.pod.metadata.uid.clone().unwrap_or_default();
        let (driver_name, handle, inline) = match wanted.source {
            Source::Inline(source) => {
                (source.driver.as_str(), format!("csi-{}", digest(&[&uid, wanted.name])), true)
            }
            Source::Persistent(_, source) => (source.driver.as_str(), source.volume_handle.clone(), false),
        };
        if handle.is_empty() || !is_one_part(&one_part(wanted.name)) {
            return Err(Error::Unmet(format!(
                "{:?} is not the name of a volume, or the volume has no handle",
                wanted.name
            )));
        }
        let driver = self.driver(driver_name)?;
        let id = VolumeId::new(driver_name, &handle);
        let object = storage.driver(driver_name).await;
        let object = object.map_err(Error::asked(format!("the CSIDriver {driver_name}")))?;
        policy::check_lifecycle(driver_name, object.as_ref(), inline)?;
        let mut publish_context = BTreeMap::new();
        if !inline && policy::is_attached(object.as_ref()) {
            publish_context = attached(self, storage, &id, wanted.name, &uid).await?;
        }
        let abilities = driver.abilities().await?;
        let facts = Facts { wanted, id, object, abilities, publish_context };
        let _held = self.0.locks.hold(&facts.id).await;
        check_no_other_pod(self, &facts, &uid).await?;
        let staged = if facts.abilities.stages { stage(self, storage, &driver, &facts).await? } else { None };
        publish_staged(self, storage, &driver, &facts, staged, &uid).await
    }
}

/// Refuses a volume that is for one pod at a time while another pod has it. The caller holds the volume's
/// lock: the other pod's record is on disk before the lock is released.
async fn check_no_other_pod(csi: &Csi, facts: &Facts<'_>, uid: &str) -> Result<(), Error> {
    if !facts.persistent().is_some_and(|(volume, _)| claims::is_for_one_pod(volume)) {
        return Ok(());
    }
    let pods = csi.0.folders.pods_dir.clone();
    let all = blocking("finding the pods of a volume", move || records::published(&pods)).await;
    let pods = all.iter().filter(|(.., one)| VolumeId::of(one) == facts.id);
    if is_anothers(pods.map(|(pod, ..)| pod.as_str()), uid) {
        return Err(Error::Unmet(
            "volume uses the ReadWriteOncePod access mode and is already in use by another pod".to_owned(),
        ));
    }
    Ok(())
}

/// Waits until a controller has attached the volume. Returns the attachment's parameters for the driver.
async fn attached(
    csi: &Csi,
    storage: &dyn Storage,
    id: &VolumeId,
    volume: &str,
    uid: &str,
) -> Result<BTreeMap<String, String>, Error> {
    let name = id.unique_name();
    // Reported before the volume is used, so that no controller detaches it in the meantime.
    csi.0.in_use.use_by(&name, Some(uid));
    let mut node = storage.node();
    let is_attached = |node: &Option<Arc<Node>>| {
        node.as_ref().is_some_and(|node| policy::attached_device(node, &name).is_some())
    };
    match timeout(ATTACH, node.wait_for(is_attached)).await {
        Ok(Ok(_)) => {}
        Ok(Err(_)) | Err(_) => {
            return Err(Error::Unmet(format!(
                "Volume not attached according to node status for volume {volume:?} (UniqueName: {name:?})"
            )));
        }
    }
    let attachment = format!("csi-{}", digest(&[&id.handle, &id.driver, &csi.0.node]));
    let found = storage.attachment(&attachment).await;
    let found = found.map_err(Error::asked(format!(
        "volume {} has GET error for volume attachment {attachment}",
        id.handle
    )))?;
    Ok(policy::attached(&found, &id.handle)?)
}

/// Stages a volume once. Returns the volume's path.
async fn stage(
    csi: &Csi,
    storage: &dyn Storage,
    driver: &Driver,
    facts: &Facts<'_>,
) -> Result<Option<PathBuf>, Error> {
    let Some((_, source)) = facts.persistent() else { return Ok(None) };
    let folder = csi.0.folders.staging_folder(&facts.id);
    let record = VolumeRecord {
        node_name: String::new(),
        attachment: String::new(),
        volume_lifecycle_mode: String::new(),
        ..facts.record(&csi.0.node)
    };
    let path = csi.0.folders.staging_path(&record);
    if lock(&csi.0.staged).contains(&facts.id) {
        return Ok(Some(path));
    }
    let mut secrets = BTreeMap::new();
    if let Some(of) = &source.node_stage_secret_ref {
        let (namespace, name) =
            (of.namespace.as_deref().unwrap_or_default(), of.name.as_deref().unwrap_or_default());
        secrets = secret(storage, "NodeStageSecretRef", namespace, name).await?;
    }
    let (place, of) = (path.clone(), folder.clone());
    let write = move || {
        make_folder(&of, PRIVATE)?;
        let was_there = VolumeRecord::read(&of)?.is_some();
        record.write(&of)?;
        make_folder(&place, PRIVATE)?;
        Ok::<_, Error>(was_there)
    };
    let was_there = blocking("recording a staged volume", write).await?;
    let request = NodeStageVolumeRequest {
        volume_id: facts.id.handle.clone(),
        publish_context: facts.publish_context.clone().into_iter().collect(),
        staging_target_path: path.to_string_lossy().into_owned(),
        volume_capability: Some(facts.capability()),
        secrets: secrets.into_iter().collect(),
        volume_context: facts.context().into_iter().collect(),
    };
    if let Err(error) = driver.stage(request).await {
        // An earlier instance of the agent may have staged the volume, and other pods may have it.
        if error.is_final() && !was_there {
            forget_failed(folder, path).await;
        }
        return Err(error);
    }
    lock(&csi.0.staged).insert(facts.id.clone());
    Ok(Some(path))
}

/// Publishes a volume.
async fn publish_staged(
    csi: &Csi,
    storage: &dyn Storage,
    driver: &Driver,
    facts: &Facts<'_>,
    staged: Option<PathBuf>,
    uid: &str,
) -> Result<Published, Error> {
    let Facts { wanted, id, object, .. } = facts;
    let inline = facts.persistent().is_none();
    let folder = records::folder_of(&csi.0.folders.pods_dir.join(uid)).join(one_part(wanted.name));
    let record = facts.record(&csi.0.node);
    let path = csi.0.folders.publish_path(&record, uid);
    let mut secrets = match wanted.source {
        Source::Inline(source) => match &source.node_publish_secret_ref {
            Some(of) => {
                let namespace = wanted.pod.metadata.namespace.as_deref().unwrap_or_default();
                secret(storage, "NodePublishSecretRef", namespace, &of.name).await?
            }
            None => BTreeMap::new(),
        },
        Source::Persistent(_, source) => match &source.node_publish_secret_ref {
            Some(of) => {
                let text = |text: &'_ Option<String>| text.clone().unwrap_or_default();
                secret(storage, "NodePublishSecretRef", &text(&of.namespace), &text(&of.name)).await?
            }
            None => BTreeMap::new(),
        },
    };
    let mut context = facts.context();
    if policy::wants_pod(object.as_ref()) {
        context.extend(policy::pod_context(wanted.pod, inline));
    }
    if let Some(tokens) = tokens(storage, wanted.pod, object.as_ref()).await? {
        let secret =
            object.as_ref().is_some_and(|one| one.spec.service_account_token_in_secrets == Some(true));
        if secret { &mut secrets } else { &mut context }.insert(TOKENS.to_owned(), tokens);
    }
    let (place, target, again) = (folder.clone(), path.clone(), wanted.again);
    let write = move || {
        if again && VolumeRecord::read(&place)?.is_none() {
            return Err(Error::Unmet("the volume was released in the meantime".to_owned()));
        }
        make_folder(&place, PRIVATE)?;
        record.write(&place)?;
        make_folder(target.parent().unwrap_or(&target), PRIVATE)?;
        Ok(target.exists())
    };
    let was_there = blocking("recording a published volume", write).await?;
    let request = NodePublishVolumeRequest {
        volume_id: id.handle.clone(),
        publish_context: facts.publish_context.clone().into_iter().collect(),
        staging_target_path: staged.map(|path| path.to_string_lossy().into_owned()).unwrap_or_default(),
        target_path: path.to_string_lossy().into_owned(),
        volume_capability: Some(facts.capability()),
        readonly: wanted.read_only,
        secrets: secrets.into_iter().collect(),
        volume_context: context.into_iter().collect(),
    };
    if let Err(error) = driver.publish(request).await {
        // A volume that the pod had before stays.
        if error.is_final() && !was_there {
            forget_failed(folder, path).await;
        }
        return Err(error);
    }
    Ok(Published { path, give_to_group: facts.gives_to_group() })
}

/// Removes the record of a volume that certainly was not staged or published. A folder that cannot be removed
/// counts as done.
async fn forget_failed(folder: PathBuf, path: PathBuf) {
    let remove = move || {
        let _ = std::fs::remove_dir(&path);
        if !path.exists() {
            let _ = VolumeRecord::remove(&folder);
        }
    };
    blocking("removing the record of a volume", remove).await;
}

/// Returns true if the pods that have a volume include another pod but not the pod with this UID, which would
/// keep the volume.
fn is_anothers<'p>(mut having: impl Iterator<Item = &'p str> + Clone, uid: &str) -> bool {
    !having.clone().any(|pod| pod == uid) && having.next().is_some()
}

/// Returns true if a name, which comes from a server, is a single part of a path.
fn is_one_part(name: &str) -> bool {
    !matches!(name, "" | "." | "..") && !name.contains(['/', '\0'])
}

/// Reads a Secret that a volume names.
pub(crate) async fn secret(
    storage: &dyn Storage,
    what: &str,
    namespace: &str,
    name: &str,
) -> Result<BTreeMap<String, String>, Error> {
    let found = storage.secret(namespace, name).await;
    let found = found.map_err(Error::asked(format!("fetching {what} {namespace}/{name} failed")))?;
    let data = found.data.unwrap_or_default().into_iter();
    Ok(data.map(|(key, ByteString(value))| (key, String::from_utf8_lossy(&value).into_owned())).collect())
}

/// Requests the pod's tokens that a driver asks for. Returns them by audience in the kubelet's format.
async fn tokens(
    storage: &dyn Storage,
    pod: &Pod,
    driver: Option<&CSIDriver>,
) -> Result<Option<String>, Error> {
    let requests = driver.and_then(|driver| driver.spec.token_requests.as_deref()).unwrap_or_default();
    if requests.is_empty() {
        return Ok(None);
    }
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    let account = pod.spec.as_ref().and_then(|spec| spec.service_account_name.clone()).unwrap_or_default();
    let mut found = serde_json::Map::new();
    for request in requests {
        let of = TokenReference {
            namespace: text(&pod.metadata.namespace),
            service_account: account.clone(),
            pod: text(&pod.metadata.name),
            uid: text(&pod.metadata.uid),
            audience: request.audience.clone(),
            expiration_seconds: request.expiration_seconds.unwrap_or(TOKEN_SECONDS),
        };
        let status = storage.token(&of).await.map_err(Error::asked("a token for the driver"))?;
        let status = serde_json::json!({"token": status.token, "expirationTimestamp": status.expires});
        found.insert(request.audience.clone(), status);
    }
    Ok(Some(serde_json::Value::Object(found).to_string()))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::{Value, json};

    use beelet_model::storage::VolumesInUse;

    use super::*;
    use crate::Metrics;

    /// Writes the record of a volume that a pod has.
    fn published(pods: &Path, uid: &str, handle: &str) {
        let folder = records::folder_of(&pods.join(uid)).join("pv");
        std::fs::create_dir_all(&folder).unwrap();
        let record = VolumeRecord {
            driver_name: "d.example".to_owned(),
            volume_handle: handle.to_owned(),
            ..VolumeRecord::default()
        };
        record.write(&folder).unwrap();
    }

    #[tokio::test]
    async fn a_volume_for_one_pod_is_refused_while_another_has_it() {
        let dir = tempfile::tempdir().unwrap();
        let pods = dir.path().join("pods");
        let csi = Csi::open(
            "n1",
            (&dir.path().join("kubelet"), &pods),
            VolumesInUse::default(),
            Metrics::default(),
        );
        let check = async |modes: Value, expected: bool| {
            let source = json!({"driver": "d.example", "volumeHandle": "h"});
            let volume: PersistentVolume =
                serde_json::from_value(json!({"spec": {"csi": source, "accessModes": modes}})).unwrap();
            let source = volume.spec.as_ref().unwrap().csi.as_ref().unwrap();
            let (pod, source) = (Pod::default(), Source::Persistent(&volume, source));
            let wanted =
                Wanted { pod: &pod, name: "pv", source, read_only: false, group: None, again: false };
            let facts = Facts {
                wanted,
                id: VolumeId::new("d.example", "h"),
                object: None,
                abilities: Abilities::default(),
                publish_context: BTreeMap::new(),
            };
            let done = check_no_other_pod(&csi, &facts, "u1").await;
            assert_eq!(done.is_ok(), expected, "{modes}: {done:?}");
        };
        let alone = json!(["ReadWriteOncePod"]);
        check(alone.clone(), true).await;
        published(&pods, "u2", "another");
        check(alone.clone(), true).await;
        published(&pods, "u3", "h");
        check(alone.clone(), false).await;
        check(json!(["ReadWriteOnce"]), true).await;
        check(json!(["ReadWriteOncePod", "ReadWriteMany"]), true).await;
        published(&pods, "u1", "h");
        check(alone, true).await;
    }
}
