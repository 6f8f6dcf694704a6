//! Client that runs commands in containers through a node's own HTTPS server, as the API server does for a
//! WebSocket: used by benches of any node agent.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context as _, Result, bail};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName, pem::PemObject as _};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use crate::containerd::block_on;

/// Channels of `v4.channel.k8s.io`: standard output, and the command's status.
const STDOUT: u8 = 1;
const STATUS: u8 = 3;
/// Opcode of a WebSocket's close frame.
pub const CLOSE: u8 = 8;

/// Server of a node that lets everyone run commands.
#[derive(Clone, Debug)]
pub struct Server {
    /// Address of the server.
    pub address: SocketAddr,
    /// Certificate of the authority that issued the server's.
    pub authority: PathBuf,
}

impl Server {
    /// Runs a command in the container `main` of a pod in the namespace `default` to its end, on a new
    /// connection. Returns the number of bytes of its output.
    ///
    /// # Errors
    /// The server cannot be reached or refuses, or the command fails.
    pub fn run(&self, pod: &str, command: &[&str]) -> Result<u64> {
        block_on(async {
            let mut socket = self.upgrade(pod, command).await?;
            let (mut printed, mut payload) = (0, Vec::new());
            loop {
                let kind = frame(&mut socket, &mut payload).await?;
                match (kind, payload.split_first()) {
                    (CLOSE, _) => bail!("the stream ended without the command's status"),
                    (_, Some((&STDOUT, bytes))) => printed += bytes.len() as u64,
                    // The stream begins with an empty frame per channel.
                    (_, Some((&STATUS, status))) if !status.is_empty() => {
                        let status = String::from_utf8_lossy(status);
                        return if status.contains("Success") { Ok(printed) } else { bail!("{status}") };
                    }
                    _ => {}
                }
            }
        })
    }

    async fn upgrade(&self, pod: &str, command: &[&str]) -> Result<BufReader<TlsStream<TcpStream>>> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(&self.authority).context("the authority's certificate")?)?;
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots)
            .with_no_client_auth();
        let stream = TcpStream::connect(self.address).await.context("cannot connect to the node")?;
        stream.set_nodelay(true)?;
        let name = ServerName::from(self.address.ip());
        let mut socket = TlsConnector::from(Arc::new(config)).connect(name, stream).await?;
        let words: String = command.iter().map(|word| format!("&command={word}")).collect();
        let request = format!(
            "GET /exec/default/{pod}/main?output=1{words} HTTP/1.1\r\nHost: {}\r\nConnection: Upgrade\r\n\
             Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\
             Sec-WebSocket-Protocol: v4.channel.k8s.io\r\n\r\n",
            self.address
        );
        socket.write_all(request.as_bytes()).await?;
        let mut socket = BufReader::with_capacity(256 << 10, socket);
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(socket.read_u8().await.context("the server closed the connection")?);
        }
        let head = String::from_utf8_lossy(&head);
        if !head.starts_with("HTTP/1.1 101 ") {
            bail!("the server does not support WebSocket: {head}");
        }
        Ok(socket)
    }
}

/// Reads a server's frame of a WebSocket (RFC 6455 section 5.2) into `payload`; returns its opcode.
///
/// # Errors
/// The connection ends or breaks.
pub async fn frame(socket: &mut (impl AsyncRead + Unpin), payload: &mut Vec<u8>) -> Result<u8> {
    let (kind, length) = (socket.read_u8().await?, socket.read_u8().await?);
    let length = match length & 0x7f {
        126 => usize::from(socket.read_u16().await?),
        127 => usize::try_from(socket.read_u64().await?)?,
        short => usize::from(short),
    };
    payload.resize(length, 0);
    socket.read_exact(payload).await?;
    Ok(kind & 0x0f)
}
