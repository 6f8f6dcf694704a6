//! Checks pages of documentation that are generated from the code.

use std::path::Path;

/// Checks that the page at `path`, from the repository's root, has the `current` text. With `BEELET_BLESS`
/// writes that text first: `command` is the command that does so, for the message.
///
/// # Panics
/// The page is outdated, or cannot be written.
pub fn check(path: &str, current: &str, command: &str) {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path);
    if std::env::var_os("BEELET_BLESS").is_some() {
        std::fs::write(&file, current).unwrap();
    }
    let written = std::fs::read_to_string(&file).unwrap_or_default();
    let new: Vec<&str> = current.lines().filter(|line| !written.contains(line)).collect();
    let old: Vec<&str> = written.lines().filter(|line| !current.contains(line)).collect();
    assert!(
        current == written,
        "{path} is outdated; run `BEELET_BLESS=1 {command}`\nmissing: {new:#?}\nold: {old:#?}"
    );
}
