//! Environment variables from files (`fileKeyRef`, KEP-3721), which an init container has written into an
//! emptyDir volume. The content is untrusted: the agent opens a file without leaving the volume, and limits
//! its size.

use std::collections::{BTreeMap, BTreeSet, btree_map::Entry};
use std::path::Path;

use beelet_policy::pod::{env_file::EnvFile, variables::Budget};
use beelet_volumes::PodVolumes;
use k8s_openapi::api::core::v1::{Container, EnvVar, FileKeySelector};

use crate::error::Error;

/// Returns true if a variable of a container comes from a file.
pub(crate) fn are_asked_for(container: &Container) -> bool {
    container.env.iter().flatten().any(|variable| selector(variable).is_some())
}

fn selector(variable: &EnvVar) -> Option<&FileKeySelector> {
    variable.value_from.as_ref()?.file_key_ref.as_ref()
}

/// Returns the container with the values from files as literals. Blocks.
///
/// # Errors
/// A file cannot be read or lacks a variable, or the total size of the files or of the values exceeds the
/// limit of a container's environment. A container wrote the files, and a spec may refer to each thousands of
/// times.
pub(crate) fn read(mut container: Container, volumes: &PodVolumes) -> Result<Container, Error> {
    let (name, env) = (container.name.clone(), container.env.take().unwrap_or_default());
    let mut files = Files::new(&env, volumes);
    let mut budget = Budget::CONTAINER;
    let mut read = Vec::new();
    for one in &env {
        let mut variable = one.clone();
        if let Some(selector) = selector(one) {
            let value = files.value(selector).and_then(|found| {
                budget.spend(found.map_or(0, str::len)).map_err(|long| format!("its value {long}"))?;
                // A literal may contain references such as `$(NAME)`; a value from a file is not expanded.
                Ok(found.map(|value| value.replace('$', "$$")))
            });
            let value = value.map_err(|why| {
                Error::Spec(format!("environment variable {} of container {name}: {why}", variable.name))
            })?;
            if value.is_none() {
                continue;
            }
            (variable.value_from, variable.value) = (None, value);
        }
        read.push(variable);
    }
    container.env = Some(read);
    Ok(container)
}

/// A volume's name, and the path of a file in the volume.
type Place<'e> = (&'e str, &'e str);

/// Files with a container's variables, each read once.
struct Files<'e> {
    volumes: &'e PodVolumes,
    /// Referenced variables, by file.
    wanted: BTreeMap<Place<'e>, BTreeSet<&'e str>>,
    read: BTreeMap<Place<'e>, EnvFile>,
    /// Limit of the total size of files.
    budget: Budget,
}

impl<'e> Files<'e> {
    fn new(env: &'e [EnvVar], volumes: &'e PodVolumes) -> Self {
        let mut wanted: BTreeMap<_, BTreeSet<_>> = BTreeMap::new();
        for FileKeySelector { key, path, volume_name, .. } in env.iter().filter_map(selector) {
            wanted.entry((volume_name.as_str(), path.as_str())).or_default().insert(key.as_str());
        }
        Self { volumes, wanted, read: BTreeMap::new(), budget: Budget::CONTAINER }
    }

    /// Returns the value of a variable in a file, or None if an optional variable is missing.
    fn value(&mut self, selector: &'e FileKeySelector) -> Result<Option<&str>, String> {
        let FileKeySelector { key, path, volume_name, optional } = selector;
        let shown = || format!("the file {path} of the volume {volume_name}");
        let place = (volume_name.as_str(), path.as_str());
        let file = match self.read.entry(place) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => {
                let text =
                    self.volumes.read(volume_name, Path::new(path)).map_err(|error| error.to_string())?;
                self.budget.spend(text.len()).map_err(|long| format!("{} {long}", shown()))?;
                let text = String::from_utf8(text).map_err(|_| format!("{} is not UTF-8 text", shown()))?;
                let none = BTreeSet::new();
                new.insert(EnvFile::read(&text, self.wanted.get(&place).unwrap_or(&none)))
            }
        };
        let found = file.value(key).map_err(|error| format!("{}: {error}", shown()))?;
        if found.is_none() && *optional != Some(true) {
            return Err(format!("{} has no variable {key}", shown()));
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_value_from_a_file_is_literal_and_keeps_the_variables_position() {
        let dir = tempfile::tempdir().unwrap();
        let pod: k8s_openapi::api::core::v1::Pod = serde_json::from_value(json!({
            "metadata": {"name": "web", "uid": "u1"},
            "spec": {"containers": [], "volumes": [{"name": "data", "emptyDir": {}}, {"name": "host", "hostPath": {"path": "/"}}]},
        }))
        .unwrap();
        let volumes = PodVolumes::of(&pod, dir.path(), &beelet_volumes::Plugins::default());
        let folder = dir.path().join("u1/volumes/data");
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("vars"), "A='$(B) $5'\nC='3'\n").unwrap();
        std::os::unix::fs::symlink("/etc/passwd", folder.join("link")).unwrap();
        let container = |volume: &str, path: &str, key: &str, optional: bool| -> Container {
            let from =
                json!({"fileKeyRef": {"volumeName": volume, "path": path, "key": key, "optional": optional}});
            let env = json!([{"name": "B", "value": "b"}, {"name": "X", "valueFrom": from}]);
            serde_json::from_value(json!({"name": "c", "env": env})).unwrap()
        };
        let check = |container: Container, expected: Result<&[(&str, &str)], &str>| {
            assert!(are_asked_for(&container));
            let found = read(container, &volumes).map(|read| {
                let all = read.env.unwrap().into_iter();
                all.map(|one| (one.name, one.value.unwrap_or_default())).collect::<Vec<_>>()
            });
            match (found, expected) {
                (Ok(found), Ok(expected)) => {
                    let found: Vec<_> = found.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
                    assert_eq!(found, expected);
                }
                (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{error}"),
                (found, _) => panic!("{found:?}"),
            }
        };
        check(container("data", "vars", "A", false), Ok(&[("B", "b"), ("X", "$$(B) $$5")]));
        check(container("data", "vars", "none", true), Ok(&[("B", "b")]));
        check(container("data", "vars", "none", false), Err("has no variable none"));
        check(container("data", "gone", "A", true), Err("gone"));
        check(container("data", "link", "A", true), Err("link"));
        check(container("data", "../x", "A", true), Err("x"));
        check(container("host", "etc/passwd", "A", true), Err("emptyDir"));
        check(container("none", "x", "A", true), Err("none"));
    }

    #[test]
    fn repeated_references_to_files_and_values_stop_at_the_budget() {
        let dir = tempfile::tempdir().unwrap();
        let pod = json!({"metadata": {"name": "web", "uid": "u1"},
            "spec": {"containers": [], "volumes": [{"name": "data", "emptyDir": {}}]}});
        let volumes = PodVolumes::of(
            &serde_json::from_value(pod).unwrap(),
            dir.path(),
            &beelet_volumes::Plugins::default(),
        );
        let folder = dir.path().join("u1/volumes/data");
        std::fs::create_dir_all(&folder).unwrap();
        let long = format!("A='{}'\n", "x".repeat(1_000_000));
        for n in 0..20 {
            std::fs::write(folder.join(n.to_string()), &long).unwrap();
        }
        let check = |variables: usize, files: usize, key: &str, expected: &str| {
            let variable = |n: usize| {
                let path = (n % files).to_string();
                let from = json!({"volumeName": "data", "path": path, "key": key, "optional": true});
                json!({"name": format!("V{n}"), "valueFrom": {"fileKeyRef": from}})
            };
            let env: Vec<_> = (0..variables).map(variable).collect();
            let container = serde_json::from_value(json!({"name": "c", "env": env})).unwrap();
            let failed = read(container, &volumes).map(|_| ()).unwrap_err().to_string();
            let together = "makes the total longer than 16777216 bytes";
            assert_eq!(failed, format!("environment variable {expected} {together}"));
        };
        check(12_000, 1, "A", "V16 of container c: its value");
        check(12_000, 20, "none", "V16 of container c: the file 16 of the volume data");
    }
}
