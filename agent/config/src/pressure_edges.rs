//! `pressureEdges`: from what on the kernel half tells of a container that waits.

use serde::{Deserialize, Serialize};

use super::values::GoDuration;
use beelet_units::bpf_settings::{ByQos, PressureEdges};

/// How long a container may wait within a second before the kernel half tells of it.
#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub(super) struct PressureEdgesWire {
    run_queue_wait: Option<ByQosWire>,
    reclaim: Option<ByQosWire>,
}

/// One duration a QoS class; 0s: never.
#[derive(Debug, Default, Clone, Copy, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
struct ByQosWire {
    guaranteed: Option<GoDuration>,
    burstable: Option<GoDuration>,
    best_effort: Option<GoDuration>,
}

/// What is written, and the defaults for the rest. Zero is a value here: it is never told then.
pub(super) fn read(wire: Option<&PressureEdgesWire>) -> PressureEdges {
    let default = PressureEdges::default();
    PressureEdges {
        run_queue_wait: read_by_qos(wire.and_then(|wire| wire.run_queue_wait), default.run_queue_wait),
        reclaim: read_by_qos(wire.and_then(|wire| wire.reclaim), default.reclaim),
    }
}

fn read_by_qos(wire: Option<ByQosWire>, default: ByQos) -> ByQos {
    let wire = wire.unwrap_or_default();
    let or = |value: Option<GoDuration>, default| value.map_or(default, |value| value.0);
    ByQos {
        guaranteed: or(wire.guaranteed, default.guaranteed),
        burstable: or(wire.burstable, default.burstable),
        best_effort: or(wire.best_effort, default.best_effort),
    }
}

/// The reverse of [`read`].
pub(super) fn print(edges: PressureEdges) -> PressureEdgesWire {
    let by_qos = |durations: ByQos| {
        let duration = |duration| Some(GoDuration(duration));
        Some(ByQosWire {
            guaranteed: duration(durations.guaranteed),
            burstable: duration(durations.burstable),
            best_effort: duration(durations.best_effort),
        })
    };
    PressureEdgesWire { run_queue_wait: by_qos(edges.run_queue_wait), reclaim: by_qos(edges.reclaim) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn what_is_not_written_is_the_default() {
        let wire: PressureEdgesWire =
            serde_json::from_str(r#"{"runQueueWait": {"guaranteed": "5ms", "bestEffort": "0s"}}"#).unwrap();
        let found = read(Some(&wire));
        let ms = Duration::from_millis;
        let waits = found.run_queue_wait;
        assert_eq!((waits.guaranteed, waits.burstable, waits.best_effort), (ms(5), ms(100), ms(0)));
        assert_eq!(found.reclaim, PressureEdges::default().reclaim);
        assert_eq!(read(Some(&print(found))), found);
        assert_eq!(read(None), PressureEdges::default());
    }
}
