//! The maps of attached programs, as this process reads them, and the reader of their events.

use aya::maps::{MapData, MapType, PerCpuArray, RingBuf};

use super::edges::Hub;
use super::reader::Reader;
use super::{
    Drops, KernelError, KernelOptions, Listeners, Measures, containers, loader, settings, stale_counters,
    sweep,
};

/// Maximum kernel memory of a map. All maps are allocated in full when they are made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MapMemory {
    /// The map's name.
    pub map: &'static str,
    /// Maximum number of entries; for the ring buffer, its bytes.
    pub entries: u64,
    /// Bytes of one entry: key and value; 1 for the ring buffer.
    pub entry_bytes: u64,
    /// Copies of each value: the number of possible CPUs for a per-CPU map, else 1.
    pub copies: u64,
    /// Product of the three. The kernel's own bookkeeping (some 50 bytes per entry of a hash) is extra.
    pub bytes: u64,
}

/// The maps of attached programs.
pub(super) struct Maps {
    pub(super) listeners: Listeners,
    pub(super) measures: Measures,
    pub(super) drops: PerCpuArray<MapData, Drops>,
    pub(super) memory: Vec<MapMemory>,
    pub(super) reader: Reader,
}

impl Maps {
    /// Opens the maps and starts the reader.
    pub(super) fn open(
        loaded: &mut loader::Loaded,
        options: &KernelOptions,
        hub: &Hub,
    ) -> Result<Maps, KernelError> {
        let maps = &loaded.maps;
        let map = |name: &str| {
            maps.get(name).ok_or_else(|| KernelError::new(format!("the BPF object has no map {name}")))
        };
        let memory = memory(maps)?;
        settings::publish(loader::duplicate(map("SETTINGS")?)?, &options.cgroup, &options.pressure_edges)?;
        let listeners =
            Listeners::new(loader::duplicate(map("LISTENERS")?)?, loader::duplicate(map("ADDRESSES")?)?)
                .map_err(|error| KernelError::map("LISTENERS", &error))?;
        let sweeper = sweep::Sweeper::new(
            loader::duplicate(map("LISTENERS")?)?,
            loader::duplicate(map("ADDRESSES")?)?,
        )?;
        let containers =
            || containers::Containers::open(map("SLOTS")?, loader::duplicate(map("CONTAINERS")?)?);
        let pressure = loader::duplicate(map("PRESSURE")?)?;
        let stale_counters = stale_counters::StaleCounters::new(containers()?, pressure, &options.cgroup)?;
        let [running, holders, reclaimers] =
            ["RUNNING", "HOLDERS", "RECLAIMERS"].map(|name| map(name).and_then(loader::duplicate));
        let measures = Measures::new(containers()?, [running?, holders?, reclaimers?])?;
        let drops = |data: MapData| -> Result<PerCpuArray<MapData, Drops>, KernelError> {
            aya::maps::Map::from_map_data(data)
                .and_then(PerCpuArray::try_from)
                .map_err(|error| KernelError::map("DROPS", &error))
        };
        let ring = aya::maps::Map::from_map_data(loader::duplicate(map("EVENTS")?)?)
            .and_then(RingBuf::try_from)
            .map_err(|error| KernelError::map("EVENTS", &error))?;
        let own_drops = drops(loader::duplicate(map("DROPS")?)?)?;
        let reader_drops = drops(loader::duplicate(map("DROPS")?)?)?;
        let sweepers = (sweeper, stale_counters);
        let reader = Reader::start(ring, reader_drops, sweepers, loaded.log.take(), hub.clone())?;
        Ok(Maps { listeners, measures, drops: own_drops, memory, reader })
    }
}

pub(super) fn memory(
    maps: &std::collections::BTreeMap<&'static str, MapData>,
) -> Result<Vec<MapMemory>, KernelError> {
    let cpus = aya::util::nr_cpus()
        .map_err(|(what, error)| KernelError::new(format!("could not count the CPUs: {what}: {error}")))?;
    maps.iter()
        .map(|(name, data)| {
            let info = data.info().map_err(|error| KernelError::map(name, &error))?;
            let kind = info.map_type().map_err(|error| KernelError::map(name, &error))?;
            let (entry_bytes, copies) = match kind {
                MapType::RingBuf => (1, 1),
                // Each thread has one entry, allocated with the thread; the kernel's bookkeeping is larger
                // than the value.
                MapType::TaskStorage => (u64::from(info.value_size()), 1),
                MapType::PerCpuArray => {
                    (u64::from(info.key_size()) + u64::from(info.value_size()), cpus as u64)
                }
                _ => (u64::from(info.key_size()) + u64::from(info.value_size()), 1),
            };
            let entries = u64::from(info.max_entries());
            Ok(MapMemory { map: name, entries, entry_bytes, copies, bytes: entries * entry_bytes * copies })
        })
        .collect()
}
