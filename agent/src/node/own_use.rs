//! The agent's own resource use under the usual names of Prometheus clients (`process_*`), read at each
//! scrape.

use std::{
    fmt,
    fs::{read_dir, read_to_string},
};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
};
use rustix::{
    param::{clock_ticks_per_second, page_size},
    process::{Resource, getrlimit},
};

/// Collector that reads /proc.
#[derive(Debug)]
pub(super) struct OwnUse;

/// The exported fields of `/proc/self/stat`.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Stat {
    cpu_ticks: f64,
    started_ticks: f64,
    virtual_bytes: f64,
    resident_pages: f64,
}

impl Stat {
    /// Parses the file; field numbers are those of proc_pid_stat(5).
    fn parse(text: &str) -> Option<Self> {
        // The program's name may contain any characters, including blanks and brackets.
        let (_, rest) = text.rsplit_once(')')?;
        let fields: Vec<&str> = rest.split_whitespace().collect();
        let field = |number: usize| fields.get(number - 3)?.parse::<f64>().ok();
        Some(Self {
            cpu_ticks: field(14)? + field(15)?,
            started_ticks: field(22)?,
            virtual_bytes: field(23)?,
            resident_pages: field(24)?,
        })
    }
}

/// Returns the time of the machine's boot, in seconds since the epoch.
fn boot_time(stat: &str) -> Option<f64> {
    stat.lines().find_map(|line| line.strip_prefix("btime ")?.trim().parse().ok())
}

impl Collector for OwnUse {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut gauge = |name: &str, help: &str, value: Option<f64>| {
            let Some(value) = value else { return Ok(()) };
            ConstGauge::new(value).encode(encoder.encode_descriptor(name, help, None, MetricType::Gauge)?)
        };
        let ticks = clock_ticks_per_second() as f64;
        let stat = read_to_string("/proc/self/stat").ok().and_then(|text| Stat::parse(&text));
        let boot = read_to_string("/proc/stat").ok().and_then(|text| boot_time(&text));
        let files = read_dir("/proc/self/fd").ok().map(|files| files.count() as f64);
        let most = getrlimit(Resource::Nofile).current.map(|most| most as f64);
        let started = boot.zip(stat).map(|(boot, stat)| boot + stat.started_ticks / ticks);
        let memory = stat.map(|stat| stat.resident_pages * page_size() as f64);
        gauge("process_max_fds", "Maximum number of open files of the agent", most)?;
        gauge("process_open_fds", "Number of open files of the agent", files)?;
        gauge("process_resident_memory_bytes", "The agent's memory, in bytes", memory)?;
        gauge("process_start_time_seconds", "Start time of the agent, in seconds since the epoch", started)?;
        let virtual_bytes = stat.map(|stat| stat.virtual_bytes);
        gauge("process_virtual_memory_bytes", "The agent's address space, in bytes", virtual_bytes)?;
        let Some(stat) = stat else { return Ok(()) };
        let help = "CPU time used by the agent, in seconds";
        let counter = encoder.encode_descriptor("process_cpu_seconds", help, None, MetricType::Counter)?;
        ConstCounter::new(stat.cpu_ticks / ticks).encode(counter)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_counted_behind_the_name_whatever_it_is() {
        let text = "1 (a) b (c) S 2 3 4 5 6 7 8 9 10 11 140 15 16 17 18 19 20 21 2200 2300 24 25";
        let stat =
            Stat { cpu_ticks: 155.0, started_ticks: 2200.0, virtual_bytes: 2300.0, resident_pages: 24.0 };
        assert_eq!(Stat::parse(text), Some(stat));
        assert_eq!(Stat::parse("1 (a) S 2"), None);
        assert_eq!(boot_time("cpu 1\nbtime 1700000000\n"), Some(1_700_000_000.0));
    }
}
