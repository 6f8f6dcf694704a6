//! Disks: BestEffort pods yield to all others.

use super::{Hand, Node};
use crate::tuner::KnobKind;

/// Holds the weight of BestEffort pods' requests. A weight takes nothing while no other pod uses the disk, so
/// that the setting waits for no complaint.
pub(super) fn yield_to_others(node: Node<'_>, hand: &mut Hand<'_>) {
    let (weight, seen) = (node.law.best_effort_disk_weight, node.seen);
    if weight > 0 && seen.supports.disk_weight && !seen.best_effort.is_empty() {
        let words = "BestEffort pods yield the disk to other pods";
        hand.hold(&seen.best_effort, KnobKind::DiskWeight, weight.into(), words);
    }
}
