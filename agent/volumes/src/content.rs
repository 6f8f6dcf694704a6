//! Volumes that show objects: ConfigMaps, Secrets, the downward API, and projections of them.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1 as core;

use crate::{
    atomic::{self, Payload, PayloadFile},
    error::Error,
    loss::Loss,
    mounts,
    plugin::{Location, Sources, Spec, Target, VolumePlugin},
    top_folder::{make_top, open_top},
};
use beelet_policy::{
    pod::references,
    volumes::{content::Allowance, trust_bundles},
};
use beelet_spec::downward;
use beelet_spec::env::missing;

/// Mode of files without a mode in the volume's spec.
const DEFAULT_MODE: i32 = 0o644;

/// Volumes of ConfigMaps, Secrets, the downward API, and projections of them.
#[derive(Debug)]
pub(crate) struct ContentVolumes;

/// Returns the kubelet's name of the plugin of a volume that shows objects.
pub(crate) fn plugin_name(spec: &Spec<'_>) -> Option<&'static str> {
    let core::Volume { config_map, secret, projected, downward_api, .. } = spec.volume;
    let kinds = [
        (config_map.is_some(), "kubernetes.io/configmap"),
        (secret.is_some(), "kubernetes.io/secret"),
        (projected.is_some(), "kubernetes.io/projected"),
        (downward_api.is_some(), "kubernetes.io/downward-api"),
    ];
    kinds.into_iter().find(|(is_there, _)| *is_there).map(|(_, name)| name)
}

impl VolumePlugin for ContentVolumes {
    fn name(&self, spec: &Spec<'_>) -> Option<&'static str> {
        plugin_name(spec)
    }

    fn location(&self, _volume: &core::Volume) -> Location {
        Location::Own
    }

    fn is_read_only(&self, _volume: &core::Volume) -> bool {
        true
    }

    fn has_content(&self) -> bool {
        true
    }

    fn is_restorable(&self) -> bool {
        true
    }

    fn set_up(
        &self,
        spec: &Spec<'_>,
        target: &Target<'_>,
        left: &mut Allowance,
    ) -> Result<Option<PathBuf>, Error> {
        let Target { path, fs_group, sources, nested, .. } = *target;
        let Some(payload) = payload(spec.volume, sources, left)? else { return Ok(None) };
        let none = BTreeSet::new();
        let nested = nested.map_or(Ok(&none), |nested| nested.as_ref().map_err(Clone::clone))?;
        nested.iter().try_for_each(|way| left.path(way))?;
        make_top(path)?;
        let in_memory = in_memory(spec.volume);
        if in_memory {
            mounts::mount_for_content(path)?;
        }
        let top = open_top(path, in_memory)?.ok_or_else(|| Error::Vanished(path.to_owned()))?;
        atomic::make_mount_points(path, &top, nested, fs_group)?;
        if !(lacks_token(spec.volume, sources) && atomic::is_set_up(&top)) {
            atomic::write(path, &top, &payload, fs_group)?;
        }
        Ok(None)
    }

    fn refresh(&self, spec: &Spec<'_>, target: &Target<'_>, left: &mut Allowance) -> Result<bool, Error> {
        let Target { path, fs_group, sources, .. } = *target;
        // A volume that is not set up yet, or is being removed, is left alone.
        let Some(top) = open_top(path, in_memory(spec.volume))?.filter(atomic::is_set_up) else {
            return Ok(false);
        };
        if lacks_token(spec.volume, sources) {
            return Ok(false);
        }
        match payload(spec.volume, sources, left)? {
            Some(payload) => atomic::write(path, &top, &payload, fs_group),
            None => Ok(false),
        }
    }

    fn loss(&self, spec: &Spec<'_>, path: &Path) -> Result<Option<Loss>, Error> {
        Ok(match open_top(path, in_memory(spec.volume))? {
            None => Some(Loss::Folder),
            Some(top) if !atomic::is_set_up(&top) => Some(Loss::Files),
            Some(_) => None,
        })
    }
}

/// Returns true if a volume's files are kept in memory, as under the kubelet: secrets must not reach the
/// disk.
fn in_memory(volume: &core::Volume) -> bool {
    volume.config_map.is_none()
}

/// Returns the files of a volume; None for a volume of another kind. The files borrow the contents of the
/// objects, because a pod may name an object many times.
///
/// # Errors
/// An object or a key in it is missing, or the files exceed `left`.
fn payload<'o>(
    volume: &core::Volume,
    sources: &Sources<'o>,
    left: &mut Allowance,
) -> Result<Option<Payload<'o>>, Error> {
    let mut files = Files { sources: *sources, left, payload: Payload::new() };
    if let Some(source) = &volume.config_map {
        files.config_map(&Reference::of_map(source), mode_of(source.default_mode))?;
    } else if let Some(source) = &volume.secret {
        files.secret(&Reference::of_secret(source), mode_of(source.default_mode))?;
    } else if let Some(source) = &volume.downward_api {
        files.downward(source.items.as_deref(), mode_of(source.default_mode))?;
    } else if let Some(source) = &volume.projected {
        let mode = mode_of(source.default_mode);
        for projection in source.sources.iter().flatten() {
            files.project(projection, mode)?;
        }
    } else {
        return Ok(None);
    }
    files.left.folders(files.payload.keys().map(String::as_str))?;
    Ok(Some(files.payload))
}

/// Returns true if a volume has to do without a token that it asks for. A volume that is set up already keeps
/// its files then.
fn lacks_token(volume: &core::Volume, sources: &Sources<'_>) -> bool {
    let projections = volume.projected.iter().flat_map(|projected| projected.sources.iter().flatten());
    let mut tokens = projections.filter_map(|projection| projection.service_account_token.as_ref());
    sources.objects.tokens.are_optional
        && tokens.any(|source| sources.objects.tokens.get(&references::token(sources.pod, source)).is_none())
}

fn mode_of(mode: Option<i32>) -> i32 {
    mode.unwrap_or(DEFAULT_MODE)
}

/// Returns the user that all containers of a pod run as, if each names a user and it is the same one
/// (`FsUserFrom`).
fn fs_user(pod: &core::Pod) -> Option<i64> {
    let spec = pod.spec.as_ref()?;
    let of_pod = spec.security_context.as_ref().and_then(|context| context.run_as_user);
    let containers = spec.init_containers.iter().flatten().chain(&spec.containers);
    let ephemeral = spec.ephemeral_containers.iter().flatten();
    let mut contexts =
        containers.map(|one| &one.security_context).chain(ephemeral.map(|one| &one.security_context));
    let user = |own: &Option<core::SecurityContext>| own.as_ref().and_then(|own| own.run_as_user).or(of_pod);
    let first = user(contexts.next()?)?;
    contexts.all(|own| user(own) == Some(first)).then_some(first)
}

/// A reference to an object, from any of the volume fields that may have one.
struct Reference<'a> {
    name: &'a str,
    items: &'a [core::KeyToPath],
    optional: bool,
}

impl<'a> Reference<'a> {
    fn new(name: &'a str, items: Option<&'a Vec<core::KeyToPath>>, optional: Option<bool>) -> Self {
        let items = items.map(Vec::as_slice).unwrap_or_default();
        Self { name, items, optional: optional == Some(true) }
    }

    fn of_map(source: &'a core::ConfigMapVolumeSource) -> Self {
        Self::new(&source.name, source.items.as_ref(), source.optional)
    }

    fn of_secret(source: &'a core::SecretVolumeSource) -> Self {
        Self::new(source.secret_name.as_deref().unwrap_or_default(), source.items.as_ref(), source.optional)
    }
}

/// The keys and values of a ConfigMap or a Secret.
#[derive(Clone, Copy)]
enum Entries<'o> {
    Map(&'o core::ConfigMap),
    Secret(&'o core::Secret),
}

impl<'o> Entries<'o> {
    fn get(self, key: &str) -> Option<&'o [u8]> {
        let bytes = |of: &'o Option<BTreeMap<String, ByteString>>| {
            of.as_ref().and_then(|all| all.get(key)).map(|bytes| bytes.0.as_slice())
        };
        match self {
            Self::Map(map) => {
                let text = map.data.as_ref().and_then(|all| all.get(key));
                text.map(String::as_bytes).or_else(|| bytes(&map.binary_data))
            }
            Self::Secret(secret) => bytes(&secret.data),
        }
    }

    fn keys(self) -> impl Iterator<Item = &'o String> {
        let (text, bytes) = match self {
            Self::Map(map) => (map.data.as_ref(), map.binary_data.as_ref()),
            Self::Secret(secret) => (None, secret.data.as_ref()),
        };
        text.into_iter().flat_map(BTreeMap::keys).chain(bytes.into_iter().flat_map(BTreeMap::keys))
    }
}

struct Files<'s, 'o> {
    sources: Sources<'o>,
    left: &'s mut Allowance,
    payload: Payload<'o>,
}

impl<'o> Files<'_, 'o> {
    fn add(&mut self, path: &str, bytes: impl Into<Cow<'o, [u8]>>, mode: i32) -> Result<(), Error> {
        // The later of two sources for a path wins.
        let (bytes, mode) = (bytes.into(), u32::try_from(mode).unwrap_or(0) & 0o777);
        self.left.file(bytes.len())?;
        self.payload.insert(path.to_owned(), PayloadFile { bytes, mode, owner: None });
        Ok(())
    }

    /// Adds a token or a trust bundle. The file belongs to the pod's user alone if the pod names a user, as
    /// in the kubelet's `collectData` (`pkg/volume/projected`). The pod's group gets its permissions later.
    fn add_identity(&mut self, path: &str, bytes: impl Into<Cow<'o, [u8]>>, mode: i32) -> Result<(), Error> {
        let pod = self.sources.pod;
        let context = pod.spec.as_ref().and_then(|spec| spec.security_context.as_ref());
        let (user, group) = (fs_user(pod), context.and_then(|context| context.fs_group));
        self.add(path, bytes, if user.is_some() || group.is_some() { 0o600 } else { mode })?;
        if let Some(file) = self.payload.get_mut(path) {
            file.owner = user.and_then(|user| u32::try_from(user).ok()).filter(|user| *user != u32::MAX);
        }
        Ok(())
    }

    fn namespace(&self) -> &str {
        self.sources.pod.metadata.namespace.as_deref().unwrap_or("default")
    }

    fn config_map(&mut self, reference: &Reference<'_>, mode: i32) -> Result<(), Error> {
        let found = self.sources.objects.config_map(self.namespace(), reference.name);
        self.object("ConfigMap", reference, found.map(Entries::Map), mode)
    }

    fn secret(&mut self, reference: &Reference<'_>, mode: i32) -> Result<(), Error> {
        let found = self.sources.objects.secret(self.namespace(), reference.name);
        self.object("Secret", reference, found.map(Entries::Secret), mode)
    }

    /// Adds all keys of an object, or the requested keys under the requested paths.
    fn object(
        &mut self,
        kind: &str,
        reference: &Reference<'_>,
        entries: Option<Entries<'o>>,
        mode: i32,
    ) -> Result<(), Error> {
        let name = reference.name;
        let Some(entries) = entries else {
            let error = missing(self.sources.pod, kind, name);
            return if reference.optional { Ok(()) } else { Err(Error::unmet(error)) };
        };
        if reference.items.is_empty() {
            for key in entries.keys() {
                self.add(key, entries.get(key).unwrap_or_default(), mode)?;
            }
        }
        for item in reference.items {
            match entries.get(&item.key) {
                Some(bytes) => self.add(&item.path, bytes, item.mode.unwrap_or(mode))?,
                None if reference.optional => {}
                None => return Err(Error::unmet(format!("the {kind} {name} has no key {}", item.key))),
            }
        }
        Ok(())
    }

    fn downward(&mut self, items: Option<&[core::DownwardAPIVolumeFile]>, mode: i32) -> Result<(), Error> {
        let Sources { pod, node, .. } = self.sources;
        for item in items.into_iter().flatten() {
            let text = match (&item.field_ref, &item.resource_field_ref) {
                // A volume is made before the pod has addresses; the API does not let a volume ask for them.
                (Some(field), _) => downward::field(pod, &field.field_path, &[], node),
                (None, Some(selector)) => downward::resource(pod, None, selector, node),
                (None, None) => Err(beelet_spec::Error::NoReference),
            };
            let text = text.map_err(|e| Error::unmet(format!("the file {}: {e}", item.path)))?;
            self.add(&item.path, text.into_bytes(), item.mode.unwrap_or(mode))?;
        }
        Ok(())
    }

    fn project(&mut self, projection: &core::VolumeProjection, mode: i32) -> Result<(), Error> {
        // Each projection costs work, even if it adds no file.
        self.left.file(0)?;
        if let Some(source) = &projection.config_map {
            let reference = Reference::new(&source.name, source.items.as_ref(), source.optional);
            self.config_map(&reference, mode)
        } else if let Some(source) = &projection.secret {
            let reference = Reference::new(&source.name, source.items.as_ref(), source.optional);
            self.secret(&reference, mode)
        } else if let Some(source) = &projection.downward_api {
            self.downward(source.items.as_deref(), mode)
        } else if let Some(source) = &projection.service_account_token {
            let of = references::token(self.sources.pod, source);
            let objects = self.sources.objects;
            let token = match objects.tokens.get(&of) {
                Some(token) => token,
                // A program that finds no file may refuse to start; the API server rejects an empty token.
                None if objects.tokens.are_optional => "",
                None => {
                    let account = of.service_account;
                    return Err(Error::unmet(format!("the service account {account} has no token yet")));
                }
            };
            self.add_identity(&source.path, token.as_bytes(), mode)
        } else if let Some(source) = &projection.cluster_trust_bundle {
            let bundles = self.sources.objects.trust_bundles.as_deref();
            let bundles = bundles
                .ok_or_else(|| Error::unmet("the API server has not listed ClusterTrustBundles yet"))?;
            let file = trust_bundles::file(source, bundles).map_err(Error::unmet_of)?;
            self.add_identity(&source.path, file, mode)
        } else {
            Err(Error::unmet("a projection has an unknown kind"))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use serde_json::json;

    use super::*;
    use crate::plugin::Prepared;
    use beelet_model::objects::Object;
    use beelet_model::objects::Objects;

    fn objects() -> Objects {
        let mut objects = Objects::default();
        let map = json!({"metadata": {"name": "m", "namespace": "shop"}, "data": {"a": "1", "b": "2"}, "binaryData": {"c": "/w=="}});
        let secret = json!({"metadata": {"name": "s", "namespace": "shop"}, "data": {"key": "aHVzaA=="}});
        let map = Object::ConfigMap(Arc::new(serde_json::from_value(map).unwrap()));
        let secret = Object::Secret(Arc::new(serde_json::from_value(secret).unwrap()));
        objects.add(Path::new("/m/m"), &map);
        objects.add(Path::new("/m/s"), &secret);
        objects
    }

    /// Files as `path=content:mode`.
    fn check(volume: serde_json::Value, expected: Result<&[&str], &str>) {
        let mut volume_of = volume.clone();
        volume_of["name"] = json!("v");
        let volume_of: core::Volume = serde_json::from_value(volume_of).unwrap();
        let pod: core::Pod = serde_json::from_value(json!({
            "metadata": {"name": "web", "namespace": "shop", "labels": {"x": "y"}, "annotations": {"long": "x".repeat(200_000)}},
            "spec": {"containers": [{"name": "c", "resources": {"limits": {"cpu": "2"}}}]}
        }))
        .unwrap();
        let (objects, node) = (objects(), beelet_spec::fixtures::node());
        let sources = Sources { pod: &pod, objects: &objects, node: &node, prepared: &Prepared::default() };
        let shown = payload(&volume_of, &sources, &mut Allowance::default()).map(|payload| {
            let show = |(path, file): (&String, &PayloadFile)| {
                format!("{path}={}:{:o}", String::from_utf8_lossy(&file.bytes), file.mode)
            };
            payload.iter().flatten().map(show).collect::<Vec<_>>()
        });
        match (shown, expected) {
            (Ok(shown), Ok(expected)) => assert_eq!(shown, expected, "{volume}"),
            (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{error}"),
            (shown, expected) => panic!("{volume}: {shown:?}, not {expected:?}"),
        }
    }

    #[test]
    fn config_maps_show_all_or_the_requested_keys() {
        check(json!({"configMap": {"name": "m"}}), Ok(&["a=1:644", "b=2:644", "c=\u{fffd}:644"]));
        check(
            json!({"configMap": {"name": "m", "defaultMode": 0o400, "items": [{"key": "a", "path": "x/y"}, {"key": "b", "path": "z", "mode": 0o755}]}}),
            Ok(&["x/y=1:400", "z=2:755"]),
        );
        check(
            json!({"configMap": {"name": "none"}}),
            Err("ConfigMap shop/none not found; put its manifest next to the pod's"),
        );
        check(json!({"configMap": {"name": "none", "optional": true}}), Ok(&[]));
        let item = json!([{"key": "none", "path": "x"}]);
        check(json!({"configMap": {"name": "m", "items": item}}), Err("the ConfigMap m has no key none"));
        check(json!({"configMap": {"name": "m", "items": item, "optional": true}}), Ok(&[]));
    }

    #[test]
    fn files_that_no_limit_of_the_pod_counts_are_bounded_in_number_size_and_depth() {
        let item = |path: String| json!({"key": "a", "path": path});
        let deep = |n: usize| item(format!("{n}/{}x", "a/".repeat(2000)));
        let many = |items: Vec<serde_json::Value>| json!({"configMap": {"name": "m", "items": items}});
        check(many((0..365).map(deep).collect()), Err("more than 20000 files and folders"));
        check(many(vec![item("a/".repeat(5000) + "x")]), Err("of 10001 bytes is longer than the 4096 bytes"));
        check(many((0..20_001).map(|n| item(n.to_string())).collect()), Err("more than 20000 files"));
        let field =
            |n: usize| json!({"path": format!("f{n}"), "fieldRef": {"fieldPath": "metadata.annotations"}});
        let fields: Vec<_> = (0..400).map(field).collect();
        check(json!({"downwardAPI": {"items": fields}}), Err("more than 67108864 bytes"));
        let source = json!({"configMap": {"name": "none", "optional": true}});
        check(json!({"projected": {"sources": vec![source; 20_001]}}), Err("more than 20000 files"));
    }

    #[test]
    fn a_missing_optional_token_is_an_empty_file() {
        let pod: core::Pod = serde_json::from_value(json!({"metadata": {"name": "web"}})).unwrap();
        let volume =
            json!({"name": "v", "projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}});
        let volume: core::Volume = serde_json::from_value(volume).unwrap();
        let (mut objects, node) = (Objects::default(), beelet_spec::fixtures::node());
        let look = |objects: &Objects| {
            let sources = Sources { pod: &pod, objects, node: &node, prepared: &Prepared::default() };
            let files = payload(&volume, &sources, &mut Allowance::default());
            let files = files.map(Option::unwrap_or_default);
            (files.ok().map(|files| files["token"].bytes.to_vec()), lacks_token(&volume, &sources))
        };
        assert_eq!(look(&objects), (None, false));
        objects.tokens.are_optional = true;
        assert_eq!(look(&objects), (Some(Vec::new()), true));
        let of = references::tokens(&core::Pod {
            spec: Some(core::PodSpec { volumes: Some(vec![volume.clone()]), ..Default::default() }),
            ..pod.clone()
        });
        objects.tokens.add(of.into_iter().next().unwrap(), "t".into());
        assert_eq!(look(&objects), (Some(b"t".to_vec()), false));
    }

    #[test]
    fn the_user_of_a_pods_files_is_the_one_that_all_its_containers_run_as() {
        let check = |of_pod: Option<i64>, own: [serde_json::Value; 3], expected: Option<i64>| {
            let [init, main, ephemeral] =
                own.map(|user| json!([{"name": "c", "securityContext": {"runAsUser": user}}]));
            let pod = json!({"spec": {
                "securityContext": {"runAsUser": of_pod},
                "initContainers": init, "containers": main, "ephemeralContainers": ephemeral,
            }});
            let shown = pod.to_string();
            assert_eq!(fs_user(&serde_json::from_value(pod).unwrap()), expected, "{shown}");
        };
        let none = serde_json::Value::Null;
        check(None, [none.clone(), none.clone(), none.clone()], None);
        check(Some(7), [none.clone(), none.clone(), none.clone()], Some(7));
        check(None, [json!(7), json!(7), json!(7)], Some(7));
        check(None, [json!(0), json!(0), json!(0)], Some(0));
        check(None, [json!(7), json!(7), none.clone()], None);
        check(Some(7), [json!(8), none.clone(), none.clone()], None);
        check(Some(8), [json!(7), json!(7), json!(7)], Some(7));
        assert_eq!(fs_user(&core::Pod::default()), None);
    }

    #[test]
    fn only_the_pods_user_can_read_a_token() {
        let check = |context: serde_json::Value, expected: [(u32, Option<u32>); 2]| {
            let pod = json!({
                "metadata": {"name": "web", "namespace": "shop"},
                "spec": {"containers": [{"name": "c"}], "securityContext": context},
            });
            let volume = json!({"name": "v", "projected": {"defaultMode": 0o444, "sources": [
                {"serviceAccountToken": {"path": "token"}},
                {"configMap": {"name": "m", "items": [{"key": "a", "path": "a"}]}},
            ]}});
            let (pod, volume) =
                (serde_json::from_value(pod).unwrap(), serde_json::from_value(volume).unwrap());
            let (mut objects, node) = (objects(), beelet_spec::fixtures::node());
            objects.tokens.are_optional = true;
            let sources =
                Sources { pod: &pod, objects: &objects, node: &node, prepared: &Prepared::default() };
            let files = payload(&volume, &sources, &mut Allowance::default()).unwrap().unwrap();
            let shown = ["token", "a"].map(|path| (files[path].mode, files[path].owner));
            assert_eq!(shown, expected, "{context}");
        };
        check(json!({}), [(0o444, None), (0o444, None)]);
        check(json!({"runAsUser": 7}), [(0o600, Some(7)), (0o444, None)]);
        check(json!({"fsGroup": 9}), [(0o600, None), (0o444, None)]);
        check(json!({"runAsUser": 7, "fsGroup": 9}), [(0o600, Some(7)), (0o444, None)]);
    }

    #[test]
    fn secrets_show_their_decoded_values() {
        check(json!({"secret": {"secretName": "s", "defaultMode": 0o440}}), Ok(&["key=hush:440"]));
        check(json!({"secret": {"secretName": "m"}}), Err("Secret shop/m not found"));
    }

    #[test]
    fn the_downward_api_shows_fields_and_resources() {
        let items = json!([
            {"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}},
            {"path": "name", "fieldRef": {"fieldPath": "metadata.name"}, "mode": 0o600},
            {"path": "cpu", "resourceFieldRef": {"containerName": "c", "resource": "limits.cpu", "divisor": "1m"}},
        ]);
        check(
            json!({"downwardAPI": {"items": items}}),
            Ok(&["cpu=2000:644", "labels=x=\"y\":644", "name=web:600"]),
        );
        let wrong = json!([{"path": "x", "fieldRef": {"fieldPath": "spec.color"}}]);
        check(json!({"downwardAPI": {"items": wrong}}), Err("the file x: fieldPath \"spec.color\""));
    }

    #[test]
    fn a_projection_is_all_its_sources_together() {
        check(
            json!({"projected": {"defaultMode": 0o444, "sources": [
                {"configMap": {"name": "m", "items": [{"key": "a", "path": "a"}]}},
                {"secret": {"name": "s"}},
                {"secret": {"name": "none", "optional": true}},
                {"downwardAPI": {"items": [{"path": "a", "fieldRef": {"fieldPath": "metadata.name"}}]}},
            ]}}),
            Ok(&["a=web:444", "key=hush:444"]),
        );
    }

    #[test]
    fn other_kinds_of_volumes_have_no_payload() {
        let volume: core::Volume = serde_json::from_value(json!({"name": "v", "emptyDir": {}})).unwrap();
        let (objects, node) = (objects(), beelet_spec::fixtures::node());
        let pod = core::Pod::default();
        assert_eq!(
            payload(
                &volume,
                &Sources { pod: &pod, objects: &objects, node: &node, prepared: &Prepared::default() },
                &mut Allowance::default()
            )
            .unwrap(),
            None
        );
    }
}
