//! Guards of resources that a test creates and that are removed with the value: cgroups, network namespaces,
//! mounts, processes. Never resources of the machine itself. A stop signal ends the test with an error, so
//! that they are removed then too ([`workdir::heed_signals`]).

use crate::workdir::{self, wait_regardless};
use anyhow::{Context as _, Result, bail};
use beelet_base::mountinfo;
use beelet_policy::resources::cgroups::slice_path;
use beelet_units::cgroup_driver::CgroupDriver;
use rustix::process::{Pid, Signal};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

/// Length of containerd's ids.
pub(crate) const CONTAINER_ID: usize = 64;

/// Maximum time for removing a test's resources.
const TEARDOWN: Duration = Duration::from_secs(30);

/// Mounted cgroup hierarchy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hierarchy {
    /// Mount point.
    pub mount: PathBuf,
    /// True for cgroup2, false for a v1 hierarchy.
    pub v2: bool,
    /// Controllers of a v1 hierarchy, or `name=…` for a named one; empty for cgroup2.
    pub controllers: Vec<String>,
}

impl Hierarchy {
    /// Creates a cgroup. A v1 cpuset starts without CPUs and memory nodes and then accepts no process, so it
    /// gets its parent's.
    fn make(&self, dir: &Path) -> Result<()> {
        std::fs::create_dir_all(dir)
            .with_context(|| format!("cannot create the cgroup {}", dir.display()))?;
        if self.controllers.iter().any(|controller| controller == "cpuset") {
            let parent = dir.parent().unwrap_or(&self.mount);
            for file in ["cpuset.cpus", "cpuset.mems"] {
                workdir::write(&dir.join(file), workdir::read(&parent.join(file))?)?;
            }
        }
        Ok(())
    }
}

/// Mount in /proc/self/mountinfo (proc(5)).
#[derive(Debug, Clone)]
pub struct MountPoint {
    /// Mount point.
    pub path: PathBuf,
    /// Type of the file system.
    pub kind: String,
    /// Options of the superblock.
    pub options: String,
}

/// Returns every mount visible to this process, in the order of mounting.
pub fn mounts() -> Result<Vec<MountPoint>> {
    let table = mountinfo::read().context("cannot read the mount table")?;
    let text = |field: &[u8]| String::from_utf8_lossy(field).into_owned();
    let all = mountinfo::mounts(&table);
    Ok(all
        .map(|mount| MountPoint {
            kind: text(mount.fs_type),
            options: text(mount.super_options),
            path: mount.point,
        })
        .collect())
}

/// Returns the mounted cgroup hierarchies: one on pure cgroup2, several on v1 and hybrid.
pub fn hierarchies() -> Result<Vec<Hierarchy>> {
    let mut found: Vec<Hierarchy> = Vec::new();
    for mount in mounts()?.into_iter().filter(|mount| mount.kind == "cgroup" || mount.kind == "cgroup2") {
        let v2 = mount.kind == "cgroup2";
        let generic = ["rw", "ro", "xattr", "release_agent", "clone_children", "noprefix"];
        let controllers: Vec<String> = mount
            .options
            .split(',')
            .filter(|option| !v2 && !generic.iter().any(|name| option.split('=').next() == Some(name)))
            .map(ToOwned::to_owned)
            .collect();
        if !found.iter().any(|hierarchy| hierarchy.v2 == v2 && hierarchy.controllers == controllers) {
            found.push(Hierarchy { mount: mount.path, v2, controllers });
        }
    }
    Ok(found)
}

/// Returns the cgroup driver for tests that support both: the one that `BEELET_CGROUP_DRIVER` names,
/// otherwise cgroupfs.
pub fn chosen_driver() -> Result<CgroupDriver> {
    match std::env::var("BEELET_CGROUP_DRIVER").as_deref() {
        Err(_) | Ok("" | "cgroupfs") => Ok(CgroupDriver::Cgroupfs),
        Ok("systemd") => Ok(CgroupDriver::Systemd),
        Ok(other) => bail!("BEELET_CGROUP_DRIVER={other}: expected cgroupfs or systemd"),
    }
}

/// Cgroup of a test in every hierarchy, below which agent and runtime create theirs; with systemd's driver it
/// is a slice. Dropping the value kills every process in it and removes the whole tree.
#[derive(Debug)]
pub struct CgroupRoot {
    path: String,
    driver: CgroupDriver,
    hierarchies: Vec<Hierarchy>,
    keep: bool,
}

impl CgroupRoot {
    /// Creates the cgroup `/<name>` in every hierarchy; a v1 cpuset that would start empty gets the parent's
    /// `cpuset.cpus` and `cpuset.mems`.
    pub fn new(name: &str) -> Result<CgroupRoot> {
        CgroupRoot::of_driver(name, CgroupDriver::Cgroupfs)
    }

    /// Like [`CgroupRoot::new`], for either driver.
    pub fn of_driver(name: &str, driver: CgroupDriver) -> Result<CgroupRoot> {
        workdir::heed_signals()?;
        let mut root = CgroupRoot::existing(name, driver)?;
        root.keep = false;
        if root.hierarchies.is_empty() {
            bail!("no cgroup hierarchy is mounted");
        }
        if let Some(slice) = root.slice() {
            // A slice without a unit file can be started as it is (systemd.slice(5)).
            run("systemctl", &["start", slice])?;
            return Ok(root);
        }
        for hierarchy in &root.hierarchies {
            hierarchy.make(&hierarchy.mount.join(name))?;
        }
        Ok(root)
    }

    /// Returns the cgroup of that name, whether or not it exists: to remove it, or to check its removal.
    /// Dropping the value leaves it.
    pub fn existing(name: &str, driver: CgroupDriver) -> Result<CgroupRoot> {
        let path = match driver {
            CgroupDriver::Cgroupfs => format!("/{name}"),
            CgroupDriver::Systemd => slice_path(&format!("/{name}")),
        };
        Ok(CgroupRoot { path, driver, hierarchies: hierarchies()?, keep: true })
    }

    /// Returns the path below the hierarchies' mounts, with its leading slash: a valid `cgroupRoot` and
    /// parent for a runtime.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Returns the driver of the cgroups below this one.
    pub fn driver(&self) -> CgroupDriver {
        self.driver
    }

    /// Creates a child cgroup in every hierarchy; returns its folders.
    pub fn make_child(&self, name: &str) -> Result<Vec<PathBuf>> {
        let make = |hierarchy: &Hierarchy| {
            let dir = hierarchy.mount.join(&self.path[1..]).join(name);
            hierarchy.make(&dir)?;
            Ok(dir)
        };
        self.hierarchies.iter().map(make).collect()
    }

    /// Returns the name of the cgroup's slice.
    fn slice(&self) -> Option<&str> {
        (self.driver == CgroupDriver::Systemd).then(|| self.path.trim_start_matches('/'))
    }

    /// Returns the folder of this cgroup in the hierarchy with `controller`; on cgroup2, or for `"unified"`,
    /// the cgroup2 folder.
    pub fn dir(&self, controller: &str) -> Option<PathBuf> {
        let of = |found: &Hierarchy| found.mount.join(&self.path[1..]);
        let v1 = self.hierarchies.iter().find(|one| one.controllers.iter().any(|name| name == controller));
        v1.or_else(|| self.hierarchies.iter().find(|one| one.v2)).map(of)
    }

    /// Returns the folder of the cgroup that the agent calls `name`, in the hierarchy of [`CgroupRoot::dir`]:
    /// `/kubepods/burstable/pod<uid>`, and below a pod a container's id.
    pub fn folder(&self, controller: &str, name: &str) -> Option<PathBuf> {
        Some(self.dir(controller)?.join(self.below(name)))
    }

    /// Like [`CgroupRoot::folder`], in every hierarchy.
    pub fn folders(&self, name: &str) -> Vec<PathBuf> {
        let below = self.below(name);
        self.dirs().iter().map(|dir| dir.join(&below)).collect()
    }

    /// Returns the path from this cgroup to the one of that name. A name of units is used unchanged.
    fn below(&self, name: &str) -> PathBuf {
        let name = name.trim_start_matches('/');
        let is_unit = name.split('/').next().is_some_and(|first| first.ends_with(".slice"));
        let Some(slice) = self.slice().filter(|_| !is_unit) else { return PathBuf::from(name) };
        let (ours, container) = match name.rsplit_once('/') {
            Some((pod, id)) if id.len() == CONTAINER_ID => (pod, Some(id)),
            _ => (name, None),
        };
        let path = slice_path(&format!("/{}/{ours}", slice.trim_end_matches(".slice")));
        let below = Path::new(path.strip_prefix(&self.path).unwrap_or(&path).trim_start_matches('/'));
        container.map_or(below.to_path_buf(), |id| below.join(format!("cri-containerd-{id}.scope")))
    }

    /// Returns the folder of this cgroup in each hierarchy.
    pub fn dirs(&self) -> Vec<PathBuf> {
        self.hierarchies.iter().map(|one| one.mount.join(&self.path[1..])).collect()
    }

    /// Keeps the cgroup when the value is dropped.
    pub fn keep(&mut self) {
        self.keep = true;
    }

    /// Kills the processes in all cgroups below this one and removes those cgroups, in every hierarchy.
    pub fn clear(&self) -> Result<()> {
        if let Some(slice) = self.slice() {
            self.remove()?;
            return run("systemctl", &["start", slice]);
        }
        let below: Vec<PathBuf> = self.dirs().iter().flat_map(|dir| subfolders(dir)).collect();
        remove_cgroups(&below)
    }

    /// Kills the processes and removes the cgroup, in every hierarchy. Like [`Drop`], but returns the error.
    pub fn remove(&self) -> Result<()> {
        let dirs = self.dirs();
        if let Some(slice) = self.slice().filter(|_| dirs.iter().any(|dir| dir.exists())) {
            // systemd would give the processes time to end.
            wait_regardless("the processes below a slice to end", TEARDOWN, || match kill_below(&dirs) {
                0 => Ok(()),
                left => Err(format!("{left} processes are left")),
            })?;
            // systemd also stops the units below.
            run("systemctl", &["stop", slice])?;
        }
        remove_cgroups(&dirs)
    }
}

impl Drop for CgroupRoot {
    fn drop(&mut self) {
        if self.keep {
            return;
        }
        if let Err(error) = self.remove() {
            eprintln!("cannot remove the cgroup {}: {error:#}", self.path);
        }
    }
}

/// Kills every process in these cgroup folders and removes the folders with all cgroups below.
pub fn remove_cgroups(dirs: &[PathBuf]) -> Result<()> {
    wait_regardless("the cgroups to be empty and removed", TEARDOWN, || -> Result<()> {
        kill_below(dirs);
        for dir in dirs.iter().filter(|dir| dir.exists()) {
            remove_tree(dir)?;
        }
        Ok(())
    })
}

/// Kills every process in these cgroup folders; returns the number of processes.
fn kill_below(dirs: &[PathBuf]) -> usize {
    let mut found = 0;
    for dir in dirs {
        thaw_below(dir);
        for pid in processes_below(dir) {
            let _ = rustix::process::kill_process(pid, Signal::KILL); // the process may have exited by itself
            found += 1;
        }
    }
    found
}

/// Returns the processes in the cgroup folder and all below.
pub fn processes_below(dir: &Path) -> Vec<Pid> {
    let text = std::fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
    let own = text.lines().filter_map(|line| Pid::from_raw(line.parse().ok()?));
    let below = subfolders(dir).into_iter().flat_map(|child| processes_below(&child));
    own.chain(below).collect()
}

/// Thaws cgroups, since processes frozen by a killed test cannot be killed.
fn thaw_below(dir: &Path) {
    for (file, thawed) in [("freezer.state", "THAWED"), ("cgroup.freeze", "0")] {
        if dir.join(file).exists() {
            let _ = std::fs::write(dir.join(file), thawed); // the hierarchy's root lacks the file
        }
    }
    subfolders(dir).iter().for_each(|child| thaw_below(child));
}

fn subfolders(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().filter_map(Result::ok);
    entries
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .map(|entry| entry.path())
        .collect()
}

fn remove_tree(dir: &Path) -> Result<()> {
    for child in subfolders(dir) {
        remove_tree(&child)?;
    }
    match std::fs::remove_dir(dir) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove the cgroup {}", dir.display()))
        }
        _ => Ok(()),
    }
}

/// Network namespace under /run/netns, like those of `ip netns add`.
#[derive(Debug)]
pub struct NetNs {
    name: String,
}

impl NetNs {
    /// Creates the namespace with its loopback interface up.
    pub fn new(name: &str) -> Result<NetNs> {
        workdir::heed_signals()?;
        ip(&["netns", "add", name])?;
        let namespace = NetNs { name: name.to_owned() };
        ip(&["-n", name, "link", "set", "lo", "up"])?;
        Ok(namespace)
    }

    /// Returns the file of the namespace.
    pub fn path(&self) -> PathBuf {
        Path::new("/run/netns").join(&self.name)
    }

    /// Runs `work` on a thread inside the namespace; returns its result.
    pub fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Result<T> {
        let path = self.path();
        let file = std::fs::File::open(&path).with_context(|| format!("cannot open {}", path.display()))?;
        let thread = std::thread::spawn(move || -> Result<T> {
            use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
            use std::os::fd::AsFd as _;
            move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))
                .context("cannot enter the network namespace")?;
            Ok(work())
        });
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

impl Drop for NetNs {
    fn drop(&mut self) {
        if let Err(error) = ip(&["netns", "del", &self.name]) {
            eprintln!("cannot remove the network namespace {}: {error:#}", self.name);
        }
    }
}

/// Runs `ip`; returns its output.
pub fn ip(arguments: &[&str]) -> Result<String> {
    let program = crate::requires::find_program("ip").context("ip is not installed (Debian: iproute2)")?;
    let output = Command::new(program).args(arguments).output().context("cannot start ip")?;
    if !output.status.success() {
        bail!("`ip {}` failed: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Runs a program of the machine; its failure is an error.
fn run(name: &str, arguments: &[&str]) -> Result<()> {
    let program = crate::requires::find_program(name).with_context(|| format!("{name} is not installed"))?;
    let output =
        Command::new(program).args(arguments).output().with_context(|| format!("cannot start {name}"))?;
    if !output.status.success() {
        bail!("`{name} {}` failed: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}

/// File system mounted for a test in its own folder.
#[derive(Debug)]
pub struct Mount {
    path: PathBuf,
}

impl Mount {
    /// Mounts a BPF file system, for pins that are invisible to others.
    pub fn bpffs(path: &Path) -> Result<Mount> {
        Mount::new("bpf", path, "")
    }

    /// Mounts a tmpfs of `bytes` bytes: a disk that a test can fill.
    pub fn tmpfs(path: &Path, bytes: u64) -> Result<Mount> {
        Mount::new("tmpfs", path, &format!("size={bytes}"))
    }

    /// Mounts a tmpfs with a limited number of bytes and inodes.
    pub fn tmpfs_with_inodes(path: &Path, bytes: u64, inodes: u64) -> Result<Mount> {
        Mount::new("tmpfs", path, &format!("size={bytes},nr_inodes={inodes}"))
    }

    /// Mounts an ext4 file system in a file of `bytes` bytes, by a loop device.
    pub fn ext4(path: &Path, file: &Path, bytes: u64) -> Result<Mount> {
        Mount::in_file(path, file, bytes, &["mkfs.ext4", "-q", "-F", "-m", "0"], "loop")
    }

    /// Mounts a file system in a file of `bytes` bytes, created by the program `make`, with these options.
    pub fn in_file(path: &Path, file: &Path, bytes: u64, make: &[&str], options: &str) -> Result<Mount> {
        workdir::heed_signals()?;
        std::fs::create_dir_all(path).with_context(|| format!("cannot create {}", path.display()))?;
        let made = std::fs::File::create(file).and_then(|file| file.set_len(bytes));
        made.with_context(|| format!("cannot create {}", file.display()))?;
        let (program, arguments) =
            make.split_first().context("the command that creates the file system is empty")?;
        run(program, &[arguments, &[&*file.to_string_lossy()]].concat())?;
        let kind = program.strip_prefix("mkfs.").context("the program is not a mkfs")?;
        // mount(8) finds a free loop device, and the kernel frees it with the last use.
        run("mount", &["-t", kind, "-o", options, &file.to_string_lossy(), &path.to_string_lossy()])?;
        Ok(Mount { path: path.to_path_buf() })
    }

    fn new(kind: &str, path: &Path, options: &str) -> Result<Mount> {
        workdir::heed_signals()?;
        std::fs::create_dir_all(path).with_context(|| format!("cannot create {}", path.display()))?;
        let options = std::ffi::CString::new(options)?;
        rustix::mount::mount(kind, path, kind, rustix::mount::MountFlags::empty(), options.as_c_str())
            .with_context(|| format!("cannot mount {kind} at {}", path.display()))?;
        Ok(Mount { path: path.to_path_buf() })
    }

    /// Returns the mount point.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if let Err(error) = unmount_below(&self.path) {
            eprintln!("{error:#}");
        }
    }
}

/// Folder in which all mounts are removed when the value is dropped.
#[derive(Debug)]
pub struct MountsBelow(pub PathBuf);

impl Drop for MountsBelow {
    fn drop(&mut self) {
        if let Err(error) = unmount_below(&self.0) {
            eprintln!("{error:#}");
        }
    }
}

/// Unmounts everything at and below `dir`, the last mounted first.
pub fn unmount_below(dir: &Path) -> Result<()> {
    let below: Vec<_> = mounts()?.into_iter().filter(|mount| mount.path.starts_with(dir)).collect();
    for mount in below.iter().rev() {
        rustix::mount::unmount(&mount.path, rustix::mount::UnmountFlags::DETACH)
            .with_context(|| format!("cannot unmount {}", mount.path.display()))?;
    }
    Ok(())
}

/// Child process that is killed and waited for when the value is dropped.
#[derive(Debug)]
pub struct Process(pub Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill(); // the process may have ended by itself
        let _ = self.0.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::require;

    #[test]
    fn a_cgroup_root_is_in_every_hierarchy_and_kills_its_processes() {
        require!(root);
        let root = CgroupRoot::new(&workdir::unique("beelet-guard")).unwrap();
        let dirs = root.dirs();
        assert!(dirs.iter().all(|dir| dir.is_dir()), "{dirs:?}");
        let below = dirs[0].join("a/b");
        std::fs::create_dir_all(&below).unwrap();
        // On v1 a cpuset starts empty; on v2 it is inherited, and has no files here.
        for file in ["cpuset.cpus", "cpuset.mems"].iter().filter(|file| below.join(file).exists()) {
            let value = std::fs::read_to_string(dirs[0].join(file)).unwrap();
            std::fs::write(dirs[0].join("a").join(file), &value).unwrap();
            std::fs::write(below.join(file), &value).unwrap();
        }
        let mut child = Process(Command::new("sleep").arg("1000").spawn().unwrap());
        std::fs::write(below.join("cgroup.procs"), child.0.id().to_string()).unwrap();
        // The killed child is a zombie, which keeps its cgroup on v1, until it is waited for.
        let waiter = std::thread::spawn(move || child.0.wait().unwrap());
        drop(root);
        assert!(!waiter.join().unwrap().success());
        assert!(!dirs.iter().any(|dir| dir.exists()), "{dirs:?}");
    }

    #[test]
    fn a_cgroups_folder_is_found_with_either_driver() {
        let check = |driver, name: &str, expected: &str| {
            let root = CgroupRoot::existing("t-1", driver).unwrap();
            assert_eq!(root.below(name), Path::new(expected), "{name}");
        };
        let id = "c".repeat(CONTAINER_ID);
        let container = format!("/kubepods/burstable/pod1-2/{id}");
        check(CgroupDriver::Cgroupfs, &container, &container[1..]);
        check(CgroupDriver::Systemd, "/kubepods", "t_1-kubepods.slice");
        check(
            CgroupDriver::Systemd,
            &container,
            &format!(
                "t_1-kubepods.slice/t_1-kubepods-burstable.slice/t_1-kubepods-burstable-pod1_2.slice/\
                 cri-containerd-{id}.scope"
            ),
        );
        check(CgroupDriver::Systemd, "/t_1-kubepods.slice/x", "t_1-kubepods.slice/x");
    }

    #[test]
    fn a_full_tmpfs_has_no_space_left_and_is_unmounted_again() {
        require!(root);
        let dir = tempfile::tempdir().unwrap();
        let mount = Mount::tmpfs(dir.path(), 64 * 1024).unwrap();
        let error = std::fs::write(mount.path().join("big"), vec![0; 1 << 20]).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::StorageFull);
        drop(mount);
        assert!(!mounts().unwrap().iter().any(|mount| mount.path == dir.path()));
    }

    #[test]
    fn a_network_namespace_has_only_its_own_loopback() {
        require!(root);
        if let Err(missing) = crate::requires::find_program("ip").ok_or("ip") {
            panic!("{missing} is not installed");
        }
        let namespace = NetNs::new(&workdir::unique("beelet-guard")).unwrap();
        let interfaces =
            namespace.run(|| std::fs::read_to_string("/proc/thread-self/net/dev").unwrap()).unwrap();
        assert!(interfaces.contains("lo:") && !interfaces.contains("eth0:"), "{interfaces}");
        let path = namespace.path();
        drop(namespace);
        assert!(!path.exists());
    }
}
