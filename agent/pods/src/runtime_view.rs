//! Observation of one pod in the runtime, queried for each observation. Immutable details (an exit code, a
//! sandbox's addresses) are queried once.

use beelet_model::status::timestamp;
use std::{collections::BTreeMap, path::PathBuf, sync::Arc, time::Duration};

use beelet_policy::pod;
use beelet_proto::cri;
use beelet_units::bounds;
use futures::future::try_join_all;
use serde::Deserialize;

use super::termination;
use beelet_base::{blocking::blocking, process::FirstProcess};
use beelet_cri::{Error, Runtime, pid_of};
use beelet_model::{labels, request::Listed};

/// The runtime's state of one pod at one time.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Observation {
    /// The pod's sandboxes and containers, the input of decisions.
    pub pod: pod::Observed,
    /// The current sandbox, if one is ready.
    pub sandbox: Option<SandboxDetail>,
    /// The runtime's status of each container, by identifier. The values are pointers: a map node reserves
    /// memory for several values, and a status is large.
    pub containers: BTreeMap<String, Arc<cri::ContainerStatus>>,
    /// First processes of running containers and of the current sandbox, by identifier.
    pub processes: BTreeMap<String, FirstProcess>,
}

impl Observation {
    /// Returns true if a sandbox or one of its containers may still run.
    pub(crate) fn may_run_in(&self, sandbox: &str) -> bool {
        let ready = self.pod.sandboxes.iter().any(|s| s.id == sandbox && s.ready);
        ready || self.pod.containers.iter().any(|c| c.sandbox_id == sandbox && is_alive(c))
    }

    /// Returns true if a sandbox or a container of the pod may still run.
    pub(crate) fn may_run(&self) -> bool {
        self.pod.sandboxes.iter().any(|s| s.ready) || self.pod.containers.iter().any(is_alive)
    }

    /// Returns the newest container with this name, which the pod's status shows.
    pub(crate) fn newest(&self, name: &str) -> Option<&pod::Container> {
        self.pod.containers.iter().filter(|c| c.name == name).max_by_key(|c| (c.attempt, &c.id))
    }

    /// Returns true if a container was running.
    pub(crate) fn is_running(&self, id: &str) -> bool {
        let mut all = self.pod.containers.iter();
        all.any(|c| c.id == id && matches!(c.state, pod::ContainerState::Running { .. }))
    }

    /// Returns the observation with a newer status of one container.
    #[must_use]
    pub(crate) fn with_newer(mut self, newer: &Arc<cri::ContainerStatus>) -> Self {
        for container in self.pod.containers.iter_mut().filter(|c| c.id == newer.id) {
            container.state = state(newer);
            self.containers.insert(newer.id.clone(), Arc::clone(newer));
            self.processes.remove(&newer.id);
        }
        self
    }
}

/// Returns true if a container runs or its state is unknown.
pub(crate) fn is_alive(container: &pod::Container) -> bool {
    matches!(container.state, pod::ContainerState::Running { .. } | pod::ContainerState::Unknown)
}

/// Sandbox and containers that one step created, from the runtime's responses. They replace a list from the
/// runtime, which iterates over all its objects for each list: with a thousand pods, that is half of the cost
/// of a pod's start.
#[derive(Debug, Default)]
pub(crate) struct Made {
    /// The sandbox's identifier and attempt.
    pub sandbox: Option<(String, u32)>,
    /// Started containers, by identifier.
    pub containers: Vec<(String, pod::Start)>,
}

impl Made {
    /// Returns the list that the runtime would return now, if the pod has no other changes since the
    /// observation. The observer still queries the status of new containers.
    pub(crate) fn listed_after(self, seen: &Observation) -> Listed {
        let mut sandboxes: Vec<_> = seen.pod.sandboxes.iter().map(listed_sandbox).collect();
        sandboxes.extend(
            self.sandbox.map(|(id, attempt)| listed_sandbox(&pod::Sandbox { id, attempt, ready: true })),
        );
        let is_new = |id: &String| self.containers.iter().any(|(new, _)| new == id);
        let old = seen.pod.containers.iter().filter(|c| !is_new(&c.id)).map(|container| {
            let state = seen.containers.get(&container.id).map_or(0, |status| status.state);
            listed_container(container, state)
        });
        let running = i32::from(cri::ContainerState::ContainerRunning);
        let sandbox_id = seen.sandbox.as_ref().map(|sandbox| sandbox.id.as_str());
        let new = self.containers.iter().map(|(id, start)| {
            let container = pod::Container {
                id: id.clone(),
                name: start.name.clone(),
                attempt: start.attempt,
                sandbox_id: sandbox_id.unwrap_or_default().to_owned(),
                state: pod::ContainerState::Unknown,
                restart_delay: start.restart_delay,
                round: start.round,
            };
            listed_container(&container, running)
        });
        let containers = old.chain(new).collect();
        Listed { sandboxes, containers }
    }
}

/// A ready sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SandboxDetail {
    /// The runtime's identifier.
    pub id: String,
    /// The pod's addresses, the primary one first; empty on the host's network.
    pub ips: Vec<String>,
    /// The network namespace's file; `None` on the host's network.
    pub netns: Option<PathBuf>,
}

/// Network of a running sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Network {
    /// See [`SandboxDetail::ips`].
    pub ips: Vec<String>,
    /// See [`SandboxDetail::netns`].
    pub netns: Option<PathBuf>,
}

/// Facts about a pod from before its first observation. An agent that starts observes a thousand pods at
/// once, and the queries that these facts replace would be most of the runtime's load during that time.
#[derive(Clone, Debug, Default)]
pub(crate) struct Foreknown {
    /// A recent list from the runtime, since which the pod has not changed.
    pub listed: Option<Listed>,
    /// First processes of the containers and the sandbox, by identifier, from an earlier agent's record.
    pub processes: BTreeMap<String, FirstProcess>,
    /// Network of the sandbox, which does not change while the sandbox runs.
    pub network: Option<Network>,
}

impl Foreknown {
    /// Returns the first process of a container or sandbox, if the process still runs.
    fn running(&self, id: &str) -> Option<FirstProcess> {
        self.processes.get(id).copied().filter(FirstProcess::runs)
    }
}

/// Observer of one pod in the runtime.
#[derive(Debug)]
pub(crate) struct Observer {
    runtime: Runtime,
    uid: String,
    known: Foreknown,
    sandbox: Option<SandboxDetail>,
    containers: BTreeMap<String, Arc<cri::ContainerStatus>>,
    processes: BTreeMap<String, FirstProcess>,
}

impl Observer {
    /// Returns an observer of the pod with this UID.
    pub(crate) fn new(runtime: Runtime, uid: String, known: Foreknown) -> Self {
        let (containers, processes) = (BTreeMap::new(), BTreeMap::new());
        Self { runtime, uid, known, sandbox: None, containers, processes }
    }

    /// Records a container's status that another part queried, with the container's termination message.
    pub(crate) fn record(&mut self, status: Arc<cri::ContainerStatus>) {
        if self.containers.contains_key(&status.id) {
            self.containers.insert(status.id.clone(), status);
        }
    }

    /// Sets a list from another part for the next observation.
    pub(crate) fn expect(&mut self, listed: Listed) {
        self.known.listed = Some(listed);
    }

    /// Queries the runtime. Omits objects that disappear between two queries.
    pub(crate) async fn observe(&mut self) -> Result<Observation, Error> {
        // A failed observation keeps the list for the next try.
        let Listed { sandboxes, containers } = match &self.known.listed {
            Some(listed) => listed.clone(),
            None => self.list().await?,
        };
        let sandboxes: Vec<pod::Sandbox> = sandboxes.into_iter().map(sandbox).collect();
        self.refresh_containers(&containers).await?;
        self.refresh_sandbox(&sandboxes).await?;
        self.known = Foreknown::default();
        let statuses = self.containers.clone();
        let containers = containers.iter().filter_map(|c| Some(container(c, statuses.get(&c.id)?))).collect();
        let pod = pod::Observed { sandboxes, containers };
        let running = i32::from(cri::ContainerState::ContainerRunning);
        let sandbox = self.sandbox.as_ref().map(|sandbox| sandbox.id.as_str());
        self.processes.retain(|id, _| {
            Some(id.as_str()) == sandbox || statuses.get(id).is_some_and(|s| s.state == running)
        });
        let (sandbox, processes) = (self.sandbox.clone(), self.processes.clone());
        Ok(Observation { pod, sandbox, containers: statuses, processes })
    }

    async fn list(&self) -> Result<Listed, Error> {
        let (sandboxes, containers) = tokio::try_join!(
            self.runtime.sandboxes.of_pod(&self.uid),
            self.runtime.containers.of_pod(&self.uid),
        )?;
        Ok(Listed { sandboxes, containers })
    }

    async fn refresh_containers(&mut self, listed: &[cri::Container]) -> Result<(), Error> {
        self.containers.retain(|id, _| listed.iter().any(|c| c.id == *id));
        let mut stale = Vec::new();
        for container in listed {
            if self.containers.get(&container.id).is_none_or(|known| known.state != container.state) {
                let running = container.state() == cri::ContainerState::ContainerRunning;
                stale.push(self.container_status(&container.id, running));
            }
        }
        let mut fresh = Vec::new();
        for (status, process) in try_join_all(stale).await?.into_iter().flatten() {
            self.processes.extend(process.map(|process| (status.id.clone(), process)));
            fresh.push(status);
        }
        let fresh = with_last_words(fresh).await;
        self.containers.extend(fresh.into_iter().map(|status| (status.id.clone(), Arc::new(status))));
        Ok(())
    }

    /// Returns a container's status and, if the container runs, its first process.
    async fn container_status(
        &self,
        id: &str,
        running: bool,
    ) -> Result<Option<(cri::ContainerStatus, Option<FirstProcess>)>, Error> {
        let known = self.known.running(id);
        match self.runtime.containers.status(id, running && known.is_none()).await {
            Ok(response) => {
                let process = known.or_else(|| pid_of(&response.info).map(FirstProcess::of));
                Ok(response.status.map(|status| (status, process)))
            }
            Err(e) if e.is_not_found() => Ok(None),
            Err(e) => Err(e),
        }
    }

    async fn refresh_sandbox(&mut self, sandboxes: &[pod::Sandbox]) -> Result<(), Error> {
        let current = sandboxes.iter().filter(|s| s.ready).max_by_key(|s| (s.attempt, &s.id));
        let Some(current) = current else {
            self.sandbox = None;
            return Ok(());
        };
        if self.sandbox.as_ref().is_some_and(|known| known.id == current.id) {
            return Ok(());
        }
        if let (Some(process), Some(network)) = (self.known.running(&current.id), &self.known.network) {
            self.processes.insert(current.id.clone(), process);
            let Network { ips, netns } = network.clone();
            self.sandbox = Some(SandboxDetail { id: current.id.clone(), ips, netns });
            return Ok(());
        }
        self.sandbox = match self.runtime.sandboxes.status(&current.id, true).await {
            Ok(response) => {
                let process = pid_of(&response.info).map(FirstProcess::of);
                self.processes.extend(process.map(|process| (current.id.clone(), process)));
                Some(detail(&current.id, &response))
            }
            Err(e) if e.is_not_found() => None,
            Err(e) => return Err(e),
        };
        Ok(())
    }
}

/// Returns the statuses, with the termination messages of ended containers appended to the runtime's
/// messages.
pub(crate) async fn with_last_words(statuses: Vec<cri::ContainerStatus>) -> Vec<cri::ContainerStatus> {
    if !statuses.iter().any(|status| status.state() == cri::ContainerState::ContainerExited) {
        return statuses;
    }
    blocking("reading the termination messages of containers", move || {
        let mut statuses = statuses;
        for status in &mut statuses {
            let Some(text) = termination::message(status) else { continue };
            status.message =
                if status.message.is_empty() { text } else { format!("{}: {text}", status.message) };
        }
        statuses
    })
    .await
}

fn sandbox(listed: cri::PodSandbox) -> pod::Sandbox {
    pod::Sandbox {
        attempt: listed.metadata.map_or(0, |m| m.attempt),
        ready: listed.state == i32::from(cri::PodSandboxState::SandboxReady),
        id: listed.id,
    }
}

/// Returns the addresses of a sandbox, and its network namespace from the runtime's verbose status.
fn detail(id: &str, response: &cri::PodSandboxStatusResponse) -> SandboxDetail {
    let status = response.status.as_ref();
    let network = status.and_then(|s| s.network.as_ref());
    let ips = network.into_iter().flat_map(|n| {
        let more = n.additional_ips.iter().map(|ip| ip.ip.clone());
        std::iter::once(n.ip.clone()).chain(more).filter(|ip| !ip.is_empty())
    });
    let options = status.and_then(|s| s.linux.as_ref()?.namespaces.as_ref()?.options.as_ref());
    let on_host = options.is_some_and(|o| o.network == i32::from(cri::NamespaceMode::Node));
    let reported = || response.info.get("info").and_then(|info| netns(info));
    let netns = if on_host { None } else { reported() };
    SandboxDetail { id: id.to_owned(), ips: ips.collect(), netns }
}

/// Returns the network namespace in containerd's and CRI-O's verbose status: the OCI spec's, else that of the
/// sandbox process.
fn netns(info: &str) -> Option<PathBuf> {
    // The other fields, tens of kilobytes, are skipped.
    #[derive(Default, Deserialize)]
    #[serde(default, rename_all = "camelCase")]
    struct Info {
        pid: Option<i64>,
        runtime_spec: Option<Spec>,
    }
    #[derive(Deserialize)]
    struct Spec {
        linux: Option<Linux>,
    }
    #[derive(Deserialize)]
    struct Linux {
        namespaces: Option<Vec<Namespace>>,
    }
    #[derive(Deserialize)]
    struct Namespace {
        r#type: Option<String>,
        path: Option<PathBuf>,
    }
    let info: Info = serde_json::from_str(info).ok()?;
    let namespaces = info.runtime_spec.and_then(|spec| spec.linux?.namespaces);
    let network = namespaces.into_iter().flatten().find(|one| one.r#type.as_deref() == Some("network"));
    let of_spec = network.and_then(|network| network.path).filter(|path| !path.as_os_str().is_empty());
    let of_process = || Some(PathBuf::from(format!("/proc/{}/ns/net", info.pid.filter(|pid| *pid > 0)?)));
    of_spec.or_else(of_process)
}

fn container(listed: &cri::Container, status: &cri::ContainerStatus) -> pod::Container {
    let metadata = status.metadata.as_ref().or(listed.metadata.as_ref());
    let annotated = |annotation: &str| listed.annotations.get(annotation);
    let delay =
        annotated(labels::RESTART_DELAY).and_then(|s| s.parse().ok()).map_or(Duration::ZERO, bounds::seconds);
    pod::Container {
        id: listed.id.clone(),
        name: metadata.map(|m| m.name.clone()).unwrap_or_default(),
        attempt: metadata.map_or(0, |m| m.attempt),
        sandbox_id: listed.pod_sandbox_id.clone(),
        state: state(status),
        restart_delay: delay,
        round: annotated(labels::ROUND).and_then(|s| s.parse().ok()).unwrap_or(0),
    }
}

/// Inverse of [`sandbox`].
fn listed_sandbox(sandbox: &pod::Sandbox) -> cri::PodSandbox {
    let state = if sandbox.ready {
        cri::PodSandboxState::SandboxReady
    } else {
        cri::PodSandboxState::SandboxNotready
    };
    cri::PodSandbox {
        id: sandbox.id.clone(),
        metadata: Some(cri::PodSandboxMetadata { attempt: sandbox.attempt, ..Default::default() }),
        state: state.into(),
        ..Default::default()
    }
}

/// Inverse of [`container`].
fn listed_container(container: &pod::Container, state: i32) -> cri::Container {
    let annotations = [
        (labels::RESTART_DELAY, container.restart_delay.as_secs().to_string()),
        (labels::ROUND, container.round.to_string()),
    ];
    cri::Container {
        id: container.id.clone(),
        pod_sandbox_id: container.sandbox_id.clone(),
        metadata: Some(cri::ContainerMetadata { name: container.name.clone(), attempt: container.attempt }),
        state,
        annotations: annotations.into_iter().map(|(key, value)| (key.to_owned(), value)).collect(),
        ..Default::default()
    }
}

fn state(status: &cri::ContainerStatus) -> pod::ContainerState {
    match status.state() {
        cri::ContainerState::ContainerCreated => pod::ContainerState::Created,
        cri::ContainerState::ContainerRunning => {
            pod::ContainerState::Running { started_at: timestamp(status.started_at).unwrap_or_default() }
        }
        cri::ContainerState::ContainerExited => pod::ContainerState::Exited {
            exit_code: status.exit_code,
            started_at: timestamp(status.started_at),
            finished_at: timestamp(status.finished_at).unwrap_or_default(),
        },
        cri::ContainerState::ContainerUnknown => pod::ContainerState::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_expected_list_has_old_and_new_objects() {
        let ready = |id: &str, attempt, ready| pod::Sandbox { id: id.to_owned(), attempt, ready };
        let container = |id: &str, attempt, round| pod::Container {
            id: id.to_owned(),
            name: "c".to_owned(),
            attempt,
            sandbox_id: "s1".to_owned(),
            state: pod::ContainerState::Created,
            restart_delay: Duration::from_secs(20),
            round,
        };
        let word = |id: &str, state: cri::ContainerState| {
            let status =
                cri::ContainerStatus { id: id.to_owned(), state: state.into(), ..Default::default() };
            (id.to_owned(), Arc::new(status))
        };
        let created = cri::ContainerState::ContainerCreated;
        let seen = Observation {
            pod: pod::Observed {
                sandboxes: vec![ready("s0", 0, false), ready("s1", 1, true)],
                containers: vec![container("old", 0, 1), container("made", 1, 2)],
            },
            sandbox: Some(SandboxDetail { id: "s1".to_owned(), ips: Vec::new(), netns: None }),
            containers: BTreeMap::from([word("old", created), word("made", created)]),
            processes: BTreeMap::new(),
        };
        let start = |attempt, round| pod::Start {
            name: "c".to_owned(),
            attempt,
            restart_delay: Duration::from_secs(20),
            created: None,
            round,
        };
        let containers = vec![("made".to_owned(), start(1, 2)), ("new".to_owned(), start(2, 2))];
        let made = Made { sandbox: Some(("s2".to_owned(), 2)), containers };
        let listed = made.listed_after(&seen);
        let sandboxes: Vec<_> = listed.sandboxes.into_iter().map(sandbox).collect();
        assert_eq!(sandboxes, [ready("s0", 0, false), ready("s1", 1, true), ready("s2", 2, true)]);
        let state = |id: &str| listed.containers.iter().find(|c| c.id == id).unwrap().state();
        let running = cri::ContainerState::ContainerRunning;
        assert_eq!((state("old"), state("made"), state("new")), (created, running, running));
        let status = cri::ContainerStatus::default();
        let read: Vec<_> = listed.containers.iter().map(|c| super::container(c, &status)).collect();
        assert_eq!(read, [container("old", 0, 1), container("made", 1, 2), container("new", 2, 2)]);
    }

    #[test]
    fn the_network_namespace_comes_from_the_oci_spec_or_the_process() {
        let check =
            |info: &str, expect: Option<&str>| assert_eq!(netns(info), expect.map(PathBuf::from), "{info}");
        let spec = r#"{"pid":7,"runtimeSpec":{"linux":{"namespaces":[{"type":"pid"},{"type":"network","path":"/run/netns/a"}]}}}"#;
        check(spec, Some("/run/netns/a"));
        check(
            r#"{"pid":7,"runtimeSpec":{"linux":{"namespaces":[{"type":"network"}]}}}"#,
            Some("/proc/7/ns/net"),
        );
        check(r#"{"pid":0}"#, None);
        check(
            r#"{"pid":null,"runtimeSpec":{"linux":{"namespaces":[{"path":"/a"},{"type":"network","path":"/b"}]}}}"#,
            Some("/b"),
        );
        check(r#"{"pid":7,"runtimeSpec":{"linux":{"namespaces":null}}}"#, Some("/proc/7/ns/net"));
        check("not json", None);
    }
}
