//! Which folders a read-only volume needs as mount points of other volumes (the kubelet's
//! `pkg/volume/util/nested_volumes.go`).

use k8s_openapi::api::core::v1::{Pod, VolumeMount};

/// The folders, relative to a volume's top, where containers have other volumes mounted below it. Never
/// absolute, and never with `..`. Of mounts in each other only the outermost: what is below is not this
/// volume's.
#[must_use]
pub fn nested(pod: &Pod, volume: &str) -> Vec<String> {
    let Some(spec) = &pod.spec else { return Vec::new() };
    let containers = spec.init_containers.iter().flatten().chain(&spec.containers);
    let ephemeral = spec.ephemeral_containers.iter().flatten();
    let lists = containers.map(|one| &one.volume_mounts).chain(ephemeral.map(|one| &one.volume_mounts));
    let mut all: Vec<String> =
        lists.flat_map(|mounts| in_container(mounts.as_deref().unwrap_or_default(), volume)).collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// The same for one container's mounts.
fn in_container(mounts: &[VolumeMount], volume: &str) -> Vec<String> {
    let places: Vec<(&str, Vec<&str>)> =
        mounts.iter().map(|mount| (mount.name.as_str(), parts(&mount.mount_path))).collect();
    let is_below = |inner: &[&str], outer: &[&str]| inner.len() > outer.len() && inner.starts_with(outer);
    let mut found = Vec::new();
    for (_, own) in places.iter().filter(|(name, own)| *name == volume && !own.is_empty()) {
        let below = places.iter().map(|(_, place)| place).filter(|place| is_below(place, own));
        for place in below {
            let has_between = places.iter().any(|(_, one)| is_below(one, own) && is_below(place, one));
            if !has_between {
                found.push(place[own.len()..].join("/"));
            }
        }
    }
    found
}

/// The parts of a path in a container, from its root. Nothing is above the root.
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

    /// Mounts as `volume:path`; the volume asked for is `v`.
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
            assert_eq!(nested(&pod, "v"), expected, "{kind}: {mounts:?}");
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
    fn what_is_mounted_in_a_nested_volume_is_that_volumes() {
        check(&["v:/dir", "w:/dir/nested", "x:/dir/nested/other"], &["nested"]);
        // In the order of the texts, a mount and what is in it are apart.
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
}
