//! `beelet run` on a fake runtime and with a scripted logind: the machine shuts down, cancels the shutdown,
//! and boots again.

#![allow(clippy::unwrap_used, clippy::panic)] // a failure in a helper fails the test

use std::time::Duration;

use beelet_proto::cri::ContainerState;
use beelet_testing::logind::{Bus, Logind};
use beelet_tests::agent::{Agent, Options};
use beelet_tests::cri::{FakeCri, Op};
use beelet_tests::guards::CgroupRoot;
use beelet_tests::pods::PodView;
use beelet_tests::{images, manifests, require, workdir};
use serde_json::{Value, json};
use tokio::runtime::Runtime;

/// Grace period longer than any test.
const PERIOD: &str = "10m";

/// The machine's parts, dropped in this order at the end of the test.
struct Machine {
    agent: Agent,
    logind: Logind,
    _bus: Bus,
    cri: FakeCri,
    _cgroup: CgroupRoot,
    _dir: tempfile::TempDir,
    /// Threads that serve the bus.
    threads: Runtime,
}

impl Machine {
    fn start() -> Machine {
        let bus = Bus::start().unwrap();
        let threads = Runtime::new().unwrap();
        let logind = threads.block_on(Logind::start(&bus, Duration::from_secs(7200)));
        let dir = tempfile::tempdir().unwrap();
        let cri = FakeCri::start();
        cri.add_image(images::APP);
        let cgroup = CgroupRoot::new(&workdir::unique("bd")).unwrap();
        let mut options = Options::at(dir.path(), "agent", &cri.endpoint(), &cgroup)
            .beelet("bpf", "off")
            .kubelet("shutdownGracePeriod", PERIOD)
            .kubelet("shutdownGracePeriodCriticalPods", "1m");
        options.mount_bpffs = false;
        options.environment = vec![("DBUS_SYSTEM_BUS_ADDRESS".to_owned(), bus.address())];
        let agent = Agent::start(options).unwrap();
        let machine = Machine { agent, logind, _bus: bus, cri, _cgroup: cgroup, _dir: dir, threads };
        machine.locks(1);
        machine
    }

    fn apply(&self, name: &str, priority: i32) {
        let mut pod = manifests::pod(name, &["/bin/testapp"]);
        pod["spec"]["priority"] = priority.into();
        pod["spec"]["volumes"] = json!([{ "name": "scratch", "emptyDir": {} }]);
        pod["spec"]["containers"][0]["volumeMounts"] =
            json!([{ "name": "scratch", "mountPath": "/scratch" }]);
        self.agent.apply(&format!("{name}.yaml"), pod.to_string()).unwrap();
    }

    fn wait(&self, pod: &str, what: &str, wanted: impl Fn(&PodView) -> bool + Sync) -> PodView {
        let found = self.agent.until(what, |watch| watch.pod(pod).filter(|pod| wanted(pod)).cloned());
        found.unwrap_or_else(|error| panic!("{error:#}\n{}", self.agent.log()))
    }

    fn runs(&self, pod: &str) -> PodView {
        self.wait(pod, &format!("{pod} to run"), |pod| pod.phase() == "Running")
    }

    fn locks(&self, count: usize) {
        self.threads.block_on(self.logind.locks(count));
    }

    fn readiness(&self) -> Value {
        let output = self.agent.cli(&["get", "node", "-o", "json"]).output().unwrap();
        let node: Value = serde_json::from_slice(&output.stdout).unwrap();
        let conditions = node["status"]["conditions"].as_array().unwrap();
        conditions.iter().find(|condition| condition["type"] == "Ready").unwrap().clone()
    }

    /// Returns true if any of the pod's volumes is left.
    fn has_volumes(&self, pod: &PodView) -> bool {
        self.agent.dir().join("pods").join(pod.uid()).exists()
    }
}

fn reason(pod: &PodView) -> &str {
    pod.pod.status.as_ref().and_then(|status| status.reason.as_deref()).unwrap_or_default()
}

#[test]
fn the_machine_shuts_down_after_all_pods_have_ended_by_priority_and_no_new_pod_starts() {
    require!(root, dbus_daemon);
    let machine = Machine::start();
    machine.apply("web", 0);
    machine.apply("dns", 2_000_000_000);
    let (web, dns) = (machine.runs("web"), machine.runs("dns"));
    assert!(machine.has_volumes(&web));
    assert_eq!(machine.readiness()["status"], "True");
    // web's containers stop slowly.
    let stopping = machine.cri.on(Op::StopContainer).hold();
    machine.threads.block_on(machine.logind.shut_down());
    machine.wait("web", "web to be ended", |pod| reason(pod) == "Terminated");
    workdir::wait_for("the call to stop web", workdir::PATIENCE, || {
        match machine.cri.count(Op::StopContainer) {
            0 => Err("no call yet"),
            _ => Ok(()),
        }
    })
    .unwrap();
    let ready = machine.readiness();
    assert_eq!((&ready["status"], &ready["message"]), (&json!("False"), &json!("node is shutting down")));
    machine.apply("late", 0);
    let late = machine.wait("late", "late to be refused", |pod| pod.phase() == "Failed");
    assert_eq!(reason(&late), "NodeShutdown");
    // The critical pod waits for the usual one.
    assert_eq!(machine.runs("dns").uid(), dns.uid());
    assert_eq!(machine.logind.held(), 1);
    stopping.release();
    machine.locks(0);
    for pod in [&web, &dns] {
        assert!(!machine.has_volumes(pod));
    }
    for name in ["web", "dns"] {
        let pod = machine.wait(name, "its last status", |pod| pod.phase() == "Failed");
        assert_eq!(reason(&pod), "Terminated");
        assert!(pod.condition("DisruptionTarget"));
        assert!(
            machine
                .cri
                .container(name, "main")
                .is_none_or(|container| container.state == ContainerState::ContainerExited)
        );
    }
}

#[test]
fn static_pods_run_again_after_a_cancelled_shutdown_and_after_a_boot() {
    require!(root, dbus_daemon);
    let mut machine = Machine::start();
    machine.apply("web", 0);
    machine.runs("web");
    machine.threads.block_on(machine.logind.shut_down());
    machine.locks(0);
    machine.wait("web", "web to be ended", |pod| pod.phase() == "Failed");
    machine.threads.block_on(machine.logind.call_off());
    machine.runs("web");
    machine.locks(1);
    assert_eq!(machine.readiness()["status"], "True");
    // The machine shuts down once more, and does not cancel.
    machine.threads.block_on(machine.logind.shut_down());
    machine.locks(0);
    machine.wait("web", "web to be ended", |pod| pod.phase() == "Failed");
    machine.agent.terminate().unwrap();
    machine.cri.reboot();
    machine.logind.boot();
    machine.agent.resume().unwrap();
    machine.runs("web");
    machine.locks(1);
    let file = machine.agent.dir().join("kubelet").join("graceful_node_shutdown_state");
    let state: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    assert!(state["startTime"].as_str() < state["endTime"].as_str(), "{state}");
}
