//! Defaults and checks of a KubeletConfiguration's settings for a cluster's node.

use std::collections::BTreeMap;
use std::time::Duration;

use super::error::Problem;
use super::kubelet::{KubeletWire, TaintWire};
use super::words::{duration, nonzero, number, text};
use super::{NodeConfig, Taint};

/// Effects of a taint on pods that don't tolerate it.
const EFFECTS: [&str; 3] = ["NoSchedule", "PreferNoSchedule", "NoExecute"];

pub(super) fn resolve(wire: &mut KubeletWire) -> Result<NodeConfig, Problem> {
    // The kubelet treats zero as unset, and kubeadm writes every unset duration as `0s`.
    let is_set = wire.node_status_update_frequency.is_some_and(|every| !every.0.is_zero());
    let looked_at = duration(&mut wire.node_status_update_frequency, Duration::from_secs(10));
    // If only the update frequency is set, each update is reported (`SetDefaults_KubeletConfiguration`).
    let reported = if is_set { looked_at } else { Duration::from_secs(300) };
    let lease = nonzero(&mut wire.node_lease_duration_seconds);
    let lease = number("nodeLeaseDurationSeconds", lease, 40, 1, 86_400)?;
    let images: i64 =
        number("nodeStatusMaxImages", &mut wire.node_status_max_images, 50, -1, i64::from(i32::MAX))?;
    let burst = nonzero(&mut wire.event_burst);
    Ok(NodeConfig {
        register: *wire.register_node.get_or_insert(true),
        taints: taints(wire.register_with_taints.get_or_insert_default())?,
        provider_id: text(&mut wire.provider_id),
        status_update_frequency: looked_at,
        status_report_frequency: duration(&mut wire.node_status_report_frequency, reported),
        status_max_images: usize::try_from(images).ok(),
        lease_duration: Duration::from_secs(lease),
        event_qps: number("eventRecordQPS", &mut wire.event_record_qps, 50, 0, i64::from(u32::MAX))?,
        event_burst: number("eventBurst", burst, 100, 1, i64::from(u32::MAX))?,
        rotate_certificates: *wire.rotate_certificates.get_or_insert(false),
        labels: BTreeMap::new(),
        ips: Vec::new(),
        external_cloud: false,
    })
}

fn taints(wires: &mut [TaintWire]) -> Result<Vec<Taint>, Problem> {
    let mut taints = Vec::new();
    for (index, wire) in wires.iter_mut().enumerate() {
        let field = |name: &str| format!("registerWithTaints[{index}].{name}");
        if wire.key.is_empty() {
            return Err(Problem::new(field("key"), "must be set"));
        }
        if !EFFECTS.contains(&wire.effect.as_str()) {
            let message = format!("{:?} is not one of {}", wire.effect, EFFECTS.join(", "));
            return Err(Problem::new(field("effect"), message));
        }
        wire.value.take_if(|value| value.is_empty());
        let value = wire.value.clone().unwrap_or_default();
        taints.push(Taint { key: wire.key.clone(), value, effect: wire.effect.clone() });
    }
    Ok(taints)
}
