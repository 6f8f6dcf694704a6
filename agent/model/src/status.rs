//! What a pod's status and its containers' facts say, read in one way by all parts.

pub use beelet_ebpf_abi::OomKill;
use beelet_policy::pod::why::OOM;
use jiff::Timestamp;
use k8s_openapi::api::core::v1 as core;

/// Why the readiness of a pod that another agent runs is not known: it is only observed.
pub const OBSERVED: &str = "Observed";

/// Returns true if a status has a final phase: the pod ended, well or not, and none of its containers is
/// started again. Whether anything of it still runs is [`crate::ended::Ended`]'s to say.
#[must_use]
pub fn has_ended(status: Option<&core::PodStatus>) -> bool {
    matches!(status.and_then(|status| status.phase.as_deref()), Some("Succeeded" | "Failed"))
}

/// The runtime's identifier of a container's newest instance: `containerd://<id>` without the runtime's name.
/// None before there was one.
#[must_use]
pub fn runtime_id(status: &core::ContainerStatus) -> Option<&str> {
    Some(status.container_id.as_deref()?.split_once("://")?.1)
}

/// Kubernetes times have whole seconds.
pub fn whole_second(time: Timestamp) -> Timestamp {
    Timestamp::from_second(time.as_second()).unwrap_or(time)
}

/// What probes have published for one container instance.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct ProbeFacts {
    /// The readiness probe's result; `None` before it gave any.
    pub ready: Option<bool>,
    /// The startup probe's result; `None` before it gave any.
    pub started: Option<bool>,
}

/// A process of a container that the kernel killed for want of memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct OomFacts {
    /// The process and its memory.
    #[serde(flatten)]
    pub kill: OomKill,
    /// Its name as it set it; empty if unknown.
    #[serde(default)]
    pub command: String,
    /// Whether the container's first process was killed, with which the container ends: this one, or one
    /// beside it.
    pub first: bool,
}

impl OomFacts {
    /// All memory that it had.
    pub fn size(&self) -> u64 {
        self.kill.anon_rss.saturating_add(self.kill.file_rss).saturating_add(self.kill.shmem_rss)
    }

    /// A sentence for people that says what the kernel saw. `limit` is the container's memory limit as its
    /// manifest has it.
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

/// A time of the runtime's, nanoseconds since the epoch; 0 means never.
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
