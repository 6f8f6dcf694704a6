//! The two branch-and-bound searches behind the minimal choice.
//!
//! A search walks the layers (classes) from the most important down and takes pods in the layer's order. The
//! search abandons a branch as soon as the most (or the cheapest) that the remaining pods can add does not
//! lead to an answer. Pods that free equal amounts are adjacent: passing over one passes over the rest of
//! them, so the search tries only the first by name.

use std::cmp::Ordering;

use crate::admission::preemption::Candidate;

/// Tolerance for errors of float sums, relative to the sum.
const SLACK: f64 = 1e-9;
/// Maximum size of a layer's table of bounds with one entry per place; a larger layer has one bound as a
/// whole.
const LARGEST_TABLE: usize = 2_000_000;

/// A pod, reduced to the inputs of the searches.
pub(super) struct Item<'c, 'a> {
    pub(super) candidate: &'c Candidate<'a>,
    /// Amount that the pod frees of each need.
    pub(super) frees: Vec<i64>,
    /// The sum of `frees / need`.
    pub(super) cost: f64,
    /// The sum of `frees / need`, each at most 1: the most that the pod can contribute.
    pub(super) use_of: f64,
}

/// Pods and needs, in classes.
pub(super) struct Problem<'c, 'a> {
    pub(super) items: Vec<Item<'c, 'a>>,
    pub(super) needs: Vec<i64>,
    /// Most important first: (priority, QoS).
    pub(super) classes: Vec<Vec<usize>>,
    /// For each class and need, the most that 0, 1, 2, … of its pods free.
    pub(super) most: Vec<Vec<Vec<i128>>>,
}

/// The result of a search.
pub(super) enum Outcome<T> {
    Found(T),
    /// Proof that no set meets the needs.
    None,
    OutOfBudget,
}

impl<T> Outcome<T> {
    pub(super) fn map<U>(self, how: impl FnOnce(T) -> U) -> Outcome<U> {
        match self {
            Self::Found(found) => Outcome::Found(how(found)),
            Self::None => Outcome::None,
            Self::OutOfBudget => Outcome::OutOfBudget,
        }
    }
}

/// The pods of one class in the order of the search, and the maximum number to choose.
pub(super) struct Layer {
    order: Vec<usize>,
    count: usize,
    /// True for a pod that frees the same amounts as the pod before it.
    same: Vec<bool>,
    /// `best[place][taken][need]`: the most of a need that `taken` of the pods from `place` on free (equal
    /// for all places if `whole`).
    best: Vec<i128>,
    whole: bool,
    /// Sums of `use_of` and of `cost` over the first pods of the order.
    uses: Vec<f64>,
    costs: Vec<f64>,
}

impl Layer {
    pub(super) fn new(problem: &Problem<'_, '_>, order: Vec<usize>, count: usize) -> Self {
        let count = count.min(order.len());
        let items = &problem.items;
        let same = (0..order.len())
            .map(|at| at > 0 && items[order[at]].frees == items[order[at - 1]].frees)
            .collect();
        let sums = |of: &dyn Fn(usize) -> f64| {
            let sums = order.iter().scan(0.0, |sum, item| {
                *sum += of(*item);
                Some(*sum)
            });
            std::iter::once(0.0).chain(sums).collect::<Vec<f64>>()
        };
        let (uses, costs) = (sums(&|item| items[item].use_of), sums(&|item| items[item].cost));
        let needs = problem.needs.len();
        let whole = (order.len() + 1).saturating_mul(count + 1).saturating_mul(needs) > LARGEST_TABLE;
        let mut layer = Self { order, count, same, best: Vec::new(), whole, uses, costs };
        layer.best = layer.bounds(problem);
        layer
    }

    /// Sums the largest `count` amounts of each need, from the last place to the first.
    fn bounds(&self, problem: &Problem<'_, '_>) -> Vec<i128> {
        let (needs, rows) = (problem.needs.len(), self.count + 1);
        let places = if self.whole { 1 } else { self.order.len() + 1 };
        let mut best = vec![0_i128; places * rows * needs];
        for need in 0..needs {
            let mut largest: Vec<i64> = Vec::with_capacity(rows);
            for place in (0..self.order.len()).rev() {
                let amount = problem.items[self.order[place]].frees[need];
                let at = largest.partition_point(|other| *other >= amount);
                if at < self.count {
                    largest.truncate(self.count - 1);
                    largest.insert(at.min(largest.len()), amount);
                }
                if self.whole && place > 0 {
                    continue;
                }
                let mut sum = 0_i128;
                for taken in 1..rows {
                    sum += largest.get(taken - 1).copied().map_or(0, i128::from);
                    best[(place * rows + taken) * needs + need] = sum;
                }
            }
        }
        best
    }

    /// Returns the most that `taken` of the pods from `place` on free, one number per need.
    fn best(&self, place: usize, taken: usize, needs: usize) -> &[i128] {
        let place = if self.whole { 0 } else { place };
        let start = (place * (self.count + 1) + taken) * needs;
        &self.best[start..start + needs]
    }

    /// Returns the sum over the next `taken` pods of the order.
    fn next(sums: &[f64], place: usize, taken: usize) -> f64 {
        sums[(place + taken).min(sums.len() - 1)] - sums[place]
    }
}

/// A position of the search: layer, place in the layer, pods still to choose from the layer.
#[derive(Clone, Copy)]
struct At {
    layer: usize,
    place: usize,
    take: usize,
}

/// The walk and its bounds, common to both searches.
pub(super) struct Search<'p, 'c, 'a> {
    problem: &'p Problem<'c, 'a>,
    layers: &'p [Layer],
    /// The most that all layers from each layer on free; likewise `uses_below` for `uses`.
    below: Vec<Vec<i128>>,
    uses_below: Vec<f64>,
    left: Vec<i128>,
    chosen: Vec<usize>,
    budget: u32,
}

impl<'p, 'c, 'a> Search<'p, 'c, 'a> {
    pub(super) fn new(problem: &'p Problem<'c, 'a>, layers: &'p [Layer], budget: u32) -> Self {
        let needs = problem.needs.len();
        let mut below = vec![vec![0_i128; needs]; layers.len() + 1];
        let mut uses_below = vec![0.0; layers.len() + 1];
        for (at, layer) in layers.iter().enumerate().rev() {
            let best = layer.best(0, layer.count, needs);
            below[at] = below[at + 1].iter().zip(best).map(|(below, best)| below + best).collect();
            uses_below[at] = uses_below[at + 1] + Layer::next(&layer.uses, 0, layer.count);
        }
        Self { problem, layers, below, uses_below, left: Vec::new(), chosen: Vec::new(), budget }
    }

    /// Finds any set that meets the needs with at most the layers' counts. The layers must be ordered by
    /// falling `use_of`.
    pub(super) fn cover(mut self, needs: &[i128]) -> Outcome<Vec<usize>> {
        self.left = needs.to_vec();
        match self.cover_from(self.start(0)) {
            Some(true) => Outcome::Found(self.chosen),
            Some(false) => Outcome::None,
            None => Outcome::OutOfBudget,
        }
    }

    fn cover_from(&mut self, at: At) -> Option<bool> {
        if self.met() {
            return Some(true);
        }
        self.budget = self.budget.checked_sub(1)?;
        let Some(layer) = self.layers.get(at.layer) else { return Some(false) };
        if at.take == 0 || at.place == layer.order.len() {
            return self.cover_from(self.start(at.layer + 1));
        }
        for place in at.place..layer.order.len() {
            if place > at.place && layer.same[place] {
                continue;
            }
            if !self.reachable(At { place, ..at }) || !self.useful(At { place, ..at }) {
                return Some(false);
            }
            let item = layer.order[place];
            self.choose(item);
            if self.cover_from(At { place: place + 1, take: at.take - 1, ..at })? {
                return Some(true);
            }
            self.drop_choice(item);
        }
        Some(false)
    }

    fn start(&self, layer: usize) -> At {
        At { layer, place: 0, take: self.layers.get(layer).map_or(0, |layer| layer.count) }
    }

    fn met(&self) -> bool {
        self.left.iter().all(|left| *left <= 0)
    }

    /// Returns true if the remaining pods could meet each need by itself.
    fn reachable(&self, at: At) -> bool {
        let best = self.layers[at.layer].best(at.place, at.take, self.left.len());
        let below = &self.below[at.layer + 1];
        self.left.iter().zip(best).zip(below).all(|((left, best), below)| *left <= best + below)
    }

    /// Returns true if the remaining pods could meet all needs together, each as a fraction of its initial
    /// amount.
    fn useful(&self, at: At) -> bool {
        let fraction = |(left, need): (&i128, &i64)| (*left).max(0) as f64 / *need as f64;
        let missing: f64 = self.left.iter().zip(&self.problem.needs).map(fraction).sum();
        let most =
            Layer::next(&self.layers[at.layer].uses, at.place, at.take) + self.uses_below[at.layer + 1];
        missing <= most + SLACK * (1.0 + most)
    }

    fn choose(&mut self, item: usize) {
        let frees = &self.problem.items[item].frees;
        self.left.iter_mut().zip(frees).for_each(|(left, frees)| *left -= i128::from(*frees));
        self.chosen.push(item);
    }

    fn drop_choice(&mut self, item: usize) {
        let frees = &self.problem.items[item].frees;
        self.left.iter_mut().zip(frees).for_each(|(left, frees)| *left += i128::from(*frees));
        self.chosen.pop();
    }
}

/// The search for the set that overfrees least, among the sets with exactly the layers' counts.
pub(super) struct TieSearch<'p, 'c, 'a> {
    walk: Search<'p, 'c, 'a>,
    costs_below: Vec<f64>,
    best: Vec<usize>,
    best_left: Vec<i128>,
    best_cost: f64,
}

impl<'p, 'c, 'a> TieSearch<'p, 'c, 'a> {
    /// Starts from `known`, a set that meets the needs with the layers' counts. The layers must be ordered by
    /// rising `cost`.
    pub(super) fn new(
        problem: &'p Problem<'c, 'a>,
        layers: &'p [Layer],
        budget: u32,
        known: &[usize],
    ) -> Self {
        let mut costs_below = vec![0.0; layers.len() + 1];
        for (at, layer) in layers.iter().enumerate().rev() {
            costs_below[at] = costs_below[at + 1] + Layer::next(&layer.costs, 0, layer.count);
        }
        let mut walk = Search::new(problem, layers, budget);
        walk.left = problem.needs.iter().map(|need| i128::from(*need)).collect();
        let mut search =
            Self { walk, costs_below, best: Vec::new(), best_left: Vec::new(), best_cost: f64::INFINITY };
        known.iter().for_each(|item| search.walk.choose(*item));
        search.keep();
        known.iter().for_each(|item| search.walk.drop_choice(*item));
        search
    }

    /// Returns the best set found, and true if the search proved it to be the best.
    pub(super) fn run(mut self) -> (Vec<usize>, bool) {
        let proven = self.search(self.walk.start(0), 0.0).is_some();
        (self.best, proven)
    }

    /// Returns `None` if out of budget.
    fn search(&mut self, at: At, cost: f64) -> Option<()> {
        self.walk.budget = self.walk.budget.checked_sub(1)?;
        let layers = self.walk.layers;
        let Some(layer) = layers.get(at.layer) else {
            if self.walk.met() && self.is_better() {
                self.keep();
            }
            return Some(());
        };
        if at.take == 0 {
            return self.search(self.walk.start(at.layer + 1), cost);
        }
        for place in at.place..=layer.order.len() - at.take {
            if place > at.place && layer.same[place] {
                continue;
            }
            let least = cost + Layer::next(&layer.costs, place, at.take) + self.costs_below[at.layer + 1];
            if least > self.best_cost + SLACK * (1.0 + self.best_cost)
                || !self.walk.reachable(At { place, ..at })
            {
                return Some(());
            }
            let item = layer.order[place];
            self.walk.choose(item);
            self.search(
                At { place: place + 1, take: at.take - 1, ..at },
                cost + self.walk.problem.items[item].cost,
            )?;
            self.walk.drop_choice(item);
        }
        Some(())
    }

    fn keep(&mut self) {
        self.best = self.walk.chosen.clone();
        self.best_left = self.walk.left.clone();
        self.best_cost = self.best.iter().map(|item| self.walk.problem.items[*item].cost).sum();
    }

    /// Compares overfreeing exactly, then names: of two equal sets the first by name wins.
    fn is_better(&self) -> bool {
        let over = compare_overfreeing(&self.walk.left, &self.best_left, &self.walk.problem.needs);
        over.then_with(|| self.names(&self.walk.chosen).cmp(&self.names(&self.best))) == Ordering::Less
    }

    fn names(&self, set: &[usize]) -> Vec<((&str, &str), usize)> {
        let mut names: Vec<_> = set
            .iter()
            .map(|item| {
                let candidate = self.walk.problem.items[*item].candidate;
                (candidate.name, candidate.index)
            })
            .collect();
        names.sort_unstable();
        names
    }
}

/// Compares sums of `-left / need`: exactly, unless the fractions exceed 127 bits.
fn compare_overfreeing(all_ours: &[i128], all_theirs: &[i128], needs: &[i64]) -> Ordering {
    let (mut numerator, mut denominator) = (0_i128, 1_i128);
    for ((ours, theirs), need) in all_ours.iter().zip(all_theirs).zip(needs) {
        let (difference, need) = reduced(theirs - ours, i128::from(*need));
        let sum = numerator.checked_mul(need).zip(difference.checked_mul(denominator));
        let sum = sum.and_then(|(left, right)| left.checked_add(right)).zip(denominator.checked_mul(need));
        match sum {
            Some((sum, product)) => (numerator, denominator) = reduced(sum, product),
            None => return over_freeing(all_ours, needs).total_cmp(&over_freeing(all_theirs, needs)),
        }
    }
    numerator.cmp(&0)
}

fn over_freeing(left: &[i128], needs: &[i64]) -> f64 {
    left.iter().zip(needs).map(|(left, need)| -*left as f64 / *need as f64).sum()
}

/// Returns the fraction in lowest terms; `denominator` is above zero.
fn reduced(numerator: i128, denominator: i128) -> (i128, i128) {
    let (mut a, mut b) = (numerator.unsigned_abs(), denominator.unsigned_abs());
    while b > 0 {
        (a, b) = (b, a % b);
    }
    let divisor = i128::try_from(a.max(1)).unwrap_or(1);
    (numerator / divisor, denominator / divisor)
}
