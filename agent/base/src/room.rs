//! Room for the connections of a TCP server that strangers can reach. Those that have not shown who they are
//! share some, and the rest is for those of which a request was allowed: nobody without credentials keeps a
//! client with credentials out.
//!
//! A stranger that comes when all is taken is given another stranger's place ([`peers`]), once that one
//! has had it for [`SETTLE`]: else strangers that come faster than a handshake takes would only throw each
//! other out.

mod peers;

pub use peers::{Source, victim};

use std::{
    collections::BTreeMap,
    fmt, io,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    time::Duration,
};

use tokio::{
    net::{TcpListener, TcpStream},
    sync::{Notify, OwnedSemaphorePermit, Semaphore},
    time::{Instant, sleep, sleep_until},
};
use tokio_util::sync::CancellationToken;

use crate::clock::After as _;

/// How long a stranger has its place at least: enough for a handshake and a request. All that the kernel
/// queues in front of a newcomer (1024 connections, see `TcpListener::bind`) gets its turn within 1.2 s with
/// 256 places.
const SETTLE: Duration = Duration::from_millis(300);

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
                    return (stream, address, self.room.admit(Source::of(address.ip())).await);
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
    /// A place was given back.
    freed: Notify,
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
        Arc::new(Self { known, strangers: Mutex::default(), most, freed: Notify::new() })
    }

    /// A stranger's place, which another one may have had. Waits for [`SETTLE`] at most.
    async fn admit(self: &Arc<Self>, source: Source) -> Place {
        loop {
            let freed = self.freed.notified();
            match self.try_admit(source, Instant::now()) {
                Ok(place) => return place,
                Err(settled) => tokio::select! {
                    () = freed => {}
                    () = sleep_until(settled) => {}
                },
            }
        }
    }

    /// A stranger's place; or when another one may be taken away for it.
    fn try_admit(self: &Arc<Self>, source: Source, now: Instant) -> Result<Place, Instant> {
        let mut strangers = self.lock();
        while strangers.places.len() >= self.most {
            let places = strangers.places.iter().map(|(number, stranger)| (*number, stranger.source));
            let Some(oldest) = victim(places) else { break };
            let settled = strangers.places.get(&oldest).map_or(now, |stranger| stranger.since.after(SETTLE));
            if settled > now {
                return Err(settled);
            }
            if let Some(stranger) = strangers.places.remove(&oldest) {
                stranger.gone.cancel();
            }
        }
        let (number, gone) = (strangers.next, CancellationToken::new());
        strangers.next = strangers.next.wrapping_add(1);
        strangers.places.insert(number, Stranger { source, since: now, gone: gone.clone() });
        drop(strangers);
        Ok(Place { room: Arc::clone(self), number, source, gone, known: OnceLock::new() })
    }

    fn give_back(&self, number: u64) {
        if self.lock().places.remove(&number).is_some() {
            self.freed.notify_one();
        }
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
        self.room.give_back(self.number);
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
        self.room.give_back(self.number);
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

    /// Strangers that come one after the other, each once those before have settled.
    fn come(room: &Arc<Room>, source: Source, count: u32) -> Vec<Place> {
        let began = room.lock().places.values().map(|stranger| stranger.since).max();
        let began = began.unwrap_or_else(Instant::now);
        (1..=count).map(|turn| room.try_admit(source, began + SETTLE * turn).unwrap()).collect()
    }

    #[test]
    fn a_place_is_not_taken_away_before_a_handshake_could_be_made_in_it() {
        let room = Room::new(Limits { known: 1, strangers: 2 });
        let now = Instant::now();
        let first = room.try_admit(source(1), now).unwrap();
        let second = room.try_admit(source(2), now + SETTLE / 2).unwrap();
        assert_eq!(room.try_admit(source(3), now + SETTLE / 2).unwrap_err(), now + SETTLE);
        let third = room.try_admit(source(3), now + SETTLE).unwrap();
        assert!(is_taken(&first) && !is_taken(&second) && !is_taken(&third));
        drop(second);
        assert!(room.try_admit(source(4), now + SETTLE).is_ok(), "one that was given back is free at once");
    }

    #[tokio::test(start_paused = true)]
    async fn a_stranger_waits_until_others_have_settled_or_one_goes() {
        let room = Room::new(Limits { known: 1, strangers: 1 });
        let first = room.admit(source(1)).await;
        let began = Instant::now();
        let second = room.admit(source(1)).await;
        assert!(is_taken(&first) && began.elapsed() >= SETTLE);
        let waiting = tokio::spawn({
            let room = Arc::clone(&room);
            async move { room.admit(source(2)).await }
        });
        tokio::task::yield_now().await;
        let began = Instant::now();
        drop(second);
        waiting.await.unwrap();
        assert!(began.elapsed() < SETTLE);
    }

    #[test]
    fn a_flood_of_one_source_takes_its_own_places_and_no_others() {
        let room = Room::new(Limits { known: 2, strangers: 4 });
        let other = room.try_admit(source(2), Instant::now()).unwrap();
        let flood = come(&room, source(1), 100);
        assert!(!is_taken(&other));
        assert_eq!(flood.iter().filter(|place| !is_taken(place)).count(), 3);
        assert!(flood.iter().rev().take(3).all(|place| !is_taken(place)), "the newest stay");
        drop(flood);
        assert_eq!(room.lock().places.len(), 1);
    }

    #[test]
    fn who_was_allowed_stays_whatever_strangers_do_and_has_room_of_its_own() {
        let room = Room::new(Limits { known: 2, strangers: 4 });
        let known = come(&room, source(1), 2);
        assert!(known.iter().all(Place::allowed) && known.iter().all(Place::allowed));
        let third = room.try_admit(source(1), Instant::now()).unwrap();
        assert!(!third.allowed() && !third.is_known());
        let _flood = come(&room, source(1), 100);
        assert!(!known.iter().any(is_taken) && is_taken(&third));
        drop(known);
        let again = come(&room, source(1), 1);
        assert!(again.iter().all(Place::allowed));
    }
}
