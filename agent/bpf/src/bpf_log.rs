//! Development: forwards the log of programs built with `cargo xtask build-ebpf --log` to tracing.
//!
//! The built-in object has no log: libbpf refuses the map that aya-log needs, and the shipped object must
//! load everywhere.

use aya::Ebpf;
use aya_log::EbpfLogger;
use std::os::fd::{AsFd, BorrowedFd};

/// The programs' log.
pub(super) struct BpfLog(EbpfLogger<ToTracing>);

impl BpfLog {
    /// Opens the log of an object; `None` if it was built without one.
    pub(super) fn open(ebpf: &mut Ebpf) -> Option<BpfLog> {
        ebpf.map("AYA_LOGS")?;
        match EbpfLogger::init_with_logger(ebpf, ToTracing) {
            Ok(logger) => Some(BpfLog(logger)),
            Err(error) => {
                tracing::warn!("cannot read the log of the kernel programs: {error}");
                None
            }
        }
    }

    /// Forwards new records.
    pub(super) fn flush(&mut self) {
        self.0.flush();
    }
}

impl AsFd for BpfLog {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Adapter from the `log` crate's interface, which aya-log uses, to tracing.
struct ToTracing;

impl log::Log for ToTracing {
    fn enabled(&self, _metadata: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        tracing::info!(target: "bpf", "{}: {}", record.level(), record.args());
    }

    fn flush(&self) {}
}
