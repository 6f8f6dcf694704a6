//! Random orders of events at plugins, pods and the agent: no device is ever held twice, and none is lost.

#![allow(clippy::unwrap_used, clippy::panic)] // the helpers fail the test, too

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use beelet_policy::devices::{
    ContainerKind, ContainerRequest, Device, Devices, Health, PluginOptions, Remnant,
    admission::{Admission, Circumstances, Next, contended},
    topology::{TopologyPolicy, TopologyScope},
};
use proptest::prelude::*;
use proptest::test_runner::RngAlgorithm;

const RESOURCES: [&str; 2] = ["example.com/gpu", "example.com/nic"];
const DEVICES: u8 = 6;
const PODS: u8 = 6;

type Ids = BTreeSet<String>;

/// An event at a node.
#[derive(Debug, Clone)]
enum Event {
    /// A plugin registers (again); with preferences or without.
    Register { resource: usize, asks: bool },
    /// A plugin lists its devices: which exist, which of them are healthy, and the node of each.
    List { resource: usize, there: u8, healthy: u8, nodes: u8 },
    /// A plugin disconnects.
    Stop { resource: usize },
    /// A pod requests devices; its plugin may fail at its n-th call, and prefers some devices. The events of
    /// `meanwhile` happen while plugins prepare their answers.
    Admit { pod: u8, fails_at: Option<u8>, prefer: u8, policy: u8, meanwhile: Vec<Event> },
    /// An init container of the pod has ended.
    InitEnds { pod: u8 },
    /// The pod terminates.
    Exit { pod: u8 },
    /// The agent restarts; `true`: while its pods keep running.
    Restart { running: bool },
    /// The checkpoint is lost, too: the ledger is rebuilt from containers.
    Rebuild,
    /// Time passes.
    Wait { seconds: u16 },
}

/// Generates one event, and up to three others that happen during it.
fn event() -> impl Strategy<Value = Event> {
    one_event(prop::collection::vec(one_event(Just(Vec::new())), 0..4))
}

fn one_event(meanwhile: impl Strategy<Value = Vec<Event>>) -> impl Strategy<Value = Event> {
    let resource = 0..RESOURCES.len();
    prop_oneof![
        2 => (resource.clone(), any::<bool>()).prop_map(|(resource, asks)| Event::Register { resource, asks }),
        3 => (resource.clone(), any::<u8>(), any::<u8>(), any::<u8>())
            .prop_map(|(resource, there, healthy, nodes)| Event::List { resource, there, healthy: healthy | 0x15, nodes }),
        1 => resource.prop_map(|resource| Event::Stop { resource }),
        6 => (0..PODS, prop::option::weighted(0.2, 0..4_u8), any::<u8>(), 0..8_u8, meanwhile)
            .prop_map(|(pod, fails_at, prefer, policy, meanwhile)| Event::Admit { pod, fails_at, prefer, policy, meanwhile }),
        1 => (0..PODS).prop_map(|pod| Event::InitEnds { pod }),
        2 => (0..PODS).prop_map(|pod| Event::Exit { pod }),
        1 => any::<bool>().prop_map(|running| Event::Restart { running }),
        1 => Just(Event::Rebuild),
        1 => (0..400_u16).prop_map(|seconds| Event::Wait { seconds }),
    ]
}

/// Returns a pod's request for devices that nothing prevents.
fn admit(pod: u8) -> Event {
    Event::Admit { pod, fails_at: None, prefer: 0, policy: 0, meanwhile: Vec::new() }
}

/// Returns each pod's requests: by container, its kind, and the count of each resource.
fn wishes(pod: u8) -> Vec<ContainerRequest<'static>> {
    let wish = |container, kind, limits: &[(usize, usize)]| ContainerRequest {
        container,
        kind,
        limits: limits.iter().map(|(resource, count)| (RESOURCES[*resource], *count)).collect(),
    };
    let (init, lasting) = (ContainerKind::Init, ContainerKind::Lasting);
    match pod {
        0 => vec![wish("main", lasting, &[(0, 1)])],
        1 => vec![wish("init", init, &[(0, 3)]), wish("main", lasting, &[(0, 1), (1, 1)])],
        2 => vec![
            wish("init", init, &[(0, 1), (1, 2)]),
            wish("side", lasting, &[(0, 1)]),
            wish("main", lasting, &[(0, 2)]),
        ],
        3 => vec![wish("a", lasting, &[(1, 2)]), wish("b", lasting, &[(1, 1), (0, 1)])],
        // This pod and pod 0 have no resource in common.
        4 => vec![
            wish("init", init, &[(1, 2)]),
            wish("side", lasting, &[(1, 1)]),
            wish("main", lasting, &[(1, 1)]),
        ],
        _ => vec![wish("main", lasting, &[(0, 4), (1, 4)])],
    }
}

/// A node as the agent sees it.
#[derive(Default)]
struct Node {
    devices: Devices,
    /// Running pods; `true` once the pod's init containers have ended.
    alive: BTreeMap<String, bool>,
    /// Pods whose admission is in progress, with the resources concerned.
    admitting: BTreeMap<String, Ids>,
    /// Number of times that the agent has ended.
    lives: u32,
    now: Duration,
}

impl Node {
    fn play(&mut self, event: &Event) -> Result<(), TestCaseError> {
        match *event {
            Event::Register { resource, asks } => {
                let options =
                    PluginOptions { get_preferred_allocation_available: asks, ..PluginOptions::default() };
                self.devices.inventory.register(RESOURCES[resource], options);
            }
            Event::List { resource, there, healthy, nodes } => {
                let bit = |mask: u8, n: u8| mask & (1 << n) != 0;
                let device = |n: u8| Device {
                    id: format!("{resource}-{n}"),
                    health: if bit(healthy, n) { Health::Healthy } else { Health::Unhealthy },
                    numa_nodes: if bit(nodes, 7) { Vec::new() } else { vec![i64::from(bit(nodes, n))] },
                };
                let all = (0..DEVICES).filter(|n| bit(there, *n)).map(device).collect::<Vec<_>>();
                self.devices.inventory.list(RESOURCES[resource], all);
            }
            Event::Stop { resource } => self.devices.inventory.stopped(RESOURCES[resource], self.now),
            Event::Admit { pod, .. } if self.must_wait(pod) => {}
            Event::Admit { pod, fails_at, prefer, policy, ref meanwhile } => {
                self.admit(pod, fails_at, prefer, policy, meanwhile)?;
            }
            Event::InitEnds { pod } => {
                let uid = format!("p{pod}");
                if let Some(ended) = self.alive.get_mut(&uid) {
                    *ended = true;
                    self.devices.holders.release(&uid, "init");
                }
            }
            Event::Exit { pod } => {
                // The agent drops the admission of a terminated pod.
                self.admitting.remove(&format!("p{pod}"));
                self.alive.remove(&format!("p{pod}"));
            }
            Event::Restart { running } => {
                self.end_life();
                let file = self.devices.checkpoint().write().unwrap();
                self.devices = Devices::read(&file, self.now).unwrap();
                if !running {
                    // After a reboot every pod is admitted again.
                    self.alive.values_mut().for_each(|ended| *ended = false);
                }
            }
            Event::Rebuild => {
                self.end_life();
                let remnants = self.remnants();
                let (devices, dropped) = Devices::rebuilt(remnants, self.now);
                assert!(dropped.is_empty(), "{dropped:?}");
                self.devices = devices;
            }
            Event::Wait { seconds } => {
                self.now += Duration::from_secs(u64::from(seconds));
                self.devices.inventory.capacity_meanwhile(self.now);
            }
        }
        Ok(())
    }

    /// Drops everything that the agent had in progress.
    fn end_life(&mut self) {
        self.lives += 1;
        self.admitting.clear();
    }

    /// Returns true if another admission of the same pod, or about the same resources, is under way.
    fn must_wait(&self, pod: u8) -> bool {
        let uid = format!("p{pod}");
        let wanted = contended(&self.devices, &uid, &wishes(pod));
        self.admitting.iter().any(|(other, busy)| *other == uid || !busy.is_disjoint(&wanted))
    }

    /// Returns the containers of living pods, as the runtime has them.
    fn remnants(&self) -> Vec<Remnant> {
        let mut all = Vec::new();
        for uid in self.alive.keys() {
            for (container, held) in self.devices.holders.held(uid).into_iter().flatten() {
                let (pod_uid, container, held) = (uid.clone(), container.clone(), held.clone());
                all.push(Remnant { pod_uid, container, alive: true, created_at: 1, held });
            }
        }
        all
    }

    fn admit(
        &mut self,
        pod: u8,
        fails_at: Option<u8>,
        prefer: u8,
        policy: u8,
        meanwhile: &[Event],
    ) -> Result<(), TestCaseError> {
        let uid = format!("p{pod}");
        let ended = self.alive.get(&uid).copied().unwrap_or(false);
        let circumstances = Circumstances {
            ended: ended.then(|| "init".to_owned()).into_iter().collect(),
            policy: [
                TopologyPolicy::None,
                TopologyPolicy::BestEffort,
                TopologyPolicy::Restricted,
                TopologyPolicy::SingleNumaNode,
            ][usize::from(policy & 3)],
            scope: if policy & 4 == 0 { TopologyScope::Container } else { TopologyScope::Pod },
            ..Circumstances::default()
        };
        let before = self.devices.holders.held(&uid).cloned();
        let undisturbed = fails_at.is_none() && meanwhile.is_empty() && policy & 3 == 0;
        let must_have = undisturbed && self.has_for_again(pod, ended);
        let life = self.lives;
        self.admitting.insert(uid.clone(), contended(&self.devices, &uid, &wishes(pod)));
        let mut admission = Admission::new(&uid, wishes(pod), circumstances);
        let (mut calls, mut meanwhile_left) = (0, meanwhile.iter());
        let admitted = loop {
            let next = admission.next(&mut self.devices);
            // The plugin is busy with its answer now.
            if let (Ok(Next::Ask { .. } | Next::Allocate { .. }), Some(event)) =
                (&next, meanwhile_left.next())
            {
                self.play(event)?;
                self.check(event)?;
                if self.lives != life {
                    return Ok(()); // kill -9: neither continuation nor rollback
                }
                if !self.admitting.contains_key(&uid) {
                    break false;
                }
            }
            match next {
                Err(_) => break false,
                Ok(Next::Done) => break true,
                Ok(Next::Free) => self.free_inactive(),
                Ok(Next::Ask { question, .. }) => {
                    let preferred: Vec<String> = (0..8)
                        .map(|n| format!("{}-{}", prefer & 1, (prefer >> 1).wrapping_add(n) % 8))
                        .collect();
                    admission.preferred(question, &preferred);
                }
                Ok(Next::Allocate { .. }) if fails_at == Some(calls) => break false,
                Ok(Next::Allocate { .. }) => {
                    calls += 1;
                    admission.allocated(&mut self.devices, vec![1, 2, 3]);
                }
            }
        };
        let wanted = self.admitting.remove(&uid).is_some();
        prop_assert!(admitted || !must_have, "{} held its devices, but does not get them again", uid);
        if admitted && wanted {
            for wish in wishes(pod) {
                let held = self.devices.holders.held(&uid).and_then(|pod| pod.get(wish.container));
                for (resource, held) in held.into_iter().flatten() {
                    let count =
                        wish.limits.iter().find(|(name, _)| name == resource).map(|(_, count)| *count);
                    prop_assert_eq!(Some(held.ids().len()), count, "{} of {}", resource, wish.container);
                }
            }
            self.alive.entry(uid).or_insert(false);
            return Ok(());
        }
        admission.abort(&mut self.devices);
        if meanwhile.is_empty() {
            prop_assert_eq!(
                self.devices.holders.held(&uid),
                before.as_ref(),
                "a failed admission left something behind"
            );
        }
        Ok(())
    }

    /// Returns true if a living pod held its devices, all of them are healthy, and the additional needs of
    /// its init container (beyond the devices of the later containers) are free: the pod must get the devices
    /// again in its next sandbox.
    fn has_for_again(&self, pod: u8, ended: bool) -> bool {
        let uid = format!("p{pod}");
        let Some(held) = self.devices.holders.held(&uid).filter(|_| self.alive.contains_key(&uid)) else {
            return false;
        };
        let of = |container: &str, resource: &str| -> Ids {
            let held = held.get(container).and_then(|held| held.get(resource));
            held.map(|held| held.ids()).unwrap_or_default()
        };
        let wishes = wishes(pod);
        wishes.iter().enumerate().all(|(at, wish)| {
            wish.limits.iter().all(|(resource, count)| {
                let own = of(wish.container, resource);
                let is_well = self.devices.inventory.options(resource).is_some()
                    && own.iter().all(|id| self.devices.inventory.is_healthy(resource, id));
                let later: Ids =
                    wishes.iter().skip(at + 1).flat_map(|wish| of(wish.container, resource)).collect();
                let is_init = wish.kind == ContainerKind::Init;
                let enough = own.len() == *count
                    || is_init && (ended || later.len() + self.devices.free(resource) >= *count);
                is_well && enough
            })
        })
    }

    /// Frees inactive pods as the agent does: spares pods whose admission is in progress.
    fn free_inactive(&mut self) {
        let Self { devices, alive, admitting, .. } = self;
        devices.holders.free_inactive(|uid| admitting.contains_key(uid) || alive.contains_key(uid));
    }

    fn check(&self, event: &Event) -> Result<(), TestCaseError> {
        let mut holder: BTreeMap<(String, String), &str> = BTreeMap::new();
        for uid in self.devices.holders.pods() {
            let mut lasting: BTreeMap<(String, String), &str> = BTreeMap::new();
            for (container, held) in self.devices.holders.held(uid).into_iter().flatten() {
                for (resource, id) in
                    held.iter().flat_map(|(r, held)| held.ids().into_iter().map(move |id| (r, id)))
                {
                    let key = (resource.clone(), id);
                    let other = holder.insert(key.clone(), uid);
                    prop_assert!(
                        other.is_none_or(|other| other == uid),
                        "{key:?}: {other:?} and {uid} after {event:?}"
                    );
                    if container != "init" {
                        let twice = lasting.insert(key.clone(), container);
                        prop_assert!(
                            twice.is_none(),
                            "{key:?}: {twice:?} and {container} of {uid} after {event:?}"
                        );
                    }
                }
            }
        }
        for resource in RESOURCES {
            let held: Ids = holder.keys().filter(|(r, _)| r == resource).map(|(_, id)| id.clone()).collect();
            let healthy = self
                .devices
                .inventory
                .devices_of(resource)
                .into_iter()
                .filter(|d| d.health == Health::Healthy);
            let free = healthy.filter(|device| !held.contains(&device.id)).count();
            prop_assert_eq!(self.devices.free(resource), free, "of {} after {:?}", resource, event);
        }
        Ok(())
    }

    /// Plays all events, with a check after each.
    fn plays(&mut self, events: &[Event]) -> Result<(), TestCaseError> {
        for event in events {
            self.play(event)?;
            self.check(event)?;
        }
        self.nothing_is_lost()
    }

    /// Checks that one pod can have every device once every plugin is well and every other pod has
    /// terminated.
    fn nothing_is_lost(&mut self) -> Result<(), TestCaseError> {
        self.alive.clear();
        for (index, resource) in RESOURCES.into_iter().enumerate() {
            self.play(&Event::Register { resource: index, asks: false })?;
            self.play(&Event::List { resource: index, there: 0x3f, healthy: 0x3f, nodes: 0x80 })?;
            let wish = ContainerRequest {
                container: "all",
                kind: ContainerKind::Lasting,
                limits: vec![(resource, usize::from(DEVICES))],
            };
            let mut admission = Admission::new("last", vec![wish], Circumstances::default());
            loop {
                match admission.next(&mut self.devices) {
                    Ok(Next::Free) => {
                        self.devices.holders.free_inactive(|uid| uid == "last");
                    }
                    Ok(Next::Allocate { .. }) => admission.allocated(&mut self.devices, Vec::new()),
                    Ok(Next::Done) => break,
                    other => prop_assert!(false, "{resource}: {other:?}"),
                }
            }
        }
        let held = self.devices.holders.held("last").unwrap()["all"].values().map(|held| held.ids().len());
        prop_assert_eq!(held.collect::<Vec<_>>(), [usize::from(DEVICES); 2]);
        Ok(())
    }
}

// Ten thousand orders of events; two tests, so that two processors share them. A quick generator: random
// numbers take as long as all the decisions they drive.
proptest! {
    #![proptest_config(ProptestConfig { rng_algorithm: RngAlgorithm::XorShift, ..ProptestConfig::with_cases(5_000) })]

    #[test]
    fn no_device_is_ever_held_twice_and_none_is_lost(events in prop::collection::vec(event(), 0..24)) {
        registered().plays(&events)?;
    }

    #[test]
    fn after_a_reboot_pods_get_their_devices_again(
        pods in prop::collection::vec(0..PODS, 1..8),
        asks in any::<bool>(),
    ) {
        let mut node = registered();
        for pod in &pods {
            node.play(&admit(*pod))?;
            node.play(&Event::InitEnds { pod: *pod })?;
        }
        let alive = node.alive.len();
        node.play(&Event::Restart { running: false })?;
        for resource in 0..RESOURCES.len() {
            node.play(&Event::Register { resource, asks })?;
            node.play(&Event::List { resource, there: 0x3f, healthy: 0x3f, nodes: 0x2a })?;
        }
        let again: Vec<Event> = pods.iter().map(|pod| admit(*pod)).collect();
        node.plays(&again)?;
        prop_assert!(alive > 0);
    }

    #[test]
    fn no_device_is_held_twice_or_lost_after_a_start_with_holders(events in prop::collection::vec(event(), 0..24)) {
        let mut node = registered();
        for before in [admit(1), admit(3), Event::Restart { running: true }] {
            node.play(&before)?;
        }
        node.plays(&events)?;
    }
}

/// Returns a node whose plugins have registered and listed all devices.
fn registered() -> Node {
    let mut node = Node::default();
    register(&mut node);
    node
}

fn register(node: &mut Node) {
    for resource in 0..RESOURCES.len() {
        node.play(&Event::Register { resource, asks: false }).unwrap();
        node.play(&Event::List { resource, there: 0x3f, healthy: 0x3f, nodes: 0x2a }).unwrap();
    }
}

/// Returns a ledger with two pods, its checkpoint, and their containers.
fn checkpointed() -> (Devices, Vec<u8>, Vec<Remnant>) {
    let mut node = registered();
    for pod in [1, 3] {
        node.play(&admit(pod)).unwrap();
    }
    let file = node.devices.checkpoint().write().unwrap();
    let remnants = node.remnants();
    (node.devices, file, remnants)
}

fn held(devices: &Devices) -> BTreeMap<String, Ids> {
    let of = |uid: &str| -> Ids {
        let containers = devices.holders.held(uid).into_iter().flatten();
        containers.flat_map(|(_, held)| held.values()).flat_map(|held| held.ids()).collect()
    };
    devices.holders.pods().map(|uid| (uid.to_owned(), of(uid))).collect()
}

/// Starts from this file: the ledger must be the same as before, from the file or from the containers.
fn check_damaged(file: &[u8], before: &Devices, remnants: &[Remnant]) -> bool {
    let read = Devices::read(file, Duration::ZERO);
    let rebuilt = read.is_err();
    let devices = read.unwrap_or_else(|_| Devices::rebuilt(remnants.to_vec(), Duration::ZERO).0);
    assert_eq!(held(&devices), held(before), "{}", String::from_utf8_lossy(file));
    let mut node = Node { devices, ..Node::default() };
    for uid in before.holders.pods() {
        node.alive.insert(uid.to_owned(), false);
    }
    register(&mut node);
    let event = admit(0);
    node.play(&event).unwrap();
    node.check(&event).unwrap();
    rebuilt
}

#[test]
fn a_truncated_checkpoint_loses_no_device() {
    let (before, file, remnants) = checkpointed();
    for length in 0..file.len() {
        assert!(
            check_damaged(&file[..length], &before, &remnants),
            "accepted a checkpoint truncated at {length}"
        );
    }
    assert!(!check_damaged(&file, &before, &remnants));
}

#[test]
fn ten_thousand_corruptions_of_a_checkpoint_lose_no_device() {
    let (before, file, remnants) = checkpointed();
    // xorshift64: any numbers will do, if they are the same each time.
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        usize::try_from(state % u64::try_from(below).unwrap()).unwrap()
    };
    let mut refused = 0;
    for _ in 0..10_000 {
        let mut damaged = file.clone();
        for _ in 0..=random(4) {
            let at = random(damaged.len());
            match random(4) {
                0 => damaged[at] = u8::try_from(random(256)).unwrap(),
                1 => damaged[at] ^= 1 << random(8),
                2 => drop(damaged.remove(at)),
                _ => damaged.insert(at, u8::try_from(random(256)).unwrap()),
            }
        }
        refused += usize::from(check_damaged(&damaged, &before, &remnants));
    }
    assert!(refused > 9_000, "only {refused} were refused");
}

#[test]
fn on_a_full_node_an_init_container_gets_its_pods_devices_again_after_a_reboot() {
    // With a single device, the init container checks it and the main container then uses it.
    let wishes = |kinds: [(&'static str, ContainerKind); 2]| -> Vec<ContainerRequest<'static>> {
        let wish = |(container, kind)| ContainerRequest { container, kind, limits: vec![(RESOURCES[0], 1)] };
        kinds.map(wish).into()
    };
    let pod = || wishes([("init", ContainerKind::Init), ("main", ContainerKind::Lasting)]);
    let one = || Device { id: "gpu-0".to_owned(), health: Health::Healthy, numa_nodes: vec![0] };
    let serve = |devices: &mut Devices, circumstances: Circumstances| {
        let mut admission = Admission::new("p", pod(), circumstances);
        loop {
            match admission.next(devices) {
                Ok(Next::Free) => {}
                Ok(Next::Ask { question, .. }) => admission.preferred(question, &["gpu-0"]),
                Ok(Next::Allocate { .. }) => admission.allocated(devices, Vec::new()),
                Ok(Next::Done) => return Ok(()),
                Err(error) => return Err(error.to_string()),
            }
        }
    };
    for asks in [false, true] {
        for policy in [TopologyPolicy::None, TopologyPolicy::SingleNumaNode] {
            let now = || Circumstances { policy, ..Circumstances::default() };
            let options =
                PluginOptions { get_preferred_allocation_available: asks, ..PluginOptions::default() };
            let mut devices = Devices::default();
            devices.inventory.register(RESOURCES[0], options);
            devices.inventory.list(RESOURCES[0], [one()]);
            serve(&mut devices, now()).unwrap();
            devices.holders.release("p", "init");
            let file = devices.checkpoint().write().unwrap();
            let mut devices = Devices::read(&file, Duration::ZERO).unwrap();
            devices.inventory.register(RESOURCES[0], options);
            devices.inventory.list(RESOURCES[0], [one()]);
            serve(&mut devices, now()).unwrap();
            assert_eq!(held(&devices)["p"], Ids::from(["gpu-0".to_owned()]), "{policy:?} {asks}");
            // While the main container runs, it lends no device.
            devices.holders.release("p", "init");
            let running = BTreeSet::from(["main".to_owned()]);
            serve(&mut devices, Circumstances { running, ..now() }).unwrap_err();
        }
    }
}
