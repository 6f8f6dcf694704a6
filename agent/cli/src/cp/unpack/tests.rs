use std::os::unix::fs::{PermissionsExt as _, symlink};

use tar::{EntryType, Header};
use tempfile::TempDir;

use super::*;

/// A member of a hostile archive; tar's own writer would reject some of these.
struct One<'a> {
    name: &'a str,
    kind: EntryType,
    /// Link target, or content of a file.
    text: &'a str,
}

fn file<'a>(name: &'a str, text: &'a str) -> One<'a> {
    One { name, kind: EntryType::Regular, text }
}

fn link<'a>(name: &'a str, text: &'a str) -> One<'a> {
    One { name, kind: EntryType::Symlink, text }
}

fn hard<'a>(name: &'a str, text: &'a str) -> One<'a> {
    One { name, kind: EntryType::Link, text }
}

fn archive(members: &[One<'_>]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for one in members {
        let mut header = Header::new_gnu();
        header.set_entry_type(one.kind);
        header.set_mode(0o4755);
        let is_file = one.kind == EntryType::Regular;
        header.set_size(if is_file { one.text.len() as u64 } else { 0 });
        let old = header.as_gnu_mut().unwrap();
        old.name[..one.name.len()].copy_from_slice(one.name.as_bytes());
        if !is_file {
            old.linkname[..one.text.len()].copy_from_slice(one.text.as_bytes());
        }
        header.set_cksum();
        bytes.extend(header.as_bytes());
        if is_file {
            bytes.extend(one.text.as_bytes());
            bytes.resize(bytes.len().next_multiple_of(512), 0);
        }
    }
    bytes.resize(bytes.len() + 1024, 0);
    bytes
}

/// Unpacks `name` of an archive with these members into `to`.
fn unpack(name: &str, to: &Path, members: &[One<'_>]) -> anyhow::Result<Vec<String>> {
    let (sender, receiver) = mpsc::channel(100);
    for piece in archive(members).chunks(700) {
        sender.try_send(Ok(piece.to_vec())).unwrap();
    }
    drop(sender);
    Unpacker::new(name, to)?.unpack(receiver)
}

fn text(dir: &TempDir, path: &str) -> Option<String> {
    fs::read_to_string(dir.path().join(path)).ok()
}

#[test]
fn a_folder_gets_the_name_of_the_target_or_goes_into_it() {
    let dir = tempfile::tempdir().unwrap();
    let members = [file("logs/a", "one"), file("logs/sub/b", "two"), link("logs/l", "sub/b")];
    unpack("logs", &dir.path().join("new"), &members).unwrap();
    assert_eq!((text(&dir, "new/a").as_deref(), text(&dir, "new/l").as_deref()), (Some("one"), Some("two")));
    unpack("logs", dir.path(), &members).unwrap();
    assert_eq!(text(&dir, "logs/sub/b").as_deref(), Some("two"));
    // Unpacks again over the existing files.
    unpack("logs", dir.path(), &[file("logs/a", "three")]).unwrap();
    assert_eq!(text(&dir, "logs/a").as_deref(), Some("three"));
    let mode = fs::metadata(dir.path().join("logs/a")).unwrap().permissions().mode();
    assert_eq!(mode & 0o7000, 0, "{mode:o}");
    unpack(".", &dir.path().join("all"), &[file("./x", "1"), file("./y/z", "2")]).unwrap();
    assert_eq!(text(&dir, "all/y/z").as_deref(), Some("2"));
}

#[test]
fn nothing_leaves_the_target() {
    let outer = tempfile::tempdir().unwrap();
    let to = outer.path().join("to");
    fs::create_dir(&to).unwrap();
    fs::write(outer.path().join("secret"), "hush").unwrap();
    let members = [
        file("x/../../out", "1"),
        file("/etc/out", "2"),
        file("other/out", "3"),
        file("x/fine", "4"),
        hard("x/stolen", "../secret"),
        hard("x/fine2", "x/fine"),
        link("x/up", ".."),
        link("x/absolute", "/etc/passwd"),
        link("x/round", "sub/../../../secret"),
        link("x/ok", "fine"),
        One { name: "x/fifo", kind: EntryType::Fifo, text: "" },
    ];
    let left_out = unpack("x", &to, &members).unwrap();
    assert_eq!(left_out.len(), 8, "{left_out:?}");
    let mut names: Vec<_> =
        fs::read_dir(to.join("x")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["fine", "fine2", "ok"]);
    assert_eq!(fs::read_dir(outer.path()).unwrap().count(), 2);
}

#[test]
fn nothing_is_written_through_a_link() {
    let outer = tempfile::tempdir().unwrap();
    let to = outer.path().join("to");
    fs::create_dir_all(to.join("x")).unwrap();
    fs::create_dir(outer.path().join("elsewhere")).unwrap();
    fs::write(outer.path().join("secret"), "hush").unwrap();
    // Links that existed before the copy, and a link from the archive.
    symlink("../../elsewhere", to.join("x/way")).unwrap();
    symlink("../../secret", to.join("x/file")).unwrap();
    let error = unpack("x", &to, &[file("x/way/in", "1")]).unwrap_err();
    assert!(format!("{error:#}").contains("a link or a file blocks the path"), "{error:#}");
    unpack("x", &to, &[file("x/file", "mine")]).unwrap();
    assert_eq!(text(&outer, "secret").as_deref(), Some("hush"));
    let members = [link("x/inner", "sub"), file("x/inner/a", "1")];
    assert!(unpack("x", &to, &members).is_err());
    assert_eq!(fs::read_dir(outer.path().join("elsewhere")).unwrap().count(), 0);
    let error = unpack("x", &to, &[hard("x/copy", "x/way")]).unwrap_err();
    assert!(!to.join("x/copy").exists(), "{error:#}");
}

#[test]
fn an_archive_that_is_none_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let (sender, receiver) = mpsc::channel(1);
    sender.try_send(Ok(vec![7; 2000])).unwrap();
    drop(sender);
    let error = Unpacker::new("x", dir.path()).unwrap().unpack(receiver).unwrap_err();
    assert!(error.to_string().contains("does not begin a tar header"), "{error}");
    assert!(Unpacker::new("x", &dir.path().join("no/such")).is_err());
}

#[test]
fn a_copy_of_nothing_is_an_error() {
    let dir = TempDir::new().unwrap();
    let error = unpack("conf", dir.path(), &[link("conf", "..data/conf")]).unwrap_err();
    assert!(error.to_string().starts_with("nothing was copied (skipped conf: its link target"), "{error}");
    // A skipped member among others is reported and is not an error.
    let members = [file("logs/a", "1"), link("logs/b", "/etc/passwd")];
    assert_eq!(unpack("logs", dir.path(), &members).unwrap().len(), 1);
}
