//! Durations of calls of drivers, under the kubelet's name.

use std::time::Duration;

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{family::Family, histogram::Histogram},
    registry::Registry,
};

/// Upper bounds of the buckets of durations, in seconds: the kubelet's.
const BUCKETS: [f64; 14] =
    [0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 25.0, 50.0, 120.0, 300.0, 600.0, 1800.0];

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Called {
    driver_name: String,
    method_name: String,
    grpc_status_code: String,
    migrated: &'static str,
}

fn durations() -> Histogram {
    Histogram::new(BUCKETS)
}

/// Durations of calls of drivers. Clones share the counts.
#[derive(Clone, Debug)]
pub struct Metrics(Family<Called, Histogram, fn() -> Histogram>);

impl Default for Metrics {
    fn default() -> Self {
        Self(Family::new_with_constructor(durations as fn() -> Histogram))
    }
}

impl Metrics {
    /// Adds the metric to the registry.
    pub fn register(&self, registry: &mut Registry) {
        let help = "Duration of calls of storage plugins, in seconds";
        registry.register("csi_operations_seconds", help, self.0.clone());
    }

    pub(crate) fn called(&self, driver: &str, method: &str, code: tonic::Code, took: Duration) {
        let called = Called {
            driver_name: driver.to_owned(),
            method_name: format!("/csi.v1.Node/{method}"),
            grpc_status_code: format!("{code:?}"),
            migrated: "false",
        };
        self.0.get_or_create(&called).observe(took.as_secs_f64());
    }
}
