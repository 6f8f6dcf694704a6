//! Test of durable state on a full disk.
#![allow(clippy::unwrap_used)] // a failure in a helper fails the test

use beelet_state::{Loaded, State, StateError};
use beelet_tests::guards::Mount;
use beelet_tests::require;

#[test]
fn a_full_disk_is_reported_and_the_former_record_stays() {
    require!(root);
    let dir = tempfile::TempDir::new().unwrap();
    let disk = Mount::tmpfs(&dir.path().join("disk"), 64 << 10).unwrap();
    let state = State::open(disk.path()).unwrap();
    let small = vec![7u8; 10];
    state.store("pods", &small).unwrap();

    let error = state.store("pods", &vec![7u8; 100_000]).unwrap_err();
    assert!(matches!(error, StateError::NoSpace(_)), "{error}");
    assert!(error.to_string().contains("no space left"), "{error}");
    assert_eq!(state.load("pods").unwrap(), Loaded::Value { value: small.clone(), same_boot: true });

    // The failed attempt leaves no file that would take the space of the next one.
    state.store("others", &vec![1u8; 1000]).unwrap();
    assert_eq!(state.load("pods").unwrap(), Loaded::Value { value: small, same_boot: true });
}
