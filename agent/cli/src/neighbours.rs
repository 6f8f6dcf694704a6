//! Who had the CPU while a pod waited for it, as far as the agent's numbers say: what took it away by class
//! (other pods, what is outside pods), and the busiest of them by name.

use beelet_proto::beelet::{SignalContainer, SignalPod, SignalRates, SignalSnapshot};

use crate::plain;

/// A pod that waits less than this share of the time is left alone with it.
const WORTH_TELLING: f64 = 0.01;
/// CPUs below this are not called busy.
const BUSY: f64 = 0.05;
/// Neighbours that are named.
const NAMED: usize = 3;

/// How what is outside pods is called.
pub(crate) const OUTSIDE: &str = "(outside pods)";

/// CPUs that are used outside pods, over the window that `of` takes the containers' rates from; `machine` is
/// what is used in all. None if the numbers are not there, or not of all pods.
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

/// Who had the CPU while the pod with this UID waited for it, in a sentence; None if it hardly waited, or
/// nobody knows.
pub(crate) fn sentence(
    snapshot: &SignalSnapshot,
    uid: &str,
    machine: Option<f64>,
    of: impl Fn(&SignalContainer) -> Option<&SignalRates> + Copy,
) -> Option<String> {
    let pod = snapshot.pods.iter().find(|pod| pod.uid == uid)?;
    let rates: Vec<&SignalRates> = pod.containers.iter().filter_map(of).collect();
    let waited: f64 = rates.iter().filter_map(|rates| rates.runqueue_wait).sum();
    if waited < WORTH_TELLING {
        return None;
    }
    let over = rates.iter().map(|rates| rates.over_seconds).fold(0.0, f64::max);
    let sum = |class: fn(&SignalRates) -> Option<f64>| rates.iter().filter_map(|one| class(one)).sum::<f64>();
    let by_pods = sum(|rates| rates.preempted_by_other_pod);
    let by_system = sum(|rates| rates.preempted_by_system);
    let mut text = format!("waited {:.0} % of the last {over:.0} s for a CPU", waited * 100.0);
    if by_pods + by_system > 0.0 {
        let share = |part: f64| part / (by_pods + by_system) * 100.0;
        text += &format!(
            "; lost it to other pods ({:.0} %) and to what is outside pods ({:.0} %)",
            share(by_pods),
            share(by_system)
        );
    }
    let beside = busiest(snapshot, uid, machine, of);
    if !beside.is_empty() {
        text += &format!("; busiest beside it: {}", beside.join(", "));
    }
    Some(text)
}

/// The busiest beside a pod with their CPUs, the busiest first.
fn busiest(
    snapshot: &SignalSnapshot,
    uid: &str,
    machine: Option<f64>,
    of: impl Fn(&SignalContainer) -> Option<&SignalRates> + Copy,
) -> Vec<String> {
    let others = snapshot.pods.iter().filter(|pod| pod.uid != uid);
    let named = others.filter_map(|pod| Some((format!("{}/{}", pod.namespace, pod.name), cpu(pod, of)?)));
    let system = outside(snapshot, machine, of).map(|cpu| (OUTSIDE.to_owned(), cpu));
    let mut all: Vec<(String, f64)> = named.chain(system).filter(|(_, cpu)| *cpu >= BUSY).collect();
    all.sort_by(|(a, first), (b, second)| second.total_cmp(first).then_with(|| a.cmp(b)));
    let shown = |(name, cpu): (String, f64)| format!("{} {cpu:.2}", plain::line(&name));
    all.into_iter().take(NAMED).map(shown).collect()
}

/// CPUs that a pod uses.
fn cpu(pod: &SignalPod, of: impl Fn(&SignalContainer) -> Option<&SignalRates>) -> Option<f64> {
    pod.containers.iter().filter_map(of).map(|rates| rates.cpu).reduce(|sum, cpu| sum + cpu)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(name: &str, rates: SignalRates) -> SignalPod {
        let container = SignalContainer { last_10s: Some(rates), ..Default::default() };
        SignalPod {
            namespace: "default".to_owned(),
            name: name.to_owned(),
            uid: name.to_owned(),
            containers: vec![container],
            ..Default::default()
        }
    }

    fn ten(container: &SignalContainer) -> Option<&SignalRates> {
        container.last_10s.as_ref()
    }

    #[test]
    fn a_pod_that_waits_has_its_busiest_neighbours_named() {
        let web = SignalRates {
            over_seconds: 10.0,
            cpu: 0.2,
            runqueue_wait: Some(0.14),
            preempted_by_other_pod: Some(71.0),
            preempted_by_system: Some(29.0),
            ..Default::default()
        };
        let busy = |cpu| SignalRates { over_seconds: 10.0, cpu, ..Default::default() };
        let pods = vec![pod("web", web), pod("noisy", busy(1.1)), pod("calm", busy(0.01))];
        let snapshot = SignalSnapshot { pods, ..Default::default() };
        assert_eq!(
            sentence(&snapshot, "web", Some(1.9), ten).unwrap(),
            "waited 14 % of the last 10 s for a CPU; lost it to other pods (71 %) and to what is outside pods (29 %); \
             busiest beside it: default/noisy 1.10, (outside pods) 0.59"
        );
        assert_eq!(sentence(&snapshot, "noisy", Some(1.9), ten), None);
        assert_eq!(sentence(&snapshot, "none", Some(1.9), ten), None);
        let partly = SignalSnapshot { left_out: 1, ..snapshot };
        assert_eq!(outside(&partly, Some(1.9), ten), None);
    }
}
