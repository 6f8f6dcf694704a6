//! Grace periods of pods at the machine's shutdown: defaults and checks as in the kubelet
//! (`pkg/kubelet/apis/config/validation/validation.go`). Both forms of the setting resolve to the same type.

use std::time::Duration;

use beelet_policy::node::shutdown::{Period, Periods};

use super::error::Problem;
use super::kubelet::{KubeletWire, ShutdownPeriodWire};
use super::values::GoDuration;

const TOTAL: &str = "shutdownGracePeriod";
const CRITICAL: &str = "shutdownGracePeriodCriticalPods";
const BY_PRIORITY: &str = "shutdownGracePeriodByPodPriority";
/// Maximum period of a group, in seconds: a week.
const LONGEST: i64 = 7 * 24 * 3600;

pub(super) fn resolve(wire: &mut KubeletWire) -> Result<Periods, Problem> {
    let periods = read(wire)?;
    (wire.shutdown_grace_period, wire.shutdown_grace_period_critical_pods) = totals(&periods);
    wire.shutdown_grace_period_by_pod_priority = by_priority(&periods);
    Ok(periods)
}

fn read(wire: &KubeletWire) -> Result<Periods, Problem> {
    let total = whole(TOTAL, wire.shutdown_grace_period)?;
    let critical = whole(CRITICAL, wire.shutdown_grace_period_critical_pods)?;
    let by_priority = wire.shutdown_grace_period_by_pod_priority.as_deref().unwrap_or_default();
    if critical > total {
        let message = format!("{critical:?} is more than {TOTAL}, {total:?}, of which it is the last part");
        return Err(Problem::new(CRITICAL, message));
    }
    if by_priority.is_empty() {
        return Ok(Periods::of_totals(total, critical));
    }
    if !total.is_zero() {
        return Err(Problem::new(
            BY_PRIORITY,
            format!("cannot be set together with {TOTAL}; remove one of them"),
        ));
    }
    by_priority.iter().enumerate().map(period).collect::<Result<_, _>>().map(Periods::new)
}

fn whole(field: &str, value: Option<GoDuration>) -> Result<Duration, Problem> {
    let value = value.map_or(Duration::ZERO, |value| value.0);
    let second = Duration::from_secs(1);
    if !value.is_zero() && value < second || value > Duration::from_secs(LONGEST.unsigned_abs()) {
        return Err(Problem::new(field, format!("{value:?} is out of range: 0, or one second to one week")));
    }
    Ok(value)
}

fn period((index, wire): (usize, &ShutdownPeriodWire)) -> Result<Period, Problem> {
    let field = format!("{BY_PRIORITY}[{index}].shutdownGracePeriodSeconds");
    let seconds: u64 =
        super::words::number(&field, &mut Some(wire.shutdown_grace_period_seconds), 0, 0, LONGEST)?;
    Ok(Period { priority: wire.priority, grace: Duration::from_secs(seconds) })
}

/// Returns the periods as two totals, if they have that form.
fn totals(periods: &Periods) -> (Option<GoDuration>, Option<GoDuration>) {
    match periods.all() {
        [_, critical] if is_of_totals(periods) => {
            (Some(GoDuration(periods.total())), Some(GoDuration(critical.grace)))
        }
        [] => (Some(GoDuration(Duration::ZERO)), Some(GoDuration(Duration::ZERO))),
        _ => (None, None),
    }
}

/// Returns the periods as a list, unless they have the form of totals.
fn by_priority(periods: &Periods) -> Option<Vec<ShutdownPeriodWire>> {
    let wire = |period: &Period| ShutdownPeriodWire {
        priority: period.priority,
        shutdown_grace_period_seconds: i64::try_from(period.grace.as_secs()).unwrap_or(i64::MAX),
    };
    (!is_of_totals(periods)).then(|| periods.all().iter().map(wire).collect())
}

fn is_of_totals(periods: &Periods) -> bool {
    match periods.all() {
        [_, critical] => *periods == Periods::of_totals(periods.total(), critical.grace),
        rest => rest.is_empty(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolved(text: &str) -> Result<Periods, String> {
        let mut wire: KubeletWire = serde_json::from_value(serde_json::from_str(text).unwrap()).unwrap();
        resolve(&mut wire).map_err(|problem| format!("{}: {}", problem.field, problem.message))
    }

    #[test]
    fn periods_are_two_totals_or_a_list() {
        let list = |all: &[(i32, u64)]| {
            let period = |(priority, grace): &(i32, u64)| Period {
                priority: *priority,
                grace: Duration::from_secs(*grace),
            };
            Periods::new(all.iter().map(period).collect())
        };
        for (text, expected) in [
            ("{}", list(&[])),
            (r#"{"shutdownGracePeriod": "0s"}"#, list(&[])),
            (
                r#"{"shutdownGracePeriod": "30s", "shutdownGracePeriodCriticalPods": "10s"}"#,
                list(&[(0, 20), (2_000_000_000, 10)]),
            ),
            (
                r#"{"shutdownGracePeriodByPodPriority": [{"priority": 7, "shutdownGracePeriodSeconds": 5}]}"#,
                list(&[(7, 5)]),
            ),
        ] {
            assert_eq!(resolved(text), Ok(expected), "{text}");
        }
    }

    #[test]
    fn what_cannot_be_meant_is_refused_by_its_field() {
        for (text, part) in [
            (r#"{"shutdownGracePeriod": "10ms"}"#, "shutdownGracePeriod: 10ms is out of range"),
            (
                r#"{"shutdownGracePeriodCriticalPods": "1s"}"#,
                "shutdownGracePeriodCriticalPods: 1s is more than",
            ),
            (
                r#"{"shutdownGracePeriod": "3s", "shutdownGracePeriodByPodPriority": [{"priority": 1}]}"#,
                "shutdownGracePeriodByPodPriority: cannot be set together",
            ),
            (
                r#"{"shutdownGracePeriodByPodPriority": [{"priority": 1, "shutdownGracePeriodSeconds": -1}]}"#,
                "shutdownGracePeriodByPodPriority[0].shutdownGracePeriodSeconds: -1 is out of range",
            ),
        ] {
            let error = resolved(text).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
    }
}
