//! Runs the concurrent parts, by name. A part that panics, or ends too early, ends the agent with the cause:
//! otherwise the agent would look healthy and do only half its work. A restart is safe at any time and adopts
//! the running pods.

use std::{future::pending, panic::AssertUnwindSafe, time::Duration};

use anyhow::anyhow;
use futures::FutureExt;
use tokio::{sync::watch, task::JoinSet, time::timeout};
use tokio_util::sync::CancellationToken;
use tracing::error;

use beelet_base::blocking::message;

/// Tolerance for a part that ends shortly before all parts must end, because the part that it served has
/// ended.
const MOMENT: Duration = Duration::from_secs(1);

/// The first failure of any part. Clones share it.
#[derive(Clone, Debug, Default)]
pub(super) struct Failures(watch::Sender<Option<String>>);

impl Failures {
    /// Logs a failure, and stores the first one.
    fn add(&self, name: &str, what: &str) {
        let sentence = format!(
            "the agent's part {name:?} {what}: the agent exits for a restart, while pods keep running. This is a bug; please \
             report it with the preceding log lines"
        );
        error!("{sentence}");
        self.0.send_if_modified(|first| {
            let is_first = first.is_none();
            first.get_or_insert(sentence);
            is_first
        });
    }

    /// Waits for the first failure.
    pub(super) async fn first(&self) -> anyhow::Error {
        let mut failed = self.0.subscribe();
        let first = failed.wait_for(Option::is_some).await.ok().and_then(|first| first.clone());
        match first {
            Some(sentence) => anyhow!(sentence),
            None => pending().await,
        }
    }
}

/// Running parts that end together.
#[derive(Debug)]
pub(super) struct Tasks {
    tasks: JoinSet<()>,
    until: CancellationToken,
    failures: Failures,
}

impl Tasks {
    /// Creates an empty set of parts, which run until `until`.
    pub(super) fn new(until: &CancellationToken, failures: &Failures) -> Self {
        Self { tasks: JoinSet::new(), until: until.clone(), failures: failures.clone() }
    }

    /// Returns the token that is cancelled when the parts must end.
    pub(super) fn stop(&self) -> CancellationToken {
        self.until.clone()
    }

    /// Runs a part that must not end by itself.
    pub(super) fn spawn(&mut self, name: &'static str, part: impl Future<Output = ()> + Send + 'static) {
        self.run(name, async move {
            part.await;
            Some("ended by itself (the log says why)".to_owned())
        });
    }

    /// Runs a part that may end by itself if it has nothing (more) to do.
    pub(super) fn spawn_optional(
        &mut self,
        name: &'static str,
        part: impl Future<Output = ()> + Send + 'static,
    ) {
        self.run(name, part.map(|()| None));
    }

    /// Watches a part that runs elsewhere; `ended` returns the reason for its end.
    pub(super) fn watch(&mut self, name: &'static str, ended: impl Future<Output = String> + Send + 'static) {
        let until = self.until.clone();
        self.run(name, async move { until.run_until_cancelled(ended).await });
    }

    fn run(&mut self, name: &'static str, part: impl Future<Output = Option<String>> + Send + 'static) {
        let (until, failures) = (self.until.clone(), self.failures.clone());
        let part = on_demand(name, part);
        self.tasks.spawn(async move {
            match AssertUnwindSafe(part).catch_unwind().await {
                Err(panic) => failures.add(name, &format!("panicked: {}", message(&*panic))),
                Ok(None) => {}
                Ok(Some(ended)) => {
                    if timeout(MOMENT, until.cancelled()).await.is_err() {
                        failures.add(name, &ended);
                    }
                }
            }
        });
    }

    /// Waits until all parts have ended.
    pub(super) async fn ended(&mut self) {
        while self.tasks.join_next().await.is_some() {}
    }
}

/// Runs a part. In debug builds the part panics if `BEELET_PANIC` has its name, for tests.
#[allow(clippy::panic)] // the test requests the panic
async fn on_demand<T>(name: &str, part: impl Future<Output = T>) -> T {
    if cfg!(debug_assertions) && std::env::var_os("BEELET_PANIC").is_some_and(|wanted| wanted == name) {
        std::panic::panic_any("BEELET_PANIC has its name");
    }
    part.await
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts() -> (Tasks, Failures, CancellationToken) {
        let (failures, until) = (Failures::default(), CancellationToken::new());
        (Tasks::new(&until, &failures), failures, until)
    }

    #[tokio::test]
    async fn a_part_that_panics_is_a_failure_with_its_name_and_what_it_said() {
        let (mut parts, failures, until) = parts();
        parts.spawn("relist", async move { until.cancelled().await });
        parts.spawn("probes", async { std::panic::panic_any(format!("index {} of 3", 7)) });
        let said = failures.first().await.to_string();
        assert!(said.contains("part \"probes\" panicked: index 7 of 3"), "{said}");
        // The first failure stays.
        parts.spawn("eviction", async { std::panic::panic_any("too late") });
        while parts.tasks.len() > 1 {
            parts.tasks.join_next().await;
        }
        assert_eq!(failures.first().await.to_string(), said);
    }

    #[tokio::test]
    async fn a_part_that_ends_unasked_is_a_failure_unless_it_may() {
        let (mut parts, failures, until) = parts();
        parts.spawn_optional("event stream", async {});
        let told = until.clone();
        parts.spawn("relist", async move { told.cancelled().await });
        parts.spawn("exits", async {});
        let said = failures.first().await.to_string();
        assert!(said.contains("part \"exits\" ended by itself"), "{said}");
        until.cancel();
        parts.ended().await;
    }

    #[tokio::test]
    async fn what_ends_when_it_is_told_to_is_no_failure_but_a_panic_is() {
        let (mut parts, failures, until) = parts();
        let told = until.clone();
        parts.spawn("relist", async move { told.cancelled().await });
        parts.watch("kernel events", pending());
        until.cancel();
        parts.ended().await;
        assert!(failures.first().now_or_never().is_none());
        parts.spawn("probes", async { std::panic::panic_any("in the end") });
        assert!(failures.first().await.to_string().contains("in the end"));
    }

    #[tokio::test]
    async fn what_runs_elsewhere_says_itself_what_became_of_it() {
        let (mut parts, failures, _until) = parts();
        parts.watch("kernel events", async { "panicked: poll".to_owned() });
        let said = failures.first().await.to_string();
        assert!(said.contains("part \"kernel events\" panicked: poll"), "{said}");
    }
}
