//! Streams of the HTTPS server with a real container runtime: commands with their exit codes and large inputs
//! and outputs, and forwarded ports.

#![allow(clippy::unwrap_used)] // a failure in a helper fails the test

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use beelet_cri::stream::{Input, Output, Streams, stream};
use beelet_tests::containerd::Containerd;
use beelet_tests::exec::frame;
use beelet_tests::pods::PodView;
use beelet_tests::workdir::PATIENCE;
use beelet_tests::{images, ports, require};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use crate::node::{Node, on_every_containerd, script};

/// Bytes that pass through a command and back.
const MUCH: usize = 16 << 20;
/// Name of the node in every test here.
const NODE: &str = "testnode";

/// Starts a node whose server authorizes every request. Returns the server's address, too.
fn serving(containerd: Containerd) -> (Node, SocketAddr) {
    let [port] = ports::free().unwrap();
    let node = Node::on(containerd, |options| {
        options
            .kubelet("address", "127.0.0.1")
            .kubelet("port", port)
            .kubelet("authentication", json!({ "anonymous": { "enabled": true } }))
            .kubelet("authorization", json!({ "mode": "AlwaysAllow" }))
    });
    (node, SocketAddr::from((Ipv4Addr::LOCALHOST, port)))
}

/// Connects to the server, whose self-signed certificate is in the agent's folder.
async fn connect(dir: &Path, address: SocketAddr) -> TlsStream<TcpStream> {
    let file = std::fs::read(dir.join("kubelet/pki/kubelet.crt")).unwrap();
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(&file).unwrap()).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let stream = TcpStream::connect(address).await.unwrap();
    let name = ServerName::try_from(NODE).unwrap();
    TlsConnector::from(Arc::new(config)).connect(name, stream).await.unwrap()
}

/// Posts a request without a body. Returns the head and the body of the answer.
async fn post(dir: &Path, address: SocketAddr, path: &str) -> (String, String) {
    let mut socket = connect(dir, address).await;
    let request =
        format!("POST {path} HTTP/1.1\r\nHost: {NODE}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
    socket.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    socket.read_to_end(&mut answer).await.unwrap();
    let answer = String::from_utf8(answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.to_owned(), body.to_owned())
}

/// Opens a plain-HTTP port in front of the server, for the agent's own client of streams, which speaks no
/// TLS.
async fn plain(dir: &Path, address: SocketAddr) -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let front = listener.local_addr().unwrap();
    let dir = dir.to_owned();
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let mut server = connect(&dir, address).await;
            tokio::spawn(async move {
                // The copy passes on the end of each direction.
                let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
            });
        }
    });
    front
}

fn block_on<T>(work: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async { timeout(PATIENCE, work).await.unwrap() })
}

#[test]
fn a_command_reads_and_writes_much_and_its_exit_code_comes_back() {
    require!(containerd);
    on_every_containerd(|containerd| {
        let (node, address) = serving(containerd);
        node.apply(&script("web", "sleep 1000"));
        node.wait("web", "to run", PodView::ready);
        let dir = node.agent.dir().to_owned();
        let (read, code) = block_on(async {
            let front = plain(&dir, address).await;
            let command = "command=sh&command=-c&command=cat%3B%20exit%207";
            let url =
                format!("http://{front}/exec/default/web-{NODE}/main?{command}&input=1&output=1&error=1");
            let (input, inputs) = mpsc::channel(4);
            let (outputs, mut output) = mpsc::channel(4);
            tokio::spawn(async move {
                for _ in 0..MUCH / 16384 {
                    input.send(Input::Stdin(vec![b'x'; 16384])).await.unwrap();
                }
                input.send(Input::StdinClosed).await.unwrap();
                // Dropping the sender early would signal the end a second time.
                input.closed().await;
            });
            let streams = Streams { stdin: true, tty: false };
            let streaming = tokio::spawn(async move { stream(&url, streams, inputs, outputs).await });
            let (mut read, mut code) = (0, None);
            while let Some(output) = output.recv().await {
                match output {
                    Output::Stdout(bytes) => read += bytes.len(),
                    Output::Stderr(bytes) => panic!("{}", String::from_utf8_lossy(&bytes)),
                    Output::Exit(exit) => code = Some(exit),
                }
            }
            streaming.await.unwrap().unwrap();
            (read, code)
        });
        assert_eq!((read, code), (MUCH, Some(7)));
    });
}

#[test]
fn a_forwarded_port_reaches_the_pod_by_websocket() {
    require!(containerd);
    let (node, address) = serving(Containerd::start_for_test().unwrap());
    node.apply(&json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": { "name": "web" },
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "containers": [{
                "name": "main", "image": images::APP, "command": ["/bin/testapp", "serve", "--http", "80"],
                "readinessProbe": { "tcpSocket": { "port": 80 }, "periodSeconds": 1 },
            }],
        },
    }));
    node.wait("web", "to be ready", PodView::ready);
    let dir = node.agent.dir().to_owned();
    let answer = block_on(async {
        let mut socket = connect(&dir, address).await;
        let request = format!(
            "GET /portForward/default/web-{NODE}?port=80 HTTP/1.1\r\nHost: {NODE}\r\nConnection: Upgrade\r\n\
             Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\
             Sec-WebSocket-Protocol: v4.channel.k8s.io\r\n\r\n"
        );
        socket.write_all(request.as_bytes()).await.unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(socket.read_u8().await.unwrap());
        }
        let head = String::from_utf8(head).unwrap();
        assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
        // The data channel is the first one; its port number precedes the data.
        let mut ask = vec![0];
        ask.extend(b"GET / HTTP/1.1\r\nHost: pod\r\nConnection: close\r\n\r\n");
        // A client's frame is binary and masked with zeroes.
        let length = u8::try_from(ask.len()).unwrap();
        let asking = [&[0x82, 0x80 | length, 0, 0, 0, 0][..], &ask].concat();
        socket.write_all(&asking).await.unwrap();
        let (mut data, mut payload) = (Vec::new(), Vec::new());
        while !data.windows(12).any(|window| window == b"HTTP/1.1 200") {
            let kind = frame(&mut socket, &mut payload).await.unwrap();
            assert_eq!(kind, 2, "not a binary frame: {payload:?}");
            if payload.first() == Some(&0) {
                data.extend_from_slice(&payload[1..]);
            }
        }
        data
    });
    assert_eq!(&answer[..2], &[80, 0]);
}

#[test]
fn the_state_of_a_running_container_is_written_into_an_archive_and_it_runs_on() {
    require!(containerd_2, criu);
    let (node, address) = serving(Containerd::start_version_2_for_test().unwrap());
    node.apply(&script("web", "i=0; while sleep 0.1; do i=$((i + 1)); echo $i; done"));
    let before = node.wait("web", "to run", PodView::ready);
    let dir = node.agent.dir().to_owned();
    let ask = format!("/checkpoint/default/web-{NODE}/main?timeout=60");
    let (head, body) = block_on(post(&dir, address, &ask));
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}\n{body}");
    let answer: Value = serde_json::from_str(&body).unwrap();
    let archive = PathBuf::from(answer["items"][0].as_str().unwrap());
    assert_eq!(archive.parent(), Some(&*dir.join("kubelet/checkpoints")));
    let name = archive.file_name().unwrap().to_str().unwrap();
    assert!(name.starts_with(&format!("checkpoint-web-{NODE}_default-main-")), "{name}");
    let mut within = tar::Archive::new(std::fs::File::open(&archive).unwrap());
    let names: Vec<_> =
        within.entries().unwrap().map(|entry| entry.unwrap().path().unwrap().into_owned()).collect();
    for part in ["config.dump", "spec.dump", "checkpoint/inventory.img"] {
        assert!(names.iter().any(|name| name == Path::new(part)), "no {part} among {names:?}");
    }
    let lines = node.log(&before, "main", 0).lines().count();
    node.wait_file(&node.log_path(&before, "main", 0), |log| log.lines().count() > lines);
    let after = node.wait("web", "to be known", PodView::ready);
    let id = |pod: &PodView| pod.container("main").unwrap().container_id.clone();
    assert_eq!((after.restarts(), id(&after)), (0, id(&before)));
}
