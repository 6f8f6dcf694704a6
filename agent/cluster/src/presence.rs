//! Records if the API server answers, from the results of all connections' requests. An answered request
//! wakes all tasks that wait to retry: an outage ends for all of them at once, not at the end of each task's
//! pause.

use std::time::Duration;

use tokio::{sync::watch, time::sleep};

use crate::{
    backoff::{Backoff, random},
    error::{Error, Kind},
};

/// Period over which the tasks of all nodes spread their first requests after an outage.
const RETURN: Duration = Duration::from_secs(1);

/// State of the server by the last request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Found {
    /// No request has been sent yet.
    #[default]
    Nothing,
    /// The server answers.
    Here,
    /// The server does not answer.
    Away,
}

/// The server's state, shared by all its clients.
#[derive(Clone, Debug, Default)]
pub struct Presence(watch::Sender<Found>);

impl Presence {
    /// Records the result of a request.
    pub(crate) fn record<T>(&self, answer: &Result<T, Error>) {
        let found = match answer.as_ref().map_err(|error| error.kind) {
            // The request was not sent.
            Err(Kind::Unaskable) => return,
            Err(Kind::Unreachable | Kind::Untrusted) => Found::Away,
            // The server is overloaded or failing for this request: not conclusive for other requests.
            Err(Kind::Status { code, .. }) if code == 429 || code >= 500 => match *self.0.borrow() {
                Found::Nothing => Found::Away,
                known => known,
            },
            Ok(_) | Err(Kind::Status { .. }) => Found::Here,
        };
        self.0.send_if_modified(|known| std::mem::replace(known, found) != found);
    }

    #[cfg(test)]
    pub(crate) fn is_unknown(&self) -> bool {
        *self.0.borrow() == Found::Nothing
    }

    /// Waits until the server answers.
    pub(crate) async fn here(&self) {
        self.until(|found| found == Found::Here).await;
    }

    /// Waits until the server does not answer or its state is unknown.
    pub(crate) async fn missing(&self) {
        self.until(|found| found != Found::Here).await;
    }

    async fn until(&self, wanted: impl Fn(Found) -> bool) {
        // `self` is the sender and outlives this call, so waiting can't fail.
        let _ = self.0.subscribe().wait_for(|found| wanted(*found)).await;
    }

    /// Waits for the next pause after a request that failed with `error`; if the server did not answer, at
    /// most until it does.
    pub(crate) async fn pause(&self, backoff: &mut Backoff, error: &Error) {
        let pause = backoff.next(error.retry_after());
        if !error.is_absence() {
            return sleep(pause).await;
        }
        tokio::select! {
            () = sleep(pause) => {}
            () = self.here() => {
                backoff.reset();
                sleep(moment().min(pause)).await;
            }
        }
    }
}

/// Returns a random delay of a task's first request after an outage.
pub(crate) fn moment() -> Duration {
    RETURN.mul_f64(random())
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    fn error(kind: Kind) -> Error {
        Error { request: "GET /".to_owned(), kind, message: String::new() }
    }

    #[tokio::test(start_paused = true)]
    async fn a_pause_ends_when_somebody_is_answered() {
        let (presence, absent) = (Presence::default(), error(Kind::Unreachable));
        presence.record::<()>(&Err(absent.clone()));
        let mut backoff = Backoff::new(Duration::from_secs(60), Duration::from_secs(60));
        let began = Instant::now();
        let other = async {
            sleep(Duration::from_secs(5)).await;
            presence.record(&Ok(()));
        };
        tokio::join!(presence.pause(&mut backoff, &absent), other);
        assert!(began.elapsed() <= Duration::from_secs(6), "{:?}", began.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_that_refuses_is_given_its_time() {
        let presence = Presence::default();
        let busy = error(Kind::Status { code: 429, retry_after: Some(Duration::from_secs(20)) });
        presence.record(&Ok(()));
        presence.record::<()>(&Err(busy.clone()));
        let mut backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(60));
        let began = Instant::now();
        presence.pause(&mut backoff, &busy).await;
        assert!(began.elapsed() >= Duration::from_secs(20), "{:?}", began.elapsed());
    }

    #[tokio::test]
    async fn a_refusal_is_an_answer_and_a_fault_says_nothing_new() {
        let check = |kinds: &[Option<Kind>], expected: Found| {
            let presence = Presence::default();
            for kind in kinds {
                presence.record(&kind.map_or(Ok(()), |kind| Err(error(kind))));
            }
            assert_eq!(*presence.0.borrow(), expected, "{kinds:?}");
        };
        let status = |code| Some(Kind::Status { code, retry_after: None });
        check(&[], Found::Nothing);
        check(&[status(403)], Found::Here);
        check(&[status(503)], Found::Away);
        check(&[None, status(503)], Found::Here);
        check(&[None, Some(Kind::Unreachable), status(503)], Found::Away);
        check(&[Some(Kind::Untrusted), None], Found::Here);
        check(&[None, Some(Kind::Unaskable)], Found::Here);
        check(&[Some(Kind::Unreachable), Some(Kind::Unaskable)], Found::Away);
    }
}
