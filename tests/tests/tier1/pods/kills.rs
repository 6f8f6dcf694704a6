//! Tests of kill -9 at every single call to the runtime: before the runtime executes the call, and after
//! that but before the agent has the reply.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use beelet_tests::cri::{Call, FakeCri, Held, Op, Outcome};
use futures::stream::{self, StreamExt as _};

use super::node::{Node, Settings, View, hooked};

/// State of the call at which the agent is killed.
#[derive(Clone, Copy, Debug, PartialEq)]
enum At {
    /// The runtime has received the call, but not executed it.
    Asked,
    /// The runtime has executed the call, but not replied.
    Done,
}

/// Returns true if the agent is killed at this kind of call: every kind except the event stream, which never
/// ends.
fn counts(op: Op) -> bool {
    op != Op::GetContainerEvents
}

/// Returns the calls for which [`counts`] is true, from number `first` on.
fn counted(cri: &FakeCri, first: usize) -> Vec<Call> {
    cri.calls().into_iter().skip(first).filter(|call| counts(call.op())).collect()
}

/// Lets `n` calls through; the next one hangs in the state `at`, and all later ones hang before execution.
/// Returns the holds, the one of the next call first.
fn hold_from(cri: &FakeCri, n: usize, at: At) -> [Held; 2] {
    let count = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&count);
    let later = cri.on_any().always();
    let later = later.when(move |asked| counts(asked.op()) && counter.load(Ordering::SeqCst) > n).hold();
    let next = cri.on_any().always();
    let next = next.when(move |asked| counts(asked.op()) && count.fetch_add(1, Ordering::SeqCst) == n);
    [if at == At::Asked { next.hold() } else { next.hold_reply() }, later]
}

/// Runs `begin`, and kills the agent at its `n`th call after that.
async fn kill_at(node: &mut Node, n: usize, at: At, begin: &impl AsyncFn(&mut Node)) {
    let held = hold_from(&node.cri, n, at);
    // A starting agent may never get past the hanging call.
    tokio::select! {
        () = held[0].reached() => {}
        () = begin(node) => held[0].reached().await,
    }
    let calls = counted(&node.cri, held[0].since());
    let hangs = |call: &Call| call.outcome == Outcome::Pending;
    assert!(calls.len() > n, "{n}: {calls:#?}");
    assert!(!calls[..n].iter().any(hangs) && calls[n..].iter().all(hangs), "{n}: {calls:#?}");
    node.kill().await;
    // Otherwise the runtime might execute a held call after its release.
    node.cri.until_idle().await;
    node.cri.heal();
    drop(held);
}

/// Change of a node whose result must be the same after a kill at any call.
struct Scenario<Before, Begin, Settled> {
    /// Creates the node, and returns the value with which `settled` compares the end.
    before: Before,
    /// Starts the change.
    begin: Begin,
    /// Waits for the expected state and checks it, while the agent runs.
    settled: Settled,
    /// Minimum number of calls.
    calls: usize,
}

impl<T, Before, Begin, Settled> Scenario<Before, Begin, Settled>
where
    Before: AsyncFn() -> (Node, T),
    Begin: AsyncFn(&mut Node),
    Settled: AsyncFn(&Node, &T, &str),
{
    /// Runs the scenario once without a kill, and then once for each of its calls and each [`At`], several in
    /// parallel.
    async fn check(self) {
        let (mut node, known) = (self.before)().await;
        let first = node.cri.calls().len();
        (self.begin)(&mut node).await;
        (self.settled)(&node, &known, "not killed").await;
        node.kill().await;
        let calls = counted(&node.cri, first).len();
        assert!(calls >= self.calls, "{}", node.cri.transcript());
        let all = (0..calls).flat_map(|n| [(n, At::Asked), (n, At::Done)]);
        let killed = |(n, at)| self.check_killed(n, at);
        stream::iter(all).map(killed).buffer_unordered(8).collect::<()>().await;
    }

    async fn check_killed(&self, n: usize, at: At) {
        let (mut node, known) = (self.before)().await;
        kill_at(&mut node, n, at, &self.begin).await;
        node.start().await;
        (self.settled)(&node, &known, &format!("killed at call {n}, {at:?}")).await;
    }
}

/// Asserts that the pod has one sandbox and exactly these containers, and that only the containers in
/// `restarted` have restarted, once each.
fn check_all(node: &Node, pod: &View, containers: &str, restarted: &[&str], case: &str) {
    let case = format!("{case}:\n{}", node.cri.transcript());
    assert_eq!(node.containers("web"), containers, "{case}");
    assert_eq!(node.cri.world().sandboxes.len(), 1, "{case}");
    for (name, count) in pod.restarts() {
        assert_eq!(count, i32::from(restarted.contains(&name.as_str())), "{name}, {case}");
    }
}

/// Returns a node with a ready pod, and the pod.
async fn ready() -> (Node, View) {
    let node = Node::with(&[hooked("web")]).await;
    let pod = node.until_ready("web").await;
    (node, pod)
}

#[tokio::test]
async fn a_pod_starts_once_wherever_the_agent_is_killed() {
    let before = async || {
        let node = Node::new(Settings::default());
        node.apply(&hooked("web"));
        (node, ())
    };
    let settled = async |node: &Node, (): &(), case: &str| {
        let pod = node.until_ready("web").await;
        check_all(node, &pod, "a/0+ b/0+ init/0- side/0+", &[], case);
        assert_eq!(node.cri.count(Op::StopContainer), 0, "{case}:\n{}", node.cri.transcript());
    };
    Scenario { before, begin: async |node: &mut Node| node.start().await, settled, calls: 17 }.check().await;
}

#[tokio::test]
async fn a_pod_is_removed_completely_wherever_the_agent_is_killed() {
    let before = async || {
        let (mut node, pod) = ready().await;
        node.kill().await;
        node.remove("web");
        (node, pod)
    };
    let settled = async |node: &Node, pod: &View, _: &str| node.until_nothing_is_left(pod).await;
    Scenario { before, begin: async |node: &mut Node| node.start().await, settled, calls: 12 }.check().await;
}

#[tokio::test]
async fn a_container_that_crashed_runs_again_once_wherever_the_agent_is_killed() {
    let crash = async |node: &mut Node| node.cri.exit(&node.cri.container("web-n1", "a").unwrap().id, 1);
    let settled = async |node: &Node, _: &View, case: &str| {
        let again = |pod: &View| pod.ready() && pod.restarts()["a"] == 1;
        let pod = node.until_pod("web", "to run again", again).await;
        check_all(node, &pod, "a/0- a/1+ b/0+ init/0- side/0+", &["a"], case);
        assert_eq!(node.cri.count(Op::StopContainer), 0, "{case}:\n{}", node.cri.transcript());
    };
    Scenario { before: ready, begin: crash, settled, calls: 6 }.check().await;
}

#[tokio::test]
async fn a_changed_manifest_replaces_its_pod_once_wherever_the_agent_is_killed() {
    let change = async |node: &mut Node| {
        let mut changed = hooked("web");
        changed["metadata"]["labels"] = serde_json::json!({ "version": "2" });
        node.apply(&changed);
    };
    let settled = async |node: &Node, old: &View, case: &str| {
        let replaced = |pod: &View| pod.uid() != old.uid() && pod.ready();
        let pod = node.until_pod("web", "to be replaced", replaced).await;
        node.until_nothing_is_left(old).await;
        check_all(node, &pod, "a/0+ b/0+ init/0- side/0+", &[], case);
    };
    Scenario { before: ready, begin: change, settled, calls: 25 }.check().await;
}
