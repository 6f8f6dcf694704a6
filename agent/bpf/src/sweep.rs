//! Keeps `ADDRESSES` from filling up with addresses without listeners.
//!
//! The programs never delete an address whose count fell to zero: another CPU may have looked up the entry
//! already and be about to add to it, and that listener's count would be deleted with the entry (or added to
//! the next owner of the entry's memory). A map has no lock that tracing programs may take, so user space
//! deletes *optimistically and verifies*:
//!
//! 1. only when the map is half full, delete only entries that have been zero for a minute;
//! 2. wait until every running program has ended: none of them holds a stale entry any more;
//! 3. compare all counts with the listeners' records, and correct each count that differs twice, before and
//!    after another wait. The correction is not atomic either, so repeat this step until all counts agree.
//!
//! A listener that hits the window (nanoseconds, at an address unused for a minute) is thus counted wrongly
//! for milliseconds. The same comparison counts listeners that came while the map was full.

use super::listeners::{Listeners, absent_is_none};
use super::{KernelError, sys};
use aya::maps::{HashMap, Map, MapData};
use beelet_ebpf_abi::{Address, AddressCount, ListenerRecord, MAX_ADDRESSES, SocketCookie};
use std::collections::BTreeMap;

/// Minimum time for which a count must have been zero.
const UNUSED_NS: u64 = 60_000_000_000;
/// Maximum rounds of corrections; one is enough unless an address changes thousands of times per second.
const MAX_ROUNDS: u32 = 8;
const BPF_EXIST: u64 = 2;

/// Removes unused addresses.
#[derive(Debug)]
pub(super) struct Sweeper {
    listeners: Listeners,
    records: HashMap<MapData, SocketCookie, ListenerRecord>,
    addresses: HashMap<MapData, Address, AddressCount>,
    /// Number of entries above which a sweep begins.
    limit: usize,
}

impl Sweeper {
    pub(super) fn new(listeners: MapData, addresses: MapData) -> Result<Sweeper, KernelError> {
        let failed = |error: &dyn std::fmt::Display| KernelError::map("ADDRESSES", error);
        let (records, counts) =
            (super::loader::duplicate(&listeners)?, super::loader::duplicate(&addresses)?);
        Ok(Sweeper {
            listeners: Listeners::new(listeners, addresses).map_err(|error| failed(&error))?,
            records: Map::from_map_data(records)
                .and_then(HashMap::try_from)
                .map_err(|error| failed(&error))?,
            addresses: Map::from_map_data(counts)
                .and_then(HashMap::try_from)
                .map_err(|error| failed(&error))?,
            limit: MAX_ADDRESSES / 2,
        })
    }

    /// Removes long unused addresses if the map is half full; `force` if the programs found it full. Returns
    /// the number of entries removed.
    pub(super) fn sweep(&mut self, now_ns: u64, force: bool) -> Result<usize, KernelError> {
        let counts = self.counts()?;
        if counts.len() <= self.limit && !force {
            return Ok(0);
        }
        let mut removed = 0;
        for address in unused(&counts, now_ns) {
            let again = absent_is_none(self.addresses.get(&address, 0), "ADDRESSES")?;
            if again.is_some_and(|count| count.listeners == 0) && self.addresses.remove(&address).is_ok() {
                removed += 1;
            }
        }
        if removed > 0 || force {
            self.count_the_uncounted()?;
            self.verify()?;
        }
        Ok(removed)
    }

    fn counts(&self) -> Result<BTreeMap<Address, AddressCount>, KernelError> {
        let mut counts = BTreeMap::new();
        for entry in &self.addresses {
            let (address, count) = entry.map_err(|error| KernelError::map("ADDRESSES", &error))?;
            counts.insert(address, count);
        }
        Ok(counts)
    }

    /// Marks listeners that found `ADDRESSES` full as counted; [`Sweeper::verify`] then counts them.
    fn count_the_uncounted(&mut self) -> Result<(), KernelError> {
        for (cookie, record) in self.listeners.records()? {
            if record.counted == 0 && record.address.port != 0 {
                // The listener may have closed by now; then its key is missing, and the insertion fails.
                let _ = self.records.insert(
                    SocketCookie { cookie },
                    ListenerRecord { counted: 1, ..record },
                    BPF_EXIST,
                );
            }
        }
        Ok(())
    }

    /// Compares counts with records until they agree.
    fn verify(&mut self) -> Result<(), KernelError> {
        let waited = |result: std::io::Result<()>| {
            result.map_err(|error| {
                KernelError::new(format!("could not wait for running BPF programs: {error}"))
            })
        };
        for _ in 0..MAX_ROUNDS {
            waited(sys::wait_for_running_programs())?;
            let first = differences(&self.listeners.records()?, &self.counts()?);
            if first.is_empty() {
                return Ok(());
            }
            waited(sys::wait_for_running_programs())?;
            let counts = self.counts()?;
            let second = differences(&self.listeners.records()?, &counts);
            for (address, difference) in second {
                if first.get(&address) == Some(&difference) {
                    self.correct(address, counts.get(&address), difference)?;
                }
            }
        }
        Err(KernelError::new(
            "the counts of the map ADDRESSES keep changing; sock_diag confirms verdicts once per period",
        ))
    }

    fn correct(
        &mut self,
        address: Address,
        count: Option<&AddressCount>,
        difference: i64,
    ) -> Result<(), KernelError> {
        let none = AddressCount { listeners: 0, last_cookie: 0, changed_ns: 0 };
        let mut corrected = count.copied().unwrap_or(none);
        corrected.listeners = corrected.listeners.saturating_add_signed(difference);
        // Debug level, since any process can cause thousands of these lines.
        tracing::debug!(
            "corrected the count of a swept address to {} listeners, port {}",
            corrected.listeners,
            address.port
        );
        self.addresses.insert(address, corrected, 0).map_err(|error| KernelError::map("ADDRESSES", &error))
    }
}

/// Returns the addresses without a listener for [`UNUSED_NS`].
fn unused(counts: &BTreeMap<Address, AddressCount>, now_ns: u64) -> Vec<Address> {
    counts
        .iter()
        .filter(|(_, count)| count.listeners == 0 && now_ns.saturating_sub(count.changed_ns) >= UNUSED_NS)
        .map(|(address, _)| *address)
        .collect()
}

/// Returns the difference between the records and each count: positive if the count is too low, negative if
/// too high.
fn differences(
    records: &[(u64, ListenerRecord)],
    counts: &BTreeMap<Address, AddressCount>,
) -> BTreeMap<Address, i64> {
    let unique: BTreeMap<u64, &ListenerRecord> =
        records.iter().map(|(cookie, record)| (*cookie, record)).collect();
    let mut differences: BTreeMap<Address, i64> = counts
        .iter()
        .map(|(address, count)| (*address, 0_i64.saturating_sub_unsigned(count.listeners)))
        .collect();
    for record in unique.into_values().filter(|record| record.counted != 0) {
        *differences.entry(record.address).or_default() += 1;
    }
    differences.retain(|_, difference| *difference != 0);
    differences
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(port: u16) -> Address {
        Address { netns_cookie: 1, address: [0; 16], port, family: 2, dual_stack: 0 }
    }

    fn count(listeners: u64, changed_ns: u64) -> AddressCount {
        AddressCount { listeners, last_cookie: 0, changed_ns }
    }

    fn record(port: u16, counted: u32) -> ListenerRecord {
        ListenerRecord { address: address(port), cgroup_id: 0, since_ns: 0, counted, seen_by: 1 }
    }

    #[test]
    fn only_addresses_unused_for_a_minute_are_swept() {
        let now = 100_000_000_000;
        let counts = BTreeMap::from([
            (address(1), count(0, now - UNUSED_NS)),
            (address(2), count(0, now - UNUSED_NS + 1)),
            (address(3), count(1, 0)),
            (address(4), count(0, now + 5)),
        ]);
        assert_eq!(unused(&counts, now), [address(1)]);
    }

    #[test]
    fn counts_are_compared_with_records() {
        let counts =
            BTreeMap::from([(address(1), count(2, 0)), (address(2), count(1, 0)), (address(3), count(0, 0))]);
        let records = [
            (10, record(1, 1)),
            (11, record(1, 1)),
            (11, record(1, 1)), // read twice
            (12, record(3, 1)),
            (13, record(4, 0)),
            (14, record(5, 1)),
        ];
        let expected = BTreeMap::from([(address(2), -1), (address(3), 1), (address(5), 1)]);
        assert_eq!(differences(&records, &counts), expected);
    }
}
