//! `beelet port-forward`: forwards local ports to a pod.

use std::net::IpAddr;
use std::process::ExitCode;
use std::str::FromStr;

use anyhow::Context as _;
use beelet_proto::beelet as proto;
use beelet_proto::beelet::port_input::Input;
use clap::Args;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;

use super::args::{AgentArgs, pod_name};
use super::{complete, finish, plain};
use beelet_client::Client;

/// Messages queued for the agent.
const QUEUE: usize = 16;
/// Maximum bytes per message.
const PIECE: usize = 16 << 10;

/// Arguments of `beelet port-forward`.
///
/// Listens until interrupted and forwards each connection to the pod's port, even if the pod's address is not
/// reachable from here.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  beelet port-forward web 8080:80
  beelet port-forward db 5432 :9187     # the second on any free local port")]
pub struct PortForwardArgs {
    /// Name of the pod; may omit the `-NODE` suffix of static pods.
    #[arg(value_name = "POD", value_parser = pod_name, add = complete::pods())]
    pod: String,
    /// Ports: `8080:80` forwards local port 8080 to port 80, `80` forwards 80 to 80, `:80` uses any free
    /// local port.
    #[arg(value_name = "[LOCAL:]REMOTE", required = true)]
    ports: Vec<Ports>,
    /// Namespace of the pod. Required only if two pods have the same name.
    #[arg(short, long, value_name = "NAMESPACE", add = complete::namespaces())]
    namespace: Option<String>,
    /// Local address to listen on.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    address: IpAddr,
    #[command(flatten)]
    agent: AgentArgs,
}

/// A local port and the pod's port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Ports {
    /// Local port; 0 for any free port.
    here: u16,
    there: u16,
}

impl FromStr for Ports {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let port = |text: &str| text.parse::<u16>().ok().filter(|port| *port > 0);
        let ports = match text.split_once(':') {
            Some(("", there)) => port(there).map(|there| Self { here: 0, there }),
            Some((here, there)) => port(here).zip(port(there)).map(|(here, there)| Self { here, there }),
            None => port(text).map(|port| Self { here: port, there: port }),
        };
        ports.ok_or_else(|| {
            "expected `LOCAL:REMOTE`, `REMOTE` or `:REMOTE` with ports from 1 to 65535".to_owned()
        })
    }
}

/// Forwards ports until interrupted.
#[must_use]
pub fn run(args: &PortForwardArgs) -> ExitCode {
    finish(forward(args))
}

async fn forward(args: &PortForwardArgs) -> anyhow::Result<()> {
    let mut client = Client::connect(&args.agent.socket).await?;
    let (table, _) = client.pods.list().await?;
    let namespace = args.namespace.as_deref().unwrap_or_default();
    let (name, _) = table.find(namespace, &args.pod).map_err(anyhow::Error::msg)?;
    let mut listening = JoinSet::new();
    for ports in &args.ports {
        let listener = TcpListener::bind((args.address, ports.here)).await;
        let listener =
            listener.with_context(|| format!("cannot listen on {}:{}", args.address, ports.here))?;
        println!("forwarding from {} to port {} of pod {name}", listener.local_addr()?, ports.there);
        let target = proto::PortTarget {
            namespace: name.namespace.clone(),
            pod: name.name.clone(),
            port: ports.there.into(),
        };
        listening.spawn(listen(listener, target, client.clone()));
    }
    tokio::select! {
        Some(ended) = listening.join_next() => ended.context("a listener failed")?,
        interrupted = tokio::signal::ctrl_c() => interrupted.context("cannot wait for Ctrl-C"),
    }
}

async fn listen(listener: TcpListener, target: proto::PortTarget, client: Client) -> anyhow::Result<()> {
    loop {
        let (socket, _) = listener.accept().await.context("cannot accept a connection")?;
        let (target, mut client) = (target.clone(), client.clone());
        tokio::spawn(async move {
            let port = target.port;
            if let Err(error) = connect(socket, target, &mut client).await {
                eprintln!("{}", plain::line(&format!("connection to port {port} failed: {error:#}")));
            }
        });
    }
}

/// Copies data both ways until the pod's side closes or the local side fails.
async fn connect(socket: TcpStream, target: proto::PortTarget, client: &mut Client) -> anyhow::Result<()> {
    let (mut from, mut to) = socket.into_split();
    let (sender, receiver) = mpsc::channel(QUEUE);
    let input = |input| proto::PortInput { input: Some(input) };
    sender.send(input(Input::Start(target))).await.context("cannot start forwarding")?;
    let mut outputs = client.containers.port_forward(ReceiverStream::new(receiver)).await?;
    let reading = tokio::spawn(async move {
        let mut bytes = vec![0; PIECE];
        loop {
            match from.read(&mut bytes).await {
                Ok(0) | Err(_) => return,
                Ok(length) => {
                    let piece = input(Input::Data(bytes[..length].to_vec()));
                    if sender.send(piece).await.is_err() {
                        return;
                    }
                }
            }
        }
    });
    let written = async {
        while let Some(piece) = outputs.message().await.map_err(beelet_client::ClientError::from)? {
            to.write_all(&piece.data).await?;
        }
        anyhow::Ok(())
    };
    let done = written.await;
    reading.abort();
    done
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_read_as_kubectl_reads_them() {
        let check = |text: &str, expected: Option<(u16, u16)>| {
            let ports = text.parse::<Ports>().ok();
            assert_eq!(ports.map(|ports| (ports.here, ports.there)), expected, "{text}");
        };
        check("8080:80", Some((8080, 80)));
        check("80", Some((80, 80)));
        check(":80", Some((0, 80)));
        for wrong in ["", ":", "80:", "0", "a:80", "70000", "1:2:3"] {
            check(wrong, None);
        }
    }
}
