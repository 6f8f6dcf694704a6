//! The targets for the mount table, as volumes and pods read it, and for archives, the format of images and
//! copies.

use std::io::{Read as _, copy, sink};
use std::os::unix::ffi::OsStrExt as _;

use beelet_base::archive::{Kind, Reader, parts};
use beelet_base::mountinfo::{Mount, mounts};

/// Tests a tar archive: names are bounded, contents are never larger than the archive, reading or skipping a
/// member's content makes no difference to the next member, and no part of a name leads upwards.
pub fn archive(input: &[u8]) {
    let (mut reading, mut skipping) = (Reader::new(input), Reader::new(input));
    let mut total = 0;
    loop {
        let (one, other) = (reading.next_member(), skipping.next_member());
        let (Ok(Some(one)), Ok(Some(other))) = (&one, &other) else {
            assert_eq!(one.is_ok(), other.is_ok(), "{one:?} {other:?}");
            return;
        };
        assert_eq!(one, other);
        let link = match &one.kind {
            Kind::Link(target) | Kind::HardLink(target) => target.len(),
            _ => 0,
        };
        assert!(one.name.len() <= 4096 && link <= 4096);
        let leads_up = |part: &&[u8]| part.is_empty() || [&b"."[..], b".."].contains(part);
        assert!(!parts(&one.name).unwrap_or_default().iter().any(leads_up));
        match copy(&mut reading.by_ref().take(one.size), &mut sink()) {
            Ok(read) => assert_eq!(read, one.size),
            Err(_) => {
                assert!(skipping.next_member().is_err(), "an unreadable member is skipped without an error");
                return;
            }
        }
        total += one.size;
        assert!(total <= input.len() as u64);
    }
}

/// Tests `/proc/self/mountinfo`: lines are independent of each other, every escape is decoded once, and
/// mounts in the kernel's format read back unchanged.
pub fn mount_table(input: &[u8]) {
    let all: Vec<Mount<'_>> = mounts(input).collect();
    let lines: Vec<Mount<'_>> = input.split(|byte| *byte == b'\n').flat_map(mounts).collect();
    assert_eq!(all, lines, "a line depends on its neighbours");
    let points = all.iter().map(|mount| mount.point.as_os_str().as_bytes().to_vec());
    assert!(points.eq(input.split(|byte| *byte == b'\n').filter_map(reference_point)));
    let written: Vec<u8> = all.iter().flat_map(line).collect();
    let again: Vec<Mount<'_>> = mounts(&written).collect();
    assert_eq!(again, all, "{}", written.escape_ascii());
}

/// Returns the line that the kernel writes (`show_mountinfo` in fs/proc_namespace.c).
fn line(mount: &Mount<'_>) -> Vec<u8> {
    let point = mount.point.as_os_str().as_bytes().iter().flat_map(|byte| match byte {
        b' ' | b'\t' | b'\n' | b'\\' | b'#' => format!("\\{byte:03o}").into_bytes(),
        plain => vec![*plain],
    });
    let point: Vec<u8> = point.collect();
    let device = mount.device.map_or("-".to_owned(), |(major, minor)| format!("{major}:{minor}"));
    let tag = |name: &str, group: Option<u64>| group.map_or(String::new(), |id| format!(" {name}:{id}"));
    let tags = tag("shared", mount.groups.shared) + &tag("master", mount.groups.master);
    let flags = format!("rw{tags} -");
    let fields = [
        b"36 35",
        device.as_bytes(),
        mount.root,
        &point,
        flags.as_bytes(),
        mount.fs_type,
        mount.source,
        mount.super_options,
    ];
    [fields.join(&b' '), b"\n".to_vec()].concat()
}

/// Returns the mount point in a line, by an independent parser.
fn reference_point(line: &[u8]) -> Option<Vec<u8>> {
    let fields: Vec<&[u8]> = line.split(|byte| *byte == b' ').collect();
    let separator = 5 + fields.get(5..)?.iter().position(|field| *field == b"-")?;
    fields.get(separator + 1)?;
    let mut point = Vec::new();
    let mut at = 0;
    while let Some(byte) = fields[4].get(at) {
        match (byte, fields[4].get(at + 1..at + 4)) {
            (b'\\', Some([a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7'])) => {
                point.push((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'));
                at += 4;
            }
            _ => {
                point.push(*byte);
                at += 1;
            }
        }
    }
    Some(point)
}
