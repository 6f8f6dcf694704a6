//! Amounts of the node reserved from pods, compared with the machine's capacity.
//!
//! Source: `GetNodeAllocatableReservation` and `validateNodeAllocatable` in
//! pkg/kubelet/cm/node_container_manager_linux.go: a kubelet does not start if a reservation exceeds the
//! capacity. Resources that the machine does not count are not compared.

use std::{collections::BTreeMap, fmt};

use beelet_units::quantity::Quantity;

use crate::{
    eviction::{Signal, Threshold},
    resources::{CPU, EPHEMERAL_STORAGE, MEMORY},
};

/// Amounts by resource: cores, bytes or counts.
type Amounts = BTreeMap<String, Quantity>;

/// A resource whose reservations exceed the machine's capacity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Excess {
    /// The resource.
    pub resource: String,
    /// Amounts above zero, by the setting that reserves them.
    pub reserved: Vec<(&'static str, Quantity)>,
    /// The machine's amount.
    pub capacity: Quantity,
}

impl fmt::Display for Excess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = |amount: Quantity| if self.resource == CPU { amount.to_string() } else { amount.binary() };
        let amounts: Vec<String> =
            self.reserved.iter().map(|(setting, amount)| format!("{} by {setting}", text(*amount))).collect();
        let settings: Vec<&str> = self.reserved.iter().map(|(setting, _)| *setting).collect();
        let sum = self.reserved.iter().map(|(_, amount)| *amount).sum();
        write!(
            f,
            "{} of {} are reserved ({}), and this machine has {}: nothing is left for pods; lower {}",
            text(sum),
            self.resource,
            amounts.join(", "),
            text(self.capacity),
            settings.join(" or "),
        )
    }
}

/// Returns the amounts that hard eviction thresholds keep free, of the resources that pods request.
#[must_use]
pub fn hard_eviction(capacity: &Amounts, thresholds: &[Threshold]) -> Amounts {
    let mut kept = Amounts::new();
    for threshold in thresholds.iter().filter(|threshold| threshold.grace.is_zero()) {
        let resource = match threshold.signal {
            Signal::MemoryAvailable => MEMORY,
            Signal::NodeFsAvailable => EPHEMERAL_STORAGE,
            _ => continue,
        };
        if let Some(all) = capacity.get(resource) {
            let amount = kept.entry(resource.to_owned()).or_default();
            *amount = [*amount, threshold.value.of(*all)].into_iter().sum();
        }
    }
    kept
}

/// Returns the resources of which `systemReserved`, `kubeReserved` and hard eviction thresholds together
/// reserve more than `capacity`.
#[must_use]
pub fn excesses(
    capacity: &Amounts,
    system: &Amounts,
    kube: &Amounts,
    thresholds: &[Threshold],
) -> Vec<Excess> {
    let eviction = hard_eviction(capacity, thresholds);
    let settings = [("systemReserved", system), ("kubeReserved", kube), ("evictionHard", &eviction)];
    let of = |(resource, capacity): (&String, &Quantity)| {
        let amounts = settings.iter().filter_map(|(setting, of)| Some((*setting, *of.get(resource)?)));
        let reserved: Vec<_> = amounts.filter(|(_, amount)| *amount > Quantity::ZERO).collect();
        let sum: Quantity = reserved.iter().map(|(_, amount)| *amount).sum();
        (sum > *capacity).then(|| Excess { resource: resource.clone(), reserved, capacity: *capacity })
    };
    capacity.iter().filter_map(of).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::eviction::ThresholdValue;

    fn amounts(list: &[(&str, &str)]) -> Amounts {
        list.iter().map(|(name, text)| ((*name).to_owned(), Quantity::parse(text).unwrap())).collect()
    }

    #[test]
    fn an_excess_reservation_is_reported_with_its_settings() {
        let capacity =
            amounts(&[("cpu", "2"), ("ephemeral-storage", "10Gi"), ("memory", "8Gi"), ("pid", "100")]);
        let threshold = |signal, value: &str, grace| {
            let value = ThresholdValue::threshold(value).unwrap().unwrap();
            Threshold { signal, value, grace: Duration::from_secs(grace), min_reclaim: None }
        };
        let thresholds = [
            threshold(Signal::MemoryAvailable, "1Gi", 0),
            threshold(Signal::MemoryAvailable, "7Gi", 30),
            threshold(Signal::NodeFsAvailable, "1Gi", 0),
        ];
        let check = |system: &[(&str, &str)], kube: &[(&str, &str)], expected: &[&str]| {
            let found = excesses(&capacity, &amounts(system), &amounts(kube), &thresholds);
            assert_eq!(found.iter().map(Excess::to_string).collect::<Vec<_>>(), expected);
        };
        check(&[], &[], &[]);
        check(&[("memory", "7Gi"), ("cpu", "1")], &[("cpu", "1")], &[]);
        check(&[("gpu", "7")], &[], &[]);
        check(
            &[("memory", "900Gi")],
            &[],
            &[
                "901Gi of memory are reserved (900Gi by systemReserved, 1Gi by evictionHard), and this machine has 8Gi: \
               nothing is left for pods; lower systemReserved or evictionHard",
            ],
        );
        check(
            &[("cpu", "1500m"), ("pid", "50")],
            &[("cpu", "501m"), ("pid", "51")],
            &[
                "2001m of cpu are reserved (1500m by systemReserved, 501m by kubeReserved), and this machine has 2: \
                 nothing is left for pods; lower systemReserved or kubeReserved",
                "101 of pid are reserved (50 by systemReserved, 51 by kubeReserved), and this machine has 100: \
                 nothing is left for pods; lower systemReserved or kubeReserved",
            ],
        );
        check(
            &[("ephemeral-storage", "9217Mi")],
            &[],
            &[
                "10241Mi of ephemeral-storage are reserved (9217Mi by systemReserved, 1Gi by evictionHard), and this \
               machine has 10Gi: nothing is left for pods; lower systemReserved or evictionHard",
            ],
        );
    }
}
