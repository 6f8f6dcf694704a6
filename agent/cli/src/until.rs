//! Waits until pods reach a state, for `beelet wait`, `apply --wait` and `delete`.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use anyhow::bail;
use beelet_model::labels::ANNOTATION_HASH;
use beelet_model::status::has_ended;
use beelet_model::table::{PodEntry, PodName, PodTable};
use beelet_proto::beelet as proto;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use tokio::time::{Instant, timeout_at};

use super::{get::pod::state, plain, why::Warnings};
use beelet_client::{Client, Event};

/// Time until the first report about pods that have not reached the state. Each further pause is twice as
/// long.
const FIRST_REPORT: Duration = Duration::from_secs(3);
/// Longest pause between two reports.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// State to wait for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// The pod's condition Ready is true.
    Ready,
    /// The pod's phase is Running.
    Running,
    /// The pod terminated successfully.
    Succeeded,
    /// The pod terminated, successfully or not.
    Ended,
    /// The pod no longer exists.
    Deleted,
    /// A condition of the status has this value.
    Condition(String, String),
}

impl FromStr for Wanted {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Ok(match text.to_ascii_lowercase().as_str() {
            "ready" => Self::Ready,
            "running" => Self::Running,
            "succeeded" | "completed" => Self::Succeeded,
            "ended" => Self::Ended,
            "deleted" | "delete" => Self::Deleted,
            _ => {
                let Some(condition) = text.strip_prefix("condition=").filter(|name| !name.is_empty()) else {
                    return Err(
                        "expected ready, running, succeeded, ended, deleted or condition=NAME[=VALUE]"
                            .to_owned(),
                    );
                };
                let (name, value) = condition.split_once('=').unwrap_or((condition, "True"));
                Self::Condition(name.to_owned(), value.to_owned())
            }
        })
    }
}

impl fmt::Display for Wanted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ready => f.write_str("ready"),
            Self::Running => f.write_str("running"),
            Self::Succeeded => f.write_str("succeeded"),
            Self::Ended => f.write_str("ended"),
            Self::Deleted => f.write_str("deleted"),
            Self::Condition(name, value) => write!(f, "{name}={value}"),
        }
    }
}

/// A pod to wait for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    /// Name of the pod on this node.
    pub(crate) name: PodName,
    /// UID of the pod; empty for any pod of the name. After an in-place resize a pod keeps its UID, and this
    /// value is in its hash annotation.
    pub(crate) uid: String,
}

/// Progress of a pod towards the wanted state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    /// The pod is in the wanted state.
    Met,
    /// The pod may still reach the wanted state.
    Open,
    /// The pod can no longer reach the wanted state.
    Hopeless,
}

impl Target {
    /// Returns the pod in the table, if it is the target.
    fn find<'t>(&self, table: &'t PodTable) -> Option<&'t PodEntry> {
        let entry = table.pods.get(&self.name)?;
        let metadata = &entry.pod.metadata;
        let hash = metadata.annotations.as_ref().and_then(|all| all.get(ANNOTATION_HASH));
        let is_meant =
            self.uid.is_empty() || metadata.uid.as_ref() == Some(&self.uid) || hash == Some(&self.uid);
        is_meant.then_some(&**entry)
    }

    fn standing(&self, wanted: &Wanted, table: &PodTable) -> Standing {
        let entry = self.find(table);
        let Some(entry) = entry else {
            return if *wanted == Wanted::Deleted { Standing::Met } else { Standing::Open };
        };
        let status = entry.pod.status.as_ref();
        let phase = status.and_then(|status| status.phase.as_deref()).unwrap_or_default();
        let condition = |name: &str| {
            let all = status.and_then(|status| status.conditions.as_ref()).into_iter().flatten();
            all.filter(|one| one.type_.eq_ignore_ascii_case(name)).map(|one| one.status.as_str()).next()
        };
        // A terminating pod may soon be replaced by another pod with the same name and manifest.
        let is_going = entry.pod.metadata.deletion_timestamp.is_some();
        let met = match wanted {
            Wanted::Ready => !is_going && condition("Ready") == Some("True"),
            Wanted::Running => !is_going && phase == "Running",
            Wanted::Succeeded => phase == "Succeeded",
            Wanted::Ended => has_ended(status),
            Wanted::Deleted => false,
            Wanted::Condition(name, value) => {
                condition(name).is_some_and(|is| is.eq_ignore_ascii_case(value))
            }
        };
        let lasts = matches!(wanted, Wanted::Ended | Wanted::Deleted | Wanted::Condition(..));
        match met {
            true => Standing::Met,
            false if has_ended(status) && !lasts && !is_going => Standing::Hopeless,
            false => Standing::Open,
        }
    }
}

/// Result of a wait.
#[derive(Debug, Default)]
pub(crate) struct Waited {
    /// All pods as last seen.
    pub(crate) table: PodTable,
    /// Pods that have not reached the wanted state.
    pub(crate) missed: Vec<Target>,
    /// True if waiting longer cannot change the result.
    pub(crate) is_settled: bool,
}

/// Waits until every target has reached the state or cannot reach it any more, or until the timeout. Calls
/// `met` for each pod that reaches the state.
pub(crate) async fn wait(
    client: &mut Client,
    targets: &[Target],
    wanted: &Wanted,
    timeout: Option<Duration>,
    mut met: impl FnMut(&PodName),
) -> anyhow::Result<Waited> {
    let end = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    let mut watch = client.pods.watch().await?;
    let mut waited = Waited { missed: targets.to_vec(), ..Waited::default() };
    let mut is_synced = false;
    let (mut pause, mut reported) = (FIRST_REPORT, BTreeSet::new());
    let mut next_report = Instant::now().checked_add(pause);
    loop {
        let event = tokio::select! {
            event = watch.next() => event?,
            () = until(end) => return Ok(waited),
            () = until(next_report), if is_synced => {
                // An agent that does not answer delays neither the next report nor the end of the wait.
                let latest = Instant::now() + FIRST_REPORT;
                let latest = end.map_or(latest, |end| end.min(latest));
                let _ = timeout_at(latest, waited.report_progress(client, wanted, &mut reported)).await;
                pause = LONGEST_PAUSE.min(pause.saturating_mul(2));
                next_report = Instant::now().checked_add(pause);
                continue;
            }
        };
        let Some(event) = event else { bail!("agent stopped while waiting; current state is unknown") };
        is_synced |= event == Event::Synced;
        notice(&event);
        event.apply(&mut waited.table);
        if !is_synced {
            continue;
        }
        let table = &waited.table;
        waited.missed.retain(|target| {
            let is_met = target.standing(wanted, table) == Standing::Met;
            if is_met {
                met(&target.name);
            }
            !is_met
        });
        if waited.missed.iter().all(|target| target.standing(wanted, table) == Standing::Hopeless) {
            waited.is_settled = true;
            return Ok(waited);
        }
    }
}

async fn until(end: Option<Instant>) {
    match end {
        Some(end) => tokio::time::sleep_until(end).await,
        None => std::future::pending().await,
    }
}

/// Prints the reason why the wait may take long.
fn notice(event: &Event) {
    match event {
        Event::Notice(notice) if notice.is_empty() => {
            eprintln!("the container runtime answers again; still waiting");
        }
        Event::Notice(notice) => eprintln!("waiting: {notice}"),
        _ => {}
    }
}

impl Waited {
    /// Prints how pods stand that have not reached the state, each line once.
    async fn report_progress(&self, client: &mut Client, wanted: &Wanted, reported: &mut BTreeSet<String>) {
        // A failed query is repeated in the next round.
        let Ok(events) = client.events.kept(proto::ListEventsRequest::default()).await else { return };
        let warnings = Warnings::of(events.iter().cloned());
        for target in &self.missed {
            let Some(entry) = target.find(&self.table) else { continue };
            let cause = warnings.why(&entry.pod, Timestamp::now());
            let line = match (cause, being_stopped(entry)) {
                (Some(why), _) => format!("pod {}: {why}", target.name),
                (None, Some(stopped)) => format!("pod {} {stopped}", target.name),
                (None, None) if *wanted == Wanted::Deleted => {
                    format!("pod {}: its deletion has not begun", target.name)
                }
                (None, None) => format!("pod {}: {}", target.name, current_step(entry, &events)),
            };
            if reported.insert(line.clone()) {
                eprintln!("waiting: {}", plain::line(&line));
            }
        }
    }

    /// Returns a sentence per pod that has not reached the state.
    pub(crate) async fn reasons(&self, client: &mut Client) -> anyhow::Result<Vec<Reason>> {
        let warnings = Warnings::read(client).await?;
        Ok(self
            .missed
            .iter()
            .map(|target| reason(target, &self.table, &warnings, Timestamp::now()))
            .collect())
    }
}

/// Sentence about a pod that has not reached the wanted state.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Reason {
    pub(crate) text: String,
    /// False for a pod that exists and to which nothing has happened: the pod is starting.
    pub(crate) has_cause: bool,
}

fn reason(target: &Target, table: &PodTable, warnings: &Warnings, now: Timestamp) -> Reason {
    let name = &target.name;
    let Some(entry) = target.find(table) else {
        return Reason { text: format!("pod {name}: not found"), has_cause: true };
    };
    let phase = entry.pod.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or("Pending");
    let why = warnings.why(&entry.pod, now).or_else(|| being_stopped(entry));
    let text = format!("pod {name}: {}", why.as_deref().unwrap_or(phase));
    let has_cause = why.is_some() && !(awaits_probes(&entry.pod) && warnings.lack(&entry.pod));
    Reason { text, has_cause }
}

/// Returns true if each container that is not ready runs for the first time: its probes have not passed yet.
fn awaits_probes(pod: &Pod) -> bool {
    let statuses = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
    let is_running = |one: &ContainerStatus| one.state.as_ref().is_some_and(|state| state.running.is_some());
    let is_stopped = pod.metadata.deletion_timestamp.is_some();
    !is_stopped && statuses.filter(|one| !one.ready).all(|one| one.restart_count == 0 && is_running(one))
}

/// Returns the state of a pod and its newest event: `ContainerCreating (Pulling image "redis:7")`.
fn current_step(entry: &PodEntry, events: &[proto::Event]) -> String {
    let state = state(&entry.pod);
    let uid = entry.pod.metadata.uid.as_deref().unwrap_or_default();
    let newest = events.iter().filter(|event| event.uid == uid).max_by_key(|event| event.last_ns);
    newest.map_or(state.clone(), |event| format!("{state} ({})", event.message))
}

/// Returns the deadline of a terminating pod, or None for another pod.
fn being_stopped(entry: &PodEntry) -> Option<String> {
    let until = entry.pod.metadata.deletion_timestamp.as_ref()?.0;
    Some(format!("is terminating; its grace period ends at {until}"))
}

/// Parses a duration such as `90`, `90s`, `5m` or `1h30m`.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let wrong = || format!("{text:?} is not a duration: use e.g. 90s, 5m or 1h30m");
    if let Ok(seconds) = text.parse::<u64>() {
        return Ok(Duration::from_secs(seconds));
    }
    let (mut all, mut number) = (0_u64, String::new());
    for c in text.chars() {
        let unit = match c {
            '0'..='9' => {
                number.push(c);
                continue;
            }
            's' => 1,
            'm' => 60,
            'h' => 3600,
            _ => return Err(wrong()),
        };
        let amount = number.parse::<u64>().ok().and_then(|number| number.checked_mul(unit));
        all = amount.and_then(|amount| all.checked_add(amount)).ok_or_else(wrong)?;
        number.clear();
    }
    if number.is_empty() && !text.is_empty() { Ok(Duration::from_secs(all)) } else { Err(wrong()) }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use serde_json::{Value, json};

    use super::*;

    fn table(status: &Value) -> PodTable {
        let metadata = json!({"name": "web-n1", "uid": "1", "annotations": {ANNOTATION_HASH: "2"}});
        let pod = json!({"metadata": metadata, "spec": {"containers": []}, "status": status});
        let entry = PodEntry::of(serde_json::from_value(pod).unwrap());
        let mut table = PodTable::default();
        table.pods.insert(PodName::of(&entry.pod), Arc::new(entry));
        table
    }

    fn target(uid: &str) -> Target {
        let name = PodName { namespace: "default".to_owned(), name: "web-n1".to_owned() };
        Target { name, uid: uid.to_owned() }
    }

    fn check(wanted: &str, status: &Value, expected: Standing) {
        let wanted: Wanted = wanted.parse().unwrap();
        assert_eq!(target("").standing(&wanted, &table(status)), expected, "{wanted} {status}");
    }

    #[test]
    fn a_pod_is_as_wanted_or_not_yet_or_never() {
        let ready = json!({"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]});
        let failed = json!({"phase": "Failed", "conditions": [{"type": "Ready", "status": "False"}]});
        check("ready", &ready, Standing::Met);
        check("ready", &json!({"phase": "Pending"}), Standing::Open);
        check("ready", &failed, Standing::Hopeless);
        check("Running", &ready, Standing::Met);
        check("succeeded", &json!({"phase": "Succeeded"}), Standing::Met);
        check("completed", &failed, Standing::Hopeless);
        check("succeeded", &ready, Standing::Open);
        check("ended", &failed, Standing::Met);
        check("ended", &ready, Standing::Open);
        check("deleted", &failed, Standing::Open);
        check("condition=Ready", &ready, Standing::Met);
        check("condition=Ready=False", &failed, Standing::Met);
        check("condition=PodScheduled", &ready, Standing::Open);
        assert!("reddy".parse::<Wanted>().unwrap_err().contains("condition=NAME"));
    }

    #[test]
    fn a_pod_on_its_way_out_is_not_the_one_that_is_waited_for() {
        let ready = json!({"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]});
        let failed = json!({"phase": "Failed"});
        for (status, wanted, expected) in [
            (&ready, Wanted::Ready, Standing::Open),
            (&ready, Wanted::Running, Standing::Open),
            (&failed, Wanted::Ready, Standing::Open),
            (&failed, Wanted::Ended, Standing::Met),
        ] {
            let mut table = table(status);
            let entry = Arc::make_mut(table.pods.get_mut(&target("").name).unwrap());
            entry.pod.metadata.deletion_timestamp = Some(Time(Timestamp::UNIX_EPOCH));
            assert_eq!(target("").standing(&wanted, &table), expected, "{wanted} {status}");
        }
    }

    #[test]
    fn a_pod_that_starts_has_no_cause_and_its_step_is_its_newest_event() {
        let table = table(&json!({"phase": "Pending"}));
        let reason = reason(&target(""), &table, &Warnings::default(), Timestamp::UNIX_EPOCH);
        assert_eq!(reason, Reason { text: "pod default/web-n1: Pending".to_owned(), has_cause: false });
        let event = |uid: &str, message: &str, last_ns| proto::Event {
            uid: uid.to_owned(),
            message: message.to_owned(),
            last_ns,
            ..proto::Event::default()
        };
        let events =
            [event("1", "Scheduled", 1), event("1", "Pulling image \"x\"", 3), event("2", "other", 9)];
        let entry = target("").find(&table).unwrap();
        assert_eq!(current_step(entry, &events), "Pending (Pulling image \"x\")");
        assert_eq!(current_step(entry, &[]), "Pending");
    }

    #[test]
    fn probes_that_have_not_passed_yet_are_no_cause_until_one_fails_or_the_container_restarts() {
        let check = |restarts: i32, events: &[proto::Event], expected: bool| {
            let status = json!({"phase": "Running", "containerStatuses": [{
                "name": "c", "image": "", "imageID": "", "ready": false, "restartCount": restarts,
                "state": {"running": {}},
            }]});
            let mut table = table(&status);
            let entry = Arc::make_mut(table.pods.get_mut(&target("").name).unwrap());
            let probe = json!({"name": "c", "readinessProbe": {"tcpSocket": {"port": 1}}});
            entry.pod.spec = serde_json::from_value(json!({ "containers": [probe] })).unwrap();
            let warnings = Warnings::of(events.iter().cloned());
            let reason = reason(&target(""), &table, &warnings, Timestamp::UNIX_EPOCH);
            assert!(reason.text.contains("container c: "), "{}", reason.text);
            assert_eq!(reason.has_cause, expected, "{}", reason.text);
        };
        let warning = proto::Event {
            uid: "1".to_owned(),
            r#type: "Warning".to_owned(),
            container: "c".to_owned(),
            reason: "Unhealthy".to_owned(),
            message: "Readiness probe failed".to_owned(),
            ..proto::Event::default()
        };
        check(0, &[], false);
        check(1, &[], true);
        check(0, &[warning], true);
    }

    #[test]
    fn another_pod_of_the_name_is_not_the_one() {
        let table = table(&json!({"phase": "Running"}));
        for (uid, expected) in
            [("", Standing::Met), ("1", Standing::Met), ("2", Standing::Met), ("3", Standing::Open)]
        {
            assert_eq!(target(uid).standing(&Wanted::Running, &table), expected, "{uid}");
        }
        assert_eq!(target("3").standing(&Wanted::Deleted, &table), Standing::Met);
        assert_eq!(target("1").standing(&Wanted::Deleted, &table), Standing::Open);
    }

    #[test]
    fn a_time_is_read_as_people_write_it() {
        for (text, expected) in [("90", 90), ("90s", 90), ("5m", 300), ("1h30m", 5400), ("0", 0)] {
            assert_eq!(duration(text), Ok(Duration::from_secs(expected)), "{text}");
        }
        for text in ["", "s", "5x", "5m3", "-1", "99999999999999999999h"] {
            assert!(duration(text).is_err(), "{text}");
        }
    }
}
