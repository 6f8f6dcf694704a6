//! `pressureEdges`: thresholds at which BPF programs emit an event for a waiting container.

use serde::{Deserialize, Serialize};

use super::values::GoDuration;
use beelet_units::bpf_settings::{ByQos, PressureEdges};

/// Wait of a container per second at which BPF programs emit an event.
#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub(super) struct PressureEdgesWire {
    run_queue_wait: Option<ByQosWire>,
    reclaim: Option<ByQosWire>,
}

/// Duration by QoS class; 0s: never.
#[derive(Debug, Default, Clone, Copy, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
struct ByQosWire {
    guaranteed: Option<GoDuration>,
    burstable: Option<GoDuration>,
    best_effort: Option<GoDuration>,
}

/// Returns the written thresholds, and the defaults for the rest. Zero is a value: no events.
pub(super) fn resolve(wire: &mut Option<PressureEdgesWire>) -> PressureEdges {
    let (wire, default) = (wire.get_or_insert_default(), PressureEdges::default());
    PressureEdges {
        run_queue_wait: by_qos(&mut wire.run_queue_wait, default.run_queue_wait),
        reclaim: by_qos(&mut wire.reclaim, default.reclaim),
    }
}

fn by_qos(wire: &mut Option<ByQosWire>, default: ByQos) -> ByQos {
    let wire = wire.get_or_insert_default();
    let or = |value: &mut Option<GoDuration>, default| value.get_or_insert(GoDuration(default)).0;
    ByQos {
        guaranteed: or(&mut wire.guaranteed, default.guaranteed),
        burstable: or(&mut wire.burstable, default.burstable),
        best_effort: or(&mut wire.best_effort, default.best_effort),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn what_is_not_written_is_the_default() {
        let wire: PressureEdgesWire =
            serde_json::from_str(r#"{"runQueueWait": {"guaranteed": "5ms", "bestEffort": "0s"}}"#).unwrap();
        let mut wire = Some(wire);
        let found = resolve(&mut wire);
        let ms = Duration::from_millis;
        let waits = found.run_queue_wait;
        assert_eq!((waits.guaranteed, waits.burstable, waits.best_effort), (ms(5), ms(100), ms(0)));
        assert_eq!(found.reclaim, PressureEdges::default().reclaim);
        assert_eq!(resolve(&mut wire), found);
        assert_eq!(resolve(&mut None), PressureEdges::default());
    }
}
