//! How soon a pod is to end, where several have asked for that.

use std::time::Duration;

use super::Control;

/// How a pod is terminated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Terminate {
    /// Overrides the pod's own grace period.
    pub grace: Option<Duration>,
}

impl Control {
    /// The time within which a pod with this grace period is to end, if it is. Of two ends the sooner one.
    pub(super) fn end(&self, own: Duration) -> Option<Duration> {
        self.terminate.iter().chain(&self.failed).map(|end| end.grace.unwrap_or(own)).min()
    }

    /// Ends a pod with this grace period. An end under way is only hastened, as by the kubelet
    /// (`calculateEffectiveGracePeriod`, pkg/kubelet/pod_workers.go). Returns true if that is new.
    pub(crate) fn fail(&mut self, end: Terminate, own: Duration) -> bool {
        let by = |end: Terminate| end.grace.unwrap_or(own);
        let is_new = self.failed.is_none_or(|known| by(end) < by(known));
        if is_new {
            self.failed = Some(end);
        }
        is_new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_under_way_is_only_hastened() {
        let own = Duration::from_secs(30);
        let check = |asked: &[(Option<u64>, bool)], expected: Option<u64>| {
            let mut control = Control::default();
            for (grace, is_new) in asked {
                let end = Terminate { grace: grace.map(Duration::from_secs) };
                assert_eq!(control.fail(end, own), *is_new, "{asked:?}");
            }
            assert_eq!(
                control.failed.map(|end| end.grace),
                Some(expected.map(Duration::from_secs)),
                "{asked:?}"
            );
        };
        check(&[(None, true)], None);
        // A deletion after an eviction or a preemption with the pod's own grace period.
        check(&[(None, true), (Some(300), false)], None);
        check(&[(None, true), (Some(30), false), (Some(29), true)], Some(29));
        check(&[(Some(300), true), (None, true)], None);
        check(&[(Some(1), true), (None, false), (Some(20), false)], Some(1));
    }

    #[test]
    fn of_two_ends_the_sooner_one_counts() {
        let own = Duration::from_secs(30);
        let seconds = |grace: Option<u64>| Terminate { grace: grace.map(Duration::from_secs) };
        let check = |terminate: Option<Option<u64>>, failed: Option<Option<u64>>, expected: Option<u64>| {
            let control = Control {
                terminate: terminate.map(seconds),
                failed: failed.map(seconds),
                ..Control::default()
            };
            assert_eq!(control.end(own), expected.map(Duration::from_secs), "{terminate:?} {failed:?}");
        };
        check(None, None, None);
        check(Some(None), None, Some(30));
        check(None, Some(Some(5)), Some(5));
        check(Some(None), Some(Some(5)), Some(5));
        check(Some(None), Some(Some(300)), Some(30));
    }
}
