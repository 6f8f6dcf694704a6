//! Ports for servers of a test, whose numbers must be in their configuration before they listen.

use std::net::TcpListener;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Result, bail};

/// Range of ports not used for outgoing connections: `net.ipv4.ip_local_port_range` begins at 32,768.
const FIRST: u16 = 20_000;
const COUNT: u16 = 12_000;
/// Distance between the first ports of concurrent tests, which are processes with neighbouring ids.
const APART: u32 = 97;

/// Returns ports of loopback that are free, and that are not returned to another caller for a while.
///
/// # Errors
/// All ports are in use.
pub fn free<const N: usize>() -> Result<[u16; N]> {
    static ASKED: AtomicU32 = AtomicU32::new(0);
    let mut ports = [0; N];
    for port in &mut ports {
        let mut tries = 0..COUNT;
        *port = loop {
            if tries.next().is_none() {
                bail!("all {COUNT} ports from {FIRST} on are in use");
            }
            let nth =
                std::process::id().wrapping_mul(APART).wrapping_add(ASKED.fetch_add(1, Ordering::Relaxed));
            let tried = FIRST + u16::try_from(nth % u32::from(COUNT))?;
            if TcpListener::bind(("127.0.0.1", tried)).is_ok() {
                break tried;
            }
        };
    }
    Ok(ports)
}
