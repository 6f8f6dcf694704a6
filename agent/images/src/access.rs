//! Decides whether a pod may use an image that is already on the node (KEP-2535;
//! `pkg/kubelet/images/pullmanager`). The credentials of each pull are recorded in the kubelet's files, so
//! that kubelet and beelet can replace each other: `image_manager/pulling` while a pull runs,
//! `image_manager/pulled` afterwards.
//!
//! An image without a record counts as preloaded; therefore a pull that cannot be recorded is not started.
//! Must never write credentials, only their digests.

use std::{
    collections::{BTreeSet, HashMap},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use beelet_base::blocking::blocking;
use beelet_base::work::Work;
use beelet_codec::data;
use beelet_cri::Runtime;
use beelet_policy::images::credentials::{Credentials, OfPod, PulledRecord, Verdict, Verification};
use beelet_state::{ForeignFile, StateError};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::{
    pull_metrics::{Check, PullMetrics},
    reference,
};

/// Interval at which records of removed images are pruned.
const PRUNE: Duration = Duration::from_secs(300);
/// Prefix of the kubelet's file names.
const PREFIX: &str = "sha256-";
const API_VERSION: &str = "kubelet.config.k8s.io/v1beta1";

/// A file in the kubelet's format.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Typed<T> {
    kind: String,
    api_version: String,
    #[serde(flatten)]
    body: T,
}

#[derive(Serialize, Deserialize)]
struct Intent {
    image: String,
}

/// Records of the credentials that images were pulled with, and the policy for their use.
#[derive(Debug)]
pub struct Access {
    pulling: PathBuf,
    pulled: PathBuf,
    verification: Verification,
    /// Pulls under way, by image. Locked while their files are written or removed, so that map and files
    /// agree.
    under_way: tokio::sync::Mutex<HashMap<String, usize>>,
    /// Serializes changes of the record files.
    changing: Arc<Mutex<()>>,
    metrics: PullMetrics,
}

impl Access {
    /// Creates an `Access` whose files are in `image_manager` of the kubelet's folder.
    #[must_use]
    pub fn new(kubelet_dir: &Path, verification: Verification, metrics: PullMetrics) -> Self {
        let dir = kubelet_dir.join("image_manager");
        Self {
            pulling: dir.join("pulling"),
            pulled: dir.join("pulled"),
            verification,
            under_way: tokio::sync::Mutex::default(),
            changing: Arc::default(),
            metrics,
        }
    }

    pub(super) fn metrics(&self) -> &PullMetrics {
        &self.metrics
    }

    /// Returns true if a pod may use an image that is on the node, false if it must pull the image
    /// (`MustAttemptImagePull`). `of_pod`, the pod's credentials, is awaited only if they matter. An
    /// unreadable record grants access to no pod.
    pub(super) async fn is_granted(
        &self,
        image: &str,
        id: &str,
        of_pod: impl Future<Output = OfPod>,
    ) -> bool {
        let check = self.check(image, id, of_pod).await;
        self.metrics.checked(check);
        matches!(check, Check::PolicyAllows | Check::RecordFound)
    }

    async fn check(&self, image: &str, id: &str, of_pod: impl Future<Output = OfPod>) -> Check {
        let repository = reference::repository(image);
        // Checked first: with this answer the record does not matter.
        if !self.verification.is_needed(repository, true) {
            return Check::PolicyAllows;
        }
        let record = match self.record(id).await {
            Ok(record) => record,
            Err(error) => {
                warn!(image, %error, "cannot read the pull record of an image; pulling the image again");
                return Check::Error;
            }
        };
        let ours = record.is_some() || self.is_pulling(image).await;
        if !self.verification.is_needed(repository, ours) {
            return Check::PolicyAllows;
        }
        let Some(record) = record else { return Check::MustAuthenticate };
        if record.is_for_all(repository) {
            return Check::RecordFound;
        }
        match record.verdict(repository, &of_pod.await) {
            Verdict::Granted => Check::RecordFound,
            Verdict::GrantedBy(secret) => {
                let credentials = Credentials { kubernetes_secrets: vec![secret], ..Default::default() };
                self.record_pulled(image, id, credentials).await;
                Check::RecordFound
            }
            Verdict::MustPull => Check::MustAuthenticate,
        }
    }

    /// Records that a pull begins.
    ///
    /// # Errors
    /// The record cannot be written.
    pub(super) async fn begin(&self, image: &str) -> Result<(), StateError> {
        let mut under_way = self.under_way.lock().await;
        let count = under_way.get(image).copied().unwrap_or(0);
        if count == 0 {
            let (file, body) = (file(&self.pulling, image), Intent { image: image.to_owned() });
            blocking("recording that a pull begins", move || write(&file, "ImagePullIntent", body)).await?;
        }
        under_way.insert(image.to_owned(), count + 1);
        self.count_records().await;
        Ok(())
    }

    /// Records that a pull ended; `pulled` holds the image's id and the credentials used if the pull
    /// succeeded.
    pub(super) async fn end(&self, image: &str, pulled: Option<(&str, Credentials)>) {
        if let Some((id, credentials)) = pulled
            && !self.record_pulled(image, id, credentials).await
        {
            // The intent stays, so that the image does not count as preloaded.
            return;
        }
        let mut under_way = self.under_way.lock().await;
        match under_way.get(image).copied() {
            Some(count) if count > 1 => drop(under_way.insert(image.to_owned(), count - 1)),
            Some(_) => {
                under_way.remove(image);
                remove(file(&self.pulling, image)).await;
            }
            None => {}
        }
        self.count_records().await;
    }

    /// Sets the gauges of the records on the disk.
    async fn count_records(&self) {
        let folders = [self.pulling.clone(), self.pulled.clone()];
        let count = move || folders.map(|folder| records(&folder).count());
        let [pulling, pulled] = blocking("counting the records of pulls", count).await;
        self.metrics.recorded(pulling, pulled);
    }

    /// Records that an image was pulled with these credentials. Returns false if the record cannot be
    /// written.
    async fn record_pulled(&self, image: &str, id: &str, credentials: Credentials) -> bool {
        let (path, changing) = (file(&self.pulled, id), Arc::clone(&self.changing));
        let (repository, id) = (reference::repository(image).to_owned(), id.to_owned());
        let recorded = blocking("recording a pull", move || {
            let _one_at_a_time = changing.lock().unwrap_or_else(PoisonError::into_inner);
            let now = Timestamp::now();
            let now = Timestamp::from_second(now.as_second()).unwrap_or(now);
            let known = read(&path).ok().flatten();
            let new = known.is_none();
            let mut record = known.unwrap_or_else(|| PulledRecord::new(&id, now));
            let changed = record.merge(&repository, credentials, now);
            if changed || new { write(&path, "ImagePulledRecord", record) } else { Ok(()) }
        });
        let recorded = recorded.await;
        if let Err(error) = &recorded {
            warn!(image, %error, "cannot record the credentials that an image was pulled with");
        }
        recorded.is_ok()
    }

    async fn record(&self, id: &str) -> Result<Option<PulledRecord>, StateError> {
        let path = file(&self.pulled, id);
        blocking("reading the record of a pull", move || read(&path)).await
    }

    /// Returns true if the image is being pulled, or was when an earlier instance stopped.
    async fn is_pulling(&self, image: &str) -> bool {
        if self.under_way.lock().await.contains_key(image) {
            return true;
        }
        let path = file(&self.pulling, image);
        blocking("looking for a pull", move || path.path().exists()).await
    }

    /// Completes the records of pulls that an earlier instance started but did not see end, and prunes
    /// records of removed images, until `cancel`.
    pub fn keep(self: Arc<Self>, runtime: Runtime, cancel: CancellationToken) -> Work {
        Box::pin(async move {
            let mut ticks = interval(PRUNE);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            loop {
                tokio::select! {
                    _ = ticks.tick() => {}
                    () = cancel.cancelled() => return,
                }
                tokio::select! {
                    () = self.settle(&runtime) => {}
                    () = cancel.cancelled() => return,
                }
            }
        })
    }

    async fn settle(&self, runtime: &Runtime) {
        let began = Timestamp::now();
        let folders = [self.pulling.clone(), self.pulled.clone()];
        let any =
            blocking("looking for records of pulls", move || folders.iter().any(|folder| has_files(folder)));
        if !any.await {
            return;
        }
        let Ok(images) = runtime.images.list().await else { return };
        for image in &images {
            for name in image.repo_tags.iter().chain(&image.repo_digests) {
                let under_way = self.under_way.lock().await.contains_key(name);
                let left = !under_way && self.is_pulling(name).await;
                if left && self.record_pulled(name, &image.id, Credentials::default()).await {
                    remove(file(&self.pulling, name)).await;
                }
            }
        }
        let here: BTreeSet<String> = images.into_iter().map(|image| image.id).collect();
        let (dir, changing) = (self.pulled.clone(), Arc::clone(&self.changing));
        blocking("removing records of deleted images", move || {
            let _one_at_a_time = changing.lock().unwrap_or_else(PoisonError::into_inner);
            prune(&dir, &here, began);
        })
        .await;
        self.count_records().await;
    }
}

/// Returns the records in a folder.
fn records(dir: &Path) -> impl Iterator<Item = std::fs::DirEntry> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(PREFIX))
}

fn has_files(dir: &Path) -> bool {
    std::fs::read_dir(dir).is_ok_and(|mut entries| entries.next().is_some())
}

fn prune(dir: &Path, here: &BTreeSet<String>, began: Timestamp) {
    for entry in records(dir) {
        let file = ForeignFile::new(entry.path());
        let record = read(&file).ok().flatten();
        let gone = record
            .is_some_and(|record| !here.contains(&record.image_ref) && record.last_updated_time < began);
        if gone && let Err(error) = file.remove() {
            warn!(path = %file.path().display(), %error, "cannot remove the pull record of a deleted image");
        }
    }
}

/// Path of a record, named as by the kubelet: `sha256-` and the digest of the image or id.
fn file(dir: &Path, of: &str) -> ForeignFile {
    let digest: String = Sha256::digest(of).iter().map(|byte| format!("{byte:02x}")).collect();
    ForeignFile::new(dir.join(format!("{PREFIX}{digest}")))
}

/// Reads a record; returns None if the file is missing or was not written by a kubelet.
fn read(file: &ForeignFile) -> Result<Option<PulledRecord>, StateError> {
    let Some(bytes) = file.read()? else { return Ok(None) };
    let typed = data::from_json::<Typed<PulledRecord>>(&bytes);
    if let Err(error) = &typed {
        warn!(path = %file.path().display(), %error, "ignoring a pull record that cannot be parsed");
    }
    Ok(typed.ok().filter(|typed| typed.kind == "ImagePulledRecord").map(|typed| typed.body))
}

fn write(file: &ForeignFile, kind: &'static str, body: impl Serialize) -> Result<(), StateError> {
    let typed = Typed { kind: kind.to_owned(), api_version: API_VERSION.to_owned(), body };
    // Serializing plain structs of strings and maps cannot fail.
    file.replace(&serde_json::to_vec(&typed).unwrap_or_default())?;
    file.settle()
}

async fn remove(file: ForeignFile) {
    if let Err(error) = blocking("removing the record of a pull", move || file.remove()).await {
        warn!(%error, "cannot remove the record of a pull that has ended");
    }
}

#[cfg(test)]
mod tests {
    use std::future::ready;

    use beelet_policy::images::credentials::{Policy, PullSecret};

    use super::*;

    const APP: &str = "registry.test/app:1";

    fn access(dir: &Path, policy: Policy) -> Access {
        Access::new(dir, Verification { policy, allowlist: Vec::new() }, PullMetrics::default())
    }

    fn secret(hash: &str) -> PullSecret {
        PullSecret {
            namespace: "shop".to_owned(),
            name: "s".to_owned(),
            uid: String::new(),
            credential_hash: hash.to_owned(),
        }
    }

    fn with(hash: &str) -> Credentials {
        Credentials { kubernetes_secrets: vec![secret(hash)], ..Default::default() }
    }

    async fn granted(access: &Access, image: &str, hashes: &[&str]) -> bool {
        let secrets =
            hashes.iter().map(|hash| PullSecret { name: (*hash).to_owned(), ..secret(hash) }).collect();
        access.is_granted(image, "sha256:1", ready(OfPod { secrets, account: None })).await
    }

    #[tokio::test]
    async fn what_was_pulled_with_a_secret_is_for_those_who_have_it_over_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let first = access(dir.path(), Policy::NeverVerifyPreloadedImages);
        assert!(granted(&first, APP, &[]).await, "no pull was recorded");
        first.begin(APP).await.unwrap();
        assert!(!granted(&first, APP, &["h"]).await, "its pull is under way");
        first.end(APP, Some(("sha256:1", with("h")))).await;
        let second = access(dir.path(), Policy::NeverVerifyPreloadedImages);
        assert!(granted(&second, APP, &["h"]).await);
        assert!(granted(&second, "registry.test/app:2", &["h"]).await, "the same image by another tag");
        assert!(!granted(&second, APP, &["other"]).await);
        assert!(!granted(&second, "other.test/app", &["h"]).await);
        assert!(granted(&access(dir.path(), Policy::NeverVerify), APP, &[]).await);
        let all = Credentials { node_pods_accessible: true, ..Default::default() };
        second.begin(APP).await.unwrap();
        second.end(APP, Some(("sha256:1", all))).await;
        assert!(granted(&second, APP, &[]).await);
    }

    #[tokio::test]
    async fn a_failed_pull_leaves_no_record() {
        let dir = tempfile::tempdir().unwrap();
        let access = access(dir.path(), Policy::NeverVerifyPreloadedImages);
        let files =
            |folder: &str| std::fs::read_dir(dir.path().join("image_manager").join(folder)).unwrap().count();
        access.begin(APP).await.unwrap();
        access.begin(APP).await.unwrap();
        access.end(APP, None).await;
        assert_eq!(files("pulling"), 1, "another pull of the image is under way");
        access.end(APP, None).await;
        assert_eq!(files("pulling"), 0);
        assert!(granted(&access, APP, &[]).await);
    }

    #[tokio::test]
    async fn files_have_the_kubelets_names_and_form() {
        let dir = tempfile::tempdir().unwrap();
        let access = access(dir.path(), Policy::AlwaysVerify);
        assert!(!granted(&access, APP, &[]).await);
        access.begin("a").await.unwrap();
        let digest = "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb";
        let folder = dir.path().join("image_manager");
        let intent = std::fs::read_to_string(folder.join(format!("pulling/sha256-{digest}"))).unwrap();
        assert_eq!(
            intent,
            r#"{"kind":"ImagePullIntent","apiVersion":"kubelet.config.k8s.io/v1beta1","image":"a"}"#
        );
        access.end("a", Some(("a", with("h")))).await;
        let record = std::fs::read_to_string(folder.join(format!("pulled/sha256-{digest}"))).unwrap();
        let start =
            r#"{"kind":"ImagePulledRecord","apiVersion":"kubelet.config.k8s.io/v1beta1","lastUpdatedTime":""#;
        assert!(
            record.starts_with(start) && record.contains(r#""imageRef":"a","credentialMapping":{"a":{"#),
            "{record}"
        );
        prune(&folder.join("pulled"), &["a".to_owned()].into(), Timestamp::MAX);
        assert!(folder.join(format!("pulled/sha256-{digest}")).exists());
        prune(&folder.join("pulled"), &BTreeSet::new(), Timestamp::MAX);
        assert!(!folder.join(format!("pulled/sha256-{digest}")).exists());
    }
}
