//! Tests of kill -9 at every step between a pod's request for devices and its start: afterwards each device
//! belongs to at most one pod, and no device is lost.

use std::collections::BTreeSet;
use std::path::Path;

use beelet_tests::cri::{Asked, Held, Op};
use beelet_tests::device_plugin::SamplePlugin;
use beelet_tests::workdir::{self, PATIENCE};
use serde_json::{Value, json};

use super::devices::{
    PLUGIN, RESOURCE, config, env, failed, held, node, plugin, pod_wanting, until_capacity,
    until_capacity_of, wanting, wanting_of,
};
use super::node::{InWrite, Node, pod, with};

/// Second resource, allocated after the first one.
const SECOND: &str = "example.com/second";

/// Step at which the agent is killed.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kill {
    /// The plugin has received GetPreferredAllocation, and has not answered.
    InPreferred,
    /// The plugin has received Allocate, and has not answered.
    InAllocate,
    /// The first container has its device, the second one does not.
    BetweenContainers,
    /// The first plugin has allocated, the second one has not.
    BetweenPlugins,
    /// The plugin has answered, and the write of the checkpoint has reached this step.
    InCheckpoint(InWrite),
    /// The plugin has received PreStartContainer, and has not answered.
    InPreStart,
    /// A later call to the runtime.
    At(Op),
}

/// Returns the pod's containers, which request two devices of the first resource, and one of the second if
/// `kill` needs it.
fn wishes(kill: Kill) -> Value {
    match kill {
        Kill::BetweenContainers => json!([wanting("main", 1), wanting("side", 1)]),
        Kill::BetweenPlugins => {
            let mut both = wanting("main", 2);
            both["resources"]["limits"][SECOND] = json!(1);
            json!([both])
        }
        _ => json!([wanting("main", 2)]),
    }
}

/// Returns the devices that a pod's containers were started with, from the environment variables that the
/// plugins set.
fn started_with(node: &Node, pod: &str, containers: &[&str]) -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    for container in containers {
        let config = config(node, pod, container);
        for name in ["SAMPLE_DEVICES", "SECOND_DEVICES"] {
            for id in env(&config, name).unwrap_or_default().split(',').filter(|id| !id.is_empty()) {
                assert!(all.insert(id.to_owned()), "two containers of {pod} have {id}");
            }
        }
    }
    all
}

/// Prepares a stop at the step, applies the pod, and waits until the step is reached.
async fn stop_at(
    kill: Kill,
    node: &Node,
    plugin: &mut SamplePlugin,
    second: &mut SamplePlugin,
) -> Option<Held> {
    let mut call = None;
    match kill {
        Kill::InPreferred => plugin.run("preferred hold").unwrap(),
        Kill::InAllocate => plugin.run("allocate hold").unwrap(),
        Kill::BetweenContainers => plugin.run("allocate hold b").unwrap(),
        Kill::BetweenPlugins => second.run("allocate hold").unwrap(),
        Kill::InCheckpoint(at) => node.store.stop_at(at),
        Kill::InPreStart => plugin.run("prestart hold").unwrap(),
        Kill::At(op) => call = Some(node.cri.on(op).hold()),
    }
    node.apply(&with(pod("web"), "containers", wishes(kill)));
    match kill {
        Kill::InPreferred => drop(plugin.hear("preferred").unwrap()),
        Kill::InAllocate => assert_eq!(plugin.hear("allocate").unwrap(), "a b"),
        Kill::BetweenContainers => {
            assert_eq!(plugin.hear("allocated").unwrap(), "a");
            assert_eq!(plugin.hear("allocate b").unwrap(), "");
        }
        Kill::BetweenPlugins => {
            assert_eq!(plugin.hear("allocated").unwrap(), "a b");
            assert_eq!(second.hear("allocate").unwrap(), "x");
        }
        Kill::InCheckpoint(_) => node.store.until_reached().await,
        Kill::InPreStart => drop(plugin.hear("prestart").unwrap()),
        Kill::At(_) => call.as_ref().unwrap().reached().await,
    }
    call
}

async fn converges_after(kill: Kill) {
    let mut node = node(300, &[]).await;
    let mut plugin = plugin(&node, &["--devices", "a b c", "--preferred", "--pre-start"]);
    let of_second =
        ["--resource", SECOND, "--socket", "second.sock", "--devices", "x y", "--env", "SECOND_DEVICES"];
    let mut second =
        SamplePlugin::registered(Path::new(PLUGIN), &node.path("kubelet/device-plugins"), &of_second)
            .unwrap();
    until_capacity(&node, 3, 3).await;
    until_capacity_of(&node, SECOND, 2, 2).await;
    let call = stop_at(kill, &node, &mut plugin, &mut second).await;
    node.kill_in_write().await;
    drop(call);
    node.cri.heal();
    for line in ["preferred ok", "allocate ok", "prestart ok", "go"] {
        plugin.run(line).unwrap();
        second.run(line).unwrap();
    }
    node.start().await;
    let web = node.until_ready("web").await;
    let (containers, running) = match kill {
        Kill::BetweenContainers => (&["main", "side"][..], "main/0+ side/0+"),
        _ => (&["main"][..], "main/0+"),
    };
    let of_web = started_with(&node, "web", containers);
    assert_eq!(held(&node, &web), of_web, "{kill:?}");
    let expected = if kill == Kill::BetweenPlugins { 3 } else { 2 };
    assert_eq!(of_web.len(), expected, "{kill:?}");
    assert_eq!(node.containers("web"), running, "{kill:?}");
    // The next write replaces the temporary file.
    let removed = || if node.store.temporary().exists() { Err("the file still exists") } else { Ok(()) };
    workdir::wait_for("the removal of the temporary file", PATIENCE, removed).unwrap();
    // Other pods get exactly the remaining devices.
    node.apply(&pod_wanting("other", 1));
    node.until_ready("other").await;
    assert!(started_with(&node, "other", &["main"]).is_disjoint(&of_web), "{kill:?}");
    let left = if kill == Kill::BetweenPlugins { 1 } else { 2 };
    let rest = json!([wanting_of(SECOND, "main", left)]);
    node.apply(&with(pod("rest"), "containers", rest));
    node.until_ready("rest").await;
    assert!(started_with(&node, "rest", &["main"]).is_disjoint(&of_web), "{kill:?}");
    for (name, resource) in [("third", RESOURCE), ("fourth", SECOND)] {
        node.apply(&with(pod(name), "containers", json!([wanting_of(resource, "main", 1)])));
        node.until_pod(name, "to be refused", failed).await;
    }
    let asked = node.cri.calls();
    let created =
        asked.iter().filter(|call| matches!(call.asked, Asked::CreateContainer(_)) && call.succeeded());
    assert_eq!(created.count(), containers.len() + 2, "{kill:?}");
}

#[tokio::test]
async fn killed_during_a_call_to_a_plugin_the_agent_allocates_no_device_twice() {
    for kill in [Kill::InPreferred, Kill::InAllocate, Kill::BetweenContainers, Kill::BetweenPlugins] {
        converges_after(kill).await;
    }
}

#[tokio::test]
async fn killed_while_the_checkpoint_is_written_the_agent_allocates_no_device_twice() {
    for at in [InWrite::Before, InWrite::Half, InWrite::BeforeRename, InWrite::After] {
        converges_after(Kill::InCheckpoint(at)).await;
    }
}

#[tokio::test]
async fn killed_between_checkpoint_and_start_the_agent_allocates_no_device_twice() {
    for kill in [
        Kill::At(Op::RunPodSandbox),
        Kill::InPreStart,
        Kill::At(Op::CreateContainer),
        Kill::At(Op::StartContainer),
    ] {
        converges_after(kill).await;
    }
}
