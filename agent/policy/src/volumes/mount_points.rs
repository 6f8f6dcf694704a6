//! The folders that a read-only volume needs as mount points of other volumes (the kubelet's
//! `pkg/volume/util/nested_volumes.go`).

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{Pod, VolumeMount};

use crate::volumes::content::{self, TooMuch};

/// The folders that volumes need, relative to each volume's top.
pub type Nested<'p> = BTreeMap<&'p str, Result<BTreeSet<String>, TooMuch>>;

/// Returns the folders, by volume, on which containers mount other volumes. Never absolute, and never with
/// `..`. Of nested mounts only the outermost counts: inner ones belong to another volume. An error if a path
/// exceeds the maximum length: the API sets no limit.
#[must_use]
pub fn nested(pod: &Pod) -> Nested<'_> {
    let spec = pod.spec.iter();
    let containers =
        spec.clone().flat_map(|spec| spec.init_containers.iter().flatten().chain(&spec.containers));
    let ephemeral = spec.flat_map(|spec| spec.ephemeral_containers.iter().flatten());
    let lists = containers.map(|one| &one.volume_mounts).chain(ephemeral.map(|one| &one.volume_mounts));
    let mut found = Nested::new();
    lists.flatten().for_each(|mounts| in_container(mounts, &mut found));
    found
}

/// Adds the folders of one container's mounts.
fn in_container<'p>(mounts: &'p [VolumeMount], found: &mut Nested<'p>) {
    let mut places: Vec<(Vec<&str>, usize, &str)> = mounts
        .iter()
        .enumerate()
        .map(|(index, mount)| (parts(&mount.mount_path), index, mount.name.as_str()))
        .collect();
    // Places below another one follow it directly. A pod may have tens of thousands of mounts: the loop
    // visits each once.
    places.sort_unstable();
    let mut around: Vec<(&[&str], &str)> = Vec::new();
    for (place, _, volume) in &places {
        // Of two mounts at one place the later one covers the other.
        while around.last().is_some_and(|(outer, _)| !place.starts_with(outer) || outer.len() == place.len())
        {
            around.pop();
        }
        if let Some((outer, of)) = around.last().filter(|(outer, _)| !outer.is_empty()) {
            add_folder(found.entry(*of).or_insert_with(|| Ok(BTreeSet::new())), &place[outer.len()..]);
        }
        around.push((place, *volume));
    }
}

/// Adds a folder to a volume's.
fn add_folder(ways: &mut Result<BTreeSet<String>, TooMuch>, way: &[&str]) {
    let Ok(known) = ways else { return };
    let way = way.join("/");
    match content::check_path(&way) {
        Ok(()) => drop(known.insert(way)),
        Err(too_long) => *ways = Err(too_long),
    }
}

/// Returns the parts of a path in a container, from its root; `..` at the root stays there.
fn parts(path: &str) -> Vec<&str> {
    let mut parts = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// Checks mounts given as `volume:path`; the volume in question is `v`.
    fn check(mounts: &[&str], expected: &[&str]) {
        let mount = |text: &&str| {
            let (name, path) = text.split_once(':').unwrap();
            json!({"name": name, "mountPath": path})
        };
        let mounts: Vec<Value> = mounts.iter().map(mount).collect();
        let (with, without) =
            (json!([{"name": "c", "volumeMounts": mounts}]), json!([{"name": "c", "volumeMounts": []}]));
        for kind in ["containers", "initContainers", "ephemeralContainers"] {
            let mut spec = json!({"containers": without});
            spec[kind] = with.clone();
            let pod: Pod = serde_json::from_value(json!({"spec": spec})).unwrap();
            let expected: BTreeSet<_> = expected.iter().map(|way| (*way).to_owned()).collect();
            let found = nested(&pod).remove("v").unwrap_or_else(|| Ok(BTreeSet::new()));
            assert_eq!(found, Ok(expected), "{kind}: {mounts:?}");
        }
    }

    #[test]
    fn folders_are_needed_where_other_volumes_are_mounted_below() {
        check(&["v:/etc/app"], &[]);
        check(&["v:/etc/app", "w:/etc/app/cache"], &["cache"]);
        check(&["w:/etc/app/cache", "v:/etc/app/"], &["cache"]);
        check(&["v:/etc/app", "w:/etc/app/a/b"], &["a/b"]);
        check(&["v:/etc/app", "w:/etc/app2", "x:/etc", "y:/etc/other"], &[]);
        check(&["w:/etc/app", "v:/etc/app/cache"], &[]);
        check(&["v:/etc/app", "v:/etc/app/again"], &["again"]);
        check(&["v:/a", "v:/b", "w:/a/x", "w:/b/y", "w:/b/x"], &["x", "y"]);
    }

    #[test]
    fn mounts_in_a_nested_volume_belong_to_that_volume() {
        check(&["v:/dir", "w:/dir/nested", "x:/dir/nested/other"], &["nested"]);
        // In byte order, a mount and the mounts in it are not adjacent.
        check(
            &["v:/dir", "a:/dir/n", "b:/dir/n-vol", "c:/dir/n.vol", "d:/dir/n/double", "e:/dir/n2"],
            &["n", "n-vol", "n.vol", "n2"],
        );
    }

    #[test]
    fn no_folder_is_outside_of_the_volume() {
        check(&["v:/etc/app", "w:/etc/app/../../root"], &[]);
        check(&["v:/etc/app", "w:/etc/app/x/../y//./z"], &["y/z"]);
        check(&["v:../../etc", "w:/etc/x"], &["x"]);
        check(&["v:etc/app", "w:etc/app/x"], &["x"]);
        check(&["v:/", "w:/etc"], &[]);
    }

    #[test]
    fn a_mount_point_is_as_long_as_a_path_at_most() {
        let check = |levels: usize, expected: Result<usize, usize>| {
            let deep = format!("/v{}", "/a".repeat(levels));
            let mounts = json!([{"name": "v", "mountPath": "/v"}, {"name": "w", "mountPath": deep}]);
            let pod = json!({"spec": {"containers": [{"name": "c", "volumeMounts": mounts}]}});
            let pod = serde_json::from_value(pod).unwrap();
            let found = nested(&pod).remove("v").unwrap();
            let found = found.map(|ways| ways.first().unwrap().len()).map_err(|error| match error {
                TooMuch::Path { length, .. } => length,
                other => panic!("{other}"),
            });
            assert_eq!(found, expected, "{levels}");
        };
        check(2000, Ok(3999));
        check(2048, Ok(4095));
        check(2049, Err(4097));
        check(5000, Err(9999));
        check(700_000, Err(1_399_999));
    }

    #[test]
    fn tens_of_thousands_of_mounts_are_visited_once() {
        // Mounts next to and inside each other. A step for each triple would need 10^13 steps.
        let mount = |n: usize| json!({"name": format!("v{n}"), "mountPath": format!("/v/{n}")});
        let mut mounts: Vec<Value> = (0..30_000).map(mount).collect();
        mounts.push(json!({"name": "v", "mountPath": "/v"}));
        let deep = |n: usize| json!({"name": "v", "mountPath": format!("/deep{}", "/a".repeat(n))});
        mounts.extend((0..1000).map(deep));
        let pod = json!({"spec": {"containers": [{"name": "c", "volumeMounts": mounts}]}});
        let pod = serde_json::from_value(pod).unwrap();
        let found = nested(&pod);
        assert_eq!((found.len(), found["v"].as_ref().unwrap().len()), (1, 30_001));
    }

    #[test]
    fn of_two_volumes_at_one_place_the_later_one_has_what_is_below() {
        check(&["v:/a", "w:/a", "x:/a/b"], &[]);
        check(&["w:/a", "v:/a", "x:/a/b", "x:/a/b"], &["b"]);
    }
}
