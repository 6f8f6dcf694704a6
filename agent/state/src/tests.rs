use std::collections::BTreeMap;

use proptest::prelude::*;
use tempfile::TempDir;

use super::*;

type Record = BTreeMap<String, u64>;

fn open(dir: &TempDir) -> State {
    State::open(dir.path()).unwrap()
}

fn sample() -> Record {
    [("one".to_owned(), 1), ("two".to_owned(), 2)].into()
}

fn names(dir: &TempDir) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[track_caller]
fn quarantined(loaded: Loaded<Record>) -> (PathBuf, Damage) {
    match loaded {
        Loaded::Quarantined { moved_to, reason } => (moved_to, reason),
        other => panic!("not quarantined: {other:?}"),
    }
}

#[test]
fn what_is_stored_is_loaded_and_replaced_as_a_whole() {
    let dir = TempDir::new().unwrap();
    let state = open(&dir);
    assert_eq!(state.load::<Record>("pods").unwrap(), Loaded::Absent);
    state.store("pods", &sample()).unwrap();
    assert_eq!(state.load("pods").unwrap(), Loaded::Value { value: sample(), same_boot: true });
    state.store("pods", &Record::new()).unwrap();
    assert_eq!(state.load("pods").unwrap(), Loaded::Value { value: Record::new(), same_boot: true });
    state.remove("pods").unwrap();
    state.remove("pods").unwrap();
    assert_eq!(state.load::<Record>("pods").unwrap(), Loaded::Absent);
}

#[test]
fn a_record_of_an_earlier_boot_says_so() {
    let dir = TempDir::new().unwrap();
    State::open_in_boot(dir.path(), "an earlier one").unwrap().store("pods", &sample()).unwrap();
    let loaded = open(&dir).load("pods").unwrap();
    assert_eq!(loaded, Loaded::Value { value: sample(), same_boot: false });
}

#[test]
fn a_record_of_another_form_or_name_is_set_aside() {
    let dir = TempDir::new().unwrap();
    let state = open(&dir);
    state.store("pods", &["a", "list"]).unwrap();
    let (moved_to, reason) = quarantined(state.load("pods").unwrap());
    assert!(matches!(reason, Damage::Form(_)), "{reason}");
    assert!(moved_to.exists());
    assert_eq!(state.load::<Record>("pods").unwrap(), Loaded::Absent);

    state.store("images", &sample()).unwrap();
    fs::rename(dir.path().join("images.json"), dir.path().join("pods.json")).unwrap();
    let (_, reason) = quarantined(state.load("pods").unwrap());
    assert!(reason == Damage::OtherRecord("images".to_owned()), "{reason}");
}

#[test]
fn only_the_last_few_bad_records_are_kept() {
    let dir = TempDir::new().unwrap();
    let state = open(&dir);
    let mut last = PathBuf::new();
    for _ in 0..MAX_QUARANTINED + 3 {
        fs::write(dir.path().join("pods.json"), "rubbish").unwrap();
        last = quarantined(state.load("pods").unwrap()).0;
    }
    assert_eq!(names(&dir).iter().filter(|name| name.contains("corrupt")).count(), MAX_QUARANTINED);
    assert!(last.exists());
}

#[test]
fn leftovers_of_a_killed_writer_are_removed() {
    let dir = TempDir::new().unwrap();
    open(&dir).store("pods", &sample()).unwrap();
    fs::write(dir.path().join("pods.tmp"), "half a rec").unwrap();
    let state = open(&dir);
    assert_eq!(names(&dir), ["lock", "pods.json"]);
    assert_eq!(state.load("pods").unwrap(), Loaded::Value { value: sample(), same_boot: true });
}

#[test]
fn a_second_instance_is_refused_and_told_who_has_the_folder() {
    let dir = TempDir::new().unwrap();
    let first = open(&dir);
    let error = State::open(dir.path()).unwrap_err().to_string();
    assert!(error.contains(&format!("process {}", std::process::id())), "{error}");
    assert!(error.contains("is in use by another beelet"), "{error}");
    drop(first);
    assert_eq!(names(&dir), Vec::<String>::new(), "nothing is left of the lock");
    open(&dir);
}

#[test]
fn the_holder_of_a_lock_is_named_by_the_kernel_whatever_the_file_says() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("lock");
    let _held = Lock::acquire(&path, "a test").unwrap();
    // Between the taking and the writing, the file names the holder before: here a process id that no process
    // can have.
    for text in ["4194305\n", "", "no number"] {
        fs::write(&path, text).unwrap();
        let error = Lock::acquire(&path, "a test").unwrap_err().to_string();
        assert!(error.contains(&format!("process {}", std::process::id())), "{error}");
    }
}

#[test]
fn of_many_that_want_the_lock_one_has_it_at_a_time() {
    use std::sync::atomic::{AtomicUsize, Ordering};
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("lock");
    let (holders, taken) = (AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while taken.load(Ordering::SeqCst) < 2_000 {
                    let Ok(lock) = Lock::acquire(&path, "a test") else { continue };
                    assert_eq!(holders.fetch_add(1, Ordering::SeqCst), 0, "two hold the lock");
                    taken.fetch_add(1, Ordering::SeqCst);
                    holders.fetch_sub(1, Ordering::SeqCst);
                    drop(lock);
                }
            });
        }
    });
}

#[test]
fn names_that_are_no_file_names_are_refused() {
    let dir = TempDir::new().unwrap();
    let state = open(&dir);
    for name in ["", "../x", "a/b", "A", "a.b", &"x".repeat(65)] {
        assert!(matches!(state.store(name, &1), Err(StateError::Name(_))), "{name}");
    }
}

#[test]
fn the_folder_and_its_records_are_for_their_owner_only() {
    use std::os::unix::fs::PermissionsExt;
    let parent = TempDir::new().unwrap();
    let dir = parent.path().join("a/b");
    let state = State::open(&dir).unwrap();
    state.store("pods", &sample()).unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&dir), 0o700);
    assert_eq!(mode(&dir.join("pods.json")), 0o600);
}

/// Any damage to a record's bytes is seen; none makes it panic.
fn damage(change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = encode("pods", "boot", &json_text(&sample()).unwrap());
    let whole = bytes.clone();
    change(&mut bytes);
    match decode::<Record>("pods", &bytes) {
        Ok((value, boot)) => {
            assert_eq!(bytes, whole, "damage went unseen");
            assert_eq!((value, boot.as_str()), (sample(), "boot"));
        }
        Err(_) => assert!(bytes != whole),
    }
}

#[test]
fn truncation_at_any_byte_is_seen() {
    let length = encode("pods", "boot", &json_text(&sample()).unwrap()).len();
    (0..=length).for_each(|at| damage(|bytes| bytes.truncate(at)));
}

proptest! {
    #[test]
    fn a_change_of_any_byte_is_seen(at in any::<prop::sample::Index>(), to in any::<u8>()) {
        damage(|bytes| {
            let at = at.index(bytes.len());
            bytes[at] = to;
        });
    }

    #[test]
    fn anything_at_all_can_be_in_the_file(content in prop::collection::vec(any::<u8>(), 0..300)) {
        let dir = TempDir::new().unwrap();
        let state = open(&dir);
        fs::write(dir.path().join("pods.json"), &content).unwrap();
        let (moved_to, _) = quarantined(state.load("pods").unwrap());
        prop_assert_eq!(fs::read(moved_to).unwrap(), content);
    }
}
