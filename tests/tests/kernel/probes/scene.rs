//! The probes' task with the kernel half, driven by the test.

use crate::place::Place;
use beelet_bpf::{Interest, Kernel};
use beelet_model::request::{ProbeUpdate, Request};
use beelet_model::table::{PodEntry, PodName, PodTable};
use beelet_policy::probe::settings::{Connections, ExecMode};
use beelet_policy::probe::{EdgePolicy, Outcome, ProbeKind, ProbeResult, listener::QueueRule};
use beelet_probes::{Handle, ProbeView, Probes, Settings, Wanted};
use beelet_state::events::Recorder;
use beelet_tests::workdir::{PATIENCE, wait_for};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

/// A period that no test reaches: every earlier update comes from an edge.
pub(crate) const NEVER: &str = "period=1h";

/// The probes of some pods, and their updates.
pub(crate) struct Scene {
    pub(crate) place: Place,
    pub(crate) kernel: Option<Kernel>,
    table: watch::Sender<Arc<PodTable>>,
    pub(crate) updates: mpsc::Receiver<Request>,
    handle: Handle,
    pub(crate) events: Recorder,
    shutdown: CancellationToken,
    runtime: tokio::runtime::Runtime,
    /// True if the lookup program may be used.
    looks_up: bool,
}

/// End of an agent.
#[derive(Clone, Copy, Debug)]
pub(crate) enum End {
    /// The agent is stopped and cleans up.
    Stop,
    /// The agent's tasks and threads end abruptly.
    Kill,
}

/// A pod under construction.
#[derive(Clone)]
pub(crate) struct Pod {
    pub(crate) json: Value,
    netns: Option<PathBuf>,
}

impl Pod {
    /// Creates a pod whose container `main` runs and has these probes.
    pub(crate) fn new(name: &str, place: &Place, probes: &[(&str, Value)], annotation: &str) -> Pod {
        let mut main = json!({ "name": "main", "image": "x" });
        for (kind, probe) in probes {
            main[format!("{kind}Probe")] = probe.clone();
        }
        let json = json!({
            "metadata": {
                "name": name, "namespace": "default", "uid": format!("uid-{name}"),
                "annotations": { "beelet.dev/probes": annotation },
            },
            "spec": { "containers": [main] },
            "status": {
                "podIPs": [{ "ip": "127.0.0.1" }],
                "containerStatuses": [status("main", "c1", false)],
            },
        });
        Pod { json, netns: Some(place.netns.path()) }
    }

    /// Moves the pod to the host's own network namespace.
    pub(crate) fn on_host(mut self) -> Pod {
        self.json["spec"]["hostNetwork"] = true.into();
        self.netns = None;
        self
    }

    /// Marks the pod ready, as in a status from before a restart of the agent.
    pub(crate) fn ready(mut self) -> Pod {
        self.json["status"]["containerStatuses"][0]["ready"] = true.into();
        self
    }

    fn entry(&self) -> Arc<PodEntry> {
        let pod = serde_json::from_value(self.json.clone()).unwrap();
        Arc::new(PodEntry { netns: self.netns.clone(), ..PodEntry::of(pod) })
    }
}

pub(crate) fn status(name: &str, id: &str, ready: bool) -> Value {
    json!({
        "name": name, "containerID": format!("fake://{id}"), "image": "x", "imageID": "x", "restartCount": 0,
        "ready": ready, "started": true, "state": { "running": { "startedAt": "2026-01-01T00:00:00Z" } },
    })
}

/// Returns a tcpSocket probe that fails at the first failure.
pub(crate) fn tcp(port: u16) -> Value {
    json!({ "tcpSocket": { "port": port }, "failureThreshold": 1 })
}

fn settings() -> Settings {
    Settings {
        tcp_by_kernel: true,
        edge_policy: EdgePolicy::Immediate,
        canary: Duration::ZERO,
        queue_rule: QueueRule::Room,
        exec: ExecMode::Runtime,
        connections: Connections::Fresh,
    }
}

impl Scene {
    pub(crate) fn new(name: &str) -> Scene {
        let place = Place::new(name);
        let kernel = place.start();
        Scene::with(place, kernel)
    }

    pub(crate) fn with(place: Place, kernel: Kernel) -> Scene {
        Scene::of(place, kernel, true)
    }

    /// Starts without the lookup program: only `socket_check` is missing.
    pub(crate) fn without_lookups(name: &str) -> Scene {
        let place = Place::new(name);
        let kernel = place.start();
        Scene::of(place, kernel, false)
    }

    fn of(place: Place, kernel: Kernel, looks_up: bool) -> Scene {
        let runtime = runtime();
        let table = watch::Sender::new(Arc::new(PodTable::default()));
        let shutdown = CancellationToken::new();
        let events = Recorder::default();
        let (handle, updates) = start(&runtime, &kernel, looks_up, &table, &events, &shutdown);
        Scene { place, kernel: Some(kernel), table, updates, handle, events, shutdown, runtime, looks_up }
    }

    /// Ends the task and the reader of the kernel's events, and starts both again.
    pub(crate) fn restart(&mut self, end: End, between: impl FnOnce()) {
        let kernel = self.kernel.take().unwrap();
        match end {
            End::Stop => {
                self.shutdown.cancel();
                kernel.stop(true).unwrap();
            }
            End::Kill => {
                // Every task is dropped in the middle of its work.
                drop(std::mem::replace(&mut self.runtime, runtime()));
                drop(kernel);
            }
        }
        between();
        let kernel = self.place.start();
        assert!(kernel.adopted());
        self.shutdown = CancellationToken::new();
        (self.handle, self.updates) =
            start(&self.runtime, &kernel, self.looks_up, &self.table, &self.events, &self.shutdown);
        self.kernel = Some(kernel);
    }

    pub(crate) fn show(&self, pods: &[Pod]) {
        let entries = pods.iter().map(|pod| {
            let entry = pod.entry();
            (PodName::of(&entry.pod), entry)
        });
        let table = PodTable { pods: entries.collect(), ..PodTable::default() };
        self.table.send_replace(Arc::new(table));
    }

    /// Returns the next change of any probe's state.
    pub(crate) fn next(&mut self) -> ProbeUpdate {
        let next = async { tokio::time::timeout(PATIENCE, self.updates.recv()).await };
        match self.runtime.block_on(next) {
            Ok(Some(Request::Probe(update))) => update,
            other => panic!("no change of a probe's state arrived: {other:?}"),
        }
    }

    /// Checks that the next change is this one.
    pub(crate) fn expect(&mut self, pod: &str, kind: ProbeKind, result: ProbeResult) -> ProbeUpdate {
        let update = self.next();
        let seen = (update.uid.as_str(), update.kind, update.result);
        assert_eq!(seen, (format!("uid-{pod}").as_str(), kind, result), "{update:?}");
        update
    }

    pub(crate) fn list(&self) -> Vec<ProbeView> {
        self.runtime.block_on(self.handle.list()).unwrap()
    }

    pub(crate) fn view(&self, pod: &str, kind: ProbeKind) -> ProbeView {
        self.list().into_iter().find(|probe| probe.pod == pod && probe.kind == kind).unwrap()
    }

    /// Waits until `wanted` is true for a probe.
    pub(crate) fn until(
        &self,
        pod: &str,
        kind: ProbeKind,
        what: &str,
        wanted: impl Fn(&ProbeView) -> bool,
    ) -> ProbeView {
        wait_for(what, PATIENCE, || {
            let view = self.view(pod, kind);
            if wanted(&view) { Ok(view) } else { Err(format!("{view:?}")) }
        })
        .unwrap()
    }

    /// Probes once now, as `beelet probe run` does.
    pub(crate) fn run(&self, pod: &str, container: &str, kind: ProbeKind) -> Outcome {
        let wanted =
            Wanted { namespace: String::new(), pod: pod.to_owned(), container: container.to_owned(), kind };
        self.runtime.block_on(self.handle.run(wanted)).unwrap().check.outcome
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        self.shutdown.cancel();
        if let Some(kernel) = self.kernel.take() {
            let _ = kernel.stop(false);
        }
    }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

fn start(
    runtime: &tokio::runtime::Runtime,
    kernel: &Kernel,
    looks_up: bool,
    table: &watch::Sender<Arc<PodTable>>,
    events: &Recorder,
    shutdown: &CancellationToken,
) -> (Handle, mpsc::Receiver<Request>) {
    let (requests, updates) = mpsc::channel(1024);
    let (handle, commands) = beelet_probes::handle();
    let task = Probes::new(beelet_probes::Parts {
        table: table.subscribe(),
        requests,
        runtime: None,
        listeners: kernel.listeners(),
        checker: kernel.checker().filter(|_| looks_up),
        edges: kernel.subscribe(Interest::LISTENERS),
        commands,
        settings: settings(),
        events: events.clone(),
        metrics: beelet_probes::Metrics::default(),
        exec_socket: "/nonexistent".into(),
        asking: runtime.handle().clone(),
    });
    runtime.spawn(task.run(shutdown.clone()));
    (handle, updates)
}
