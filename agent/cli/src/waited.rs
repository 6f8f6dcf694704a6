//! Sentences about the causes of a container's waits: "waited 14 % of the last minute, mostly for batch-7 (62
//! %) and system.slice/containerd.service (21 %)".

use beelet_proto::beelet::{SignalContainer, SignalDisturber, SignalHolder, SignalWaitedFor};

use crate::plain;

/// Minimum share of the minute that is worth a sentence.
const LEAST_WAIT: f64 = 0.01;
/// Minimum share of the wait for a cause to be named.
const LEAST_SHARE: f64 = 0.05;

/// A wait of a container in the pod `namespace`/`pod`.
#[derive(Clone, Copy)]
struct Waiting<'a> {
    waited: Option<&'a SignalWaitedFor>,
    container: &'a str,
    namespace: &'a str,
    pod: &'a str,
    /// Phrases for the container itself and for its own limit.
    own: [&'a str; 2],
}

/// Returns the sentence about waits for CPU of a container in the pod `namespace`/`pod`, or None below
/// [`LEAST_WAIT`].
pub(crate) fn for_cpu(of: &SignalContainer, namespace: &str, pod: &str) -> Option<String> {
    let own = ["its own threads", "its own CPU quota"];
    let waited = of.waited_for.as_ref();
    Waiting { waited, container: &of.name, namespace, pod, own }.sentence("", "mostly for")
}

/// Returns the sentence about waits for memory: "waited 8 % of the last minute for memory, mostly for the
/// growth of batch-7 (62 %)".
pub(crate) fn for_memory(of: &SignalContainer, namespace: &str, pod: &str) -> Option<String> {
    let waiting = Waiting {
        waited: of.waited_for_memory.as_ref(),
        container: &of.name,
        namespace,
        pod,
        own: ["itself", "its own limit"],
    };
    let of_limit = waiting.waited.is_some_and(|waited| waited.holders.iter().any(|holder| holder.own_quota));
    waiting.sentence(" for memory", if of_limit { "because of" } else { "mostly for the growth of" })
}

/// Returns the sentence about a container's exclusive CPUs: "has the CPUs 2-3 for itself, idle for 12 % of
/// the last minute, disturbed 5.3 times per second: LOC Local timer interrupts (100/s)".
pub(crate) fn pinned(of: &SignalContainer) -> Option<String> {
    let pinned = of.pinned.as_ref()?;
    let cause = |one: &SignalDisturber| format!("{} ({:.1}/s)", plain::line(&one.name), one.per_second);
    let causes: Vec<String> = pinned.disturbers.iter().map(cause).collect();
    let causes = if causes.is_empty() { String::new() } else { format!(": {}", causes.join(", ")) };
    Some(format!(
        "has the CPUs {} for itself, idle for {:.0} % of the last minute, disturbed {:.1} times per second{causes}",
        plain::line(&pinned.cpus),
        pinned.idle * 100.0,
        pinned.disturbances_per_second
    ))
}

impl Waiting<'_> {
    fn sentence(self, what: &str, because: &str) -> Option<String> {
        let waited = self.waited.filter(|waited| waited.some >= LEAST_WAIT)?;
        let mut named: Vec<(String, f64)> = Vec::new();
        for holder in &waited.holders {
            let who = self.who(holder);
            // Several containers of one pod count as one cause.
            match named.iter_mut().find(|(known, _)| *known == who) {
                Some((_, share)) => *share += holder.share,
                None => named.push((who, holder.share)),
            }
        }
        named.retain(|(_, share)| *share >= LEAST_SHARE);
        named.sort_by(|(_, a), (_, b)| b.total_cmp(a));
        let words: Vec<String> =
            named.iter().map(|(who, share)| format!("{who} ({:.0} %)", share.min(1.0) * 100.0)).collect();
        let whom = match &words[..] {
            [] => String::new(),
            [one] => format!(", {because} {one}"),
            [some @ .., last] => format!(", {because} {} and {last}", some.join(", ")),
        };
        Some(format!("waited {:.0} % of the last minute{what}{whom}", waited.some * 100.0))
    }

    fn who(self, holder: &SignalHolder) -> String {
        let [itself, own_bound] = self.own;
        let is_own = (holder.namespace.as_str(), holder.pod.as_str()) == (self.namespace, self.pod);
        if is_own && holder.container == self.container {
            itself.to_owned()
        } else if is_own {
            "the pod's other containers".to_owned()
        } else if !holder.pod.is_empty() && holder.namespace == self.namespace {
            plain::line(&holder.pod).into_owned()
        } else if !holder.pod.is_empty() {
            plain::line(&format!("{}/{}", holder.namespace, holder.pod)).into_owned()
        } else if holder.cgroup == "/" {
            "kernel threads".to_owned()
        } else if !holder.cgroup.is_empty() {
            plain::line(holder.cgroup.trim_start_matches('/')).into_owned()
        } else if holder.own_quota {
            own_bound.to_owned()
        } else {
            "terminated workloads".to_owned()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_pod(namespace: &str, pod: &str, container: &str, share: f64) -> SignalHolder {
        let (namespace, pod, container) = (namespace.into(), pod.into(), container.into());
        SignalHolder { namespace, pod, container, share, ..SignalHolder::default() }
    }

    fn of_machine(cgroup: &str, share: f64) -> SignalHolder {
        SignalHolder { cgroup: cgroup.into(), share, ..SignalHolder::default() }
    }

    #[track_caller]
    fn check(some: f64, holders: &[SignalHolder], expected: Option<&str>) {
        let waited_for = Some(SignalWaitedFor { some, holders: holders.to_vec() });
        let container = SignalContainer { name: "app".into(), waited_for, ..SignalContainer::default() };
        assert_eq!(for_cpu(&container, "shop", "web").as_deref(), expected);
    }

    #[test]
    fn the_sentence_names_those_that_had_the_cpu_most() {
        let batch = |share| of_pod("shop", "batch-7", "main", share);
        let containerd = of_machine("/system.slice/containerd.service", 0.21);
        check(
            0.14,
            &[batch(0.62), containerd],
            Some(
                "waited 14 % of the last minute, mostly for batch-7 (62 %) and \
                 system.slice/containerd.service (21 %)",
            ),
        );
        check(
            0.14,
            &[batch(0.4), batch(0.3)],
            Some("waited 14 % of the last minute, mostly for batch-7 (70 %)"),
        );
        check(0.14, &[batch(0.04)], Some("waited 14 % of the last minute"));
        check(0.009, &[batch(0.62)], None);
    }

    #[test]
    fn who_is_no_other_pod_is_said_in_words() {
        let holders =
            [of_pod("shop", "web", "app", 0.3), of_pod("shop", "web", "sidecar", 0.3), of_machine("/", 0.3)];
        let expected = "waited 50 % of the last minute, mostly for its own threads (30 %), the pod's other \
                        containers (30 %) and kernel threads (30 %)";
        check(0.5, &holders, Some(expected));
        let unnamed = SignalHolder { share: 0.3, ..SignalHolder::default() };
        let quota = SignalHolder { own_quota: true, ..unnamed.clone() };
        let holders = [quota, unnamed, of_pod("kube-system", "dns", "", 0.3)];
        let expected = "waited 50 % of the last minute, mostly for its own CPU quota (30 %), terminated workloads (30 %) \
                        and kube-system/dns (30 %)";
        check(0.5, &holders, Some(expected));
    }

    #[test]
    fn a_cgroups_name_cannot_leave_its_line() {
        let holders = [of_machine("/a\n\u{1b}[2J", 0.3)];
        check(0.5, &holders, Some("waited 50 % of the last minute, mostly for a\\n\\u{1b}[2J (30 %)"));
    }

    #[test]
    fn whose_growth_it_waited_for_is_said_of_memory() {
        let check = |holders: &[SignalHolder], expected: &str| {
            let waited_for_memory = Some(SignalWaitedFor { some: 0.08, holders: holders.to_vec() });
            let container =
                SignalContainer { name: "app".into(), waited_for_memory, ..SignalContainer::default() };
            assert_eq!(for_memory(&container, "shop", "web").as_deref(), Some(expected));
            assert_eq!(for_cpu(&container, "shop", "web"), None);
        };
        let holders = [of_pod("shop", "batch-7", "main", 0.62), of_pod("shop", "web", "app", 0.3)];
        check(
            &holders,
            "waited 8 % of the last minute for memory, mostly for the growth of batch-7 (62 %) and itself (30 %)",
        );
        let limit = SignalHolder { own_quota: true, share: 1.0, ..SignalHolder::default() };
        check(&[limit], "waited 8 % of the last minute for memory, because of its own limit (100 %)");
    }
}
