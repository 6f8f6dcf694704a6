//! Writes values to files: only those that differ, in the right order, and reads them back.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use super::order::{self, Change};
use super::{Adjust, Adjusted, CgroupError, Cgroups, Files, checked_file};

/// Version 1's quota and period are a single value to the kernel's rules, so they are compared and ordered as
/// one.
const CFS_QUOTA: &str = "cpu.cfs_quota_us";
const CFS_PERIOD: &str = "cpu.cfs_period_us";

/// Writes the differences. A failure does not prevent the other writes.
pub(super) fn all(cgroups: &Cgroups, wanted: &BTreeMap<String, Files>, how: Adjust) -> Adjusted {
    let page = page_size();
    let mut report = Adjusted::default();
    let mut changes = Vec::new();
    for (cgroup, files) in wanted {
        let (found, failed) = changed(cgroups, cgroup, files);
        changes.extend(found);
        report.failed.extend(failed);
    }
    order::sort(&mut changes);
    for change in changes.into_iter().filter(|change| how == Adjust::All || !order::tightens(change)) {
        match write(cgroups, &change, page) {
            Ok(()) => report.changed.push(change),
            Err(error) => report.failed.push(error),
        }
    }
    report
}

/// Sets a file, regardless of its content.
pub(super) fn one(cgroups: &Cgroups, cgroup: &str, file: &str, value: &str) -> Result<(), CgroupError> {
    let Some(dir) = dir_of(cgroups, cgroup, file, value)? else { return Ok(()) };
    let path = dir.join(file);
    if file == "memory.max" {
        refuse_to_kill(&dir, &path, value)?;
    }
    cgroups.store.keep(&cgroups.paths.relative(cgroup)?, file, value)?;
    store(&path, value)?;
    kept(&path, file, value, page_size())
}

/// Returns the differences of a cgroup from `files`, and the files that can't be compared. A removed cgroup
/// has no differences.
pub(super) fn changed(cgroups: &Cgroups, cgroup: &str, files: &Files) -> (Vec<Change>, Vec<CgroupError>) {
    let page = page_size();
    let (mut changes, mut failed) = (Vec::new(), Vec::new());
    let cfs = cfs_pair(files);
    let others =
        files.iter().filter(|(file, _)| cfs.is_none() || !matches!(file.as_str(), CFS_QUOTA | CFS_PERIOD));
    for (file, value) in others {
        match difference(cgroups, cgroup, file, value, page) {
            Ok(change) => changes.extend(change),
            Err(error) => failed.push(error),
        }
    }
    if let Some((quota, period)) = cfs {
        match cfs_difference(cgroups, cgroup, quota, period) {
            Ok(change) => changes.extend(change),
            Err(error) => failed.push(error),
        }
    }
    (changes, failed)
}

fn difference(
    cgroups: &Cgroups,
    cgroup: &str,
    file: &str,
    value: &str,
    page: u64,
) -> Result<Option<Change>, CgroupError> {
    if cgroups.held.defers(cgroup, file, value) {
        return Ok(None);
    }
    let Some(dir) = dir_of(cgroups, cgroup, file, value)? else { return Ok(None) };
    let from = match read(&dir.join(file)) {
        Err(error) if error.is_gone() && !dir.is_dir() => return Ok(None),
        read => read?,
    };
    if order::same(file, &from, value, page) {
        return Ok(None);
    }
    Ok(Some(Change { cgroup: cgroup.to_owned(), file: file.to_owned(), from, to: value.to_owned() }))
}

fn cfs_difference(
    cgroups: &Cgroups,
    cgroup: &str,
    quota: &str,
    period: &str,
) -> Result<Option<Change>, CgroupError> {
    if cgroups.held.defers(cgroup, CFS_QUOTA, quota) {
        return Ok(None);
    }
    let Some(dir) = dir_of(cgroups, cgroup, CFS_QUOTA, quota)? else { return Ok(None) };
    let from = match read(&dir.join(CFS_QUOTA)) {
        Err(error) if error.is_gone() && !dir.is_dir() => return Ok(None),
        read => as_cpu_max(&read?, &self::read(&dir.join(CFS_PERIOD))?),
    };
    let to = as_cpu_max(quota, period);
    if from == to {
        return Ok(None);
    }
    Ok(Some(Change { cgroup: cgroup.to_owned(), file: "cpu.max".to_owned(), from, to }))
}

fn cfs_pair(files: &Files) -> Option<(&str, &str)> {
    Some((files.get(CFS_QUOTA)?, files.get(CFS_PERIOD)?))
}

fn as_cpu_max(quota: &str, period: &str) -> String {
    format!("{} {period}", if quota == "-1" { "max" } else { quota })
}

/// Returns the directory of `file`; `None` if its controller is missing and `value` means no limit.
fn dir_of(cgroups: &Cgroups, cgroup: &str, file: &str, value: &str) -> Result<Option<PathBuf>, CgroupError> {
    checked_file(file).ok_or_else(|| CgroupError::Path(file.to_owned()))?;
    match cgroups.paths.hierarchy_of_file(file) {
        Some(hierarchy) => Ok(Some(hierarchy.mount.join(cgroups.paths.relative(cgroup)?))),
        None if matches!(value, "max" | "-1" | "0") => Ok(None),
        None => Err(CgroupError::NoHierarchy {
            cgroup: cgroup.to_owned(),
            file: file.to_owned(),
            value: value.to_owned(),
        }),
    }
}

fn write(cgroups: &Cgroups, change: &Change, page: u64) -> Result<(), CgroupError> {
    let Some(dir) = dir_of(cgroups, &change.cgroup, &change.file, &change.to)? else { return Ok(()) };
    if change.file == "cpu.max" && !dir.join("cpu.max").exists() {
        return write_cfs(&dir, &change.to);
    }
    let file = dir.join(&change.file);
    if change.file == "memory.max" {
        refuse_to_kill(&dir, &file, &change.to)?;
    }
    cgroups.store.keep(&cgroups.paths.relative(&change.cgroup)?, &change.file, &change.to)?;
    store(&file, &change.to)?;
    kept(&file, &change.file, &change.to, page)
}

/// Checks that the kernel kept the value.
fn kept(path: &Path, file: &str, value: &str, page: u64) -> Result<(), CgroupError> {
    let kept = read(path)?;
    if order::same(file, &kept, value, page) {
        return Ok(());
    }
    Err(CgroupError::Refused { file: path.to_owned(), wrote: value.to_owned(), kept })
}

/// Writes version 1's quota and period. After each write the share must fit into the parent's, so the quota
/// is removed before the period changes.
fn write_cfs(dir: &Path, value: &str) -> Result<(), CgroupError> {
    let (quota, period) = value.split_once(' ').unwrap_or((value, "100000"));
    let quota = if quota == "max" { "-1" } else { quota };
    let (quota_file, period_file) = (dir.join(CFS_QUOTA), dir.join(CFS_PERIOD));
    if read(&period_file)? != period {
        store(&quota_file, "-1")?;
        store(&period_file, period)?;
    }
    store(&quota_file, quota)?;
    let kept = as_cpu_max(&read(&quota_file)?, &read(&period_file)?);
    if kept == as_cpu_max(quota, period) {
        return Ok(());
    }
    Err(CgroupError::Refused { file: quota_file, wrote: value.to_owned(), kept })
}

/// Refuses a limit below the current usage, at which version 2's kernel would kill processes until the usage
/// fits (mm/memcontrol.c, `memory_max_write`).
fn refuse_to_kill(dir: &Path, file: &Path, limit: &str) -> Result<(), CgroupError> {
    let Some(limit) = order::bytes(limit) else { return Ok(()) };
    let used = read(&dir.join("memory.current"))?.parse().unwrap_or(0);
    if used <= limit {
        return Ok(());
    }
    Err(CgroupError::WouldKill { file: file.to_owned(), limit, used })
}

fn read(path: &Path) -> Result<String, CgroupError> {
    let text = fs::read_to_string(path).map_err(|error| CgroupError::io("read", path, error))?;
    Ok(text.trim().to_owned())
}

/// Writes a value in a single call, as the kernel requires. Never makes a file: a missing file belongs to no
/// cgroup.
fn store(path: &Path, value: &str) -> Result<(), CgroupError> {
    OpenOptions::new()
        .write(true)
        .truncate(true)
        .open(path)
        .and_then(|mut file| file.write_all(value.as_bytes()))
        .map_err(|error| CgroupError::io("write", path, error))
}

fn page_size() -> u64 {
    rustix::param::page_size() as u64
}
