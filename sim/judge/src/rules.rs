//! The rules. Each function of the first kind checks one fact against the state before it; each of the second
//! kind checks the state at the end.

use std::time::Duration;

use crate::Violation;
use crate::ledger::{Instance, Ledger, PodState};
use crate::trace::{End, Event, Fact, ProbeKind, Restart, Role, State, Status};

/// Time in which the agent notices a change of a pod's object, of a container or of itself.
const REACTION: Duration = Duration::from_secs(10);
/// Tolerance for grace periods: their seconds are rounded, and a hook or an earlier attempt uses a part.
const ROUNDING: u64 = 2;
/// First delay of a restart (kubelet: `backOffPeriod`, pkg/kubelet/kubelet.go).
const BACK_OFF: Duration = Duration::from_secs(10);
/// Maximum delay of a restart (kubelet: `MaxCrashLoopBackOff`).
const BACK_OFF_MAX: Duration = Duration::from_secs(300);
/// Running time after which earlier crashes no longer count (client-go's Backoff: twice the maximum).
const BACK_OFF_RESET: Duration = Duration::from_secs(600);
/// Time in which the node converges after the last fault: one maximum back-off, plus the time of its work.
pub const SETTLED: Duration = Duration::from_secs(600);

/// Properties of the node that the rules need.
#[derive(Clone, Copy, Debug)]
pub struct Node {
    /// Allocatable CPU in thousandths.
    pub cpu: u64,
    /// Number of devices.
    pub devices: u64,
}

/// Judges a trace.
#[derive(Debug)]
pub struct Judge {
    node: Node,
    ledger: Ledger,
    violations: Vec<Violation>,
    now: Duration,
}

impl Judge {
    /// Creates a judge of a node that has not started yet.
    #[must_use]
    pub fn new(node: Node) -> Self {
        Self { node, ledger: Ledger::default(), violations: Vec::new(), now: Duration::ZERO }
    }

    /// Returns the broken rules so far.
    #[must_use]
    pub fn violations(&self) -> &[Violation] {
        &self.violations
    }

    /// Checks a fact, and applies it.
    pub fn observe(&mut self, event: &Event) {
        self.now = event.at;
        match &event.fact {
            Fact::AgentFailed { why } => self.break_rule("the-agent-lives", why.clone()),
            Fact::Created { container, sandbox, name, devices } => {
                self.devices_are_given_once(container, sandbox, name, devices);
            }
            Fact::Started { container, asked } => self.check_start(container, *asked),
            Fact::StopAsked { container, grace } => self.check_stop(container, *grace),
            Fact::Exited { container, by: End::Force, .. } => self.grace_is_given(container),
            Fact::Status(status) => self.check_status(status),
            _ => {}
        }
        self.ledger.apply(event);
        if let Fact::Started { .. } | Fact::Cpu { .. } = event.fact {
            self.room_is_given_once();
        }
    }

    fn break_rule(&mut self, rule: &'static str, detail: String) {
        self.violations.push(Violation { rule, at: self.now, detail });
    }

    // ---- Starts ----

    fn check_start(&mut self, id: &str, asked: Duration) {
        let Some(instance) = self.ledger.instance(id).cloned() else {
            return self.break_rule("starts-are-wanted", format!("container {id} was never created"));
        };
        let Some(pod) = self.ledger.pods.get(&instance.uid).cloned() else {
            return self.break_rule(
                "starts-are-wanted",
                format!("pod of container {} is unknown", describe(&instance)),
            );
        };
        let broken = [
            self.runs_once(&instance),
            self.starts_in_order(&pod, &instance),
            self.starts_are_wanted(&pod, &instance, asked),
            self.restarts_by_policy(&pod, &instance),
            self.restarts_after_back_off(&instance, asked),
        ];
        for (rule, detail) in broken.into_iter().flatten() {
            self.break_rule(rule, format!("{} {}: {detail}", pod.spec.name, describe(&instance)));
        }
    }

    /// A container never runs twice (kubelet: `computePodActions` starts only containers that do not run).
    fn runs_once(&self, instance: &Instance) -> Option<(&'static str, String)> {
        let mut others = self.ledger.of_pod(&instance.uid).filter(|other| other.name == instance.name);
        let other = others.find(|other| other.id != instance.id && other.runs())?;
        Some(("runs-once", format!("{} still runs", describe(other))))
    }

    /// Init containers run one after the other to success, sidecars start in their order, and the pod's
    /// containers start after all of them (KEP-753; kubelet: `computeInitContainerActions`).
    fn starts_in_order(&self, pod: &PodState, instance: &Instance) -> Option<(&'static str, String)> {
        let here = |name: &str| {
            self.ledger
                .started(&instance.uid, name)
                .filter(|i| i.sandbox == instance.sandbox)
                .collect::<Vec<_>>()
        };
        let mains = pod.spec.containers.iter().filter(|c| c.role == Role::Main);
        if mains.flat_map(|c| here(&c.name)).next().is_some() {
            return None;
        }
        for earlier in pod.spec.containers.iter().take_while(|c| c.name != instance.name) {
            let before = here(&earlier.name);
            let done = match earlier.role {
                Role::Init => before.iter().any(|i| matches!(i.exited, Some((_, 0, _)))),
                Role::Sidecar => !before.is_empty(),
                Role::Main => true,
            };
            if !done {
                return Some(("starts-in-order", format!("{} comes first", earlier.name)));
            }
        }
        None
    }

    /// No container starts in a pod that ends (kubelet: `syncTerminatingPod` only stops).
    fn starts_are_wanted(
        &self,
        pod: &PodState,
        instance: &Instance,
        asked: Duration,
    ) -> Option<(&'static str, String)> {
        let sandbox = self.ledger.sandboxes.get(&instance.sandbox);
        if sandbox.is_none_or(|sandbox| sandbox.stopped.is_some()) {
            return Some(("starts-are-wanted", "the sandbox does not run".to_owned()));
        }
        let ends = pod.ends_since()?;
        let noticed = ends.max(self.ledger.agent_since.unwrap_or_default()) + REACTION;
        (asked > noticed).then(|| ("starts-are-wanted", format!("the pod ends since {} s", ends.as_secs())))
    }

    /// A container starts again only after its end, and only if its policy says so (kubelet:
    /// `ShouldContainerBeRestarted`; sidecars always, KEP-753).
    fn restarts_by_policy(&self, pod: &PodState, instance: &Instance) -> Option<(&'static str, String)> {
        let previous = self.previous(instance)?;
        let (_, code, by) = previous.exited?;
        if previous.sandbox != instance.sandbox || by == End::Machine {
            return None;
        }
        let role = pod.container(&instance.name)?.role;
        let allowed = match (role, pod.spec.restart) {
            (Role::Sidecar, _) => true,
            (Role::Main, Restart::Always) => true,
            // A container that a probe stopped starts again whatever its code.
            (Role::Main, Restart::OnFailure) => code != 0 || self.condemned_by(pod, previous).is_some(),
            (Role::Init, Restart::Always | Restart::OnFailure) => code != 0,
            (Role::Main | Role::Init, Restart::Never) => false,
        };
        let policy = pod.spec.restart;
        (!allowed).then(|| ("restarts-by-policy", format!("{policy:?}, but ended with {code} before")))
    }

    /// A crashing container waits 10 s before its second restart, then twice as long each time, at most 300 s
    /// (kubelet: `doBackOff`). A container that a probe stopped is replaced at once.
    fn restarts_after_back_off(
        &self,
        instance: &Instance,
        asked: Duration,
    ) -> Option<(&'static str, String)> {
        // A change of the resources begins a new count (kubelet: `GetBackoffKey`), and so does a new sandbox
        // here; the kubelet's count lasts beyond a sandbox.
        let changed = self.ledger.pods.get(&instance.uid).map_or(Duration::ZERO, |pod| pod.changed);
        let here = |other: &&Instance| {
            other.sandbox == instance.sandbox && other.exited.is_none_or(|(at, ..)| at > changed)
        };
        let all: Vec<&Instance> = self.ledger.started(&instance.uid, &instance.name).filter(here).collect();
        let mut delay = Duration::ZERO;
        let mut last = None;
        for (place, one) in all.iter().enumerate() {
            let (started, (ended, _, by)) = (one.started?, one.exited?);
            if by != End::Itself && by != End::Oom {
                (delay, last) = (Duration::ZERO, None);
                continue;
            }
            let crashed_soon = ended.saturating_sub(started) < BACK_OFF_RESET;
            delay = match (place, crashed_soon) {
                (0, _) | (_, false) => Duration::ZERO,
                _ if delay.is_zero() => BACK_OFF,
                _ => (delay * 2).min(BACK_OFF_MAX),
            };
            last = Some(ended);
        }
        let waited = asked.saturating_sub(last?);
        let due = delay.saturating_sub(Duration::from_secs(1));
        (waited < due).then(|| {
            (
                "restarts-after-back-off",
                format!("{} s after its end, not {}", waited.as_secs(), delay.as_secs()),
            )
        })
    }

    fn previous<'a>(&'a self, instance: &Instance) -> Option<&'a Instance> {
        self.ledger.started(&instance.uid, &instance.name).rfind(|other| other.id != instance.id)
    }

    // ---- Stops ----

    fn check_stop(&mut self, id: &str, grace: i64) {
        let Some(instance) = self.ledger.instance(id).filter(|instance| instance.runs()).cloned() else {
            return;
        };
        let Some(pod) = self.ledger.pods.get(&instance.uid).cloned() else { return };
        let Some((since, seconds)) = self.reason_to_stop(&pod, &instance) else {
            let detail = format!("{} {} with {grace} s", pod.spec.name, describe(&instance));
            return self.break_rule("stops-have-a-cause", detail);
        };
        // The longest grace period cannot be longer than a year (the agent's own bound); a first stop gets the
        // rest of the grace period (kubelet: `killContainer`).
        let passed = self.now.saturating_sub(since).as_secs();
        let due = seconds.min(366 * 24 * 3600).saturating_sub(passed).saturating_sub(ROUNDING);
        if instance.stop.is_none() && u64::try_from(grace).unwrap_or(0) < due {
            let detail = format!("{} {}: {grace} s, not {due}", pod.spec.name, describe(&instance));
            self.break_rule("grace-is-given", detail);
        }
    }

    /// Returns the time since which a container has a reason to be stopped, and its grace period in seconds.
    fn reason_to_stop(&self, pod: &PodState, instance: &Instance) -> Option<(Duration, u64)> {
        if let Some(since) = pod.ends_since() {
            return Some((since, pod.deleting.map_or(pod.spec.grace, |(_, grace)| grace)));
        }
        // The deadline counts from the status's startTime, which follows the creation; the API has seconds.
        let over =
            |limit: u64| (pod.created + Duration::from_secs(limit)).saturating_sub(Duration::from_secs(1));
        if let Some(since) = pod.spec.deadline.map(over).filter(|since| self.now >= *since) {
            return Some((since, pod.spec.grace));
        }
        if let Some(since) = self.condemned_by(pod, instance) {
            return Some((since, pod.spec.grace));
        }
        let sandbox = self.ledger.sandboxes.get(&instance.sandbox)?;
        if let Some(stopped) = sandbox.stopped {
            return Some((stopped, 0));
        }
        // Sidecars end after the last of the pod's containers (KEP-753), or with a failed init container.
        let role = pod.container(&instance.name)?.role;
        (role == Role::Sidecar && self.has_ended(pod)).then_some((self.now, pod.spec.grace))
    }

    /// Returns the time since which a probe demands the container's end (kubelet: `prober.worker.doProbe`).
    fn condemned_by(&self, pod: &PodState, instance: &Instance) -> Option<Duration> {
        let spec = pod.container(&instance.name)?;
        spec.probes.iter().find_map(|(kind, threshold)| {
            let (count, _, latest) = instance.failures.get(kind)?;
            (*kind != ProbeKind::Readiness && count >= threshold).then_some(*latest)
        })
    }

    /// A process ends by force only after its grace period (kubelet: `killContainer` before
    /// `StopPodSandbox`).
    fn grace_is_given(&mut self, id: &str) {
        let Some(instance) = self.ledger.instance(id).filter(|instance| instance.runs()).cloned() else {
            return;
        };
        let Some(pod) = self.ledger.pods.get(&instance.uid) else { return };
        let since =
            instance.stop.map(|(at, grace)| at + Duration::from_secs(u64::try_from(grace).unwrap_or(0)));
        if since.is_none_or(|due| self.now + Duration::from_secs(ROUNDING) < due) {
            let detail = format!("{} {}: killed before its grace period", pod.spec.name, describe(&instance));
            self.break_rule("grace-is-given", detail);
        }
    }

    // ---- Things that are given once ----

    /// A device is given to one container (kubelet: `devicesToAllocate`); a later container of the same pod
    /// may reuse an init container's.
    fn devices_are_given_once(
        &mut self,
        id: &str,
        sandbox: &str,
        name: &str,
        devices: &std::collections::BTreeSet<String>,
    ) {
        let uid = self.ledger.sandboxes.get(sandbox).map(|sandbox| sandbox.uid.clone()).unwrap_or_default();
        let holders = self.ledger.instances.iter().filter(|other| {
            let is_earlier_self = other.uid == uid && (other.name == name || other.exited.is_some());
            other.exited.is_none() && !other.removed && !is_earlier_self
        });
        let twice: Vec<String> = holders
            .filter(|other| !other.devices.is_disjoint(devices) && other.runs())
            .map(|other| format!("container {id} ({name} of {uid}) and {}", describe(other)))
            .collect();
        for detail in twice {
            self.break_rule("devices-are-given-once", detail);
        }
    }

    /// The requests of all pods that run fit the node (kubelet: `GeneralPredicates` at admission).
    fn room_is_given_once(&mut self) {
        let running = self.ledger.pods.iter().filter(|(uid, _)| self.ledger.of_pod(uid).any(Instance::runs));
        let sum: u64 = running.map(|(uid, pod)| self.held(uid, pod)).sum();
        if sum > self.node.cpu {
            self.break_rule("room-is-given-once", format!("{sum}m of {}m CPU are given", self.node.cpu));
        }
    }

    /// Returns the CPU that a pod holds: the amounts in force of its running containers, at most its request.
    fn held(&self, uid: &str, pod: &PodState) -> u64 {
        let known = self.ledger.of_pod(uid).filter(|instance| instance.runs());
        known.filter_map(|instance| instance.cpu).sum::<u64>().min(pod.cpu())
    }

    // ---- Status ----

    fn check_status(&mut self, status: &Status) {
        let Some(pod) = self.ledger.pods.get(&status.uid).cloned() else { return };
        let name = &pod.spec.name;
        let is_over = |status: &Status| status.phase == "Succeeded" || status.phase == "Failed";
        let mut broken = Vec::new();
        if let Some(before) = &pod.status {
            // A pod that ended by itself never comes back (kubelet: `updateStatusInternal` refuses it).
            let back = is_over(before) && before.reason.is_none() && status.phase != before.phase;
            // A new sandbox runs the init containers again (kubelet: `getPhase`).
            let sandboxes =
                self.ledger.sandboxes.values().filter(|sandbox| sandbox.uid == status.uid).count();
            let unstarted = before.phase == "Running" && status.phase == "Pending" && sandboxes < 2;
            // No client reads the status of a pod whose object is gone, and an agent that starts then has none.
            if pod.unwanted.is_none() && (back || unstarted) {
                broken.push(("statuses-go-forward", format!("{} after {}", status.phase, before.phase)));
            }
            for container in &status.containers {
                let earlier = before.containers.iter().find(|c| c.name == container.name);
                if let Some(earlier) = earlier.filter(|earlier| earlier.restarts > container.restarts) {
                    let detail = format!(
                        "{}: {} restarts after {}",
                        container.name, container.restarts, earlier.restarts
                    );
                    broken.push(("restarts-are-counted", detail));
                }
            }
        }
        // The kubelet's getPhase counts running sidecars as running.
        if is_over(status) && status.reason.is_none() {
            let running: Vec<_> =
                self.ledger.of_pod(&status.uid).filter(|i| i.runs()).map(|i| i.name.clone()).collect();
            if !running.is_empty() {
                broken
                    .push(("phases-are-true", format!("{} while {} runs", status.phase, running.join(", "))));
            }
        }
        for container in &status.containers {
            let Some(id) = &container.id else { continue };
            let runs = self.ledger.instance(id).is_some_and(Instance::runs);
            if runs && matches!(container.state, State::Terminated(_)) {
                broken.push(("statuses-are-true", format!("{} runs, but is Terminated", container.name)));
            }
            let starts = self.ledger.started(&status.uid, &container.name).count();
            if usize::try_from(container.restarts).unwrap_or(usize::MAX) > starts.max(1) {
                broken.push((
                    "restarts-are-counted",
                    format!("{}: {} restarts, {starts} starts", container.name, container.restarts),
                ));
            }
        }
        for (rule, detail) in broken {
            self.break_rule(rule, format!("{name}: {detail}"));
        }
    }

    // ---- The end ----

    /// Checks the rules that must come about, at the end of a trace.
    pub fn finish(mut self, at: Duration) -> Vec<Violation> {
        self.now = at;
        let settled = self.ledger.faults_ended.is_some_and(|ended| ended + SETTLED <= at);
        if !settled {
            return self.violations;
        }
        let pods: Vec<PodState> = self.ledger.pods.values().cloned().collect();
        for pod in &pods {
            let recent = |since: Duration| since + SETTLED > at;
            match pod.ends_since() {
                Some(since) if recent(since.saturating_add(Duration::from_secs(pod.spec.grace))) => {}
                Some(_) => self.ended_pods_leave_nothing(pod),
                None if recent(pod.changed) => {}
                None => self.wanted_pods_run(pod),
            }
        }
        self.violations
    }

    /// Nothing of a deleted pod is left (kubelet: `HandlePodCleanups`).
    fn ended_pods_leave_nothing(&mut self, pod: &PodState) {
        let uid = &pod.spec.uid;
        let mut rests: Vec<String> = self
            .ledger
            .of_pod(uid)
            .filter(|i| !i.removed)
            .map(|i| format!("container {}", describe(i)))
            .collect();
        let sandboxes =
            self.ledger.sandboxes.iter().filter(|(_, sandbox)| sandbox.uid == *uid && !sandbox.removed);
        rests.extend(sandboxes.map(|(id, _)| format!("sandbox {}", short(id))));
        rests.extend(self.ledger.left.iter().filter(|(left, _)| left == uid).map(|(_, place)| place.clone()));
        if !rests.is_empty() {
            self.break_rule("ended-pods-leave-nothing", format!("{}: {}", pod.spec.name, rests.join(", ")));
        }
    }

    /// A wanted pod runs, or has ended by its policy, or waits for something that has a name.
    fn wanted_pods_run(&mut self, pod: &PodState) {
        let uid = &pod.spec.uid;
        let Some(status) = &pod.status else {
            return self.break_rule("wanted-pods-run", format!("{}: no status", pod.spec.name));
        };
        if status.reason.is_some() {
            // Refused, evicted or past its deadline: the status names the reason.
            return;
        }
        if self.has_ended(pod) {
            let expected = if self.has_failed(pod) { "Failed" } else { "Succeeded" };
            if status.phase != expected && !self.ledger.of_pod(uid).any(Instance::runs) {
                let detail = format!("{}: {}, not {expected}", pod.spec.name, status.phase);
                self.break_rule("phases-are-true", detail);
            }
            return;
        }
        let waits = |status: &Status| {
            status
                .containers
                .iter()
                .any(|c| matches!(&c.state, State::Waiting(why) if why == "CrashLoopBackOff"))
        };
        for container in pod.spec.containers.iter().filter(|c| c.role != Role::Init) {
            let newest = self.ledger.started(uid, &container.name).next_back();
            let over = newest.is_some_and(|i| self.ends_for_good(pod, i));
            let in_back_off = newest
                .and_then(|i| i.exited)
                .is_some_and(|(ended, ..)| ended + BACK_OFF_MAX + REACTION > self.now);
            if over || in_back_off || newest.is_some_and(Instance::runs) || waits(status) {
                continue;
            }
            let states: Vec<String> =
                status.containers.iter().map(|c| format!("{} {:?}", c.name, c.state)).collect();
            let detail = format!(
                "{}: {} does not run: {} {}",
                pod.spec.name,
                container.name,
                status.phase,
                states.join(", ")
            );
            return self.break_rule("wanted-pods-run", detail);
        }
        self.restarts_are_counted(pod, status);
        self.amounts_are_in_force(pod);
    }

    /// The count of a running container has all its restarts (kubelet: `restartCount`).
    fn restarts_are_counted(&mut self, pod: &PodState, status: &Status) {
        let missing = status.containers.iter().find_map(|container| {
            let starts = self.ledger.started(&pod.spec.uid, &container.name).count();
            let counted = usize::try_from(container.restarts).unwrap_or(usize::MAX).saturating_add(1);
            (container.state == State::Running && counted < starts)
                .then(|| format!("{}: {} restarts, {starts} starts", container.name, container.restarts))
        });
        if let Some(missing) = missing {
            self.break_rule("restarts-are-counted", format!("{}: {missing}", pod.spec.name));
        }
    }

    /// A resize that fits is in force (KEP-1287: a deferred resize is tried again when room appears).
    fn amounts_are_in_force(&mut self, pod: &PodState) {
        let running = self.ledger.pods.iter().filter(|(uid, _)| self.ledger.of_pod(uid).any(Instance::runs));
        let held: u64 =
            running.filter(|(uid, _)| **uid != pod.spec.uid).map(|(uid, pod)| self.held(uid, pod)).sum();
        if held + pod.cpu() > self.node.cpu {
            return;
        }
        let late = pod.spec.containers.iter().find_map(|container| {
            let newest =
                self.ledger.started(&pod.spec.uid, &container.name).next_back().filter(|i| i.runs())?;
            let cpu = newest.cpu?;
            (cpu != container.cpu).then(|| format!("{}: {cpu}m, not {}m", container.name, container.cpu))
        });
        if let Some(late) = late {
            self.break_rule(
                "resizes-come-about",
                format!("{}: {late} ({held}m held by others)", pod.spec.name),
            );
        }
    }

    /// Returns true if all of the pod's containers ended for good, or an init container failed for good.
    fn has_ended(&self, pod: &PodState) -> bool {
        let newest = |name: &str| self.ledger.started(&pod.spec.uid, name).next_back();
        let mut inits = pod.spec.containers.iter().filter(|c| c.role == Role::Init);
        let init_failed = inits.any(|c| {
            newest(&c.name).is_some_and(|i| {
                pod.spec.restart == Restart::Never && i.exited.is_some_and(|(_, code, _)| code != 0)
            })
        });
        let mut mains = pod.spec.containers.iter().filter(|c| c.role == Role::Main);
        init_failed || mains.all(|c| newest(&c.name).is_some_and(|i| self.ends_for_good(pod, i)))
    }

    fn has_failed(&self, pod: &PodState) -> bool {
        let ran = pod.spec.containers.iter().filter(|c| c.role != Role::Sidecar);
        let mut newest = ran.filter_map(|c| self.ledger.started(&pod.spec.uid, &c.name).next_back());
        newest.any(|i| i.exited.is_none_or(|(_, code, _)| code != 0))
    }

    fn ends_for_good(&self, pod: &PodState, instance: &Instance) -> bool {
        instance.exited.is_some_and(|(_, code, _)| match pod.spec.restart {
            Restart::Always => false,
            Restart::OnFailure => code == 0,
            Restart::Never => true,
        })
    }
}

fn describe(instance: &Instance) -> String {
    format!("{} ({})", instance.name, short(&instance.id))
}

fn short(id: &str) -> &str {
    id.get(..8).unwrap_or(id)
}
