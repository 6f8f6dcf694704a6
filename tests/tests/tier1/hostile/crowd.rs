//! Test of a crowd at the kubelet's port: silent connections, heads that arrive byte by byte, unfinished
//! heads of the maximum length, idle streams. Probes stay on time, and memory stays below a bound.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use beelet_tests::agent::NODE;
use beelet_tests::workdir::PATIENCE;
use beelet_tests::{machine, manifests, ports, require};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::RootCertStore;
use tokio_rustls::rustls::pki_types::ServerName;

use super::scene::Scene;
use crate::server::{certificate, connector};

/// Number of concurrent clients.
const CROWD: usize = 10_000;
/// Number of clients of each kind that the server must accept before the checks begin.
const LET_IN: usize = 100;
/// Number of probes that are checked.
const PROBES: usize = 20;
/// Upper bound of the pause between two probes, which are due each second and may take five.
const PAUSE: Duration = Duration::from_secs(10);
/// Bytes of a head that a client sends; the limit is 128 KiB.
const HEAD: usize = 120 << 10;
/// Memory bound in KiB (docs/server.md, Limits): connections with their heads and TLS, and streams with
/// their buffers of both directions.
const MEMORY_KIB: u64 = 1024 * 192 + 512 * 128;

/// Behaviour of a client.
#[derive(Clone, Copy, Debug)]
enum Kind {
    /// Sends nothing.
    Silent,
    /// Sends one byte of a head per second.
    Dripping,
    /// Sends a head of the maximum length, without its end.
    Loud,
    /// Requests a stream, and neither reads nor writes data.
    HalfOpen,
}

const KINDS: [Kind; 4] = [Kind::Silent, Kind::Dripping, Kind::Loud, Kind::HalfOpen];

/// The server, with the number of accepted clients per kind.
struct Crowd {
    address: SocketAddr,
    connector: TlsConnector,
    let_in: [AtomicUsize; KINDS.len()],
}

impl Crowd {
    /// Runs a client that reconnects whenever the server disconnects it.
    async fn run(self: Arc<Self>, kind: Kind) {
        loop {
            // A disconnected client returns an error.
            let _ = self.visit(kind).await;
        }
    }

    async fn visit(&self, kind: Kind) -> std::io::Result<()> {
        let mut plain = TcpStream::connect(self.address).await?;
        if let Kind::Silent = kind {
            self.is_in(kind);
            return plain.read_u8().await.map(drop);
        }
        let name = ServerName::try_from(NODE).map_err(std::io::Error::other)?;
        let mut stream = self.connector.connect(name, plain).await?;
        match kind {
            Kind::Silent => {}
            Kind::Dripping => {
                self.is_in(kind);
                let mut pace = tokio::time::interval(Duration::from_secs(1));
                for byte in b"GET /healthz HTTP/1.1\r\nHost: n\r\nX-Slow: ".iter().chain([&b'x'; 1000]) {
                    pace.tick().await;
                    stream.write_all(&[*byte]).await?;
                }
            }
            Kind::Loud => {
                stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: n\r\n").await?;
                let line = format!("X-Loud: {}\r\n", "x".repeat(4080));
                for _ in 0..HEAD / line.len() {
                    stream.write_all(line.as_bytes()).await?;
                }
                stream.flush().await?;
                self.is_in(kind);
            }
            Kind::HalfOpen => {
                let request = format!(
                    "POST /attach/default/web-{NODE}/main?output=1 HTTP/1.1\r\nHost: n\r\nConnection: Upgrade\r\n\
                     Upgrade: SPDY/3.1\r\n\r\n"
                );
                stream.write_all(request.as_bytes()).await?;
                let mut answer = [0; 12];
                stream.read_exact(&mut answer).await?;
                // The server refuses streams over its limit.
                if answer.ends_with(b"101") {
                    self.is_in(kind);
                    std::future::pending::<()>().await;
                }
                return Ok(());
            }
        }
        stream.read_u8().await.map(drop)
    }

    fn is_in(&self, kind: Kind) {
        self.let_in[kind as usize].fetch_add(1, Ordering::Relaxed);
    }

    fn all_kinds_are_in(&self) -> bool {
        self.let_in.iter().all(|count| count.load(Ordering::Relaxed) >= LET_IN)
    }
}

/// Starts a server that answers each probe; returns its address and the probes' times.
async fn probed() -> (SocketAddr, Arc<Mutex<Vec<Instant>>>) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    let times = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&times);
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            seen.lock().unwrap().push(Instant::now());
            let mut head = [0; 1024];
            let _ = stream.read(&mut head).await;
            let _ =
                stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n").await;
        }
    });
    (address, times)
}

/// Starts a streaming server that accepts every upgrade and then stays silent.
async fn streaming() -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        let mut open = Vec::new();
        while let Ok((mut stream, _)) = listener.accept().await {
            let agreed =
                "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\r\n";
            let _ = stream.write_all(agreed.as_bytes()).await;
            open.push(stream);
        }
    });
    address
}

/// Polls until the condition is true.
async fn until(what: &str, condition: impl Fn() -> bool) {
    let polling = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    timeout(PATIENCE * 4, polling).await.unwrap_or_else(|_| panic!("waited for {what}"));
}

async fn ask(crowd: &Crowd, path: &str) -> std::io::Result<String> {
    let plain = TcpStream::connect(crowd.address).await?;
    let name = ServerName::try_from(NODE).map_err(std::io::Error::other)?;
    let mut stream: TlsStream<TcpStream> = crowd.connector.connect(name, plain).await?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: n\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut answer = Vec::new();
    // An answer without a TLS close_notify is valid.
    let _ = stream.read_to_end(&mut answer).await;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

#[test]
fn a_crowd_at_the_kubelets_port_delays_no_probe_and_stays_within_its_memory_bound() {
    require!(root);
    let most = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: most, maximum: most }).unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let (probes, times) = runtime.block_on(probed());
    let [port] = ports::free().unwrap();
    let scene = Scene::start(|_, options| {
        let anonymous = json!({ "anonymous": { "enabled": true } });
        let options = options.kubelet("address", "127.0.0.1").kubelet("port", port);
        options
            .kubelet("authentication", anonymous)
            .kubelet("authorization", json!({ "mode": "AlwaysAllow" }))
    });
    let url = format!("http://{}", runtime.block_on(streaming()));
    scene.cri.change(|world| world.streaming = Some(url));
    let mut web = manifests::pod("web", &["/bin/testapp"]);
    web["spec"]["containers"][0]["livenessProbe"] = json!({
        "httpGet": { "host": "127.0.0.1", "port": probes.port() },
        "periodSeconds": 1, "timeoutSeconds": 5, "failureThreshold": 1,
    });
    scene.apply(&web);
    scene.until_ready("web");
    let count = || times.lock().unwrap().len();
    runtime.block_on(until("the first probes", || count() > 2));

    let pid = scene.agent.pid().unwrap();
    let before = machine::resident_kib(pid).unwrap();
    let mut roots = RootCertStore::empty();
    roots.add(certificate(&scene.path("kubelet/pki/kubelet.crt"))).unwrap();
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let crowd = Arc::new(Crowd {
        address,
        connector: connector(roots, None),
        let_in: std::array::from_fn(|_| AtomicUsize::new(0)),
    });
    let clients: Vec<_> =
        KINDS.iter().cycle().take(CROWD).map(|kind| runtime.spawn(Arc::clone(&crowd).run(*kind))).collect();
    runtime.block_on(until("accepted clients of each kind", || crowd.all_kinds_are_in()));
    let first = count();
    runtime.block_on(until("probes during the crowd", || count() >= first + PROBES));

    let times = times.lock().unwrap()[first - 1..].to_vec();
    let longest = times.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap();
    let grown = machine::peak_kib(pid).unwrap().saturating_sub(before);
    let let_in: Vec<String> = KINDS
        .iter()
        .map(|kind| format!("{kind:?} {}", crowd.let_in[*kind as usize].load(Ordering::Relaxed)))
        .collect();
    println!(
        "{CROWD} clients, accepted so far: {}; longest pause between two probes of 1 s: {} ms; memory {before} KiB, \
         at most {grown} KiB more",
        let_in.join(", "),
        longest.as_millis(),
    );
    // No probe failed: one failure would have restarted the container.
    let pod = scene.until_ready("web");
    assert_eq!(pod.restarts(), 0);
    assert!(longest < PAUSE, "no probe arrived for {longest:?}");
    assert!(grown <= MEMORY_KIB, "{grown} KiB more than before, {MEMORY_KIB} KiB allowed");
    // After the crowd has disconnected, the server serves other clients.
    clients.iter().for_each(tokio::task::JoinHandle::abort);
    let answer = runtime.block_on(async { timeout(PATIENCE, ask(&crowd, "/healthz/ping")).await });
    let answer = answer.unwrap().unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 ") && answer.ends_with("ok"), "{answer}");
    scene.is_well();
}
