//! Calls of the agent to the runtime: how long they take, which fail, and the effects on processes.

use std::time::Duration;

use beelet_judge::trace::{End, Fact, ProbeKind};
use beelet_tests::cri::{Asked, Director, Op, World};
use fastrand::Rng;
use tonic::Status;

use super::{Core, KILLED, TERMINATED};
use crate::plan::FaultKind;
use crate::seam;

fn probe_kind(word: &str) -> Option<ProbeKind> {
    match word {
        "startup" => Some(ProbeKind::Startup),
        "liveness" => Some(ProbeKind::Liveness),
        "readiness" => Some(ProbeKind::Readiness),
        _ => None,
    }
}

fn is_change(op: Op) -> bool {
    beelet_tests::cri::CHANGES.contains(&op)
}

/// Returns the subject of a call, for the trace.
fn subject(asked: &Asked) -> &str {
    match asked {
        Asked::RunPodSandbox(request) => {
            request.config.as_ref().and_then(|c| c.metadata.as_ref()).map_or("", |m| m.uid.as_str())
        }
        Asked::StopPodSandbox(request) => &request.pod_sandbox_id,
        Asked::RemovePodSandbox(request) => &request.pod_sandbox_id,
        Asked::PodSandboxStatus(request) => &request.pod_sandbox_id,
        Asked::CreateContainer(request) => &request.pod_sandbox_id,
        Asked::StartContainer(request) => &request.container_id,
        Asked::StopContainer(request) => &request.container_id,
        Asked::RemoveContainer(request) => &request.container_id,
        Asked::ContainerStatus(request) => &request.container_id,
        Asked::UpdateContainerResources(request) => &request.container_id,
        Asked::ExecSync(request) => &request.container_id,
        _ => "",
    }
}

/// Returns the usual duration of a call, in milliseconds.
fn duration(op: Op, rng: &mut Rng) -> u64 {
    match op {
        Op::RunPodSandbox => rng.u64(50..400),
        Op::StopPodSandbox | Op::RemovePodSandbox => rng.u64(10..150),
        Op::CreateContainer | Op::StartContainer => rng.u64(10..120),
        Op::PullImage => rng.u64(200..4000),
        Op::ExecSync => rng.u64(3..60),
        Op::GetContainerEvents => 0,
        _ => rng.u64(0..12),
    }
}

#[tonic::async_trait]
impl Director for Core {
    async fn before(&self, asked: &Asked) -> Result<(), Status> {
        let op = asked.op();
        let key = format!("{op:?} {}", subject(asked));
        let mut rng = self.random(&key);
        if is_change(op) {
            let mut state = self.lock();
            state.calls.push((seam::elapsed(), key));
            if let Asked::StartContainer(request) = asked {
                state.starts.insert(request.container_id.clone(), seam::elapsed());
            }
        }
        maybe_kill(self, op, false).await;
        let fault = self.disturbances.fault(op, &mut rng);
        if let (Some(_), Asked::ExecSync(request)) = (fault, asked)
            && let Some(kind) = request.cmd.get(1).and_then(|word| probe_kind(word))
        {
            // The agent may count a disturbed probe as failed.
            self.record(Fact::Probed { container: request.container_id.clone(), kind, passed: false });
        }
        tokio::time::sleep(Duration::from_millis(duration(op, &mut rng))).await;
        match fault {
            Some((FaultKind::Slow(most), _)) => {
                tokio::time::sleep(Duration::from_millis(rng.u64(0..=most))).await;
            }
            Some((FaultKind::FailBefore, _)) => return Err(Status::unknown("simulated failure")),
            Some((FaultKind::Hang, rest)) => {
                tokio::time::sleep(rest).await;
                return Err(Status::unavailable("simulated hang"));
            }
            Some((FaultKind::FailAfter, _)) | None => {}
        }
        if let Asked::StopContainer(request) = asked
            && self.runs(&request.container_id)
        {
            stop(self, &request.container_id, request.timeout).await;
        }
        Ok(())
    }

    fn prepare(&self, world: &mut World, asked: &Asked) {
        if let Asked::ExecSync(request) = asked {
            answer_command(self, world, &request.container_id, &request.cmd);
        }
    }

    fn follow(&self, world: &mut World, asked: &Asked) {
        if is_change(asked.op()) || asked.op() == Op::UpdateContainerResources {
            self.lock().follow(world, &self.cgroups);
            self.changed.notify_one();
        }
    }

    async fn after(&self, asked: &Asked) -> Result<(), Status> {
        let op = asked.op();
        maybe_kill(self, op, true).await;
        let mut rng = self.random(&format!("answer {op:?} {}", subject(asked)));
        let fault = self.disturbances.fault(op, &mut rng);
        if fault.is_none()
            && let Asked::ExecSync(request) = asked
        {
            let kind = request.cmd.get(1).and_then(|word| probe_kind(word));
            let sick = kind.is_some() && is_sick(self, &request.container_id);
            if let Some(kind) = kind.filter(|_| !sick) {
                self.record(Fact::Probed { container: request.container_id.clone(), kind, passed: true });
            }
        }
        match fault {
            Some((FaultKind::FailAfter, _)) => Err(Status::unavailable("simulated loss of the answer")),
            Some((FaultKind::Slow(most), _)) => {
                tokio::time::sleep(Duration::from_millis(rng.u64(0..=most))).await;
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

/// Sends SIGTERM to a container's process.
fn terminate(core: &Core, id: &str) {
    let mut state = core.lock();
    let Some(process) = state.processes.get_mut(id).filter(|process| !process.terminated) else { return };
    process.terminated = true;
    if let Some(seconds) = process.behaviour.stops {
        let at = seam::elapsed() + Duration::from_secs(seconds) + Duration::from_millis(20);
        let sooner = process.ends.is_none_or(|(ends, _, _)| at < ends);
        if sooner {
            process.ends = Some((at, TERMINATED, End::Stop));
        }
    }
    drop(state);
    core.changed.notify_one();
}

/// Waits if the agent is to be killed at this call: then the call never returns.
async fn maybe_kill(core: &Core, op: Op, after: bool) {
    if is_change(op) && core.disturbances.dies(after) {
        core.killed.notify_one();
        std::future::pending::<()>().await;
    }
}

/// Stops a container: SIGTERM, and SIGKILL after the grace period.
async fn stop(core: &Core, id: &str, grace: i64) {
    core.record(Fact::StopAsked { container: id.to_owned(), grace });
    let grace = u64::try_from(grace).unwrap_or(0).min(1 << 32);
    let deadline = tokio::time::Instant::now() + Duration::from_secs(grace);
    if grace > 0 {
        terminate(core, id);
    }
    while core.runs(id) {
        if tokio::time::Instant::now() >= deadline {
            core.end(id, KILLED, End::Stop);
            return;
        }
        let step = tokio::time::Instant::now() + Duration::from_millis(100);
        tokio::time::sleep_until(deadline.min(step)).await;
    }
}

/// Prepares the answer of a command in a container.
fn answer_command(core: &Core, world: &mut World, id: &str, command: &[String]) {
    let [word, kind] = command else { return };
    let sick = is_sick(core, id);
    world.exec_codes.insert(word.clone(), i32::from(sick));
    if sick && let Some(kind) = probe_kind(kind) {
        core.record(Fact::Probed { container: id.to_owned(), kind, passed: false });
    }
}

/// Returns true if the container's probes fail now.
fn is_sick(core: &Core, id: &str) -> bool {
    let name = core.lock().names.get(id).cloned();
    name.is_some_and(|name| core.disturbances.is_sick(&name))
}
