//! Requirements that this machine does not meet, and how skipped tests are reported.

use std::fmt;
use std::io::Write as _;
use std::path::PathBuf;

/// Unmet requirement, with its remedy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Missing {
    /// Unmet requirement as a clause: "root is required".
    pub what: String,
    /// Remedy in the imperative, or a command: "run the tests as root".
    pub remedy: String,
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (remedy: {})", self.what, self.remedy)
    }
}

impl std::error::Error for Missing {}

/// Creates a requirement that only the test itself can check.
pub fn missing(what: impl Into<String>, remedy: impl Into<String>) -> Missing {
    Missing { what: what.into(), remedy: remedy.into() }
}

/// Returns the path of a program in PATH, or in the system folders that an ordinary user's PATH lacks.
pub fn find_program(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain(
        ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"].map(PathBuf::from),
    );
    let all = std::env::join_paths(folders).ok()?;
    which::which_in(program, Some(all), "/").ok()
}

/// Returns the program that `KUBE_APISERVER` names.
///
/// # Errors
/// `KUBE_APISERVER` is not set, or does not name a file.
pub fn kube_apiserver() -> Result<PathBuf, Missing> {
    let named = std::env::var_os("KUBE_APISERVER").filter(|path| !path.is_empty()).map(PathBuf::from);
    let remedy = "set KUBE_APISERVER to the path of a kube-apiserver";
    match named {
        None => Err(missing("KUBE_APISERVER is not set", remedy)),
        Some(path) if path.is_file() => Ok(path),
        Some(path) => {
            Err(missing(format!("KUBE_APISERVER names {}, which is not a file", path.display()), remedy))
        }
    }
}

/// Reports the calling test as skipped, on standard error and in the file that `BEELET_SKIPPED` names. For
/// the macro `require!` of the crate `beelet-tests`.
pub fn skip(reason: &Missing) {
    let thread = std::thread::current();
    leave_out(thread.name().unwrap_or("a test"), &reason.to_string());
}

/// Like [`skip`], for a test of another process.
pub fn leave_out(test: &str, reason: &str) {
    let line = skip_line(test, reason);
    eprint!("{line}");
    if let Some(file) = std::env::var_os("BEELET_SKIPPED") {
        let opened = std::fs::OpenOptions::new().append(true).create(true).open(&file);
        if let Err(error) = opened.and_then(|mut opened| opened.write_all(line.as_bytes())) {
            eprintln!("cannot write {}: {error}", file.display());
        }
    }
}

/// Returns the line of a skipped test. A reason that quotes a program may have several lines; the file has
/// one line per test.
fn skip_line(test: &str, reason: &str) -> String {
    let reason: Vec<&str> = reason.split_whitespace().collect();
    format!("SKIPPED {test}: {}\n", reason.join(" "))
}

#[cfg(test)]
mod tests {
    use super::skip_line;

    #[test]
    fn a_reason_of_several_lines_becomes_one() {
        let reason = "mount(8) failed:\n       dmesg(1) may have more information.\n";
        assert_eq!(
            skip_line("quotas::xfs", reason),
            "SKIPPED quotas::xfs: mount(8) failed: dmesg(1) may have more information.\n"
        );
    }
}
