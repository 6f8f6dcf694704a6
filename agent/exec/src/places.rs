//! The cgroups of a container, and the cgroup of a single command below them.
//!
//! A command joins the container's cgroup in every hierarchy. In one of them the command has a cgroup of its
//! own, a leaf, which no process leaves by forking: so the helper can find and end all descendants of the
//! command, also those with another session or without a parent. The leaf enables no controller and sets no
//! limit, so the container's limits and counters apply unchanged (kernel: cgroup-v2.rst, "Organizing
//! Processes"). Must touch no other cgroup.

use std::{
    collections::BTreeSet,
    fs, io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    thread::sleep,
    time::{Duration, Instant},
};

use beelet_base::mountinfo;
use rustix::{
    fs::{Mode, OFlags},
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};

/// Maximum wait for the end of killed processes.
const KILLED_WITHIN: Duration = Duration::from_secs(5);
/// Maximum rounds of moving a command's daemons out of its leaf.
const ROUNDS: usize = 10;

/// A cgroup of a container in one hierarchy.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Place {
    dir: PathBuf,
    kind: Kind,
    /// True if the cgroup is the container's own, not one that it shares.
    is_own: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// cgroup2.
    Unified,
    /// Version 1's freezer.
    Freezer,
    /// Another hierarchy of version 1.
    Other,
}

/// The cgroups of a container in all hierarchies.
#[derive(Debug)]
pub(crate) struct Places {
    /// Cgroups of version 1 that the command joins itself.
    pub joined: Vec<PathBuf>,
    /// The command's own cgroup.
    pub leaf: Leaf,
}

/// The cgroup of a command and its descendants.
#[derive(Debug)]
pub(crate) struct Leaf {
    dir: PathBuf,
    container: PathBuf,
    is_unified: bool,
}

/// The mounted hierarchies of cgroups. On a node of many containers the table of mounts is long, and writing
/// it costs the kernel more than all else that a command needs: so the server reads the table once.
#[derive(Debug)]
pub(crate) struct Hierarchies(Vec<Mounted>);

/// A mounted hierarchy.
#[derive(Debug)]
struct Mounted {
    point: PathBuf,
    /// Options of version 1, which name the controllers; `None`: cgroup2.
    options: Option<Vec<u8>>,
}

impl Hierarchies {
    pub(crate) fn read() -> io::Result<Self> {
        Ok(Self::of(&mountinfo::read()?))
    }

    fn of(table: &[u8]) -> Self {
        let hierarchy = |mount: mountinfo::Mount<'_>| {
            let options = match mount.fs_type {
                b"cgroup2" => None,
                b"cgroup" => Some(mount.super_options.to_vec()),
                _ => return None,
            };
            (mount.root == b"/").then_some(Mounted { point: mount.point, options })
        };
        Self(mountinfo::mounts(table).filter_map(hierarchy).collect())
    }

    /// Returns the mount of the hierarchy with these controllers, as in `/proc/PID/cgroup`.
    fn mount(&self, controllers: &str) -> Option<&Path> {
        let first = controllers.split(',').next().unwrap_or_default();
        let is_meant = |mounted: &&Mounted| match &mounted.options {
            None => controllers.is_empty(),
            Some(options) => options.split(|byte| *byte == b',').any(|option| option == first.as_bytes()),
        };
        self.0.iter().find(is_meant).map(|mounted| mounted.point.as_path())
    }

    /// Returns true if all hierarchies of a `/proc/PID/cgroup` are known.
    fn has_all(&self, lines: &str) -> bool {
        let mut controllers = lines.lines().filter_map(|line| line.split(':').nth(1));
        controllers.all(|controllers| self.mount(controllers).is_some())
    }
}

impl Places {
    /// Finds the cgroups of the container whose first process is `pid`, and creates the command's own.
    pub(crate) fn of(pid: u32, container: &str, hierarchies: &Hierarchies) -> io::Result<Self> {
        let lines = fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
        let places = match hierarchies.has_all(&lines) {
            true => parse(&lines, hierarchies, container)?,
            // A hierarchy may have been mounted since.
            false => parse(&lines, &Hierarchies::read()?, container)?,
        };
        let of_kind = |kind| places.iter().find(move |place| place.kind == kind && place.is_own);
        let tracking = of_kind(Kind::Unified).or_else(|| of_kind(Kind::Freezer)).ok_or_else(|| {
            io::Error::other("the container has no cgroup of its own in cgroup2 or the freezer hierarchy")
        })?;
        let leaf = Leaf::create(tracking)?;
        let joined = places.iter().filter(|place| place.kind != Kind::Unified);
        let joined = joined.map(|place| if place == tracking { leaf.dir.clone() } else { place.dir.clone() });
        Ok(Self { joined: joined.collect(), leaf })
    }
}

/// Parses `/proc/PID/cgroup` of a container's process.
fn parse(lines: &str, hierarchies: &Hierarchies, container: &str) -> io::Result<Vec<Place>> {
    let mut places = Vec::new();
    for line in lines.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else {
            continue;
        };
        // A hierarchy that is not mounted can't be joined, neither by the runtime.
        let Some(mount) = hierarchies.mount(controllers) else { continue };
        // A process of the container may have moved itself further down.
        let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
        if parts.contains(&"..") {
            return Err(io::Error::other(format!("the cgroup {path:?} is outside this cgroup namespace")));
        }
        let own = parts.iter().position(|part| part.contains(container));
        let kept = own.map_or(parts.len(), |place| place.saturating_add(1));
        let dir = parts.iter().take(kept).fold(mount.to_owned(), |dir, part| dir.join(part));
        let kind = match controllers {
            "" => Kind::Unified,
            _ if controllers.split(',').any(|name| name == "freezer") => Kind::Freezer,
            _ => Kind::Other,
        };
        places.push(Place { dir, kind, is_own: own.is_some() });
    }
    if places.iter().any(|place| place.is_own) {
        Ok(places)
    } else {
        Err(io::Error::other("no cgroup of the process belongs to the container"))
    }
}

impl Leaf {
    fn create(place: &Place) -> io::Result<Self> {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        // Unique on the machine: no other process has this pid at this moment.
        let name = format!("beelet-exec-{}-{}-{}", std::process::id(), now.tv_sec, now.tv_nsec);
        let dir = place.dir.join(name);
        fs::create_dir(&dir)?;
        Ok(Self { dir, container: place.dir.clone(), is_unified: place.kind == Kind::Unified })
    }

    /// Opens the folder for `CLONE_INTO_CGROUP`; `None` in version 1, where a process moves itself.
    pub(crate) fn open(&self) -> io::Result<Option<OwnedFd>> {
        if !self.is_unified {
            return Ok(None);
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        Ok(Some(rustix::fs::open(&self.dir, flags, Mode::empty())?))
    }

    fn pids(&self) -> Vec<i32> {
        let text = fs::read_to_string(self.dir.join("cgroup.procs")).unwrap_or_default();
        text.lines().filter_map(|line| line.parse().ok()).collect()
    }

    /// Kills the command and all of its descendants, also those that fork at this moment.
    pub(crate) fn kill(&self) {
        let started = Instant::now();
        loop {
            // cgroup.kill (Linux 5.14) also reaches processes that are being forked.
            if !self.is_unified || fs::write(self.dir.join("cgroup.kill"), "1").is_err() {
                self.kill_each();
            }
            if self.pids().is_empty() || started.elapsed() > KILLED_WITHIN {
                return;
            }
            sleep(Duration::from_millis(2));
        }
    }

    /// Kills each process. A frozen process does not fork; without a freezer, rounds of killing win.
    fn kill_each(&self) {
        let (file, frozen, thawed) =
            if self.is_unified { ("cgroup.freeze", "1", "0") } else { ("freezer.state", "FROZEN", "THAWED") };
        let _ = fs::write(self.dir.join(file), frozen);
        let open = |pid: &i32| pidfd_open(Pid::from_raw(*pid)?, PidfdFlags::empty()).ok();
        let held: Vec<(i32, OwnedFd)> =
            self.pids().iter().filter_map(|pid| Some((*pid, open(pid)?))).collect();
        // A pid may have been reused before it was opened: only those that are still listed are ours.
        let listed: BTreeSet<i32> = self.pids().into_iter().collect();
        for (_, process) in held.iter().filter(|(pid, _)| listed.contains(pid)) {
            let _ = pidfd_send_signal(process, Signal::KILL);
        }
        let _ = fs::write(self.dir.join(file), thawed);
    }

    /// Removes the leaf. Processes that the command has left behind move to the container's cgroup, as they
    /// would be under the runtime.
    pub(crate) fn release(&self) {
        for _ in 0..ROUNDS {
            if fs::remove_dir(&self.dir).is_ok() || !self.dir.exists() {
                return;
            }
            for pid in self.pids() {
                let _ = fs::write(self.container.join("cgroup.procs"), pid.to_string());
            }
            sleep(Duration::from_millis(1));
        }
        // Processes that fork without end are no daemons.
        self.kill();
        let started = Instant::now();
        while fs::remove_dir(&self.dir).is_err() && self.dir.exists() && started.elapsed() < KILLED_WITHIN {
            sleep(Duration::from_millis(10));
        }
    }
}

/// Adds this process to a cgroup of version 1.
pub(crate) fn join(dir: &Path) -> io::Result<()> {
    fs::write(dir.join("cgroup.procs"), "0")
}

#[cfg(test)]
mod tests {
    use super::*;

    const HYBRID: &[u8] = b"\
31 23 0:28 / /cg rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /cg/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct
33 31 0:30 / /cg/freezer rw,relatime - cgroup cgroup rw,freezer
34 31 0:31 / /cg/systemd rw,relatime - cgroup cgroup rw,xattr,name=systemd
35 31 0:32 / /cg/unified rw,relatime - cgroup2 cgroup2 rw
36 31 0:32 /pods /other rw,relatime - cgroup2 cgroup2 rw
";

    #[test]
    fn the_cgroups_of_a_container_are_found_in_every_hierarchy() {
        let lines =
            "3:cpu,cpuacct:/pods/c1\n2:freezer:/pods/c1/below/it\n1:name=systemd:/\n9:pids:/x\n0::/pods/c1\n";
        let place = |dir: &str, kind, is_own| Place { dir: dir.into(), kind, is_own };
        let expected = vec![
            place("/cg/cpu/pods/c1", Kind::Other, true),
            place("/cg/freezer/pods/c1", Kind::Freezer, true),
            place("/cg/systemd", Kind::Other, false),
            place("/cg/unified/pods/c1", Kind::Unified, true),
        ];
        assert_eq!(parse(lines, &Hierarchies::of(HYBRID), "c1").unwrap(), expected);
        assert!(!Hierarchies::of(HYBRID).has_all(lines), "no hierarchy of the controller pids is mounted");
        // A scope of systemd has the id in its name.
        let scope =
            parse("0::/pods.slice/cri-containerd-c1.scope\n", &Hierarchies::of(HYBRID), "c1").unwrap();
        assert_eq!(scope[0].dir, Path::new("/cg/unified/pods.slice/cri-containerd-c1.scope"));
    }

    #[test]
    fn a_process_outside_the_container_is_refused() {
        assert!(parse("3:cpu,cpuacct:/pods/c2\n0::/pods/c2\n", &Hierarchies::of(HYBRID), "c1").is_err());
        assert!(parse("0::/../../c1\n", &Hierarchies::of(HYBRID), "c1").is_err());
        assert!(parse("", &Hierarchies::of(HYBRID), "c1").is_err());
    }
}
