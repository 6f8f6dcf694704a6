//! Rules for volumes.

use std::collections::BTreeSet;

use beelet_codec::ApiType as _;
use beelet_policy::resources::huge_pages::Medium;
use beelet_units::quantity::Quantity;
use k8s_openapi::api::core::v1::{
    DownwardAPIVolumeFile, EmptyDirVolumeSource, HostPathVolumeSource, ImageVolumeSource, KeyToPath,
    NFSVolumeSource, PodSpec, Volume, VolumeProjection,
};

use super::super::names;
use super::Problems;

/// Checks the volumes of a pod and returns their names.
pub(super) fn all<'p>(spec: &'p PodSpec, problems: &mut Problems) -> BTreeSet<&'p str> {
    let mut seen = BTreeSet::new();
    for (i, volume) in spec.volumes.iter().flatten().enumerate() {
        let path = format!("spec.volumes[{i}]");
        problems.extend(names::label(&format!("{path}.name"), &volume.name));
        if !volume.name.is_empty() && !seen.insert(volume.name.as_str()) {
            problems
                .add(format!("{path}.name"), format!("{:?} is the name of an earlier volume", volume.name));
        }
        if sources(volume) > 1 {
            problems.add(&path, "must have only one source");
        }
        source(&path, volume, spec, problems);
    }
    seen
}

fn source(path: &str, volume: &Volume, spec: &PodSpec, problems: &mut Problems) {
    if let Some(source) = &volume.host_path {
        host_path(&format!("{path}.hostPath"), source, problems);
    }
    if let Some(source) = &volume.empty_dir {
        empty_dir(&format!("{path}.emptyDir"), source, problems);
    }
    if let Some(source) = &volume.nfs {
        nfs(&format!("{path}.nfs"), source, problems);
    }
    if let Some(source) = &volume.config_map {
        let path = format!("{path}.configMap");
        problems.extend(names::subdomain(&format!("{path}.name"), &source.name));
        mode(&format!("{path}.defaultMode"), source.default_mode, problems);
        items(&path, source.items.as_deref(), problems);
    }
    if let Some(source) = &volume.secret {
        let path = format!("{path}.secret");
        let name = source.secret_name.as_deref().unwrap_or_default();
        problems.extend(names::subdomain(&format!("{path}.secretName"), name));
        mode(&format!("{path}.defaultMode"), source.default_mode, problems);
        items(&path, source.items.as_deref(), problems);
    }
    if let Some(source) = &volume.downward_api {
        let path = format!("{path}.downwardAPI");
        mode(&format!("{path}.defaultMode"), source.default_mode, problems);
        downward(&path, source.items.as_deref(), spec, problems);
    }
    if let Some(source) = &volume.projected {
        let path = format!("{path}.projected");
        mode(&format!("{path}.defaultMode"), source.default_mode, problems);
        for (i, projection) in source.sources.iter().flatten().enumerate() {
            project(&format!("{path}.sources[{i}]"), projection, spec, problems);
        }
    }
    if let Some(source) = &volume.image {
        image(&format!("{path}.image"), source, problems);
    }
}

fn image(path: &str, source: &ImageVolumeSource, problems: &mut Problems) {
    if source.reference.as_deref().unwrap_or_default().is_empty() {
        problems.add(format!("{path}.reference"), "must be set to the image's name");
    }
    let policies = ["Always", "IfNotPresent", "Never"];
    problems.one_of(&format!("{path}.pullPolicy"), source.pull_policy.as_deref(), &policies);
}

fn project(path: &str, projection: &VolumeProjection, spec: &PodSpec, problems: &mut Problems) {
    let fields = projection.to_value();
    if fields.as_object().map_or(0, serde_json::Map::len) != 1 {
        problems.add(path, "must have exactly one source");
    }
    if let Some(source) = &projection.config_map {
        problems.extend(names::subdomain(&format!("{path}.configMap.name"), &source.name));
        items(&format!("{path}.configMap"), source.items.as_deref(), problems);
    }
    if let Some(source) = &projection.secret {
        problems.extend(names::subdomain(&format!("{path}.secret.name"), &source.name));
        items(&format!("{path}.secret"), source.items.as_deref(), problems);
    }
    if let Some(source) = &projection.downward_api {
        downward(&format!("{path}.downwardAPI"), source.items.as_deref(), spec, problems);
    }
}

fn mode(path: &str, mode: Option<i32>, problems: &mut Problems) {
    if mode.is_some_and(|mode| !(0..=0o777).contains(&mode)) {
        problems.add(path, "must be from 0 to 0777 (in JSON 511)");
    }
}

fn items(path: &str, items: Option<&[KeyToPath]>, problems: &mut Problems) {
    for (i, item) in items.into_iter().flatten().enumerate() {
        let path = format!("{path}.items[{i}]");
        if item.key.is_empty() {
            problems.add(format!("{path}.key"), "must be set");
        }
        file_path(&format!("{path}.path"), &item.path, problems);
        mode(&format!("{path}.mode"), item.mode, problems);
    }
}

/// Checks a file's path in a volume.
fn file_path(path: &str, file: &str, problems: &mut Problems) {
    if file.is_empty() {
        problems.add(path, "must be set to the file's path in the volume");
    } else if file.starts_with("..") {
        problems.add(path, format!("{} must not begin with '..'", names::quoted(file)));
    } else {
        problems.extend(names::inner_path(path, file));
    }
}

/// Fields that `fieldRef` of a file may refer to: those that are known before the pod has addresses.
const FIELDS: [&str; 5] =
    ["metadata.name", "metadata.namespace", "metadata.uid", "metadata.labels", "metadata.annotations"];

fn downward(path: &str, items: Option<&[DownwardAPIVolumeFile]>, spec: &PodSpec, problems: &mut Problems) {
    for (i, item) in items.into_iter().flatten().enumerate() {
        let path = format!("{path}.items[{i}]");
        file_path(&format!("{path}.path"), &item.path, problems);
        mode(&format!("{path}.mode"), item.mode, problems);
        match (&item.field_ref, &item.resource_field_ref) {
            (Some(field), None) => {
                let known = FIELDS.contains(&field.field_path.as_str())
                    || super::containers::is_subscript(&field.field_path);
                if !known {
                    let rule = "is not supported in a file; use metadata.name, metadata.namespace, \
                                metadata.uid, metadata.labels, metadata.annotations or one of their keys";
                    let message = format!("{} {rule}", names::quoted(&field.field_path));
                    problems.add(format!("{path}.fieldRef.fieldPath"), message);
                }
            }
            (None, Some(selector)) => {
                let path = format!("{path}.resourceFieldRef");
                super::containers::resource_field(&path, selector, problems);
                let name = selector.container_name.as_deref().unwrap_or_default();
                let mut all = spec.containers.iter().chain(spec.init_containers.iter().flatten());
                if !all.any(|container| container.name == name) {
                    let message = format!("the pod has no container {}", names::quoted(name));
                    problems.add(format!("{path}.containerName"), message);
                }
            }
            _ => problems.add(&path, "must have exactly one of fieldRef and resourceFieldRef"),
        }
    }
}

/// Returns the number of a volume's sources: all fields except the name.
fn sources(volume: &Volume) -> usize {
    let fields = volume.to_value();
    fields.as_object().map_or(0, |fields| fields.keys().filter(|key| *key != "name").count())
}

fn host_path(path: &str, source: &HostPathVolumeSource, problems: &mut Problems) {
    if source.path.is_empty() {
        problems.add(format!("{path}.path"), "must be set");
    } else if !source.path.starts_with('/') {
        problems.add(format!("{path}.path"), format!("{} must begin with '/'", names::quoted(&source.path)));
    } else if source.path.contains('\0') || source.path.split('/').any(|part| part == "..") {
        problems
            .add(format!("{path}.path"), format!("{} must not contain '..'", names::quoted(&source.path)));
    }
    let types =
        ["", "DirectoryOrCreate", "Directory", "FileOrCreate", "File", "Socket", "CharDevice", "BlockDevice"];
    problems.one_of(&format!("{path}.type"), source.type_.as_deref(), &types);
}

fn nfs(path: &str, source: &NFSVolumeSource, problems: &mut Problems) {
    if source.server.is_empty() {
        problems.add(format!("{path}.server"), "must be set");
    }
    if !source.path.starts_with('/') {
        problems.add(format!("{path}.path"), format!("{} must begin with '/'", names::quoted(&source.path)));
    }
    if source.server.contains('\0') || source.path.contains('\0') {
        problems.add(path, "must not contain zero bytes");
    }
}

fn empty_dir(path: &str, source: &EmptyDirVolumeSource, problems: &mut Problems) {
    let medium = source.medium.as_deref().unwrap_or_default();
    if !matches!(medium, "" | "Memory") && Medium::parse(medium).is_none() {
        let rule = "is not one of Memory, HugePages and HugePages-<page size>";
        problems.add(format!("{path}.medium"), format!("{} {rule}", names::quoted(medium)));
    }
    let Some(limit) = &source.size_limit else { return };
    match Quantity::parse(&limit.0) {
        Ok(limit) if limit < Quantity::ZERO => problems.add(format!("{path}.sizeLimit"), "is negative"),
        Ok(_) => {}
        Err(error) => problems.add(format!("{path}.sizeLimit"), error.to_string()),
    }
}
