//! The HTTPS server of a node, with real TLS clients: their authorization, and the answers.

#![allow(clippy::unwrap_used, clippy::panic)] // a failure in a helper fails the test

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use beelet_config::{Config, Server, TlsVersion};
use beelet_kubelet_api::auth::Reviewers;
use beelet_model::review::{AccessReviewer, Review, ReviewError, TokenReviewer, User};
use beelet_policy::node::access::Access;
use beelet_tests::apiserver::Authority;
use beelet_tests::cri::{Op, PATIENCE};
use beelet_tests::ports;
use rcgen::{CertificateParams, DnType, KeyPair};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use super::pods::node::{Node, Settings, pod};

/// Returns a client's certificate and key from `authority`; an expired one was valid years ago.
fn client(authority: &Authority, user: &str, group: &str, expired: bool) -> Identity {
    let mut params = CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, user);
    params.distinguished_name.push(DnType::OrganizationName, group);
    if expired {
        params.not_after = rcgen::date_time_ymd(2020, 1, 1);
    }
    let (certificate, key) = authority.issue(&params).unwrap();
    Identity {
        certificate: CertificateDer::from_pem_slice(certificate.as_bytes()).unwrap(),
        key: PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap(),
    }
}

pub(crate) struct Identity {
    certificate: CertificateDer<'static>,
    key: PrivateKeyDer<'static>,
}

/// Answers of the API server: `jane` has a valid token and may read metrics, and administrators may do
/// everything.
struct Api;

impl TokenReviewer for Api {
    fn review<'a>(&'a self, token: &'a str) -> Review<'a, Option<User>> {
        Box::pin(async move {
            match token {
                "jane" => Ok(Some(User { name: "jane".to_owned(), ..User::default() })),
                "away" => Err(ReviewError("the API server is away".to_owned())),
                _ => Ok(None),
            }
        })
    }
}

impl AccessReviewer for Api {
    fn review<'a>(&'a self, user: &'a User, access: Access) -> Review<'a, bool> {
        let admin = user.groups.iter().any(|group| group == "system:masters");
        let reads = user.name == "jane" && access.verb == "get" && access.subresource == "metrics";
        Box::pin(async move { Ok(admin || reads) })
    }
}

/// A node with a server, and its clients.
pub(crate) struct Scene {
    pub(crate) node: Node,
    authority: Authority,
    address: SocketAddr,
    roots: RootCertStore,
}

impl Scene {
    /// Starts a node with these pods, whose server `change` configures.
    pub(crate) async fn with(pods: &[Value], change: impl FnOnce(&mut Server)) -> Self {
        let mut node = Node::new(Settings::default());
        let authority = Authority::new("clients").unwrap();
        let ca = node.path("clients.crt");
        std::fs::write(&ca, authority.pem()).unwrap();
        let address = free_address();
        let (config, _) = Config::with_defaults().unwrap();
        let mut server = Server {
            address: address.ip(),
            port: Some(address.port()),
            client_ca_file: Some(ca),
            ..config.server
        };
        change(&mut server);
        node.server = Some((server, Reviewers { tokens: Some(Arc::new(Api)), access: Some(Arc::new(Api)) }));
        pods.iter().for_each(|pod| node.apply(pod));
        node.start().await;
        let mut roots = RootCertStore::empty();
        roots.add(certificate(&node.path("kubelet/pki/kubelet.crt"))).unwrap();
        Self { node, authority, address, roots }
    }

    pub(crate) fn admin(&self) -> Client<'_> {
        Client {
            scene: self,
            identity: Some(client(&self.authority, "root", "system:masters", false)),
            token: None,
        }
    }

    fn nobody(&self) -> Client<'_> {
        Client { scene: self, identity: None, token: None }
    }
}

/// A client of the server.
pub(crate) struct Client<'a> {
    scene: &'a Scene,
    identity: Option<Identity>,
    token: Option<&'static str>,
}

/// An answer, read to its end.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
}

impl Answer {
    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }
}

impl Client<'_> {
    fn with_token(self, token: &'static str) -> Self {
        Self { token: Some(token), ..self }
    }

    /// Opens a TLS connection.
    pub(crate) async fn connect(&self) -> std::io::Result<TlsStream<TcpStream>> {
        let connector = connector(self.scene.roots.clone(), self.identity.as_ref());
        let stream = TcpStream::connect(self.scene.address).await?;
        connector.connect(ServerName::try_from("n1").unwrap(), stream).await
    }

    /// Sends the head of a request, with these headers.
    pub(crate) async fn send(&self, method: &str, path: &str, headers: &str) -> TlsStream<TcpStream> {
        let mut stream = self.connect().await.unwrap();
        let token = self.token.map(|token| format!("Authorization: Bearer {token}\r\n")).unwrap_or_default();
        let request = format!("{method} {path} HTTP/1.1\r\nHost: n1\r\n{token}{headers}\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        stream
    }

    /// Requests a page.
    pub(crate) async fn ask(&self, method: &str, path: &str) -> Answer {
        let mut stream = self.send(method, path, "Connection: close\r\n").await;
        let mut bytes = Vec::new();
        // A connection that ends without TLS's close message has still sent everything.
        let _ = timeout(PATIENCE, stream.read_to_end(&mut bytes)).await.unwrap();
        answer(&bytes)
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        self.ask("GET", path).await
    }
}

fn answer(bytes: &[u8]) -> Answer {
    let end = bytes.windows(4).position(|window| window == b"\r\n\r\n");
    let end = end.unwrap_or_else(|| panic!("no answer: {:?}", String::from_utf8_lossy(bytes)));
    let head = String::from_utf8_lossy(&bytes[..end]).to_lowercase();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    let rest = &bytes[end + 4..];
    let body = if head.contains("transfer-encoding: chunked") { dechunk(rest) } else { rest.to_vec() };
    Answer { status, head, body }
}

/// Decodes a chunked body (RFC 9112 section 7.1).
fn dechunk(mut rest: &[u8]) -> Vec<u8> {
    let mut content = Vec::new();
    while let Some(end) = rest.windows(2).position(|window| window == b"\r\n") {
        let size = usize::from_str_radix(std::str::from_utf8(&rest[..end]).unwrap().trim(), 16).unwrap();
        if size == 0 {
            break;
        }
        content.extend_from_slice(&rest[end + 2..end + 2 + size]);
        rest = &rest[end + 4 + size..];
    }
    content
}

/// Returns a connector for servers whose certificate is among these, with the client's own certificate if it
/// has one.
pub(crate) fn connector(roots: RootCertStore, identity: Option<&Identity>) -> TlsConnector {
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots);
    let config = match identity {
        None => builder.with_no_client_auth(),
        Some(identity) => builder
            .with_client_auth_cert(vec![identity.certificate.clone()], identity.key.clone_key())
            .unwrap(),
    };
    TlsConnector::from(Arc::new(config))
}

pub(crate) fn certificate(path: &Path) -> CertificateDer<'static> {
    CertificateDer::from_pem_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// Returns a free port of this machine.
fn free_address() -> SocketAddr {
    let [port] = ports::free().unwrap();
    (Ipv4Addr::LOCALHOST, port).into()
}

#[tokio::test]
async fn every_page_requires_authentication_and_authorization() {
    let scene = Scene::with(&[], |_| {}).await;
    let other = Authority::new("others").unwrap();
    let identified = |identity| Client { identity: Some(identity), ..scene.nobody() };
    let admin = scene.admin();
    let clients = [
        ("nobody", scene.nobody(), 401, 401),
        ("a wrong token", scene.nobody().with_token("john"), 401, 401),
        ("a token while the API server is away", scene.nobody().with_token("away"), 401, 401),
        ("another authority's", identified(client(&other, "root", "system:masters", false)), 401, 401),
        ("an expired one", identified(client(&scene.authority, "root", "system:masters", true)), 401, 401),
        ("no rights", identified(client(&scene.authority, "eve", "people", false)), 403, 403),
        ("jane", scene.nobody().with_token("jane"), 200, 403),
        (
            "jane with a wrong certificate",
            identified(client(&other, "root", "x", false)).with_token("jane"),
            200,
            403,
        ),
        ("an administrator", admin, 200, 200),
    ];
    for (who, client, numbers, others) in clients {
        for (path, expected) in [
            ("/metrics", numbers),
            ("/metrics/cadvisor", numbers),
            ("/metrics/probes", numbers),
            ("/metrics/resource", numbers),
            ("/pods", others),
            ("/healthz/ping", others),
            ("/stats/summary", others),
        ] {
            let answer = client.get(path).await;
            assert_eq!(answer.status, expected, "{who}, {path}: {answer:?}");
        }
        let unknown = client.get("/nothing").await.status;
        assert_eq!(unknown, if others == 200 { 404 } else { others }, "{who}");
    }
}

/// The test repeats the request of metrics-server 0.9's Go client, header by header
/// (pkg/scraper/client/resource/client.go: the path, no `Accept`, gzip offered by the transport), and checks
/// for the values that its decoder needs (decode.go).
#[tokio::test]
async fn metrics_servers_own_request_is_answered_as_its_decoder_needs_it() {
    let scene = Scene::with(&[pod("web")], |_| {}).await;
    scene.node.until_ready("web").await;
    let go =
        "User-Agent: metrics-server/v0.9.0 (linux/amd64) kubernetes/5ed5d3a\r\nAccept-Encoding: gzip\r\n";
    let client = scene.nobody().with_token("jane");
    let mut stream = client.send("GET", "/metrics/resource", &format!("{go}Connection: close\r\n")).await;
    let mut bytes = Vec::new();
    let _ = timeout(PATIENCE, stream.read_to_end(&mut bytes)).await.unwrap();
    let page = answer(&bytes);
    assert_eq!(page.status, 200, "{page:?}");
    // metrics-server parses the text format independent of the header, and would decompress compressed
    // content.
    assert!(page.head.contains("content-type: text/plain; version=0.0.4"), "{}", page.head);
    assert!(!page.head.contains("content-encoding"), "{}", page.head);
    for family in ["node_cpu_usage_seconds_total", "node_memory_working_set_bytes"] {
        let sample = page.text().lines().find(|line| line.starts_with(&format!("{family} ")));
        let words: Vec<&str> = sample.unwrap_or_else(|| panic!("{family}: {page:?}")).split(' ').collect();
        let [_, value, at] = words[..] else { panic!("{words:?}") };
        // metrics-server leaves out a node whose values are 0.
        assert!(value.parse::<f64>().unwrap() > 0.0 && at.parse::<i64>().unwrap() > 0, "{words:?}");
    }
}

#[tokio::test]
async fn anonymous_clients_are_admitted_only_if_configured() {
    let scene = Scene::with(&[pod("web")], |server| {
        server.anonymous = true;
        server.authorization = beelet_config::Authorization::AlwaysAllow;
    })
    .await;
    scene.node.until_ready("web").await;
    let pods: Value = serde_json::from_slice(&scene.nobody().get("/pods").await.body).unwrap();
    assert_eq!(pods["items"][0]["metadata"]["name"], "web-n1");
    assert_eq!(scene.nobody().with_token("john").get("/pods").await.status, 401);
    let metrics = scene.nobody().get("/metrics").await;
    let counted = "kubelet_http_requests_total{long_running=\"false\",method=\"GET\",path=\"pods\",server_type=\"readwrite\"} 2";
    assert!(metrics.text().contains(counted), "{}", metrics.text());
}

#[tokio::test]
async fn a_replaced_certificate_is_served() {
    let files: [PathBuf; 2] = {
        let folder = tempfile::tempdir().unwrap().keep();
        [folder.join("server.crt"), folder.join("server.key")]
    };
    let write = |name: &str| {
        let key = KeyPair::generate().unwrap();
        let certificate = CertificateParams::new(vec![name.to_owned()]).unwrap().self_signed(&key).unwrap();
        std::fs::write(&files[1], key.serialize_pem()).unwrap();
        std::fs::write(&files[0], certificate.pem()).unwrap();
        certificate.der().clone()
    };
    let first = write("n1");
    let mut node = Node::new(Settings::default());
    let (config, _) = Config::with_defaults().unwrap();
    let address = free_address();
    let server = Server {
        address: address.ip(),
        port: Some(address.port()),
        tls_files: Some(beelet_config::TlsFiles { certificate: files[0].clone(), key: files[1].clone() }),
        min_version: TlsVersion::Tls13,
        ..config.server
    };
    node.server = Some((server, Reviewers { tokens: None, access: Some(Arc::new(Api)) }));
    node.start().await;
    let shown = async || {
        let mut roots = RootCertStore::empty();
        roots.add(certificate(&files[0])).unwrap();
        let stream = TcpStream::connect(address).await.unwrap();
        let name = ServerName::try_from("n1").unwrap();
        let tls = connector(roots, None).connect(name, stream).await.ok()?;
        Some(tls.get_ref().1.peer_certificates()?.first()?.clone().into_owned())
    };
    assert_eq!(shown().await, Some(first));
    let second = write("n1");
    // Files are checked again at most once per second.
    let replaced = async {
        while shown().await.as_ref() != Some(&second) {
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
    };
    timeout(PATIENCE, replaced).await.unwrap();
    std::fs::remove_dir_all(files[0].parent().unwrap()).unwrap();
}

#[tokio::test]
async fn a_client_that_sends_a_head_without_end_is_cut_off() {
    let scene = Scene::with(&[], |_| {}).await;
    let mut stream = scene.nobody().send("GET", "/metrics", "").await;
    let line = format!("X-Long: {}\r\n", "x".repeat(8000));
    let sending = async {
        // A complete head would have ended long before.
        for _ in 0..10_000 {
            if stream.write_all(line.as_bytes()).await.is_err() {
                return true;
            }
        }
        false
    };
    assert!(timeout(PATIENCE, sending).await.unwrap());
    assert_eq!(scene.admin().get("/healthz/ping").await.text(), "ok");
}

/// Starts a streaming server: for each connection, it reports the request, accepts the upgrade, and echoes
/// the input until its end; then it sends goodbye.
async fn streaming() -> (String, tokio::sync::mpsc::UnboundedReceiver<String>) {
    let listener = tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let (asked, heads) = tokio::sync::mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let asked = asked.clone();
            tokio::spawn(async move {
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    head.push(stream.read_u8().await.unwrap());
                }
                asked.send(String::from_utf8(head).unwrap().to_lowercase()).unwrap();
                let agreed =
                    "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\r\n";
                stream.write_all(agreed.as_bytes()).await.unwrap();
                let (mut from, mut to) = stream.split();
                tokio::io::copy(&mut from, &mut to).await.unwrap();
                to.write_all(b"goodbye").await.unwrap();
            });
        }
    });
    (url, heads)
}

const SPDY: &str =
    "Connection: Upgrade\r\nUpgrade: SPDY/3.1\r\nX-Stream-Protocol-Version: v4.channel.k8s.io\r\n";

/// Reads an answer's head, and no further byte.
async fn head(stream: &mut TlsStream<TcpStream>) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(timeout(PATIENCE, stream.read_u8()).await.unwrap().unwrap());
    }
    String::from_utf8(head).unwrap()
}

#[tokio::test]
async fn streams_are_passed_through_byte_by_byte_with_half_closed_sides() {
    let scene = Scene::with(&[pod("web")], |_| {}).await;
    scene.node.until_ready("web").await;
    let (url, mut asked) = streaming().await;
    scene.node.cri.change(|world| world.streaming = Some(url));
    let admin = scene.admin();
    for (path, expected) in [
        ("/exec/default/web-n1/main?command=cat&input=1&output=1", "post /exec/token http/1.1"),
        ("/attach/default/web-n1/main?output=1", "post /attach/token http/1.1"),
        ("/portForward/default/web-n1", "post /portforward/token http/1.1"),
    ] {
        let headers = format!("{SPDY}Cookie: secret\r\n");
        let mut stream = admin.send("POST", path, &headers).await;
        let answered = head(&mut stream).await;
        assert!(answered.starts_with("HTTP/1.1 101 "), "{path}: {answered}");
        assert!(answered.to_lowercase().contains("upgrade: spdy/3.1"), "{answered}");
        let request = asked.recv().await.unwrap();
        assert!(request.starts_with(expected), "{request}");
        assert!(request.contains("x-stream-protocol-version: v4.channel.k8s.io"), "{request}");
        assert!(!request.contains("cookie"), "{request}");
        let (mut from, mut to) = tokio::io::split(stream);
        let large = vec![b'x'; 8 << 20];
        let sent = large.clone();
        let sending = tokio::spawn(async move {
            to.write_all(&sent).await.unwrap();
            // The other direction stays open.
            to.shutdown().await.unwrap();
            to
        });
        let mut received = Vec::new();
        let _ = timeout(PATIENCE, from.read_to_end(&mut received)).await.unwrap();
        sending.await.unwrap();
        assert!(
            received.ends_with(b"goodbye") && received.len() == large.len() + 7,
            "{path}: {}",
            received.len()
        );
    }
}

#[tokio::test]
async fn a_stream_needs_an_upgrade_a_container_that_runs_and_the_right_to_run_commands() {
    let scene = Scene::with(&[pod("web")], |_| {}).await;
    scene.node.until_ready("web").await;
    let admin = scene.admin();
    assert_eq!(
        admin.get("/exec/default/web-n1/main?command=cat&output=1").await.text(),
        "Upgrade request required"
    );
    let check = async |client: &Client<'_>, path: &str, expected: u16| {
        let mut stream = client.send("GET", path, SPDY).await;
        let answered = head(&mut stream).await;
        assert!(answered.starts_with(&format!("HTTP/1.1 {expected} ")), "{path}: {answered}");
    };
    check(&admin, "/exec/default/web-n1/main?command=cat", 400).await;
    check(&admin, "/exec/default/web-n1/none?command=cat&output=1", 404).await;
    check(&admin, "/exec/default/none/main?command=cat&output=1", 404).await;
    check(&admin, "/exec/default/web-n1/other-uid/main?command=cat&output=1", 404).await;
    // The fake runtime has no streams.
    check(&admin, "/exec/default/web-n1/main?command=cat&output=1", 404).await;
    // The right to read metrics does not include commands, also by a GET.
    check(&scene.nobody().with_token("jane"), "/exec/default/web-n1/main?command=cat&output=1", 403).await;
}

#[tokio::test]
async fn a_stream_ends_when_it_is_silent_for_too_long() {
    let scene = Scene::with(&[pod("web")], |server| {
        server.stream_idle_timeout = std::time::Duration::from_millis(300);
    })
    .await;
    scene.node.until_ready("web").await;
    let (url, _asked) = streaming().await;
    scene.node.cri.change(|world| world.streaming = Some(url));
    let mut stream = scene.admin().send("POST", "/attach/default/web-n1/main?output=1", SPDY).await;
    head(&mut stream).await;
    let mut rest = Vec::new();
    let _ = timeout(PATIENCE, stream.read_to_end(&mut rest)).await.unwrap();
    assert_eq!(rest, b"");
}

/// Writes the log of the only pod's container `main`, as the runtime does. Returns the path.
fn write_log(scene: &Scene, text: &str) -> PathBuf {
    let table = scene.node.table();
    let (name, entry) = table.pods.get_min().unwrap();
    let uid = entry.pod.metadata.uid.clone().unwrap();
    let folder = beelet_model::pod::log_folder(&scene.node.path("logs"), name, &uid).join("main");
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("0.log");
    std::fs::write(&path, text).unwrap();
    path
}

#[tokio::test]
async fn logs_are_shown_as_a_client_asks_for_them_and_followed_to_the_containers_end() {
    let scene = Scene::with(&[pod("web")], |_| {}).await;
    scene.node.until_ready("web").await;
    let line = |second: u32, stream: &str, tag: &str, text: &str| {
        format!("2026-11-21T19:00:{second:02}.5Z {stream} {tag} {text}\n")
    };
    let all = [
        line(1, "stdout", "F", "one"),
        line(2, "stderr", "F", "two"),
        line(3, "stdout", "P", "thr"),
        line(3, "stdout", "F", "ee"),
    ];
    let log = write_log(&scene, &all.concat());
    let admin = scene.admin();
    let check = async |query: &str, expected: &str| {
        let answer = admin.get(&format!("/containerLogs/default/web-n1/main{query}")).await;
        assert_eq!((answer.status, answer.text()), (200, expected), "{query}: {}", answer.head);
    };
    check("", "one\ntwo\nthree\n").await;
    check("?tailLines=3", "two\nthree\n").await;
    check("?limitBytes=6", "one\ntw").await;
    check("?stream=Stderr", "two\n").await;
    check("?sinceTime=2026-11-21T19:00:02Z", "two\nthree\n").await;
    let timed = "2026-11-21T19:00:03.500000000Z three\n";
    check("?timestamps=true&tailLines=2", timed).await;
    for (path, status, part) in [
        ("/containerLogs/default/none/main", 404, "pod \"none\" does not exist"),
        ("/containerLogs/default/web-n1/none", 404, "container \"none\" not found in pod \"web-n1\""),
        ("/containerLogs/default/web-n1/main?previous=true", 400, "previous terminated container"),
        ("/containerLogs/default/web-n1/main?tailLines=x", 400, "Unable to decode query."),
        ("/containerLogs/default/web-n1/main?tailLines=-1", 422, "Invalid request."),
    ] {
        let answer = admin.get(path).await;
        assert_eq!(answer.status, status, "{path}: {answer:?}");
        assert!(answer.text().contains(part), "{path}: {answer:?}");
    }
    let path = "/containerLogs/default/web-n1/main?follow=true&tailLines=1";
    let mut following = admin.send("GET", path, "Connection: close\r\n").await;
    head(&mut following).await;
    let mut seen = Vec::new();
    // Later lines were not in the log when the request began to read.
    while !seen.ends_with(b"ee\n\r\n") {
        seen.push(timeout(PATIENCE, following.read_u8()).await.unwrap().unwrap());
    }
    let mut file = std::fs::OpenOptions::new().append(true).open(log).unwrap();
    std::io::Write::write_all(&mut file, line(4, "stdout", "F", "four").as_bytes()).unwrap();
    while !seen.ends_with(b"four\n\r\n") {
        seen.push(timeout(PATIENCE, following.read_u8()).await.unwrap().unwrap());
    }
    let id = scene.node.cri.world().container("web-n1", "main").unwrap().id.clone();
    scene.node.cri.exit(&id, 0);
    let _ = timeout(PATIENCE, following.read_to_end(&mut seen)).await.unwrap();
    assert_eq!(dechunk(&seen), b"ee\nfour\n");
}

#[tokio::test]
async fn the_end_of_a_log_never_comes_together_with_its_last_lines() {
    let scene = Scene::with(&[pod("web")], |_| {}).await;
    scene.node.until_ready("web").await;
    let admin = scene.admin();
    for lines in [1, 20_000] {
        let text: String = (0..lines).map(|number| format!("line {number}\n")).collect();
        let log: String =
            text.lines().map(|line| format!("2026-11-21T19:00:00.5Z stdout F {line}\n")).collect();
        write_log(&scene, &log);
        // A race shows both outcomes within a few rounds.
        for _ in 0..20 {
            let path = "/containerLogs/default/web-n1/main";
            let mut stream = admin.send("GET", path, "Connection: close\r\n").await;
            // Each read returns one TLS record, as Go's TLS passes them to readers.
            let mut records = Vec::new();
            // A connection that ends without TLS's close message has still sent everything.
            while let Ok(record @ [_, ..]) = timeout(PATIENCE, stream.fill_buf()).await.unwrap() {
                let record = record.to_vec();
                stream.consume(record.len());
                records.push(record);
            }
            assert_eq!(records.last().map(Vec::as_slice), Some(&b"0\r\n\r\n"[..]));
            assert_eq!(answer(&records.concat()).text(), text);
        }
    }
}

#[tokio::test]
async fn pages_show_the_effective_configuration_and_running_pods() {
    let scene = Scene::with(&[pod("web")], |_| {}).await;
    scene.node.until_ready("web").await;
    let admin = scene.admin();
    let configz: Value = serde_json::from_slice(&admin.get("/configz").await.body).unwrap();
    let config = &configz["kubeletconfig"];
    assert_eq!(config["kind"], "KubeletConfiguration");
    assert_eq!(config["authentication"]["anonymous"]["enabled"], false);
    assert_eq!(config["containerLogMaxFiles"], 5);
    assert_eq!(config["streamingConnectionIdleTimeout"], "4h0m0s");
    let running: Value = serde_json::from_slice(&admin.get("/runningpods/").await.body).unwrap();
    assert_eq!(running["items"][0]["metadata"]["name"], "web-n1");
    let ran = admin.ask("POST", "/run/default/web-n1/main?cmd=true").await;
    assert_eq!((ran.status, ran.text()), (200, ""));
    // The fake runtime has no checkpoints.
    let failed = admin.ask("POST", "/checkpoint/default/web-n1/main").await;
    assert_eq!(failed.status, 500);
    let start = "checkpointing of default/web-n1/main failed (rpc error: code = Unimplemented desc = ";
    assert!(failed.text().contains(start), "{}", failed.text());
}

#[tokio::test]
async fn disabled_endpoints_are_not_allowed() {
    let scene = Scene::with(&[], |server| server.debugging_handlers = false).await;
    let admin = scene.admin();
    for path in
        ["/exec/default/web-n1/main", "/run/default/web-n1/main", "/containerLogs/a/b/c", "/logs/syslog"]
    {
        assert_eq!(admin.get(path).await.status, 405, "{path}");
    }
    assert_eq!(admin.get("/pods").await.status, 200);
}

/// Endpoints of the server, except for those that differ only by a method or a name.
const ENDPOINTS: &[(&str, &str)] = &[
    ("GET", "/"),
    ("GET", "/healthz"),
    ("GET", "/healthz/ping"),
    ("GET", "/healthz/log"),
    ("GET", "/healthz/syncloop"),
    ("GET", "/pods"),
    ("GET", "/runningpods/"),
    ("GET", "/metrics"),
    ("GET", "/metrics/cadvisor"),
    ("GET", "/metrics/resource"),
    ("GET", "/metrics/probes"),
    ("GET", "/metrics/slis"),
    ("GET", "/stats/summary"),
    ("GET", "/configz"),
    ("GET", "/logs/"),
    ("GET", "/logs/syslog"),
    ("PUT", "/debug/flags/v"),
    ("GET", "/containerLogs/default/web-n1/main"),
    ("POST", "/exec/default/web-n1/main?command=true&output=1"),
    ("GET", "/exec/default/web-n1/main?command=true&output=1"),
    ("POST", "/attach/default/web-n1/main?output=1"),
    ("GET", "/attach/default/web-n1/main?output=1"),
    ("POST", "/portForward/default/web-n1"),
    ("GET", "/portForward/default/web-n1"),
    ("POST", "/run/default/web-n1/main?cmd=true"),
    ("GET", "/run/default/web-n1/main?cmd=true"),
    ("POST", "/checkpoint/default/web-n1/main"),
    ("GET", "/nothing"),
    ("DELETE", "/pods"),
];

#[tokio::test]
async fn every_endpoint_refuses_unauthorized_clients() {
    let scene = Scene::with(&[pod("web")], |_| {}).await;
    scene.node.until_ready("web").await;
    let other = Authority::new("others").unwrap();
    let identified = |identity| Client { identity: Some(identity), ..scene.nobody() };
    let clients = [
        ("without a certificate", scene.nobody(), 401),
        ("with one of another authority", identified(client(&other, "root", "system:masters", false)), 401),
        (
            "with one that has expired",
            identified(client(&scene.authority, "root", "system:masters", true)),
            401,
        ),
        ("with a token that is nobody's", scene.nobody().with_token("john"), 401),
        ("of the wrong group", identified(client(&scene.authority, "root", "system:master", false)), 403),
        (
            "that is a node",
            identified(client(&scene.authority, "system:node:n2", "system:nodes", false)),
            403,
        ),
    ];
    for (method, path) in ENDPOINTS {
        for (who, client, expected) in &clients {
            for headers in ["", SPDY] {
                let mut stream = client.send(method, path, headers).await;
                let answered = head(&mut stream).await;
                let status = format!("HTTP/1.1 {expected} ");
                assert!(answered.starts_with(&status), "{method} {path} by a client {who}: {answered}");
            }
        }
        // The right to read metrics includes nothing else.
        let expected = if path.starts_with("/metrics") { 200 } else { 403 };
        let answer = scene.nobody().with_token("jane").ask(method, path).await;
        assert_eq!(answer.status, expected, "{method} {path}: {answer:?}");
    }
    for call in [Op::Exec, Op::ExecSync, Op::Attach, Op::PortForward, Op::CheckpointContainer] {
        assert_eq!(scene.node.cri.count(call), 0, "the runtime was asked for {call:?}");
    }
}

#[tokio::test]
async fn keys_are_created_in_the_configured_folder() {
    let folder = tempfile::tempdir().unwrap();
    let mut node = Node::new(Settings::default());
    let (config, _) = Config::with_defaults().unwrap();
    let address = free_address();
    let server = Server {
        address: address.ip(),
        port: Some(address.port()),
        cert_dir: Some(folder.path().join("own")),
        ..config.server
    };
    node.server = Some((server, Reviewers { tokens: None, access: Some(Arc::new(Api)) }));
    node.start().await;
    for file in ["own/kubelet.crt", "own/kubelet.key"] {
        assert!(folder.path().join(file).is_file(), "{file}");
    }
    assert!(!node.path("kubelet/pki").exists());
}

#[tokio::test]
async fn only_a_number_sets_the_log_level() {
    let scene = Scene::with(&[], |_| {}).await;
    let admin = scene.admin();
    let put = async |body: &str| {
        let length = format!("Connection: close\r\nContent-Length: {}\r\n", body.len());
        let mut stream = admin.send("PUT", "/debug/flags/v", &length).await;
        stream.write_all(body.as_bytes()).await.unwrap();
        let mut bytes = Vec::new();
        let _ = timeout(PATIENCE, stream.read_to_end(&mut bytes)).await.unwrap();
        answer(&bytes)
    };
    // A test's log level can't be set; a word is refused before that.
    assert_eq!(put("4").await.status, 400);
    assert!(put("debug").await.text().contains("not a whole number"));
    assert_eq!(put(&"4".repeat(1000)).await.status, 400);
    assert_eq!(admin.get("/debug/flags/v").await.status, 406);
    assert_eq!(admin.get("/debug/pprof/").await.status, 404);
}

/// Sends a request on a connection that stays open.
async fn ping(stream: &mut TlsStream<TcpStream>) -> String {
    stream.write_all(b"GET /healthz/ping HTTP/1.1\r\nHost: n1\r\n\r\n").await.unwrap();
    let answered = timeout(PATIENCE, head(stream)).await.unwrap();
    assert!(answered.starts_with("HTTP/1.1 200"), "{answered}");
    let mut body = [0; 2];
    stream.read_exact(&mut body).await.unwrap();
    String::from_utf8(body.to_vec()).unwrap()
}

#[tokio::test]
async fn refused_clients_lock_no_other_client_out() {
    let scene = Scene::with(&[], |_| {}).await;
    let mut kept = scene.admin().connect().await.unwrap();
    assert_eq!(ping(&mut kept).await, "ok");
    // As many clients as the server's limit for known ones; each has sent one request, which was refused.
    let (nobody, mut refused) = (scene.nobody(), Vec::new());
    for number in 0..1024 {
        let mut stream = timeout(PATIENCE, nobody.send("HEAD", "/healthz", "")).await.unwrap();
        let answered = timeout(PATIENCE, head(&mut stream)).await.unwrap().to_lowercase();
        assert!(answered.starts_with("http/1.1 401"), "{number}: {answered}");
        assert!(answered.contains("connection: close"), "{answered}");
        refused.push(stream);
        // The admin's connection is used at times, as an idle one would be closed.
        if number % 64 == 0 {
            assert_eq!(ping(&mut kept).await, "ok");
        }
    }
    let admin = scene.admin();
    let answer = timeout(PATIENCE, admin.get("/healthz/ping")).await.unwrap();
    assert_eq!(answer.text(), "ok");
    let mut rest = Vec::new();
    let _ = timeout(PATIENCE, refused[1023].read_to_end(&mut rest)).await.unwrap();
    // A second request finds the connection closed.
    let mut asked_again = refused.swap_remove(0);
    let _ = asked_again.write_all(b"HEAD /healthz HTTP/1.1\r\nHost: n1\r\n\r\n").await;
    let _ = timeout(PATIENCE, asked_again.read_to_end(&mut rest)).await.unwrap();
    assert!(rest.is_empty(), "{rest:?}");
    // Clients that send no request after the handshake don't block others either.
    let mut silent = Vec::new();
    for _ in 0..300 {
        silent.push(timeout(PATIENCE, nobody.connect()).await.unwrap().unwrap());
    }
    assert_eq!(timeout(PATIENCE, admin.get("/healthz/ping")).await.unwrap().text(), "ok");
    assert_eq!(ping(&mut kept).await, "ok");
    // A known client is admitted, and gets 403 for a page outside its rights.
    let jane = scene.nobody().with_token("jane");
    let mut stream = jane.send("GET", "/metrics/probes", "").await;
    assert!(head(&mut stream).await.starts_with("HTTP/1.1 200"));
    let forbidden = jane.get("/pods").await;
    assert!(forbidden.status == 403 && forbidden.head.contains("connection: close"), "{forbidden:?}");
}

#[tokio::test]
async fn many_silent_clients_delay_no_other_client() {
    let scene = Scene::with(&[], |_| {}).await;
    // The clients exceed the server's limit: the oldest connections are closed.
    let mut silent = Vec::new();
    for _ in 0..1100 {
        match timeout(PATIENCE, TcpStream::connect(scene.address)).await {
            Ok(Ok(stream)) => silent.push(stream),
            _ => break,
        }
    }
    let answer = timeout(PATIENCE * 2, scene.admin().get("/healthz/ping")).await.unwrap();
    assert_eq!(answer.text(), "ok");
    let ended = async {
        let mut byte = [0];
        silent[0].read(&mut byte).await
    };
    assert!(
        matches!(timeout(PATIENCE, ended).await.unwrap(), Ok(0) | Err(_)),
        "the oldest connection was not closed"
    );
    drop(silent);
}

#[tokio::test]
async fn unused_upgrades_are_bounded_and_do_not_affect_pages() {
    let scene = Scene::with(&[pod("web")], |server| {
        server.stream_idle_timeout = std::time::Duration::from_millis(500);
    })
    .await;
    scene.node.until_ready("web").await;
    let (url, mut asked) = streaming().await;
    scene.node.cri.change(|world| world.streaming = Some(url));
    let admin = scene.admin();
    // Each client asks for a stream, and then neither writes nor reads.
    let mut open = Vec::new();
    for _ in 0..64 {
        open.push(admin.send("POST", "/attach/default/web-n1/main?output=1", SPDY).await);
        asked.recv().await.unwrap();
    }
    assert_eq!(admin.get("/healthz/ping").await.text(), "ok");
    for mut stream in open {
        head(&mut stream).await;
        let mut rest = Vec::new();
        let _ = timeout(PATIENCE, stream.read_to_end(&mut rest)).await.unwrap();
    }
}

#[tokio::test]
async fn a_client_that_never_ends_its_head_is_cut_off() {
    let scene = Scene::with(&[], |_| {}).await;
    let mut stream = scene.admin().connect().await.unwrap();
    stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: n1\r\nX-Slow: ").await.unwrap();
    let mut rest = Vec::new();
    let _ = timeout(PATIENCE, stream.read_to_end(&mut rest)).await.unwrap();
    assert!(!rest.starts_with(b"HTTP/1.1 200"), "{rest:?}");
}

#[tokio::test]
async fn service_logs_accept_only_harmless_names() {
    let scene = Scene::with(&[], |server| server.log_query = true).await;
    let admin = scene.admin();
    for hostile in ["--file", "a%20b", "a%3Breboot", "$(reboot)", "a%0Ab", "%20", "a&query=%2Fb"] {
        let answer = admin.get(&format!("/logs/?query={hostile}")).await;
        assert_eq!(answer.status, 400, "{hostile}: {answer:?}");
    }
    for outside in ["/../etc/hostname", "%2F..%2Fetc%2Fhostname", "../etc/hostname"] {
        let answer = admin.get(&format!("/logs/?query={outside}")).await;
        assert!([403, 404].contains(&answer.status), "{outside}: {answer:?}");
    }
    let answer = admin.get("/logs/?query=beelet-no-such-service").await;
    assert_eq!(answer.status, 404, "{answer:?}");
    assert_eq!(scene.nobody().with_token("jane").get("/logs/?query=sshd").await.status, 403);
}
