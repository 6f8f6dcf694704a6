//! Reasons why pods are not ready, from their statuses and events, which snapshots lack. The agent is asked
//! only while a snapshot has unready pods, and in parallel: a snapshot never waits for this.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use beelet_client::Client;
use beelet_proto::beelet::SignalSnapshot;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use tokio::sync::watch;
use tokio::time::sleep;

use crate::get::pod::state;
use crate::why::Warnings;

/// Pause between two queries; each covers all pods.
const PAUSE: Duration = Duration::from_secs(2);

/// Known reasons by pod UID.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Causes(HashMap<String, Cause>);

#[derive(Debug, Clone, PartialEq, Eq)]
struct Cause {
    /// State, as `get pods` prints it.
    state: String,
    /// Reason why the pod is not ready, as the column WHY prints it.
    why: Option<String>,
}

impl Causes {
    /// Asks the agent once. Without events (`observe`) or without an answer, the result is empty.
    pub(super) async fn ask(socket: &std::path::Path) -> Self {
        let answer = async {
            let mut client = Client::connect(socket).await.ok()?;
            let (table, _) = client.pods.list().await.ok()?;
            let warnings = Warnings::read(&mut client).await.ok()?;
            Some(Self::of(table.pods.values().map(|entry| &entry.pod), &warnings, Timestamp::now()))
        };
        answer.await.unwrap_or_default()
    }

    fn of<'a>(pods: impl Iterator<Item = &'a Pod>, warnings: &Warnings, now: Timestamp) -> Self {
        let cause = |pod: &Pod| Cause { state: state(pod), why: warnings.why(pod, now) };
        Self(pods.filter_map(|pod| Some((pod.metadata.uid.clone()?, cause(pod)))).collect())
    }

    /// Writes the known reasons to the snapshot's pods that are not ready.
    pub(super) fn apply_to(&self, snapshot: &mut SignalSnapshot) {
        for pod in snapshot.pods.iter_mut().filter(|pod| pod.ready == Some(false)) {
            let Some(cause) = self.0.get(&pod.uid) else { continue };
            if let Some(why) = &cause.why {
                pod.not_ready.clone_from(why);
            }
            pod.phase.clone_from(&cause.state);
        }
    }
}

/// Returns true if a pod is not ready.
pub(super) fn are_wanted(snapshot: &SignalSnapshot) -> bool {
    snapshot.pods.iter().any(|pod| pod.ready == Some(false))
}

/// Task that asks the agent on request.
pub(super) struct Asker {
    wanted: watch::Sender<()>,
    known: watch::Receiver<Arc<Causes>>,
}

impl Asker {
    /// Starts a task that asks at this socket until the value is dropped.
    pub(super) fn start(socket: PathBuf) -> Self {
        let (wanted, mut asked) = watch::channel(());
        let (sender, known) = watch::channel(Arc::default());
        tokio::spawn(async move {
            while asked.changed().await.is_ok() {
                let causes = Causes::ask(&socket).await;
                sender.send_if_modified(|known: &mut Arc<Causes>| {
                    let is_new = **known != causes;
                    *known = Arc::new(causes);
                    is_new
                });
                sleep(PAUSE).await;
            }
        });
        Self { wanted, known }
    }

    /// Requests a query.
    pub(super) fn want(&self) {
        self.wanted.send_replace(());
    }

    /// Waits for new reasons. Cancel safe.
    pub(super) async fn next(&mut self) -> Arc<Causes> {
        if self.known.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
        Arc::clone(&self.known.borrow_and_update())
    }
}

#[cfg(test)]
mod tests {
    use beelet_proto::beelet as proto;
    use serde_json::json;

    use super::super::rows::tests::snapshot;
    use super::*;

    #[test]
    fn a_pod_that_is_not_ready_has_the_state_and_the_cause_of_get_pods() {
        let crash = json!({"metadata": {"name": "web", "uid": "shop-web"},
            "spec": {"initContainers": [{"name": "setup"}], "containers": [{"name": "app"}]},
            "status": {"phase": "Pending", "initContainerStatuses": [{"name": "setup", "ready": false,
                "restartCount": 2, "image": "", "imageID": "", "state": {"waiting": {"reason": "CrashLoopBackOff"}},
                "lastState": {"terminated": {"exitCode": 4, "reason": "Error", "message": "cannot reach db"}}}]}});
        let pod: Pod = serde_json::from_value(crash).unwrap();
        let now = Timestamp::from_second(1_000).unwrap();
        let event = proto::Event { r#type: "Warning".into(), uid: "u".into(), ..proto::Event::default() };
        let causes = Causes::of([&pod].into_iter(), &Warnings::of([event]), now);
        let mut snapshot = snapshot(&[("shop", "web", 0.5, 5.0), ("shop", "db", 0.5, 5.0)]);
        for pod in &mut snapshot.pods {
            pod.uid = format!("shop-{}", pod.name);
        }
        let before = snapshot.clone();
        causes.apply_to(&mut snapshot);
        assert_eq!(snapshot, before, "all are ready");
        assert!(!are_wanted(&snapshot));
        snapshot.pods.iter_mut().for_each(|pod| pod.ready = Some(false));
        snapshot.pods[1].not_ready = "ContainersNotReady".into();
        assert!(are_wanted(&snapshot));
        causes.apply_to(&mut snapshot);
        assert_eq!(snapshot.pods[0].phase, "Init:CrashLoopBackOff");
        assert!(
            snapshot.pods[0].not_ready.contains("exit 4, last words: cannot reach db"),
            "{}",
            snapshot.pods[0].not_ready
        );
        assert_eq!(snapshot.pods[1].not_ready, "ContainersNotReady", "no other reason is known");
    }
}
