//! Changes of the manifest directory: writes and removes manifests. The manifest source and the pods handle
//! the result, as after a manual change.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use beelet_proto::beelet as proto;
use beelet_proto::beelet::applied::Result as Applied;
use beelet_proto::beelet::manifests_server::{Manifests, ManifestsServer};
use k8s_openapi::api::core::v1::Pod;
use tokio::sync::{Mutex, SetOnce, mpsc, watch};
use tokio::task::JoinSet;
use tonic::{Request, Response, Status};

use beelet_codec::document::Limits;
use beelet_cri::Runtime;
use beelet_manifests::Object;
use beelet_manifests::source::{Described, Rules, preview};
use beelet_model::desired::Desired;
use beelet_model::origin::Origin;
use beelet_model::pod::has_host_port;
use beelet_model::request::Request as PodRequest;
use beelet_model::table::{PodName, PodTable};
use beelet_policy::pod::references;
use beelet_units::{
    bounds,
    selector::{Selector, SelectorError},
};

/// Maximum time for the source to read a new manifest.
const SEEN: Duration = Duration::from_secs(10);
/// Maximum time for the source to notice a removal; longer than its polling interval without kernel
/// notifications.
const TAKEN_OUT: Duration = Duration::from_secs(30);
/// Maximum time to wait after the agent's start until the node runs, because the runtime needs a moment to
/// answer.
const STARTED: Duration = Duration::from_secs(10);
/// Maximum request: as many manifests as a client's file may contain.
const MAX_REQUEST: usize = 2 * Limits::SCENARIO.bytes;
/// Maximum answer, larger than the content of any directory.
const MAX_ANSWER: usize = 256 << 20;
/// Suffix of kept manifests; a file with this suffix is not a manifest.
const KEPT: &str = ".bak";

/// Handles that exist only once the node runs.
#[derive(Clone, Debug)]
pub struct Running {
    /// Desired state from all manifests.
    pub desired: watch::Receiver<Arc<Desired>>,
    /// Requests to the pods' manager.
    pub requests: mpsc::Sender<PodRequest>,
    /// Pods on this node.
    pub table: watch::Receiver<Arc<PodTable>>,
}

impl Running {
    async fn ask(&self, request: PodRequest) -> Result<(), Status> {
        self.requests.send(request).await.map_err(|_| Status::unavailable("the agent is shutting down"))
    }

    /// Returns the name and UID of the static pod of that name that is terminating. A force-deleted pod is
    /// hidden and matches only another forced deletion.
    fn leaving(&self, request: &proto::DeleteRequest) -> Option<(String, String)> {
        let table = self.table.borrow();
        let namespace = namespace_of(request);
        let (name, entry) = table.find(namespace, &request.name).ok()?;
        let is_static = !Origin::of(&entry.pod).is_api();
        let is_leaving = entry.pod.metadata.deletion_timestamp.is_some();
        let is_seen = request.force || !entry.abandoned;
        let is_meant = request.kind == "Pod" && is_static && is_leaving && is_seen;
        is_meant.then(|| Some((name.name.clone(), entry.pod.metadata.uid.clone()?)))?
    }

    /// Terminates a pod once the source has noticed the removal of its manifest: if the pod ended earlier,
    /// the manifest would start it again. A manifest that is applied later starts once the pod has
    /// terminated.
    async fn terminate(mut self, taken: TakenOut) {
        let is_out = |desired: &Arc<Desired>| !taken.is_in(desired);
        // After the timeout, or when the agent is shutting down, the pod is terminated regardless.
        let _ = tokio::time::timeout(TAKEN_OUT, self.desired.wait_for(is_out)).await;
        // The request fails only when the agent is shutting down.
        let _ = self.ask(PodRequest::Terminate { uid: taken.uid }).await;
    }
}

/// A removed manifest of a pod.
struct TakenOut {
    path: PathBuf,
    name: PodName,
    uid: String,
}

impl TakenOut {
    /// Returns true if the source still sees the manifest.
    fn is_in(&self, desired: &Desired) -> bool {
        let PodName { namespace, name } = &self.name;
        let is_its = |pod: &Arc<Pod>| pod.metadata.uid.as_deref() == Some(self.uid.as_str());
        desired.pods.get(&self.name).is_some_and(is_its)
            && desired.file("Pod", namespace, name).as_ref() == Some(&self.path)
    }
}

/// The static pod path, and the settings that affect its manifests.
#[derive(Clone, Debug)]
pub struct Folder {
    /// Path of the directory or file; None if not configured.
    pub path: Option<PathBuf>,
    /// Name of the node.
    pub node_name: String,
    /// Rules for accepting manifests.
    pub rules: Rules,
    /// Runtime, which knows whether host ports work.
    pub runtime: Runtime,
}

/// Returns the service. `running` is set once the node runs.
#[must_use]
pub fn service(folder: Folder, running: Arc<SetOnce<Running>>) -> ManifestsServer<impl Manifests> {
    ManifestsServer::new(Service { folder, running, turn: Mutex::default() })
        .max_decoding_message_size(MAX_REQUEST)
        .max_encoding_message_size(MAX_ANSWER)
}

#[derive(Debug)]
struct Service {
    folder: Folder,
    running: Arc<SetOnce<Running>>,
    /// Lock for changes of the directory, so that one client's answer does not depend on another's change.
    /// The tasks terminate pods of removed manifests.
    turn: Mutex<JoinSet<()>>,
}

/// Identity of a manifest's object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct About {
    kind: &'static str,
    namespace: String,
    /// Name as in the manifest.
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

    /// Returns the file name for a new object: `web.yaml`, `shop_web.yaml`, `configmap.conf.yaml`.
    fn file_name(&self) -> String {
        let namespace = match self.namespace.as_str() {
            "" | "default" => String::new(),
            namespace => format!("{namespace}_"),
        };
        let kind = if self.kind == "Pod" { String::new() } else { format!("{}.", self.kind.to_lowercase()) };
        format!("{kind}{namespace}{}.yaml", self.name)
    }
}

/// A change of one manifest.
struct Change {
    about: About,
    file: PathBuf,
    text: String,
    before: Option<String>,
    warnings: Vec<String>,
    has_host_port: bool,
}

impl Change {
    fn result(&self) -> Applied {
        match &self.before {
            None => Applied::Created,
            Some(before) if *before == self.text => Applied::Unchanged,
            Some(_) => Applied::Configured,
        }
    }
}

/// Planned changes of the directory.
struct Plan {
    changes: Vec<Change>,
    pruned: Vec<proto::Applied>,
    /// Desired state after the changes.
    then: Desired,
}

#[tonic::async_trait]
impl Manifests for Service {
    async fn apply(
        &self,
        request: Request<proto::ApplyRequest>,
    ) -> Result<Response<proto::ApplyResponse>, Status> {
        let request = request.into_inner();
        let running = self.running().await?;
        let mut turn = self.turn.lock().await;
        // Earlier removals must finish first, or they would match the manifests of this request.
        while turn.join_next().await.is_some() {}
        let (folder, now) = (self.folder.clone(), Arc::clone(&running.desired.borrow()));
        let dry_run = request.dry_run;
        let done = tokio::task::spawn_blocking(move || {
            let plan = folder.plan(request, &now)?;
            if !dry_run {
                plan.carry_out()?;
            }
            Ok::<_, Status>(plan)
        });
        let mut plan = done.await.map_err(|e| Status::internal(e.to_string()))??;
        if plan.changes.iter().any(|change| change.has_host_port)
            && let Some(why) = self.folder.runtime.unmapped_host_ports().await
        {
            plan.warn_of_host_ports(&why);
        }
        let late = if dry_run { BTreeSet::new() } else { plan.wait_until_seen(running, &self.folder).await };
        Ok(Response::new(plan.answer(&self.folder, &late)))
    }

    async fn delete(
        &self,
        request: Request<proto::DeleteRequest>,
    ) -> Result<Response<proto::DeleteResponse>, Status> {
        let request = request.into_inner();
        let running = self.running().await?;
        let mut turn = self.turn.lock().await;
        while turn.try_join_next().is_some() {}
        let found = self.folder.find(&running.desired.borrow(), &request);
        let leaving = running.leaving(&request);
        let (path, name, uid) = match (found, &leaving) {
            (Ok((path, name, uid)), _) => (Some(path), name, uid),
            (Err(_), Some((name, uid))) => (None, name.clone(), uid.clone()),
            (Err(status), None) => return Err(status),
        };
        let (from, keep) = (path.clone(), request.keep_manifest);
        let take = move || from.map_or(Ok(None), |from| remove_manifest(&from, keep));
        let taken = tokio::task::spawn_blocking(take).await;
        let kept = taken.map_err(|e| Status::internal(e.to_string()))??;
        let seconds = request.grace_seconds.map(|seconds| i64::try_from(seconds).unwrap_or(i64::MAX));
        let (grace, force) = (seconds.map(bounds::grace), request.force);
        // Another pod of the name may be terminating, and the manifest's pod waits for its end.
        let leaving = leaving.map(|(_, uid)| uid);
        let meant: BTreeSet<&String> =
            leaving.iter().chain(Some(&uid)).filter(|uid| !uid.is_empty()).collect();
        for uid in meant.into_iter().cloned() {
            running.ask(PodRequest::Delete { uid, grace, force }).await?;
        }
        if let Some(path) = path.clone().filter(|_| !uid.is_empty()) {
            let namespace = namespace_of(&request);
            let pod = PodName { namespace: namespace.to_owned(), name: name.clone() };
            let taken = TakenOut { path, name: pod, uid: uid.clone() };
            turn.spawn(running.clone().terminate(taken));
        }
        // The terminating pod is the one to wait for.
        let uid = leaving.unwrap_or(uid);
        Ok(Response::new(proto::DeleteResponse {
            file: path.map(|path| path.display().to_string()).unwrap_or_default(),
            kept: kept.map(|kept| kept.display().to_string()).unwrap_or_default(),
            used_by: users(&running.desired.borrow(), &request, &name),
            name,
            uid,
        }))
    }

    async fn list(
        &self,
        request: Request<proto::ListRequest>,
    ) -> Result<Response<proto::ListResponse>, Status> {
        let request = request.into_inner();
        let selector = selector(&request.selector)?;
        let folder = self.folder.clone();
        let listed = tokio::task::spawn_blocking(move || folder.objects(&request, &selector));
        let objects = listed.await.map_err(|e| Status::internal(e.to_string()))??;
        Ok(Response::new(proto::ListResponse { objects }))
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
}

#[allow(clippy::result_large_err)] // tonic's own error type
fn selector(text: &str) -> Result<Selector, Status> {
    text.parse().map_err(|error: SelectorError| Status::invalid_argument(error.to_string()))
}

#[allow(clippy::result_large_err)] // tonic's own error type
impl Folder {
    fn path(&self) -> Result<&Path, Status> {
        let Some(folder) = &self.path else {
            return Err(Status::failed_precondition(
                "`staticPodPath` is not set: the agent has no manifest directory",
            ));
        };
        if folder.is_file() {
            return Err(Status::failed_precondition(format!(
                "`staticPodPath` is the file {}, not a directory: edit the file",
                folder.display()
            )));
        }
        Ok(folder)
    }

    /// Returns the name of an object on this node: a pod gets the node's name as suffix.
    fn on_node(&self, about: &About) -> String {
        match about.kind {
            "Pod" => format!("{}-{}", about.name, self.node_name.to_lowercase()),
            _ => about.name.clone(),
        }
    }

    /// Returns the directory's content with changes applied in memory.
    fn preview(
        &self,
        changes: &BTreeMap<PathBuf, Option<String>>,
    ) -> Result<(Desired, Vec<Described>), Status> {
        Ok(preview(self.path()?, &self.node_name, &self.rules, changes))
    }

    /// Plans an apply. `now` is the current desired state.
    fn plan(&self, request: proto::ApplyRequest, now: &Desired) -> Result<Plan, Status> {
        let mut changes: Vec<Change> = Vec::new();
        for manifest in request.manifests {
            let name = manifest.name.clone();
            let change = self.change(manifest, now)?;
            if changes.iter().any(|other| other.about == change.about) {
                let About { kind, name: of, .. } = &change.about;
                return Err(Status::invalid_argument(format!("{name}: duplicate {kind} {of}: remove one")));
            }
            changes.push(change);
        }
        let mut texts: BTreeMap<PathBuf, Option<String>> =
            changes.iter().map(|change| (change.file.clone(), Some(change.text.clone()))).collect();
        let pruned = match &request.prune {
            Some(prune) => self.prunable(&selector(&prune.selector)?, &texts)?,
            None => Vec::new(),
        };
        texts.extend(pruned.iter().map(|pruned| (PathBuf::from(&pruned.file), None)));
        let (then, _) = self.preview(&texts)?;
        Ok(Plan { changes, pruned, then })
    }

    /// Returns the target file of a manifest and its current content.
    fn change(&self, manifest: proto::Manifest, now: &Desired) -> Result<Change, Status> {
        let read = beelet_manifests::read(&manifest.text, &manifest.name);
        let read = read.map_err(|error| Status::invalid_argument(error.to_string()))?;
        let about = About::of(&read.object);
        let known = now.file(about.kind, &about.namespace, &self.on_node(&about));
        let file = match &known {
            Some(file) => file.clone(),
            None => self.path()?.join(about.file_name()),
        };
        let before = match fs::read(&file) {
            Ok(there) => Some(String::from_utf8_lossy(&there).into_owned()),
            Err(e) if e.kind() == io::ErrorKind::NotFound => None,
            Err(e) => return Err(Status::internal(format!("cannot read {}: {e}", file.display()))),
        };
        if before.as_ref().is_some_and(|before| *before != manifest.text) && known.is_none() {
            return Err(Status::already_exists(format!(
                "{} exists and is unreadable or describes another object: move the file away",
                file.display()
            )));
        }
        let has_host_port = matches!(&read.object, Object::Pod(pod) if has_host_port(pod));
        Ok(Change { about, file, text: manifest.text, before, warnings: read.warnings, has_host_port })
    }

    /// Returns the other manifests in the directory that match the selector.
    fn prunable(
        &self,
        selector: &Selector,
        given: &BTreeMap<PathBuf, Option<String>>,
    ) -> Result<Vec<proto::Applied>, Status> {
        let (_, there) = self.preview(&BTreeMap::new())?;
        let is_pruned = |one: &Described| !given.contains_key(&one.file) && has_labels(&one.object, selector);
        let pruned = there.into_iter().filter(is_pruned).map(|one| {
            let About { kind, namespace, name } = About::of(&one.object);
            let (kind, file) = (kind.to_owned(), one.file.display().to_string());
            let uid = one.object.metadata().uid.clone().unwrap_or_default();
            let before = fs::read(&one.file).ok().map(|text| String::from_utf8_lossy(&text).into_owned());
            let result = Applied::Pruned.into();
            proto::Applied { result, kind, namespace, name, file, uid, before, ..Default::default() }
        });
        Ok(pruned.collect())
    }

    /// Returns the objects that match a request.
    fn objects(
        &self,
        request: &proto::ListRequest,
        selector: &Selector,
    ) -> Result<Vec<proto::Described>, Status> {
        let (_, there) = self.preview(&BTreeMap::new())?;
        let is_wanted = |wanted: &str, is: &str| wanted.is_empty() || wanted == is;
        let chosen = there.into_iter().filter_map(|one| {
            let About { kind, namespace, name } = About::of(&one.object);
            let wanted = is_wanted(&request.kind, kind)
                && is_wanted(&request.namespace, &namespace)
                && has_labels(&one.object, selector);
            wanted.then(|| proto::Described {
                kind: kind.to_owned(),
                namespace,
                name,
                file: one.file.display().to_string(),
                json: one.object.to_value().to_string().into_bytes(),
                changed_ns: changed_ns(&one.file),
            })
        });
        Ok(chosen.collect())
    }

    /// Returns the manifest of an object, its full name, and a pod's UID.
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
}

/// Returns the pods that refer to an object.
fn users(desired: &Desired, request: &proto::DeleteRequest, name: &str) -> Vec<String> {
    let namespace = namespace_of(request);
    let is_meant = |reference: &references::Reference| {
        reference.kind.as_str() == request.kind && reference.namespace == namespace && reference.name == name
    };
    let users = desired.pods.iter().filter(|(_, pod)| references::of(pod).iter().any(is_meant));
    users.map(|(user, _)| user.to_string()).collect()
}

fn has_labels(object: &Object, selector: &Selector) -> bool {
    selector.matches(object.metadata().labels.as_ref())
}

fn changed_ns(file: &Path) -> i64 {
    let changed = fs::metadata(file).and_then(|metadata| metadata.modified()).ok();
    let since = changed.and_then(|time| time.duration_since(SystemTime::UNIX_EPOCH).ok());
    since.and_then(|since| i64::try_from(since.as_nanos()).ok()).unwrap_or_default()
}

impl Plan {
    fn warn_of_host_ports(&mut self, why: &str) {
        let exposed = self.changes.iter_mut().filter(|change| change.has_host_port);
        exposed.for_each(|change| change.warnings.push(why.to_owned()));
    }

    /// Applies the plan.
    #[allow(clippy::result_large_err)] // tonic's own error type
    fn carry_out(&self) -> Result<(), Status> {
        for change in self.changes.iter().filter(|change| change.result() != Applied::Unchanged) {
            make_folder_of(&change.file)?;
            write(&change.file, &change.text)
                .map_err(|e| Status::internal(format!("cannot write {}: {e}", change.file.display())))?;
        }
        self.pruned.iter().try_for_each(|pruned| remove_manifest(Path::new(&pruned.file), false).map(drop))
    }

    /// Waits until the source has read the manifests, and returns those that it has not read in time.
    async fn wait_until_seen(&self, running: &Running, folder: &Folder) -> BTreeSet<PathBuf> {
        let unseen = |desired: &Desired| -> BTreeSet<PathBuf> {
            let changed = self.changes.iter().filter(|change| change.result() != Applied::Unchanged);
            let unseen = changed.filter(|change| !self.is_seen(change, desired, folder));
            unseen.map(|change| change.file.clone()).collect()
        };
        let mut desired = running.desired.clone();
        let all = desired.wait_for(|desired| unseen(desired).is_empty());
        // After the timeout, or when the agent is shutting down, the current state counts.
        let _ = tokio::time::timeout(SEEN, all).await;
        unseen(&running.desired.borrow())
    }

    /// Returns true if `desired` contains the result of a change.
    fn is_seen(&self, change: &Change, desired: &Desired, folder: &Folder) -> bool {
        let About { kind, namespace, .. } = &change.about;
        let name = folder.on_node(&change.about);
        let rejected = |desired: &Desired| desired.rejected.iter().any(|one| one.file == change.file);
        if rejected(&self.then) {
            return rejected(desired);
        }
        let key = PodName { namespace: namespace.clone(), name: name.clone() };
        match (*kind, self.then.pods.get(&key)) {
            ("Pod", Some(then)) => {
                desired.pods.get(&key).is_some_and(|pod| pod.metadata.uid == then.metadata.uid)
            }
            _ => desired.file(kind, namespace, &name).is_some(),
        }
    }

    /// Returns the answer to the client.
    fn answer(self, folder: &Folder, late: &BTreeSet<PathBuf>) -> proto::ApplyResponse {
        let Self { changes, pruned, then } = self;
        let applied = changes.into_iter().map(|change| {
            let result = change.result().into();
            let of_file = then.rejected.iter().filter(|rejected| rejected.file == change.file);
            let mut refused: Vec<String> = of_file.map(|rejected| rejected.message.clone()).collect();
            if late.contains(&change.file) {
                refused.push(format!(
                    "{} was written, but the agent has not read it yet",
                    change.file.display()
                ));
            }
            let pod = if change.about.kind == "Pod" { folder.on_node(&change.about) } else { String::new() };
            let key = PodName { namespace: change.about.namespace.clone(), name: pod.clone() };
            let uid = then.pods.get(&key).and_then(|pod| pod.metadata.uid.clone()).unwrap_or_default();
            proto::Applied {
                result,
                kind: change.about.kind.to_owned(),
                namespace: change.about.namespace,
                name: change.about.name,
                pod,
                uid,
                file: change.file.display().to_string(),
                warnings: change.warnings,
                refused,
                before: change.before,
            }
        });
        proto::ApplyResponse { applied: applied.collect(), pruned }
    }
}

fn temporary(folder: &Path, name: &OsStr) -> PathBuf {
    let mut hidden = OsString::from(".");
    hidden.push(name);
    hidden.push(".new");
    folder.join(hidden)
}

/// Returns the namespace of a deletion.
fn namespace_of(request: &proto::DeleteRequest) -> &str {
    if request.namespace.is_empty() { "default" } else { &request.namespace }
}

/// Creates the directory of a manifest if missing, for root only, because manifests may contain Secrets.
#[allow(clippy::result_large_err)] // tonic's own error type
fn make_folder_of(file: &Path) -> Result<(), Status> {
    let Some(folder) = file.parent() else { return Ok(()) };
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(folder);
    made.map_err(|e| Status::internal(format!("cannot create the directory {}: {e}", folder.display())))
}

/// Writes a manifest atomically.
fn write(path: &Path, text: &str) -> io::Result<()> {
    let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    };
    // A hidden name is never a manifest's. The name is constant: after a crash here, the next write of this
    // manifest replaces the leftover.
    let temporary = temporary(folder, name);
    let written = (|| {
        use std::os::unix::fs::OpenOptionsExt;
        // The manifest may contain Secrets.
        let mut file =
            fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&temporary, path)?;
        File::open(folder)?.sync_all()
    })();
    if written.is_err() {
        // The temporary file may not exist.
        let _ = fs::remove_file(&temporary);
    }
    written
}

/// Removes a manifest, or renames it to a name that is not a manifest's and returns that name.
#[allow(clippy::result_large_err)] // tonic's own error type
fn remove_manifest(path: &Path, keep: bool) -> Result<Option<PathBuf>, Status> {
    let failed = |e: io::Error| Status::internal(format!("cannot remove {}: {e}", path.display()));
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

    fn folder_at(path: &Path) -> Folder {
        Folder {
            path: Some(path.to_owned()),
            node_name: "N1".to_owned(),
            rules: Rules::default(),
            runtime: Runtime::new("unix:///nowhere.sock", Duration::from_secs(1)).unwrap(),
        }
    }

    /// A service on a directory that the real source watches.
    async fn fixture() -> Fixture {
        use beelet_manifests::source::{ManifestSource, Options};
        let dir = tempfile::tempdir().unwrap();
        let cancel = tokio_util::sync::CancellationToken::new();
        let options = Options {
            check_frequency: Duration::from_secs(3600),
            rules: Rules::default(),
            put_back_restarts: false,
            events: beelet_state::events::Recorder::default(),
            cancel: cancel.clone(),
        };
        let desired = ManifestSource::start(dir.path().to_owned(), "N1".to_owned(), options).await;
        let (requests, receiver) = mpsc::channel(4);
        let running = Arc::new(SetOnce::new());
        let table = watch::channel(Arc::default()).1;
        running.set(Running { desired, requests, table }).unwrap();
        let folder = folder_at(dir.path());
        let service = Service { folder, running, turn: Mutex::default() };
        Fixture { dir, service, _requests: receiver, cancel }
    }

    fn given(texts: &[&str]) -> proto::ApplyRequest {
        let manifest = |text: &&str| proto::Manifest { text: (*text).to_owned(), name: "f.yaml".to_owned() };
        proto::ApplyRequest { manifests: texts.iter().map(manifest).collect(), ..Default::default() }
    }

    #[tokio::test(start_paused = true)]
    async fn right_after_the_agents_start_it_waits_for_the_runtime_but_not_for_ever() {
        let dir = tempfile::tempdir().unwrap();
        let running = Arc::new(SetOnce::new());
        let folder = folder_at(dir.path());
        let service = Service { folder, running: Arc::clone(&running), turn: Mutex::default() };
        let error = service.running().await.unwrap_err();
        assert!(error.message().contains("has not answered yet (waited 10 s)"), "{error}");
        let set = async {
            tokio::time::sleep(STARTED / 2).await;
            let (desired, requests) = (watch::channel(Arc::default()).1, mpsc::channel(1).0);
            let table = watch::channel(Arc::default()).1;
            running.set(Running { desired, requests, table }).unwrap();
        };
        let (found, ()) = tokio::join!(service.running(), set);
        assert!(found.is_ok());
    }

    impl Fixture {
        async fn ask(&self, request: proto::ApplyRequest) -> Result<proto::ApplyResponse, String> {
            let answer = self.service.apply(Request::new(request)).await;
            answer.map(Response::into_inner).map_err(|status| status.message().to_owned())
        }

        /// Applies one manifest and returns the result, the file name and the rejections.
        async fn apply(&self, text: &str) -> Result<(Applied, String, Vec<String>), String> {
            let mut answer = self.ask(given(&[text])).await?;
            assert!(answer.pruned.is_empty());
            let applied = answer.applied.remove(0);
            let file = Path::new(&applied.file).file_name().unwrap().to_string_lossy().into_owned();
            Ok((applied.result(), file, applied.refused))
        }

        /// Returns the names of the listed objects.
        async fn list(&self, kind: &str, selector: &str) -> Vec<String> {
            let (kind, selector) = (kind.to_owned(), selector.to_owned());
            let request = proto::ListRequest { kind, selector, ..Default::default() };
            let listed = self.service.list(Request::new(request)).await.unwrap().into_inner();
            listed.objects.into_iter().map(|one| format!("{} {}", one.kind, one.name)).collect()
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
        // Leftover of an agent that was killed during a write.
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
        assert!(other.unwrap_err().contains("move the file away"));
    }

    #[tokio::test]
    async fn what_is_wrong_is_told_before_anything_is_written() {
        let fixture = fixture().await;
        let error = fixture.apply(&POD.replace("web", "Web")).await.unwrap_err();
        assert!(error.contains("f.yaml:3:18: metadata.name: \"Web\" is not a name"), "{error}");
        assert!(fixture.files().is_empty());
        // Errors that depend on the whole directory are in the answer.
        let (result, _, warnings) =
            fixture.apply(&POD.replace("spec: {", "spec: {priorityClassName: none, ")).await.unwrap();
        assert_eq!(result, Applied::Created);
        assert!(warnings[0].contains("there is no PriorityClass \"none\""), "{warnings:?}");
    }

    const CLASS: &str =
        "apiVersion: scheduling.k8s.io/v1\nkind: PriorityClass\nmetadata: {name: high}\nvalue: 5\n";

    #[tokio::test]
    async fn a_dry_run_tells_what_would_be_done_and_does_nothing() {
        let fixture = fixture().await;
        fixture.apply(POD).await.unwrap();
        let changed = POD.replace("spec: {", "spec: {priorityClassName: high, ");
        let dry = |texts: &[&str]| proto::ApplyRequest { dry_run: true, ..given(texts) };
        let refused = fixture.ask(dry(&[&changed])).await.unwrap().applied.remove(0);
        assert_eq!((refused.result(), refused.before.as_deref()), (Applied::Configured, Some(POD)));
        assert!(refused.refused[0].contains("there is no PriorityClass \"high\""), "{refused:?}");
        // Together with the class, the pod is accepted: both are evaluated together.
        let taken = fixture.ask(dry(&[&changed, CLASS])).await.unwrap();
        let results: Vec<_> = taken.applied.iter().map(|one| (one.result(), one.refused.len())).collect();
        assert_eq!(results, [(Applied::Configured, 0), (Applied::Created, 0)]);
        assert_eq!(taken.applied[0].pod, "web-n1");
        assert_eq!(fixture.files(), ["web.yaml"]);
        assert_eq!(fs::read_to_string(fixture.dir.path().join("web.yaml")).unwrap(), POD);
        // The dry run returns the future UID of the pod.
        let real = fixture.ask(given(&[&changed, CLASS])).await.unwrap();
        assert_eq!(real.applied[0].uid, taken.applied[0].uid);
    }

    #[tokio::test]
    async fn none_is_written_if_one_cannot_be() {
        let fixture = fixture().await;
        fs::write(fixture.dir.path().join("web2.yaml"), "kind: [").unwrap();
        let other = POD.replace("web", "web2");
        assert!(fixture.ask(given(&[POD, &other])).await.unwrap_err().contains("move the file away"));
        assert!(fixture.ask(given(&[POD, POD])).await.unwrap_err().contains("duplicate Pod web"));
        assert_eq!(fixture.files(), ["web2.yaml"]);
    }

    #[tokio::test]
    async fn what_is_not_given_and_has_the_labels_is_pruned() {
        let fixture = fixture().await;
        let labelled =
            |name: &str| POD.replace("{name: web}", &format!("{{name: {name}, labels: {{app: shop}}}}"));
        let (one, two) = (labelled("one"), labelled("two"));
        fixture.ask(given(&[POD, CLASS, &one, &two])).await.unwrap();
        assert_eq!(fixture.list("", "").await.len(), 4);
        assert_eq!(fixture.list("Pod", "app=shop").await, ["Pod one-n1", "Pod two-n1"]);
        let prune = |selector: &str| Some(proto::Prune { selector: selector.to_owned() });
        let dry = proto::ApplyRequest { dry_run: true, prune: prune(""), ..given(&[&one]) };
        let names = |pruned: Vec<proto::Applied>| pruned.into_iter().map(|one| one.name).collect::<Vec<_>>();
        assert_eq!(names(fixture.ask(dry).await.unwrap().pruned), ["high", "two-n1", "web-n1"]);
        assert_eq!(fixture.files().len(), 4);
        let real = proto::ApplyRequest { prune: prune("app=shop"), ..given(&[&one]) };
        assert_eq!(names(fixture.ask(real).await.unwrap().pruned), ["two-n1"]);
        assert_eq!(fixture.files(), ["one.yaml", "priorityclass.high.yaml", "web.yaml"]);
        let wrong = proto::ApplyRequest { prune: prune("a b"), ..given(&[&one]) };
        assert!(fixture.ask(wrong).await.unwrap_err().contains("invalid label requirement"));
    }

    #[tokio::test]
    async fn objects_have_files_of_their_own() {
        let fixture = fixture().await;
        let map = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: conf, namespace: shop}\ndata: {a: b}\n";
        assert_eq!(fixture.apply(map).await.unwrap().1, "configmap.shop_conf.yaml");
        assert_eq!(fixture.apply(CLASS).await.unwrap().1, "priorityclass.high.yaml");
        assert_eq!(fixture.apply(&CLASS.replace('5', "6")).await.unwrap().0, Applied::Configured);
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
