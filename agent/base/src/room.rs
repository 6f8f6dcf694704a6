//! Connection limits of a TCP server that strangers can reach. Unauthenticated connections share some places,
//! and connections with an allowed request have places of their own: a client without credentials keeps no
//! client with credentials out.
//!
//! The server accepts every connection and never waits for a place. If all places are taken, a new stranger
//! gets another stranger's place at once; [`peers`] chooses the victim.

mod peers;

pub use peers::Source;

use std::{
    collections::BTreeMap,
    fmt,
    io::{self, ErrorKind},
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    time::Duration,
};

use tokio::{
    net::{TcpListener, TcpSocket, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    task::yield_now,
    time::{Instant, sleep},
};
use tokio_util::sync::CancellationToken;

use self::peers::{Held, victim};
use crate::clock::After as _;

/// Time that suffices for a handshake and a request, also on a slow network.
const SETTLE: Duration = Duration::from_millis(300);
/// Maximum number of connections that the kernel queues until they are accepted, within `net.core.somaxconn`
/// (4096 by default since Linux 5.4).
const BACKLOG: u32 = 4096;
/// Divisor of the strangers' places: after accepting that part of them in a row, the server yields to the
/// tasks of the accepted connections, so that no burst takes a place before its task has run.
const BURST_PART: u64 = 8;

/// Maximum numbers of connections at a time.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections with an allowed request.
    pub known: usize,
    /// All other connections, at least one: in their handshake, in their first request, or refused.
    pub strangers: usize,
}

/// A TCP server's port and its places.
#[derive(Debug)]
pub struct Port {
    listener: TcpListener,
    room: Arc<Room>,
}

impl Port {
    /// Listens at an address.
    ///
    /// # Errors
    /// The port is in use, or forbidden to the agent's user.
    pub async fn bind(address: SocketAddr, limits: Limits) -> io::Result<Self> {
        let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
        // The port is free again at once after a restart, even if the last agent left connections behind.
        socket.set_reuseaddr(true)?;
        socket.bind(address)?;
        Ok(Self { listener: socket.listen(BACKLOG)?, room: Room::new(limits) })
    }

    /// Returns the bound address.
    ///
    /// # Errors
    /// The kernel cannot report it.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Returns the next connection to the server of this name, and its place. If none can be accepted (mostly
    /// for lack of file descriptors), open connections must end before another try makes sense.
    pub async fn accept(&self, server: &str) -> (TcpStream, SocketAddr, Place) {
        if self.room.is_after_burst() {
            yield_now().await;
        }
        loop {
            match self.listener.accept().await {
                Ok((stream, address)) => {
                    let place = self.room.admit(Source::of(address.ip()), Instant::now());
                    return (stream, address, place);
                }
                // The error affects only this connection, not the next one.
                Err(error) if is_of_one_connection(&error) => {}
                Err(error) => {
                    tracing::warn!("{server}: cannot accept a connection: {error}");
                    sleep(Duration::from_secs(1)).await;
                }
            }
        }
    }
}

/// Returns true for an error of a single connection before it was accepted (accept(2)).
fn is_of_one_connection(error: &io::Error) -> bool {
    use ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, HostUnreachable};
    use ErrorKind::{NetworkUnreachable, TimedOut};
    matches!(
        error.kind(),
        ConnectionAborted
            | ConnectionRefused
            | ConnectionReset
            | HostUnreachable
            | NetworkUnreachable
            | TimedOut
    )
}

/// All places.
struct Room {
    known: Arc<Semaphore>,
    strangers: Mutex<Strangers>,
    most: usize,
}

impl fmt::Debug for Room {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Room").field("most", &self.most).finish_non_exhaustive()
    }
}

impl fmt::Debug for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Place").field("number", &self.number).finish_non_exhaustive()
    }
}

#[derive(Default)]
struct Strangers {
    next: u64,
    /// Strangers in the order of their arrival.
    places: BTreeMap<u64, Stranger>,
}

struct Stranger {
    source: Source,
    since: Instant,
    gone: CancellationToken,
}

impl Room {
    fn new(limits: Limits) -> Arc<Self> {
        let known = Arc::new(Semaphore::new(limits.known));
        let most = limits.strangers.max(1);
        Arc::new(Self { known, strangers: Mutex::default(), most })
    }

    /// Returns a place for a stranger, if needed by evicting another stranger.
    fn admit(self: &Arc<Self>, source: Source, now: Instant) -> Place {
        let mut strangers = self.lock();
        while strangers.places.len() >= self.most {
            let held = strangers.places.iter().map(|(number, stranger)| Held {
                key: *number,
                source: stranger.source,
                has_settled: stranger.since.after(SETTLE) <= now,
            });
            let Some(stranger) = victim(held, source).and_then(|key| strangers.places.remove(&key)) else {
                break;
            };
            stranger.gone.cancel();
        }
        let (number, gone) = (strangers.next, CancellationToken::new());
        strangers.next = strangers.next.wrapping_add(1);
        strangers.places.insert(number, Stranger { source, since: now, gone: gone.clone() });
        drop(strangers);
        Place { room: Arc::clone(self), number, source, gone, known: OnceLock::new() }
    }

    /// Returns true each time a part of the places has been assigned.
    fn is_after_burst(&self) -> bool {
        let burst = (self.most as u64 / BURST_PART).max(1);
        self.lock().next.is_multiple_of(burst)
    }

    fn release(&self, number: u64) {
        self.lock().places.remove(&number);
    }

    fn lock(&self) -> MutexGuard<'_, Strangers> {
        self.strangers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A connection's place, released on drop.
pub struct Place {
    room: Arc<Room>,
    number: u64,
    source: Source,
    gone: CancellationToken,
    known: OnceLock<OwnedSemaphorePermit>,
}

impl Place {
    /// Returns the source of the client.
    #[must_use]
    pub fn source(&self) -> Source {
        self.source
    }

    /// Moves the connection to the places of clients with an allowed request. Returns false if none is free.
    #[must_use]
    pub fn allowed(&self) -> bool {
        if self.is_known() {
            return true;
        }
        let Ok(permit) = Arc::clone(&self.room.known).try_acquire_owned() else { return false };
        // No other request of the same connection can be first: its requests come one after the other.
        let _ = self.known.set(permit);
        self.room.release(self.number);
        true
    }

    /// Returns true once a request of the connection was allowed.
    #[must_use]
    pub fn is_known(&self) -> bool {
        self.known.get().is_some()
    }

    /// Waits until another connection gets this place.
    pub async fn taken(&self) {
        self.gone.cancelled().await;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.room.release(self.number);
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        task::JoinSet,
        time::timeout,
    };

    use super::*;

    fn source(last: u8) -> Source {
        Source::of([10, 0, 0, last].into())
    }

    fn is_taken(place: &Place) -> bool {
        place.gone.is_cancelled()
    }

    /// Admits strangers one after the other, each after those before have settled.
    fn come(room: &Arc<Room>, source: Source, count: u32) -> Vec<Place> {
        let began = room.lock().places.values().map(|stranger| stranger.since).max();
        let began = began.unwrap_or_else(Instant::now);
        (1..=count).map(|turn| room.admit(source, began + SETTLE * turn)).collect()
    }

    #[test]
    fn a_stranger_gets_a_place_at_once_and_a_settled_one_loses_its_place_first() {
        let room = Room::new(Limits { known: 1, strangers: 2 });
        let now = Instant::now();
        let (first, second) = (room.admit(source(1), now), room.admit(source(2), now + SETTLE / 2));
        let third = room.admit(source(3), now + SETTLE);
        assert!(is_taken(&first) && !is_taken(&second) && !is_taken(&third));
        let fourth = room.admit(source(4), now + SETTLE);
        assert!(!is_taken(&fourth) && is_taken(&second) != is_taken(&third));
        drop(fourth);
        let _fifth = room.admit(source(5), now + SETTLE);
        assert!(is_taken(&second) != is_taken(&third), "a released place is free at once");
    }

    #[test]
    fn a_flood_of_one_source_takes_its_own_places_and_no_others() {
        let room = Room::new(Limits { known: 2, strangers: 4 });
        let other = room.admit(source(2), Instant::now());
        let flood = come(&room, source(1), 100);
        assert!(!is_taken(&other));
        assert_eq!(flood.iter().filter(|place| !is_taken(place)).count(), 3);
        assert!(flood.iter().rev().take(3).all(|place| !is_taken(place)), "the newest stay");
        drop(flood);
        assert_eq!(room.lock().places.len(), 1);
    }

    #[test]
    fn an_allowed_connection_keeps_its_own_place_under_a_flood_of_strangers() {
        let room = Room::new(Limits { known: 2, strangers: 4 });
        let known = come(&room, source(1), 2);
        assert!(known.iter().all(Place::allowed) && known.iter().all(Place::allowed));
        let third = room.admit(source(1), Instant::now());
        assert!(!third.allowed() && !third.is_known());
        let _flood = come(&room, source(1), 100);
        assert!(!known.iter().any(is_taken) && is_taken(&third));
        drop(known);
        let again = come(&room, source(1), 1);
        assert!(again.iter().all(Place::allowed));
    }

    /// Connects from an address. A dropped connection leaves nothing behind in the kernel.
    async fn connect(from: [u8; 4], to: SocketAddr) -> io::Result<TcpStream> {
        let socket = TcpSocket::new_v4()?;
        socket.set_zero_linger()?;
        socket.bind((Ipv4Addr::from(from), 0).into())?;
        socket.connect(to).await
    }

    /// Connects from an address as fast as it can, sends nothing, and keeps each connection until the server
    /// closes it, or for much longer than a place takes to settle.
    async fn flood(from: [u8; 4], to: SocketAddr) {
        let (most, mut open) = (Arc::new(Semaphore::new(100)), JoinSet::new());
        loop {
            let permit = Arc::clone(&most).acquire_owned().await.unwrap();
            open.spawn(async move {
                let mut stream = connect(from, to).await.unwrap();
                let _ = timeout(SETTLE * 30, stream.read_u8()).await;
                drop(permit);
            });
            while open.try_join_next().is_some() {}
        }
    }

    /// Sends bytes one after the other, and waits until each comes back.
    async fn ask(from: [u8; 4], to: SocketAddr, bytes: u8) -> io::Result<()> {
        let mut stream = connect(from, to).await?;
        for byte in 0..bytes {
            stream.write_u8(byte).await?;
            assert_eq!(stream.read_u8().await?, byte);
        }
        Ok(())
    }

    async fn answer(mut stream: TcpStream) -> io::Result<()> {
        loop {
            let byte = stream.read_u8().await?;
            stream.write_u8(byte).await?;
        }
    }

    async fn serve(port: Port) {
        let mut connections = JoinSet::new();
        loop {
            let (stream, _, place) = port.accept("a test").await;
            connections.spawn(async move {
                tokio::select! {
                    biased;
                    _ = answer(stream) => {}
                    () = place.taken() => {}
                }
            });
            while connections.try_join_next().is_some() {}
        }
    }

    /// A client of 127.0.0.1 asks again and again while connections from these addresses come much faster
    /// than places settle.
    async fn check_flood(floods: &[[u8; 4]], bytes: u8) {
        let limits = Limits { known: 1, strangers: 64 };
        let port = Port::bind(([127, 0, 0, 1], 0).into(), limits).await.unwrap();
        let (address, room) = (port.address().unwrap(), Arc::clone(&port.room));
        let mut tasks = JoinSet::new();
        tasks.spawn(serve(port));
        for from in floods {
            tasks.spawn(flood(*from, address));
        }
        let mut asked = 0;
        let asking = async {
            // Enough requests to take longer if each connection waited for a place to settle.
            while asked < 75 || room.lock().next < 2_000 {
                ask([127, 0, 0, 1], address, bytes).await.unwrap();
                asked += 1;
            }
        };
        let done = timeout(Duration::from_secs(30), asking).await;
        let came = room.lock().next;
        assert!(done.is_ok(), "{asked} clients were served, of {came} connections");
    }

    #[tokio::test]
    async fn floods_from_elsewhere_keep_no_client_waiting() {
        // Several exchanges, as in a handshake and a request.
        check_flood(&[[127, 0, 0, 2], [127, 0, 0, 3]], 4).await;
    }

    #[tokio::test]
    async fn a_flood_from_its_own_address_keeps_no_client_waiting_that_asks_at_once() {
        check_flood(&[[127, 0, 0, 1], [127, 0, 0, 1]], 1).await;
    }
}
