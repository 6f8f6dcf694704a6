//! Room for the connections of a TCP server that strangers can reach. Those that have not shown who they are
//! share some, and the rest is for those of which a request was allowed: nobody without credentials keeps a
//! client with credentials out.
//!
//! Nothing waits for room. A stranger that comes when all is taken is given another stranger's place
//! (`policy::peers`).

use std::{
    collections::BTreeMap,
    fmt, io,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    time::Duration,
};

use beelet_policy::peers::{Source, victim};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::sleep,
};
use tokio_util::sync::CancellationToken;

/// How many connections there may be at a time.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Of which a request was allowed.
    pub known: usize,
    /// All others, at least one: in their handshake, in their first request, or refused.
    pub strangers: usize,
}

/// A TCP server's port, and its room.
#[derive(Debug)]
pub struct Port {
    listener: TcpListener,
    room: Arc<Room>,
}

impl Port {
    /// Listens at an address.
    ///
    /// # Errors
    /// The port is taken, or is not for the agent's user.
    pub async fn bind(address: SocketAddr, limits: Limits) -> io::Result<Self> {
        Ok(Self { listener: TcpListener::bind(address).await?, room: Room::new(limits) })
    }

    /// The address that it has.
    ///
    /// # Errors
    /// The kernel doesn't say.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// The next connection to the server of this name, and its place. Where none can be accepted (out of file
    /// descriptors, mostly), connections under way must end before another try makes sense.
    pub async fn accept(&self, server: &str) -> (TcpStream, SocketAddr, Place) {
        loop {
            match self.listener.accept().await {
                Ok((stream, address)) => {
                    return (stream, address, self.room.admit(Source::of(address.ip())));
                }
                Err(error) => {
                    tracing::warn!("{server}: cannot accept a connection: {error}");
                    sleep(Duration::from_secs(1)).await;
                }
            }
        }
    }
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
    /// In the order in which they came.
    places: BTreeMap<u64, (Source, CancellationToken)>,
}

impl Room {
    fn new(limits: Limits) -> Arc<Self> {
        let known = Arc::new(Semaphore::new(limits.known));
        Arc::new(Self { known, strangers: Mutex::default(), most: limits.strangers.max(1) })
    }

    /// A stranger's place, which another one may have had.
    fn admit(self: &Arc<Self>, source: Source) -> Place {
        let mut strangers = self.lock();
        while strangers.places.len() >= self.most {
            let places = strangers.places.iter().map(|(number, (source, _))| (*number, *source));
            let Some(oldest) = victim(places) else { break };
            if let Some((_, gone)) = strangers.places.remove(&oldest) {
                gone.cancel();
            }
        }
        let (number, gone) = (strangers.next, CancellationToken::new());
        strangers.next = strangers.next.wrapping_add(1);
        strangers.places.insert(number, (source, gone.clone()));
        drop(strangers);
        Place { room: Arc::clone(self), number, source, gone, known: OnceLock::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Strangers> {
        self.strangers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A connection's place, given back when it is dropped.
pub struct Place {
    room: Arc<Room>,
    number: u64,
    source: Source,
    gone: CancellationToken,
    known: OnceLock<OwnedSemaphorePermit>,
}

impl Place {
    /// Where its client comes from.
    #[must_use]
    pub fn source(&self) -> Source {
        self.source
    }

    /// A request of it was allowed: it has a place among such from now on. Returns false if there is none.
    #[must_use]
    pub fn allowed(&self) -> bool {
        if self.is_known() {
            return true;
        }
        let Ok(permit) = Arc::clone(&self.room.known).try_acquire_owned() else { return false };
        // Another request of the same connection can't have been first: they come one after the other.
        let _ = self.known.set(permit);
        self.room.lock().places.remove(&self.number);
        true
    }

    /// Returns true once a request of it was allowed.
    #[must_use]
    pub fn is_known(&self) -> bool {
        self.known.get().is_some()
    }

    /// Waits until another connection has its place.
    pub async fn taken(&self) {
        self.gone.cancelled().await;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.room.lock().places.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(last: u8) -> Source {
        Source::of([10, 0, 0, last].into())
    }

    fn is_taken(place: &Place) -> bool {
        place.gone.is_cancelled()
    }

    #[test]
    fn a_flood_of_one_source_takes_its_own_places_and_no_others() {
        let room = Room::new(Limits { known: 2, strangers: 4 });
        let other = room.admit(source(2));
        let flood: Vec<Place> = (0..100).map(|_| room.admit(source(1))).collect();
        assert!(!is_taken(&other));
        assert_eq!(flood.iter().filter(|place| !is_taken(place)).count(), 3);
        assert!(flood.iter().rev().take(3).all(|place| !is_taken(place)), "the newest stay");
        drop(flood);
        assert_eq!(room.lock().places.len(), 1);
    }

    #[test]
    fn who_was_allowed_stays_whatever_strangers_do_and_has_room_of_its_own() {
        let room = Room::new(Limits { known: 2, strangers: 4 });
        let known: Vec<Place> = (0..2).map(|_| room.admit(source(1))).collect();
        assert!(known.iter().all(Place::allowed) && known.iter().all(Place::allowed));
        let third = room.admit(source(1));
        assert!(!third.allowed() && !third.is_known());
        let _flood: Vec<Place> = (0..100).map(|_| room.admit(source(1))).collect();
        assert!(!known.iter().any(is_taken) && is_taken(&third));
        drop(known);
        assert!(room.admit(source(1)).allowed());
    }
}
