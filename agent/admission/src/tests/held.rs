//! Running pods that no worker manages.

use super::*;

fn held(pod: &Arc<core::Pod>, is_listed: bool) -> Held {
    Held { pod: Arc::clone(pod), is_listed }
}

#[tokio::test(start_paused = true)]
async fn a_pod_waits_for_running_pods_whose_source_is_not_listed() {
    let mut node = Node::new();
    let old = plain("old", "3");
    node.admission.hold(&[held(&old, false)]);
    node.admits(&plain("small", "1")).await;
    assert!(node.ask(&plain("large", "5")).await.unwrap().is_err(), "the node is too small");
    let [first, second] = ["first", "second"].map(|name| plain(name, "2"));
    let waiting = node.waits(&first);
    settle().await;
    assert!(!waiting.is_finished());
    // The source still wants the old pod.
    node.admission.adopt(&old);
    assert_eq!(waiting.await.unwrap().unwrap_err().reason, "OutOfcpu");
    // The source no longer wants the old pod.
    node.released("old");
    node.admission.hold(&[held(&old, false)]);
    let waiting = node.waits(&second);
    settle().await;
    assert!(!waiting.is_finished());
    node.admission.hold(&[]);
    assert_eq!(waiting.await.unwrap(), Ok(()));
    // The API server itself may be a critical pod.
    node.admission.hold(&[held(&plain("other", "4"), false)]);
    node.admits(&critical("server", "1")).await;
    assert!(node.preempted().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_running_pod_without_a_definition_keeps_its_room_and_is_no_victim() {
    let mut node = Node::new();
    let old = plain("old", "3");
    node.admission.hold(&[held(&old, false)]);
    let waiting = node.waits(&plain("first", "2"));
    settle().await;
    node.admission.hold(&[held(&old, true)]);
    assert_eq!(waiting.await.unwrap().unwrap_err().reason, "OutOfcpu");
    assert!(node.ask(&critical("server", "2")).await.unwrap().is_err());
    assert!(node.preempted().is_empty());
    node.admission.hold(&[]);
    node.admits(&plain("first", "2")).await;
    // An admitted pod stays admitted.
    node.admission.hold(&[held(&plain("first", "4"), true)]);
    node.admits(&plain("second", "2")).await;
}

#[tokio::test(start_paused = true)]
async fn a_pod_waits_a_minute_for_the_list_of_a_source_and_no_longer() {
    let node = Node::new();
    node.admission.hold(&[held(&plain("old", "3"), false)]);
    let waiting = node.waits(&plain("static", "2"));
    settle().await;
    assert!(!waiting.is_finished());
    // A later list of the runtime does not begin the minute again.
    tokio::time::advance(Duration::from_secs(50)).await;
    node.admission.hold(&[held(&plain("old", "3"), false)]);
    tokio::time::advance(Duration::from_secs(11)).await;
    assert_eq!(waiting.await.unwrap(), Ok(()));
}
