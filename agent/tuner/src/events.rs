//! The tuner's steps as events of the node.

use std::sync::Arc;

use jiff::Timestamp;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::view::{Outcome, TunerRecord, View};
use beelet_base::work::Work;
use beelet_state::events::{Object, Recorder};

/// Records an event for each step that `view` shows from now on, and one for a lost scheduler, until
/// `shutdown`. Advice is not a step.
pub fn record_events(
    mut view: watch::Receiver<Arc<View>>,
    events: Recorder,
    node: String,
    shutdown: CancellationToken,
) -> Work {
    Box::pin(async move {
        let (mut recorded_until, mut lost) = (Timestamp::now(), None);
        while let Some(Ok(())) = shutdown.run_until_cancelled(view.changed()).await {
            let (history, why) = {
                let view = view.borrow_and_update();
                (Arc::clone(&view.history), view.scheduler_lost.clone())
            };
            if let Some(why) = why.as_ref().filter(|_| why != lost) {
                events.warning(Object::node(&node), "TunerSchedulerLost", why.clone());
            }
            lost = why;
            for step in history.iter().filter(|step| step.at > recorded_until) {
                let object = || Object::node(&node);
                match words(step) {
                    Some((reason, message, true)) => events.normal(object(), reason, message),
                    Some((reason, message, false)) => events.warning(object(), reason, message),
                    None => {}
                }
            }
            recorded_until = history.last().map_or(recorded_until, |step| step.at.max(recorded_until));
        }
    })
}

/// Returns the event's reason and message, and true for a normal event; `None` for advice.
fn words(step: &TunerRecord) -> Option<(&'static str, String, bool)> {
    let what = format!("{} of {}", step.knob.kind.as_str(), step.knob.cgroup);
    let owners = || "its owner's value".to_owned();
    let from = step.from.clone().unwrap_or_else(owners);
    let to = step.to.clone().unwrap_or_else(owners);
    let why = &step.reason;
    match &step.outcome {
        Outcome::Advised => None,
        Outcome::Done => {
            let reason = if step.to.is_none() { "TunerGaveBack" } else { "Tuned" };
            Some((reason, format!("{what}: from {from} to {to}: {why}"), true))
        }
        Outcome::Failed(error) => Some(("TunerFailed", format!("{what} to {to}: {error}"), false)),
        Outcome::Overwritten(by) => Some(("TunerOverwritten", format!("{what}: {by}"), false)),
    }
}

#[cfg(test)]
mod tests {
    use beelet_policy::tuner::{Knob, KnobKind};

    use super::*;

    #[tokio::test]
    async fn a_lost_scheduler_is_one_event() {
        let events = Recorder::default();
        let (views, view) = watch::channel(Arc::new(View::default()));
        let shutdown = CancellationToken::new();
        let recording = tokio::spawn(record_events(view, events.clone(), "n1".to_owned(), shutdown.clone()));
        let mut log = events.subscribe();
        for why in ["a task stalled", "a task stalled", "it misbehaved"] {
            let scheduler_lost = Some(why.to_owned());
            views.send_replace(Arc::new(View { scheduler_lost, ..View::default() }));
            let is_recorded =
                |log: &beelet_state::events::Log| log.all().iter().any(|event| event.message == why);
            log.wait_for(is_recorded).await.unwrap();
            tokio::task::yield_now().await;
        }
        shutdown.cancel();
        recording.await.unwrap();
        let all = log.borrow().all();
        assert_eq!(all.len(), 2);
        assert!(all.iter().all(|event| event.reason == "TunerSchedulerLost" && event.count == 1));
    }

    fn step(to: Option<&str>, outcome: Outcome) -> TunerRecord {
        TunerRecord {
            at: Timestamp::now(),
            knob: Knob { cgroup: "/kubepods/besteffort".to_owned(), kind: KnobKind::Idle },
            from: None,
            to: to.map(str::to_owned),
            reason: "web waits for batch".to_owned(),
            outcome,
        }
    }

    #[test]
    fn a_step_is_an_event_and_advice_is_not() {
        let reason = |step: &TunerRecord| words(step).map(|(reason, ..)| reason);
        assert_eq!(reason(&step(Some("idle"), Outcome::Done)), Some("Tuned"));
        assert_eq!(reason(&step(None, Outcome::Done)), Some("TunerGaveBack"));
        assert_eq!(reason(&step(Some("idle"), Outcome::Failed("no".to_owned()))), Some("TunerFailed"));
        assert_eq!(reason(&step(Some("idle"), Outcome::Advised)), None);
        let (_, message, is_well) = words(&step(Some("idle"), Outcome::Done)).unwrap();
        assert!(
            is_well && message.contains("from its owner's value to idle: web waits for batch"),
            "{message}"
        );
    }
}
