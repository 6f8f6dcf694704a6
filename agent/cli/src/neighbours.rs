//! CPU use outside pods.

use beelet_proto::beelet::{SignalContainer, SignalPod, SignalRates, SignalSnapshot};

/// Name of the row for CPU use outside pods.
pub(crate) const OUTSIDE: &str = "(outside pods)";

/// Returns the CPUs used outside pods, over the window from which `of` takes the containers' rates; `machine`
/// is the total use. Returns None if numbers are missing or pods are not measured.
pub(crate) fn outside(
    snapshot: &SignalSnapshot,
    machine: Option<f64>,
    of: impl Fn(&SignalContainer) -> Option<&SignalRates> + Copy,
) -> Option<f64> {
    if snapshot.left_out > 0 {
        return None;
    }
    let pods: f64 = snapshot.pods.iter().filter_map(|pod| cpu(pod, of)).sum();
    Some((machine? - pods).max(0.0))
}

/// Returns the CPUs used by a pod.
fn cpu(pod: &SignalPod, of: impl Fn(&SignalContainer) -> Option<&SignalRates>) -> Option<f64> {
    pod.containers.iter().filter_map(of).map(|rates| rates.cpu).reduce(|sum, cpu| sum + cpu)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_no_pod_uses_is_used_outside_pods_where_all_pods_are_known() {
        let pod = |cpu| {
            let last_10s = Some(SignalRates { over_seconds: 10.0, cpu, ..Default::default() });
            let container = SignalContainer { last_10s, ..Default::default() };
            SignalPod { containers: vec![container], ..Default::default() }
        };
        let snapshot = SignalSnapshot { pods: vec![pod(0.25), pod(1.0)], ..Default::default() };
        let of = |snapshot: &SignalSnapshot| outside(snapshot, Some(1.75), |one| one.last_10s.as_ref());
        assert_eq!(of(&snapshot), Some(0.5));
        assert_eq!(of(&SignalSnapshot { left_out: 1, ..snapshot }), None);
    }
}
