//! Ports for servers that a test starts: numbers must be in their configuration before they listen.

use std::net::TcpListener;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Result, bail};

/// Ports that no outgoing connection gets by itself: `net.ipv4.ip_local_port_range` begins at 32,768.
const FIRST: u16 = 20_000;
const COUNT: u16 = 12_000;
/// Tests that run side by side are processes with neighbouring numbers. Each begins that far from the next.
const APART: u32 = 97;

/// Ports of loopback that nobody had a moment ago, and that nobody else who asks here gets in the next.
///
/// # Errors
/// There are none.
pub fn free<const N: usize>() -> Result<[u16; N]> {
    static ASKED: AtomicU32 = AtomicU32::new(0);
    let mut ports = [0; N];
    for port in &mut ports {
        let mut tries = 0..COUNT;
        *port = loop {
            if tries.next().is_none() {
                bail!("none of the ports from {FIRST} on is free, of {COUNT}");
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
