//! Finds the cgroups of pods and containers. Must never write.

use std::collections::{BTreeMap, BTreeSet, HashSet, VecDeque};
use std::fs;
use std::path::{Path, PathBuf};

use super::{CgroupError, Cgroups, Hierarchy, checked_file, tree};

/// Maximum depth of a search; no runtime nests containers that deep.
const MAX_DEPTH: usize = 10;
/// Maximum number of folders that a search visits.
const MAX_FOLDERS: usize = 100_000;

/// Returns the cgroups of these containers below the root, by the runtimes' ids. Runtimes name a
/// container's cgroup by its id, bare (cgroupfs) or as in `cri-containerd-<id>.scope` (systemd).
/// Containers without a cgroup are left out.
#[must_use]
pub fn containers(cgroups: &Cgroups, ids: &HashSet<&str>) -> BTreeMap<String, String> {
    let mut search = Search { ids, found: BTreeMap::new(), folders: MAX_FOLDERS };
    if let (Some(hierarchy), Ok(root)) = (searched(cgroups), cgroups.paths.relative("/")) {
        search.descend(&hierarchy.mount.join(root), "", MAX_DEPTH);
    }
    search.found
}

/// Returns the cgroups with these ids of the kernel half, of pods and of the machine: their paths from
/// the root of cgroup2. Removed cgroups and very deeply nested ones are left out.
#[must_use]
pub fn by_ids(cgroups: &Cgroups, ids: &HashSet<u64>) -> BTreeMap<u64, String> {
    use std::os::unix::fs::{DirEntryExt as _, MetadataExt as _};
    let mut found = BTreeMap::new();
    let Some(hierarchy) = cgroups.paths.hierarchies().iter().find(|hierarchy| hierarchy.is_v2) else {
        return found;
    };
    if let Ok(root) = fs::metadata(&hierarchy.mount)
        && ids.contains(&root.ino())
    {
        found.insert(root.ino(), "/".to_owned());
    }
    let mut looked_at = 0;
    let mut ahead = VecDeque::from([(hierarchy.mount.clone(), String::new(), 0)]);
    while let Some((dir, path, depth)) = ahead.pop_front() {
        for entry in fs::read_dir(&dir).into_iter().flatten().flatten() {
            if looked_at == MAX_FOLDERS || found.len() == ids.len() {
                return found;
            }
            if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                continue;
            }
            looked_at += 1;
            let below = format!("{path}/{}", entry.file_name().to_string_lossy());
            if ids.contains(&entry.ino()) {
                found.insert(entry.ino(), below.clone());
            }
            if depth < MAX_DEPTH {
                ahead.push_back((entry.path(), below, depth + 1));
            }
        }
    }
    found
}

/// Returns the absolute paths of the folders in which containers' cgroups appear: `kubepods`
/// (`kubepods.slice`), its QoS classes and the pods' own. For a watch; containers' own folders are left
/// out.
#[must_use]
pub fn pod_folders(cgroups: &Cgroups) -> Vec<PathBuf> {
    let mut found = Vec::new();
    if let (Some(hierarchy), Ok(root)) = (searched(cgroups), cgroups.paths.relative("/")) {
        let root = hierarchy.mount.join(root);
        for path in pods_roots(cgroups) {
            collect_folders(&root.join(path.trim_start_matches('/')), 2, &mut found);
        }
    }
    found
}

/// Returns the cgroups above all pods, usually a single one: `/kubepods` or `/kubepods.slice`, or deeper
/// if a kubelet has a cgroup root of its own.
#[must_use]
pub fn pods_roots(cgroups: &Cgroups) -> Vec<String> {
    let mut found = Vec::new();
    if let (Some(hierarchy), Ok(root)) = (searched(cgroups), cgroups.paths.relative("/")) {
        find_pods_roots(&hierarchy.mount.join(root), "", 2, &mut found);
    }
    found
}

/// Returns the pods' cgroups that exist in any hierarchy, e.g. `/kubepods/besteffort/pod<uid>`.
///
/// # Errors
/// A directory cannot be listed.
pub fn pods(cgroups: &Cgroups) -> Result<Vec<String>, CgroupError> {
    let mut found = BTreeSet::new();
    for parent in ["/kubepods", "/kubepods/burstable", "/kubepods/besteffort"] {
        let relative = cgroups.paths.relative(parent)?;
        for hierarchy in cgroups.paths.hierarchies() {
            let names = tree::children(&hierarchy.mount.join(&relative))?;
            let uids = names.iter().filter_map(|name| cgroups.paths.names.pod_uid(parent, name));
            found.extend(uids.map(|uid| format!("{parent}/pod{uid}")));
        }
    }
    Ok(found.into_iter().collect())
}

/// Returns the cgroup that the runtime made for the container `id` of the pod with the cgroup `pod`:
/// containerd names it by the bare id, CRI-O `crio-<id>`, and with systemd it is a scope. `None` if it
/// does not exist (yet).
#[must_use]
pub fn container(cgroups: &Cgroups, pod: &str, id: &str) -> Option<String> {
    let dir = cgroups.paths.hierarchy_of("cpu")?.mount.join(cgroups.paths.relative(pod).ok()?);
    if !id.is_empty() && checked_file(id).is_some() && dir.join(id).is_dir() {
        return Some(format!("{pod}/{id}"));
    }
    let names = tree::children(&dir).ok()?;
    let name = names.into_iter().find(|name| is_of(name, id))?;
    Some(format!("{pod}/{name}"))
}

/// Returns a hierarchy that contains every container.
fn searched(cgroups: &Cgroups) -> Option<&Hierarchy> {
    cgroups.paths.hierarchies().iter().find(|h| h.is_v2 || h.controllers.contains("memory"))
}

struct Search<'a> {
    ids: &'a HashSet<&'a str>,
    found: BTreeMap<String, String>,
    folders: usize,
}

impl Search<'_> {
    fn descend(&mut self, dir: &Path, path: &str, depth: usize) {
        let Ok(entries) = fs::read_dir(dir) else { return };
        for entry in entries.flatten() {
            if self.folders == 0 || self.found.len() == self.ids.len() {
                return;
            }
            // Most entries are files; the kernel reports their kind without another call.
            if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                continue;
            }
            self.folders -= 1;
            let name = entry.file_name();
            let Some(name) = name.to_str() else { continue };
            let below = format!("{path}/{name}");
            match container_of(name, self.ids) {
                Some(id) => {
                    self.found.insert(id.to_owned(), below);
                }
                // Another container's folder has some ninety files and nothing to find.
                None if depth > 0 && !is_container(name) => self.descend(&entry.path(), &below, depth - 1),
                None => {}
            }
        }
    }
}

/// Collects `dir` and its folders down to `depth`, without containers' own.
fn collect_folders(dir: &Path, depth: usize, found: &mut Vec<PathBuf>) {
    if found.len() >= MAX_FOLDERS {
        return;
    }
    found.push(dir.to_owned());
    // A pod's folder is not searched: its entries are containers.
    if depth > 0 {
        for child in folders(dir).iter().filter(|child| !is_container(child)) {
            collect_folders(&dir.join(child), depth - 1, found);
        }
    }
}

/// Returns true if a folder of this name belongs to any container: an id of 64 digits, or a scope.
fn is_container(name: &str) -> bool {
    name.ends_with(".scope") || name.len() >= 64 && name.bytes().all(|byte| byte.is_ascii_hexdigit())
}

fn find_pods_roots(dir: &Path, path: &str, depth: usize, found: &mut Vec<String>) {
    for name in folders(dir) {
        let below = format!("{path}/{name}");
        // With a cgroup root the systemd driver prefixes the root's name.
        if name == "kubepods" || name == "kubepods.slice" || name.ends_with("-kubepods.slice") {
            found.push(below);
        } else if depth > 0 {
            find_pods_roots(&dir.join(name), &below, depth - 1, found);
        }
    }
}

fn folders(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let dirs = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    dirs.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

/// Returns the container of a cgroup by the cgroup's name.
fn container_of<'a>(name: &'a str, ids: &HashSet<&str>) -> Option<&'a str> {
    if ids.contains(name) {
        return Some(name);
    }
    let name = name.strip_suffix(".scope").unwrap_or(name);
    // CRI-O's monitor process has a scope of its own, also named after the container.
    if name.contains("conmon") {
        return None;
    }
    name.rsplit(['-', ':']).next().filter(|id| ids.contains(id))
}

/// Returns true if a cgroup of this name is the container `id`'s.
fn is_of(name: &str, id: &str) -> bool {
    container_of(name, &HashSet::from([id])).is_some()
}

#[cfg(test)]
mod tests {
    use super::super::read::tests::cgroups;
    use super::*;
    use crate::Version;

    #[test]
    fn containers_are_found_by_their_ids_under_any_runtimes_names() {
        let dir = tempfile::tempdir().unwrap();
        let cgroups = cgroups(dir.path(), Version::V2);
        let ids = ["a".repeat(64), "b".repeat(64), "c".repeat(64), "d".repeat(64)];
        let paths = [
            format!("/kubepods/burstable/pod1/{}", ids[0]),
            format!(
                "/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod2.slice/cri-containerd-{}.scope",
                ids[1]
            ),
            format!("/system.slice:cri-containerd:{}", ids[2]),
        ];
        for path in &paths {
            fs::create_dir_all(dir.path().join(format!("unified{path}"))).unwrap();
        }
        fs::create_dir_all(dir.path().join(format!("unified/x/crio-conmon-{}.scope", ids[3]))).unwrap();
        let found = containers(&cgroups, &ids.iter().map(String::as_str).collect());
        let expected: BTreeMap<String, String> = ids.iter().cloned().zip(paths).collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn cgroups_of_the_machine_are_found_by_their_ids() {
        use std::os::unix::fs::MetadataExt as _;
        let dir = tempfile::tempdir().unwrap();
        let cgroups = cgroups(dir.path(), Version::Hybrid);
        let root = dir.path().join("unified");
        fs::create_dir_all(root.join("system.slice/containerd.service/inner")).unwrap();
        let id = |path: &str| fs::metadata(root.join(path)).unwrap().ino();
        let ids = HashSet::from([id(""), id("system.slice/containerd.service"), u64::MAX]);
        let found: Vec<(u64, String)> = by_ids(&cgroups, &ids).into_iter().collect();
        let mut expected = [
            (id(""), "/".to_owned()),
            (id("system.slice/containerd.service"), "/system.slice/containerd.service".to_owned()),
        ];
        expected.sort();
        assert_eq!(found, expected);
    }

    #[test]
    fn the_folders_in_which_containers_appear_are_found() {
        let dir = tempfile::tempdir().unwrap();
        let cgroups = cgroups(dir.path(), Version::V2);
        let id = "a".repeat(64);
        fs::create_dir_all(dir.path().join(format!("unified/my/kubepods/burstable/pod1/{id}"))).unwrap();
        fs::create_dir_all(dir.path().join("unified/system.slice/x.service")).unwrap();
        assert_eq!(pods_roots(&cgroups), ["/my/kubepods"]);
        let root = dir.path().join("unified/my/kubepods");
        let expected = [root.clone(), root.join("burstable"), root.join("burstable/pod1")];
        assert_eq!(pod_folders(&cgroups), expected);
    }
}
