//! Swap before eviction.

use super::*;

#[tokio::test(start_paused = true)]
async fn free_swap_takes_memory_before_a_pod_is_evicted() {
    let mut node = Node::start_with_swap(30, 1000, &three());
    for _ in 0..3 {
        node.set(&node.memory, Shows::Mib(90));
        assert_eq!(node.within(10).await, Vec::<String>::new());
    }
    // The swap is full.
    node.set(&node.memory, Shows::Mib(90));
    assert_eq!(node.within(3).await, ["big"]);
}

#[tokio::test(start_paused = true)]
async fn a_full_swap_takes_as_much_as_fits_before_a_pod_is_evicted() {
    // Eviction asks for the 5 MiB that fit, and all of them move.
    let mut node = Node::start_with_swap(5, 1000, &three());
    node.set(&node.memory, Shows::Mib(90));
    assert_eq!(node.within(3).await, ["big"]);
}

#[tokio::test(start_paused = true)]
async fn a_pod_is_evicted_if_little_memory_moves_to_swap_or_memory_falls_fast() {
    let mut node = Node::start_with_swap(1000, 100, &three());
    node.set(&node.memory, Shows::Mib(90));
    assert_eq!(node.within(3).await, ["big"]);
    let mut node = Node::start_with_swap(1000, 1000, &three());
    node.set(&node.memory, Shows::Mib(40));
    assert_eq!(node.within(3).await.first().map(String::as_str), Some("big"));
}
