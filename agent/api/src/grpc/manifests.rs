//! Changes of the manifest directory: writes and removes manifests. The manifest source and the pods handle
//! the result, as after a manual change.

mod files;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use beelet_proto::beelet as proto;
use beelet_proto::beelet::applied::Result as Applied;
use beelet_proto::beelet::manifests_server::{Manifests, ManifestsServer};
use k8s_openapi::api::core::v1::Pod;
use tokio::sync::{Mutex, SetOnce, mpsc, watch};
use tokio::task::JoinSet;
use tonic::{Request, Response, Status};

use self::files::{changed_ns, make_folder_of, remove_manifest, write};
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
        let done = beelet_base::blocking::spawn_blocking(move || {
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
        let taken = beelet_base::blocking::spawn_blocking(take).await;
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
        let listed = beelet_base::blocking::spawn_blocking(move || folder.objects(&request, &selector));
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

/// Returns the namespace of a deletion.
fn namespace_of(request: &proto::DeleteRequest) -> &str {
    if request.namespace.is_empty() { "default" } else { &request.namespace }
}

#[cfg(test)]
mod tests;
