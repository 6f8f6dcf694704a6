//! The rules for volumes.

use std::collections::BTreeSet;

use beelet_policy::quantity::Quantity;
use k8s_openapi::api::core::v1::{EmptyDirVolumeSource, HostPathVolumeSource, Volume};

use super::super::names;
use super::Problems;

/// Checks the volumes of a pod; returns their names.
pub(super) fn all<'p>(volumes: &'p [Volume], problems: &mut Problems) -> BTreeSet<&'p str> {
    let mut seen = BTreeSet::new();
    for (i, volume) in volumes.iter().enumerate() {
        let path = format!("spec.volumes[{i}]");
        problems.extend(names::label(&format!("{path}.name"), &volume.name));
        if !volume.name.is_empty() && !seen.insert(volume.name.as_str()) {
            problems
                .add(format!("{path}.name"), format!("{:?} is the name of an earlier volume", volume.name));
        }
        if sources(volume) > 1 {
            problems.add(&path, "must have one source only");
        }
        if let Some(source) = &volume.host_path {
            host_path(&format!("{path}.hostPath"), source, problems);
        }
        if let Some(source) = &volume.empty_dir {
            empty_dir(&format!("{path}.emptyDir"), source, problems);
        }
    }
    seen
}

/// How many sources a volume has: all its fields but the name.
fn sources(volume: &Volume) -> usize {
    let fields = serde_json::to_value(volume).unwrap_or_default();
    fields.as_object().map_or(0, |fields| fields.keys().filter(|key| *key != "name").count())
}

fn host_path(path: &str, source: &HostPathVolumeSource, problems: &mut Problems) {
    if source.path.is_empty() {
        problems.add(format!("{path}.path"), "must be there");
    } else if !source.path.starts_with('/') {
        problems.add(format!("{path}.path"), format!("{} must begin with '/'", names::quoted(&source.path)));
    } else if source.path.contains('\0') || source.path.split('/').any(|part| part == "..") {
        problems
            .add(format!("{path}.path"), format!("{} must not have '..' in it", names::quoted(&source.path)));
    }
    let types =
        ["", "DirectoryOrCreate", "Directory", "FileOrCreate", "File", "Socket", "CharDevice", "BlockDevice"];
    problems.one_of(&format!("{path}.type"), source.type_.as_deref(), &types);
}

fn empty_dir(path: &str, source: &EmptyDirVolumeSource, problems: &mut Problems) {
    let Some(limit) = &source.size_limit else { return };
    match Quantity::parse(&limit.0) {
        Ok(limit) if limit < Quantity::ZERO => problems.add(format!("{path}.sizeLimit"), "is negative"),
        Ok(_) => {}
        Err(error) => problems.add(format!("{path}.sizeLimit"), error.to_string()),
    }
}
