//! kill -9 anywhere: after every single call to the runtime, before it is done and after it was done but before the
//! agent heard of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use beelet_tests::cri::{FakeCri, Held, Op};
use futures::stream::{self, StreamExt as _};

use crate::node::{CALLS, Node, Settings, hooked};

/// What has become of the call at which the agent is killed.
#[derive(Clone, Copy, Debug, PartialEq)]
enum At {
    /// It came, and nothing was done.
    Asked,
    /// It was done, and nobody heard the answer.
    Done,
}

/// Lets `n` calls through; the next one hangs as `at` says, and all later ones hang undone.
fn hold_from(cri: &FakeCri, n: usize, at: At) -> Vec<Held> {
    let count = Arc::new(AtomicUsize::new(0));
    let mut held = Vec::new();
    for op in CALLS {
        let counter = Arc::clone(&count);
        // The first rule of each call counts it, whatever it decides.
        let is_it = move |_: &_| counter.fetch_add(1, Ordering::SeqCst) == n;
        let script = cri.on(op).always().when(is_it);
        held.push(if at == At::Asked { script.hold() } else { script.hold_reply() });
        let counter = Arc::clone(&count);
        held.push(cri.on(op).always().when(move |_| counter.load(Ordering::SeqCst) > n + 1).hold());
    }
    held
}

/// Runs the agent until its `n`th call from now on, and kills it there.
async fn kill_at(node: &mut Node, n: usize, at: At) {
    let first = node.cri.calls().len();
    let held = hold_from(&node.cri, n, at);
    node.start().await;
    node.cri.wait_for_after("the call to kill at", first + n, |_| true).await;
    node.kill().await;
    node.cri.heal();
    drop(held);
}

async fn comes_up_after_a_kill(n: usize, at: At) {
    let mut node = Node::new(Settings::default());
    node.apply(&hooked("web"));
    kill_at(&mut node, n, at).await;
    node.start().await;
    let pod = node.until_ready("web").await;
    let case = format!("killed at call {n}, {at:?}:\n{}", node.cri.transcript());
    // Nothing twice, nothing forgotten, and no restart that nobody asked for.
    assert_eq!(node.containers("web"), "a/0+ b/0+ init/0- side/0+", "{case}");
    assert_eq!(node.cri.world().sandboxes.len(), 1, "{case}");
    assert!(pod.restarts().values().all(|count| *count == 0), "{:?} {case}", pod.restarts());
    assert_eq!(node.cri.count(Op::StopContainer), 0, "{case}");
}

async fn is_gone_after_a_kill(n: usize, at: At) {
    let mut node = Node::new(Settings::default());
    node.apply(&hooked("web"));
    node.start().await;
    let pod = node.until_ready("web").await;
    node.kill().await;
    node.remove("web");
    kill_at(&mut node, n, at).await;
    node.start().await;
    node.until_nothing_is_left(&pod).await;
}

/// Checks each of the first `calls` calls, both ways, some at a time.
async fn at_every_call(calls: usize, check: impl AsyncFn(usize, At)) {
    let all = (0..calls).flat_map(|n| [(n, At::Asked), (n, At::Done)]);
    let check = &check;
    stream::iter(all).map(|(n, at)| check(n, at)).buffer_unordered(8).collect::<()>().await;
}

/// How many calls the agent makes for a pod, from its start to `done`.
async fn calls_of(node: &mut Node, first: usize, done: impl AsyncFnOnce(&Node)) -> usize {
    node.start().await;
    done(node).await;
    node.kill().await;
    node.cri.calls().len() - first
}

#[tokio::test]
async fn a_pod_comes_up_the_same_wherever_the_agent_is_killed() {
    let mut first = Node::new(Settings::default());
    first.apply(&hooked("web"));
    let calls = calls_of(&mut first, 0, async |node| drop(node.until_ready("web").await)).await;
    assert!(calls >= 17, "{}", first.cri.transcript());
    at_every_call(calls, comes_up_after_a_kill).await;
}

#[tokio::test]
async fn a_pod_goes_without_a_trace_wherever_the_agent_is_killed() {
    let mut first = Node::new(Settings::default());
    first.apply(&hooked("web"));
    first.start().await;
    first.until_ready("web").await;
    first.kill().await;
    first.remove("web");
    let before = first.cri.calls().len();
    let gone = async |node: &Node| {
        node.cri.wait_until("the pod to be gone", |world| world.sandboxes.is_empty()).await;
    };
    let calls = calls_of(&mut first, before, gone).await;
    assert!(calls >= 12, "{}", first.cri.transcript());
    at_every_call(calls, is_gone_after_a_kill).await;
}
