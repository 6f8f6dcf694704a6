//! Formatting of the tuner's numbers.

use std::fmt;

use super::{Knob, KnobKind};

impl fmt::Display for Knob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", self.kind.as_str(), self.cgroup)
    }
}

impl KnobKind {
    /// Returns the knob's name, after version 2's file.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Idle => "cpu.idle",
            Self::Weight => "cpu.weight",
            Self::CpuCap => "cpu.max",
            Self::MemoryHigh => "memory.high",
            Self::Burst => "cpu.max.burst",
            Self::DiskWeight => "io.weight",
        }
    }

    /// Formats a value of the knob with its unit.
    #[must_use]
    pub fn show(self, value: u64) -> String {
        match self {
            Self::Idle | Self::Weight | Self::DiskWeight => value.to_string(),
            Self::CpuCap => cpus(value),
            Self::MemoryHigh => bytes(value),
            Self::Burst => format!("{} ms", decimal(value / 100, 1)),
        }
    }
}

/// Formats millicores as `1.25 CPUs`.
pub(super) fn cpus(millis: u64) -> String {
    format!("{} CPUs", decimal(millis / 10, 2))
}

/// Formats permille as a percentage: `12.3 %`.
pub(super) fn percent(permille: u32) -> String {
    format!("{} %", decimal(permille.into(), 1))
}

/// Formats microseconds as milliseconds: `4.2 ms`.
pub(super) fn millis(micros: u64) -> String {
    format!("{} ms", decimal(micros / 100, 1))
}

/// Formats bytes in MiB.
pub(super) fn bytes(bytes: u64) -> String {
    format!("{} MiB", bytes >> 20)
}

/// Formats an amount in units of 1/10^places, without trailing zeros.
fn decimal(amount: u64, places: u32) -> String {
    let unit = 10_u64.pow(places);
    let (whole, rest) = (amount / unit, amount % unit);
    if rest == 0 {
        return whole.to_string();
    }
    let digits = format!("{rest:0width$}", width = places as usize);
    format!("{whole}.{}", digits.trim_end_matches('0'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_their_unit_and_no_trailing_zeros() {
        assert_eq!(cpus(1250), "1.25 CPUs");
        assert_eq!(cpus(1050), "1.05 CPUs");
        assert_eq!(cpus(2000), "2 CPUs");
        assert_eq!(percent(123), "12.3 %");
        assert_eq!(percent(50), "5 %");
        assert_eq!(millis(4210), "4.2 ms");
        assert_eq!(KnobKind::MemoryHigh.show(64 << 20), "64 MiB");
        assert_eq!(KnobKind::Burst.show(50_000), "50 ms");
        let knob = Knob { cgroup: "/kubepods/besteffort".to_owned(), kind: KnobKind::Idle };
        assert_eq!(knob.to_string(), "cpu.idle of /kubepods/besteffort");
    }
}
