//! Runs tests that need their own process, e.g. for its umask or mounts.

use std::process::Command;

/// Environment variable that marks the child.
const MARK: &str = "BEELET_TEST_AGAIN";

/// Runs the test `name` of `module` again, in a child that `wrapper` starts. Returns true in that child.
pub fn in_child(module: &str, name: &str, wrapper: &[&str]) -> bool {
    if std::env::var_os(MARK).is_some() {
        return true;
    }
    let path = module.split_once("::").map_or(module, |(_, path)| path);
    let mut command = Command::new(wrapper[0]);
    command.args(&wrapper[1..]).arg(std::env::current_exe().unwrap());
    let ran =
        command.args([&format!("{path}::{name}"), "--exact", "--nocapture"]).env(MARK, "1").output().unwrap();
    let output = String::from_utf8_lossy(&ran.stdout);
    assert!(
        ran.status.success() && output.contains("1 passed"),
        "{output}{}",
        String::from_utf8_lossy(&ran.stderr)
    );
    false
}
