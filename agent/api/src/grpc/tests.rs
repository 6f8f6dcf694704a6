use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use tempfile::TempDir;
use tonic::service::Routes;

use super::*;
use beelet_client::{Client, ClientError, Event};
use beelet_model::table::{Pods, ReadinessEdge};
use beelet_serve::grpc::{bind, only_the_owner, serve};

const DEADLINE: Duration = Duration::from_secs(30);

struct Agent {
    dir: TempDir,
    table: watch::Sender<Arc<PodTable>>,
    shutdown: CancellationToken,
    task: tokio::task::JoinHandle<anyhow::Result<()>>,
}

async fn start() -> Agent {
    let complete = Complete::default();
    complete.set(()).unwrap();
    start_with(Outlook::new(complete, || None)).await
}

async fn start_with(outlook: Outlook) -> Agent {
    let dir = TempDir::new().unwrap();
    let (table, receiver) = watch::channel(Arc::default());
    let shutdown = CancellationToken::new();
    let listener = bind(&dir.path().join("run/beelet.sock")).await.unwrap();
    let services = Routes::new(node_service(receiver, outlook, shutdown.clone()));
    let task = tokio::spawn(serve(listener, services, shutdown.clone()));
    Agent { dir, table, shutdown, task }
}

impl Agent {
    fn socket(&self) -> PathBuf {
        self.dir.path().join("run/beelet.sock")
    }

    async fn client(&self) -> Client {
        Client::connect(&self.socket()).await.unwrap()
    }

    fn set(&self, pod: &str, phase: &str) {
        self.table.send_modify(|table| {
            let table = Arc::make_mut(table);
            table.pods.insert(name(pod), entry(pod, phase));
        });
    }

    fn remove(&self, pod: &str) {
        self.table.send_modify(|table| {
            Arc::make_mut(table).pods.remove(&name(pod));
        });
    }
}

fn name(pod: &str) -> PodName {
    PodName { namespace: "default".into(), name: pod.into() }
}

fn entry(pod: &str, phase: &str) -> Arc<PodEntry> {
    let pod = serde_json::from_value(serde_json::json!({
        "metadata": {"name": pod, "namespace": "default", "uid": "u1"},
        "status": {"phase": phase},
    }))
    .unwrap();
    let edge = ReadinessEdge { container: "c".into(), ready: true, kernel_ns: 1_000, published_ns: 5_000 };
    Arc::new(PodEntry { readiness_edge: Some(edge), ..PodEntry::of(pod) })
}

/// Returns the next event in short form: type, pod, phase.
async fn next(watch: &mut beelet_client::Watch) -> String {
    let event = tokio::time::timeout(DEADLINE, watch.next()).await.unwrap().unwrap().unwrap();
    let describe = |what: &str, name: &PodName, entry: &PodEntry| {
        let phase = entry.pod.status.as_ref().and_then(|status| status.phase.clone()).unwrap_or_default();
        format!("{what} {name} {phase}")
    };
    match &event {
        Event::Added(name, entry) => describe("added", name, entry),
        Event::Modified(name, entry) => describe("modified", name, entry),
        Event::Deleted(name, entry) => describe("deleted", name, entry),
        Event::Synced => "synced".into(),
        Event::Rejected(list) => format!("rejected {}", list.len()),
        Event::Notice(notice) => format!("notice {notice}"),
    }
}

#[tokio::test]
async fn pods_are_listed_with_all_that_is_known_of_them() {
    let agent = start().await;
    agent.set("web", "Running");
    let rejected = RejectedManifest { file: "/m/a.yaml".into(), message: "3:1: no".into() };
    agent.table.send_modify(|table| Arc::make_mut(table).rejected = Arc::new(vec![rejected.clone()]));
    let (table, notice) = agent.client().await.pods.list().await.unwrap();
    assert_eq!(notice, "");
    assert_eq!(table.pods, Pods::unit(name("web"), entry("web", "Running")));
    assert_eq!(*table.rejected, [rejected]);
}

#[tokio::test]
async fn a_watch_tells_what_is_there_and_then_what_changes() {
    let agent = start().await;
    agent.set("a", "Running");
    agent.set("b", "Pending");
    let mut watch = agent.client().await.pods.watch().await.unwrap();
    assert_eq!(next(&mut watch).await, "added default/a Running");
    assert_eq!(next(&mut watch).await, "added default/b Pending");
    assert_eq!(next(&mut watch).await, "synced");
    agent.set("b", "Running");
    assert_eq!(next(&mut watch).await, "modified default/b Running");
    agent.remove("a");
    assert_eq!(next(&mut watch).await, "deleted default/a Running");
    let rejected = RejectedManifest { file: "/m/a.yaml".into(), message: "3:1: no".into() };
    agent.table.send_modify(|table| Arc::make_mut(table).rejected = Arc::new(vec![rejected]));
    assert_eq!(next(&mut watch).await, "rejected 1");
    agent.table.send_modify(|table| Arc::make_mut(table).rejected = Arc::default());
    assert_eq!(next(&mut watch).await, "rejected 0");
}

#[tokio::test]
async fn a_slow_watcher_gets_the_newest_state_and_no_backlog() {
    let agent = start().await;
    let mut watch = agent.client().await.pods.watch().await.unwrap();
    assert_eq!(next(&mut watch).await, "synced");
    // Far more changes than any queue between agent and client holds.
    for round in 0..20_000 {
        agent.set("a", &format!("{round}"));
        if round % 100 == 0 {
            tokio::task::yield_now().await;
        }
    }
    agent.set("a", "last");
    let mut events = 0;
    while !next(&mut watch).await.ends_with(" last") {
        events += 1;
    }
    assert!(events < 19_000, "{events} events came: nothing was skipped");
    agent.set("b", "Running");
    assert_eq!(next(&mut watch).await, "added default/b Running");
}

#[tokio::test]
async fn every_watcher_folds_to_the_same_table() {
    let agent = start().await;
    let mut watch = agent.client().await.pods.watch().await.unwrap();
    for round in 0..500 {
        agent.set(&format!("p{}", round % 7), &format!("{round}"));
        if round % 3 == 0 {
            agent.remove(&format!("p{}", round % 5));
        }
        tokio::task::yield_now().await;
    }
    agent.set("end", "Running");
    let expected = agent.table.borrow().pods.clone();
    let mut table = PodTable::default();
    while table.pods != expected {
        tokio::time::timeout(DEADLINE, watch.next()).await.unwrap().unwrap().unwrap().apply(&mut table);
    }
}

#[tokio::test]
async fn the_socket_is_for_its_owner_and_goes_with_the_agent() {
    let agent = start().await;
    let socket = agent.socket();
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&socket), 0o600);
    assert_eq!(mode(socket.parent().unwrap()), 0o700);
    assert_eq!(
        std::fs::read_dir(socket.parent().unwrap()).unwrap().count(),
        1,
        "the temporary socket is removed"
    );
    let mut watch = agent.client().await.pods.watch().await.unwrap();
    assert_eq!(next(&mut watch).await, "synced");
    agent.shutdown.cancel();
    tokio::time::timeout(DEADLINE, agent.task).await.unwrap().unwrap().unwrap();
    assert!(!socket.exists());
    while let Ok(Some(_)) = tokio::time::timeout(DEADLINE, watch.next()).await.unwrap() {}
}

#[tokio::test]
async fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
    let agent = start().await;
    let error = bind(&agent.socket()).await.unwrap_err().to_string();
    assert!(error.contains("another process serves"), "{error}");
    agent.client().await.pods.list().await.unwrap();

    let dir = TempDir::new().unwrap();
    let path = dir.path().join("beelet.sock");
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    assert!(path.exists(), "the test needs a socket without a listener");
    bind(&path).await.unwrap();

    std::fs::write(&path, "a file").unwrap();
    let error = bind(&path).await.unwrap_err().to_string();
    assert!(error.contains("is not a socket"), "{error}");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "a file");
}

#[tokio::test]
async fn without_an_agent_the_client_says_what_to_do() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("beelet.sock");
    let check = async || {
        let error = Client::connect(&path).await.unwrap_err();
        assert!(matches!(error, ClientError::NotRunning { .. }), "{error}");
        assert!(
            error.to_string().contains("beelet run") && error.to_string().contains("--socket"),
            "{error}"
        );
    };
    check().await;
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    check().await;
}

#[test]
fn only_root_and_the_agents_own_user_may_ask() {
    // A connection without credentials is rejected; a unix socket's connection always has them.
    let status = only_the_owner(Request::new(())).unwrap_err();
    assert_eq!(status.code(), tonic::Code::PermissionDenied);
}

#[tokio::test]
async fn who_asks_before_the_first_look_waits_for_it() {
    let complete = Complete::default();
    let agent = start_with(Outlook::new(Arc::clone(&complete), || None)).await;
    let mut client = agent.client().await;
    let asked = tokio::spawn(async move { client.pods.list().await });
    let mut watch = agent.client().await.pods.watch().await.unwrap();
    agent.set("web", "Running");
    complete.set(()).unwrap();
    let (table, notice) = asked.await.unwrap().unwrap();
    assert_eq!((table.pods.len(), notice.as_str()), (1, ""));
    assert_eq!(next(&mut watch).await, "added default/web Running");
    assert_eq!(next(&mut watch).await, "synced");
}

#[tokio::test]
async fn while_nothing_is_known_the_list_says_why_instead_of_being_empty() {
    let outlook = Outlook::new(Complete::default(), || Some("the runtime has not answered yet".to_owned()));
    let agent = start_with(outlook).await;
    let error = agent.client().await.pods.list().await.unwrap_err().to_string();
    assert_eq!(error, "the agent: running pods are not known yet: the runtime has not answered yet");
}

#[tokio::test]
async fn a_watcher_is_told_when_what_it_sees_gets_old_and_when_it_is_true_again() {
    let (complete, silent) = (Complete::default(), Arc::new(std::sync::atomic::AtomicBool::new(false)));
    complete.set(()).unwrap();
    let told = Arc::clone(&silent);
    let is_silent = move || told.load(std::sync::atomic::Ordering::SeqCst).then(|| "silence".to_owned());
    let agent = start_with(Outlook::new(complete, is_silent)).await;
    agent.set("web", "Running");
    let mut watch = agent.client().await.pods.watch().await.unwrap();
    assert_eq!(next(&mut watch).await, "added default/web Running");
    assert_eq!(next(&mut watch).await, "synced");
    silent.store(true, std::sync::atomic::Ordering::SeqCst);
    assert_eq!(next(&mut watch).await, "notice silence");
    let (table, notice) = agent.client().await.pods.list().await.unwrap();
    assert_eq!((table.pods.len(), notice.as_str()), (1, "silence"));
    silent.store(false, std::sync::atomic::Ordering::SeqCst);
    assert_eq!(next(&mut watch).await, "notice ");
}
