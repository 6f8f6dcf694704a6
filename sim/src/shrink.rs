//! Cuts a failing plan down to a short one that breaks the same rule (ddmin, Zeller and Hildebrandt 2002).

use crate::plan::Plan;
use crate::trial::{Trial, line};

/// Maximum number of simulations.
const TRIALS: usize = 400;

/// Cuts `plan` down, and prints the result as a timeline.
pub(crate) fn shrink(plan: &Plan, trial: &Trial) {
    let Some(rule) = trial.violations.first().map(|violation| violation.rule) else { return };
    let (short, result, trials) = minimize(plan, rule);
    let result = result.as_ref().unwrap_or(trial);
    println!(
        "{} of {} actions are left after {trials} simulations:",
        short.actions.len(),
        plan.actions.len()
    );
    let mut lines: Vec<_> = short.actions.iter().map(|(at, action)| (*at, format!("> {action}"))).collect();
    lines.extend(result.events.iter().map(|event| (event.at, line(&event.fact))));
    lines.extend(result.calls.iter().map(|(at, call)| (*at, format!("      {call}"))));
    lines.sort_by_key(|(at, _)| *at);
    let first = result.violations.iter().find(|violation| violation.rule == rule);
    for (at, line) in lines {
        if first.is_none_or(|violation| at <= violation.at) {
            println!("{:>12.3} {line}", at.as_secs_f64());
        }
    }
    first.into_iter().for_each(|violation| println!("{violation}"));
}

/// Returns the shortest plan found that breaks `rule`, its simulation, and the number of simulations.
fn minimize(plan: &Plan, rule: &str) -> (Plan, Option<Trial>, usize) {
    let (mut best, mut result, mut trials) = (plan.clone(), None, 0);
    let mut part = best.actions.len().div_ceil(2).max(1);
    loop {
        let mut start = 0;
        let mut shorter = false;
        while start < best.actions.len() && trials < TRIALS {
            let mut candidate = best.clone();
            let end = (start + part).min(candidate.actions.len());
            candidate.actions.drain(start..end);
            trials += 1;
            let trial = Trial::run(&candidate);
            if trial.violations.iter().any(|violation| violation.rule == rule) {
                (best, result, shorter) = (candidate, Some(trial), true);
            } else {
                start = end;
            }
        }
        if trials >= TRIALS || part == 1 && !shorter {
            return (best, result, trials);
        }
        part = if part == 1 { 1 } else { part.div_ceil(2) };
    }
}
