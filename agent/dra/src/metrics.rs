//! Metrics of claims and driver calls, under the kubelet's names.

use std::time::Duration;

use beelet_policy::dra::Ledger;
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{family::Family, gauge::Gauge, histogram::Histogram},
    registry::Registry,
};

/// Label value for all drivers together.
const ANY: &str = "<any>";
/// Bucket bounds in seconds: 15 from 0.1 to 40, at a constant ratio.
const FIRST: f64 = 0.1;
const LAST: f64 = 40.0;
const BOUNDS: i32 = 15;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Operation {
    operation_name: &'static str,
    is_error: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Called {
    driver_name: String,
    method_name: String,
    grpc_status_code: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfDriver {
    driver_name: String,
}

fn durations() -> Histogram {
    let factor = (LAST / FIRST).powf(1.0 / f64::from(BOUNDS - 1));
    Histogram::new((0..BOUNDS).map(|i| FIRST * factor.powi(i)))
}

/// Metrics of claims and drivers; clones share them.
#[derive(Clone, Debug)]
pub struct Metrics {
    operations: Family<Operation, Histogram, fn() -> Histogram>,
    calls: Family<Called, Histogram, fn() -> Histogram>,
    in_use: Family<OfDriver, Gauge>,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            operations: Family::new_with_constructor(durations as fn() -> Histogram),
            calls: Family::new_with_constructor(durations as fn() -> Histogram),
            in_use: Family::default(),
        }
    }
}

impl Metrics {
    /// Adds them to the registry.
    pub fn register(&self, registry: &mut Registry) {
        let help = "Duration of preparing or unpreparing all ResourceClaims of a pod in seconds";
        registry.register("dra_operations_duration_seconds", help, self.operations.clone());
        let help = "Duration of DRA driver calls in seconds";
        registry.register("dra_grpc_operations_duration_seconds", help, self.calls.clone());
        let help = "Prepared ResourceClaims, by driver and in total (<any>)";
        registry.register("dra_resource_claims_in_use", help, self.in_use.clone());
    }

    pub(crate) fn operated(&self, operation_name: &'static str, failed: bool, took: Duration) {
        let is_error = if failed { "true" } else { "false" };
        self.operations.get_or_create(&Operation { operation_name, is_error }).observe(took.as_secs_f64());
    }

    pub(crate) fn called(&self, driver: &str, method: &str, code: &str, took: Duration) {
        let called = Called {
            driver_name: driver.to_owned(),
            method_name: method.to_owned(),
            grpc_status_code: code.to_owned(),
        };
        self.calls.get_or_create(&called).observe(took.as_secs_f64());
    }

    /// Updates the gauges. Drivers without claims have no series, as under the kubelet.
    pub(crate) fn in_use(&self, ledger: &Ledger) {
        let (by_driver, all) = ledger.in_use();
        self.in_use.clear();
        for (driver_name, count) in by_driver.into_iter().chain([(ANY.to_owned(), all)]) {
            let count = i64::try_from(count).unwrap_or(i64::MAX);
            self.in_use.get_or_create(&OfDriver { driver_name }).set(count);
        }
    }
}
