//! A single connection that checks whether an idle application still accepts.
//!
//! The application gets the same as from a tcpSocket probe of the kubelet: a connection that is closed at
//! once. Only the criterion of success is new: the kernel completes a handshake by itself, so connect()
//! proves nothing about the application before its queue is full. The canary asks the kernel whether the
//! application has *accepted* the connection (accept()).

use std::{net::SocketAddr, sync::Arc, time::Duration};

use beelet_base::clock::After as _;
use tokio::{
    net::TcpStream,
    time::{Instant, sleep_until, timeout_at},
};

use super::{answer::Answer, tcp};
use beelet_bpf::{CheckedNetns, Checker, Found};

/// Time from the handshake to the first lookup; it doubles for each later one.
const FIRST_LOOK: Duration = Duration::from_millis(1);

/// Connects to `address`, which is in the namespace `netns`, and waits until the application accepts.
pub(super) async fn send(
    checker: &Checker,
    netns: &Arc<CheckedNetns>,
    address: SocketAddr,
    within: Duration,
) -> Answer {
    let deadline = Instant::now().after(within);
    let late = || format!("no answer within {} s", within.as_secs_f64());
    let stream = match timeout_at(deadline, TcpStream::connect(address)).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => return Answer::failure(format!("canary to {address}: {error}")),
        Err(_) => return Answer::failure(format!("canary to {address}: {}", late())),
    };
    tcp::hang_up(&stream);
    let target = stream.local_addr().ok().and_then(|own| netns.target(address, Some(own)));
    let Some(target) = target else {
        return Answer::success(format!(
            "connected to {address}; the kernel can't say whether it was accepted"
        ));
    };
    let mut pause = FIRST_LOOK;
    loop {
        let last = Instant::now() >= deadline;
        // An application that has closed a connection, or written to it, had accepted it.
        let mut byte = [0; 1];
        let heard = stream.try_read(&mut byte).is_ok();
        match checker.lookup(&[target]) {
            _ if heard => return Answer::success(format!("the application accepted a canary at {address}")),
            Ok(found) => match found.first().copied().unwrap_or(Found::Nothing) {
                Found::Accepted | Found::Closing => {
                    return Answer::success(format!("the application accepted a canary at {address}"));
                }
                Found::Waiting if last => {
                    return Answer::failure(format!(
                        "the application has not accepted a canary at {address} within {} s",
                        within.as_secs_f64()
                    ));
                }
                // The pod sees another address than we do (NAT), or TCP_DEFER_ACCEPT: only connect() is left
                // as a criterion.
                Found::Nothing | Found::HalfOpen | Found::Listener(_) if last => {
                    return Answer::success(format!(
                        "connected to {address}; the connection can't be followed, so it is unknown whether it was accepted"
                    ));
                }
                _ => {}
            },
            Err(error) => return Answer::error(error.to_string()),
        }
        sleep_until((Instant::now().after(pause)).min(deadline)).await;
        pause = pause.saturating_mul(2);
    }
}
