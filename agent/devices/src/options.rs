//! Merges the plugins' responses into the options that make a container's devices visible to it, as the
//! kubelet does (`deviceRunContainerOptions`): in a conflict the first resource by name wins.

use std::collections::{BTreeMap, BTreeSet};

use beelet_policy::devices::HeldByResource;
use beelet_proto::{cri, deviceplugin::ContainerAllocateResponse};
use prost::Message as _;
use tracing::warn;

use super::{Error, annotation, ledger::Shared};
use beelet_model::labels;

/// Annotation that passes CDI devices to a runtime without the CDI field (containerd before 1.7).
const CDI_ANNOTATION: &str = "cdi.k8s.io/beelet_devices";

/// Additions to a container's spec by device plugins.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ContainerOptions {
    /// Environment variables; the container's own take precedence.
    pub envs: BTreeMap<String, String>,
    /// Files and folders of the host.
    pub mounts: Vec<cri::Mount>,
    /// Device nodes of the host.
    pub devices: Vec<cri::Device>,
    /// Annotations for the runtime.
    pub annotations: BTreeMap<String, String>,
    /// CDI devices, by their full names.
    pub cdi_devices: Vec<String>,
}

/// Returns the options of a container. Calls the plugins that require a call before each start.
pub(super) async fn of_container(
    shared: &Shared,
    pod_uid: &str,
    container: &str,
) -> Result<ContainerOptions, Error> {
    let held = shared.with_ledger(|ledger| {
        ledger.devices.holders.held(pod_uid).and_then(|pod| pod.get(container)).cloned()
    });
    let Some(held) = held else { return Ok(ContainerOptions::default()) };
    for (resource, held) in &held {
        let Some((plugin, options)) = shared.plugin(resource) else { continue };
        if options.pre_start_required {
            plugin
                .pre_start(held.ids())
                .await
                .map_err(|status| Error::PreStart { resource: resource.clone(), status: Box::new(status) })?;
        }
    }
    Ok(merge(&held))
}

/// Merges the plugins' responses for all devices that a container holds. Skips an unreadable response.
pub fn merge(held: &HeldByResource) -> ContainerOptions {
    let mut all = ContainerOptions::default();
    let (mut cdi, mut mounts, mut devices) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    for (resource, held) in held {
        let answer = match ContainerAllocateResponse::decode(held.response.as_slice()) {
            Ok(answer) => answer,
            Err(error) => {
                warn!(resource, %error, "ignoring an unreadable response of a device plugin");
                continue;
            }
        };
        add(&mut all.envs, answer.envs, resource, "environment variable");
        add(&mut all.annotations, answer.annotations, resource, "annotation");
        for mount in answer.mounts {
            if mounts.insert(mount.container_path.clone()) {
                all.mounts.push(cri::Mount {
                    container_path: mount.container_path,
                    host_path: mount.host_path,
                    readonly: mount.read_only,
                    ..cri::Mount::default()
                });
            }
        }
        for device in answer.devices {
            if devices.insert(device.container_path.clone()) {
                all.devices.push(cri::Device {
                    container_path: device.container_path,
                    host_path: device.host_path,
                    permissions: device.permissions,
                });
            }
        }
        cdi.extend(answer.cdi_devices.into_iter().map(|device| device.name));
    }
    all.cdi_devices = cdi.into_iter().collect();
    if let Some(text) = annotation::encode(held) {
        all.annotations.insert(labels::DEVICES.to_owned(), text);
    }
    all
}

fn add(
    all: &mut BTreeMap<String, String>,
    more: impl IntoIterator<Item = (String, String)>,
    resource: &str,
    what: &str,
) {
    for (name, value) in more {
        match all.get(&name) {
            Some(other) if *other != value => {
                warn!(
                    resource,
                    name, "two device plugins set one {what} to different values; using the first"
                );
            }
            _ => drop(all.insert(name, value)),
        }
    }
}

impl ContainerOptions {
    /// Adds CDI devices from sources other than plugins, without duplicates.
    pub fn add_cdi(&mut self, more: Vec<String>) {
        let mut known: BTreeSet<String> = self.cdi_devices.iter().cloned().collect();
        for name in more {
            if known.insert(name.clone()) {
                self.cdi_devices.push(name);
            }
        }
    }

    /// Adds the options to a container's configuration, which takes precedence. `by_annotation` also names
    /// CDI devices in an annotation, for a runtime without the field.
    pub fn apply(self, config: &mut cri::ContainerConfig, by_annotation: bool) {
        let own: BTreeSet<String> = config.envs.iter().map(|env| env.key.clone()).collect();
        let more = self.envs.into_iter().filter(|(key, _)| !own.contains(key));
        let pair = |(key, value): (String, String)| cri::KeyValue { key, value: value.into_bytes() };
        let more: Vec<cri::KeyValue> = more.map(pair).collect();
        config.envs.splice(0..0, more);
        let taken: BTreeSet<String> = config.mounts.iter().map(|m| m.container_path.clone()).collect();
        let more = self.mounts.into_iter().filter(|mount| !taken.contains(&mount.container_path));
        config.mounts.splice(0..0, more.collect::<Vec<_>>());
        config.devices.extend(self.devices);
        for (key, value) in self.annotations {
            config.annotations.entry(key).or_insert(value);
        }
        if by_annotation && !self.cdi_devices.is_empty() {
            config.annotations.insert(CDI_ANNOTATION.to_owned(), self.cdi_devices.join(","));
        }
        config.cdi_devices.extend(self.cdi_devices.into_iter().map(|name| cri::CdiDevice { name }));
    }
}

/// Returns true if the runtime needs CDI devices as an annotation: a containerd before 1.7.
#[must_use]
pub fn cdi_by_annotation(runtime: &str, version: &str) -> bool {
    let mut numbers = version.trim_start_matches('v').split(['.', '~', '-', '+']).map(str::parse::<u32>);
    match (runtime, numbers.next(), numbers.next()) {
        ("containerd", Some(Ok(major)), Some(Ok(minor))) => (major, minor) < (1, 7),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::HashMap, sync::Arc};

    use beelet_policy::devices::HeldDevices;
    use beelet_proto::deviceplugin::{CdiDevice, DeviceSpec, Mount};

    use super::*;

    fn held(answer: &ContainerAllocateResponse) -> Arc<HeldDevices> {
        let by_node = BTreeMap::from([(-1, vec!["a".to_owned()])]);
        Arc::new(HeldDevices { by_node, response: answer.encode_to_vec() })
    }

    fn answer(value: &str) -> ContainerAllocateResponse {
        let map = |key: &str| HashMap::from([(key.to_owned(), value.to_owned())]);
        ContainerAllocateResponse {
            envs: map("VISIBLE"),
            annotations: map("vendor/x"),
            mounts: vec![Mount { container_path: "/lib".into(), host_path: value.into(), read_only: true }],
            devices: vec![DeviceSpec {
                container_path: "/dev/x".into(),
                host_path: value.into(),
                permissions: "rw".into(),
            }],
            cdi_devices: vec![CdiDevice { name: format!("vendor/class={value}") }],
        }
    }

    #[test]
    fn of_two_plugins_that_differ_the_first_counts() {
        let both = HeldByResource::from([
            ("a/x".to_owned(), held(&answer("one"))),
            ("b/x".to_owned(), held(&answer("two"))),
            ("c/x".to_owned(), Arc::new(HeldDevices { response: vec![0xff], ..HeldDevices::default() })),
        ]);
        let options = merge(&both);
        assert_eq!(options.envs, BTreeMap::from([("VISIBLE".to_owned(), "one".to_owned())]));
        assert_eq!((options.mounts.len(), options.devices.len()), (1, 1));
        assert_eq!(options.mounts[0].host_path, "one");
        assert_eq!(options.cdi_devices, ["vendor/class=one", "vendor/class=two"]);
        assert_eq!(options.annotations["vendor/x"], "one");
        assert!(options.annotations[labels::DEVICES].contains("\"b/x\""));
    }

    #[test]
    fn the_containers_own_settings_take_precedence() {
        let mut config = cri::ContainerConfig {
            envs: vec![cri::KeyValue { key: "VISIBLE".into(), value: "mine".into() }],
            ..cri::ContainerConfig::default()
        };
        let options = merge(&HeldByResource::from([("a/x".to_owned(), held(&answer("one")))]));
        options.clone().apply(&mut config.clone(), false);
        options.apply(&mut config, true);
        assert_eq!(config.envs.len(), 1);
        assert_eq!(config.envs[0].value, b"mine");
        assert_eq!(config.annotations[CDI_ANNOTATION], "vendor/class=one");
        assert_eq!(config.cdi_devices[0].name, "vendor/class=one");
        assert_eq!(config.devices[0].permissions, "rw");
    }

    #[test]
    fn an_old_containerd_gets_cdi_devices_by_annotation() {
        let check = |name, version, expected| {
            assert_eq!(cdi_by_annotation(name, version), expected, "{name} {version}");
        };
        check("containerd", "1.6.20~ds1", true);
        check("containerd", "v1.6.8", true);
        check("containerd", "1.7.0-rc.1", false);
        check("containerd", "v2.1.9", false);
        check("cri-o", "1.5.0", false);
        check("containerd", "", false);
    }
}
