//! Reads untrusted tar archives member by member. Names are bytes of bounded length, and memory is bounded.
//! Must never unpack: the caller decides whether and to which path to write a member. Blocking.
//!
//! The `tar` crate parses the header's fields. Its own iterator reads a long name of any length into memory.

use std::io::{self, Read};

use tar::{EntryType, Header, PaxExtensions};

/// Size of a header, to which all parts are padded.
const BLOCK: usize = 512;
/// Maximum length of a member's name or link target, in bytes: PATH_MAX.
const LONGEST_NAME: usize = 4096;
/// Maximum bytes of an extended header.
const MOST_EXTENDED: u64 = 1 << 20;
/// Maximum number of members of an archive.
const MOST_MEMBERS: u32 = 2_000_000;

/// A member of an archive. Its content can be read from the [`Reader`] until the next call of
/// [`Reader::next_member`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// Name as written in the archive, which may be absolute or lead upwards.
    pub name: Vec<u8>,
    /// Kind of the member.
    pub kind: Kind,
    /// Size of the content in bytes.
    pub size: u64,
    /// Permissions with the special bits.
    pub mode: u32,
}

/// Kind of a member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    /// A file.
    File,
    /// A folder.
    Folder,
    /// A symbolic link to this target.
    Link(Vec<u8>),
    /// A hard link to the member of this name.
    HardLink(Vec<u8>),
    /// A device, a FIFO, a sparse file, or a kind unknown to tar.
    Other,
}

/// Error while reading an archive.
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    /// The source can't be read.
    #[error(transparent)]
    Read(#[from] io::Error),
    /// A header is invalid.
    #[error("byte {0} does not begin a tar header: the file is not a tar archive")]
    NotAHeader(u64),
    /// The archive is truncated.
    #[error("the archive is truncated")]
    Truncated,
    /// A name or an extended header is too long.
    #[error("a name in the archive is too long")]
    LongName,
    /// The archive has too many members.
    #[error("the archive has more than {MOST_MEMBERS} members")]
    ManyMembers,
}

/// Reads an archive's members in their order.
#[derive(Debug)]
pub struct Reader<R> {
    source: R,
    /// Bytes read.
    at: u64,
    /// Unread bytes of the member's content.
    left: u64,
    /// Bytes of padding after the content.
    padding: u64,
    members: u32,
}

/// Attributes of a member from extended headers before its own.
#[derive(Default)]
struct Extended {
    name: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    size: Option<u64>,
}

impl<R: Read> Reader<R> {
    /// Reads the archive from `source`.
    pub fn new(source: R) -> Self {
        Self { source, at: 0, left: 0, padding: 0, members: 0 }
    }

    /// Returns the next member; `None` at the end. Skips the unread content of the previous member.
    ///
    /// # Errors
    /// The archive is invalid, or can't be read.
    pub fn next_member(&mut self) -> Result<Option<Member>, ArchiveError> {
        let mut extended = Extended::default();
        loop {
            self.skip()?;
            let begin = self.at;
            let Some(header) = self.header()? else { return Ok(None) };
            let size = header.entry_size().map_err(|_| ArchiveError::NotAHeader(begin))?;
            match header.entry_type() {
                EntryType::GNULongName => extended.name = Some(self.long_name(size)?),
                EntryType::GNULongLink => extended.link = Some(self.long_name(size)?),
                EntryType::XHeader => extended.read_pax(&self.extension(size)?),
                EntryType::XGlobalHeader => self.set_content(size),
                kind => {
                    self.members += 1;
                    if self.members > MOST_MEMBERS {
                        return Err(ArchiveError::ManyMembers);
                    }
                    return self.member(&header, kind, size, extended).map(Some);
                }
            }
        }
    }

    /// Returns the source, positioned after the last byte read.
    pub fn into_inner(self) -> R {
        self.source
    }

    fn member(
        &mut self,
        header: &Header,
        kind: EntryType,
        size: u64,
        extended: Extended,
    ) -> Result<Member, ArchiveError> {
        let name = extended.name.unwrap_or_else(|| header.path_bytes().into_owned());
        let link = || {
            let of_header = || header.link_name_bytes().unwrap_or_default().into_owned();
            extended.link.clone().unwrap_or_else(of_header)
        };
        let is_folder = name.ends_with(b"/");
        let kind = match kind {
            // Old archives have folders as files with a slash at the end.
            EntryType::Regular | EntryType::Continuous if is_folder => Kind::Folder,
            EntryType::Regular | EntryType::Continuous => Kind::File,
            EntryType::Directory => Kind::Folder,
            EntryType::Symlink => Kind::Link(link()),
            EntryType::Link => Kind::HardLink(link()),
            _ => Kind::Other,
        };
        let link_length = match &kind {
            Kind::Link(target) | Kind::HardLink(target) => target.len(),
            _ => 0,
        };
        if name.len() > LONGEST_NAME || link_length > LONGEST_NAME {
            return Err(ArchiveError::LongName);
        }
        // A link has no content; its header may have the size of its target.
        let has_content = matches!(kind, Kind::File | Kind::Other);
        let size = if has_content { extended.size.unwrap_or(size) } else { 0 };
        self.set_content(size);
        Ok(Member { name, kind, size, mode: header.mode().unwrap_or(0o644) & 0o7777 })
    }

    /// Returns the next header after checking its checksum; `None` at the archive's end.
    fn header(&mut self) -> Result<Option<Header>, ArchiveError> {
        let begin = self.at;
        let mut block = [0; BLOCK];
        self.fill(&mut block)?;
        // Two empty blocks end an archive; some programs write only one.
        if block.iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        let header = Header::from_byte_slice(&block).clone();
        let sum = |bytes: &[u8]| bytes.iter().map(|byte| u32::from(*byte)).sum::<u32>();
        // The checksum's own field counts as spaces.
        let expected = sum(&block[..148]) + sum(&block[156..]) + 8 * u32::from(b' ');
        match header.cksum() {
            Ok(said) if said == expected => Ok(Some(header)),
            _ => Err(ArchiveError::NotAHeader(begin)),
        }
    }

    fn long_name(&mut self, size: u64) -> Result<Vec<u8>, ArchiveError> {
        let mut name = self.extension(size)?;
        if name.last() == Some(&0) {
            name.pop();
        }
        Ok(name)
    }

    fn extension(&mut self, size: u64) -> Result<Vec<u8>, ArchiveError> {
        let length = usize::try_from(size).ok().filter(|_| size <= MOST_EXTENDED);
        let mut bytes = vec![0; length.ok_or(ArchiveError::LongName)?];
        self.set_content(size);
        self.read_exact(&mut bytes).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => ArchiveError::Truncated,
            _ => error.into(),
        })?;
        Ok(bytes)
    }

    fn set_content(&mut self, size: u64) {
        let block = BLOCK as u64;
        self.left = size;
        self.padding = (block - size % block) % block;
    }

    /// Skips the rest of the last member.
    fn skip(&mut self) -> Result<(), ArchiveError> {
        let rest = self.left.saturating_add(self.padding);
        let skipped = io::copy(&mut (&mut self.source).take(rest), &mut io::sink())?;
        self.at = self.at.saturating_add(skipped);
        (self.left, self.padding) = (0, 0);
        if skipped < rest { Err(ArchiveError::Truncated) } else { Ok(()) }
    }

    fn fill(&mut self, block: &mut [u8]) -> Result<(), ArchiveError> {
        self.source.read_exact(block).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => ArchiveError::Truncated,
            _ => ArchiveError::Read(error),
        })?;
        self.at = self.at.saturating_add(block.len() as u64);
        Ok(())
    }
}

/// Reads the content of the member last returned by [`Reader::next_member`]. An archive that ends within it
/// is an error, not an end.
impl<R: Read> Read for Reader<R> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let most = usize::try_from(self.left).unwrap_or(usize::MAX).min(bytes.len());
        if most == 0 {
            return Ok(0);
        }
        let length = self.source.read(&mut bytes[..most])?;
        if length == 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, ArchiveError::Truncated));
        }
        self.left = self.left.saturating_sub(length as u64);
        self.at = self.at.saturating_add(length as u64);
        Ok(length)
    }
}

impl Extended {
    /// Reads the known attributes of a pax header and ignores the others.
    fn read_pax(&mut self, bytes: &[u8]) {
        for record in PaxExtensions::new(bytes).flatten() {
            let value = record.value_bytes();
            match record.key_bytes() {
                b"path" => self.name = Some(value.to_vec()),
                b"linkpath" => self.link = Some(value.to_vec()),
                b"size" => self.size = std::str::from_utf8(value).ok().and_then(|size| size.parse().ok()),
                _ => {}
            }
        }
    }
}

/// Returns the components of a member's name, without empty ones and `.`; `None` if the name leads upwards.
#[must_use]
pub fn parts(name: &[u8]) -> Option<Vec<&[u8]>> {
    let parts: Vec<&[u8]> =
        name.split(|byte| *byte == b'/').filter(|part| !part.is_empty() && *part != b".").collect();
    let leads_up = parts.iter().any(|part| *part == b".." || part.contains(&0));
    (!leads_up).then_some(parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Builds an archive of these files as tar does.
    fn archive(files: &[(&str, &[u8])]) -> Vec<u8> {
        let mut builder = tar::Builder::new(Vec::new());
        for (name, content) in files {
            let mut header = Header::new_gnu();
            header.set_size(content.len() as u64);
            header.set_mode(0o4755);
            builder.append_data(&mut header, name, *content).unwrap();
        }
        builder.into_inner().unwrap()
    }

    fn header(name: &str, kind: EntryType, size: u64) -> Vec<u8> {
        let mut header = Header::new_gnu();
        header.as_gnu_mut().unwrap().name[..name.len()].copy_from_slice(name.as_bytes());
        header.set_entry_type(kind);
        header.set_size(size);
        header.set_mode(0o644);
        header.set_cksum();
        header.as_bytes().to_vec()
    }

    fn names(bytes: &[u8]) -> Result<Vec<String>, ArchiveError> {
        let mut reader = Reader::new(bytes);
        let mut names = Vec::new();
        while let Some(member) = reader.next_member()? {
            names.push(String::from_utf8_lossy(&member.name).into_owned());
        }
        Ok(names)
    }

    #[test]
    fn members_have_their_names_modes_and_contents() {
        let long = "d/".repeat(300) + "file";
        let bytes = archive(&[("a", b"one"), (&long, &[7; 1000]), ("empty", b"")]);
        let mut reader = Reader::new(bytes.as_slice());
        let first = reader.next_member().unwrap().unwrap();
        assert_eq!((&*first.name, first.size, first.mode), (&b"a"[..], 3, 0o4755));
        let mut content = String::new();
        reader.read_to_string(&mut content).unwrap();
        assert_eq!(content, "one");
        // The second one's content is skipped in part.
        assert_eq!(reader.next_member().unwrap().unwrap().name, long.as_bytes());
        reader.read_exact(&mut [0; 10]).unwrap();
        assert_eq!(reader.next_member().unwrap().unwrap().name, b"empty");
        assert!(reader.next_member().unwrap().is_none());
    }

    #[test]
    fn a_pax_header_gives_name_link_and_size() {
        let record = |key: &str, value: &str| {
            let rest = format!(" {key}={value}\n");
            let length = (1..4).find(|digits| (rest.len() + digits).to_string().len() == *digits).unwrap();
            format!("{}{rest}", rest.len() + length)
        };
        let records =
            record("path", "a/new/name") + &record("linkpath", "elsewhere") + &record("size", "600");
        let mut bytes = header("x", EntryType::XHeader, records.len() as u64);
        bytes.extend(records.as_bytes());
        bytes.resize(1024, 0);
        // The member's own header has 0, as if 33 bits didn't fit.
        bytes.extend(header("old", EntryType::Regular, 0));
        bytes.resize(bytes.len() + 1024, 1);
        bytes.extend(header("next", EntryType::Symlink, 9));
        bytes.extend([0; 1024]);
        let mut reader = Reader::new(bytes.as_slice());
        let member = reader.next_member().unwrap().unwrap();
        assert_eq!((&*member.name, member.size), (&b"a/new/name"[..], 600));
        assert_eq!(member.kind, Kind::File);
        let next = reader.next_member().unwrap().unwrap();
        assert_eq!((next.kind, next.size), (Kind::Link(Vec::new()), 0));
    }

    #[test]
    fn an_archive_that_lies_is_an_error_and_takes_no_memory() {
        let whole = archive(&[("a", &[1; 700]), ("b", b"two")]);
        for length in [1, 511, 512, 900, 1024, 1536, 1600, 2048] {
            let cut = names(&whole[..length]);
            assert!(matches!(cut, Err(ArchiveError::Truncated)), "{length}: {cut:?}");
        }
        let check = |bytes: Vec<u8>, expected: &str| {
            let error = names(&bytes).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        };
        check(b"\x1f\x8b".repeat(600), "byte 0 does not begin");
        check(header("n", EntryType::GNULongName, 1 << 40), "too long");
        check(header("n", EntryType::XHeader, u64::from(u32::MAX)), "too long");
        let mut long = header("n", EntryType::GNULongName, 5000);
        long.resize(512 + 5120, b'x');
        long.extend(header("n", EntryType::Regular, 0));
        check(long, "too long");
        let mut reader = Reader::new(&whole[..1000]);
        reader.next_member().unwrap();
        assert_eq!(io::copy(&mut reader, &mut io::sink()).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn a_name_that_leads_upwards_has_no_parts() {
        let check = |name: &str, expected: Option<&[&str]>| {
            let expected = expected.map(|parts| parts.iter().map(|part| part.as_bytes()).collect());
            assert_eq!(parts(name.as_bytes()), expected, "{name}");
        };
        check("./a//b/", Some(&["a", "b"]));
        check("/etc/passwd", Some(&["etc", "passwd"]));
        check("./", Some(&[]));
        check("a/../b", None);
        check("..", None);
        check("a\0b", None);
    }
}
