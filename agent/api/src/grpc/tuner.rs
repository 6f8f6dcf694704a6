//! The tuner for clients.

use std::sync::Arc;

use beelet_proto::beelet as proto;
use beelet_proto::beelet::tuner_server::{Tuner, TunerServer};
use jiff::Timestamp;
use tokio::sync::watch;
use tonic::{Request, Response, Status};

use beelet_pinning::PinningReport;
use beelet_policy::tuner::TunerMode;
use beelet_tuner::{Outcome, TunerRecord, View};

/// Returns the service.
#[must_use]
pub fn service(
    view: watch::Receiver<Arc<View>>,
    pinning: watch::Receiver<Arc<PinningReport>>,
) -> TunerServer<impl Tuner> {
    TunerServer::new(TunerService { view, pinning })
}

#[derive(Debug)]
struct TunerService {
    view: watch::Receiver<Arc<View>>,
    pinning: watch::Receiver<Arc<PinningReport>>,
}

#[tonic::async_trait]
impl Tuner for TunerService {
    async fn get_tuner_status(
        &self,
        _: Request<proto::GetTunerStatusRequest>,
    ) -> Result<Response<proto::TunerStatus>, Status> {
        let view = Arc::clone(&self.view.borrow());
        let pinning = Arc::clone(&self.pinning.borrow());
        Ok(Response::new(status(&view, &pinning)))
    }

    async fn get_tuner_history(
        &self,
        _: Request<proto::GetTunerHistoryRequest>,
    ) -> Result<Response<proto::TunerHistory>, Status> {
        let history = Arc::clone(&self.view.borrow().history);
        Ok(Response::new(proto::TunerHistory { steps: history.iter().map(step).collect() }))
    }
}

fn status(view: &View, pinning: &PinningReport) -> proto::TunerStatus {
    let held = view.held.iter().map(|held| proto::HeldSetting {
        cgroup: held.knob.cgroup.clone(),
        setting: held.knob.kind.as_str().to_owned(),
        value: held.value.clone(),
        owners_value: held.owners.clone(),
        since_ns: nanoseconds(held.since),
        reason: held.reason.clone(),
    });
    let blocked = view.blocked.iter().map(|blocked| proto::BlockedSetting {
        cgroup: blocked.knob.cgroup.clone(),
        setting: blocked.knob.kind.as_str().to_owned(),
        seconds_left: blocked.left.as_secs(),
        reason: blocked.reason.clone(),
    });
    let mode = view.mode.map(|mode| match mode {
        TunerMode::Off => "off",
        TunerMode::Advise => "advise",
        TunerMode::Enforce => "enforce",
    });
    proto::TunerStatus {
        mode: mode.unwrap_or_default().to_owned(),
        looked_ns: view.at.map_or(0, nanoseconds),
        findings: view.findings.clone(),
        lacking: view.lacking.clone(),
        held: held.collect(),
        blocked: blocked.collect(),
        pinning: pinning.advice.clone(),
    }
}

fn step(record: &TunerRecord) -> proto::TunerStep {
    let (outcome, detail) = match &record.outcome {
        Outcome::Done => ("done", ""),
        Outcome::Advised => ("advised", ""),
        Outcome::Failed(error) => ("failed", error.as_str()),
        Outcome::Overwritten(value) => ("overwritten", value.as_str()),
    };
    proto::TunerStep {
        at_ns: nanoseconds(record.at),
        cgroup: record.knob.cgroup.clone(),
        setting: record.knob.kind.as_str().to_owned(),
        from: record.from.clone(),
        to: record.to.clone(),
        reason: record.reason.clone(),
        outcome: outcome.to_owned(),
        detail: detail.to_owned(),
    }
}

fn nanoseconds(at: Timestamp) -> i64 {
    i64::try_from(at.as_nanosecond()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use beelet_policy::tuner::{Knob, KnobKind};

    use super::*;
    use beelet_tuner::HeldSetting;

    #[test]
    fn a_held_setting_is_told_with_its_owners_value_and_reason() {
        let knob = Knob { cgroup: "/kubepods/besteffort".to_owned(), kind: KnobKind::CpuCap };
        let held = HeldSetting {
            knob,
            value: "0.5 CPUs".to_owned(),
            owners: "max 100000".to_owned(),
            since: Timestamp::from_second(5).unwrap(),
            reason: "why".to_owned(),
        };
        let view = View { mode: Some(TunerMode::Enforce), held: vec![held], ..View::default() };
        let told = status(&view, &PinningReport::default());
        assert_eq!((told.mode.as_str(), told.looked_ns), ("enforce", 0));
        let held = &told.held[0];
        assert_eq!(
            (held.setting.as_str(), held.owners_value.as_str(), held.since_ns),
            ("cpu.max", "max 100000", 5_000_000_000)
        );
    }
}
