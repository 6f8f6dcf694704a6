//! The kubelet's choice: three QoS passes, each of which repeatedly takes the pod nearest to the missing
//! amounts.
//!
//! Follows `getPodsToPreempt` and `getPodsToPreemptByDistance`, down to the float arithmetic, the
//! swap-removal and which of two equal pods wins (the later one). The distances are computed by column, so
//! that the compiler vectorises them.

use crate::{
    admission::preemption::{Candidate, Needs},
    resources::qos::QosClass,
};

/// Chooses Guaranteed pods that must be evicted even if all others are, then Burstable ones, then BestEffort
/// ones; returns them in reverse.
pub(super) fn choose<'c, 'a>(candidates: &'c [Candidate<'a>], needs: &Needs<'_>) -> Vec<&'c Candidate<'a>> {
    let of =
        |class: QosClass| candidates.iter().filter(|candidate| candidate.class == class).collect::<Vec<_>>();
    let (besteffort, burstable, guaranteed) =
        (of(QosClass::BestEffort), of(QosClass::Burstable), of(QosClass::Guaranteed));
    let guaranteed = nearest(&guaranteed, missing(needs, &[&besteffort, &burstable]));
    let burstable = nearest(&burstable, missing(needs, &[&besteffort, &guaranteed]));
    let besteffort = nearest(&besteffort, missing(needs, &[&burstable, &guaranteed]));
    [besteffort, burstable, guaranteed].concat()
}

/// Returns the amounts above zero that are still missing once these are evicted, with their columns.
fn missing(needs: &Needs<'_>, gone: &[&[&Candidate<'_>]]) -> Vec<(usize, i64)> {
    let left = |&(column, _, amount): &(usize, &str, i64)| {
        let left = gone
            .iter()
            .copied()
            .flatten()
            .fold(amount, |left, victim| left.saturating_sub(victim.frees[column]));
        (left > 0).then_some((column, left))
    };
    needs.open.iter().filter_map(left).collect()
}

fn nearest<'c, 'a>(pods: &[&'c Candidate<'a>], mut missing: Vec<(usize, i64)>) -> Vec<&'c Candidate<'a>> {
    let mut field = Field::new(pods, &missing);
    let mut chosen = Vec::new();
    while !missing.is_empty() && !field.pods.is_empty() {
        let victim = field.remove(field.nearest(&missing));
        for (column, left) in &mut missing {
            *left = left.saturating_sub(victim.frees[*column]);
        }
        let met: Vec<usize> = (0..missing.len()).filter(|row| missing[*row].1 <= 0).collect();
        for row in met.into_iter().rev() {
            missing.remove(row);
            field.frees.remove(row);
        }
        chosen.push(victim);
    }
    chosen
}

/// The remaining pods, in columns: their requests, and the amount that each frees of each missing resource.
struct Field<'c, 'a> {
    pods: Vec<&'c Candidate<'a>>,
    /// Memory, then cpu: the order among equally near pods.
    sizes: Vec<(i64, i64)>,
    frees: Vec<Vec<i64>>,
}

impl<'c, 'a> Field<'c, 'a> {
    fn new(pods: &[&'c Candidate<'a>], missing: &[(usize, i64)]) -> Self {
        let frees = missing.iter().map(|(column, _)| pods.iter().map(|pod| pod.frees[*column]).collect());
        let sizes = pods.iter().map(|pod| (pod.memory, pod.cpu)).collect();
        Self { pods: pods.to_vec(), sizes, frees: frees.collect() }
    }

    /// Returns the pod with the least sum of squared missing fractions; among equals the one that requests
    /// less memory, then less cpu, then the last.
    fn nearest(&self, missing: &[(usize, i64)]) -> usize {
        let mut distances = vec![0.0_f64; self.pods.len()];
        for ((_, left), frees) in missing.iter().zip(&self.frees) {
            let whole = *left as f64;
            for (distance, frees) in distances.iter_mut().zip(frees) {
                let fraction = left.saturating_sub(*frees).max(0) as f64 / whole;
                *distance += fraction * fraction;
            }
        }
        let mut best = 0;
        for (index, distance) in distances.iter().enumerate().skip(1) {
            let smaller = || self.sizes[index] <= self.sizes[best];
            #[allow(
                clippy::float_cmp,
                reason = "the kubelet compares them with ==, and equal inputs give equal distances"
            )]
            if *distance < distances[best] || (*distance == distances[best] && smaller()) {
                best = index;
            }
        }
        best
    }

    fn remove(&mut self, index: usize) -> &'c Candidate<'a> {
        for column in &mut self.frees {
            column.swap_remove(index);
        }
        self.sizes.swap_remove(index);
        self.pods.swap_remove(index)
    }
}
