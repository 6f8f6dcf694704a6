//! The probes for clients.

use std::time::Duration;

use beelet_policy::probe::{Outcome, ProbeKind, ProbeResult};
use beelet_proto::beelet as proto;
use beelet_proto::beelet::probes_server::{Probes, ProbesServer};
use tonic::{Request, Response, Status};

use beelet_probes::{AskError, CheckView, Explained, Handle, ProbeView, Wanted};

/// Returns the service.
#[must_use]
pub fn service(probes: Handle) -> ProbesServer<impl Probes + use<>> {
    ProbesServer::new(ProbeService { probes })
}

#[derive(Debug)]
struct ProbeService {
    probes: Handle,
}

#[tonic::async_trait]
impl Probes for ProbeService {
    async fn list_probes(
        &self,
        _request: Request<proto::ListProbesRequest>,
    ) -> Result<Response<proto::ListProbesResponse>, Status> {
        let list = self.probes.list().await.map_err(|why| refused(&why))?;
        Ok(Response::new(proto::ListProbesResponse { probes: list.into_iter().map(encode).collect() }))
    }

    async fn run_probe(
        &self,
        request: Request<proto::RunProbeRequest>,
    ) -> Result<Response<proto::RunProbeResponse>, Status> {
        let proto::RunProbeRequest { namespace, pod, container, kind } = request.into_inner();
        let kinds = [ProbeKind::Liveness, ProbeKind::Readiness, ProbeKind::Startup];
        let Some(kind) = kinds.into_iter().find(|known| known.name() == kind) else {
            return Err(Status::invalid_argument(format!(
                "unknown probe {kind:?}: use liveness, readiness or startup"
            )));
        };
        let wanted = Wanted { namespace, pod, container, kind };
        let Explained { probe, check, explanation } =
            self.probes.run(wanted).await.map_err(|why| refused(&why))?;
        Ok(Response::new(proto::RunProbeResponse {
            probe: Some(encode(probe)),
            check: Some(encode_check(check)),
            explanation,
        }))
    }
}

fn refused(why: &AskError) -> Status {
    match why {
        AskError::NotFound(_) => Status::not_found(why.to_string()),
        AskError::Unavailable => Status::unavailable(why.to_string()),
    }
}

fn encode(probe: ProbeView) -> proto::Probe {
    let result = match probe.result {
        ProbeResult::Unknown => "unknown",
        ProbeResult::Success => "success",
        ProbeResult::Failure => "failure",
    };
    let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    proto::Probe {
        namespace: probe.namespace,
        pod: probe.pod,
        container: probe.container,
        kind: probe.kind.name().to_owned(),
        target: probe.target,
        mode: probe.mode.to_owned(),
        fallback: probe.fallback.unwrap_or_default(),
        result: result.to_owned(),
        since_unix_ms: probe.since.map_or(0, jiff::Timestamp::as_millisecond),
        last: probe.last.map(encode_check),
        period_ms: millis(probe.period),
        timeout_ms: millis(probe.timeout),
        held: probe.held.unwrap_or_default(),
        problems: probe.problems,
        tolerated: probe.tolerated.map(|tolerated| proto::Tolerated {
            checks: tolerated.checks,
            failures: tolerated.failures,
            last_unix_ms: tolerated.last.as_millisecond(),
        }),
    }
}

fn encode_check(check: CheckView) -> proto::ProbeCheck {
    let outcome = match check.outcome {
        Outcome::Success => "success",
        Outcome::Failure => "failure",
        Outcome::Error => "error",
    };
    proto::ProbeCheck {
        outcome: outcome.to_owned(),
        detail: check.detail,
        latency_us: u64::try_from(check.latency.as_micros()).unwrap_or(u64::MAX),
        at_unix_ms: check.at.as_millisecond(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(kind: &str) -> Request<proto::RunProbeRequest> {
        let kind = kind.to_owned();
        Request::new(proto::RunProbeRequest {
            kind,
            pod: "web".into(),
            container: "c".into(),
            ..Default::default()
        })
    }

    #[tokio::test]
    async fn what_is_no_kind_is_refused_and_who_is_not_there_is_unavailable() {
        let (handle, commands) = beelet_probes::handle();
        let service = ProbeService { probes: handle };
        let refused = service.run_probe(asked("aliveness")).await.unwrap_err();
        assert_eq!(refused.code(), tonic::Code::InvalidArgument);
        drop(commands);
        assert_eq!(service.run_probe(asked("liveness")).await.unwrap_err().code(), tonic::Code::Unavailable);
        let list = service.list_probes(Request::new(proto::ListProbesRequest {})).await;
        assert_eq!(list.unwrap_err().code(), tonic::Code::Unavailable);
    }
}
