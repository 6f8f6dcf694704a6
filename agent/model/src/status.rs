//! Shared readers of a pod's status and its containers' facts.

pub use beelet_ebpf_abi::OomKill;
use beelet_policy::pod::why::OOM;
use jiff::Timestamp;
use k8s_openapi::api::core::v1 as core;

/// Reason for the unknown readiness of a pod that another agent runs and beelet observes.
pub const OBSERVED: &str = "Observed";

/// Returns true if a status has a final phase: the pod succeeded or failed, and no container restarts.
/// [`crate::ended::Ended`] proves that no container runs any more.
#[must_use]
pub fn has_ended(status: Option<&core::PodStatus>) -> bool {
    matches!(status.and_then(|status| status.phase.as_deref()), Some("Succeeded" | "Failed"))
}

/// Returns the runtime's identifier of a container's newest instance: `containerd://<id>` without the
/// runtime's name. None before the first instance.
#[must_use]
pub fn runtime_id(status: &core::ContainerStatus) -> Option<&str> {
    Some(status.container_id.as_deref()?.split_once("://")?.1)
}

/// Truncates a time to whole seconds, as Kubernetes times have.
pub fn whole_second(time: Timestamp) -> Timestamp {
    Timestamp::from_second(time.as_second()).unwrap_or(time)
}

/// Published probe results of one container instance.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct ProbeFacts {
    /// Result of the readiness probe; `None` before the first.
    pub ready: Option<bool>,
    /// Result of the startup probe; `None` before the first.
    pub started: Option<bool>,
}

/// A process of a container that the kernel OOM-killed.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct OomFacts {
    /// The process and its memory.
    #[serde(flatten)]
    pub kill: OomKill,
    /// Name that the process has set; empty if unknown.
    #[serde(default)]
    pub command: String,
    /// True if the container's first process was killed, this one or another, which ends the container.
    pub first: bool,
}

impl OomFacts {
    /// Returns the total memory of the process.
    pub fn size(&self) -> u64 {
        self.kill.anon_rss.saturating_add(self.kill.file_rss).saturating_add(self.kill.shmem_rss)
    }

    /// Formats a sentence about the kill. `limit` is the container's memory limit as in the
    /// manifest.
    pub fn sentence(&self, limit: Option<&str>) -> String {
        let mib = |bytes: u64| format!("{} MiB", bytes >> 20);
        let limit = limit.map_or_else(
            || "the container has no memory limit: the node or the pod ran out".to_owned(),
            |limit| format!("the container's memory limit is {limit}"),
        );
        let command = if self.command.is_empty() { String::new() } else { format!(" ({})", self.command) };
        format!(
            "{OOM} {}{command} for want of memory: it had {} of its own, {} of files and {} shared; {limit}",
            self.kill.pid,
            mib(self.kill.anon_rss),
            mib(self.kill.file_rss),
            mib(self.kill.shmem_rss)
        )
    }
}

/// Converts a time of the runtime, in nanoseconds since the epoch; 0 means never.
pub fn timestamp(nanoseconds: i64) -> Option<Timestamp> {
    if nanoseconds <= 0 {
        return None;
    }
    Timestamp::from_nanosecond(i128::from(nanoseconds)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn facts_of_an_oom_kill_lie_flat_in_a_record_as_they_always_have() {
        let kill =
            OomKill { pid: 7, total_vm: 4, anon_rss: 3, file_rss: 2, shmem_rss: 1, ..OomKill::default() };
        let facts = OomFacts { kill, command: "java".to_owned(), first: true };
        let record = serde_json::json!({
            "pid": 7, "command": "java", "first": true, "anon_rss": 3, "file_rss": 2, "shmem_rss": 1, "total_vm": 4,
        });
        assert_eq!(serde_json::to_value(&facts).unwrap(), record);
        assert_eq!(serde_json::from_value::<OomFacts>(record).unwrap(), facts);
    }
}
