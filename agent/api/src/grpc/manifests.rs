//! Changing what should run here: manifests put into the static pod folder, and taken out of it. What comes of it is
//! the manifest source's and the pods' business, as if somebody had done it by hand.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use beelet_proto::beelet as proto;
use beelet_proto::beelet::apply_response::Result as Applied;
use beelet_proto::beelet::manifests_server::{Manifests, ManifestsServer};
use tokio::sync::{SetOnce, mpsc, watch};
use tonic::{Request, Response, Status};

use beelet_codec::document::Limits;
use beelet_manifests::Object;
use beelet_model::desired::Desired;
use beelet_model::request::Request as PodRequest;
use beelet_model::table::PodName;

/// How long an answer waits for the new manifest to be read.
const SEEN: Duration = Duration::from_secs(10);
/// How long it waits, right after the agent's start, until there is somebody to read it: a runtime needs a moment to answer.
const STARTED: Duration = Duration::from_secs(10);
/// What ends the name of a manifest that is kept beside; no such file is a manifest.
const KEPT: &str = ".bak";

/// What is there only when the node runs.
#[derive(Debug)]
pub struct Running {
    /// What the manifests add up to.
    pub desired: watch::Receiver<Arc<Desired>>,
    /// The way to the pods.
    pub requests: mpsc::Sender<PodRequest>,
}

/// The service, to be added to the agent's. `folder` is the static pod path; `running` is filled when the node runs.
#[must_use]
pub fn service(
    folder: Option<PathBuf>,
    node_name: String,
    running: Arc<SetOnce<Running>>,
) -> ManifestsServer<impl Manifests> {
    ManifestsServer::new(Service { folder, node_name, running })
        .max_decoding_message_size(2 * Limits::MANIFEST.bytes)
}

#[derive(Debug)]
struct Service {
    folder: Option<PathBuf>,
    node_name: String,
    running: Arc<SetOnce<Running>>,
}

/// What a manifest is about.
#[derive(Clone, Debug, PartialEq, Eq)]
struct About {
    kind: &'static str,
    namespace: String,
    /// As it is written.
    name: String,
}

impl About {
    fn of(object: &Object) -> Self {
        let metadata = object.metadata();
        let kind = object.kind();
        let namespace = match kind {
            "PriorityClass" | "RuntimeClass" => String::new(),
            _ => metadata.namespace.clone().unwrap_or_else(|| "default".to_owned()),
        };
        Self { kind, namespace, name: metadata.name.clone().unwrap_or_default() }
    }

    /// The name of a file of its own: `web.yaml`, `shop_web.yaml`, `configmap.conf.yaml`.
    fn file_name(&self) -> String {
        let namespace = match self.namespace.as_str() {
            "" | "default" => String::new(),
            namespace => format!("{namespace}_"),
        };
        let kind = if self.kind == "Pod" { String::new() } else { format!("{}.", self.kind.to_lowercase()) };
        format!("{kind}{namespace}{}.yaml", self.name)
    }
}

#[tonic::async_trait]
impl Manifests for Service {
    async fn apply(
        &self,
        request: Request<proto::ApplyRequest>,
    ) -> Result<Response<proto::ApplyResponse>, Status> {
        let request = request.into_inner();
        let read = beelet_manifests::read(&request.text, &request.name);
        let read = read.map_err(|error| Status::invalid_argument(error.to_string()))?;
        let about = About::of(&read.object);
        let running = self.running().await?;
        let folder = self.folder()?;
        let known = running.desired.borrow().file(about.kind, &about.namespace, &self.on_node(&about));
        let path = known.clone().unwrap_or_else(|| folder.join(about.file_name()));
        let (target, text, dry_run) = (path.clone(), request.text, request.dry_run);
        let is_known = known.is_some();
        let put = tokio::task::spawn_blocking(move || put(&target, &text, is_known, dry_run));
        let result = put.await.map_err(|e| Status::internal(e.to_string()))??;
        let mut warnings = read.warnings;
        if result != Applied::Unchanged && !request.dry_run {
            warnings.extend(self.wait_until_seen(running, &about, &path).await);
        }
        Ok(Response::new(proto::ApplyResponse {
            result: result.into(),
            kind: about.kind.to_owned(),
            namespace: about.namespace,
            name: about.name,
            file: path.display().to_string(),
            warnings,
        }))
    }

    async fn delete(
        &self,
        request: Request<proto::DeleteRequest>,
    ) -> Result<Response<proto::DeleteResponse>, Status> {
        let request = request.into_inner();
        let running = self.running().await?;
        let (path, name, uid) = self.find(&running.desired.borrow(), &request)?;
        if let (Some(seconds), false) = (request.grace_seconds, uid.is_empty()) {
            let grace = Some(Duration::from_secs(seconds));
            let (reason, message) = ("Deleted".to_owned(), "deleted on request".to_owned());
            let end = PodRequest::Fail { uid: uid.clone(), reason, message, grace };
            running.requests.send(end).await.map_err(|_| Status::unavailable("the agent stops"))?;
        }
        let from = path.clone();
        let take = tokio::task::spawn_blocking(move || take_out(&from, request.keep_manifest));
        let kept = take.await.map_err(|e| Status::internal(e.to_string()))??;
        Ok(Response::new(proto::DeleteResponse {
            file: path.display().to_string(),
            kept: kept.map(|kept| kept.display().to_string()).unwrap_or_default(),
            name,
            uid,
        }))
    }
}

impl Service {
    async fn running(&self) -> Result<&Running, Status> {
        tokio::time::timeout(STARTED, self.running.wait()).await.map_err(|_| {
            Status::unavailable(format!(
                "the container runtime has not answered yet (waited {} s): see `beelet doctor`, then try again",
                STARTED.as_secs()
            ))
        })
    }

    #[allow(clippy::result_large_err)] // tonic's own error type
    fn folder(&self) -> Result<&Path, Status> {
        let Some(folder) = &self.folder else {
            return Err(Status::failed_precondition(
                "staticPodPath is not set: there is no folder for manifests",
            ));
        };
        if folder.is_file() {
            return Err(Status::failed_precondition(format!(
                "staticPodPath is the file {}, not a folder: edit it",
                folder.display()
            )));
        }
        Ok(folder)
    }

    /// What an object is called here: a pod gets the node's name.
    fn on_node(&self, about: &About) -> String {
        match about.kind {
            "Pod" => format!("{}-{}", about.name, self.node_name.to_lowercase()),
            _ => about.name.clone(),
        }
    }

    /// The manifest of an object, its whole name, and a pod's UID.
    #[allow(clippy::result_large_err)] // tonic's own error type
    fn find(
        &self,
        desired: &Desired,
        request: &proto::DeleteRequest,
    ) -> Result<(PathBuf, String, String), Status> {
        let namespace = match request.namespace.as_str() {
            "" => "default",
            namespace => namespace,
        };
        let suffixed = format!("{}-{}", request.name, self.node_name.to_lowercase());
        let names = if request.kind == "Pod" { vec![&request.name, &suffixed] } else { vec![&request.name] };
        for name in names {
            if let Some(path) = desired.file(&request.kind, namespace, name) {
                let key = PodName { namespace: namespace.to_owned(), name: name.clone() };
                let pod = desired.pods.get(&key).filter(|_| request.kind == "Pod");
                let uid = pod.and_then(|pod| pod.metadata.uid.clone()).unwrap_or_default();
                return Ok((path, name.clone(), uid));
            }
        }
        let (kind, name) = (&request.kind, &request.name);
        Err(Status::not_found(format!("no manifest describes the {kind} {namespace}/{name}")))
    }

    /// Waits until the manifest was read. What keeps it from taking effect comes back, a sentence each.
    async fn wait_until_seen(&self, running: &Running, about: &About, path: &Path) -> Vec<String> {
        let rejected = |desired: &Desired| -> Vec<String> {
            let of_file = desired.rejected.iter().filter(|rejected| rejected.file == path);
            of_file.map(|rejected| rejected.message.clone()).collect()
        };
        let name = self.on_node(about);
        let seen = |desired: &Arc<Desired>| {
            desired.file(about.kind, &about.namespace, &name).is_some() || !rejected(desired).is_empty()
        };
        let mut desired = running.desired.clone();
        match tokio::time::timeout(SEEN, desired.wait_for(seen)).await {
            Ok(Ok(desired)) => rejected(&desired),
            _ => vec![format!("{} was written, but has not been read yet", path.display())],
        }
    }
}

/// Writes a manifest whole: nobody ever sees half of it.
#[allow(clippy::result_large_err)] // tonic's own error type
fn put(path: &Path, text: &str, is_known: bool, dry_run: bool) -> Result<Applied, Status> {
    let failed = |e: io::Error| Status::internal(format!("cannot write {}: {e}", path.display()));
    let there = match fs::read(path) {
        Ok(there) => Some(there),
        Err(e) if e.kind() == io::ErrorKind::NotFound => None,
        Err(e) => return Err(failed(e)),
    };
    if there.as_deref() == Some(text.as_bytes()) {
        return Ok(Applied::Unchanged);
    }
    if there.is_some() && !is_known {
        return Err(Status::already_exists(format!(
            "{} is there, and describes something else or nothing that can be read: move it out of the way",
            path.display()
        )));
    }
    let result = if there.is_some() { Applied::Configured } else { Applied::Created };
    if !dry_run {
        write(path, text).map_err(failed)?;
    }
    Ok(result)
}

fn temporary(folder: &Path, name: &OsStr) -> PathBuf {
    let mut hidden = OsString::from(".");
    hidden.push(name);
    hidden.push(".new");
    folder.join(hidden)
}

fn write(path: &Path, text: &str) -> io::Result<()> {
    let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    };
    // A hidden name is no manifest's. It is always the same: if an agent is killed here, the next writer of this manifest
    // writes over what it left.
    let temporary = temporary(folder, name);
    let written = (|| {
        use std::os::unix::fs::OpenOptionsExt;
        // Secrets may be in it.
        let mut file =
            fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&temporary, path)?;
        File::open(folder)?.sync_all()
    })();
    if written.is_err() {
        // It may never have been made.
        let _ = fs::remove_file(&temporary);
    }
    written
}

/// Removes a manifest, or gives it a name that is no manifest's: that name.
#[allow(clippy::result_large_err)] // tonic's own error type
fn take_out(path: &Path, keep: bool) -> Result<Option<PathBuf>, Status> {
    let failed = |e: io::Error| Status::internal(format!("cannot take {} out: {e}", path.display()));
    if !keep {
        return fs::remove_file(path).map(|()| None).map_err(failed);
    }
    let mut name = path.as_os_str().to_owned();
    name.push(KEPT);
    let kept = PathBuf::from(name);
    fs::rename(path, &kept).map_err(failed)?;
    Ok(Some(kept))
}

#[cfg(test)]
mod tests {
    use super::*;

    const POD: &str =
        "apiVersion: v1\nkind: Pod\nmetadata: {name: web}\nspec: {containers: [{name: c, image: 'x:1'}]}\n";

    struct Fixture {
        dir: tempfile::TempDir,
        service: Service,
        _requests: mpsc::Receiver<PodRequest>,
        cancel: tokio_util::sync::CancellationToken,
    }

    impl Drop for Fixture {
        fn drop(&mut self) {
            self.cancel.cancel();
        }
    }

    /// The service on a folder that the real source watches.
    async fn fixture() -> Fixture {
        use beelet_manifests::source::{ManifestSource, Options};
        let dir = tempfile::tempdir().unwrap();
        let cancel = tokio_util::sync::CancellationToken::new();
        let options = Options {
            check_frequency: Duration::from_secs(3600),
            critical_static_pods: false,
            allowed_unsafe_sysctls: Vec::new(),
            events: beelet_state::events::Recorder::default(),
            state: None,
            cancel: cancel.clone(),
        };
        let desired = ManifestSource::start(dir.path().to_owned(), "N1".to_owned(), options).await;
        let (requests, receiver) = mpsc::channel(4);
        let running = Arc::new(SetOnce::new());
        running.set(Running { desired, requests }).unwrap();
        let service = Service { folder: Some(dir.path().to_owned()), node_name: "N1".to_owned(), running };
        Fixture { dir, service, _requests: receiver, cancel }
    }

    #[tokio::test(start_paused = true)]
    async fn right_after_the_agents_start_it_waits_for_the_runtime_but_not_for_ever() {
        let dir = tempfile::tempdir().unwrap();
        let running = Arc::new(SetOnce::new());
        let (folder, node_name) = (Some(dir.path().to_owned()), "n1".to_owned());
        let service = Service { folder, node_name, running: Arc::clone(&running) };
        let error = service.running().await.unwrap_err();
        assert!(error.message().contains("has not answered yet (waited 10 s)"), "{error}");
        let set = async {
            tokio::time::sleep(STARTED / 2).await;
            let (desired, requests) = (watch::channel(Arc::default()).1, mpsc::channel(1).0);
            running.set(Running { desired, requests }).unwrap();
        };
        let (found, ()) = tokio::join!(service.running(), set);
        assert!(found.is_ok());
    }

    impl Fixture {
        async fn apply(&self, text: &str) -> Result<(Applied, String, Vec<String>), String> {
            let request =
                proto::ApplyRequest { text: text.to_owned(), name: "f.yaml".to_owned(), dry_run: false };
            let answer = self.service.apply(Request::new(request)).await;
            let answer = answer.map_err(|status| status.message().to_owned())?.into_inner();
            let file = Path::new(&answer.file).file_name().unwrap().to_string_lossy().into_owned();
            Ok((answer.result(), file, answer.warnings))
        }

        async fn delete(
            &self,
            kind: &str,
            name: &str,
            keep_manifest: bool,
        ) -> Result<proto::DeleteResponse, String> {
            let (kind, name) = (kind.to_owned(), name.to_owned());
            let request = proto::DeleteRequest { kind, name, keep_manifest, ..Default::default() };
            let answer = self.service.delete(Request::new(request)).await;
            answer.map(Response::into_inner).map_err(|status| status.message().to_owned())
        }

        fn files(&self) -> Vec<String> {
            let entries = fs::read_dir(self.dir.path()).unwrap();
            let mut names: Vec<_> =
                entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
            names.sort();
            names
        }
    }

    #[tokio::test]
    async fn a_manifest_is_created_changed_and_left_alone() {
        let fixture = fixture().await;
        let file = "web.yaml".to_owned();
        // What an agent left that was killed while it wrote.
        fs::write(temporary(fixture.dir.path(), OsStr::new("web.yaml")), "kind: Po").unwrap();
        assert_eq!(fixture.apply(POD).await, Ok((Applied::Created, file.clone(), vec![])));
        assert_eq!(fixture.apply(POD).await, Ok((Applied::Unchanged, file.clone(), vec![])));
        let changed = POD.replace("x:1", "x:2");
        assert_eq!(fixture.apply(&changed).await, Ok((Applied::Configured, file, vec![])));
        assert_eq!(fs::read_to_string(fixture.dir.path().join("web.yaml")).unwrap(), changed);
        assert_eq!(fixture.files(), ["web.yaml"]);
    }

    #[tokio::test]
    async fn a_pod_stays_in_the_file_that_describes_it() {
        let fixture = fixture().await;
        fs::write(fixture.dir.path().join("mine.yml"), POD).unwrap();
        let mut desired = fixture.service.running().await.unwrap().desired.clone();
        let wait = desired.wait_for(|desired| !desired.pods.is_empty());
        drop(tokio::time::timeout(Duration::from_secs(30), wait).await.unwrap().unwrap());
        let changed = POD.replace("x:1", "x:2");
        assert_eq!(fixture.apply(&changed).await, Ok((Applied::Configured, "mine.yml".to_owned(), vec![])));
        fs::write(fixture.dir.path().join("web2.yaml"), "kind: [").unwrap();
        let other = fixture.apply(&POD.replace("web", "web2")).await;
        assert!(other.unwrap_err().contains("move it out of the way"));
    }

    #[tokio::test]
    async fn what_is_wrong_is_told_before_anything_is_written() {
        let fixture = fixture().await;
        let error = fixture.apply(&POD.replace("web", "Web")).await.unwrap_err();
        assert!(error.contains("f.yaml:3:18: metadata.name: \"Web\" is not a name"), "{error}");
        assert!(fixture.files().is_empty());
        // What only the folder as a whole can tell comes with the answer.
        let (result, _, warnings) =
            fixture.apply(&POD.replace("spec: {", "spec: {priorityClassName: none, ")).await.unwrap();
        assert_eq!(result, Applied::Created);
        assert!(warnings[0].contains("there is no PriorityClass \"none\""), "{warnings:?}");
    }

    #[tokio::test]
    async fn objects_have_files_of_their_own() {
        let fixture = fixture().await;
        let map = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: conf, namespace: shop}\ndata: {a: b}\n";
        let class =
            "apiVersion: scheduling.k8s.io/v1\nkind: PriorityClass\nmetadata: {name: high}\nvalue: 5\n";
        assert_eq!(fixture.apply(map).await.unwrap().1, "configmap.shop_conf.yaml");
        assert_eq!(fixture.apply(class).await.unwrap().1, "priorityclass.high.yaml");
        assert_eq!(fixture.apply(&class.replace('5', "6")).await.unwrap().0, Applied::Configured);
    }

    #[tokio::test]
    async fn a_deleted_pods_manifest_goes_or_is_kept_beside() {
        let fixture = fixture().await;
        fixture.apply(POD).await.unwrap();
        assert!(fixture.delete("Pod", "none", false).await.unwrap_err().contains("no manifest describes"));
        let deleted = fixture.delete("Pod", "web", true).await.unwrap();
        assert_eq!((deleted.name.as_str(), deleted.uid.len()), ("web-n1", 32));
        assert_eq!(fixture.files(), ["web.yaml.bak"]);
        fixture.apply(POD).await.unwrap();
        fixture.delete("Pod", "web-n1", false).await.unwrap();
        assert_eq!(fixture.files(), ["web.yaml.bak"]);
    }
}
