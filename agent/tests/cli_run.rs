//! Tests of `beelet run` without a runtime: the configuration and its refusals.
#![allow(clippy::unwrap_used)] // a failure in a helper fails the test

use std::process::{Command, Output};

use assert_cmd::assert::OutputAssertExt;
use tempfile::TempDir;

fn check(config: &str) -> Output {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("beelet.yaml");
    std::fs::write(&file, config).unwrap();
    Command::new(env!("CARGO_BIN_EXE_beelet"))
        .args(["run", "--check", "--config"])
        .arg(&file)
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_configuration_is_checked_and_shown_with_its_defaults() {
    let config = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\npodPidsLimit: 7\nenableProfilingHandler: true\n";
    let output = check(config).assert().success().get_output().clone();
    let shown = text(&output.stdout);
    assert!(shown.contains("podPidsLimit: 7\n") && shown.contains("kind: BeeletConfiguration\n"), "{shown}");
    assert!(shown.contains("runtimeRequestTimeout: 2m0s\n"), "{shown}");
    let warned = text(&output.stderr);
    assert!(
        warned.starts_with("warning: ") && warned.contains(":4:25: enableProfilingHandler: has no effect"),
        "{warned}"
    );
    // The output is itself a configuration, with the same settings and without warnings.
    let again = check(&shown).assert().success().get_output().clone();
    assert_eq!((text(&again.stdout), text(&again.stderr)), (shown, String::new()));
}

#[test]
fn a_bad_configuration_is_refused_with_its_place() {
    let config =
        "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\npodPidsLimit: many\n";
    let output = check(config).assert().failure().code(2).get_output().clone();
    let error = text(&output.stderr);
    assert!(error.starts_with("error: ") && error.contains("beelet.yaml:3:15: podPidsLimit: "), "{error}");
}

#[test]
fn more_reserved_than_the_machine_has_is_refused_by_a_check() {
    let config = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\nsystemReserved: {memory: 900Ti}\n";
    let output = check(config).assert().failure().code(2).get_output().clone();
    let error = text(&output.stderr);
    assert!(error.starts_with("error: ") && error.contains("of memory are reserved"), "{error}");
}

#[test]
fn help_names_every_subcommand() {
    let output =
        Command::new(env!("CARGO_BIN_EXE_beelet")).arg("--help").assert().success().get_output().clone();
    for subcommand in ["run", "get", "plan", "doctor"] {
        assert!(text(&output.stdout).contains(&format!("\n  {subcommand} ")), "{subcommand}");
    }
}
