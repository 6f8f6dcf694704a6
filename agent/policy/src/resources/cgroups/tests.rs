use k8s_openapi::api::core::v1::{Container, Pod};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::{
    names::{kubepods_path, qos_path},
    node::{QosTotals, kubepods_cgroup, qos_cgroup},
    *,
};
use crate::{pinning::Gates, resources::qos::QosClass};

const GIB: i64 = 1 << 30;

fn config(version: CgroupVersion) -> CgroupConfig {
    CgroupConfig::new(
        version,
        NodeAmounts { memory_capacity: 8 * GIB, allocatable_millis: 3000, allocatable_memory: 8 * GIB },
    )
}

fn pod(spec: &Value) -> Pod {
    serde_json::from_value(json!({"metadata": {"name": "p", "uid": "u"}, "spec": spec})).unwrap()
}

fn check_oom(spec: &Value, expected: i64) {
    let pod = pod(spec);
    let spec = pod.spec.as_ref().unwrap();
    let container = spec.init_containers.iter().flatten().chain(&spec.containers).next().unwrap();
    assert_eq!(oom_score_adj(&pod, container, 8 * GIB).unwrap(), expected, "{spec:?}");
}

#[test]
fn the_oom_killer_spares_containers_that_requested_their_memory() {
    let container = |memory: &str| json!({"name": "c", "resources": {"requests": {"memory": memory}}});
    let both = json!({"cpu": "1", "memory": "1Gi"});
    check_oom(&json!({"containers": [{"name": "c"}]}), 1000);
    check_oom(&json!({"containers": [{"name": "c", "resources": {"requests": both, "limits": both}}]}), -997);
    check_oom(&json!({"containers": [container("1Gi")]}), 875);
    check_oom(&json!({"containers": [container("1")]}), 999);
    check_oom(&json!({"containers": [container("8Gi")]}), 3);
    let node_critical = "system-node-critical";
    check_oom(
        &json!({"priorityClassName": node_critical, "priority": 2_000_001_000, "containers": [{"name": "c"}]}),
        -997,
    );
    check_oom(&json!({"priorityClassName": node_critical, "containers": [{"name": "c"}]}), 1000);
}

#[test]
fn a_sandbox_gets_the_sum_of_its_containers_without_the_overhead() {
    let amounts = |requests: Value, limits: Value| json!({"requests": requests, "limits": limits});
    let check = |spec: &Value, expected: (u64, i64, u64, i64)| {
        let told = sandbox_resources(&pod(spec), &config(CgroupVersion::V2)).unwrap();
        let shown = (told.cpu_shares, told.cpu_quota, told.cpu_period, told.memory_limit_bytes);
        assert_eq!(shown, expected, "{spec}");
        assert_eq!((told.oom_score_adj, told.memory_swap_limit_bytes), (0, 0));
        assert!(told.huge_page_limits.is_empty() && told.unified.is_empty());
    };
    let one = json!({"name": "a", "resources": amounts(json!({"cpu": "250m"}), json!({"cpu": "1", "memory": "1Gi"}))});
    let two = json!({"name": "b", "resources": amounts(json!({"cpu": "750m"}), json!({"memory": "1Gi"}))});
    let costs = json!({"cpu": "250m", "memory": "64Mi"});
    check(&json!({"containers": [{"name": "c"}]}), (2, 0, 100_000, 0));
    check(&json!({"containers": [one, two]}), (1024, 100_000, 100_000, 2 * GIB));
    check(&json!({"containers": [one, two], "overhead": costs}), (1024, 100_000, 100_000, 2 * GIB));
    check(
        &json!({"containers": [{"name": "a", "resources": {"limits": {"cpu": "2"}}}]}),
        (2048, 200_000, 100_000, 0),
    );
    let of_pod = amounts(json!({"cpu": "2"}), json!({"cpu": "4", "memory": "4Gi"}));
    check(&json!({"containers": [one], "resources": of_pod}), (2048, 400_000, 100_000, 4 * GIB));
}

#[test]
fn a_sandbox_gets_no_unenforced_quota_and_kills_by_container() {
    let spec = json!({"containers": [{"name": "a", "resources": {"limits": {"cpu": "2"}}}]});
    let told = |version: CgroupVersion| {
        let config = CgroupConfig { cpu_cfs_quota: false, oom_group: true, ..config(version) };
        let told = sandbox_resources(&pod(&spec), &config).unwrap();
        assert_eq!((told.cpu_shares, told.cpu_quota, told.cpu_period), (2048, 0, 0));
        told.unified
    };
    assert_eq!(told(CgroupVersion::V2), [(OOM_GROUP.to_owned(), "1".to_owned())].into());
    assert!(told(CgroupVersion::V1).is_empty());
}

#[test]
fn a_sidecars_oom_score_is_at_most_that_of_the_containers_it_serves() {
    let sidecar = |memory: &str| json!({"name": "s", "restartPolicy": "Always", "resources": {"requests": {"memory": memory}}});
    let main = |memory: &str| json!({"name": "c", "resources": {"requests": {"memory": memory}}});
    check_oom(&json!({"initContainers": [sidecar("128Mi")], "containers": [main("2Gi"), main("4Gi")]}), 750);
    check_oom(&json!({"initContainers": [sidecar("4Gi")], "containers": [main("2Gi")]}), 500);
}

#[test]
fn memory_requested_by_the_pod_beyond_its_containers_counts_for_each_of_them() {
    let spec = json!({"resources": {"requests": {"memory": "2Gi"}}, "containers": [
        {"name": "c", "resources": {"requests": {"memory": "1Gi"}}}, {"name": "d"}]});
    check_oom(&spec, 813); // 1 GiB and half of the other one, of 8: 1000 - 187
}

#[test]
fn an_oom_kill_takes_the_whole_container_if_the_kernel_supports_it() {
    let check = |version: CgroupVersion, oom_group: bool, expected: Option<&str>| {
        let pod = pod(&json!({"containers": [{"name": "c"}]}));
        let container = &pod.spec.as_ref().unwrap().containers[0];
        let config = CgroupConfig { oom_group, ..config(version) };
        let unified = container_resources(&pod, container, &config).unwrap().unified;
        assert_eq!(unified.get("memory.oom.group").map(String::as_str), expected, "{version:?}");
        let kept = container_cgroup(&pod, container, &config).unwrap().files;
        assert_eq!(kept.get("memory.oom.group").map(String::as_str), expected, "{version:?}");
    };
    check(CgroupVersion::V2, true, Some("1"));
    check(CgroupVersion::V2, false, None);
    check(CgroupVersion::V1, true, None);
}

#[test]
fn reserved_daemons_get_exactly_their_reservation() {
    let mut reserve = crate::resources::ResourceList::default();
    reserve.set("cpu", Quantity::from_millis(500));
    reserve.set("memory", Quantity::from_units(GIB));
    reserve.set("pid", Quantity::from_units(1000));
    let files = reserved_cgroup("/system.slice", &reserve, &config(CgroupVersion::V1)).files;
    let expected = [("cpu.shares", "512"), ("memory.limit_in_bytes", "1073741824"), ("pids.max", "1000")];
    assert_eq!(
        files,
        expected.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
    );
}

#[test]
fn a_pods_processes_are_limited() {
    let config = CgroupConfig { pod_pids_limit: Some(100), ..config(CgroupVersion::V2) };
    let files = pod_cgroup(&pod(&json!({"containers": []})), &config).unwrap().files;
    assert_eq!(files.get("pids.max").map(String::as_str), Some("100"));
    let unlimited = CgroupConfig { pod_pids_limit: Some(-1), ..config };
    assert_eq!(pod_cgroup(&pod(&json!({"containers": []})), &unlimited).unwrap().files.get("pids.max"), None);
}

#[test]
fn a_pods_overhead_is_protected_in_every_class() {
    let qos =
        MemoryQos { throttling_factor: Some(0.9), reservation: MemoryReservationPolicy::TieredReservation };
    let config = CgroupConfig { memory_qos: Some(qos), ..config(CgroupVersion::V2) };
    let check = |overhead: &Value, config: &CgroupConfig, expected: (Option<&str>, Option<&str>)| {
        let pod = pod(&json!({"overhead": overhead, "containers": [{"name": "c"}]}));
        let values = pod_cgroup(&pod, config).unwrap();
        assert!(values.path.starts_with("/kubepods/besteffort/"), "{}", values.path);
        let file = |name: &str| values.files.get(name).map(String::as_str);
        assert_eq!((file("memory.low"), file("memory.min")), expected, "{overhead}");
    };
    check(&json!({"memory": "120Mi"}), &config, (Some("125829120"), None));
    check(&json!({"cpu": "100m"}), &config, (None, None));
    let unprotected = MemoryQos { reservation: MemoryReservationPolicy::None, ..qos };
    let config = CgroupConfig { memory_qos: Some(unprotected), ..config };
    check(&json!({"memory": "120Mi"}), &config, (None, None));
}

#[test]
fn guaranteed_pods_share_the_cgroup_of_all_pods() {
    let config = config(CgroupVersion::V2);
    assert_eq!(qos_path(QosClass::Guaranteed, &config), kubepods_path(&config));
    assert_eq!(
        qos_cgroup(QosClass::Guaranteed, &QosTotals::default(), &config),
        kubepods_cgroup(&QosTotals::default(), &config)
    );
}

fn weight_of(values: &CgroupValues) -> u64 {
    values.files["cpu.weight"].parse().unwrap()
}

/// Returns millicores / 10, rounded half up, at least 1.
fn expected_weight(millis: i64) -> u64 {
    u64::try_from((millis + 5) / 10).unwrap().clamp(1, 10_000)
}

proptest! {
    #[test]
    fn with_the_proportional_formula_siblings_share_by_their_requests(
        requests in prop::collection::vec(prop::collection::vec(0..8000_i64, 1..4), 1..6),
    ) {
        let config = CgroupConfig { cpu_weight_formula: CpuWeightFormula::Proportional, ..config(CgroupVersion::V2) };
        let pods: Vec<Pod> = requests.iter().map(|containers| {
            let container = |(index, millis): (usize, &i64)| {
                json!({"name": format!("c{index}"), "resources": {"requests": {"cpu": format!("{millis}m"), "memory": "1Mi"}}})
            };
            pod(&json!({"containers": containers.iter().enumerate().map(container).collect::<Vec<_>>()}))
        }).collect();
        for (pod, containers) in pods.iter().zip(&requests) {
            prop_assert_eq!(weight_of(&pod_cgroup(pod, &config).unwrap()), expected_weight(containers.iter().sum()));
            for (container, millis) in pod.spec.as_ref().unwrap().containers.iter().zip(containers) {
                prop_assert_eq!(weight_of(&container_cgroup(pod, container, &config).unwrap()), expected_weight(*millis));
                let asked = container_resources(pod, container, &config).unwrap().unified;
                prop_assert_eq!(asked.get("cpu.weight"), Some(&expected_weight(*millis).to_string()));
            }
        }
        let [kubepods, burstable, besteffort] = node_cgroups(&pods, &config).unwrap();
        prop_assert_eq!(weight_of(&kubepods), expected_weight(3000));
        prop_assert_eq!(weight_of(&burstable), expected_weight(requests.iter().flatten().sum()));
        prop_assert_eq!(weight_of(&besteffort), 1);
    }

    #[test]
    fn values_are_valid_for_the_kernel(
        requests in prop::collection::vec(("[0-9]{1,6}(m|u|n|k)?", "[0-9]{1,6}(m|Ki|Mi|Gi)?"), 1..4), limits in any::<bool>(), v1 in any::<bool>(),
        reserved in prop::option::of(0..=100_u8), tiered in any::<bool>(), period in 1000..=1_000_000_u64,
    ) {
        let config = CgroupConfig {
            qos_reserved_memory_percent: reserved,
            memory_qos: tiered.then_some(MemoryQos { throttling_factor: Some(0.9), reservation: MemoryReservationPolicy::TieredReservation }),
            cpu_cfs_quota_period_us: period,
            ..config(if v1 { CgroupVersion::V1 } else { CgroupVersion::V2 })
        };
        let container = |(index, (cpu, memory)): (usize, &(String, String))| {
            let amounts = json!({"cpu": cpu, "memory": memory});
            let resources = if limits { json!({"requests": amounts, "limits": amounts}) } else { json!({"requests": amounts}) };
            json!({"name": format!("c{index}"), "resources": resources})
        };
        let pod = pod(&json!({"containers": requests.iter().enumerate().map(container).collect::<Vec<_>>()}));
        let mut all = node_cgroups(std::slice::from_ref(&pod), &config).unwrap().to_vec();
        all.push(pod_cgroup(&pod, &config).unwrap());
        all.extend(pod.spec.as_ref().unwrap().containers.iter().map(|c| container_cgroup(&pod, c, &config).unwrap()));
        for (name, value) in all.iter().flat_map(|values| &values.files) {
            let number = value.parse::<i64>();
            let good = match name.as_str() {
                "cpu.shares" => number.is_ok_and(|n| (2..=262_144).contains(&n)),
                "cpu.weight" => number.is_ok_and(|n| (1..=10_000).contains(&n)),
                "cpu.cfs_quota_us" => number.is_ok_and(|n| n == -1 || n >= 1000),
                "cpu.cfs_period_us" => number.is_ok_and(|n| (1000..=1_000_000).contains(&n)),
                "cpu.max" => value.split_once(' ').is_some_and(|(quota, period)| {
                    (quota == "max" || quota.parse::<u64>().is_ok_and(|n| n >= 1000)) && period.parse::<u64>().is_ok()
                }),
                "memory.high" => number.is_ok_and(|n| n > 0),
                "memory.min" | "memory.low" => number.is_ok_and(|n| n >= 0),
                // The reservations against lower classes may exceed the total; the agent compares before it
                // writes.
                "memory.limit_in_bytes" | "memory.max" => number.is_ok(),
                _ => false,
            };
            prop_assert!(good, "{name} = {value:?}");
        }
    }
}

#[test]
fn huge_pages_are_limited_to_the_request_and_classes_are_unlimited() {
    let config = |version| CgroupConfig {
        huge_pages: [(2 << 20, GIB), (GIB, 0)].into(),
        limit_huge_pages: true,
        ..config(version)
    };
    let resources = |list: Value| json!({"requests": list, "limits": list});
    let pod = pod(&json!({"containers": [
        {"name": "a", "resources": resources(json!({"cpu": "1", "hugepages-2Mi": "64Mi"}))},
        {"name": "b", "resources": resources(json!({"hugepages-2Mi": "32Mi"}))},
    ]}));
    let huge = |files: &BTreeMap<String, String>| {
        let files = files.iter().filter(|(name, _)| name.starts_with("hugetlb."));
        files.map(|(name, value)| format!("{name} {value}")).collect::<Vec<_>>()
    };
    let v2 = config(CgroupVersion::V2);
    let of_pod = pod_cgroup(&pod, &v2).unwrap();
    assert_eq!(huge(&of_pod.files), ["hugetlb.1GB.max 0", "hugetlb.2MB.max 100663296"]);
    let of_pod = pod_cgroup(&pod, &config(CgroupVersion::V1)).unwrap();
    let v1 = ["hugetlb.1GB.limit_in_bytes 0", "hugetlb.2MB.limit_in_bytes 100663296"];
    assert_eq!(huge(&of_pod.files), v1);
    let [kubepods, burstable, _] = node_cgroups(std::slice::from_ref(&pod), &v2).unwrap();
    assert_eq!(huge(&kubepods.files), ["hugetlb.1GB.max 0", "hugetlb.2MB.max 1073741824"]);
    assert_eq!(huge(&burstable.files)[1], "hugetlb.2MB.max 4611686018427387904");
    let container = &pod.spec.as_ref().unwrap().containers[1];
    let asked = container_resources(&pod, container, &v2).unwrap().huge_page_limits;
    assert_eq!(asked, [("1GB".to_owned(), 0), ("2MB".to_owned(), 32 << 20)].into());
    assert_eq!(huge(&container_cgroup(&pod, container, &v2).unwrap().files)[1], "hugetlb.2MB.max 33554432");
    // Without the controller the agent still sends the request: the runtime knows best what it supports.
    let without = CgroupConfig { limit_huge_pages: false, ..v2 };
    assert!(huge(&pod_cgroup(&pod, &without).unwrap().files).is_empty());
    assert_eq!(container_resources(&pod, container, &without).unwrap().huge_page_limits.len(), 2);
}

#[test]
fn a_container_without_huge_pages_of_its_own_may_use_its_pods() {
    let pod = pod(&json!({
        "resources": {"limits": {"cpu": "1", "hugepages-2Mi": "64Mi"}},
        "containers": [{"name": "a"}, {"name": "b", "resources": {"limits": {"hugepages-2Mi": "2Mi"}}}],
    }));
    let config = CgroupConfig { huge_pages: [(2 << 20, 0)].into(), ..config(CgroupVersion::V2) };
    let limits = pod
        .spec
        .as_ref()
        .unwrap()
        .containers
        .iter()
        .map(|container| container_resources(&pod, container, &config).unwrap().huge_page_limits["2MB"]);
    assert_eq!(limits.collect::<Vec<_>>(), [64 << 20, 2 << 20]);
}

#[test]
fn new_amounts_of_memory_do_not_change_a_running_containers_swap() {
    let check = |behavior, before: Value, after: Value, expected: bool| {
        let swap = Some(Swap { behavior, capacity: 4 * GIB });
        let config = CgroupConfig { swap, ..config(CgroupVersion::V2) };
        let of = |container: &Value| pod(&json!({"containers": [container]}));
        assert_eq!(resize_changes_swap(&of(&before), &of(&after), &config), expected, "{before} {after}");
    };
    use SwapBehavior::{LimitedSwap, NoSwap};
    let with = |memory: &str| json!({"name": "c", "resources": {"requests": {"memory": memory}}});
    check(LimitedSwap, with("1Gi"), with("2Gi"), true);
    check(LimitedSwap, with("1Gi"), with("1Gi"), false);
    check(NoSwap, with("1Gi"), with("2Gi"), false);
    let mut restarted = with("1Gi");
    restarted["resizePolicy"] = json!([{"resourceName": "memory", "restartPolicy": "RestartContainer"}]);
    check(LimitedSwap, restarted, with("2Gi"), false);
}

#[test]
fn swap_is_for_burstable_containers_as_much_as_they_request_of_the_memory() {
    let check = |behavior, version, spec: &Value, expected: (Option<&str>, i64)| {
        let swap = Some(Swap { behavior, capacity: 4 * GIB });
        let config = CgroupConfig { swap, ..config(version) };
        let pod = pod(spec);
        let container = &pod.spec.as_ref().unwrap().containers[0];
        let asked = container_resources(&pod, container, &config).unwrap();
        let shown = (asked.unified.get("memory.swap.max").map(String::as_str), asked.memory_swap_limit_bytes);
        assert_eq!(shown, expected, "{behavior:?} {version:?} {spec}");
        let files = container_cgroup(&pod, container, &config).unwrap().files;
        assert_eq!(files.get("memory.swap.max").map(String::as_str), expected.0, "{spec}");
    };
    use CgroupVersion::{V1, V2};
    use SwapBehavior::{LimitedSwap, NoSwap};
    let with = |resources: Value| json!({"containers": [{"name": "c", "resources": resources}]});
    let burstable = with(json!({"requests": {"memory": "1Gi"}}));
    // An eighth of the memory yields an eighth of the swap.
    check(LimitedSwap, V2, &burstable, (Some("536870912"), 0));
    check(NoSwap, V2, &burstable, (Some("0"), 0));
    check(LimitedSwap, V2, &with(json!({})), (Some("0"), 0));
    check(LimitedSwap, V2, &with(json!({"requests": {"cpu": "1"}})), (Some("0"), 0));
    check(LimitedSwap, V2, &with(json!({"requests": {"memory": "9Gi"}})), (Some("0"), 0));
    let same = json!({"memory": "1Gi"});
    check(LimitedSwap, V2, &with(json!({"requests": same, "limits": same})), (Some("0"), 0));
    let all = json!({"cpu": "1", "memory": "1Gi"});
    check(LimitedSwap, V2, &with(json!({"requests": all, "limits": all})), (Some("0"), 0));
    let mut critical = burstable.clone();
    critical["priority"] = 2_000_000_000.into();
    check(LimitedSwap, V2, &critical, (Some("0"), 0));
    // On version 1 no container may swap: the limit of memory and swap together equals that of memory.
    let limited = with(json!({"requests": {"memory": "1Gi"}, "limits": {"memory": "2Gi"}}));
    check(LimitedSwap, V1, &limited, (None, 2 * GIB));
    check(NoSwap, V1, &burstable, (None, 0));
}

#[test]
fn a_container_with_cpus_for_itself_has_no_quota_and_neither_has_its_pod() {
    let list = |cpus: &str| {
        let amounts = json!({"cpu": cpus, "memory": "1Gi"});
        json!({"requests": amounts, "limits": amounts})
    };
    let spec = json!({"containers": [{"name": "a", "resources": list("2")}, {"name": "b", "resources": list("500m")}]});
    let pod = pod(&spec);
    let containers = &pod.spec.as_ref().unwrap().containers;
    for (exclusive, expected, of_pod) in
        [(None, [200_000, 50_000], "250000 100000"), (Some(Gates::default()), [-1, 50_000], "max 100000")]
    {
        let config = CgroupConfig { exclusive_cpus: exclusive, ..config(CgroupVersion::V2) };
        let quota = |container: &Container| container_resources(&pod, container, &config).unwrap().cpu_quota;
        assert_eq!([quota(&containers[0]), quota(&containers[1])], expected);
        assert_eq!(pod_cgroup(&pod, &config).unwrap().files["cpu.max"], of_pod);
        let own = container_cgroup(&pod, &containers[0], &config).unwrap().files["cpu.max"].clone();
        assert_eq!(own.starts_with("max"), exclusive.is_some(), "{own}");
    }
}
