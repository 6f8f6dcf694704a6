use std::fs;
use std::io::Read;
use std::os::unix::fs::symlink;

use super::*;

/// Returns the log `0.log` in a directory.
fn log(dir: &Path) -> Log {
    Log::open(dir.parent().unwrap(), &dir.join("0.log")).unwrap()
}

/// Performs all steps of a rotation and returns the new name of the log.
fn whole_round(log: &Log, max_files: usize) -> OsString {
    log.clean().unwrap();
    let moved = log.make_room(max_files).unwrap().unwrap();
    log.compress_older().unwrap();
    moved
}

#[test]
fn names_go_up_however_fast_a_container_writes_and_the_clock_is_set() {
    let dir = tempfile::tempdir().unwrap();
    let log = log(dir.path());
    let now: Timestamp = "2026-11-21T19:00:00Z".parse().unwrap();
    let check = |old: &[&str], expected: &str| {
        let old: Vec<OsString> = old.iter().map(|time| format!("0.log.{time}").into()).collect();
        assert_eq!(log.next_name(&old, now).to_str(), Some(&*format!("0.log.{expected}")), "{old:?}");
    };
    check(&[], "20261121-190000");
    check(&["20261121-185959.gz"], "20261121-190000");
    check(&["20261121-190000"], "20261121-190001");
    check(&["20261121-190000.gz", "20261121-195959"], "20261121-200000");
    // The name of this file does not come from a clock.
    check(&["99991231-235959", "20991231-235959", "x"], "20261121-190000");
    // A second rotation immediately after the first loses no file.
    for text in ["one", "two", "three"] {
        fs::write(dir.path().join("0.log"), text).unwrap();
        whole_round(&log, 9);
    }
    let text = |path: &PathBuf| {
        let mut text = String::new();
        let file = File::open(path).unwrap();
        let read = if is_compressed(path.as_os_str()) {
            flate2::read::GzDecoder::new(file).read_to_string(&mut text)
        } else {
            (&file).read_to_string(&mut text)
        };
        read.map(|_| text).unwrap()
    };
    let all = rotated(&dir.path().join("0.log")).unwrap();
    assert_eq!(all.iter().map(text).collect::<Vec<_>>(), ["one", "two", "three"]);
}

#[tokio::test]
async fn logs_are_compressed_one_after_the_other_and_each_once() {
    let dir = tempfile::tempdir().unwrap();
    let logs = dir.path().to_owned();
    let mut compressing = Compressing::default();
    let folder = |number: u32| logs.join(format!("pod/c{number}"));
    for number in 0..3 {
        fs::create_dir_all(folder(number)).unwrap();
        for second in 0..2 {
            fs::write(folder(number).join(format!("0.log.20260101-00000{second}")), "x").unwrap();
        }
        compressing.add(logs.clone(), folder(number).join("0.log"));
        compressing.add(logs.clone(), folder(number).join("0.log"));
    }
    assert!(compressing.is_at(&folder(0).join("0.log")));
    // The first log's compression has begun before the log is queued again.
    for number in [0, 0, 1, 2] {
        let (log, done) = tokio::time::timeout(Duration::from_secs(60), compressing.next()).await.unwrap();
        done.unwrap();
        assert_eq!(log, folder(number).join("0.log"));
        assert_eq!(names(&folder(number)), ["0.log.20260101-000000.gz", "0.log.20260101-000001"]);
    }
    assert!(compressing.current.is_none());
}

#[test]
fn a_file_with_holes_is_no_log() {
    let dir = tempfile::tempdir().unwrap();
    let hole = dir.path().join("0.log.20260101-000000");
    fs::write(&hole, "text").unwrap();
    fs::OpenOptions::new().write(true).open(&hole).unwrap().set_len(4 << 40).unwrap();
    fs::write(dir.path().join("0.log.20260101-000001"), "").unwrap();
    fs::write(dir.path().join("0.log"), "now").unwrap();
    whole_round(&log(dir.path()), 5);
    assert!(!hole.exists());
    let left = names(dir.path());
    assert_eq!((left.len(), left[0].as_str()), (2, "0.log.20260101-000001.gz"));
}

#[test]
fn links_that_a_pod_puts_among_the_logs_lead_nowhere() {
    let dir = tempfile::tempdir().unwrap();
    let (logs, outside) = (dir.path().join("logs"), dir.path().join("outside"));
    let folder = logs.join("pod/c");
    fs::create_dir_all(&folder).unwrap();
    fs::create_dir(&outside).unwrap();
    let (secret, victim) = (outside.join("secret"), outside.join("victim"));
    fs::write(&secret, "secret").unwrap();
    fs::write(&victim, "kept").unwrap();
    fs::write(folder.join("0.log"), "now").unwrap();
    fs::write(folder.join("0.log.20260101-000001"), "old").unwrap();
    symlink(&secret, folder.join("0.log.20260101-000000")).unwrap();
    symlink(&victim, folder.join("0.log.20260101-000001.tmp")).unwrap();
    let log = Log::open(&logs, &folder.join("0.log")).unwrap();
    whole_round(&log, 5);
    let left = names(&folder);
    assert_eq!((left.len(), left[0].as_str()), (2, "0.log.20260101-000001.gz"));
    assert_eq!(fs::read_to_string(&victim).unwrap(), "kept");
    // A link to a directory elsewhere is rejected, too.
    fs::rename(&folder, logs.join("pod/was")).unwrap();
    symlink(&outside, &folder).unwrap();
    assert!(Log::open(&logs, &folder.join("0.log")).is_err());
    fs::write(outside.join("0.log"), "").unwrap();
    forget_older(&folder, 5);
    assert!(outside.join("0.log").exists());
}

#[test]
fn folders_that_a_pod_puts_among_the_logs_go() {
    let dir = tempfile::tempdir().unwrap();
    let ends = ["-000000", "-000001.gz", "-000002", "-000002.tmp", "-000003.gz.tmp"];
    for end in ends {
        fs::create_dir_all(dir.path().join(format!("0.log.20260101{end}/in/deep"))).unwrap();
    }
    fs::write(dir.path().join("0.log.20260101-000004"), "old").unwrap();
    fs::create_dir(dir.path().join("0.log.20260101-000004.tmp")).unwrap();
    fs::write(dir.path().join("0.log"), "now").unwrap();
    whole_round(&log(dir.path()), 5);
    let left = names(dir.path());
    let (kept, folder) = ("0.log.20260101-000004.gz", "0.log.20260101-000001.gz");
    assert!(left.iter().any(|name| name == kept), "{left:?}");
    assert!(left.iter().all(|name| !dir.path().join(name).is_dir() || name == folder), "{left:?}");
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn the_oldest_go_the_others_are_compressed_and_the_log_gets_another_name() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("0.log");
    for name in [
        "0.log.20260101-000001",
        "0.log.20260101-000002",
        "0.log.20260101-000003.gz",
        "0.log.20260101-000004",
        "1.log",
        "0.log.20260101-000009.tmp",
    ] {
        fs::write(dir.path().join(name), name).unwrap();
    }
    fs::write(&log, "now").unwrap();
    let moved = dir.path().join(whole_round(&self::log(dir.path()), 4));
    let left = names(dir.path());
    assert_eq!(left[..2], ["0.log.20260101-000003.gz", "0.log.20260101-000004.gz"]);
    assert_eq!(left[3..], ["1.log"]);
    assert_eq!(fs::read_to_string(&moved).unwrap(), "now");
    assert_eq!(dir.path().join(&left[2]), moved);
    let mut text = String::new();
    let file = File::open(dir.path().join(&left[1])).unwrap();
    flate2::read::GzDecoder::new(file).read_to_string(&mut text).unwrap();
    assert_eq!(text, "0.log.20260101-000004");
}

#[test]
fn with_two_files_only_the_last_rotated_one_stays() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("0.log");
    fs::write(dir.path().join("0.log.20260101-000001"), "").unwrap();
    fs::write(&log, "").unwrap();
    self::log(dir.path()).make_room(2).unwrap();
    assert_eq!(names(dir.path()).len(), 1);
}

#[test]
fn a_compression_that_was_cut_short_is_done_again() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["0.log.20260101-000001", "0.log.20260101-000001.gz"] {
        fs::write(dir.path().join(name), "").unwrap();
    }
    let found = rotated(&dir.path().join("0.log")).unwrap();
    assert_eq!(found, [dir.path().join("0.log.20260101-000001.gz")]);
}

#[test]
fn a_log_is_due_by_its_size_or_when_it_lost_its_name() {
    let dir = tempfile::tempdir().unwrap();
    let (log, path) = (log(dir.path()), dir.path().join("0.log"));
    assert!(!log.is_due(10), "never created");
    fs::write(&path, [0; 10]).unwrap();
    assert!(!log.is_due(10));
    fs::write(&path, [0; 11]).unwrap();
    assert!(log.is_due(10));
    fs::rename(&path, dir.path().join("0.log.20260101-000001")).unwrap();
    assert!(log.is_due(10), "renamed without a reopen request");
}

#[test]
fn logs_of_older_instances_go() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["0.log", "0.log.20260101-000001.gz", "1.log", "2.log", "other"] {
        fs::write(dir.path().join(name), "").unwrap();
    }
    forget_older(dir.path(), 2);
    assert_eq!(names(dir.path()), ["1.log", "2.log", "other"]);
}
