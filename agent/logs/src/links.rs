//! `/var/log/containers`: a link per container to its log, where log shippers find a kubelet's containers.
//!
//! Names are the kubelet's (`logSymlink` of `pkg/kubelet/kuberuntime`). This module never reads a log, and
//! removes only links into the pods' logs.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsStr,
    io,
    os::fd::OwnedFd,
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use beelet_base::work::Work;
use beelet_base::{
    blocking::blocking,
    folder::{READABLE, make_folder},
};
use beelet_model::table::PodTable;
use k8s_openapi::api::core::v1 as core;
use rustix::{
    fs::{AtFlags, Dir, Mode, OFlags, readlinkat, symlinkat, unlinkat},
    io::Errno,
};
use tokio::{sync::watch, time::sleep};
use tokio_util::sync::CancellationToken;
use tracing::warn;

/// Changes within this time are applied together.
const TOGETHER: Duration = Duration::from_millis(500);
/// Maximum length of a file name (ext4).
const NAME: usize = 255;
const SUFFIX: &str = ".log";

/// Maintains the links until `stop`.
pub fn follow(
    mut table: watch::Receiver<Arc<PodTable>>,
    folder: PathBuf,
    pod_logs_dir: PathBuf,
    stop: CancellationToken,
) -> Work {
    Box::pin(async move {
        let mut known = BTreeMap::new();
        let mut failing = false;
        let work = async {
            loop {
                let wanted = links(&table.borrow_and_update(), &pod_logs_dir);
                if wanted != known {
                    let (at, logs, links) = (folder.clone(), pod_logs_dir.clone(), wanted.clone());
                    match blocking("links to logs", move || apply(&at, &logs, &links)).await {
                        Ok(()) => (known, failing) = (wanted, false),
                        Err(error) if !failing => {
                            warn!(folder = %folder.display(), "cannot keep links to containers' logs: {error}");
                            failing = true;
                        }
                        Err(_) => {}
                    }
                }
                if table.changed().await.is_err() {
                    std::future::pending::<()>().await;
                }
                sleep(TOGETHER).await;
            }
        };
        stop.run_until_cancelled(work).await;
    })
}

/// Returns the desired links by name, with their targets.
fn links(table: &PodTable, pod_logs_dir: &Path) -> BTreeMap<String, PathBuf> {
    let mut links = BTreeMap::new();
    for (name, entry) in &table.pods {
        let Some(status) = &entry.pod.status else { continue };
        let uid = entry.pod.metadata.uid.as_deref().unwrap_or_default();
        let folder = pod_logs_dir.join(format!("{}_{}_{uid}", name.namespace, name.name));
        let of = [
            &status.init_container_statuses,
            &status.container_statuses,
            &status.ephemeral_container_statuses,
        ];
        for container in of.into_iter().flatten().flatten() {
            for (id, attempt) in instances(container) {
                let link = format!("{}_{}_{}-{id}", name.name, name.namespace, container.name);
                let link: String = link.chars().take(NAME - SUFFIX.len()).collect();
                let log = folder.join(&container.name).join(format!("{attempt}.log"));
                links.insert(format!("{link}{SUFFIX}"), log);
            }
        }
    }
    links
}

/// Returns the instances of a container whose logs may still exist: the current and the previous one.
fn instances(status: &core::ContainerStatus) -> impl Iterator<Item = (&str, i32)> {
    let terminated = status.last_state.as_ref().and_then(|state| state.terminated.as_ref());
    let before = terminated.and_then(|terminated| terminated.container_id.as_deref());
    let now = status.container_id.as_deref().map(|id| (id, status.restart_count));
    let before = before.map(|id| (id, status.restart_count.saturating_sub(1)));
    now.into_iter().chain(before).filter_map(|(id, attempt)| {
        let (_, id) = id.split_once("://")?;
        let plain = id.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_');
        (plain && !id.is_empty() && attempt >= 0).then_some((id, attempt))
    })
}

/// Creates missing links and removes stale links into the pods' logs. Blocking.
///
/// All steps use the one opened directory: a container that may write to the machine's logs can replace the
/// directory by a link to another one.
fn apply(folder: &Path, pod_logs_dir: &Path, wanted: &BTreeMap<String, PathBuf>) -> io::Result<()> {
    let folder = open(folder)?;
    let mut there = BTreeSet::new();
    for entry in Dir::read_from(&folder)? {
        let entry = entry?;
        let name = entry.file_name();
        let Ok(target) = readlinkat(&folder, name, Vec::new()) else { continue };
        let target = Path::new(OsStr::from_bytes(target.as_bytes()));
        let as_wanted = name.to_str().is_ok_and(|name| wanted.get(name).is_some_and(|path| path == target));
        if as_wanted {
            there.insert(name.to_string_lossy().into_owned());
        } else if target.starts_with(pod_logs_dir) {
            unlinkat(&folder, name, AtFlags::empty())?;
        }
    }
    for (name, target) in wanted.iter().filter(|(name, _)| !there.contains(*name)) {
        match symlinkat(target, &folder, name) {
            Err(error) if error != Errno::EXIST => return Err(error.into()),
            _ => {}
        }
    }
    Ok(())
}

/// Opens the directory, creates it if missing, and never follows a link in its place.
fn open(folder: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let open = || rustix::fs::open(folder, flags, Mode::empty());
    let opened = match open() {
        Err(Errno::NOENT) => {
            make_folder(folder, READABLE).map_err(io::Error::other)?;
            open()
        }
        opened => opened,
    };
    opened.map_err(|error| match error {
        Errno::LOOP | Errno::NOTDIR => {
            io::Error::other(format!("{} is a link or not a directory: remove it", folder.display()))
        }
        other => other.into(),
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::json;

    use super::*;
    use beelet_model::table::{PodEntry, PodName};

    fn table(statuses: &serde_json::Value) -> PodTable {
        let pod = serde_json::from_value(json!({
            "metadata": { "namespace": "shop", "name": "web", "uid": "u-1" },
            "status": { "containerStatuses": statuses },
        }));
        let entry = PodEntry::of(pod.unwrap());
        let mut table = PodTable::default();
        table.pods.insert(PodName::of(&entry.pod), Arc::new(entry));
        table
    }

    fn status(id: &str, restarts: i32) -> serde_json::Value {
        json!({ "name": "app", "containerID": id, "restartCount": restarts, "ready": true, "image": "", "imageID": "" })
    }

    #[test]
    fn a_container_has_a_link_to_its_log_and_to_the_one_before() {
        let mut running = status("containerd://abc", 3);
        running["lastState"] = json!({ "terminated": { "exitCode": 1, "containerID": "containerd://aaa" } });
        let links = links(&table(&json!([running])), Path::new("/logs"));
        let expected = [
            ("web_shop_app-aaa.log", "/logs/shop_web_u-1/app/2.log"),
            ("web_shop_app-abc.log", "/logs/shop_web_u-1/app/3.log"),
        ];
        let expected = expected.map(|(name, target)| (name.to_owned(), PathBuf::from(target)));
        assert_eq!(links, BTreeMap::from(expected));
    }

    #[test]
    fn ids_that_are_no_ids_make_no_links() {
        for id in ["containerd://", "containerd://../x", "abc", "containerd://a b"] {
            assert!(links(&table(&json!([status(id, 0)])), Path::new("/logs")).is_empty(), "{id}");
        }
        let long = format!("containerd://{}", "a".repeat(400));
        let links = links(&table(&json!([status(&long, 0)])), Path::new("/logs"));
        assert_eq!(links.keys().next().unwrap().len(), NAME);
    }

    #[test]
    fn links_that_nobody_wants_go_and_other_files_stay() {
        let dir = tempfile::tempdir().unwrap();
        let (folder, logs) = (dir.path().join("containers"), dir.path().join("pods"));
        let one = BTreeMap::from([("a.log".to_owned(), logs.join("a/0.log"))]);
        apply(&folder, &logs, &one).unwrap();
        apply(&folder, &logs, &one).unwrap();
        assert_eq!(fs::read_link(folder.join("a.log")).unwrap(), logs.join("a/0.log"));
        std::os::unix::fs::symlink("/elsewhere", folder.join("other")).unwrap();
        fs::write(folder.join("file"), "").unwrap();
        apply(&folder, &logs, &BTreeMap::new()).unwrap();
        let mut left: Vec<_> =
            fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["file", "other"]);
    }

    #[test]
    fn a_link_in_place_of_the_folder_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let (folder, logs) = (dir.path().join("containers"), dir.path().join("pods"));
        let elsewhere = dir.path().join("logrotate.d");
        fs::create_dir(&elsewhere).unwrap();
        std::os::unix::fs::symlink(&elsewhere, &folder).unwrap();
        let one = BTreeMap::from([("a.log".to_owned(), logs.join("a/0.log"))]);
        let refused = apply(&folder, &logs, &one).unwrap_err().to_string();
        assert!(refused.ends_with("containers is a link or not a directory: remove it"), "{refused}");
        assert_eq!(fs::read_dir(&elsewhere).unwrap().count(), 0);
    }
}
