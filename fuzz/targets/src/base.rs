//! Fuzzing: the table of mounts, as those read it who look for mount points.

use std::os::unix::ffi::OsStrExt as _;

use beelet_base::mountinfo::{Mount, mounts};

/// `/proc/self/mountinfo`: every line is read by itself, every escape is undone once, and mounts that the
/// kernel would write read back as they are.
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

/// The line as the kernel writes it (`show_mountinfo` in fs/proc_namespace.c).
fn line(mount: &Mount<'_>) -> Vec<u8> {
    let point = mount.point.as_os_str().as_bytes().iter().flat_map(|byte| match byte {
        b' ' | b'\t' | b'\n' | b'\\' | b'#' => format!("\\{byte:03o}").into_bytes(),
        plain => vec![*plain],
    });
    let point: Vec<u8> = point.collect();
    let fields =
        [b"36 35 98:0", mount.root, &point, b"rw shared:1 -", mount.fs_type, b"none", mount.super_options];
    [fields.join(&b' '), b"\n".to_vec()].concat()
}

/// Where a line's mount is, by an independent reading.
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
