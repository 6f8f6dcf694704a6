//! Termination message of a container: the file at its `terminationMessagePath` or, if the file is empty and
//! the policy allows, the end of its log. The length is limited as in the kubelet, so that a container cannot
//! fill the pod's status.

use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use beelet_proto::cri;
use k8s_openapi::api::core::v1 as core;

use crate::{error::FileError, sandbox_files};
use beelet_base::own_file;
use beelet_model::disk::WritableFile;
use beelet_model::labels;

/// Most bytes of a message (`MaxContainerTerminationMessageLength`).
const MESSAGE_MAX: usize = 4096;
/// Most bytes of a log's end (`MaxContainerTerminationMessageLogLength`).
const LOG_MAX: usize = 2048;
/// Most lines of a log's end (`MaxContainerTerminationMessageLogLines`).
const LOG_LINES: usize = 80;

/// Creates the file for a container's next instance in the pod's folder. Blocks.
pub(super) fn prepare(
    folder: &Path,
    container: &core::Container,
    attempt: u32,
) -> Result<Option<cri::Mount>, FileError> {
    let Some(path) = container.termination_message_path.as_deref().filter(|path| !path.is_empty()) else {
        return Ok(None);
    };
    if sandbox_files::has_own(container, path) {
        return Ok(None);
    }
    let folder = folder.join(WritableFile::TerminationMessage.place(&container.name));
    beelet_base::folder::make_folder(&folder, beelet_base::folder::PRIVATE)?;
    forget_older(&folder, attempt);
    let file = folder.join(attempt.to_string());
    // Any user of the container may write to the file.
    let made = own_file::own(&file).and_then(|file| {
        file.set_len(0)?;
        own_file::permit(&file, 0o666)
    });
    if let Err(cause) = made {
        return Err(FileError::Write { path: file, cause });
    }
    Ok(Some(WritableFile::TerminationMessage.mount(&file, path, false)))
}

/// Removes the files of all instances but the previous one. Leaving a file behind is harmless.
fn forget_older(folder: &Path, attempt: u32) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let number = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok());
        if number.is_some_and(|number| number.saturating_add(1) < attempt) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

/// Returns the termination message of an ended container. Blocks.
pub(super) fn message(status: &cri::ContainerStatus) -> Option<String> {
    if status.state() != cri::ContainerState::ContainerExited {
        return None;
    }
    let mut text = file_of(status).and_then(|path| read_file(&path)).unwrap_or_default();
    let fallback =
        status.annotations.get(labels::TERMINATION_POLICY).is_some_and(|p| p == "FallbackToLogsOnError");
    if text.is_empty() && fallback && status.exit_code != 0 {
        text = beelet_logs::end_of(Path::new(&status.log_path), LOG_LINES, LOG_MAX).unwrap_or_default();
    }
    (!text.is_empty()).then_some(text)
}

/// Returns the path of the file on the node, from the mounts of the container.
fn file_of(status: &cri::ContainerStatus) -> Option<PathBuf> {
    let path = status.annotations.get(labels::TERMINATION_PATH).filter(|path| !path.is_empty())?;
    let mount = status.mounts.iter().find(|mount| mount.container_path == *path)?;
    Some(PathBuf::from(&mount.host_path))
}

/// Reads the end of a file that a container wrote: a stack trace has its cause at the end. Never follows
/// links, and reads only regular files.
fn read_file(path: &Path) -> Option<String> {
    let mut file = own_file::read(path).ok()?;
    let length = file.metadata().ok()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(MESSAGE_MAX as u64))).ok()?;
    let mut bytes = vec![0; MESSAGE_MAX];
    let mut length = 0;
    while length < bytes.len() {
        match file.read(&mut bytes[length..]).ok()? {
            0 => break,
            read => length += read,
        }
    }
    bytes.truncate(length);
    // Replacing invalid UTF-8 makes the text longer. The end of the text is kept.
    let text = String::from_utf8_lossy(&bytes);
    let mut start = text.len().saturating_sub(MESSAGE_MAX);
    while !text.is_char_boundary(start) {
        start += 1;
    }
    Some(text[start..].to_owned())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use serde_json::json;

    use super::*;

    fn container(more: serde_json::Value) -> core::Container {
        let mut value = json!({"name": "c", "terminationMessagePath": "/dev/termination-log"});
        value.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        serde_json::from_value(value).unwrap()
    }

    fn ended(mount: Option<cri::Mount>, log: &Path, policy: &str, exit_code: i32) -> cri::ContainerStatus {
        let annotations = [
            (labels::TERMINATION_PATH.to_owned(), "/dev/termination-log".to_owned()),
            (labels::TERMINATION_POLICY.to_owned(), policy.to_owned()),
        ];
        cri::ContainerStatus {
            state: cri::ContainerState::ContainerExited.into(),
            mounts: mount.into_iter().collect(),
            annotations: annotations.into(),
            log_path: log.to_string_lossy().into_owned(),
            exit_code,
            ..Default::default()
        }
    }

    #[test]
    fn the_file_is_writable_for_all_and_older_files_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        for attempt in 0..3 {
            prepare(dir.path(), &container(json!({})), attempt).unwrap().unwrap();
        }
        let mut left: Vec<_> = std::fs::read_dir(dir.path().join("containers/c"))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        left.sort();
        assert_eq!(left, ["1", "2"]);
        let mode = std::fs::metadata(dir.path().join("containers/c/2")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o666);
        let own = json!({"volumeMounts": [{"name": "v", "mountPath": "/dev/termination-log"}]});
        for without in [own, json!({"terminationMessagePath": ""})] {
            assert_eq!(prepare(dir.path(), &container(without), 3).unwrap(), None);
        }
    }

    #[test]
    fn messages_come_from_the_file_and_are_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let mount = prepare(dir.path(), &container(json!({})), 0).unwrap();
        let file = mount.as_ref().unwrap().host_path.clone();
        let read = || message(&ended(mount.clone(), Path::new("/none"), "File", 1));
        assert_eq!(read(), None);
        std::fs::write(&file, "out of cheese").unwrap();
        assert_eq!(read().as_deref(), Some("out of cheese"));
        std::fs::write(&file, "é".repeat(4000) + "the cause").unwrap();
        let end = read().unwrap();
        assert!(end.len() <= MESSAGE_MAX && end.ends_with("the cause"), "{end}");
        std::fs::remove_file(&file).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", &file).unwrap();
        assert_eq!(read(), None);
        assert_eq!(
            message(&cri::ContainerStatus { state: 1, ..ended(None, Path::new("/n"), "File", 1) }),
            None
        );
    }

    #[test]
    fn the_end_of_the_log_replaces_an_empty_message_of_a_failed_container() {
        let dir = tempfile::tempdir().unwrap();
        let mount = prepare(dir.path(), &container(json!({})), 0).unwrap();
        let log = dir.path().join("0.log");
        let lines: String =
            (0..200).map(|i| format!("2026-11-21T19:00:00.000000001Z stderr F line {i}\n")).collect();
        std::fs::write(&log, lines).unwrap();
        let read = |policy: &str, code| message(&ended(mount.clone(), &log, policy, code));
        assert_eq!(read("File", 1), None);
        assert_eq!(read("FallbackToLogsOnError", 0), None);
        let text = read("FallbackToLogsOnError", 1).unwrap();
        assert_eq!(text.lines().count(), LOG_LINES);
        assert!(text.starts_with("line 120\n") && text.ends_with("line 199\n"), "{text}");
        std::fs::write(&mount.as_ref().unwrap().host_path, "written").unwrap();
        assert_eq!(read("FallbackToLogsOnError", 1).as_deref(), Some("written"));
    }
}
