//! Small files that the kernel writes when they are read: of cgroups, of /proc.

use std::{
    fs::File,
    io::{self, Read},
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
    let mut text = String::with_capacity(USUAL);
    // A limit, even one that is never reached, makes the standard library read without asking for the size.
    File::open(path)?.take(u64::MAX).read_to_string(&mut text)?;
    text.shrink_to_fit();
    Ok(text)
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
