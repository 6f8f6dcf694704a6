//! `/metrics/slis`: results of the checks behind `/healthz`, under the names of Kubernetes' components
//! (KEP-3466).

use std::sync::{Arc, Mutex, PoisonError};

use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};

use super::ApiState;
use super::exposition::Format;
use beelet_stats::metrics::{Kind, Page};

/// Names of the checks. An answer passes the first two: the agent is alive and writes its log.
const CHECKS: [&str; 3] = ["ping", "log", "syncloop"];

pub(super) type Metric = (&'static str, Kind, &'static str);
pub(super) const LAST: Metric = ("kubernetes_healthcheck", Kind::Gauge, "1 if the last check passed, else 0");
pub(super) const TOTAL: Metric = ("kubernetes_healthchecks_total", Kind::Counter, "Checks by result");

/// Results of the checks since the start. Clones share the counters.
#[derive(Clone, Debug, Default)]
pub struct Slis(Arc<Mutex<[Check; CHECKS.len()]>>);

#[derive(Clone, Copy, Debug, Default)]
struct Check {
    passed: u64,
    failed: u64,
    last: Option<bool>,
}

impl Slis {
    /// Records one run of all checks; `healthy` is the result of the last one.
    pub(super) fn record(&self, healthy: bool) {
        let mut checks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for (check, passed) in checks.iter_mut().zip([true, true, healthy]) {
            check.passed += u64::from(passed);
            check.failed += u64::from(!passed);
            check.last = Some(passed);
        }
    }

    fn page(&self) -> String {
        let checks = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut page = Page::default();
        for (name, check) in CHECKS.iter().zip(checks) {
            if let Some(passed) = check.last {
                page.sample(LAST, &[("name", name), ("type", "healthz")], f64::from(u8::from(passed)), None);
            }
        }
        for (name, check) in CHECKS.iter().zip(checks) {
            for (status, count) in [("success", check.passed), ("error", check.failed)] {
                if count > 0 {
                    let labels = [("name", *name), ("status", status), ("type", "healthz")];
                    page.sample(TOTAL, &labels, count as f64, None);
                }
            }
        }
        page.finish()
    }
}

pub(super) async fn slis(State(state): State<ApiState>) -> Response {
    ([(header::CONTENT_TYPE, Format::Text.content_type())], state.slis.page()).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checks_are_counted_by_how_they_went() {
        let slis = Slis::default();
        assert!(!slis.page().contains("kubernetes"));
        for healthy in [true, true, false] {
            slis.record(healthy);
        }
        let page = slis.page();
        for line in [
            "kubernetes_healthcheck{name=\"ping\",type=\"healthz\"} 1",
            "kubernetes_healthcheck{name=\"syncloop\",type=\"healthz\"} 0",
            "kubernetes_healthchecks_total{name=\"log\",status=\"success\",type=\"healthz\"} 3",
            "kubernetes_healthchecks_total{name=\"syncloop\",status=\"success\",type=\"healthz\"} 2",
            "kubernetes_healthchecks_total{name=\"syncloop\",status=\"error\",type=\"healthz\"} 1",
        ] {
            assert!(page.lines().any(|one| one == line), "no {line} in\n{page}");
        }
    }
}
