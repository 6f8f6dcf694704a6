//! The columns: one table with title, width, content, sort order and help of each.

use std::cmp::Ordering;

use super::row::{Numbers, Row};

/// A column by which rows can be sorted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
#[allow(missing_docs)] // COLUMNS has their help
pub(super) enum Column {
    Name,
    Ready,
    Cpu,
    Throttled,
    P50,
    P99,
    Trend,
    Memory,
    #[value(name = "memory-share")]
    MemoryShare,
    #[value(name = "cpu-pressure")]
    CpuPressure,
    #[value(name = "memory-pressure")]
    MemoryPressure,
    #[value(name = "io-pressure")]
    IoPressure,
    Retransmits,
    Restarts,
    Received,
    Sent,
    Preempted,
    Processes,
    Age,
    State,
}

/// Severity of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Heat {
    /// Absent or unknown.
    Dim,
    Normal,
    /// Worth attention.
    Warm,
    /// Critical.
    Hot,
}

/// Properties of a column.
pub(super) struct Info {
    pub(super) column: Column,
    pub(super) title: &'static str,
    /// Width in characters.
    pub(super) width: u16,
    /// Rank: narrow terminals omit the highest ranks first and always show rank 0.
    pub(super) rank: u8,
    pub(super) help: &'static str,
    pub(super) cell: fn(&Row) -> (String, Heat),
}

const fn info(
    column: Column,
    title: &'static str,
    width: u16,
    rank: u8,
    help: &'static str,
    cell: fn(&Row) -> (String, Heat),
) -> Info {
    Info { column, title, width, rank, help, cell }
}

/// Minimum width of the trend column, which grows with the terminal.
pub(super) const TREND_WIDTH: u16 = 8;

/// Columns that only BPF programs can fill.
const BY_KERNEL: [Column; 3] = [Column::P50, Column::P99, Column::Preempted];

/// All columns in display order, except the name (first) and the state (last), which take the remaining
/// width.
pub(super) const COLUMNS: &[Info] = &[
    info(Column::Ready, "RDY", 3, 0, "receives traffic; ? if only the kubelet knows", |row| {
        match row.numbers.ready {
            Some(true) => ("yes".into(), Heat::Normal),
            Some(false) => ("NO".into(), Heat::Hot),
            None => ("?".into(), Heat::Dim),
        }
    }),
    info(Column::Cpu, "CPU%", 6, 0, "of one CPU", |row| {
        known(row.numbers.cpu, |cpu| (format!("{:.1}", cpu * 100.0), heat(cpu, 0.0005, f64::MAX, f64::MAX)))
    }),
    info(Column::Throttled, "THR%", 4, 2, "share of CPU quota periods that were throttled", |row| {
        known(row.numbers.throttled, |share| percent(share, 0.05, 0.25))
    }),
    info(Column::P50, "RQ50", 6, 6, "median wait for a CPU", |row| {
        known(row.numbers.p50, |wait| (duration(wait), heat(wait, 1.0, 1e6, 1e7)))
    }),
    info(Column::P99, "RQ99", 6, 1, "99th percentile of waits for a CPU", |row| {
        known(row.numbers.p99, |wait| (duration(wait), heat(wait, 1.0, 1e7, 5e7)))
    }),
    info(
        Column::Trend,
        "TREND",
        TREND_WIDTH,
        2,
        "RQ99 of the last seconds, or CPU~ without BPF programs",
        |row| (sparkline(&row.trend, usize::from(TREND_WIDTH)), Heat::Normal),
    ),
    info(Column::Memory, "MEM", 6, 0, "memory without inactive file pages", |row| {
        known(row.numbers.memory, |memory| (bytes(memory as f64), Heat::Normal))
    }),
    info(Column::MemoryShare, "LIM%", 4, 1, "of the memory limit", |row| {
        known(row.numbers.memory_share(), |share| percent(share, 0.8, 0.95))
    }),
    info(Column::CpuPressure, "CPU~", 5, 1, "share of time in which a task waited for a CPU (PSI)", |row| {
        stalled(&row.numbers, 0)
    }),
    info(Column::MemoryPressure, "MEM~", 5, 1, "share of time in which a task waited for memory", |row| {
        stalled(&row.numbers, 1)
    }),
    info(Column::IoPressure, "IO~", 5, 3, "share of time in which a task waited for I/O", |row| {
        stalled(&row.numbers, 2)
    }),
    info(Column::Retransmits, "RETR", 5, 5, "TCP segments retransmitted per second", |row| {
        known(row.numbers.retransmits, |rate| (rate_of(rate), heat(rate, 0.005, 1.0, 50.0)))
    }),
    info(Column::Restarts, "RST", 3, 4, "restarts", |row| {
        let restarts = row.numbers.restarts;
        (restarts.to_string(), if restarts == 0 { Heat::Dim } else { Heat::Warm })
    }),
    info(Column::Received, "RX/s", 6, 7, "bytes received per second", |row| {
        known(row.numbers.rx, |rate| (bytes(rate), heat(rate, 1.0, f64::MAX, f64::MAX)))
    }),
    info(Column::Sent, "TX/s", 6, 7, "bytes sent per second", |row| {
        known(row.numbers.tx, |rate| (bytes(rate), heat(rate, 1.0, f64::MAX, f64::MAX)))
    }),
    info(Column::Preempted, "PRE/s", 6, 8, "preemptions per second by other pods or the system", |row| {
        known(row.numbers.preempted, |rate| (rate_of(rate), heat(rate, 0.05, 1000.0, f64::MAX)))
    }),
    info(Column::Processes, "PIDS", 4, 9, "processes and threads", |row| {
        known(row.numbers.pids, |pids| (pids.to_string(), Heat::Normal))
    }),
    info(Column::Age, "AGE", 5, 9, "time since start", |row| {
        known(row.numbers.age_seconds, |seconds| (age(seconds), Heat::Normal))
    }),
];

impl Column {
    /// Returns the title of the column.
    pub(super) fn title(self) -> &'static str {
        match self {
            Self::Name => "POD / CONTAINER",
            Self::State => "STATE",
            other => COLUMNS.iter().find(|info| info.column == other).map_or("", |info| info.title),
        }
    }

    /// Orders rows largest first, names and states alphabetically, unknown values last.
    pub(super) fn compare(self, a: &Row, b: &Row) -> Ordering {
        match self {
            Self::Name => a.name.cmp(&b.name),
            Self::State => a.state.cmp(&b.state),
            // Pods that are not ready come first.
            Self::Ready => ready_order(&a.numbers).cmp(&ready_order(&b.numbers)),
            _ => self.number(&b.numbers).total_cmp(&self.number(&a.numbers)),
        }
    }

    fn number(self, numbers: &Numbers) -> f64 {
        let whole = |value: Option<u64>| value.map(|value| value as f64);
        let value = match self {
            Self::Name | Self::State | Self::Ready => None,
            Self::Cpu => numbers.cpu,
            Self::Throttled => numbers.throttled,
            Self::P50 => numbers.p50,
            Self::P99 | Self::Trend => numbers.p99,
            Self::Memory => whole(numbers.memory),
            Self::MemoryShare => numbers.memory_share(),
            Self::CpuPressure => numbers.stalled[0].map(|(some, _)| some),
            Self::MemoryPressure => numbers.stalled[1].map(|(some, _)| some),
            Self::IoPressure => numbers.stalled[2].map(|(some, _)| some),
            Self::Retransmits => numbers.retransmits,
            Self::Restarts => Some(f64::from(numbers.restarts)),
            Self::Received => numbers.rx,
            Self::Sent => numbers.tx,
            Self::Preempted => numbers.preempted,
            Self::Processes => whole(numbers.pids),
            Self::Age => numbers.age_seconds.map(|seconds| seconds as f64),
        };
        value.unwrap_or(-1.0)
    }
}

fn ready_order(numbers: &Numbers) -> u8 {
    match numbers.ready {
        Some(false) => 0,
        None => 1,
        Some(true) => 2,
    }
}

/// Returns the columns that fit next to a name of `name` characters, separated by blanks. The state takes the
/// remaining width. Columns of BPF programs are omitted without them.
pub(super) fn fitting(width: u16, name: u16, by_kernel: bool) -> Vec<&'static Info> {
    let taken = |columns: &[&Info]| columns.iter().map(|info| info.width + 1).sum::<u16>();
    let there = |info: &&Info| by_kernel || !BY_KERNEL.contains(&info.column);
    let mut columns: Vec<&Info> = COLUMNS.iter().filter(there).collect();
    while name.saturating_add(taken(&columns)) > width {
        let Some(least) = columns.iter().map(|info| info.rank).max().filter(|rank| *rank > 0) else { break };
        // Removes the last column of that rank, one at a time, so that no width stays unused.
        let Some(at) = columns.iter().rposition(|info| info.rank == least) else { break };
        columns.remove(at);
    }
    columns
}

fn known<T>(value: Option<T>, cell: impl FnOnce(T) -> (String, Heat)) -> (String, Heat) {
    value.map_or_else(|| ("-".to_owned(), Heat::Dim), cell)
}

fn heat(value: f64, something: f64, warm: f64, hot: f64) -> Heat {
    match value {
        _ if value < something => Heat::Dim,
        _ if value >= hot => Heat::Hot,
        _ if value >= warm => Heat::Warm,
        _ => Heat::Normal,
    }
}

fn percent(share: f64, warm: f64, hot: f64) -> (String, Heat) {
    (format!("{:.0}", share * 100.0), heat(share, 0.005, warm, hot))
}

fn stalled(numbers: &Numbers, kind: usize) -> (String, Heat) {
    known(numbers.stalled[kind], |(some, _)| {
        let text =
            if some >= 0.0995 { format!("{:.0}%", some * 100.0) } else { format!("{:.1}%", some * 100.0) };
        (text, heat(some, 0.0005, 0.1, 0.4))
    })
}

/// Returns a few digits and a unit: `850ns`, `12µs`, `3.4ms`, `1.2s`.
pub(super) fn duration(nanoseconds: f64) -> String {
    scaled(nanoseconds, 1000.0, &["ns", "µs", "ms", "s"])
}

/// Returns a size in powers of 1024: `12B`, `3.4K`, `120M`, `1.5G`.
pub(super) fn bytes(bytes: f64) -> String {
    scaled(bytes, 1024.0, &["B", "K", "M", "G", "T"])
}

fn scaled(mut value: f64, step: f64, units: &[&str]) -> String {
    let mut unit = 0;
    // 999.5 would round to 1000, which belongs to the next unit.
    while value >= step - 0.5 && unit + 1 < units.len() {
        value /= step;
        unit += 1;
    }
    let digits = usize::from(value < 9.95 && unit > 0);
    format!("{value:.digits$}{}", units[unit])
}

fn rate_of(rate: f64) -> String {
    match rate {
        _ if rate >= 9999.5 => format!("{:.0}k", rate / 1000.0),
        _ if rate >= 9.95 || rate == 0.0 => format!("{rate:.0}"),
        _ => format!("{rate:.1}"),
    }
}

/// Returns an age as kubectl prints it, in at most five characters.
pub(super) fn age(seconds: i64) -> String {
    match seconds {
        0..120 => format!("{seconds}s"),
        120..7200 => format!("{}m", seconds / 60),
        7200..172_800 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    }
}

/// Returns a bar per value for the last `width` values. The height is logarithmic, two steps per factor of
/// ten, to distinguish microseconds from seconds at a glance.
pub(super) fn sparkline(values: &[u64], width: usize) -> String {
    const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let bar = |value: &u64| match value {
        0 => ' ',
        // 3 µs and below is the lowest bar, 30 ms and above the highest.
        value => {
            let step = ((*value as f64).log10() - 3.5) * 2.0;
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // clamped to the bars' indexes
            let at = step.clamp(0.0, 7.0).round() as usize;
            BARS[at]
        }
    };
    let shown: String = values.iter().rev().take(width).rev().map(bar).collect();
    format!("{shown:>width$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_take_few_characters_and_have_their_unit() {
        for (nanoseconds, expected) in [
            (0.0, "0ns"),
            (850.0, "850ns"),
            (999.6, "1.0µs"),
            (12_345.0, "12µs"),
            (3_440_000.0, "3.4ms"),
            (1.2e9, "1.2s"),
            (5e12, "5000s"),
        ] {
            assert_eq!(duration(nanoseconds), expected);
        }
        for (size, expected) in
            [(0.0, "0B"), (1023.0, "1023B"), (1024.0, "1.0K"), (126_000_000.0, "120M"), (1.5e13, "14T")]
        {
            assert_eq!(bytes(size), expected, "{size}");
        }
        for (rate, expected) in [(0.0, "0"), (0.04, "0.0"), (1.25, "1.2"), (10.4, "10"), (12_345.0, "12k")] {
            assert_eq!(rate_of(rate), expected);
        }
        assert_eq!([59, 119, 120, 7199, 7200, 200_000].map(age), ["59s", "119s", "2m", "119m", "2h", "2d"]);
    }

    #[test]
    fn a_bar_is_as_high_as_its_logarithm() {
        assert_eq!(
            sparkline(&[0, 3_000, 30_000, 300_000, 3_000_000, 30_000_000, 9_000_000_000], 8),
            "  ▁▃▅▇██"
        );
        assert_eq!(sparkline(&[1; 20], 4), "▁▁▁▁");
        assert_eq!(sparkline(&[], 3), "   ");
    }

    #[test]
    fn what_matters_most_is_shown_on_narrow_terminals_too() {
        let titles = |width| fitting(width, 20, true).iter().map(|info| info.title).collect::<Vec<_>>();
        assert_eq!(titles(40), ["RDY", "CPU%", "MEM"]);
        let eighty = titles(80);
        for title in ["RDY", "CPU%", "THR%", "RQ99", "TREND", "MEM", "LIM%", "CPU~", "MEM~"] {
            assert!(eighty.contains(&title), "{title} is not in {eighty:?}");
        }
        assert_eq!(titles(200).len(), COLUMNS.len());
        assert_eq!(titles(0), ["RDY", "CPU%", "MEM"]);
        assert!(fitting(200, 20, false).iter().all(|info| !["RQ50", "RQ99", "PRE/s"].contains(&info.title)));
    }
}
