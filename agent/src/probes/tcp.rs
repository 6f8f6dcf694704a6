//! One tcpSocket probe: by connecting, or by the kernel's own knowledge.

use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use beelet_policy::probe::Outcome;
use tokio::{net::TcpStream, time::timeout};

/// What a probe found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Answer {
    /// What it counts as.
    pub outcome: Outcome,
    /// A sentence for the person who asks why.
    pub detail: String,
}

impl Answer {
    /// The container answered as it should.
    pub(super) fn success(detail: String) -> Self {
        Self { outcome: Outcome::Success, detail }
    }

    /// It did not.
    pub(super) fn failure(detail: String) -> Self {
        Self { outcome: Outcome::Failure, detail }
    }

    /// The probe could not be run.
    pub(super) fn error(detail: String) -> Self {
        Self { outcome: Outcome::Error, detail }
    }
}

/// Connects and closes at once.
pub(super) async fn connect(address: SocketAddr, within: Duration) -> Answer {
    match timeout(within, TcpStream::connect(address)).await {
        Ok(Ok(stream)) => {
            // A reset instead of a handshake's end leaves no TIME_WAIT behind (kubernetes PR 115143 shortens
            // it to one second). Nothing was sent, so nothing is lost.
            let _ = stream.set_zero_linger();
            Answer::success(format!("connected to {address}"))
        }
        Ok(Err(e)) => Answer::failure(format!("connect to {address}: {e}")),
        Err(_) => {
            Answer::failure(format!("connect to {address}: no answer within {} s", within.as_secs_f64()))
        }
    }
}

/// The address of a host given by number or by name.
pub(super) async fn resolve(host: &str, port: u16) -> Result<SocketAddr, String> {
    if let Ok(ip) = host.parse::<IpAddr>() {
        return Ok(SocketAddr::new(ip, port));
    }
    let mut found =
        tokio::net::lookup_host((host, port)).await.map_err(|e| format!("cannot resolve {host}: {e}"))?;
    found.next().ok_or_else(|| format!("cannot resolve {host}: it has no address"))
}

/// What the kernel's listeners say of a port.
pub(super) fn verdict(listening: bool, port: u16) -> Answer {
    if listening {
        Answer::success(format!("the kernel has a listener on port {port}"))
    } else {
        Answer::failure(format!("nothing listens on port {port}"))
    }
}
