//! Small files that the kernel writes when they are read: of cgroups, of /proc, of /sys.

use std::{
    fs::{File, OpenOptions},
    io::{self, Read, Write},
    path::Path,
};

/// What most of them fit in.
const USUAL: usize = 4096;

/// The whole text of a file. [`std::fs::read_to_string`] asks for the file's size first, which such a file
/// does not have, and then reads it in steps from 32 bytes on: seven system calls where this takes four.
///
/// # Errors
/// The file cannot be opened or read, or is not text.
pub fn read_to_string(path: impl AsRef<Path>) -> io::Result<String> {
    // A limit, even one that is never reached, makes the standard library read without asking for the size.
    read_to_string_within(path, u64::MAX)
}

/// The same of so many bytes at most.
///
/// # Errors
/// As for [`read_to_string`].
pub fn read_to_string_within(path: impl AsRef<Path>, most: u64) -> io::Result<String> {
    let mut text = String::with_capacity(USUAL);
    File::open(path)?.take(most).read_to_string(&mut text)?;
    text.shrink_to_fit();
    Ok(text)
}

/// Writes a word into a file of the kernel's, at once.
///
/// # Errors
/// The file isn't there, or the kernel refuses the word.
pub fn write(path: impl AsRef<Path>, word: &str) -> io::Result<()> {
    OpenOptions::new().write(true).open(path)?.write_all(word.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_whole_whatever_its_size() {
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
    fn what_is_not_there_or_not_text_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        assert_eq!(read_to_string(&path).unwrap_err().kind(), io::ErrorKind::NotFound);
        std::fs::write(&path, [0xff]).unwrap();
        assert_eq!(read_to_string(&path).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}
