//! Whom a container waited for, as a sentence: "waited 14 % of the last minute, mostly for batch-7 (62 %) and
//! system.slice/containerd.service (21 %)".

use beelet_proto::beelet::{SignalContainer, SignalHolder};

use crate::plain;

/// Less of the minute is not worth a sentence.
const LEAST_WAIT: f64 = 0.01;
/// Who had the CPU for less of the wait is not named.
const LEAST_SHARE: f64 = 0.05;

/// The sentence about a container of the pod `namespace`/`pod`; `None` if it hardly waited for a CPU.
pub(crate) fn sentence(container: &SignalContainer, namespace: &str, pod: &str) -> Option<String> {
    let waited = container.waited_for.as_ref().filter(|waited| waited.some >= LEAST_WAIT)?;
    let mut named: Vec<(String, f64)> = Vec::new();
    for holder in &waited.holders {
        let who = who(holder, namespace, pod, &container.name);
        // Several containers of one pod are one.
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
        [one] => format!(", mostly for {one}"),
        [some @ .., last] => format!(", mostly for {} and {last}", some.join(", ")),
    };
    Some(format!("waited {:.0} % of the last minute{whom}", waited.some * 100.0))
}

fn who(holder: &SignalHolder, namespace: &str, pod: &str, container: &str) -> String {
    let is_own = (holder.namespace.as_str(), holder.pod.as_str()) == (namespace, pod);
    if is_own && holder.container == container {
        "its own threads".to_owned()
    } else if is_own {
        "the pod's other containers".to_owned()
    } else if !holder.pod.is_empty() && holder.namespace == namespace {
        plain::line(&holder.pod).into_owned()
    } else if !holder.pod.is_empty() {
        plain::line(&format!("{}/{}", holder.namespace, holder.pod)).into_owned()
    } else if holder.cgroup == "/" {
        "kernel threads".to_owned()
    } else if !holder.cgroup.is_empty() {
        plain::line(holder.cgroup.trim_start_matches('/')).into_owned()
    } else if holder.own_quota {
        "its own CPU quota".to_owned()
    } else {
        "what is gone".to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use beelet_proto::beelet::SignalWaitedFor;

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
        assert_eq!(sentence(&container, "shop", "web").as_deref(), expected);
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
        let expected = "waited 50 % of the last minute, mostly for its own CPU quota (30 %), what is gone (30 %) \
                        and kube-system/dns (30 %)";
        check(0.5, &holders, Some(expected));
    }

    #[test]
    fn a_cgroups_name_cannot_leave_its_line() {
        let holders = [of_machine("/a\n\u{1b}[2J", 0.3)];
        check(0.5, &holders, Some("waited 50 % of the last minute, mostly for a\\n\\u{1b}[2J (30 %)"));
    }
}
