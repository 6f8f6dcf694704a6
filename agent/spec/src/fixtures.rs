//! A node and a container's facts, for tests of this crate and the crates above.

use std::{collections::BTreeMap, time::Duration};

use beelet_model::pod::{Allocatable, HostDns, HostIps, ImageUser, NodeFacts};
use beelet_policy::resources::cgroups::ContainerResources;
use beelet_proto::cri;

use crate::cri_config::{ContainerFacts, Features};

/// Returns a node for tests.
pub fn node() -> NodeFacts {
    let host_dns = cri::DnsConfig {
        servers: vec!["192.0.2.53".to_owned()],
        searches: vec!["host.test".to_owned()],
        options: vec!["rotate".to_owned()],
    };
    NodeFacts {
        node_name: "n1".to_owned(),
        host: HostIps::fixed(vec![[192, 0, 2, 1].into()]),
        pod_logs_dir: "/logs".into(),
        host_dns: HostDns::fixed(host_dns),
        cluster_dns: vec![[10, 96, 0, 10].into()],
        cluster_domain: "cluster.test".to_owned(),
        seccomp_root: "/seccomp".into(),
        seccomp_default: false,
        allowed_unsafe_sysctls: Vec::new(),
        app_armor: true,
        masked: vec!["/sys/of/this/machine".to_owned()],
        allocatable: Allocatable { cpu_millis: 4000, memory_bytes: 8 << 30, storage_bytes: 100 << 30 },
    }
}

/// Returns a container's facts for tests.
pub fn facts() -> ContainerFacts {
    ContainerFacts {
        attempt: 2,
        restart_delay: Duration::from_secs(10),
        round: 0,
        image_ref: "sha256:1".to_owned(),
        image_user: ImageUser { uid: Some(0), name: String::new() },
        features: Features::default(),
        mounts: Vec::new(),
        process_target: None,
        resources: ContainerResources {
            cpu_shares: 2,
            cpu_quota: 0,
            cpu_period: 0,
            memory_limit_bytes: 0,
            oom_score_adj: 1000,
            memory_swap_limit_bytes: 0,
            huge_page_limits: BTreeMap::new(),
            unified: BTreeMap::new(),
        },
    }
}
