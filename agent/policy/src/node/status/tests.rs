use super::*;

fn registration() -> Registration {
    Registration { name: "n1".to_owned(), hostname: "n1".to_owned(), ..Registration::default() }
}

fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

fn amounts(pairs: &[(&str, &str)]) -> BTreeMap<String, Text> {
    pairs.iter().map(|(name, value)| ((*name).to_owned(), Text((*value).to_owned()))).collect()
}

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

fn ready(status: &str, message: &str) -> NodeCondition {
    NodeCondition {
        type_: "Ready".to_owned(),
        status: status.to_owned(),
        message: Some(message.to_owned()),
        ..NodeCondition::default()
    }
}

fn report() -> NodeReport {
    NodeReport {
        capacity: map(&[("cpu", "2"), ("memory", "1024Ki"), ("example.com/gpu", "1000")]),
        allocatable: map(&[("cpu", "1900m"), ("memory", "1024Ki"), ("example.com/gpu", "0")]),
        conditions: vec![ready("True", "fine")],
        addresses: addresses(&registration(), &[IpAddr::from([10, 0, 0, 1])], &[]),
        port: 10250,
        ..NodeReport::default()
    }
}

/// Returns true if there is a change other than the conditions' times.
fn says_something(change: &Change) -> bool {
    change.conditions || change.rest().is_some()
}

/// Returns the API server's status after the change.
fn applied(existing: &NodeStatus, change: Change) -> NodeStatus {
    let mut status = existing.clone();
    let Change { status: new, removed, .. } = change;
    status.addresses = new.addresses.or(status.addresses);
    status.node_info = new.node_info.or(status.node_info);
    status.images = new.images.or(status.images);
    status.runtime_handlers = new.runtime_handlers.or(status.runtime_handlers);
    status.features = new.features.or(status.features);
    status.declared_features = new.declared_features.or(status.declared_features);
    status.daemon_endpoints = new.daemon_endpoints.or(status.daemon_endpoints);
    for (map, new) in [(&mut status.capacity, new.capacity), (&mut status.allocatable, new.allocatable)] {
        let map = map.get_or_insert_default();
        map.extend(new.unwrap_or_default());
        map.retain(|name, _| !removed.contains(name));
    }
    let conditions = status.conditions.get_or_insert_default();
    for condition in new.conditions.unwrap_or_default() {
        conditions.retain(|before| before.type_ != condition.type_);
        conditions.push(condition);
    }
    status
}

#[test]
fn a_node_is_made_with_labels_taints_and_the_clouds_taint() {
    let mut wanted = registration();
    wanted.labels = map(&[("disk", "fast"), ("kubernetes.io/arch", "mine")]);
    wanted.external_cloud = true;
    wanted.ips = vec![IpAddr::from([10, 0, 0, 9])];
    let node = initial(&wanted, "amd64");
    assert_eq!(
        node.metadata.labels.unwrap(),
        map(&[
            ("disk", "fast"),
            ("kubernetes.io/arch", "mine"),
            ("kubernetes.io/hostname", "n1"),
            ("kubernetes.io/os", "linux")
        ])
    );
    assert_eq!(node.spec.unwrap().taints.unwrap()[0].key, UNINITIALIZED);
    assert_eq!(node.metadata.annotations.unwrap()["alpha.kubernetes.io/provided-node-ip"], "10.0.0.9");
    // An unspecified address selects the family only.
    let any = Registration { external_cloud: true, ips: vec!["::".parse().unwrap()], ..registration() };
    let annotations = initial(&any, "amd64").metadata.annotations.unwrap();
    assert!(!annotations.contains_key("alpha.kubernetes.io/provided-node-ip"), "{annotations:?}");
    assert_eq!(initial(&registration(), "amd64").spec, Some(NodeSpec::default()));
}

#[test]
fn only_default_labels_of_an_existing_node_are_corrected() {
    let wanted = map(&[("kubernetes.io/arch", "amd64"), ("kubernetes.io/os", "linux"), ("disk", "fast")]);
    let existing = map(&[("kubernetes.io/os", "linux"), ("kubernetes.io/arch", "arm64"), ("disk", "slow")]);
    assert_eq!(stale_labels(&existing, &wanted), map(&[("kubernetes.io/arch", "amd64")]));
    assert_eq!(stale_labels(&wanted, &wanted), map(&[]));
}

#[test]
fn addresses_are_configured_found_or_the_clouds() {
    let (v4, v6) = (IpAddr::from([10, 0, 0, 1]), "fd00::2".parse().unwrap());
    let of = |registration: &Registration, own: &[IpAddr], existing: &[NodeAddress]| -> Vec<String> {
        let all = addresses(registration, own, existing);
        all.into_iter().map(|address| format!("{} {}", address.type_, address.address)).collect()
    };
    let said = |registration: &Registration, existing: &[NodeAddress]| of(registration, &[v4], existing);
    assert_eq!(said(&registration(), &[]), ["InternalIP 10.0.0.1", "Hostname n1"]);
    let both = of(&registration(), &[v4, v6], &[]);
    assert_eq!(both, ["InternalIP 10.0.0.1", "InternalIP fd00::2", "Hostname n1"]);
    // A machine without a route: never the loopback address, and known addresses stay.
    assert_eq!(of(&registration(), &[], &[]), ["Hostname n1"]);
    let known = NodeAddress { type_: "InternalIP".to_owned(), address: "10.0.0.9".to_owned() };
    assert_eq!(of(&registration(), &[], &[known]), ["InternalIP 10.0.0.9"]);
    let cloud = Registration { external_cloud: true, ..registration() };
    assert_eq!(said(&cloud, &[]), ["Hostname n1"]);
    let given = NodeAddress { type_: "ExternalIP".to_owned(), address: "192.0.2.1".to_owned() };
    assert_eq!(said(&cloud, &[given]), ["ExternalIP 192.0.2.1"]);
}

#[test]
fn an_unchanged_status_is_not_written_again() {
    let mut existing = NodeStatus::default();
    let first = change(&existing, &report(), at(100));
    assert!(says_something(&first));
    existing = applied(&existing, first);
    let again = change(&existing, &report(), at(110));
    assert!(!says_something(&again));
    let only_times = NodeStatus { conditions: again.status.conditions.clone(), ..NodeStatus::default() };
    assert_eq!(again.status, only_times);
    let condition = &again.status.conditions.unwrap()[0];
    assert_eq!(condition.last_heartbeat_time, Some(Time(at(110))));
    assert_eq!(condition.last_transition_time, Some(Time(at(100))));
}

#[test]
fn a_changed_condition_is_written_and_dated_only_if_its_status_changed() {
    let existing = applied(&NodeStatus::default(), change(&NodeStatus::default(), &report(), at(100)));
    let check = |status: &str, message: &str, since: i64| {
        let said = NodeReport { conditions: vec![ready(status, message)], ..report() };
        let change = change(&existing, &said, at(200));
        assert!(change.conditions && change.rest().is_none());
        assert_eq!(change.status.conditions.unwrap()[0].last_transition_time, Some(Time(at(since))));
    };
    check("True", "still fine", 100);
    check("False", "fine", 200);
}

#[test]
fn amounts_are_compared_by_value() {
    let mut existing = applied(&NodeStatus::default(), change(&NodeStatus::default(), &report(), at(100)));
    existing.capacity.as_mut().unwrap().insert("example.com/gpu".to_owned(), Text("1k".to_owned()));
    assert!(!says_something(&change(&existing, &report(), at(100))));
    existing.allocatable.as_mut().unwrap().insert("cpu".to_owned(), Text("2".to_owned()));
    let change = change(&existing, &report(), at(100));
    assert_eq!(change.status.allocatable, Some(amounts(&[("cpu", "1900m")])));
    assert_eq!(change.status.capacity, None);
}

#[test]
fn foreign_resources_stay_and_unknown_page_sizes_are_removed() {
    let capacity = [("example.com/dongle", "4"), ("hugepages-1Gi", "0")];
    let existing = NodeStatus { capacity: Some(amounts(&capacity)), ..NodeStatus::default() };
    let change = change(&existing, &report(), at(100));
    assert_eq!(change.status.allocatable.as_ref().unwrap()["example.com/dongle"].0, "4");
    assert!(!change.status.capacity.as_ref().unwrap().contains_key("example.com/dongle"));
    assert_eq!(change.removed, BTreeSet::from(["hugepages-1Gi".to_owned()]));
    let after = applied(&existing, change);
    assert!(!says_something(&super::change(&after, &report(), at(100))));
    assert!(!after.capacity.unwrap().contains_key("hugepages-1Gi"));
}

#[test]
fn the_largest_images_are_reported_in_a_steady_order_with_few_names() {
    let image = |size: i64, names: &[&str]| ContainerImage {
        names: Some(names.iter().map(|name| (*name).to_owned()).collect()),
        size_bytes: Some(size),
    };
    let all = vec![image(1, &["small"]), image(9, &["b"]), image(9, &["a", "2", "3", "4", "5", "6"])];
    let kept = images(all.clone(), Some(2));
    assert_eq!(kept, [image(9, &["a", "2", "3", "4", "5"]), image(9, &["b"])]);
    assert_eq!(images(all, None).len(), 3);
    assert_eq!(images(vec![image(1, &[&"x".repeat(2000)])], None)[0].names, Some(vec![]));
}
