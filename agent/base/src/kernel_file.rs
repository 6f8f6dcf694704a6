//! Small files whose content the kernel generates on reading: of cgroups, /proc and /sys.

use std::{
    fs::{File, OpenOptions},
    io::{self, Read, Write},
    path::Path,
};

/// Initial buffer size, which fits most of these files.
const USUAL: usize = 4096;

/// Reads the whole text of a file. [`std::fs::read_to_string`] first queries the file's size, which such a
/// file does not have, and then reads it in steps from 32 bytes on: seven system calls, where this function
/// needs four.
///
/// # Errors
/// The file cannot be opened or read, or is not text.
pub fn read_to_string(path: impl AsRef<Path>) -> io::Result<String> {
    // With a limit, even an unreachable one, the standard library reads without querying the size.
    read_to_string_within(path, u64::MAX)
}

/// Reads the text of a file up to `most` bytes.
///
/// # Errors
/// As for [`read_to_string`].
pub fn read_to_string_within(path: impl AsRef<Path>, most: u64) -> io::Result<String> {
    let mut text = String::with_capacity(USUAL);
    File::open(path)?.take(most).read_to_string(&mut text)?;
    text.shrink_to_fit();
    Ok(text)
}

/// Writes a word into a file of the kernel with one call.
///
/// # Errors
/// The file is missing, or the kernel refuses the word.
pub fn write(path: impl AsRef<Path>, word: &str) -> io::Result<()> {
    OpenOptions::new().write(true).open(path)?.write_all(word.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_any_size_is_read_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        for size in [0, 1, USUAL - 1, USUAL, USUAL + 1, 10 * USUAL] {
            let text = "x".repeat(size);
            std::fs::write(&path, &text).unwrap();
            assert_eq!(read_to_string(&path).unwrap(), text);
        }
        assert!(read_to_string("/proc/self/status").unwrap().starts_with("Name:"));
        assert_eq!(read_to_string_within("/proc/self/status", 5).unwrap(), "Name:");
        write(&path, "word").unwrap();
        assert!(read_to_string(&path).unwrap().starts_with("wordx"), "nothing is cut off");
        assert!(write(folder.path().join("none"), "word").is_err());
    }

    #[test]
    fn a_missing_or_binary_file_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        assert_eq!(read_to_string(&path).unwrap_err().kind(), io::ErrorKind::NotFound);
        std::fs::write(&path, [0xff]).unwrap();
        assert_eq!(read_to_string(&path).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}
