//! The kernel's verdict and connect()'s on the same application.

use super::scene::{Pod, Scene, tcp};
use crate::place::{LOOPBACK, Process};
use beelet_bpf::{CheckedNetns, Found};
use beelet_policy::probe::Outcome;
use beelet_policy::probe::ProbeKind::{Liveness, Readiness};
use beelet_tests::require;
use beelet_tests::workdir::{PATIENCE, wait_for};
use proptest::prelude::Strategy as _;
use proptest::strategy::ValueTree as _;
use std::path::Path;

/// Behaviour of an application at its port.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Behaviour {
    Closed,
    Serves,
    /// Listens, accepts nothing, and no connection waits.
    HangsIdle,
    /// Listens, accepts nothing, and a connection waits.
    HangsWaiting,
    /// Listens, accepts nothing, and the queue is full.
    HangsFull,
    /// Listens at another address.
    Elsewhere,
    /// Listens for IPv6 only.
    SixOnly,
    /// Two listeners share the port and both accept.
    GroupServes,
    /// Two listeners share the port, one has closed, the other accepts.
    GroupShrinks,
    /// Two listeners share the port; at one of them a connection waits.
    GroupHalfHangs,
    /// Two listeners share the port, and both queues are full.
    GroupFull,
    /// Requires data before it accepts (`TCP_DEFER_ACCEPT`), accepts nothing, and no connection waits.
    DeferredHangsIdle,
    /// As [`Self::DeferredHangsIdle`], and a connection without data waits.
    DeferredHangsSilent,
    /// As [`Self::DeferredHangsIdle`], and a connection with data waits.
    DeferredHangsWaiting,
}

/// Outcomes of one behaviour in the two modes.
struct Expected {
    /// Readiness by connect, and liveness too, which is the same check.
    connect: Outcome,
    /// Readiness in kernel mode.
    kernel: Outcome,
    /// Liveness in kernel mode, with its canary; `None` if it depends on the listener to which the kernel
    /// assigns the canary.
    canary: Option<Outcome>,
}

impl Behaviour {
    const ALL: [Behaviour; 14] = [
        Self::Closed,
        Self::Serves,
        Self::HangsIdle,
        Self::HangsWaiting,
        Self::HangsFull,
        Self::Elsewhere,
        Self::SixOnly,
        Self::GroupServes,
        Self::GroupShrinks,
        Self::GroupHalfHangs,
        Self::GroupFull,
        Self::DeferredHangsIdle,
        Self::DeferredHangsSilent,
        Self::DeferredHangsWaiting,
    ];

    fn expected(self) -> Expected {
        use Outcome::{Failure, Success};
        let agreed = |outcome| Expected { connect: outcome, kernel: outcome, canary: Some(outcome) };
        match self {
            Self::Closed | Self::Elsewhere | Self::SixOnly | Self::HangsFull | Self::GroupFull => {
                agreed(Failure)
            }
            Self::Serves | Self::GroupServes | Self::GroupShrinks => agreed(Success),
            // A deferring application that receives no data has nothing to accept, so a hang has no sign.
            Self::DeferredHangsIdle | Self::DeferredHangsSilent => agreed(Success),
            // All of these differences are in docs/probes.md. connect() succeeds while a queue has room.
            Self::HangsWaiting | Self::DeferredHangsWaiting => {
                Expected { connect: Success, kernel: Failure, canary: Some(Failure) }
            }
            Self::HangsIdle => Expected { connect: Success, kernel: Success, canary: Some(Failure) },
            // The canary reaches one of the two listeners.
            Self::GroupHalfHangs => Expected { connect: Success, kernel: Success, canary: None },
        }
    }

    /// Makes `process` behave so. `full` returns the number of listeners whose queues are full.
    fn play(self, process: &mut Process, port: u16, full: impl Fn() -> u32) {
        let at = format!("127.0.0.1:{port}");
        let serve = |process: &mut Process, listen: &str| {
            let socket = process.socket(listen);
            process.send(&format!("serve {}", socket.id)).unwrap();
        };
        let pair = format!("listen {at} reuseaddr reuseport");
        match self {
            Self::Closed => {}
            Self::Serves => serve(process, &format!("listen {at} reuseaddr")),
            Self::HangsIdle => {
                process.socket(&format!("listen {at} reuseaddr"));
            }
            Self::HangsWaiting => {
                process.socket(&format!("listen {at} reuseaddr"));
                process.socket(&format!("hold {at}"));
            }
            Self::HangsFull => {
                process.socket(&format!("listen {at} reuseaddr backlog=0"));
                process.socket(&format!("hold {at}"));
            }
            Self::Elsewhere => {
                process.socket(&format!("listen 127.0.0.2:{port} reuseaddr"));
            }
            Self::SixOnly => {
                process.socket(&format!("listen [::]:{port} reuseaddr v6only"));
            }
            Self::GroupServes => {
                serve(process, &pair);
                serve(process, &pair);
            }
            Self::GroupShrinks => {
                let first = process.socket(&pair);
                serve(process, &pair);
                process.close(first);
            }
            Self::GroupHalfHangs => {
                process.socket(&pair);
                process.socket(&format!("hold {at}"));
                serve(process, &pair);
            }
            Self::GroupFull => {
                let pair = format!("{pair} backlog=0");
                process.socket(&pair);
                process.socket(&format!("hold {at}"));
                process.socket(&pair);
                // The kernel chooses the listener by the connection's addresses alone; a connection that
                // meets a full queue is not made.
                for _ in 0..256 {
                    if full() == 2 {
                        return;
                    }
                    process.send(&format!("try {at}")).unwrap();
                }
                panic!("no connection reached the second listener");
            }
            Self::DeferredHangsIdle => {
                process.socket(&format!("listen {at} reuseaddr defer"));
            }
            Self::DeferredHangsSilent => {
                process.socket(&format!("listen {at} reuseaddr defer"));
                process.socket(&format!("hold {at}"));
            }
            Self::DeferredHangsWaiting => {
                process.socket(&format!("listen {at} reuseaddr defer"));
                let held = process.socket(&format!("hold {at}"));
                process.send(&format!("send {}", held.id)).unwrap();
            }
        }
    }
}

#[test]
fn the_kernels_verdict_is_connects_with_documented_exceptions() {
    require!(bpf);
    let scene = Scene::new("bp-same");
    let host = Path::new("/proc/self/ns/net");
    let mut keeper = Process::start_at(None, host);
    let port = keeper.socket("bind 127.0.0.1:0 reuseaddr").port;
    drop(keeper);
    let pod = |name: &str, mode: &str| {
        let annotation = format!("period=1h timeout=300ms canary=1h mode={mode}");
        let probes = [("readiness", tcp(port)), ("liveness", tcp(port))];
        Pod::new(name, &scene.place, &probes, &annotation).on_host()
    };
    let plain = "period=1h timeout=300ms canary=0 mode=kernel";
    let plain = Pod::new("plain", &scene.place, &[("liveness", tcp(port))], plain).on_host();
    scene.show(&[pod("knows", "kernel"), pod("asks", "connect"), plain]);
    wait_for("all probes", PATIENCE, || match scene.list().len() {
        5 => Ok(()),
        other => Err(format!("{other}")),
    })
    .unwrap();
    let checker = scene.kernel.as_ref().unwrap().checker().unwrap();
    let own = CheckedNetns::open(host, Some(&checker)).unwrap();
    let target = own.target((LOOPBACK, port).into(), None).unwrap();
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let all = Behaviour::ALL;
    let order = proptest::collection::vec(0..all.len(), 20).new_tree(&mut runner).unwrap().current();
    for behaviour in order.into_iter().map(|index| all[index]).chain(all) {
        let mut process = Process::start_at(Some(&scene.place.cgroup_dir()), host);
        behaviour.play(&mut process, port, || match checker.lookup(&[target]).unwrap()[0] {
            Found::Listener(queues) => queues.full,
            other => panic!("{other:?} on port {port}"),
        });
        let Expected { connect, kernel, canary } = behaviour.expected();
        // Liveness without a canary, the default, is connect's verdict in every case.
        assert_eq!(scene.run("plain", "main", Liveness), connect, "{behaviour:?}: plain liveness, kernel");
        // The order matters: a lookup leaves nothing, but a canary and a connection stay in the queue of a
        // hanging listener.
        assert_eq!(scene.run("knows", "main", Readiness), kernel, "{behaviour:?}: readiness, kernel");
        if let Some(canary) = canary {
            assert_eq!(scene.run("knows", "main", Liveness), canary, "{behaviour:?}: liveness, kernel");
        }
        assert_eq!(scene.run("asks", "main", Readiness), connect, "{behaviour:?}: readiness, connect");
        process.kill();
    }
}
