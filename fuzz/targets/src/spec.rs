//! The target for a whole pod, from the API server's JSON to the requests to the runtime.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use beelet_codec::ApiType as _;
use beelet_model::objects::{Object, Objects, Services};
use beelet_model::pod::{Allocatable, HostDns, HostIps, ImageUser, NodeFacts};
use beelet_policy::{
    pod::{ephemeral_containers, variables::Budget},
    resources::cgroups::{CgroupConfig, CgroupVersion, NodeAmounts, container_resources, pod_cgroup},
    volumes::{content, mount_points},
};
use beelet_proto::cri;
use beelet_spec::cri_config::{self, ContainerFacts, Features};
use beelet_spec::env::Sources;
use k8s_openapi::api::core::v1::{Container, Pod};
use prost::Message as _;
use serde_json::{Value, json};

/// Maximum size of a request: a fixed size, and a multiple of its pod's own texts. Labels, annotations and
/// names occur once or twice, and JSON may be shorter than its expansion (a service's variables).
const BESIDE: usize = 64 << 10;
const TIMES: usize = 8;
/// The limit of a container's texts, as `Budget::CONTAINER`.
const TEXTS: usize = 16 << 20;
/// Maximum size of an error message about a pod, without its quotations.
const SENTENCE: usize = 4096;

/// Tests a pod in JSON, with the code for pods of the API server: either an error message of bounded length
/// rejects the pod, or the requests for its sandbox and containers are no larger than the pod, except for
/// `$(VAR)`, which has its own bound. The same pod has the same requests. No path leads out of a volume.
pub fn pod_request(input: &[u8]) {
    let Ok(value) = serde_json::from_slice::<Value>(input) else { return };
    let Ok(pod) = Pod::from_value(&value) else { return };
    let (node, objects) = (node(), objects());
    let amounts =
        NodeAmounts { memory_capacity: 16 << 30, allocatable_millis: 4000, allocatable_memory: 15 << 30 };
    let cgroups = CgroupConfig::new(CgroupVersion::V2, amounts);
    let most = BESIDE + TIMES * input.len();
    if let Ok(cgroup) = pod_cgroup(&pod, &cgroups) {
        assert!(cgroup.path.len() <= most);
    }
    let containers: Vec<Container> = pod
        .spec
        .iter()
        .flat_map(|spec| {
            let plain = spec.init_containers.iter().flatten().chain(&spec.containers).cloned();
            plain.chain(ephemeral_containers(spec))
        })
        .collect();
    for container in &containers {
        let resources = match container_resources(&pod, container, &cgroups) {
            Ok(resources) => resources,
            Err(why) => {
                is_a_sentence(&why, input);
                continue;
            }
        };
        let make = || sandbox(&pod, &resources, &node);
        if let Some(config) = judged(make, input) {
            assert!(config.encoded_len() <= most, "a sandbox of {} bytes", config.encoded_len());
        }
        let facts = facts(resources.clone());
        if let Some(config) = judged(|| request(&pod, container, &facts, &objects, &node), input) {
            let length = config.encoded_len();
            assert!(length <= most + TEXTS, "a container of {length} bytes");
            let words = config.command.iter().chain(&config.args).map(String::len);
            let texts: usize =
                config.envs.iter().map(|env| env.key.len() + env.value.len()).chain(words).sum();
            assert!({ Budget::CONTAINER }.spend(texts).is_ok(), "texts of {texts} bytes");
        }
    }
    mount_points(&pod);
    let dns = cri_config::name_resolution(&pod, &node);
    assert!(dns.servers.len() <= 3 && dns.searches.len() <= 32 && dns.encoded_len() <= most, "{dns:?}");
}

fn mount_points(pod: &Pod) {
    for way in mount_points::nested(pod).into_values().flatten().flatten() {
        let is_inside = way.split('/').all(|part| !matches!(part, "" | "." | ".."));
        assert!(is_inside && way.len() <= content::PATH, "{way:?}");
    }
}

/// Calls `make` twice and checks that both results are the same; returns None for an error with a bounded
/// message.
fn judged<T: PartialEq + std::fmt::Debug>(
    make: impl Fn() -> Result<T, beelet_spec::Error>,
    input: &[u8],
) -> Option<T> {
    match (make(), make()) {
        (Ok(one), Ok(two)) => {
            assert_eq!(one, two);
            Some(one)
        }
        (Err(one), Err(two)) => {
            assert_eq!(one, two);
            is_a_sentence(&one, input);
            None
        }
        (one, two) => panic!("first {one:?}, then {two:?}"),
    }
}

fn is_a_sentence(why: &impl std::fmt::Display, input: &[u8]) {
    let length = why.to_string().len();
    assert!(length > 0 && length <= SENTENCE + TIMES * input.len(), "an error message of {length} bytes");
}

fn sandbox(
    pod: &Pod,
    wanted: &beelet_policy::resources::cgroups::ContainerResources,
    node: &NodeFacts,
) -> Result<cri::PodSandboxConfig, beelet_spec::Error> {
    cri_config::sandbox(pod, 0, "/kubepods/pod".to_owned(), wanted.clone(), node)
}

fn request(
    pod: &Pod,
    container: &Container,
    facts: &ContainerFacts,
    objects: &Objects,
    node: &NodeFacts,
) -> Result<cri::ContainerConfig, beelet_spec::Error> {
    let pod_ips = ["10.0.0.7".to_owned()];
    let env = Sources { pod, pod_ips: &pod_ips, objects, node }.environment(container)?;
    cri_config::container(pod, container, env, facts.clone(), node)
}

/// Returns a node of a cluster.
fn node() -> NodeFacts {
    NodeFacts {
        node_name: "n1".to_owned(),
        host: HostIps::fixed(vec![[192, 0, 2, 1].into()]),
        pod_logs_dir: "/logs".into(),
        host_dns: HostDns::fixed(cri::DnsConfig {
            servers: vec!["192.0.2.53".to_owned()],
            searches: vec!["host.test".to_owned()],
            options: vec!["rotate".to_owned()],
        }),
        cluster_dns: vec![[10, 96, 0, 10].into()],
        cluster_domain: "cluster.test".to_owned(),
        seccomp_root: "/seccomp".into(),
        seccomp_default: true,
        allowed_unsafe_sysctls: Vec::new(),
        app_armor: true,
        masked: Vec::new(),
        allocatable: Allocatable { cpu_millis: 4000, memory_bytes: 8 << 30, storage_bytes: 100 << 30 },
    }
}

/// Returns the objects that pods may refer to. The namespaces `shop` and `default` each have a ConfigMap `m`
/// with a long value and a value with references, a Secret `s` with a value that is not text, and a service.
fn objects() -> Objects {
    let mut objects = Objects::default();
    let mut services = Vec::new();
    for namespace in ["shop", "default"] {
        let of = |name: &str| json!({"name": name, "namespace": namespace});
        let map = json!({"metadata": of("m"), "data": {"a": "1", "long": "x".repeat(300 << 10), "refs": "$(A)$(A)"}});
        let secret = json!({"metadata": of("s"), "data": {"a": "MQ==", "raw": "/////w=="}});
        let service =
            json!({"metadata": of("db"), "spec": {"clusterIP": "10.0.0.9", "ports": [{"port": 5432}]}});
        let map = Object::ConfigMap(Arc::new(serde_json::from_value(map).unwrap()));
        let secret = Object::Secret(Arc::new(serde_json::from_value(secret).unwrap()));
        objects.add(&Path::new("/m").join(namespace), &map);
        objects.add(&Path::new("/s").join(namespace), &secret);
        services.push(serde_json::from_value(service).unwrap());
    }
    objects.services = Some(Services::new(services));
    objects
}

fn facts(resources: beelet_policy::resources::cgroups::ContainerResources) -> ContainerFacts {
    ContainerFacts {
        attempt: 0,
        restart_delay: Duration::ZERO,
        round: 0,
        image_ref: "sha256:1".to_owned(),
        image_user: ImageUser { uid: Some(0), name: String::new() },
        features: Features { supplemental_groups_policy: true, recursive_read_only: true },
        mounts: Vec::new(),
        process_target: None,
        resources,
    }
}
