use std::time::Duration;

use beelet_policy::devices::{
    Device, Devices as Ledger, Health, PluginOptions, Request as Wanted, Selection, Serving,
};
use beelet_proto::deviceplugin::RegisterRequest;
use loona_hpack::{Decoder, Encoder};
use prost::Message as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{UnixListener, UnixStream};
use tonic::{Code, Status};

use super::plugin::Plugin;
use super::refusals::DeviceRefusal;
use super::*;
use beelet_testing::http2::frame;

fn parts(dir: &std::path::Path) -> Parts {
    let settings = Settings::new(dir.join("kubelet"));
    Parts {
        store: Arc::new(settings.checkpoint()),
        settings,
        active: watch::channel(None).1,
        requests: mpsc::channel(16).0,
        metrics: Metrics::default(),
        events: Recorder::default(),
        node_name: "n1".to_owned(),
    }
}

fn device(id: &str) -> Device {
    Device { id: id.to_owned(), health: Health::Healthy, numa_nodes: vec![1] }
}

/// Registers as a client that sends this `:authority`; returns grpc-status and grpc-message of the response.
async fn register(socket: &std::path::Path, authority: &str) -> (String, String) {
    let request = RegisterRequest { version: "v0".to_owned(), ..RegisterRequest::default() }.encode_to_vec();
    let mut message = vec![0];
    message.extend(u32::try_from(request.len()).unwrap().to_be_bytes());
    message.extend(request);
    let fields = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/v1beta1.Registration/Register"),
        (":authority", authority),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ];
    let block = Encoder::new().encode(fields.iter().map(|(name, value)| (name.as_bytes(), value.as_bytes())));
    let mut stream = UnixStream::connect(socket).await.unwrap();
    let sent = [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(),
        frame(4, 0, 0, &[]),
        frame(1, 0x4, 1, &block),
        frame(0, 0x1, 1, &message),
    ];
    stream.write_all(&sent.concat()).await.unwrap();
    let (mut decoder, mut status, mut text) = (Decoder::new(), String::new(), String::new());
    loop {
        let mut header = [0; 9];
        stream.read_exact(&mut header).await.unwrap();
        let length = u32::from_be_bytes([0, header[0], header[1], header[2]]);
        let mut payload = vec![0; length as usize];
        stream.read_exact(&mut payload).await.unwrap();
        assert_ne!(header[3], 3, "the stream was reset: {payload:?}");
        if header[3] != 1 {
            continue;
        }
        for (name, value) in decoder.decode(&payload).unwrap() {
            match name.as_slice() {
                b"grpc-status" => status = String::from_utf8(value).unwrap(),
                b"grpc-message" => text = String::from_utf8(value).unwrap(),
                _ => {}
            }
        }
        if header[4] & 0x1 != 0 {
            return (status, text);
        }
    }
}

#[tokio::test]
async fn clients_whose_authority_is_a_path_are_answered() {
    let dir = tempfile::tempdir().unwrap();
    let (devices, tasks) = Devices::open(parts(dir.path()), Vec::new);
    let (mut running, shutdown) = (tokio::task::JoinSet::new(), CancellationToken::new());
    for (_, part) in tasks.named(&shutdown) {
        running.spawn(part);
    }
    let socket = devices.settings().registration_socket();
    while !socket.exists() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let go = socket.display().to_string();
    for authority in ["localhost", &go, &go.replace('/', "%2F"), "", "a:b:c", "\u{1f41d}"] {
        let (status, message) = register(&socket, authority).await;
        // The request reached the registration's own checks.
        assert_eq!(status, "2", "{authority}");
        assert!(
            message.contains("is%20not%20supported") || message.contains("is not supported"),
            "{message}"
        );
    }
    shutdown.cancel();
    while running.join_next().await.is_some() {}
    assert!(!socket.exists(), "the socket is left behind");
}

#[tokio::test]
async fn what_is_committed_is_in_the_checkpoint_and_a_restart_finds_it() {
    let dir = tempfile::tempdir().unwrap();
    let mut ledger = Ledger::default();
    ledger.inventory.register("example.com/gpu", PluginOptions::default());
    ledger.inventory.list("example.com/gpu", ["a", "b"].map(device));
    let wanted = Wanted {
        pod_uid: "p",
        container: "main",
        resource: "example.com/gpu",
        count: 1,
        already_running: false,
    };
    ledger.commit(&wanted, &["a".to_owned()].into(), vec![1, 2]);
    let file = Settings::new(dir.path().join("kubelet")).checkpoint();
    file.replace(&ledger.checkpoint().write().unwrap()).unwrap();
    let (devices, _tasks) = Devices::open(parts(dir.path()), || panic!("the checkpoint is good"));
    let held = devices.view().held_by("p");
    assert_eq!(held["main"]["example.com/gpu"], BTreeMap::from([("a".to_owned(), vec![1])]));
    assert_eq!(devices.node().borrow().capacity["example.com/gpu"], 2);
    let view = &devices.view().resources()["example.com/gpu"];
    assert!(!view.connected && view.devices["a"].unlisted && view.devices["a"].holders.len() == 1);
}

/// Returns a plugin that accepts every call and answers none, at a socket in `dir`, until the listener is
/// dropped.
async fn silent(dir: &std::path::Path) -> (Plugin, PathBuf, UnixListener) {
    let socket = dir.join("silent.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    (Plugin::new(beelet_serve::client::dial(&socket).await.unwrap()), socket, listener)
}

/// Checks the time after which a call without an answer fails.
async fn takes<T>(seconds: u64, call: &str, answer: impl Future<Output = Result<T, Status>>) {
    let begun = tokio::time::Instant::now();
    let Err(status) = answer.await else { panic!("{call} was answered") };
    assert_eq!((status.code(), begun.elapsed().as_secs()), (Code::DeadlineExceeded, seconds), "{call}");
}

#[tokio::test(start_paused = true)]
async fn a_plugin_that_hangs_is_not_waited_for_any_longer_than_it_may_take() {
    let dir = tempfile::tempdir().unwrap();
    let (plugin, _, _listener) = silent(dir.path()).await;
    let mut ledger = Ledger::default();
    let options = PluginOptions { get_preferred_allocation_available: true, ..PluginOptions::default() };
    ledger.inventory.register("example.com/gpu", options);
    ledger.inventory.list("example.com/gpu", [device("a")]);
    let wanted = Wanted {
        pod_uid: "p",
        container: "main",
        resource: "example.com/gpu",
        count: 1,
        already_running: false,
    };
    let Ok(Selection::Ask(question)) = ledger.select(&wanted, &Serving::default()) else {
        panic!("the plugin has a preference");
    };
    let ids = BTreeSet::from(["a".to_owned()]);
    takes(10, "GetDevicePluginOptions", plugin.options(None)).await;
    takes(60, "GetPreferredAllocation", plugin.preferred(&question)).await;
    takes(60, "Allocate", plugin.allocate(&ids)).await;
    takes(30, "PreStartContainer", plugin.pre_start(ids.clone())).await;
}

#[tokio::test(start_paused = true)]
async fn a_plugin_that_stays_away_is_forgotten_after_five_minutes() {
    let dir = tempfile::tempdir().unwrap();
    let settings = Settings::new(dir.path().to_owned());
    let shared = Arc::new(Shared::new(Ledger::default(), settings, Metrics::default()));
    let shutdown = CancellationToken::new();
    let expiry = tokio::spawn(ledger::expire(Arc::clone(&shared), shutdown.clone()));
    let (plugin, socket, listener) = silent(dir.path()).await;
    let resource = "example.com/gpu".to_owned();
    let current =
        shared.register(&resource, plugin.clone(), PluginOptions::default(), socket.clone()).unwrap();
    assert!(shared.listed(&resource, current.0, vec![device("a")]));
    let followed = tokio::spawn(follow::follow(
        Arc::clone(&shared),
        resource.clone(),
        plugin,
        current,
        shutdown.clone(),
    ));
    let mut node = shared.node.subscribe();
    assert_eq!(node.borrow_and_update().allocatable[&resource], 1);
    drop(listener);
    std::fs::remove_file(&socket).unwrap();
    node.wait_for(|node| node.allocatable.get(&resource) == Some(&0)).await.unwrap();
    let gone_at = tokio::time::Instant::now();
    tokio::time::sleep(Duration::from_secs(299)).await;
    let now = node.borrow_and_update().clone();
    assert_eq!((now.capacity[&resource], now.removed.len()), (1, 0), "a second is left");
    assert!(shared.plugin(&resource).is_some());
    let now = node.wait_for(|node| node.removed.contains(&resource)).await.unwrap().clone();
    assert!(!now.capacity.contains_key(&resource) && !now.allocatable.contains_key(&resource));
    assert_eq!(gone_at.elapsed().as_secs(), 300);
    // The task retries at most once more before it gives up.
    followed.await.unwrap();
    assert!(shared.plugin(&resource).is_none() && gone_at.elapsed() <= Duration::from_secs(311));
    shutdown.cancel();
    expiry.await.unwrap();
}

#[tokio::test]
async fn a_resource_whose_plugin_never_lists_anything_is_there_with_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let settings = Settings::new(dir.path().to_owned());
    let shared = Shared::new(Ledger::default(), settings, Metrics::default());
    let (plugin, socket, _listener) = silent(dir.path()).await;
    let resource = "example.com/gpu";
    let current = shared.register(resource, plugin, PluginOptions::default(), socket).unwrap();
    assert!(shared.stopped(resource, current.0));
    let node = shared.node.subscribe().borrow().clone();
    assert_eq!((node.capacity.get(resource), node.allocatable.get(resource)), (Some(&0), Some(&0)));
}

#[tokio::test]
async fn a_pod_that_must_wait_for_its_devices_does_not_wake_itself() {
    let dir = tempfile::tempdir().unwrap();
    let (devices, tasks) = Devices::open(parts(dir.path()), Vec::new);
    let (mut running, shutdown) = (tokio::task::JoinSet::new(), CancellationToken::new());
    for (_, part) in tasks.named(&shutdown) {
        running.spawn(part);
    }
    let (plugin, socket, _listener) = silent(dir.path()).await;
    let (gpu, sick) = ("example.com/gpu", Device { health: Health::Unhealthy, ..device("a") });
    let (generation, _) = devices.shared.register(gpu, plugin, PluginOptions::default(), socket).unwrap();
    assert!(devices.shared.listed(gpu, generation, vec![sick]));
    let pod: core::Pod = serde_json::from_value(serde_json::json!({
        "metadata": { "name": "web", "namespace": "default", "uid": "u" },
        "spec": { "containers": [{ "name": "main", "resources": { "limits": { gpu: "1" } } }] },
    }))
    .unwrap();
    let mut node = devices.node();
    node.borrow_and_update();
    let circumstances = Circumstances { restarting: true, ..Circumstances::default() };
    let refused = devices.admit(&Arc::new(pod), circumstances, None).await;
    assert!(matches!(refused, Err(DeviceRefusal::Wait { .. })), "{refused:?}");
    assert!(!node.has_changed().unwrap(), "the pod's own attempt would wake it");
    shutdown.cancel();
    while running.join_next().await.is_some() {}
}
