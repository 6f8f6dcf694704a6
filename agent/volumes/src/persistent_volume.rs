//! The name of a PersistentVolume as a part of paths, and the mount options of a PersistentVolume.

use std::path::{Component, Path};

use beelet_model::storage::Claimed;

use crate::error::Error;

/// Checks that a name from a server is a single part of a path.
///
/// # Errors
/// The name is empty or leads to another folder.
pub(crate) fn one_name(name: &str) -> Result<&str, Error> {
    let mut parts = Path::new(name).components();
    match (parts.next(), parts.next()) {
        (Some(Component::Normal(only)), None) if only == name => Ok(name),
        _ => Err(Error::unmet(format!("{name:?} is not the name of a PersistentVolume"))),
    }
}

/// Returns the mount options of a PersistentVolume.
pub(crate) fn options_of(claimed: &Claimed) -> Vec<String> {
    let spec = claimed.volume.spec.as_ref();
    spec.and_then(|spec| spec.mount_options.clone()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_servers_name_is_one_part_of_a_path() {
        let check = |name: &str, expected: bool| assert_eq!(one_name(name).is_ok(), expected, "{name:?}");
        check("pv-1", true);
        check("pvc-7c9b2f6e.x", true);
        check("", false);
        check(".", false);
        check("..", false);
        check("a/b", false);
        check("a/", false);
        check("/a", false);
    }
}
