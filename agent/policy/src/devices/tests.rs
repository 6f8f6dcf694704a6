use proptest::prelude::*;

use super::{checkpoint::Text, *};

const GPU: &str = "example.com/gpu";

fn device(id: &str, numa_nodes: &[i64]) -> Device {
    Device { id: id.to_owned(), health: Health::Healthy, numa_nodes: numa_nodes.to_vec() }
}

fn ids(text: &str) -> Ids {
    text.split_whitespace().map(str::to_owned).collect()
}

/// A ledger, and the serving of one pod.
#[derive(Default)]
struct Ledger {
    devices: Devices,
    serving: (String, Serving),
}

impl std::ops::Deref for Ledger {
    type Target = Devices;

    fn deref(&self) -> &Devices {
        &self.devices
    }
}

impl std::ops::DerefMut for Ledger {
    fn deref_mut(&mut self) -> &mut Devices {
        &mut self.devices
    }
}

impl Ledger {
    fn select(&mut self, request: &Request<'_>) -> Result<Selection, AllocateError> {
        if self.serving.0 != request.pod_uid {
            self.serving = (request.pod_uid.to_owned(), Serving::default());
        }
        self.devices.select(request, &self.serving.1)
    }
}

/// Builds a ledger with one plugin that lists these devices: `name@node`, `!name` is unhealthy.
fn ledger(text: &str) -> Ledger {
    let mut devices = Ledger::default();
    devices.inventory.register(GPU, PluginOptions::default());
    list(&mut devices, text);
    devices
}

fn list(devices: &mut Devices, text: &str) {
    let one = |text: &str| {
        let (name, node) =
            text.split_once('@').map_or((text, None), |(name, node)| (name, node.parse().ok()));
        let health = if name.starts_with('!') { Health::Unhealthy } else { Health::Healthy };
        Device { health, ..device(name.trim_start_matches('!'), node.as_slice()) }
    };
    devices.inventory.list(GPU, text.split_whitespace().map(one).collect::<Vec<_>>());
}

fn request<'a>(pod_uid: &'a str, container: &'a str, count: usize) -> Request<'a> {
    Request { pod_uid, container, resource: GPU, count, already_running: false }
}

/// Serves one container with a plugin that answers `preferred`; returns the ids or the error.
fn serve(
    devices: &mut Ledger,
    request: &Request<'_>,
    kind: ContainerKind,
    preferred: &[&str],
) -> Result<String, String> {
    let ids = match devices.select(request).map_err(|e| e.to_string())? {
        Selection::Nothing => None,
        Selection::Chosen(ids) => Some(ids),
        Selection::Ask(question) => Some(question.answer(preferred)),
    };
    if let Some(ids) = ids {
        devices.commit(request, &ids, Vec::new());
    }
    let Ledger { devices, serving } = devices;
    serving.1.finish(devices, request.pod_uid, request.container, kind);
    let held = devices.holders.held(request.pod_uid).and_then(|pod| pod.get(request.container)?.get(GPU));
    Ok(held.map(|held| held.ids()).unwrap_or_default().into_iter().collect::<Vec<_>>().join(" "))
}

/// Checks a single container's devices from a ledger.
fn check(devices: &str, count: usize, expectation: &str) {
    let got = serve(&mut ledger(devices), &request("p", "c", count), ContainerKind::Lasting, &[]);
    assert_eq!(got.unwrap_or_else(|e| e), expectation, "{count} of {devices}");
}

#[test]
fn healthy_devices_are_given_and_counted() {
    check("a !b c", 2, "a c");
    check(
        "a !b c",
        3,
        "requested number of devices unavailable for example.com/gpu. Requested: 3, Available: 2",
    );
    check("!a !b", 1, "no healthy devices present; cannot allocate unhealthy devices example.com/gpu");
    check("!a !b", 0, "no healthy devices present; cannot allocate unhealthy devices example.com/gpu");
    check("a", 0, "");
}

#[test]
fn devices_come_from_as_few_numa_nodes_as_possible() {
    check("a@0 b@1 c@1", 2, "b c");
    check("a@0 b@0 c@0 d@1 e@1", 2, "d e");
    check("a@0 b@0 c@1 d@1 e@1 f@2", 4, "c d e f");
    check("a b@1 c@2", 2, "b c");
    check("a b c@0", 3, "a b c");
}

#[test]
fn a_node_that_a_plugin_names_twice_counts_once() {
    let mut devices = ledger("");
    devices.inventory.list(GPU, ["a", "b", "c"].map(|id| device(id, &[0, 0])));
    assert_eq!(devices.select(&request("p", "c", 2)), Ok(Selection::Chosen(ids("a b"))));
}

#[test]
fn init_containers_leave_their_devices_to_those_that_follow_and_sidecars_do_not() {
    let mut devices = ledger("a b c");
    let mut give =
        |container, count, kind| serve(&mut devices, &request("p", container, count), kind, &[]).unwrap();
    assert_eq!(give("init", 2, ContainerKind::Init), "a b");
    assert_eq!(give("sidecar", 1, ContainerKind::Lasting), "a");
    assert_eq!(give("init2", 1, ContainerKind::Init), "b");
    assert_eq!(give("main", 2, ContainerKind::Lasting), "b c");
}

#[test]
fn unused_devices_of_an_ended_init_container_are_free_again() {
    let mut devices = ledger("a b c");
    serve(&mut devices, &request("p", "init", 3), ContainerKind::Init, &[]).unwrap();
    serve(&mut devices, &request("p", "main", 1), ContainerKind::Lasting, &[]).unwrap();
    let other = request("q", "main", 2);
    assert!(serve(&mut devices, &other, ContainerKind::Lasting, &[]).is_err());
    devices.holders.release("p", "init");
    assert_eq!(serve(&mut devices, &other, ContainerKind::Lasting, &[]).unwrap(), "b c");
}

#[test]
fn the_plugins_preference_is_taken_best_first_and_made_up_for() {
    let mut devices = ledger("a b !c d");
    devices.inventory.register(
        GPU,
        PluginOptions { get_preferred_allocation_available: true, ..PluginOptions::default() },
    );
    assert_eq!(
        serve(&mut devices, &request("p", "c", 2), ContainerKind::Lasting, &["c", "d", "unheard-of"])
            .unwrap(),
        "a d"
    );
}

#[test]
fn a_container_keeps_its_devices_when_served_again() {
    let mut devices = ledger("a b");
    assert_eq!(serve(&mut devices, &request("p", "c", 1), ContainerKind::Lasting, &[]).unwrap(), "a");
    assert_eq!(serve(&mut devices, &request("p", "c", 1), ContainerKind::Lasting, &[]).unwrap(), "a");
    assert!(
        serve(&mut devices, &request("p", "c", 2), ContainerKind::Lasting, &[])
            .unwrap_err()
            .contains("changed from 1 to 2")
    );
}

#[test]
fn health_is_checked_even_if_no_device_is_needed() {
    let mut devices = ledger("a b");
    serve(&mut devices, &request("p", "c", 1), ContainerKind::Lasting, &[]).unwrap();
    list(&mut devices, "!a b");
    let error = devices.select(&request("p", "c", 1)).unwrap_err();
    assert!(matches!(error, AllocateError::HeldUnhealthy { .. }) && error.may_pass());
}

#[test]
fn devices_of_terminated_pods_are_freed_when_another_pod_requests_some() {
    let mut devices = ledger("a");
    serve(&mut devices, &request("p", "c", 1), ContainerKind::Lasting, &[]).unwrap();
    assert!(devices.select(&request("q", "c", 1)).is_err());
    devices.holders.free_inactive(|uid| uid == "q");
    assert_eq!(serve(&mut devices, &request("q", "c", 1), ContainerKind::Lasting, &[]).unwrap(), "a");
}

#[test]
fn a_stopped_plugins_devices_are_unhealthy_and_forgotten_after_the_grace_period() {
    let mut devices = ledger("a b !c");
    devices.inventory.stopped(GPU, Duration::from_secs(10));
    let capacity = devices.inventory.capacity(Duration::from_secs(310));
    assert_eq!((capacity.capacity[GPU], capacity.allocatable[GPU], capacity.removed.len()), (3, 0, 0));
    let capacity = devices.inventory.capacity(Duration::from_secs(311));
    assert_eq!((capacity.capacity.len(), capacity.removed), (0, ids(GPU)));
    assert!(!devices.knows(GPU));
}

#[test]
fn a_plugin_that_comes_back_in_time_is_as_before() {
    let mut devices = ledger("a");
    devices.inventory.stopped(GPU, Duration::ZERO);
    devices.inventory.register(GPU, PluginOptions::default());
    list(&mut devices, "a");
    assert_eq!(devices.inventory.capacity(Duration::from_secs(9999)).allocatable[GPU], 1);
}

#[test]
fn after_a_restart_holders_keep_their_devices_and_others_wait_for_the_plugin() {
    let mut devices = ledger("a@1 b");
    serve(&mut devices, &request("p", "c", 2), ContainerKind::Lasting, &[]).unwrap();
    let file = devices.checkpoint().write().unwrap();
    let devices = Devices::read(&file, Duration::ZERO).unwrap();
    let mut devices = Ledger { devices, ..Ledger::default() };
    assert!(devices.knows(GPU));
    assert_eq!(
        devices.holders.held("p").unwrap()["c"][GPU].by_node,
        BTreeMap::from([(-1, vec!["b".to_owned()]), (1, vec!["a".to_owned()])])
    );
    assert!(devices.select(&request("q", "c", 1)).unwrap_err().may_pass());
    let running = Request { already_running: true, ..request("p", "c", 2) };
    assert_eq!(devices.select(&running), Ok(Selection::Nothing));
    list(&mut devices, "a@1 b");
    assert!(matches!(devices.select(&request("q", "c", 1)), Err(AllocateError::TooFew { .. })));
}

#[test]
fn capacity_is_what_it_was_until_a_plugin_is_back_or_overdue() {
    let mut devices = ledger("a b !c").devices;
    for _ in 0..2 {
        // A second restart finds the first one's state in the checkpoint.
        devices = Devices::read(&devices.checkpoint().write().unwrap(), Duration::ZERO).unwrap();
        let meanwhile = devices.inventory.capacity_meanwhile(Duration::from_secs(300));
        assert_eq!((meanwhile.capacity[GPU], meanwhile.allocatable[GPU]), (2, 2));
    }
    let mut back = devices.clone();
    back.inventory.register(GPU, PluginOptions::default());
    list(&mut back, "a !b");
    let now = back.inventory.capacity_meanwhile(Duration::from_secs(1));
    assert_eq!((now.capacity[GPU], now.allocatable[GPU]), (2, 1));
    let overdue = devices.inventory.capacity_meanwhile(Duration::from_secs(301));
    assert_eq!((overdue.capacity.len(), overdue.removed), (0, ids(GPU)));
}

#[test]
fn wishes_come_in_the_order_of_serving() {
    let pod: Pod = serde_json::from_value(serde_json::json!({"spec": {
        "initContainers": [{"name": "i"}, {"name": "s", "restartPolicy": "Always", "resources": {"limits": {GPU: "1"}}}],
        "containers": [{"name": "c", "resources": {"limits": {GPU: 2, "cpu": "1500m"}}}]}}))
    .unwrap_or_else(|_| panic!("a pod"));
    let wishes = container_requests(&pod).unwrap();
    let kinds: Vec<_> = wishes.iter().map(|wish| (wish.container, wish.kind)).collect();
    assert_eq!(
        kinds,
        [("i", ContainerKind::Init), ("s", ContainerKind::Lasting), ("c", ContainerKind::Lasting)]
    );
    assert_eq!(wishes[1].limits, [(GPU, 1)]);
}

/// An event of a ledger.
#[derive(Debug, Clone)]
enum Event {
    List(Vec<(u8, bool, Option<i64>)>),
    Serve { pod: u8, container: u8, count: usize, init: bool, preferred: Vec<u8> },
    Release(u8, u8),
    Gone(u8),
    Restart,
    Stop,
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        1 => prop::collection::vec((0..8_u8, any::<bool>(), prop::option::of(0..3_i64)), 0..8).prop_map(Event::List),
        6 => (0..3_u8, 0..3_u8, 0..4_usize, any::<bool>(), prop::collection::vec(0..9_u8, 0..4))
            .prop_map(|(pod, container, count, init, preferred)| Event::Serve { pod, container, count, init, preferred }),
        1 => (0..3_u8, 0..3_u8).prop_map(|(pod, container)| Event::Release(pod, container)),
        1 => (0..3_u8).prop_map(Event::Gone),
        1 => Just(Event::Restart),
        1 => Just(Event::Stop),
    ]
}

fn play(devices: &mut Ledger, alive: &mut BTreeSet<String>, event: &Event) {
    let name = |prefix: &str, n: u8| format!("{prefix}{n}");
    match event {
        Event::List(rows) => {
            let health = |healthy: bool| if healthy { Health::Healthy } else { Health::Unhealthy };
            devices.inventory.register(
                GPU,
                PluginOptions {
                    get_preferred_allocation_available: rows.len() > 4,
                    ..PluginOptions::default()
                },
            );
            let row = |(id, healthy, node): &(u8, bool, Option<i64>)| Device {
                health: health(*healthy),
                ..device(&name("d", *id), node.as_slice())
            };
            devices.inventory.list(GPU, rows.iter().map(row).collect::<Vec<_>>());
        }
        Event::Serve { pod, container, count, init, preferred } => {
            alive.insert(name("p", *pod));
            devices.holders.free_inactive(|uid| alive.contains(uid));
            let kind = if *init { ContainerKind::Init } else { ContainerKind::Lasting };
            let preferred: Vec<String> = preferred.iter().map(|id| name("d", *id)).collect();
            let preferred: Vec<&str> = preferred.iter().map(String::as_str).collect();
            let _ =
                serve(devices, &request(&name("p", *pod), &name("c", *container), *count), kind, &preferred);
        }
        Event::Release(pod, container) => devices.holders.release(&name("p", *pod), &name("c", *container)),
        Event::Gone(pod) => {
            alive.remove(&name("p", *pod));
        }
        Event::Restart => {
            let file = devices.checkpoint().write().unwrap();
            *devices = Ledger { devices: Devices::read(&file, Duration::ZERO).unwrap(), ..Ledger::default() };
        }
        Event::Stop => devices.inventory.stopped(GPU, Duration::ZERO),
    }
}

/// Returns a checkpoint's data with its entries sorted, independent of their arrival.
fn sorted(file: &[u8]) -> Data {
    let mut data = Data::read(file).unwrap();
    data.pod_device_entries.iter_mut().for_each(|entries| entries.sort_by_key(|e| format!("{e:?}")));
    data
}

proptest! {
    #[test]
    fn no_device_is_held_by_two_pods_and_restarts_lose_nothing(events in prop::collection::vec(event(), 0..40)) {
        let (mut devices, mut alive) = (Ledger::default(), BTreeSet::new());
        let mut text = Text::default();
        for event in &events {
            play(&mut devices, &mut alive, event);
            let mut holder: BTreeMap<String, &str> = BTreeMap::new();
            for pod in devices.holders.pods() {
                for id in devices.holders.held(pod).into_iter().flatten().flat_map(|(_, held)| held.values()).flat_map(|held| held.ids()) {
                    let other = holder.insert(id.clone(), pod);
                    prop_assert!(other.is_none_or(|other| other == pod), "{id} is held by {other:?} and {pod} after {event:?}");
                }
            }
            let file = devices.checkpoint().write().unwrap();
            prop_assert_eq!(
                String::from_utf8(Devices::read(&file, Duration::ZERO).unwrap().checkpoint().write().unwrap()),
                String::from_utf8(file.clone())
            );
            // The checksum is right, however much of the text is reused.
            prop_assert_eq!(sorted(&text.write(devices.checkpoint()).unwrap()), sorted(&file));
        }
    }
}
