//! Ports for servers that a test starts: numbers must be in their configuration before they listen.

use std::net::TcpListener;

use anyhow::Result;

/// Ports of loopback that nobody had a moment ago.
///
/// # Errors
/// There are none.
pub fn free<const N: usize>() -> Result<[u16; N]> {
    // All at once, so that no two are the same.
    let bound: Vec<TcpListener> =
        (0..N).map(|_| TcpListener::bind("127.0.0.1:0")).collect::<std::io::Result<_>>()?;
    let mut ports = [0; N];
    for (port, listener) in ports.iter_mut().zip(&bound) {
        *port = listener.local_addr()?.port();
    }
    Ok(ports)
}
