//! Finds the machine's cgroup hierarchies in the table of mounts.

use std::collections::BTreeSet;
use std::path::PathBuf;

use beelet_base::mountinfo::{self, Mount};

/// Controllers of version 1 as named in a mount's options (kernel: include/linux/cgroup_subsys.h).
const V1_CONTROLLERS: [&str; 15] = [
    "blkio",
    "cpu",
    "cpuacct",
    "cpuset",
    "debug",
    "devices",
    "freezer",
    "hugetlb",
    "memory",
    "misc",
    "net_cls",
    "net_prio",
    "perf_event",
    "pids",
    "rdma",
];
/// Controllers that make a machine one of version 1 if any of them is mounted in version 1. Others are
/// sometimes mounted next to an otherwise unified hierarchy (VPN clients do it with net_cls).
const DECISIVE: [&str; 4] = ["cpu", "cpuset", "memory", "pids"];

/// Version of the machine's cgroups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    /// Only version 1.
    V1,
    /// Version 1 has the controllers; a cgroup2 hierarchy without them is mounted too.
    Hybrid,
    /// cgroup2 has the controllers.
    V2,
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::V1 => "v1",
            Self::Hybrid => "v1 (hybrid)",
            Self::V2 => "v2",
        })
    }
}

/// A mounted hierarchy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hierarchy {
    /// Mount point.
    pub mount: PathBuf,
    /// True for cgroup2.
    pub is_v2: bool,
    /// Version 1: controllers; none for a named hierarchy such as `name=systemd`. cgroup2: empty, since the
    /// root's `cgroup.controllers` lists them.
    pub controllers: BTreeSet<String>,
}

/// All hierarchies that pods join.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// Version of the machine's cgroups.
    pub version: Version,
    /// Hierarchies of version 1 in the order of mounting, then cgroup2, if mounted.
    pub hierarchies: Vec<Hierarchy>,
}

/// Parses the layout that `mountinfo` describes; `None` if no cgroup file system is mounted.
#[must_use]
pub fn parse(mountinfo: &[u8]) -> Option<Layout> {
    parse_where(mountinfo, |root| root == b"/")
}

/// Parses the layout only for reading: also accepts a mount of the hierarchy's root seen from inside a cgroup
/// namespace (`/../..`), as in a container that has the machine's `/sys/fs/cgroup` mounted.
#[must_use]
pub fn parse_for_reading(mountinfo: &[u8]) -> Option<Layout> {
    let from_inside =
        |root: &[u8]| root.len() > 1 && root.split(|byte| *byte == b'/').skip(1).all(|part| part == b"..");
    // If such a mount exists, a root of `/` is only the namespace's own.
    let inside = mountinfo::mounts(mountinfo)
        .any(|mount| mount.fs_type.starts_with(b"cgroup") && from_inside(mount.root));
    parse_where(mountinfo, |root| if inside { from_inside(root) } else { root == b"/" })
}

fn parse_where(mountinfo: &[u8], whole: impl Fn(&[u8]) -> bool) -> Option<Layout> {
    let mut v1: Vec<(String, Hierarchy)> = Vec::new();
    let mut v2: Option<Hierarchy> = None;
    for mount in mountinfo::mounts(mountinfo) {
        // A mount whose root is not the hierarchy's own shows a part of it (a container's view, a bind
        // mount): our paths would mean other cgroups to the runtime. `/..` is a root outside our cgroup
        // namespace.
        if !whole(mount.root) {
            continue;
        }
        let hierarchy = |is_v2, controllers| Hierarchy { mount: mount.point.clone(), is_v2, controllers };
        match mount.fs_type {
            b"cgroup2" if v2.is_none() => v2 = Some(hierarchy(true, BTreeSet::new())),
            b"cgroup" => {
                let identity = v1_identity(&mount);
                // The same hierarchy may be mounted twice; any of the mounts will do.
                if !v1.iter().any(|(known, _)| *known == identity) {
                    v1.push((identity, hierarchy(false, v1_controllers(&mount))));
                }
            }
            _ => {}
        }
    }
    let mut hierarchies: Vec<Hierarchy> = v1.into_iter().map(|(_, hierarchy)| hierarchy).collect();
    let is_v1 = hierarchies.iter().any(|h| DECISIVE.iter().any(|name| h.controllers.contains(*name)));
    let version = match (is_v1, &v2) {
        (true, Some(_)) => Version::Hybrid,
        (true, None) => Version::V1,
        (false, Some(_)) => Version::V2,
        (false, None) => return None,
    };
    if version == Version::V2 {
        // The runtime uses only cgroup2 then.
        hierarchies.clear();
    }
    hierarchies.extend(v2);
    Some(Layout { version, hierarchies })
}

fn options<'a>(mount: &Mount<'a>) -> impl Iterator<Item = &'a str> {
    mount.super_options.split(|byte| *byte == b',').filter_map(|option| std::str::from_utf8(option).ok())
}

fn v1_controllers(mount: &Mount<'_>) -> BTreeSet<String> {
    options(mount).filter(|option| V1_CONTROLLERS.contains(option)).map(str::to_owned).collect()
}

/// Returns the identity of a version 1 hierarchy: its controllers and its name.
fn v1_identity(mount: &Mount<'_>) -> String {
    let name = options(mount).find(|option| option.starts_with("name=")).unwrap_or_default();
    let controllers: Vec<String> = v1_controllers(mount).into_iter().collect();
    format!("{} {name}", controllers.join(","))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HYBRID: &str = "\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
";
    const V2: &str = "\
23 1 259:1 / / rw,relatime shared:1 - ext4 /dev/root rw
30 23 0:26 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot
";
    const LEGACY: &str = "\
25 18 0:22 / /sys/fs/cgroup ro,nosuid,nodev,noexec shared:8 - tmpfs tmpfs ro,mode=755
26 25 0:23 / /sys/fs/cgroup/systemd rw,nosuid shared:9 - cgroup cgroup rw,xattr,release_agent=/usr/lib/systemd/systemd-cgroups-agent,name=systemd
29 25 0:26 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:13 - cgroup cgroup rw,cpu,cpuacct
30 25 0:27 / /sys/fs/cgroup/cpuset rw,nosuid shared:14 - cgroup cgroup rw,cpuset,clone_children
";

    /// Describes each hierarchy in a line, `mount point: controllers`, with `cgroup2` for that.
    fn describe(layout: &Layout) -> String {
        let line = |h: &Hierarchy| {
            let controllers: Vec<&str> = h.controllers.iter().map(String::as_str).collect();
            format!(
                "{}: {}",
                h.mount.display(),
                if h.is_v2 { "cgroup2".to_owned() } else { controllers.join(",") }
            )
        };
        layout.hierarchies.iter().map(line).collect::<Vec<_>>().join("\n")
    }

    #[track_caller]
    fn check(mountinfo: &str, version: Version, expected: &[&str]) {
        let layout = parse(mountinfo.as_bytes()).unwrap();
        assert_eq!(layout.version, version);
        assert_eq!(describe(&layout), expected.join("\n"));
    }

    #[test]
    fn the_layout_is_read_from_the_mounts() {
        check(
            HYBRID,
            Version::Hybrid,
            &[
                "/sys/fs/cgroup/cpu: cpu",
                "/sys/fs/cgroup/memory: memory",
                "/sys/fs/cgroup/systemd: ",
                "/sys/fs/cgroup/unified: cgroup2",
            ],
        );
        check(V2, Version::V2, &["/sys/fs/cgroup: cgroup2"]);
        check(
            LEGACY,
            Version::V1,
            &[
                "/sys/fs/cgroup/systemd: ",
                "/sys/fs/cgroup/cpu,cpuacct: cpu,cpuacct",
                "/sys/fs/cgroup/cpuset: cpuset",
            ],
        );
    }

    #[test]
    fn a_lone_v1_controller_next_to_the_unified_hierarchy_changes_nothing() {
        let text = format!("{V2}50 1 0:40 / /opt/net_cls rw - cgroup net_cls rw,net_cls\n");
        check(&text, Version::V2, &["/sys/fs/cgroup: cgroup2"]);
    }

    #[test]
    fn a_hierarchy_mounted_twice_counts_once() {
        let text = format!("{LEGACY}90 1 0:26 / /mnt/cpu rw - cgroup cgroup rw,cpu,cpuacct\n{V2}{V2}");
        assert_eq!(parse(text.as_bytes()).unwrap().hierarchies.len(), 4);
    }

    #[test]
    fn a_part_of_a_hierarchy_is_not_taken_for_the_whole() {
        assert_eq!(parse(b"30 23 0:26 /docker/x /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"), None);
        assert_eq!(parse(b"30 23 0:26 /../.. /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"), None);
    }

    #[test]
    fn for_reading_the_machines_hierarchy_may_be_seen_from_a_namespace() {
        let seen = "30 23 0:26 /../../.. /host/cgroup rw - cgroup2 cgroup2 rw\n";
        let layout = parse_for_reading(
            format!("29 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n{seen}").as_bytes(),
        );
        assert_eq!(describe(&layout.unwrap()), "/host/cgroup: cgroup2");
        assert_eq!(parse_for_reading(V2.as_bytes()), parse(V2.as_bytes()));
    }

    #[test]
    fn without_cgroups_there_is_no_layout() {
        for text in ["", "\n", " - ", "23 1 259:1 / / rw - ext4 /dev/root rw\n", "x - cgroup2"] {
            assert_eq!(parse(text.as_bytes()), None, "{text:?}");
        }
    }

    #[test]
    fn mount_points_may_have_any_name() {
        check("30 23 0:26 / /a\\040b\\134c rw - cgroup2 none rw", Version::V2, &["/a b\\c: cgroup2"]);
        let stick = b"40 23 8:1 /d\xff /media/caf\xe9 rw - vfat /dev/sdb1 rw,x=\xff\n";
        assert_eq!(parse(&[&stick[..], V2.as_bytes()].concat()), parse(V2.as_bytes()));
    }

    proptest::proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes: Vec<u8>, text in "([0-9:/ a-z-]|\\\\|cgroup2?| - |\n|\\PC){0,200}") {
            let _ = (parse(&bytes), parse(text.as_bytes()), parse_for_reading(text.as_bytes()));
        }
    }
}
