//! A tcpSocket probe that connects.

use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use tokio::{net::TcpStream, time::timeout};

use super::answer::Answer;

/// Connects to the address and closes the connection at once.
pub(super) async fn connect(address: SocketAddr, within: Duration) -> Answer {
    match timeout(within, TcpStream::connect(address)).await {
        Ok(Ok(stream)) => {
            hang_up(&stream);
            Answer::success(format!("connected to {address}"))
        }
        Ok(Err(e)) => Answer::failure(format!("connect to {address}: {e}")),
        Err(_) => {
            Answer::failure(format!("connect to {address}: no answer within {} s", within.as_secs_f64()))
        }
    }
}

/// Closes a connection with a reset, which leaves no TIME_WAIT behind (kubernetes PR 115143 shortens it to
/// one second). No data was sent, so none is lost.
pub(super) fn hang_up(stream: &TcpStream) {
    let _ = stream.set_zero_linger();
}

/// Resolves a host given by address or by name.
pub(super) async fn resolve(host: &str, port: u16) -> Result<SocketAddr, String> {
    if let Ok(ip) = host.parse::<IpAddr>() {
        return Ok(SocketAddr::new(ip, port));
    }
    let mut found =
        tokio::net::lookup_host((host, port)).await.map_err(|e| format!("cannot resolve {host}: {e}"))?;
    found.next().ok_or_else(|| format!("cannot resolve {host}: no address found"))
}
