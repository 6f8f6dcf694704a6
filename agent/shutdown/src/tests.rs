//! Runs against a scripted logind on a private bus. The test acts as the pods' manager.

use beelet_model::{request::Request, table::PodName};
use beelet_policy::node::shutdown::Period;
use beelet_state::{State, events::Recorder};
use beelet_testing::logind::{Bus, Logind as FakeLogind};
use k8s_openapi::api::core::v1 as core;
use serde_json::json;
use tempfile::TempDir;
use tokio::time::timeout;

use super::*;
use beelet_model::table::PodEntry;

const PATIENCE: Duration = Duration::from_secs(60);
const LONG: u64 = 600;
const CRITICAL: i32 = 2_000_000_000;

struct Node {
    table: watch::Sender<Arc<PodTable>>,
    requests: mpsc::Receiver<Request>,
    written: watch::Sender<Option<Arc<PodTable>>>,
    since: watch::Receiver<Since>,
    stop: CancellationToken,
    work: tokio::task::JoinHandle<()>,
    _dir: TempDir,
}

impl Node {
    /// Starts a node with pods (name, priority, grace period) and the periods of the groups.
    fn start(bus: &Bus, periods: &[(i32, u64)], pods: &[(&str, i32, i64)]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let state = Arc::new(State::open(dir.path()).unwrap());
        let periods =
            periods.iter().map(|(p, s)| Period { priority: *p, grace: Duration::from_secs(*s) }).collect();
        let table = pods.iter().map(|(name, priority, grace)| {
            let entry = PodEntry::of(pod(name, *priority, *grace));
            (PodName::of(&entry.pod), Arc::new(entry))
        });
        let table = PodTable { pods: table.collect(), ..PodTable::default() };
        let (table, requests) = (watch::Sender::new(Arc::new(table)), mpsc::channel(64));
        let (written, since) = (watch::Sender::new(None), watch::Sender::new(None));
        let told = since.subscribe();
        let parts = Parts {
            periods: Periods::new(periods),
            bus: Some(bus.address()),
            logind_drop_ins: bus.drop_ins(),
            table: table.subscribe(),
            requests: requests.0,
            written: written.subscribe(),
            since,
            events: NodeEvents::new(Recorder::load(&state), "n1"),
            file: ForeignFile::new(dir.path().join(STATE_FILE)),
            metrics: Metrics::default(),
        };
        let stop = CancellationToken::new();
        let work = tokio::spawn(Shutdown::new(parts).run(stop.clone()));
        Self { table, requests: requests.1, written, since: told, stop, work, _dir: dir }
    }

    /// Returns the next pod to end, and its grace period in seconds.
    async fn ended(&mut self) -> (String, u64) {
        match timeout(PATIENCE, self.requests.recv()).await.unwrap().unwrap() {
            Request::Fail { uid, reason, message, grace } => {
                assert_eq!(reason, "Terminated");
                assert_eq!(message, "Pod was terminated in response to imminent node shutdown.");
                (uid, grace.unwrap().as_secs())
            }
            other => panic!("{other:?}"),
        }
    }

    /// Publishes a pod as its manager does.
    fn publish(&self, name: &str, change: impl FnOnce(&mut PodEntry)) {
        self.table.send_modify(|table| {
            let mut new = PodTable::clone(table);
            let (whole, entry) = new.pods.iter().find(|(known, _)| known.name == name).unwrap();
            let (whole, mut entry) = (whole.clone(), PodEntry::clone(entry));
            change(&mut entry);
            new.pods.insert(whole, Arc::new(entry));
            *table = Arc::new(new);
        });
    }

    /// Marks a pod as fully released.
    fn clear(&self, name: &str) {
        self.publish(name, |entry| {
            (entry.ending, entry.cleared) = (true, true);
            let status = entry.pod.status.get_or_insert_default();
            (status.phase, status.reason) = (Some("Failed".to_owned()), Some("Terminated".to_owned()));
        });
    }

    async fn until_told(&mut self, goes_down: bool) {
        let waited = self.since.wait_for(|since| since.is_some() == goes_down);
        timeout(PATIENCE, waited).await.unwrap().unwrap();
    }

    async fn end(self) {
        self.stop.cancel();
        self.work.await.unwrap();
    }
}

fn pod(name: &str, priority: i32, grace: i64) -> core::Pod {
    serde_json::from_value(json!({
        "metadata": {"name": name, "namespace": "default", "uid": name,
            "annotations": {"kubernetes.io/config.source": "file"}},
        "spec": {"priority": priority, "terminationGracePeriodSeconds": grace, "containers": []},
        "status": {"phase": "Running"},
    }))
    .unwrap()
}

/// Returns a bus, or skips the test with a message.
macro_rules! bus {
    () => {
        match Bus::start() {
            Some(bus) => bus,
            None => return eprintln!("dbus-daemon is not installed: run cargo xtask setup --for test"),
        }
    };
}

#[tokio::test]
async fn pods_end_by_priority_and_the_lock_goes_back_once_their_statuses_are_written() {
    let bus = bus!();
    let logind = FakeLogind::start(&bus, Duration::from_secs(10_000)).await;
    let pods = [("low", 0, 5), ("slow", 7, 9_000), ("critical", CRITICAL, 30)];
    let mut node = Node::start(&bus, &[(0, LONG), (CRITICAL, 20)], &pods);
    logind.locks(1).await;
    let unwritten = node.table.borrow().clone();
    node.written.send_replace(Some(unwritten));
    assert!(node.since.borrow().is_none());
    logind.shut_down().await;
    let mut first = [node.ended().await, node.ended().await];
    first.sort();
    assert_eq!(first, [("low".to_owned(), 5), ("slow".to_owned(), LONG)]);
    // The node is known to go down before the first pod ends.
    assert!(node.since.borrow().is_some());
    node.clear("low");
    // Its containers have ended, but it still has volumes.
    node.publish("slow", |entry| entry.ending = true);
    assert!(node.requests.try_recv().is_err());
    node.clear("slow");
    assert_eq!(node.ended().await, ("critical".to_owned(), 20));
    node.clear("critical");
    // Only the API server's statuses are missing.
    assert_eq!(logind.held(), 1);
    let all = node.table.borrow().clone();
    node.written.send_replace(Some(all));
    logind.locks(0).await;
    node.end().await;
}

#[tokio::test]
async fn what_takes_longer_than_its_time_holds_up_nobody() {
    let bus = bus!();
    let logind = FakeLogind::start(&bus, Duration::from_secs(4)).await;
    let pods = [("stuck", 0, 600), ("critical", CRITICAL, 600)];
    let mut node = Node::start(&bus, &[(0, 1), (CRITICAL, 1)], &pods);
    logind.locks(1).await;
    logind.shut_down().await;
    assert_eq!(node.ended().await, ("stuck".to_owned(), 1));
    assert_eq!(node.ended().await, ("critical".to_owned(), 1));
    logind.locks(0).await;
    node.end().await;
}

#[tokio::test]
async fn a_signal_alone_ends_nothing() {
    let bus = bus!();
    let logind = FakeLogind::start(&bus, Duration::from_secs(10_000)).await;
    let mut node = Node::start(&bus, &[(0, LONG)], &[("web", 0, 5)]);
    logind.locks(1).await;
    let before = logind.asked();
    logind.signal(true).await;
    logind.asked_more_than(before).await;
    // The next request belongs to the following shutdown.
    assert!(node.since.borrow().is_none() && node.requests.try_recv().is_err());
    assert_eq!(logind.held(), 1);
    node.end().await;
}

#[tokio::test]
async fn a_shutdown_that_is_called_off_lets_static_pods_run_again() {
    let bus = bus!();
    let logind = FakeLogind::start(&bus, Duration::from_secs(10_000)).await;
    let mut node = Node::start(&bus, &[(0, LONG)], &[("web", 0, 5), ("of-a-cluster", 0, 5)]);
    node.publish("of-a-cluster", |entry| {
        let annotations = entry.pod.metadata.annotations.as_mut().unwrap();
        annotations.insert("kubernetes.io/config.source".to_owned(), "api".to_owned());
    });
    logind.locks(1).await;
    logind.shut_down().await;
    node.until_told(true).await;
    let mut ended = [node.ended().await.0, node.ended().await.0];
    ended.sort();
    assert_eq!(ended, ["of-a-cluster", "web"]);
    node.clear("of-a-cluster");
    // This pod is still terminating.
    node.publish("web", |entry| {
        entry.ending = true;
        entry.pod.status.get_or_insert_default().reason = Some("Terminated".to_owned());
    });
    logind.call_off().await;
    node.until_told(false).await;
    match timeout(PATIENCE, node.requests.recv()).await.unwrap().unwrap() {
        Request::Retry { uid } => assert_eq!(uid, "web"),
        other => panic!("{other:?}"),
    }
    logind.locks(1).await;
    // And again.
    logind.shut_down().await;
    node.until_told(true).await;
    node.end().await;
}

#[tokio::test]
async fn logind_is_made_to_wait_for_as_long_as_pods_may_take_and_the_margin() {
    let bus = bus!();
    let logind = FakeLogind::start(&bus, Duration::from_secs(5)).await;
    let node = Node::start(&bus, &[(0, 20), (CRITICAL, 10)], &[]);
    logind.locks(1).await;
    assert_eq!(logind.configuration(), (Duration::from_secs(40), 1));
    node.end().await;
}

#[tokio::test]
async fn a_logind_that_comes_later_is_found() {
    let bus = bus!();
    let mut node = Node::start(&bus, &[(0, LONG)], &[("web", 0, 5)]);
    let logind = FakeLogind::start(&bus, Duration::from_secs(10_000)).await;
    logind.locks(1).await;
    logind.shut_down().await;
    assert_eq!(node.ended().await.0, "web");
    node.clear("web");
    logind.locks(0).await;
    node.end().await;
}

#[tokio::test]
async fn without_periods_nothing_is_asked_of_logind() {
    let bus = bus!();
    let node = Node::start(&bus, &[], &[]);
    timeout(PATIENCE, node.work).await.unwrap().unwrap();
}
