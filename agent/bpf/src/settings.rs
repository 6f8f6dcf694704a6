//! Settings of the counting programs: the pods' cgroups, and the thresholds of edges for waiting.

use super::KernelError;
use aya::maps::{Array, Map, MapData};
use beelet_ebpf_abi::{Settings, qos};
use beelet_units::bpf_settings::{ByQos, PressureEdges};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Returns the durations in the programs' form, by [`qos`].
fn nanoseconds(by_qos: ByQos) -> [u64; qos::CLASSES] {
    [by_qos.guaranteed, by_qos.burstable, by_qos.best_effort]
        .map(|duration| u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX))
}

/// Writes the settings, unless the programs already have the same.
pub(super) fn publish(map: MapData, pods: &Path, edges: &PressureEdges) -> Result<(), KernelError> {
    let failed = |error: &dyn std::fmt::Display| KernelError::map("SETTINGS", error);
    let mut map: Array<MapData, Settings> =
        Map::from_map_data(map).and_then(Array::try_from).map_err(|error| failed(&error))?;
    let before = map.get(&0, 0).map_err(|error| failed(&error))?;
    let wanted = Settings { generation: before.generation, ..settings(pods, edges) };
    if before == wanted {
        return Ok(());
    }
    let wanted = Settings { generation: before.generation.wrapping_add(1).max(1), ..wanted };
    map.set(0, wanted, 0).map_err(|error| failed(&error))
}

/// Builds the settings. The QoS cgroups have the kubelet's names: with the systemd driver a slice repeats its
/// parent's name.
fn settings(pods: &Path, edges: &PressureEdges) -> Settings {
    let id = |path: &Path| std::fs::metadata(path).map_or(0, |metadata| metadata.ino());
    let slice = pods.file_name().and_then(|name| name.to_str()).and_then(|name| name.strip_suffix(".slice"));
    let class = |name: &str| match slice {
        Some(above) => id(&pods.join(format!("{above}-{name}.slice"))),
        None => id(&pods.join(name)),
    };
    Settings {
        pods_cgroup: id(pods),
        burstable: class("burstable"),
        best_effort: class("besteffort"),
        generation: 0,
        reserved: 0,
        run_queue_wait_ns: nanoseconds(edges.run_queue_wait),
        reclaim_ns: nanoseconds(edges.reclaim),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn cgroups_are_identified_by_their_inodes_and_a_missing_one_by_zero() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("burstable")).unwrap();
        let edges = PressureEdges {
            run_queue_wait: ByQos {
                guaranteed: Duration::from_millis(1),
                burstable: Duration::MAX,
                best_effort: Duration::ZERO,
            },
            ..PressureEdges::default()
        };
        let settings = settings(folder.path(), &edges);
        let id = |path: &Path| std::fs::metadata(path).unwrap().ino();
        assert_eq!(settings.pods_cgroup, id(folder.path()));
        assert_eq!(settings.burstable, id(&folder.path().join("burstable")));
        assert_eq!(settings.best_effort, 0);
        assert_eq!(settings.run_queue_wait_ns, [1_000_000, u64::MAX, 0]);
        assert_eq!(settings.reclaim_ns, [50_000_000, 100_000_000, 500_000_000]);
    }

    #[test]
    fn slices_of_qos_classes_are_found_below_the_pods_slice() {
        let folder = tempfile::tempdir().unwrap();
        let pods = folder.path().join("kubepods.slice");
        std::fs::create_dir_all(pods.join("kubepods-burstable.slice")).unwrap();
        let settings = settings(&pods, &PressureEdges::default());
        let id = |path: &Path| std::fs::metadata(path).unwrap().ino();
        assert_eq!(settings.pods_cgroup, id(&pods));
        assert_eq!(settings.burstable, id(&pods.join("kubepods-burstable.slice")));
        assert_eq!(settings.best_effort, 0);
    }
}
