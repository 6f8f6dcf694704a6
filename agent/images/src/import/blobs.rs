//! Writes an archive's blobs to the runtime's own store.

use std::io::{self, Read};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use beelet_base::blocking::blocking;
use beelet_cri::store::{Blob, Lease, Store};
use beelet_cri::{Operation, Runtime};
use jiff::Timestamp;
use sha2::{Digest as _, Sha256};
use tokio::runtime::Handle;

use super::compression::decompressed;
use super::{Blobs, ImportError, Imported, MOST_JSON};
use crate::layout::{Descriptor, Platform};

/// Bytes of a blob per message.
const PIECE: usize = 1 << 20;
/// Maximum time until the runtime lists an imported image.
const SHOWN: Duration = Duration::from_secs(15);
/// Interval at which the runtime is polled for the image.
const ASKED: Duration = Duration::from_millis(50);
/// Lifetime of a lease that a killed agent could not release.
const LEASE: jiff::SignedDuration = jiff::SignedDuration::from_hours(24);

/// Options of an import.
#[derive(Clone, Debug, Default)]
pub struct Wanted {
    /// Name of the archive in errors.
    pub what: String,
    /// Name for the only image; overrides the name in the archive.
    pub name: Option<String>,
    /// Exclude the images from garbage collection.
    pub pinned: bool,
}

/// Imports the images of an archive.
///
/// # Errors
/// See [`ImportError`]. The runtime collects the blobs that were written by then.
pub async fn import(
    runtime: &Runtime,
    wanted: Wanted,
    archive: impl Read + Send + 'static,
) -> Result<Vec<Imported>, ImportError> {
    let store = runtime.store(Operation::ImportImage, &wanted.what).await?;
    let id = lease_id();
    let ends = Timestamp::now().saturating_add(LEASE).unwrap_or(Timestamp::MAX).to_string();
    let lease = store.lease(&id, &ends).await?;
    let mut door = Door {
        store: store.clone(),
        lease: lease.clone(),
        id,
        blobs: 0,
        pinned: wanted.pinned,
        handle: Handle::current(),
    };
    let name = wanted.name;
    let imported = blocking("importing images", move || {
        super::read(decompressed(archive)?, name.as_deref(), &Platform::own(), &mut door)
    })
    .await;
    store.release(lease).await?;
    let imported = imported?;
    for image in &imported {
        shown(runtime, &image.name).await?;
    }
    Ok(imported)
}

/// Waits until the runtime's CRI service lists an image of its store: an internal event of the runtime
/// updates that list.
async fn shown(runtime: &Runtime, name: &str) -> Result<(), ImportError> {
    let asking = async {
        while runtime.images.status(name).await?.is_none() {
            tokio::time::sleep(ASKED).await;
        }
        Ok(())
    };
    let shown = tokio::time::timeout(SHOWN, asking).await;
    shown.unwrap_or_else(|_| Err(ImportError::NotShown(name.to_owned())))
}

/// Returns a lease id unique to this import.
fn lease_id() -> String {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    format!("beelet-{}-{}-{number}", std::process::id(), Timestamp::now().as_nanosecond())
}

/// Access to the store from a thread that may block.
struct Door {
    store: Store,
    lease: Lease,
    id: String,
    /// Number of blobs written.
    blobs: u64,
    pinned: bool,
    handle: Handle,
}

impl Blobs for Door {
    fn write(
        &mut self,
        digest: Option<&str>,
        size: u64,
        content: &mut dyn Read,
    ) -> Result<String, ImportError> {
        self.blobs += 1;
        let reference = format!("{}-{}", self.id, self.blobs);
        let blob = Blob { reference: &reference, digest: digest.unwrap_or_default(), size };
        let mut hasher = Sha256::new();
        let mut next = || -> io::Result<Vec<u8>> {
            let mut piece = Vec::new();
            content.take(PIECE as u64).read_to_end(&mut piece)?;
            if digest.is_none() {
                hasher.update(&piece);
            }
            Ok(piece)
        };
        let first = next()?;
        let writer = self.handle.block_on(self.store.write(&self.lease, blob, first))?;
        let Some(mut writer) = writer else { return Ok(digest.unwrap_or_default().to_owned()) };
        loop {
            let piece = next()?;
            if piece.is_empty() {
                break;
            }
            self.handle.block_on(writer.write(piece))?;
        }
        let digest = digest.map_or_else(|| hex(&hasher.finalize()), str::to_owned);
        self.handle.block_on(writer.commit(&digest))?;
        Ok(digest)
    }

    fn has(&mut self, digest: &str) -> Result<bool, ImportError> {
        Ok(self.handle.block_on(self.store.size(digest))?.is_some())
    }

    fn read(&mut self, digest: &str) -> Result<Vec<u8>, ImportError> {
        Ok(self.handle.block_on(self.store.read(digest, MOST_JSON))?)
    }

    fn refer(&mut self, digest: &str, children: &[(String, String)]) -> Result<(), ImportError> {
        Ok(self.handle.block_on(self.store.refer(digest, children))?)
    }

    fn name(&mut self, name: &str, target: &Descriptor) -> Result<bool, ImportError> {
        let before = self.handle.block_on(self.store.image(name))?;
        let is_new = before.is_none_or(|before| before.digest != target.digest);
        if is_new {
            self.handle.block_on(self.store.name(name, target.into(), self.pinned))?;
        }
        Ok(is_new)
    }
}

fn hex(digest: &[u8]) -> String {
    let hex: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{hex}")
}
