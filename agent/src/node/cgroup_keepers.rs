//! Starts the parts that write cgroups in addition to the workers: the keeper of the pods' tree, and the
//! tuner.

use std::sync::Arc;

use beelet_policy::tuner::scheduler::SchedulerKind;
use tokio::sync::mpsc;

use super::{kernel, opened::Node, tasks::Tasks};
use beelet_model::request::Request;
use beelet_pods::qos_tree;

/// Starts both parts. The keeper sends `requests` to the pods' manager.
pub(super) fn start(node: &Node, tasks: &mut Tasks, requests: mpsc::Sender<Request>) {
    let (services, cgroups) = (&node.services, &node.cgroups);
    let keeper = qos_tree::Dependencies {
        table: services.table.clone(),
        cgroups: Arc::clone(cgroups),
        config: node.cgroup_config.clone(),
        runtime: services.runtime.clone(),
        reserved: node.reserved.clone(),
        requests,
        metrics: services.metrics.qos_tree.clone(),
        check: services.doors.cgroup_check,
    };
    tasks.spawn("cgroup keeper", qos_tree::follow(keeper, tasks.stop()));
    let configured = &services.config.beelet.tuner;
    let tuner = beelet_tuner::Parts {
        table: services.table.clone(),
        cgroups: Arc::clone(cgroups),
        owner: beelet_tuner::Owner::Us(node.cgroup_config.clone()),
        scheduler: (configured.scheduler == SchedulerKind::SchedExt)
            .then(|| kernel::scheduler(Arc::clone(cgroups))),
        state: Arc::clone(&services.state),
        kernel: node.kernel.measures().map(kernel::for_tuner),
        settings: beelet_tuner::Settings {
            mode: configured.mode,
            interval: configured.interval,
            back_off: configured.back_off,
            law: configured.law,
            cold: beelet_tuner::ColdSettings { mode: configured.reclaim, law: configured.cold },
        },
        metrics: services.metrics.tuner.clone(),
        view: node.late.tuner.clone(),
    };
    let (view, name) = (node.late.tuner.subscribe(), services.config.node_name.clone());
    let events = beelet_tuner::record_events(view, services.events.clone(), name, tasks.stop());
    tasks.spawn_optional("tuner's events", events);
    tasks.spawn_optional("tuner", beelet_tuner::run(tuner, tasks.stop()));
}
