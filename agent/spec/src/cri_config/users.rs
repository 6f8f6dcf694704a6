//! User namespace of a pod, for the runtime's configuration of its sandbox and of each container.

use beelet_policy::resources::user_namespaces::IdRange;
use beelet_proto::cri;

/// User namespace of a pod and all its containers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UserNamespace {
    /// The machine's user namespace.
    OfMachine,
    /// A user namespace of the pod's own, with these ids of the machine.
    Own(IdRange),
}

impl UserNamespace {
    fn option(self) -> cri::UserNamespace {
        let Self::Own(ids) = self else {
            return cri::UserNamespace { mode: cri::NamespaceMode::Node.into(), ..Default::default() };
        };
        let (uids, gids) = (mapping(ids), mapping(ids));
        cri::UserNamespace { mode: cri::NamespaceMode::Pod.into(), uids, gids }
    }

    /// Configures a sandbox in this namespace.
    pub fn apply_to_sandbox(self, config: &mut cri::PodSandboxConfig) {
        let context = config.linux.as_mut().and_then(|linux| linux.security_context.as_mut());
        if let Some(options) = context.and_then(|context| context.namespace_options.as_mut()) {
            options.userns_options = Some(self.option());
        }
    }

    /// Configures a container in this namespace, devices included. Its mounts map the files' owners into the
    /// namespace: root's files on the disk belong to its root.
    pub fn apply_to_container(self, config: &mut cri::ContainerConfig) {
        let context = config.linux.as_mut().and_then(|linux| linux.security_context.as_mut());
        if let Some(options) = context.and_then(|context| context.namespace_options.as_mut()) {
            options.userns_options = Some(self.option());
        }
        let Self::Own(ids) = self else { return };
        for mount in &mut config.mounts {
            (mount.uid_mappings, mount.gid_mappings) = (mapping(ids), mapping(ids));
        }
    }
}

fn mapping(ids: IdRange) -> Vec<cri::IdMapping> {
    vec![cri::IdMapping { host_id: ids.first, container_id: 0, length: ids.length }]
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Pod;
    use serde_json::json;

    use super::*;
    use crate::{
        cri_config::{container, sandbox},
        env::Sources,
        fixtures::{facts, node},
    };

    #[test]
    fn sandbox_container_and_mounts_have_the_ids_of_the_pod() {
        let spec = json!({"hostUsers": false, "containers": [{"name": "c"}]});
        let pod: Pod =
            serde_json::from_value(json!({"metadata": {"name": "p", "uid": "u"}, "spec": spec})).unwrap();
        let (objects, node) = (beelet_model::objects::Objects::default(), node());
        let spec = &pod.spec.as_ref().unwrap().containers[0];
        let sources = Sources { pod: &pod, pod_ips: &[], objects: &objects, node: &node };
        let environment = sources.environment(spec).unwrap();
        let mut made = container(&pod, spec, environment, facts(), &node).unwrap();
        made.mounts = vec![cri::Mount { container_path: "/data".to_owned(), ..Default::default() }];
        let users = UserNamespace::Own(IdRange { first: 131_072, length: 65_536 });
        users.apply_to_container(&mut made);
        let expected = vec![cri::IdMapping { host_id: 131_072, container_id: 0, length: 65_536 }];
        assert_eq!((&made.mounts[0].uid_mappings, &made.mounts[0].gid_mappings), (&expected, &expected));
        let of_container = made.linux.unwrap().security_context.unwrap().namespace_options.unwrap();
        let mut config = sandbox(&pod, 0, "/kubepods/x".to_owned(), facts().resources, &node).unwrap();
        users.apply_to_sandbox(&mut config);
        let of_sandbox = config.linux.unwrap().security_context.unwrap().namespace_options.unwrap();
        let namespace = of_sandbox.userns_options.unwrap();
        assert_eq!(of_container.userns_options.as_ref(), Some(&namespace));
        assert_eq!(
            (namespace.mode(), namespace.uids, namespace.gids),
            (cri::NamespaceMode::Pod, expected.clone(), expected)
        );
    }
}
