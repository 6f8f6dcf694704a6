//! The checkpoint: read once at the start, written whenever it must say something else. The format is the
//! kubelet's, from `policy`; the file is `state`'s.
//!
//! A write is on the disk, whole, before it takes the place of the one before, and there after kill -9 as
//! soon as it is reported. Only for the folder the disk is waited for in the background: a power cut may
//! bring the checkpoint before it back, and then no container runs whose devices could be given away twice.

use std::{fmt, path::PathBuf, sync::Arc, time::Duration};

use beelet_policy::devices::{Devices, Remnant, checkpoint::Text};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use super::ledger::Shared;
use beelet_base::blocking::blocking;
use beelet_state::{ForeignFile, StateError};

/// The pause after a failed write.
const RETRY: Duration = Duration::from_secs(1);

/// Where the checkpoint is kept.
pub trait Store: fmt::Debug + Send + Sync {
    /// What it holds; `None` if there is nothing.
    ///
    /// # Errors
    /// It can't be read.
    fn read(&self) -> Result<Option<Vec<u8>>, StoreError>;
    /// Puts this in place of it; it must survive kill -9, and after a power cut there must be the one or the
    /// other.
    ///
    /// # Errors
    /// It can't be written; then what was there still is.
    fn replace(&self, bytes: &[u8]) -> Result<(), StoreError>;
    /// Makes what was last put in place survive a power cut.
    ///
    /// # Errors
    /// The disk fails.
    fn settle(&self) -> Result<(), StoreError>;
    /// Takes it out of the way; where to.
    ///
    /// # Errors
    /// It can't be moved.
    fn set_aside(&self) -> Result<PathBuf, StoreError>;
}

/// Why the checkpoint can't be kept, a sentence.
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

/// The ledger as an earlier agent, or a kubelet, left it. A checkpoint that can't be trusted is set aside.
/// `tell` is told what people should know: a reason and a sentence.
pub(super) fn load(
    store: &dyn Store,
    remnants: impl FnOnce() -> Vec<Remnant>,
    tell: impl Fn(&str, String),
) -> Devices {
    // The ledger's time begins now.
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
            Ok(moved_to) => format!("{reason}; it was set aside as {}", moved_to.display()),
            Err(error) => format!("{reason}; and it can't be set aside: {error}"),
        };
        warn!("{message}");
        tell("DeviceCheckpointCorrupt", message);
    }
    let (devices, dropped) = Devices::rebuilt(remnants(), now);
    for claim in dropped {
        warn!("a container's claim to a device is dropped: {claim}");
    }
    let pods = devices.pods().count();
    if found.is_some() {
        let message = format!("devices of {pods} pods were found out from the containers that are here");
        tell("DeviceCheckpointRebuilt", message);
    }
    if found.is_some() || pods > 0 {
        warn!(pods, "who has which device was found out from the containers that are here");
    }
    devices
}

/// How far writing has come.
#[derive(Clone, Debug, Default)]
pub(super) struct Written {
    /// All changes up to this one are dealt with.
    upto: u64,
    trouble: Option<String>,
}

impl Written {
    pub(super) fn covers(&self, change: u64) -> bool {
        self.upto >= change
    }

    /// The reason why they aren't on disk, if so.
    pub(super) fn trouble(&self) -> Option<String> {
        self.trouble.clone()
    }
}

/// The task that writes.
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
    /// Writes until `shutdown`, and then what is left.
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
        let snapshot = self.shared.look(|ledger| ledger.devices.checkpoint());
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
            Ok(()) if failed_before => info!("the device checkpoint can be written again"),
            Ok(()) => {}
            Err(cause) => {
                self.shared.metrics.checkpoint_errors.inc();
                if !failed_before {
                    error!(
                        error = cause,
                        "the device checkpoint can't be written: no pod gets devices meanwhile"
                    );
                }
            }
        }
        self.written.send_replace(Written { upto, trouble: result.err() });
    }
}

/// Waits for the disk after each write, the newest at a time.
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
