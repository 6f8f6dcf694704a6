//! Reclaim on request: takes pages from a cgroup although no process needs memory (`memory.reclaim`, cgroup
//! v2, Linux 5.19).
//!
//! The kernel keeps nothing of a request, so that a request needs no undoing. Must never choose the cgroup or
//! the amount: `beelet_policy` does.

use std::{
    fs::OpenOptions,
    io::{self, Write as _},
    time::Instant,
};

use super::{CgroupError, Cgroups};

/// The file of requests.
const FILE: &str = "memory.reclaim";
/// Maximum amount of one request to the kernel, so that a deadline is kept: the kernel ends a request only
/// when it is fulfilled, or after many attempts.
const CHUNK: u64 = 4 << 20;

/// The kind of pages to take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pages {
    /// Only file pages: nothing moves to swap.
    File,
    /// File pages and anonymous pages, balanced by the kernel.
    Any,
    /// Anonymous pages before file pages.
    AnonFirst,
}

impl Pages {
    /// Returns the argument of a request; empty for the kernel's own balance (Linux 6.9 has the argument).
    const fn argument(self) -> &'static str {
        match self {
            Self::File => " swappiness=0",
            Self::Any => "",
            Self::AnonFirst => " swappiness=200",
        }
    }
}

/// Returns true if pages can be taken from the cgroup `path`.
#[must_use]
pub fn is_supported(cgroups: &Cgroups, path: &str) -> bool {
    cgroups.paths.cgroup2_path(path).is_some_and(|dir| dir.join(FILE).exists())
}

/// Takes up to `bytes` of the cgroup `path` and those below it, until `deadline`. Returns the bytes of the
/// fulfilled requests; less than `bytes` means that the kernel found no more, or that the deadline passed.
///
/// # Errors
/// The kernel lacks the file or the argument for `pages` ([`CgroupError::is_unsupported_reclaim`]), the
/// cgroup was removed, or the file cannot be written.
pub fn reclaim_pages(
    cgroups: &Cgroups,
    path: &str,
    bytes: u64,
    pages: Pages,
    deadline: Instant,
) -> Result<u64, CgroupError> {
    let Some(dir) = cgroups.paths.cgroup2_path(path) else {
        return Err(CgroupError::NoController { controller: "memory" });
    };
    let file = dir.join(FILE);
    let mut taken = 0_u64;
    while taken < bytes && Instant::now() < deadline {
        let chunk = CHUNK.min(bytes - taken);
        match request(&file, chunk, pages) {
            Ok(()) => taken = taken.saturating_add(chunk),
            // The kernel took less than requested.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
            Err(error) => return Err(CgroupError::io("write", &file, error)),
        }
    }
    Ok(taken)
}

fn request(file: &std::path::Path, bytes: u64, pages: Pages) -> io::Result<()> {
    let text = format!("{bytes}{}", pages.argument());
    // A single write: a second one would be another request.
    let written = OpenOptions::new().write(true).truncate(true).open(file)?.write(text.as_bytes())?;
    if written == text.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

#[cfg(test)]
mod tests {
    use std::{fs, time::Duration};

    use super::*;
    use crate::{Version, read::tests::cgroups};

    #[test]
    fn a_request_has_the_amount_and_the_kind_of_pages() {
        let dir = tempfile::tempdir().unwrap();
        let cgroups = cgroups(dir.path(), Version::V2);
        let pod = dir.path().join("unified/pod");
        fs::create_dir_all(&pod).unwrap();
        let soon = || Instant::now() + Duration::from_secs(60);
        assert!(!is_supported(&cgroups, "/pod"));
        let missing = reclaim_pages(&cgroups, "/pod", 4096, Pages::Any, soon()).unwrap_err();
        assert!(missing.is_gone() && !pod.join(FILE).exists(), "{missing}");
        fs::write(pod.join(FILE), "").unwrap();
        assert!(is_supported(&cgroups, "/pod"));
        for (bytes, pages, last) in [
            (4096, Pages::Any, "4096"),
            (CHUNK + 8192, Pages::File, "8192 swappiness=0"),
            (1 << 20, Pages::AnonFirst, "1048576 swappiness=200"),
        ] {
            assert_eq!(reclaim_pages(&cgroups, "/pod", bytes, pages, soon()).unwrap(), bytes);
            assert_eq!(fs::read_to_string(pod.join(FILE)).unwrap(), last);
        }
        assert_eq!(reclaim_pages(&cgroups, "/pod", 4096, Pages::Any, Instant::now()).unwrap(), 0);
    }
}
