//! Starts the parts that detect exits of containers: by the kernel, by the runtime's events and by the
//! relist.

use std::sync::Arc;

use tokio::sync::{mpsc, watch};

use super::{opened::Node, tasks::Tasks};
use beelet_bpf::Interest;
use beelet_model::{processes::Shared as Processes, request::Request};
use beelet_pleg::{
    ExitHint, HINTS, Pace,
    exits::{self, Exits},
    forward,
    relist::Relist,
    stream,
};

/// Name of the BPF program that reports exits, in the table of capabilities.
const EXIT_PROGRAM: &str = "task_exited";

/// Starts these parts. Returns a sender for other hints of a container's exit.
pub(super) fn follow(
    node: &Node,
    tasks: &mut Tasks,
    requests: &mpsc::Sender<Request>,
    processes: watch::Receiver<Processes>,
) -> mpsc::Sender<ExitHint> {
    let (runtime, metrics) = (&node.services.runtime, &node.services.metrics);
    let pace = Pace::default();
    let (relist, pulse) =
        Relist::new(runtime.clone(), requests.clone(), pace.clone(), metrics.relist.clone());
    node.services.health.follow(pulse);
    tasks.spawn("relist", relist.run(tasks.stop()));
    let (hints_out, hints) = mpsc::channel(HINTS);
    let reports = |c: &beelet_bpf::Capability| c.program == EXIT_PROGRAM && c.have.is_ok();
    pace.set_kernel(node.kernel.capabilities().iter().any(reports));
    let edges = node.kernel.subscribe(Interest::EXITS | Interest::OOM_KILLS);
    tasks.spawn("kernel exits", forward(edges, hints_out.clone(), tasks.stop()));
    let stream = stream::follow(runtime.clone(), hints_out.clone(), pace.clone(), tasks.stop());
    tasks.spawn_optional("runtime events", stream);
    let exits = Exits::new(exits::Parts {
        runtime: runtime.clone(),
        requests: requests.clone(),
        processes,
        hints,
        pace,
        cgroups: Arc::clone(&node.cgroups),
        metrics: metrics.exits.clone(),
    });
    tasks.spawn("exits", exits.run(tasks.stop()));
    hints_out
}
