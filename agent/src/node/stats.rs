//! Measuring of containers for `run` and `observe`: sampling of counters, the kernel's edges, the gRPC
//! service, and their metrics.

mod forward;
mod traffic;

use std::sync::Arc;
use std::time::Duration;

use beelet_proto::beelet::signals_server::{Signals as Service, SignalsServer};
use prometheus_client::registry::Registry;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::tasks::Tasks;
use beelet_api::signals::feed::Feed;
use beelet_api::signals::{self, Mode};
use beelet_bpf::{Interest, Interference, Kernel, KernelError};
use beelet_cgroups::Cgroups;
use beelet_model::{
    disk::{DiskUse, VolumesUse},
    table::PodTable,
};
use beelet_pinning::PinningReport;
use beelet_stats::metrics::{Containers, Metrics};
use beelet_stats::{Inbox, KernelReading, Parts, Sampling};

/// Handles of the measuring for servers, created before the measuring starts.
#[derive(Debug, Clone)]
pub(super) struct Stats {
    /// Measurements of containers.
    pub(super) pressure: beelet_stats::Stats,
    /// Use of exclusive CPUs.
    pub(super) pinned: watch::Sender<Arc<PinningReport>>,
    feed: Feed,
    metrics: Metrics,
}

/// Options of the measuring.
pub(super) struct Options {
    /// The node's name.
    pub(super) node: String,
    /// Interval of readings while a client is present.
    pub(super) interval: Duration,
    /// Maximum number of measured containers.
    pub(super) most: usize,
    /// Disk usage of pods.
    pub(super) disk: Box<dyn DiskUse>,
    /// Usage of pods' volumes.
    pub(super) volumes: watch::Receiver<VolumesUse>,
}

impl Stats {
    /// Creates the handles without starting the measuring.
    pub(super) fn new() -> (Self, Inbox) {
        let (pressure, inbox) = beelet_stats::channel();
        let pinned = watch::Sender::default();
        (Self { pressure, pinned, feed: Feed::default(), metrics: Metrics::default() }, inbox)
    }

    /// Registers the metrics.
    pub(super) fn register(&self, registry: &mut Registry, pod_uid: bool) {
        self.metrics.register(registry);
        registry.register_collector(Box::new(Containers { pressure: self.pressure.clone(), pod_uid }));
    }

    /// Returns the gRPC service.
    pub(super) fn service(&self, mode: Mode, serving: &CancellationToken) -> SignalsServer<impl Service> {
        let sources = (self.pressure.clone(), self.pinned.subscribe(), self.feed.clone());
        signals::service(sources, mode, serving.clone())
    }

    /// Starts the measuring.
    pub(super) fn start(
        self,
        inbox: Inbox,
        options: Options,
        (cgroups, table, kernel): (Arc<Cgroups>, watch::Receiver<Arc<PodTable>>, &Kernel),
        tasks: &mut Tasks,
    ) {
        if let Some(traffic) = kernel.traffic() {
            let demand = self.pressure.traffic_demand();
            tasks.spawn("traffic", traffic::run(traffic, demand, tasks.stop()));
        }
        let parts = Parts {
            cgroups,
            table,
            snapshot: snapshot(kernel),
            node: options.node,
            interval: options.interval,
            most: options.most,
            disk: options.disk,
            volumes: options.volumes,
            metrics: self.metrics,
        };
        tasks.spawn("sampling", Sampling::new(parts, inbox).run(tasks.stop()));
        let edges = kernel.subscribe(Interest::ALL);
        tasks.spawn("signals", forward::run(edges, self.feed, self.pressure, tasks.stop()));
    }
}

/// Returns the reader of the BPF programs' counters for the sampling.
fn snapshot(kernel: &Kernel) -> beelet_stats::Snapshot {
    let Some(measures) = kernel.measures() else { return Box::new(|| None) };
    let mut interference = Interference::new(measures.clone());
    let mut read = move || {
        let counters = measures.snapshot()?;
        let interfering = interference.read(&counters)?;
        Ok::<_, KernelError>(KernelReading { counters, interfering })
    };
    let mut failing = false;
    Box::new(move || match read() {
        Ok(reading) => {
            failing = false;
            Some(reading)
        }
        Err(error) => {
            if !std::mem::replace(&mut failing, true) {
                tracing::warn!("{error}; reading cgroup files instead");
            }
            None
        }
    })
}
