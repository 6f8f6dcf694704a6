//! Device checkpoint: read once at the start, written on every change. `policy` implements the kubelet's
//! format, `state` the file.
//!
//! A write is complete on disk before it replaces the previous checkpoint, and survives kill -9 as soon as it
//! is reported. Only the sync of the folder happens in the background: after a power cut the previous
//! checkpoint may reappear, but then no container runs whose device could be assigned twice.

use std::{fmt, path::PathBuf, sync::Arc, time::Duration};

use beelet_policy::devices::{Devices, Remnant, checkpoint::Text};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use super::ledger::Shared;
use beelet_base::blocking::blocking;
use beelet_state::{ForeignFile, StateError};

/// Delay after a failed write.
const RETRY: Duration = Duration::from_secs(1);

/// Storage of the checkpoint.
pub trait Store: fmt::Debug + Send + Sync {
    /// Reads the checkpoint; `None` if there is none.
    ///
    /// # Errors
    /// The checkpoint cannot be read.
    fn read(&self) -> Result<Option<Vec<u8>>, StoreError>;
    /// Replaces the checkpoint. The new one must survive kill -9; after a power cut either must be present.
    ///
    /// # Errors
    /// The checkpoint cannot be written; the previous one remains.
    fn replace(&self, bytes: &[u8]) -> Result<(), StoreError>;
    /// Makes the last replacement survive a power cut.
    ///
    /// # Errors
    /// The disk fails.
    fn settle(&self) -> Result<(), StoreError>;
    /// Moves the checkpoint aside; returns its new path.
    ///
    /// # Errors
    /// The checkpoint cannot be moved.
    fn set_aside(&self) -> Result<PathBuf, StoreError>;
}

/// Error of the checkpoint's storage. Its text is a sentence.
pub type StoreError = StateError;

impl Store for ForeignFile {
    fn read(&self) -> Result<Option<Vec<u8>>, StoreError> {
        self.read()
    }

    fn replace(&self, bytes: &[u8]) -> Result<(), StoreError> {
        self.replace(bytes)
    }

    fn settle(&self) -> Result<(), StoreError> {
        self.settle()
    }

    fn set_aside(&self) -> Result<PathBuf, StoreError> {
        self.set_aside()
    }
}

/// Returns the ledger that an earlier agent or a kubelet left. Moves an invalid checkpoint aside. Passes a
/// reason and message for users to `report`.
pub(super) fn load(
    store: &dyn Store,
    remnants: impl FnOnce() -> Vec<Remnant>,
    report: impl Fn(&str, String),
) -> Devices {
    // The ledger's time starts now.
    let now = Duration::ZERO;
    let found = match store.read() {
        Ok(Some(bytes)) => match Devices::read(&bytes, now) {
            Ok(devices) => return devices,
            Err(reason) => Some(reason.to_string()),
        },
        Ok(None) => None,
        Err(error) => Some(error.to_string()),
    };
    if let Some(reason) = &found {
        let message = match store.set_aside() {
            Ok(moved_to) => format!("{reason}; moved it to {}", moved_to.display()),
            Err(error) => format!("{reason}; cannot move it aside: {error}"),
        };
        warn!("{message}");
        report("DeviceCheckpointCorrupt", message);
    }
    let (devices, dropped) = Devices::rebuilt(remnants(), now);
    for claim in dropped {
        warn!("dropping a container's claim to a device: {claim}");
    }
    let pods = devices.holders.pods().count();
    if found.is_some() {
        let message = format!("restored the devices of {pods} pods from the annotations of their containers");
        report("DeviceCheckpointRebuilt", message);
    }
    if found.is_some() || pods > 0 {
        warn!(pods, "restored device assignments from the annotations of containers");
    }
    devices
}

/// Progress of writing.
#[derive(Clone, Debug, Default)]
pub(super) struct Written {
    /// All changes up to this one have been written or have failed.
    upto: u64,
    trouble: Option<String>,
}

impl Written {
    pub(super) fn covers(&self, change: u64) -> bool {
        self.upto >= change
    }

    /// Returns the error of the last write, if it failed.
    pub(super) fn trouble(&self) -> Option<String> {
        self.trouble.clone()
    }
}

/// Task that writes the checkpoint.
#[derive(Debug)]
pub(super) struct Writer {
    shared: Arc<Shared>,
    store: Arc<dyn Store>,
    written: watch::Sender<Written>,
    text: Text,
}

pub(super) fn writer(shared: Arc<Shared>, store: Arc<dyn Store>) -> (Writer, watch::Receiver<Written>) {
    let (written, receiver) = watch::channel(Written::default());
    (Writer { shared, store, written, text: Text::default() }, receiver)
}

impl Writer {
    /// Writes until `shutdown`, then once more if needed.
    pub(super) async fn run(mut self, shutdown: CancellationToken) {
        let mut dirty = self.shared.dirty.subscribe();
        let settler = tokio::spawn(settle(Arc::clone(&self.store), self.written.subscribe()));
        loop {
            let upto = *dirty.borrow_and_update();
            let last = shutdown.is_cancelled();
            if upto > self.written.borrow().upto || self.written.borrow().trouble.is_some() {
                self.write(upto).await;
            }
            if last {
                break;
            }
            let failing = self.written.borrow().trouble.is_some();
            tokio::select! {
                () = shutdown.cancelled() => {}
                changed = dirty.changed() => if changed.is_err() { break },
                () = tokio::time::sleep(RETRY), if failing => {}
            }
        }
        drop(self.written);
        let _ = settler.await;
    }

    async fn write(&mut self, upto: u64) {
        let snapshot = self.shared.with_ledger(|ledger| ledger.devices.checkpoint());
        let store = Arc::clone(&self.store);
        let mut text = std::mem::take(&mut self.text);
        let write = move || {
            let bytes = text.write(snapshot).map_err(|e| e.to_string());
            (bytes.and_then(|bytes| store.replace(&bytes).map_err(|e| e.to_string())), text)
        };
        let (result, text) = blocking("writing the device checkpoint", write).await;
        self.text = text;
        let failed_before = self.written.borrow().trouble.is_some();
        match &result {
            Ok(()) if failed_before => info!("writing the device checkpoint succeeds again"),
            Ok(()) => {}
            Err(cause) => {
                self.shared.metrics.checkpoint_errors.inc();
                if !failed_before {
                    error!(
                        error = cause,
                        "cannot write the device checkpoint; pods get no devices until it can be written"
                    );
                }
            }
        }
        self.written.send_replace(Written { upto, trouble: result.err() });
    }
}

/// Syncs the folder after each write; skips to the newest.
async fn settle(store: Arc<dyn Store>, mut written: watch::Receiver<Written>) {
    while written.changed().await.is_ok() {
        if written.borrow_and_update().trouble.is_some() {
            continue;
        }
        let store = Arc::clone(&store);
        if let Err(error) = blocking("settling the device checkpoint", move || store.settle()).await {
            warn!(%error, "the device checkpoint may not survive a power cut");
        }
    }
}
