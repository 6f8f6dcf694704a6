//! The machine's CPUs and NUMA nodes, from `/sys/devices/system/{cpu,node}`
//! (Documentation/admin-guide/cputopology.rst, `GetTopology` of cadvisor).
//!
//! CPUs that are offline are left out. Every file is read by the descriptor of its folder, up to a bound, and
//! numbers out of range are errors: no tree, however made up, does more than fail.

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    fmt, io,
    path::{Path, PathBuf},
    sync::Arc,
};

use beelet_base::{machine_memory::meminfo, shared_folder::Folder};
use beelet_policy::pinning::{Cpu, CpuSet, memory::MemoryNode, nodes::NODE_NUMBERS, topology::Node};

/// The folder of the kernel.
pub const SYSTEM: &str = "/sys/devices/system";
/// Maximum size of a file: a list of CPUs, or a node's amounts.
const MOST_BYTES: u64 = 64 << 10;
/// Maximum number of CPUs, the kernel's own limit (`NR_CPUS`).
const MOST_CPUS: usize = 8192;
/// Maximum number of sizes of huge pages, and of caches of a CPU.
const MOST_ENTRIES: usize = 32;
/// Level of the cache that CPUs are grouped by.
const UNCORE_LEVEL: &str = "3";

/// The CPUs and the NUMA nodes of a machine.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MachineTopology {
    /// The CPUs that are online.
    pub cpus: Vec<Cpu>,
    /// The NUMA nodes with their distances.
    pub nodes: Vec<Node>,
    /// The memory of the nodes.
    pub memory: Vec<MemoryNode>,
}

/// The machine, which can be read again: CPUs go offline and come online. Clones share the reader.
#[derive(Clone)]
pub struct Source(Arc<dyn Fn() -> Result<MachineTopology, MachineError> + Send + Sync>);

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Source").finish_non_exhaustive()
    }
}

impl Source {
    /// Creates a source from a function that reads the machine, and may block.
    pub fn new(read: impl Fn() -> Result<MachineTopology, MachineError> + Send + Sync + 'static) -> Self {
        Self(Arc::new(read))
    }

    /// Reads the machine. Blocks.
    ///
    /// # Errors
    /// As for [`MachineTopology::read`].
    pub fn read(&self) -> Result<MachineTopology, MachineError> {
        (self.0)()
    }
}

/// Error of a kernel file that is missing or has an unexpected form.
#[derive(Debug, thiserror::Error)]
#[error("cannot read {}: {cause}", path.display())]
pub struct MachineError {
    path: PathBuf,
    cause: io::Error,
}

/// Amounts of the whole machine: those of the only node, where the kernel has no NUMA nodes.
#[derive(Debug, Clone, Default)]
pub struct Whole {
    /// Bytes of memory.
    pub memory: u64,
    /// Number of huge pages, by the size of a page in bytes.
    pub huge_pages: BTreeMap<u64, u64>,
}

impl MachineTopology {
    /// Reads the topology below `system`, which is [`SYSTEM`]. Blocks.
    ///
    /// # Errors
    /// A file is missing, too long, or not in the kernel's form.
    pub fn read(system: &Path, whole: &Whole) -> Result<Self, MachineError> {
        let online = cpu_list(&system.join("cpu"), "online")?;
        let nodes = node_numbers(&system.join("node"))?;
        let mut topology = Self::default();
        if nodes.is_empty() {
            let (memory, huge_pages) = (whole.memory, whole.huge_pages.clone());
            topology.nodes.push(Node { id: 0, distances: None });
            topology.memory.push(MemoryNode { id: 0, memory, huge_pages });
            for number in online.iter() {
                topology.cpus.push(cpu(system, number, 0)?);
            }
            return Ok(topology);
        }
        for id in nodes {
            let folder = system.join("node").join(format!("node{id}"));
            topology.nodes.push(Node { id, distances: distances(&folder) });
            topology.memory.push(memory(&folder, id)?);
            for number in cpu_list(&folder, "cpulist")?.intersection(&online).iter() {
                topology.cpus.push(cpu(system, number, id)?);
            }
        }
        topology.cpus.sort_by_key(|cpu| cpu.cpu);
        Ok(topology)
    }
}

fn wrong(path: &Path, cause: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> MachineError {
    MachineError { path: path.to_owned(), cause: io::Error::other(cause) }
}

/// The text of a file, without white space around it.
fn text(folder: &Path, name: &str) -> Result<String, MachineError> {
    let path = || folder.join(name);
    let read = Folder::open(folder).and_then(|folder| folder.read(OsStr::new(name), MOST_BYTES));
    match read {
        Ok(Some(bytes)) => match String::from_utf8(bytes) {
            Ok(text) => Ok(text.trim().to_owned()),
            Err(_) => Err(wrong(&path(), "the file is not text")),
        },
        Ok(None) => Err(wrong(&path(), "the file is too long")),
        Err(cause) => Err(MachineError { path: path(), cause }),
    }
}

/// The same of a file that need not be there.
fn text_if_any(folder: &Path, name: &str) -> Result<Option<String>, MachineError> {
    match text(folder, name) {
        Err(error) if error.cause.kind() == io::ErrorKind::NotFound => Ok(None),
        read => read.map(Some),
    }
}

fn cpu_list(folder: &Path, name: &str) -> Result<CpuSet, MachineError> {
    let text = text(folder, name)?;
    let cpus = CpuSet::parse(&text).filter(|cpus| cpus.len() <= MOST_CPUS);
    cpus.ok_or_else(|| wrong(&folder.join(name), "the text is not a list of CPUs"))
}

/// The nodes that are online; empty without NUMA support in the kernel.
fn node_numbers(folder: &Path) -> Result<Vec<u32>, MachineError> {
    let Some(list) = text_if_any(folder, "online")? else { return Ok(Vec::new()) };
    let nodes =
        CpuSet::parse(&list).ok_or_else(|| wrong(folder, "the list of online nodes can't be read"))?;
    match nodes.iter().find(|node| *node >= NODE_NUMBERS) {
        Some(node) => Err(wrong(folder, format!("NUMA node {node}: 63 is the highest that can be managed"))),
        None => Ok(nodes.iter().collect()),
    }
}

fn cpu(system: &Path, number: u32, numa: u32) -> Result<Cpu, MachineError> {
    let folder = system.join("cpu").join(format!("cpu{number}"));
    let topology = folder.join("topology");
    let id = |name: &str| -> Result<u32, MachineError> {
        let text = text(&topology, name)?;
        // Virtual machines have -1 where the platform does not say.
        let number: i64 =
            text.parse().map_err(|_| wrong(&topology.join(name), "the text is not a number"))?;
        Ok(u32::try_from(number).unwrap_or(0))
    };
    let (core, socket) = (id("core_id")?, id("physical_package_id")?);
    Ok(Cpu { cpu: number, core, socket, numa, uncore: uncore(&folder.join("cache")) })
}

/// The number of a CPU's L3 cache; `None` without one.
fn uncore(caches: &Path) -> Option<u32> {
    let is_cache = |name: &OsStr| name.as_encoded_bytes().starts_with(b"index");
    let names = Folder::open(caches).and_then(|folder| folder.names(is_cache)).ok()?;
    names.iter().take(MOST_ENTRIES).find_map(|name| {
        let cache = caches.join(name);
        let level = text(&cache, "level").ok()?;
        (level == UNCORE_LEVEL).then(|| text(&cache, "id").ok()?.parse().ok()).flatten()
    })
}

/// The distances of a node to all nodes; `None` if the kernel does not say.
fn distances(folder: &Path) -> Option<Vec<u64>> {
    let text = text(folder, "distance").ok()?;
    text.split_whitespace().take(NODE_NUMBERS as usize).map(|word| word.parse().ok()).collect()
}

fn memory(folder: &Path, id: u32) -> Result<MemoryNode, MachineError> {
    let amounts = text(folder, "meminfo")?;
    // Node 0 MemTotal:       65669152 kB
    let prefix = format!("Node {id} ");
    let lines: Vec<&str> = amounts.lines().filter_map(|line| line.strip_prefix(&prefix)).collect();
    let memory = meminfo(&lines.join("\n"), "MemTotal")
        .ok_or_else(|| wrong(&folder.join("meminfo"), "the file has no MemTotal"))?;
    Ok(MemoryNode { id, memory, huge_pages: huge_pages(&folder.join("hugepages"))? })
}

/// The number of huge pages by the size of a page, from a folder of the kernel with a folder for each size.
///
/// # Errors
/// A number can't be read.
pub fn huge_pages(folder: &Path) -> Result<BTreeMap<u64, u64>, MachineError> {
    let size = |name: &OsStr| -> Option<u64> {
        let kib: u64 = name.to_str()?.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
        kib.checked_mul(1024)
    };
    let names = match Folder::open(folder).and_then(|folder| folder.names(|name| size(name).is_some())) {
        Ok(names) => names,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
        Err(cause) => return Err(MachineError { path: folder.to_owned(), cause }),
    };
    let mut pages = BTreeMap::new();
    for name in names.iter().take(MOST_ENTRIES) {
        let of_size = folder.join(name);
        let count = text(&of_size, "nr_hugepages")?;
        let count: u64 = count.parse().map_err(|_| wrong(&of_size, "the number of pages can't be read"))?;
        let fits = size(name).filter(|size| size.checked_mul(count).is_some());
        let size = fits.ok_or_else(|| wrong(&of_size, "the pages are more than 2^64 bytes"))?;
        pages.insert(size, count);
    }
    Ok(pages)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    struct Tree(tempfile::TempDir);

    impl Tree {
        /// A machine with two nodes of two cores with two threads; CPU 7 is offline.
        fn new() -> Self {
            let tree = Self(tempfile::tempdir().unwrap());
            tree.write("cpu/online", "0-6\n");
            tree.write("node/online", "0-1\n");
            for cpu in 0..7_u32 {
                let (core, node) = (cpu % 4, (cpu % 4) / 2);
                tree.write(&format!("cpu/cpu{cpu}/topology/core_id"), &format!("{}\n", core % 2));
                tree.write(&format!("cpu/cpu{cpu}/topology/physical_package_id"), &format!("{node}\n"));
                for (index, level) in [(0, 1), (3, 3)] {
                    tree.write(&format!("cpu/cpu{cpu}/cache/index{index}/level"), &format!("{level}\n"));
                    tree.write(&format!("cpu/cpu{cpu}/cache/index{index}/id"), &format!("{}\n", node + 10));
                }
            }
            for (node, cpus) in [(0, "0-1,4-5"), (1, "2-3,6-7")] {
                tree.write(&format!("node/node{node}/cpulist"), cpus);
                tree.write(&format!("node/node{node}/distance"), "10 21\n");
                let meminfo = format!("Node {node} MemTotal:       1024 kB\nNode {node} MemFree: 3 kB\n");
                tree.write(&format!("node/node{node}/meminfo"), &meminfo);
                tree.write(&format!("node/node{node}/hugepages/hugepages-2048kB/nr_hugepages"), "3\n");
            }
            tree
        }

        fn write(&self, path: &str, text: &str) {
            let path = self.0.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }

        fn read(&self) -> Result<MachineTopology, MachineError> {
            let whole = Whole { memory: 7, huge_pages: BTreeMap::from([(2 << 20, 1)]) };
            MachineTopology::read(self.0.path(), &whole)
        }

        /// Reading fails, at this file.
        fn check_fails(&self, at: &str) {
            let error = self.read().unwrap_err().to_string();
            assert!(error.contains(at), "{error}");
        }
    }

    #[test]
    fn a_machine_is_read_as_the_kernel_shows_it() {
        let machine = Tree::new().read().unwrap();
        let numbers: Vec<u32> = machine.cpus.iter().map(|cpu| cpu.cpu).collect();
        assert_eq!(numbers, [0, 1, 2, 3, 4, 5, 6], "CPU 7 is offline");
        assert_eq!(machine.cpus[6], Cpu { cpu: 6, core: 0, socket: 1, numa: 1, uncore: Some(11) });
        assert_eq!(machine.nodes[1], Node { id: 1, distances: Some(vec![10, 21]) });
        let huge_pages = BTreeMap::from([(2 << 20, 3)]);
        assert_eq!(machine.memory[1], MemoryNode { id: 1, memory: 1 << 20, huge_pages });
    }

    #[test]
    fn a_kernel_without_numa_is_one_node() {
        let tree = Tree::new();
        fs::remove_dir_all(tree.0.path().join("node")).unwrap();
        fs::remove_dir_all(tree.0.path().join("cpu/cpu3/cache")).unwrap();
        tree.write("cpu/cpu3/topology/physical_package_id", "-1\n");
        let machine = tree.read().unwrap();
        assert_eq!((machine.nodes.len(), machine.memory[0].memory, machine.cpus.len()), (1, 7, 7));
        assert_eq!(machine.cpus[3], Cpu { cpu: 3, core: 1, socket: 0, numa: 0, uncore: None });
    }

    #[test]
    fn a_tree_that_is_not_the_kernels_is_an_error() {
        for (file, content, at) in [
            ("cpu/online", "0-9999999", "cpu/online"),
            ("cpu/online", "x", "cpu/online"),
            ("node/online", "64", "NUMA node 64"),
            ("node/node0/meminfo", "Node 1 MemTotal: 1 kB", "MemTotal"),
            ("node/node1/cpulist", "1-", "node1/cpulist"),
            ("cpu/cpu2/topology/core_id", "two", "cpu2/topology/core_id"),
            ("node/node0/hugepages/hugepages-2048kB/nr_hugepages", "18446744073709551615", "2^64"),
        ] {
            let tree = Tree::new();
            tree.write(file, content);
            tree.check_fails(at);
        }
        let tree = Tree::new();
        tree.write("cpu/online", &"0,".repeat(1 << 16));
        tree.check_fails("too long");
        // A link is not followed out of the tree.
        let tree = Tree::new();
        let place = tree.0.path().join("cpu/cpu1/topology");
        fs::rename(&place, tree.0.path().join("elsewhere")).unwrap();
        std::os::unix::fs::symlink(tree.0.path().join("elsewhere"), &place).unwrap();
        tree.check_fails("cpu1/topology");
        let tree = Tree::new();
        let place = tree.0.path().join("cpu/cpu1/topology/core_id");
        fs::remove_file(&place).unwrap();
        rustix::fs::mkfifoat(rustix::fs::CWD, &place, rustix::fs::Mode::RWXU).unwrap();
        tree.check_fails("cpu1/topology/core_id");
    }

    #[test]
    fn this_machine_can_be_read() {
        let whole = Whole { memory: 1, ..Whole::default() };
        let machine = MachineTopology::read(Path::new(SYSTEM), &whole).unwrap();
        assert!(!machine.cpus.is_empty() && !machine.nodes.is_empty());
    }
}
