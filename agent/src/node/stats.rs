//! The measuring of containers: the sampling of their counters, the kernel's edges, the gRPC service and the
//! metrics of both. The same for `run` and for `observe`.

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
use beelet_stats::metrics::{Containers, Metrics};
use beelet_stats::{Inbox, KernelReading, Parts, Sampling};

/// What servers need of the measuring; made before anything is measured.
#[derive(Debug, Clone)]
pub(super) struct Stats {
    /// Containers' numbers.
    pub(super) pressure: beelet_stats::Stats,
    feed: Feed,
    metrics: Metrics,
}

/// How measuring is configured.
pub(super) struct Options {
    /// The node's name.
    pub(super) node: String,
    /// Between two readings while somebody looks.
    pub(super) interval: Duration,
    /// More containers are left out.
    pub(super) most: usize,
    /// What pods have on disk.
    pub(super) disk: Box<dyn DiskUse>,
    /// What their volumes have.
    pub(super) volumes: watch::Receiver<VolumesUse>,
}

impl Stats {
    /// Not measuring yet.
    pub(super) fn new() -> (Self, Inbox) {
        let (pressure, inbox) = beelet_stats::channel();
        (Self { pressure, feed: Feed::default(), metrics: Metrics::default() }, inbox)
    }

    /// Adds the metrics to `registry`.
    pub(super) fn register(&self, registry: &mut Registry, pod_uid: bool) {
        self.metrics.register(registry);
        registry.register_collector(Box::new(Containers { pressure: self.pressure.clone(), pod_uid }));
    }

    /// The gRPC service.
    pub(super) fn service(&self, mode: Mode, serving: &CancellationToken) -> SignalsServer<impl Service> {
        signals::service(self.pressure.clone(), self.feed.clone(), mode, serving.clone())
    }

    /// Starts measuring.
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

/// Reads the kernel programs' counters for the sampling.
fn snapshot(kernel: &Kernel) -> beelet_stats::Snapshot {
    let Some(measures) = kernel.measures() else { return Box::new(|| None) };
    let mut interference = Interference::new(measures.clone());
    let mut read = move || {
        let counters = measures.snapshot()?;
        let interfering = interference.read(&counters)?;
        Ok::<_, KernelError>(KernelReading { counters, interfering })
    };
    let mut said = false;
    Box::new(move || match read() {
        Ok(reading) => {
            said = false;
            Some(reading)
        }
        Err(error) => {
            if !std::mem::replace(&mut said, true) {
                tracing::warn!("{error}; the files have to do meanwhile");
            }
            None
        }
    })
}
