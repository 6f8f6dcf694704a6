//! Bounds of the content that the agent itself creates in a pod's volumes: the files of ConfigMaps, Secrets,
//! the downward API and projections, their parent folders, and the mount points of other volumes. Most of it
//! is memory of the node that no limit of the pod counts, and a pod of 1.5 MB can request a huge amount: by
//! deep paths, and by naming one object many times.

/// Maximum number of files and folders for one pod.
pub const NAMES: usize = 20_000;
/// Maximum bytes of files for one pod. An object of the API has at most 1.5 MiB.
pub const BYTES: usize = 64 << 20;
/// Maximum length of a path in a volume, in bytes (Linux's `PATH_MAX`).
pub const PATH: usize = 4096;
/// Names that a volume needs without any file: its folder, its set of files, and the link to that.
const VOLUME: usize = 3;
/// Maximum bytes of a path in a message.
const SHOWN: usize = 64;

/// The remaining allowance of one pod.
#[derive(Clone, Debug)]
pub struct Allowance {
    names: usize,
    bytes: usize,
}

impl Default for Allowance {
    fn default() -> Self {
        Self { names: NAMES, bytes: BYTES }
    }
}

/// A reason why the agent refuses to create a pod's content. The message is a sentence.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TooMuch {
    /// The path is longer than Linux allows.
    #[error(
        "the path {start:?}… of {length} bytes is longer than the {PATH} bytes that Linux allows; \
         shorten it"
    )]
    Path {
        /// Beginning of the path.
        start: String,
        /// Length of the path, in bytes.
        length: usize,
    },
    /// The volumes need too many files and folders.
    #[error(
        "the pod's volumes need more than {NAMES} files and folders, the agent's maximum; use fewer items, \
         or shorter paths"
    )]
    Names,
    /// The files have too many bytes.
    #[error(
        "the pod's ConfigMaps, Secrets and other objects take more than {BYTES} bytes in its volumes, the agent's \
         maximum; use fewer items"
    )]
    Bytes,
}

impl Allowance {
    /// Subtracts the names that any volume needs.
    ///
    /// # Errors
    /// The pod's volumes need too many.
    pub fn volume(&mut self) -> Result<(), TooMuch> {
        self.subtract(VOLUME)
    }

    /// Subtracts a file of this many bytes. [`Self::folders`] subtracts its folders.
    ///
    /// # Errors
    /// There are too many files, or too many bytes in them.
    pub fn file(&mut self, bytes: usize) -> Result<(), TooMuch> {
        self.subtract(1)?;
        self.bytes = self.bytes.checked_sub(bytes).ok_or(TooMuch::Bytes)?;
        Ok(())
    }

    /// Subtracts the parent folders of these files, each once. The paths are sorted by their bytes, so that
    /// paths in one folder are adjacent.
    ///
    /// # Errors
    /// A path is too long, or there are too many folders.
    pub fn folders<'p>(&mut self, sorted: impl IntoIterator<Item = &'p str>) -> Result<(), TooMuch> {
        let mut before = "";
        for path in sorted {
            check_path(path)?;
            let known = folders_of(before).zip(folders_of(path)).take_while(|(one, two)| one == two).count();
            self.subtract(folders_of(path).count().saturating_sub(known))?;
            before = path;
        }
        Ok(())
    }

    /// Subtracts all parts of a path: those of mount points and of `subPath` are folders.
    ///
    /// # Errors
    /// The path is too long, or has too many parts.
    pub fn path(&mut self, path: &str) -> Result<(), TooMuch> {
        check_path(path)?;
        self.subtract(path.split('/').count())
    }

    fn subtract(&mut self, names: usize) -> Result<(), TooMuch> {
        self.names = self.names.checked_sub(names).ok_or(TooMuch::Names)?;
        Ok(())
    }
}

fn folders_of(path: &str) -> impl Iterator<Item = &str> {
    path.rsplit_once('/').into_iter().flat_map(|(folders, _)| folders.split('/'))
}

/// Checks the length of a path.
///
/// # Errors
/// The path is too long.
pub fn check_path(path: &str) -> Result<(), TooMuch> {
    if path.len() <= PATH {
        return Ok(());
    }
    let start = path[..path.floor_char_boundary(SHOWN)].to_owned();
    Err(TooMuch::Path { start, length: path.len() })
}

/// Formats a path for a message: the API does not limit the length of some.
#[must_use]
pub fn shown(path: &str) -> String {
    if path.len() <= 4 * SHOWN {
        path.to_owned()
    } else {
        format!("{}…", &path[..path.floor_char_boundary(SHOWN)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expects the number of names left after `take`, or its error.
    fn check(take: impl FnOnce(&mut Allowance) -> Result<(), TooMuch>, expected: Result<usize, TooMuch>) {
        let mut left = Allowance::default();
        assert_eq!(take(&mut left).map(|()| NAMES - left.names), expected);
    }

    #[test]
    fn folders_count_once_for_any_number_of_files() {
        check(|left| left.folders([]), Ok(0));
        check(|left| left.folders(["a", "b"]), Ok(0));
        check(|left| left.folders(["a/b/c", "a/b/d", "a/c"]), Ok(2));
        // In byte order, names with a common prefix come in between.
        check(|left| left.folders(["a-x/1", "a/1", "a/2", "a0/1"]), Ok(3));
        check(|left| left.folders(["a/a/a/1", "a/b/a/1", "b/a/a/1"]), Ok(8));
    }

    #[test]
    fn paths_are_as_long_as_linux_allows() {
        let deep = |levels: usize| vec!["a"; levels].join("/");
        check(|left| left.path(&deep(2000)), Ok(2000));
        check(|left| left.path(&deep(2048)), Ok(2048));
        let too_long = |length| TooMuch::Path { start: "a/".repeat(32), length };
        check(|left| left.path(&deep(2049)), Err(too_long(4097)));
        check(|left| left.path(&deep(700_000)), Err(too_long(1_399_999)));
        check(|left| left.folders([deep(5000).as_str()]), Err(too_long(9999)));
        check(
            |left| left.path(&"ü".repeat(5000)),
            Err(TooMuch::Path { start: "ü".repeat(32), length: 10_000 }),
        );
        assert_eq!(
            too_long(9999).to_string(),
            format!(
                "the path {:?}… of 9999 bytes is longer than the 4096 bytes that Linux allows; shorten it",
                "a/".repeat(32)
            )
        );
    }

    #[test]
    fn many_paths_are_too_many_folders_together() {
        let path = |n: usize| format!("{n:03}/{}", vec!["a"; 2000].join("/"));
        let paths = |count: usize| (0..count).map(path).collect::<Vec<_>>();
        check(|left| left.folders(paths(9).iter().map(String::as_str)), Ok(18_000));
        check(|left| left.folders(paths(365).iter().map(String::as_str)), Err(TooMuch::Names));
        check(|left| paths(365).iter().try_for_each(|path| left.path(path)), Err(TooMuch::Names));
        check(|left| (0..25_000).try_for_each(|_| left.volume()), Err(TooMuch::Names));
    }

    #[test]
    fn naming_one_object_many_times_exceeds_the_bytes_or_files() {
        check(|left| (0..64).try_for_each(|_| left.file(1 << 20)), Ok(64));
        check(|left| (0..65).try_for_each(|_| left.file(1 << 20)), Err(TooMuch::Bytes));
        check(|left| (0..NAMES).try_for_each(|_| left.file(0)), Ok(NAMES));
        check(|left| (0..=NAMES).try_for_each(|_| left.file(0)), Err(TooMuch::Names));
    }
}
