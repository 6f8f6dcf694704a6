//! Variables from files (`fileKeyRef`, KEP-3721): what an init container has written into an emptyDir volume.
//! The file is a container's, and so anything: it is opened without leaving the volume, and read up to a
//! limit.

use std::path::Path;

use beelet_policy::env_file;
use beelet_volumes::Volumes;
use k8s_openapi::api::core::v1::{Container, EnvVar, FileKeySelector};

use crate::error::Error;

/// Returns true if any variable of a container comes from a file.
pub(crate) fn are_asked_for(container: &Container) -> bool {
    container.env.iter().flatten().any(|variable| selector(variable).is_some())
}

fn selector(variable: &EnvVar) -> Option<&FileKeySelector> {
    variable.value_from.as_ref()?.file_key_ref.as_ref()
}

/// The container with the values that its files have, as if its spec had them. Blocking.
pub(crate) fn read(mut container: Container, volumes: &Volumes) -> Result<Container, Error> {
    let name = container.name.clone();
    let mut read = Vec::new();
    for mut variable in container.env.take().into_iter().flatten() {
        if let Some(selector) = selector(&variable) {
            let found = value(selector, volumes).map_err(|why| {
                Error::Spec(format!("environment variable {} of container {name}: {why}", variable.name))
            })?;
            let Some(value) = found else { continue };
            variable.value_from = None;
            // A literal refers to others by `$(NAME)`; what a file says stands for itself.
            variable.value = Some(value.replace('$', "$$"));
        }
        read.push(variable);
    }
    container.env = Some(read);
    Ok(container)
}

/// What a file says of a variable; None if it says nothing, and need not.
fn value(selector: &FileKeySelector, volumes: &Volumes) -> Result<Option<String>, String> {
    let FileKeySelector { key, path, volume_name, optional } = selector;
    let file = || format!("the file {path} of the volume {volume_name}");
    let text = volumes.read(volume_name, Path::new(path)).map_err(|error| error.to_string())?;
    let text = String::from_utf8(text).map_err(|_| format!("{} is not UTF-8 text", file()))?;
    let found = env_file::value(&text, key).map_err(|error| format!("{}: {error}", file()))?;
    if found.is_none() && *optional != Some(true) {
        return Err(format!("{} has no variable {key}", file()));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_files_value_stands_for_itself_in_the_variables_place() {
        let dir = tempfile::tempdir().unwrap();
        let pod: k8s_openapi::api::core::v1::Pod = serde_json::from_value(json!({
            "metadata": {"name": "web", "uid": "u1"},
            "spec": {"containers": [], "volumes": [{"name": "said", "emptyDir": {}}, {"name": "host", "hostPath": {"path": "/"}}]},
        }))
        .unwrap();
        let volumes = Volumes::of(&pod, dir.path());
        let folder = dir.path().join("u1/volumes/said");
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
        check(container("said", "vars", "A", false), Ok(&[("B", "b"), ("X", "$$(B) $$5")]));
        check(container("said", "vars", "none", true), Ok(&[("B", "b")]));
        check(container("said", "vars", "none", false), Err("has no variable none"));
        check(container("said", "gone", "A", true), Err("gone"));
        check(container("said", "link", "A", true), Err("link"));
        check(container("said", "../x", "A", true), Err("x"));
        check(container("host", "etc/passwd", "A", true), Err("emptyDir"));
        check(container("none", "x", "A", true), Err("none"));
    }
}
