//! Conversion of CRI's lists and statuses into a pod table. Pure.
//!
//! The kubelet's labels and annotations on sandboxes and containers (names, the restart count) are used as
//! they are; without them a pod has the name of its sandbox. A pod's phase follows from its containers, as
//! far as possible.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use beelet_proto::cri;
use k8s_openapi::api::core::v1::{
    Container, ContainerState, ContainerStateRunning, ContainerStateTerminated, ContainerStateWaiting,
    ContainerStatus, Pod, PodCondition, PodIP, PodSpec, PodStatus,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};

use beelet_model::labels;
use beelet_model::status::{OBSERVED, timestamp};
use beelet_model::table::{PodEntry, PodName, PodTable};

/// Lists and statuses of one reading of the runtime.
pub(super) struct Listing<'a> {
    pub(super) node: &'a str,
    pub(super) runtime: &'a str,
    pub(super) sandboxes: &'a [cri::PodSandbox],
    pub(super) containers: &'a [cri::Container],
    pub(super) sandbox_details: &'a HashMap<String, cri::PodSandboxStatus>,
    pub(super) container_details: &'a HashMap<String, cri::ContainerStatus>,
}

impl Listing<'_> {
    /// Builds the table; None if it equals `before`. Unchanged entries keep their pointers.
    pub(super) fn table(&self, before: &PodTable) -> Option<PodTable> {
        let mut newest: BTreeMap<PodName, &cri::PodSandbox> = BTreeMap::new();
        for sandbox in self.sandboxes {
            let age = |sandbox: &cri::PodSandbox| {
                let ready = sandbox.state() == cri::PodSandboxState::SandboxReady;
                (ready, sandbox.created_at)
            };
            let other = newest.entry(name(sandbox)).or_insert(sandbox);
            if age(sandbox) > age(other) {
                *other = sandbox;
            }
        }
        let mut pods = before.pods.clone();
        for gone in before.pods.keys().filter(|name| !newest.contains_key(*name)) {
            pods.remove(gone);
        }
        let mut changed = pods.len() != before.pods.len();
        for (name, sandbox) in newest {
            let pod = self.pod(&name, sandbox);
            if before.pods.get(&name).is_none_or(|entry| entry.pod != pod) {
                pods.insert(name, Arc::new(PodEntry::of(pod)));
                changed = true;
            }
        }
        changed.then(|| PodTable { pods, ..PodTable::default() })
    }

    fn pod(&self, name: &PodName, sandbox: &cri::PodSandbox) -> Pod {
        let details = self.sandbox_details.get(&sandbox.id);
        let all = self.newest_containers(sandbox);
        let statuses: Vec<ContainerStatus> = all.iter().map(|one| self.status(one.newest)).collect();
        let phase = phase(sandbox, &statuses);
        let (inits, own): (Vec<_>, Vec<_>) =
            all.iter().zip(statuses).partition(|(one, _)| self.is_init(one, &all));
        let of = |(one, status): (&Attempts<'_>, ContainerStatus)| (container(one.newest), status);
        let (init_specs, mut init_statuses): (Vec<_>, Vec<_>) = inits.into_iter().map(of).unzip();
        init_statuses.iter_mut().for_each(|status| status.ready = true);
        let (specs, statuses) = own.into_iter().map(of).unzip();
        let ip = details.and_then(|details| details.network.as_ref()).map(|network| network.ip.clone());
        let ip = ip.filter(|ip| !ip.is_empty());
        let host_network = details.is_some_and(|details| {
            let namespaces = details.linux.as_ref().and_then(|linux| linux.namespaces.as_ref());
            let options = namespaces.and_then(|namespaces| namespaces.options.as_ref());
            options.is_some_and(|options| options.network() == cri::NamespaceMode::Node)
        });
        let created = timestamp(sandbox.created_at).map(Time);
        Pod {
            metadata: ObjectMeta {
                name: Some(name.name.clone()),
                namespace: Some(name.namespace.clone()),
                uid: Some(uid(sandbox)),
                creation_timestamp: created.clone(),
                ..ObjectMeta::default()
            },
            spec: Some(PodSpec {
                init_containers: (!init_specs.is_empty()).then_some(init_specs),
                containers: specs,
                node_name: Some(self.node.to_owned()),
                host_network: host_network.then_some(true),
                ..PodSpec::default()
            }),
            status: Some(PodStatus {
                phase: Some(phase.to_owned()),
                start_time: created,
                pod_ip: ip.clone(),
                pod_ips: ip.map(|ip| vec![PodIP { ip }]),
                conditions: Some(vec![unknown_readiness()]),
                init_container_statuses: (!init_statuses.is_empty()).then_some(init_statuses),
                container_statuses: Some(statuses),
                ..PodStatus::default()
            }),
        }
    }

    /// Returns the last attempt of each of the pod's containers, in the order of their first creation.
    fn newest_containers(&self, sandbox: &cri::PodSandbox) -> Vec<Attempts<'_>> {
        let uid = uid(sandbox);
        let of_pod = |one: &&cri::Container| {
            one.pod_sandbox_id == sandbox.id || one.labels.get(labels::POD_UID) == Some(&uid)
        };
        let mut by_name: HashMap<&str, Attempts<'_>> = HashMap::new();
        for one in self.containers.iter().filter(of_pod) {
            let known = by_name.entry(container_name(one)).or_insert(Attempts::of(one));
            let is_newer = one.created_at > known.newest.created_at;
            if one.pod_sandbox_id == known.newest.pod_sandbox_id {
                known.first = known.first.min(one.created_at);
            } else if is_newer {
                // In another sandbox the pod started again.
                known.first = one.created_at;
            }
            if is_newer {
                known.newest = one;
            }
        }
        let mut newest: Vec<_> = by_name.into_values().collect();
        newest.sort_by_key(|one| (one.first, one.newest.id.clone()));
        newest
    }

    /// Returns true for a completed init container. The runtime does not know the init containers; but the
    /// kubelet creates the next one only after one has succeeded, and creates the pod's own containers right
    /// after each other.
    fn is_init(&self, one: &Attempts<'_>, all: &[Attempts<'_>]) -> bool {
        let ended = self.container_details.get(&one.newest.id).filter(|details| {
            details.state() == cri::ContainerState::ContainerExited && details.exit_code == 0
        });
        let Some(ended) = ended.map(|details| details.finished_at).filter(|at| *at > 0) else { return false };
        let mut later = all.iter().filter(|other| other.first > one.newest.created_at).peekable();
        later.peek().is_some() && later.all(|other| other.first >= ended)
    }

    fn status(&self, listed: &cri::Container) -> ContainerStatus {
        let details = self.container_details.get(&listed.id);
        let written = listed.annotations.get(labels::RESTART_COUNT).and_then(|count| count.parse().ok());
        let attempt = listed.metadata.as_ref().map_or(0, |metadata| metadata.attempt);
        let running = listed.state() == cri::ContainerState::ContainerRunning;
        ContainerStatus {
            name: container_name(listed).to_owned(),
            container_id: Some(format!("{}://{}", self.runtime, listed.id)),
            image: image(listed, details),
            image_id: listed.image_ref.clone(),
            ready: running,
            started: Some(running),
            restart_count: written.unwrap_or_else(|| i32::try_from(attempt).unwrap_or(i32::MAX)),
            state: Some(state(listed, details)),
            ..ContainerStatus::default()
        }
    }
}

/// Attempts of one container of a pod.
#[derive(Clone, Copy)]
struct Attempts<'a> {
    newest: &'a cri::Container,
    /// Creation time of the first attempt in the sandbox of the newest one.
    first: i64,
}

impl<'a> Attempts<'a> {
    fn of(one: &'a cri::Container) -> Self {
        Self { newest: one, first: one.created_at }
    }
}

/// Returns the pod's name: from the kubelet's labels, else the sandbox's own.
fn name(sandbox: &cri::PodSandbox) -> PodName {
    let metadata = sandbox.metadata.as_ref();
    let or = |label: &str, own: Option<&String>| {
        sandbox.labels.get(label).or(own).cloned().filter(|name| !name.is_empty())
    };
    PodName {
        namespace: or(labels::POD_NAMESPACE, metadata.map(|m| &m.namespace))
            .unwrap_or_else(|| "default".into()),
        name: or(labels::POD_NAME, metadata.map(|m| &m.name)).unwrap_or_else(|| sandbox.id.clone()),
    }
}

fn uid(sandbox: &cri::PodSandbox) -> String {
    let own = sandbox.metadata.as_ref().map(|metadata| &metadata.uid);
    sandbox.labels.get(labels::POD_UID).or(own).cloned().unwrap_or_default()
}

fn container_name(one: &cri::Container) -> &str {
    let own = one.metadata.as_ref().map(|metadata| &metadata.name);
    one.labels.get(labels::CONTAINER_NAME).or(own).map_or("", String::as_str)
}

/// Returns the requested name of the image, if the runtime kept it.
fn image(listed: &cri::Container, details: Option<&cri::ContainerStatus>) -> String {
    let told = details.and_then(|details| details.image.as_ref()).or(listed.image.as_ref());
    let Some(told) = told else { return String::new() };
    let asked = if told.user_specified_image.is_empty() { &told.image } else { &told.user_specified_image };
    asked.clone()
}

fn container(listed: &cri::Container) -> Container {
    Container {
        name: container_name(listed).to_owned(),
        image: Some(image(listed, None)),
        ..Container::default()
    }
}

fn state(listed: &cri::Container, details: Option<&cri::ContainerStatus>) -> ContainerState {
    let time = |at: fn(&cri::ContainerStatus) -> i64| details.map(at).and_then(timestamp).map(Time);
    match listed.state() {
        cri::ContainerState::ContainerRunning => ContainerState {
            running: Some(ContainerStateRunning { started_at: time(|d| d.started_at) }),
            ..ContainerState::default()
        },
        cri::ContainerState::ContainerExited => ContainerState {
            terminated: Some(ContainerStateTerminated {
                exit_code: details.map_or(0, |details| details.exit_code),
                reason: details.map(|details| details.reason.clone()).filter(|reason| !reason.is_empty()),
                started_at: time(|d| d.started_at),
                finished_at: time(|d| d.finished_at),
                ..ContainerStateTerminated::default()
            }),
            ..ContainerState::default()
        },
        cri::ContainerState::ContainerCreated => waiting("ContainerCreated"),
        cri::ContainerState::ContainerUnknown => waiting("ContainerStatusUnknown"),
    }
}

fn waiting(reason: &str) -> ContainerState {
    ContainerState {
        waiting: Some(ContainerStateWaiting { reason: Some(reason.to_owned()), message: None }),
        ..ContainerState::default()
    }
}

/// Returns the pod's phase: a pod runs while its sandbox is up, also between two attempts of its containers,
/// and has ended once the sandbox is down.
fn phase(sandbox: &cri::PodSandbox, statuses: &[ContainerStatus]) -> &'static str {
    match sandbox.state() {
        _ if statuses.is_empty() => "Pending",
        cri::PodSandboxState::SandboxReady => "Running",
        cri::PodSandboxState::SandboxNotready => {
            let well = |status: &ContainerStatus| {
                let ended = status.state.as_ref().and_then(|state| state.terminated.as_ref());
                ended.is_some_and(|ended| ended.exit_code == 0)
            };
            if statuses.iter().all(well) { "Succeeded" } else { "Failed" }
        }
    }
}

/// Returns a condition with unknown readiness: only the kubelet knows it.
fn unknown_readiness() -> PodCondition {
    PodCondition {
        type_: "Ready".to_owned(),
        status: "Unknown".to_owned(),
        reason: Some(OBSERVED.to_owned()),
        ..PodCondition::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sandbox(id: &str, created_at: i64, ready: bool, labels: &[(&str, &str)]) -> cri::PodSandbox {
        cri::PodSandbox {
            id: id.into(),
            metadata: Some(cri::PodSandboxMetadata {
                name: "web".into(),
                uid: "u".into(),
                namespace: "shop".into(),
                attempt: 0,
            }),
            state: i32::from(!ready),
            created_at,
            labels: labels.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect(),
            ..Default::default()
        }
    }

    fn container(id: &str, sandbox: &str, attempt: u32, state: cri::ContainerState) -> cri::Container {
        cri::Container {
            id: id.into(),
            pod_sandbox_id: sandbox.into(),
            metadata: Some(cri::ContainerMetadata { name: "app".into(), attempt }),
            state: state.into(),
            created_at: i64::from(attempt) + 1,
            ..Default::default()
        }
    }

    fn table(
        sandboxes: &[cri::PodSandbox],
        containers: &[cri::Container],
        before: &PodTable,
    ) -> Option<PodTable> {
        let details = containers.iter().map(|one| {
            let status = cri::ContainerStatus {
                id: one.id.clone(),
                state: one.state,
                started_at: 1_000_000_000,
                exit_code: 3,
                reason: "Error".into(),
                ..Default::default()
            };
            (one.id.clone(), status)
        });
        Listing {
            node: "n",
            runtime: "containerd",
            sandboxes,
            containers,
            sandbox_details: &HashMap::new(),
            container_details: &details.collect(),
        }
        .table(before)
    }

    #[test]
    fn a_pod_is_its_newest_sandbox_and_the_newest_attempt_of_its_containers() {
        use cri::ContainerState::{ContainerExited, ContainerRunning};
        let sandboxes = [sandbox("s1", 1, false, &[]), sandbox("s2", 2, true, &[])];
        let containers =
            [container("c1", "s2", 0, ContainerExited), container("c2", "s2", 1, ContainerRunning)];
        let table = table(&sandboxes, &containers, &PodTable::default()).unwrap();
        let (name, entry) = table.pods.get_min().unwrap();
        assert_eq!((name.to_string().as_str(), table.pods.len()), ("shop/web", 1));
        let status = entry.pod.status.as_ref().unwrap();
        assert_eq!(status.phase.as_deref(), Some("Running"));
        let container = &status.container_statuses.as_ref().unwrap()[0];
        assert_eq!(container.container_id.as_deref(), Some("containerd://c2"));
        assert_eq!((container.restart_count, container.ready), (1, true));
        assert!(container.state.as_ref().unwrap().running.as_ref().unwrap().started_at.is_some());
    }

    /// A container: its name, its creation time, and the exit code and the time of its end.
    type Made<'a> = (&'a str, i64, Option<(i32, i64)>);

    /// Returns the init containers and the others of a pod with these containers.
    fn roles(containers: &[Made<'_>]) -> (Vec<String>, Vec<String>) {
        use cri::ContainerState::{ContainerExited, ContainerRunning};
        let state = |end: &Option<(i32, i64)>| if end.is_some() { ContainerExited } else { ContainerRunning };
        let listed = containers.iter().enumerate().map(|(number, (name, created_at, end))| cri::Container {
            id: format!("{name}-{number}"),
            pod_sandbox_id: "s".into(),
            metadata: Some(cri::ContainerMetadata { name: (*name).into(), attempt: 0 }),
            state: state(end).into(),
            created_at: *created_at,
            ..Default::default()
        });
        let listed: Vec<_> = listed.collect();
        let details = containers.iter().zip(&listed).map(|((_, _, end), one)| {
            let (exit_code, finished_at) = end.unwrap_or_default();
            let (id, state) = (one.id.clone(), one.state);
            let status = cri::ContainerStatus { id, state, exit_code, finished_at, ..Default::default() };
            (one.id.clone(), status)
        });
        let listing = Listing {
            node: "n",
            runtime: "containerd",
            sandboxes: &[sandbox("s", 1, true, &[])],
            containers: &listed,
            sandbox_details: &HashMap::new(),
            container_details: &details.collect(),
        };
        let table = listing.table(&PodTable::default()).unwrap();
        let entry = table.pods.values().next().unwrap();
        let status = entry.pod.status.clone().unwrap();
        let names = |of: Option<Vec<ContainerStatus>>| of.into_iter().flatten().map(|one| one.name).collect();
        (names(status.init_container_statuses), names(status.container_statuses))
    }

    #[test]
    fn an_init_container_that_is_done_is_told_from_the_pods_own() {
        let check = |containers: &[Made<'_>], inits: &[&str], own: &[&str]| {
            let (found, others) = roles(containers);
            assert_eq!(
                (found.join(" "), others.join(" ")),
                (inits.join(" "), own.join(" ")),
                "{containers:?}"
            );
        };
        check(
            &[("a", 10, Some((0, 20))), ("b", 30, Some((0, 40))), ("app", 50, None)],
            &["a", "b"],
            &["app"],
        );
        // A sidecar runs before the next init container is created.
        check(&[("side", 10, None), ("b", 30, Some((0, 40))), ("app", 50, None)], &["b"], &["side", "app"]);
        // The pod's own containers are created before any of them has ended, and may be created again after
        // it.
        check(&[("one", 10, Some((0, 60))), ("app", 12, None)], &[], &["one", "app"]);
        check(
            &[("one", 10, Some((0, 60))), ("app", 12, Some((1, 70))), ("app", 80, None)],
            &[],
            &["one", "app"],
        );
        // A failed container did not cause the next one.
        check(&[("one", 10, Some((1, 20))), ("app", 30, None)], &[], &["one", "app"]);
        // The last container may be the pod's only one.
        check(&[("one", 10, Some((0, 20)))], &[], &["one"]);
    }

    #[test]
    fn the_kubelets_labels_go_before_the_sandboxes_own_names() {
        let labels = [(labels::POD_NAME, "p"), (labels::POD_NAMESPACE, "ns"), (labels::POD_UID, "uid-1")];
        let table = table(&[sandbox("s1", 1, true, &labels)], &[], &PodTable::default()).unwrap();
        let (name, entry) = table.pods.get_min().unwrap();
        assert_eq!((name.to_string().as_str(), entry.pod.metadata.uid.as_deref()), ("ns/p", Some("uid-1")));
        assert_eq!(entry.pod.status.as_ref().unwrap().phase.as_deref(), Some("Pending"));
    }

    #[test]
    fn a_sandbox_that_is_down_is_a_pod_that_has_ended() {
        let containers = [container("c1", "s1", 0, cri::ContainerState::ContainerExited)];
        let table = table(&[sandbox("s1", 1, false, &[])], &containers, &PodTable::default()).unwrap();
        let entry = table.pods.values().next().unwrap();
        let status = entry.pod.status.as_ref().unwrap();
        assert_eq!(status.phase.as_deref(), Some("Failed"));
        let ended = status.container_statuses.as_ref().unwrap()[0].state.clone().unwrap().terminated.unwrap();
        assert_eq!((ended.exit_code, ended.reason.as_deref()), (3, Some("Error")));
    }

    #[test]
    fn where_nothing_changed_there_is_no_new_table_and_entries_stay_the_same() {
        let running = cri::ContainerState::ContainerRunning;
        let mut other = sandbox("s2", 1, true, &[]);
        other.metadata.as_mut().unwrap().name = "other".into();
        let sandboxes = [sandbox("s1", 1, true, &[]), other];
        let first = table(&sandboxes, &[container("c1", "s1", 0, running)], &PodTable::default()).unwrap();
        assert!(table(&sandboxes, &[container("c1", "s1", 0, running)], &first).is_none());
        let second = table(&sandboxes, &[container("c2", "s1", 1, running)], &first).unwrap();
        let same = |name: &str| {
            let name = PodName { namespace: "shop".into(), name: name.into() };
            Arc::ptr_eq(&first.pods[&name], &second.pods[&name])
        };
        assert!(same("other") && !same("web"));
        assert_eq!(table(&sandboxes[..1], &[], &second).unwrap().pods.len(), 1);
    }
}
