//! The provably smallest choice: as few victims as possible in the most important class, then in the next,
//! and so on.
//!
//! The counts come first, class by class from the most important: the smallest number of the class's pods
//! that frees enough together with the counts already fixed above it and *all* pods below it. With all counts
//! fixed, a second search finds the set that overfrees least (the sum over the missing resources of the
//! excess as a fraction of the missing amount). Both are branch-and-bound searches ([`super::search`]). If
//! one exceeds its budget, the answer is the best found so far, and `why` states that it is not proven.

use std::cmp::{Ordering, Reverse};

use crate::admission::preemption::{
    Candidate, Needs,
    search::{Item, Layer, Outcome, Problem, Search, TieSearch},
};

/// Maximum steps of the search for the counts of one class.
const COUNT_BUDGET: u32 = 200_000;
/// Maximum steps of the search among sets of equal counts: enough for any set of up to 14 pods (2^14 sets).
const TIE_BUDGET: u32 = 60_000;
/// Maximum number of victims for a search: the searches recurse once per victim.
const MOST_SEARCHED: usize = 1000;

/// Returns the victims, least important first, then by name; and a caveat if the choice is not proven.
pub(super) fn choose<'c, 'a>(
    candidates: &'c [Candidate<'a>],
    needs: &Needs<'_>,
) -> (Vec<&'c Candidate<'a>>, Vec<String>) {
    if needs.open.is_empty() {
        return (Vec::new(), Vec::new());
    }
    let problem = Problem::new(candidates, needs);
    let greedy = problem.greedy();
    let (victims, doubt) = match problem.smallest(&greedy) {
        None => (
            greedy,
            Some(
                "too many pods and resources to prove that no smaller set suffices: this is the greedy answer",
            ),
        ),
        Some(smallest) => match problem.least_overfreeing(&smallest) {
            (victims, true) => (victims, None),
            (victims, false) => (
                victims,
                Some(
                    "no set has fewer victims of important classes, but some set of the same size may overfree less",
                ),
            ),
        },
    };
    let mut victims: Vec<&Candidate<'_>> =
        victims.concat().into_iter().map(|item| problem.items[item].candidate).collect();
    victims.sort_by_key(|victim| (victim.priority, victim.class, victim.name, victim.index));
    (victims, doubt.map(str::to_owned).into_iter().collect())
}

/// Chosen items, one list per class, most important class first.
type Choice = Vec<Vec<usize>>;

impl<'c, 'a> Problem<'c, 'a> {
    fn new(candidates: &'c [Candidate<'a>], needs: &Needs<'_>) -> Self {
        let amounts: Vec<i64> = needs.open.iter().map(|(_, _, amount)| *amount).collect();
        let item = |candidate: &'c Candidate<'a>| {
            let frees: Vec<i64> =
                needs.open.iter().map(|(column, _, _)| candidate.frees[*column].max(0)).collect();
            let fractions = || frees.iter().zip(&amounts).map(|(frees, need)| *frees as f64 / *need as f64);
            let (cost, use_of) = (fractions().sum(), fractions().map(|fraction| fraction.min(1.0)).sum());
            Item { candidate, frees, cost, use_of }
        };
        let items: Vec<Item<'c, 'a>> = candidates.iter().map(item).collect();
        let importance = |item: usize| (items[item].candidate.priority, items[item].candidate.class);
        let mut order: Vec<usize> = (0..items.len()).collect();
        order.sort_by_key(|&item| Reverse(importance(item)));
        let classes: Vec<Vec<usize>> =
            order.chunk_by(|&a, &b| importance(a) == importance(b)).map(<[usize]>::to_vec).collect();
        let most = classes
            .iter()
            .map(|class| (0..amounts.len()).map(|need| most_freed(&items, class, need)).collect())
            .collect();
        Self { items, needs: amounts, classes, most }
    }

    /// Starts from all pods and drops each pod that is not needed, most important class first, smallest pod
    /// first within a class.
    fn greedy(&self) -> Choice {
        let mut spare: Vec<i128> = self.needs.iter().map(|need| -i128::from(*need)).collect();
        for item in &self.items {
            spare.iter_mut().zip(&item.frees).for_each(|(spare, frees)| *spare += i128::from(*frees));
        }
        let mut needed = |item: &usize| {
            let frees = &self.items[*item].frees;
            let needed = spare.iter().zip(frees).any(|(spare, frees)| *spare < i128::from(*frees));
            if !needed {
                spare.iter_mut().zip(frees).for_each(|(spare, frees)| *spare -= i128::from(*frees));
            }
            needed
        };
        let keep = |class: &Vec<usize>| {
            let mut order = class.clone();
            order.sort_by(|&a, &b| {
                self.items[a].cost.total_cmp(&self.items[b].cost).then_with(|| self.by_name(b, a))
            });
            order.into_iter().filter(&mut needed).collect()
        };
        self.classes.iter().map(keep).collect()
    }

    /// Returns a set with the lexicographically smallest counts, most important class first; `None` if the
    /// search cannot prove it.
    fn smallest(&self, greedy: &Choice) -> Option<Choice> {
        let mut counts: Vec<usize> = Vec::new();
        let mut found: Choice = Vec::new();
        for class in 0..self.classes.len() {
            let needs = self.needs_beside_all_below(class);
            let known = counts
                .iter()
                .zip(greedy)
                .all(|(count, set)| *count == set.len())
                .then(|| greedy[class].len());
            let mut count = self.least_thinkable(&counts, class, &needs)?;
            while known != Some(count) {
                counts.push(count);
                match self.cover(&counts, &needs) {
                    Outcome::Found(choice) => {
                        found = choice;
                        break;
                    }
                    Outcome::None => count += 1,
                    Outcome::OutOfBudget => return None,
                }
                counts.pop();
            }
            if known == Some(count) {
                counts.push(count);
                found = greedy[..=class].to_vec();
            }
        }
        Some(found)
    }

    /// Returns the amounts that this class and those above it must free if all pods below are evicted.
    fn needs_beside_all_below(&self, class: usize) -> Vec<i128> {
        let below = self.most.get(class + 1..).unwrap_or_default();
        let left = |(need, amount): (usize, &i64)| {
            i128::from(*amount) - below.iter().filter_map(|class| class[need].last()).sum::<i128>()
        };
        self.needs.iter().enumerate().map(left).collect()
    }

    /// Returns a lower bound for the class's count, judged by each resource alone.
    fn least_thinkable(&self, counts: &[usize], class: usize, needs: &[i128]) -> Option<usize> {
        let alone = |(need, left): (usize, &i128)| {
            let above: i128 = counts.iter().zip(&self.most).map(|(count, most)| most[need][*count]).sum();
            let most = &self.most[class][need];
            Some(most.partition_point(|most| *most < left - above)).filter(|count| *count < most.len())
        };
        needs.iter().enumerate().map(alone).try_fold(0, |least, count| Some(least.max(count?)))
    }

    /// Finds a set that meets `needs` with at most these counts in the classes from the top.
    fn cover(&self, counts: &[usize], needs: &[i128]) -> Outcome<Choice> {
        if counts.iter().sum::<usize>() > MOST_SEARCHED {
            return Outcome::OutOfBudget;
        }
        let layers = self.layers(counts, |&a, &b| self.items[b].use_of.total_cmp(&self.items[a].use_of));
        Search::new(self, &layers, COUNT_BUDGET)
            .cover(needs)
            .map(|chosen| self.by_class(&chosen, counts.len()))
    }

    /// Returns the set that overfrees least among those with the counts of `smallest` (of equal sets the
    /// first by name), and true if that is proven.
    fn least_overfreeing(&self, smallest: &Choice) -> (Choice, bool) {
        let counts: Vec<usize> = smallest.iter().map(Vec::len).collect();
        if counts.iter().sum::<usize>() > MOST_SEARCHED {
            return (smallest.clone(), false);
        }
        let layers = self.layers(&counts, |&a, &b| self.items[a].cost.total_cmp(&self.items[b].cost));
        let (chosen, proven) = TieSearch::new(self, &layers, TIE_BUDGET, &smallest.concat()).run();
        (self.by_class(&chosen, counts.len()), proven)
    }

    /// Returns the classes that victims come from, each in the order in which a search tries its pods.
    fn layers(&self, counts: &[usize], order: impl Fn(&usize, &usize) -> Ordering) -> Vec<Layer> {
        let layer = |(count, class): (&usize, &Vec<usize>)| {
            let mut class = class.clone();
            class.sort_by(|a, b| {
                let same =
                    || self.items[*a].frees.cmp(&self.items[*b].frees).then_with(|| self.by_name(*a, *b));
                order(a, b).then_with(same)
            });
            (*count > 0).then(|| Layer::new(self, class, *count))
        };
        counts.iter().zip(&self.classes).filter_map(layer).collect()
    }

    fn by_class(&self, chosen: &[usize], classes: usize) -> Choice {
        let mut marked = vec![false; self.items.len()];
        chosen.iter().for_each(|item| marked[*item] = true);
        self.classes[..classes]
            .iter()
            .map(|class| class.iter().copied().filter(|item| marked[*item]).collect())
            .collect()
    }

    fn by_name(&self, a: usize, b: usize) -> Ordering {
        let key = |item: usize| (self.items[item].candidate.name, self.items[item].candidate.index);
        key(a).cmp(&key(b))
    }
}

/// Returns the most that 0, 1, 2, … pods of a class free of one need.
fn most_freed(items: &[Item<'_, '_>], class: &[usize], need: usize) -> Vec<i128> {
    let mut amounts: Vec<i64> = class.iter().map(|item| items[*item].frees[need]).collect();
    amounts.sort_unstable_by_key(|amount| Reverse(*amount));
    let sums = amounts.into_iter().scan(0_i128, |sum, amount| {
        *sum += i128::from(amount);
        Some(*sum)
    });
    std::iter::once(0).chain(sums).collect()
}
