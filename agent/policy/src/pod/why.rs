//! The reason why a pod is not in its expected state, in one line: the deepest cause in its status and
//! events.
//!
//! A status says "containers with unready status: [c]" (the kubelet's words, which programs parse); a person
//! wants to know what is wrong with c.

use std::borrow::Cow;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Container, ContainerStateTerminated, ContainerStatus, Pod, PodStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

/// Maximum length of a quoted text of a container or the runtime, in characters.
const MAX_QUOTE: usize = 160;
/// Reasons for waiting that are part of a normal start.
const STARTING: &[&str] = &["", "ContainerCreating", "PodInitializing"];

/// Prefixes of warnings about probes whose failure ends a container.
const FATAL_PROBES: [&str; 2] = ["Liveness probe failed", "Startup probe failed"];

/// Prefix of the message of a container that the kernel killed for lack of memory.
pub const OOM: &str = "the kernel killed process";

/// Reason of the event about a container's end if its last words are only in its log.
pub const ENDED: &str = "Ended";
/// Text before the log's last line in that event.
const LAST_LINE: &str = "last log line: ";

/// Reason of the event about a pod that cannot be terminated, the kubelet's (`events.FailedToKillPod`).
pub const KILL_FAILED: &str = "FailedKillPod";
/// Reasons of events that explain why a pod's termination exceeds its grace period.
const NOT_ENDED: [&str; 2] = [KILL_FAILED, "FailedUnprepareDynamicResources"];

/// Returns the message of an event with the reason [`ENDED`].
#[must_use]
pub fn ended(exit_code: i32, line: &str) -> String {
    format!("exit code {exit_code}, {LAST_LINE}{}", quote(line))
}

/// Describes a container's end: "exit 3, last words: cannot open app.conf". `logged` is the last line of its
/// log, for a container without a termination message.
#[must_use]
pub fn end_of(ended: &ContainerStateTerminated, logged: Option<&str>) -> String {
    let code = ended.exit_code;
    let reason = ended.reason.as_deref().unwrap_or_default();
    let what = match (reason, ended.signal) {
        ("OOMKilled", _) => "killed by the kernel (out of memory)".to_owned(),
        ("" | "Error" | "Completed", Some(signal)) if signal != 0 => format!("ended by signal {signal}"),
        ("" | "Error" | "Completed", _) => format!("exit {code}"),
        (reason, _) => format!("{reason}, exit {code}"),
    };
    let words = ended.message.as_deref().unwrap_or_default();
    let last = words.lines().rev().find(|line| !line.trim().is_empty());
    match (reason, last.or(logged)) {
        // The agent's own message, which is complete.
        ("OOMKilled", Some(line)) if line.starts_with(OOM) => shortened(line, 2 * MAX_QUOTE),
        ("" | "Error" | "Completed" | "OOMKilled", Some(line)) => {
            format!("{what}, last words: {}", quote(line))
        }
        // The container has never written anything: the message is the runtime's.
        (_, Some(line)) => format!("{what}: {}", quote(line)),
        (_, None) => what,
    }
}

/// A warning among a pod's events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Warning<'a> {
    /// The container's name; empty for the pod itself.
    pub container: &'a str,
    /// The event's reason.
    pub reason: &'a str,
    /// The event's message.
    pub message: &'a str,
    /// Last occurrence.
    pub at: Timestamp,
}

/// Returns the cause, or `None` if nothing is wrong. `warnings` are about this pod, the newest last.
#[must_use]
pub fn why(pod: &Pod, warnings: &[Warning<'_>], now: Timestamp) -> Option<String> {
    let status = pod.status.as_ref()?;
    let is_deleted = pod.metadata.deletion_timestamp.is_some();
    if let Some(reason) = status.reason.as_deref().filter(|reason| !reason.is_empty()) {
        let own = with(reason, status.message.as_deref());
        let still_ends = is_deleted || status.phase.as_deref() != Some("Failed");
        let stuck = not_ended(pod, status, warnings).filter(|_| still_ends);
        return Some(stuck.map_or(own.clone(), |stuck| format!("{own}; {stuck}")));
    }
    if is_deleted {
        return not_ended(pod, status, warnings);
    }
    if status.phase.as_deref() == Some("Succeeded") {
        return None;
    }
    let spec = pod.spec.as_ref()?;
    let init = spec.init_containers.as_deref().unwrap_or_default();
    let look = PodFacts { status, warnings, now };
    let of_init = statuses(status.init_container_statuses.as_ref()).find_map(|one| look.container(one, init));
    let of_main =
        || statuses(status.container_statuses.as_ref()).find_map(|one| look.container(one, &spec.containers));
    of_init.or_else(of_main).or_else(|| look.newest("", None).filter(|_| !is_ready(status)))
}

/// Explains why a pod has not started whose name still belongs to a force-deleted pod. `warnings` are about
/// that pod, the newest last.
#[must_use]
pub fn waits_for_deleted(warnings: &[Warning<'_>]) -> String {
    let waits = "waiting for the force-deleted pod of the same name";
    let stuck = warnings.iter().rev().find(|warning| NOT_ENDED.contains(&warning.reason));
    match stuck.map(|stuck| quote(&without_subject(stuck.message))) {
        Some(stuck) => format!("{waits}: {stuck}"),
        None => format!("{waits}, which is still being stopped"),
    }
}

/// Explains, from the events since the request, why a pod has not terminated yet.
fn not_ended(pod: &Pod, status: &PodStatus, warnings: &[Warning<'_>]) -> Option<String> {
    let until = pod.metadata.deletion_timestamp.as_ref().map(|time| time.0.as_second());
    let grace = pod.metadata.deletion_grace_period_seconds.unwrap_or(0);
    let since = until.map(|until| until.saturating_sub(grace));
    let since = since.or_else(|| status.start_time.as_ref().map(|time| time.0.as_second()));
    let found = warnings.iter().rev().find(|warning| NOT_ENDED.contains(&warning.reason))?;
    let is_recent = since.is_none_or(|since| found.at.as_second() >= since);
    is_recent.then(|| quote(&without_subject(found.message)))
}

fn statuses(all: Option<&Vec<ContainerStatus>>) -> impl Iterator<Item = &ContainerStatus> {
    all.into_iter().flatten()
}

fn is_ready(status: &PodStatus) -> bool {
    status.conditions.iter().flatten().any(|c| c.type_ == "Ready" && c.status == "True")
}

/// The inputs of an explanation.
struct PodFacts<'a> {
    status: &'a PodStatus,
    warnings: &'a [Warning<'a>],
    now: Timestamp,
}

impl PodFacts<'_> {
    /// Returns the problem of a container, if any.
    fn container(&self, container: &ContainerStatus, specs: &[Container]) -> Option<String> {
        let state = container.state.as_ref()?;
        let name = &container.name;
        if let Some(waiting) = &state.waiting {
            return match waiting.reason.as_deref().unwrap_or_default() {
                reason if STARTING.contains(&reason) => None,
                "CrashLoopBackOff" => Some(match self.last_end(container) {
                    Some(end) => format!("container {name}: {end}; restarting after a back-off"),
                    None => format!("container {name}: crashing repeatedly"),
                }),
                reason => Some(format!("container {name}: {}", with(reason, waiting.message.as_deref()))),
            };
        }
        if let Some(ended) = &state.terminated {
            return (ended.exit_code != 0).then(|| format!("container {name}: {}", self.end(name, ended)));
        }
        if container.ready || !specs.iter().any(|spec| spec.name == *name && is_awaited(spec)) {
            return None;
        }
        // Problems of the previous instance are no longer the cause.
        let started = state.running.as_ref().and_then(|running| running.started_at.as_ref());
        let cause = self.newest(name, started.map(|time| time.0));
        let cause = cause.unwrap_or_else(|| format!("container {name}: its probes have not passed yet"));
        Some(format!("{cause}{}", self.unready_since().map_or_else(String::new, |text| format!(" ({text})"))))
    }

    /// Returns the newest warning about a container, or about the pod itself, from `since` on and from the
    /// pod's current run: a manifest that comes back unchanged keeps its former UID, and so do its former
    /// events.
    fn newest(&self, container: &str, since: Option<Timestamp>) -> Option<String> {
        let began = self.status.start_time.as_ref().map(|time| time.0).max(since);
        // Times in a status are whole seconds.
        let is_recent = |at: Timestamp| began.is_none_or(|began| at.as_second() >= began.as_second());
        let is_cause = |warning: &&Warning<'_>| warning.container == container && warning.reason != ENDED;
        let found = self.warnings.iter().rev().find(is_cause)?;
        let found = Some(found).filter(|warning| is_recent(warning.at))?;
        let words = quote(&without_subject(found.message));
        Some(if container.is_empty() { words } else { format!("container {container}: {words}") })
    }

    fn last_end(&self, container: &ContainerStatus) -> Option<String> {
        let ended = container.last_state.as_ref()?.terminated.as_ref()?;
        let end = self.end(&container.name, ended);
        Some(match self.ended_for(&container.name, ended) {
            Some(probe) => format!("{}, so it was stopped ({end})", quote(probe)),
            None => end,
        })
    }

    /// Returns the failed probe that ended an instance: it failed while the instance ran.
    fn ended_for(&self, container: &str, ended: &ContainerStateTerminated) -> Option<&str> {
        let second = |time: &Option<Time>| Some(time.as_ref()?.0.as_second());
        let ran = second(&ended.started_at)?..=second(&ended.finished_at)?;
        let is_its = |warning: &&Warning<'_>| {
            let is_fatal = FATAL_PROBES.iter().any(|probe| warning.message.starts_with(probe));
            warning.container == container && is_fatal && ran.contains(&warning.at.as_second())
        };
        self.warnings.iter().rev().find(is_its).map(|warning| warning.message)
    }

    fn end(&self, container: &str, ended: &ContainerStateTerminated) -> String {
        end_of(ended, self.last_line(container, ended))
    }

    /// Returns the last line of the container's log, recorded after this instance's end.
    fn last_line(&self, container: &str, ended: &ContainerStateTerminated) -> Option<&str> {
        let at = ended.finished_at.as_ref()?.0.as_second();
        let is_its = |warning: &&Warning<'_>| {
            warning.reason == ENDED && warning.container == container && warning.at.as_second() >= at
        };
        let event = self.warnings.iter().rev().find(is_its)?;
        Some(event.message.split_once(LAST_LINE)?.1)
    }

    fn unready_since(&self) -> Option<String> {
        let ready = self.status.conditions.iter().flatten().find(|c| c.type_ == "Ready")?;
        let since = ready.last_transition_time.as_ref()?.0;
        let seconds = self.now.as_second().saturating_sub(since.as_second()).max(0);
        Some(match seconds {
            0..=119 => format!("not ready for {seconds} s"),
            120..=7199 => format!("not ready for {} min", seconds / 60),
            _ => format!("not ready for {} h", seconds / 3600),
        })
    }
}

/// Returns true if readiness depends on a probe of the container: a main container is always awaited, an init
/// container only if it is a sidecar.
fn is_awaited(spec: &Container) -> bool {
    spec.readiness_probe.is_some() || spec.startup_probe.is_some()
}

fn with(reason: &str, message: Option<&str>) -> String {
    match message.map(quote).filter(|message| !message.is_empty()) {
        Some(message) => format!("{reason}: {message}"),
        None => reason.to_owned(),
    }
}

/// Removes the pod's name from a message: the line is about that pod.
fn without_subject(message: &str) -> Cow<'_, str> {
    let parts = message.split_once("cannot run the sandbox of pod ");
    let parts = parts.and_then(|(before, after)| Some((before, after.split_once(": ")?.1)));
    parts.map_or(Cow::Borrowed(message), |(before, cause)| Cow::Owned(format!("{before}{cause}")))
}

/// Returns the first line of a text, shortened in the middle: an error's first words say what failed, its
/// last ones why.
fn quote(text: &str) -> String {
    shortened(text, MAX_QUOTE)
}

fn shortened(text: &str, most: usize) -> String {
    let line: Vec<char> = text.trim().lines().next().unwrap_or_default().chars().collect();
    let Some(over) = line.len().checked_sub(most + 1) else { return line.iter().collect() };
    let (begin, end) = line.split_at(most / 2);
    let end = end.iter().skip(over + 1);
    begin.iter().chain(&['…']).chain(end).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn line(status: Value, warnings: &[(&str, &str)]) -> Option<String> {
        let pod = json!({
            "metadata": {"name": "p"},
            "spec": {
                "initContainers": [{"name": "setup"}],
                "containers": [{"name": "c", "readinessProbe": {"tcpSocket": {"port": 6379}}}]
            },
            "status": status
        });
        let pod: Pod = serde_json::from_value(pod).unwrap();
        let warnings: Vec<Warning<'_>> =
            warnings.iter().map(|(container, message)| warning(container, message)).collect();
        why(&pod, &warnings, at(1_000))
    }

    fn warning<'a>(container: &'a str, message: &'a str) -> Warning<'a> {
        let reason = if message.contains(LAST_LINE) { ENDED } else { "Unhealthy" };
        Warning { container, reason, message, at: at(990) }
    }

    fn main(state: Value, last: Value) -> Value {
        json!({"phase": "Running", "containerStatuses": [{
            "name": "c", "ready": false, "restartCount": 0, "image": "i", "imageID": "i",
            "state": state, "lastState": last
        }]})
    }

    #[test]
    fn a_pod_that_waits_for_a_deleted_one_names_the_obstacle() {
        let waits = "waiting for the force-deleted pod of the same name";
        let of = |reason| Warning { reason, ..warning("", "error killing pod: no answer") };
        assert_eq!(waits_for_deleted(&[of("BackOff")]), format!("{waits}, which is still being stopped"));
        let stuck = [of(KILL_FAILED), of("BackOff")];
        assert_eq!(waits_for_deleted(&stuck), format!("{waits}: error killing pod: no answer"));
    }

    #[test]
    fn the_deepest_known_cause_is_named() {
        let check = |status: Value, warnings: &[(&str, &str)], expected: Option<&str>| {
            assert_eq!(line(status, warnings).as_deref(), expected);
        };
        let none = || json!({});
        check(
            json!({"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}),
            &[],
            Some("Evicted: The node was low on resource: memory."),
        );
        check(json!({"phase": "Succeeded"}), &[("c", "was slow")], None);
        check(
            main(
                json!({"waiting": {"reason": "ErrImageNeverPull", "message": "image x is not here and policy is Never"}}),
                none(),
            ),
            &[],
            Some("container c: ErrImageNeverPull: image x is not here and policy is Never"),
        );
        check(
            main(
                json!({"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 20s"}}),
                json!({"terminated": {"exitCode": 3, "reason": "Error", "message": "starting\ncannot open app.conf\n\n"}}),
            ),
            &[],
            Some("container c: exit 3, last words: cannot open app.conf; restarting after a back-off"),
        );
        check(
            main(json!({"terminated": {"exitCode": 137, "reason": "OOMKilled"}}), none()),
            &[],
            Some("container c: killed by the kernel (out of memory)"),
        );
        check(
            main(json!({"terminated": {"exitCode": 137, "signal": 9, "reason": "Error"}}), none()),
            &[],
            Some("container c: ended by signal 9"),
        );
        check(main(json!({"terminated": {"exitCode": 0, "reason": "Completed"}}), none()), &[], None);
        let oom = "the kernel killed process 4711 (java) for want of memory: it had 63 MiB of its own";
        check(
            main(json!({"terminated": {"exitCode": 137, "reason": "OOMKilled", "message": oom}}), none()),
            &[],
            Some(
                "container c: the kernel killed process 4711 (java) for want of memory: it had 63 MiB of its own",
            ),
        );
        check(
            main(
                json!({"terminated": {"exitCode": 128, "reason": "StartError", "message": "exec: \"x\": not found"}}),
                none(),
            ),
            &[],
            Some("container c: StartError, exit 128: exec: \"x\": not found"),
        );
    }

    #[test]
    fn without_a_termination_message_the_last_words_come_from_the_log() {
        let told = ended(67, "cannot open app.conf");
        assert_eq!(told, "exit code 67, last log line: cannot open app.conf");
        let end = |finished: &str, message: &str| json!({"terminated": {"exitCode": 67, "reason": "Error", "finishedAt": finished, "message": message}});
        let check = |end: Value, of: &str, expected: &str| {
            let crashing = json!({"waiting": {"reason": "CrashLoopBackOff"}});
            let line = line(main(crashing, end), &[(of, &told), ("c", "Back-off")]).unwrap();
            assert_eq!(line, format!("container c: {expected}; restarting after a back-off"));
        };
        check(end("1970-01-01T00:16:30Z", ""), "c", "exit 67, last words: cannot open app.conf");
        check(end("1970-01-01T00:16:30Z", "no room"), "c", "exit 67, last words: no room");
        check(end("1970-01-01T00:16:31Z", ""), "c", "exit 67");
        check(end("1970-01-01T00:16:30Z", ""), "other", "exit 67");
        let running = main(json!({"running": {"startedAt": "1970-01-01T00:16:30Z"}}), json!({}));
        let of_earlier = line(running, &[("c", &told)]).unwrap();
        assert_eq!(of_earlier, "container c: its probes have not passed yet");
    }

    #[test]
    fn a_container_stopped_by_a_probe_is_explained_by_the_probe() {
        let failed = "Liveness probe failed: nothing listens on port 1884";
        let check = |[started, finished]: [&str; 2], of: &str, expected: &str| {
            let end = json!({"terminated": {"exitCode": 0, "reason": "Completed", "startedAt": started, "finishedAt": finished}});
            let crashing = json!({"waiting": {"reason": "CrashLoopBackOff"}});
            let line = line(main(crashing, end), &[(of, failed), ("c", "Readiness probe failed")]).unwrap();
            assert_eq!(line, format!("container c: {expected}; restarting after a back-off"));
        };
        // The warnings are of second 990.
        let ended = format!("{failed}, so it was stopped (exit 0)");
        check(["1970-01-01T00:16:20Z", "1970-01-01T00:16:30Z"], "c", &ended);
        check(["1970-01-01T00:16:20Z", "1970-01-01T00:16:29Z"], "c", "exit 0");
        check(["1970-01-01T00:16:31Z", "1970-01-01T00:16:40Z"], "c", "exit 0");
        check(["1970-01-01T00:16:20Z", "1970-01-01T00:16:30Z"], "other", "exit 0");
    }

    #[test]
    fn a_container_that_is_not_ready_is_explained_by_its_newest_warning() {
        let mut status = main(json!({"running": {}}), json!({}));
        status["conditions"] =
            json!([{"type": "Ready", "status": "False", "lastTransitionTime": "1970-01-01T00:16:28Z"}]);
        let warnings = [
            ("c", "Readiness probe failed: HTTP 500"),
            ("c", "Readiness probe failed: nothing listens on port 6379"),
        ];
        assert_eq!(
            line(status.clone(), &warnings).unwrap(),
            "container c: Readiness probe failed: nothing listens on port 6379 (not ready for 12 s)"
        );
        assert_eq!(
            line(status.clone(), &[]).unwrap(),
            "container c: its probes have not passed yet (not ready for 12 s)"
        );
        status["containerStatuses"][0]["ready"] = json!(true);
        assert_eq!(line(status, &warnings), None);
    }

    #[test]
    fn problems_of_an_earlier_instance_are_not_the_cause() {
        let mut status = main(json!({"running": {"startedAt": "1970-01-01T00:16:29Z"}}), json!({}));
        let warnings = [("c", "Readiness probe failed: HTTP 500"), ("", "no room")];
        let check = |status: &Value, expected: &str| {
            assert_eq!(line(status.clone(), &warnings).as_deref(), Some(expected), "{status}");
        };
        let (known, unknown) =
            ("container c: Readiness probe failed: HTTP 500", "container c: its probes have not passed yet");
        check(&status, known);
        // The container, and the pod, started after the warnings, which are of second 990.
        status["containerStatuses"][0]["state"]["running"]["startedAt"] = json!("1970-01-01T00:16:31Z");
        check(&status, unknown);
        status["containerStatuses"][0]["state"]["running"] = json!({});
        check(&status, known);
        status["startTime"] = json!("1970-01-01T00:16:30Z");
        check(&status, known);
        status["startTime"] = json!("1970-01-01T00:16:31Z");
        check(&status, unknown);
        let pending = |start: &str| line(json!({"phase": "Pending", "startTime": start}), &warnings);
        assert_eq!(pending("1970-01-01T00:16:30Z").as_deref(), Some("no room"));
        assert_eq!(pending("1970-01-01T00:16:31Z"), None);
    }

    #[test]
    fn a_pod_that_cannot_be_terminated_is_explained_by_the_obstacle() {
        let failed = "error killing pod: cannot stop sandbox abc: cannot signal container in state created";
        let told = [Warning { container: "", reason: KILL_FAILED, message: failed, at: at(990) }];
        let check = |deleted: Option<i64>, status: Value, expected: Option<&str>| {
            let pod =
                json!({"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c"}]}, "status": status});
            let mut pod: Pod = serde_json::from_value(pod).unwrap();
            pod.metadata.deletion_timestamp = deleted.map(|second| Time(at(second)));
            pod.metadata.deletion_grace_period_seconds = Some(30);
            assert_eq!(why(&pod, &told, at(1_000)).as_deref(), expected, "{deleted:?} {status}");
        };
        let running = json!({"phase": "Running"});
        check(Some(1_000), running.clone(), Some(failed));
        check(Some(1_020), json!({"phase": "Succeeded"}), Some(failed));
        // The warning concerned an earlier termination.
        check(Some(1_021), running, None);
        let evicted = |phase: &str| json!({"phase": phase, "reason": "Evicted", "message": "no memory"});
        check(None, evicted("Running"), Some(&format!("Evicted: no memory; {failed}")));
        check(None, evicted("Failed"), Some("Evicted: no memory"));
        check(Some(1_021), evicted("Running"), Some("Evicted: no memory"));
    }

    #[test]
    fn a_pod_that_has_no_containers_yet_is_explained_by_its_own_warnings() {
        let status = json!({"phase": "Pending"});
        let warnings = [("", "MountVolume.SetUp failed for volume \"v\": configmap \"x\" not found\nmore")];
        let expected = "MountVolume.SetUp failed for volume \"v\": configmap \"x\" not found";
        assert_eq!(line(status.clone(), &warnings).as_deref(), Some(expected));
        assert_eq!(line(status, &[]), None);
        let refused = "x".repeat(200);
        let told = format!(
            "Failed to create pod sandbox: cannot run the sandbox of pod default/tiny-edge: no image for sandboxes: \
             registry.k8s.io/pause:3.10 is not here ({refused})"
        );
        let shown = line(json!({"phase": "Pending"}), &[("", &told)]).unwrap();
        let start = "Failed to create pod sandbox: no image for sandboxes: registry.k8s.io/pause:3.10";
        assert!(shown.starts_with(start), "{shown}");
        let long = "x".repeat(500);
        assert_eq!(line(json!({"phase": "Pending"}), &[("", &long)]).unwrap().chars().count(), MAX_QUOTE + 1);
        let pull = format!("cannot pull: {long}: no such host");
        let short = line(json!({"phase": "Pending"}), &[("", &pull)]).unwrap();
        assert!(short.starts_with("cannot pull: xxx") && short.ends_with("x: no such host"), "{short}");
    }
}
