//! Tests that need a process of their own: one whose umask or mounts nobody else has.

use std::process::Command;

/// Says that the test runs in that process already.
const MARK: &str = "BEELET_TEST_AGAIN";

/// Runs the test `name` of `module` again, in a child that `wrapper` starts. True in that child.
pub fn in_child(module: &str, name: &str, wrapper: &[&str]) -> bool {
    if std::env::var_os(MARK).is_some() {
        return true;
    }
    let path = module.split_once("::").map_or(module, |(_, path)| path);
    let mut command = Command::new(wrapper[0]);
    command.args(&wrapper[1..]).arg(std::env::current_exe().unwrap());
    let ran =
        command.args([&format!("{path}::{name}"), "--exact", "--nocapture"]).env(MARK, "1").output().unwrap();
    let said = String::from_utf8_lossy(&ran.stdout);
    assert!(
        ran.status.success() && said.contains("1 passed"),
        "{said}{}",
        String::from_utf8_lossy(&ran.stderr)
    );
    false
}
