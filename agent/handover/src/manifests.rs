//! The age of static manifests.

use std::{
    collections::BTreeMap,
    fs::{self, Metadata},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

/// Maximum number of files.
const MOST: usize = 10_000;

/// Returns the times of the last change of each file of a folder, or of a single file, in nanoseconds since
/// the epoch. The change of a file's name, owner or mode counts: unlike the modification time, no program can
/// set this time. Blocks.
#[must_use]
pub fn manifest_changes(at: &Path) -> BTreeMap<PathBuf, i64> {
    let listed = fs::read_dir(at).into_iter().flatten().flatten().map(|entry| entry.path());
    let paths = listed.chain([at.to_owned()]).take(MOST);
    let changed = |path: PathBuf| {
        let metadata = fs::metadata(&path).ok().filter(Metadata::is_file)?;
        let time = metadata.ctime().saturating_mul(1_000_000_000).saturating_add(metadata.ctime_nsec());
        Some((path, time))
    };
    paths.filter_map(changed).collect()
}

#[cfg(test)]
mod tests {
    use std::time::{SystemTime, UNIX_EPOCH};

    use super::*;

    #[test]
    fn the_time_of_a_rename_counts_and_a_set_time_does_not() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("web.yaml");
        fs::write(dir.path().join("tmp"), "x").unwrap();
        fs::File::open(dir.path().join("tmp")).unwrap().set_modified(UNIX_EPOCH).unwrap();
        fs::rename(dir.path().join("tmp"), &file).unwrap();
        fs::create_dir(dir.path().join("folder")).unwrap();
        let found = manifest_changes(dir.path());
        assert_eq!(found.keys().collect::<Vec<_>>(), [&file]);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos();
        let hour = 3600 * 1_000_000_000;
        assert!(i128::from(found[&file]).abs_diff(i128::try_from(now).unwrap()) < hour, "{found:?}");
        assert_eq!(manifest_changes(&file), found);
        assert!(manifest_changes(&dir.path().join("none")).is_empty());
    }
}
