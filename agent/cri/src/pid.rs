//! The processes behind containers and sandboxes.

use std::collections::HashMap;

/// Returns the process id in the `info` of a verbose status of a container or a sandbox.
#[must_use]
pub fn pid_of(info: &HashMap<String, String>) -> Option<u32> {
    info.get("info").and_then(|info| pid_in(info))
}

/// Returns `pid` from the JSON. 0 means that the process does not exist.
fn pid_in(info: &str) -> Option<u32> {
    // serde skips the other fields, tens of kilobytes.
    #[derive(serde::Deserialize)]
    struct Info {
        pid: u32,
    }
    let info: Info = serde_json::from_str(info).ok()?;
    Some(info.pid).filter(|pid| *pid > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_process_is_in_the_verbose_status() {
        assert_eq!(pid_in(r#"{"sandboxID":"s","pid":4711,"removing":false}"#), Some(4711));
        assert_eq!(pid_in(r#"{"pid":0}"#), None);
        assert_eq!(pid_in("not json"), None);
    }
}
