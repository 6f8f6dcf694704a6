//! The file systems and mount options of disks: a manifest, a PersistentVolume or a driver names the type,
//! and mount(8) receives it.
//!
//! mount(8) starts a helper program of the machine for some types: `fuse.sh` runs a shell on the disk's
//! content, as root. So a type must be one that the kernel itself mounts from a block device, and an option
//! must not be one that mount(8) itself acts on.

use core::net::Ipv6Addr;

/// File systems on block devices, and the program that creates each. Excludes `zfs`, `ntfs-3g`, `fuseblk` and
/// any other that needs a helper; also `auto`, which would leave the choice to the disk.
const KNOWN: [(&str, &str); 20] = [
    ("bcachefs", "mkfs.bcachefs"),
    ("btrfs", "mkfs.btrfs"),
    ("erofs", "mkfs.erofs"),
    ("exfat", "mkfs.exfat"),
    ("ext2", "mkfs.ext2"),
    ("ext3", "mkfs.ext3"),
    ("ext4", "mkfs.ext4"),
    ("f2fs", "mkfs.f2fs"),
    ("gfs2", "mkfs.gfs2"),
    ("iso9660", "mkfs.iso9660"),
    ("jfs", "mkfs.jfs"),
    ("msdos", "mkfs.msdos"),
    ("nilfs2", "mkfs.nilfs2"),
    ("ntfs3", "mkfs.ntfs"),
    ("ocfs2", "mkfs.ocfs2"),
    ("reiserfs", "mkfs.reiserfs"),
    ("squashfs", "mkfs.squashfs"),
    ("udf", "mkfs.udf"),
    ("vfat", "mkfs.vfat"),
    ("xfs", "mkfs.xfs"),
];
/// The default type, as in the kubelet.
const DEFAULT: FileSystem = FileSystem { name: "ext4", maker: "mkfs.ext4" };
/// Maximum number of a volume's options, and maximum bytes of all of them: the kernel accepts one page, see
/// mount(2).
const MOST_OPTIONS: usize = 64;
const LONGEST_OPTIONS: usize = 4000;
/// Maximum lengths of a server's name, and of an export's path.
const LONGEST_NAME: usize = 253;
const LONGEST_PATH: usize = 4096;
/// Maximum bytes of a volume's text in an error.
const SHOWN: usize = 64;
/// Options with which mount(8) acts on more than the requested mount: they create devices and folders, move
/// or change other mounts, or name a program to start (`mount(8)`, "helper").
const ACTED_ON: [&str; 7] = ["helper", "uhelper", "loop", "offset", "sizelimit", "move", "remount"];

/// A file system that the kernel mounts from a block device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileSystem {
    name: &'static str,
    maker: &'static str,
}

/// A reason for refusing to mount a disk.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MountRefusal {
    /// The type is not a known file system of disks.
    #[error("fsType {0:?} is refused: use one of {known}", known = known())]
    FileSystem(String),
    /// mount(8) must not receive the option.
    #[error("mount option {0:?} is refused: mount(8) would act on it beyond this mount")]
    Option(String),
    /// The option has invalid characters.
    #[error("mount option {0:?} is refused: it has control characters")]
    Characters(String),
    /// The export is invalid for mount.nfs.
    #[error(
        "the NFS export {0:?} is refused: the server must be a name or an address, and the path must not have control characters"
    )]
    Export(String),
    /// The options are too many or too long.
    #[error("the mount options are refused: more than {MOST_OPTIONS}, or than {LONGEST_OPTIONS} bytes")]
    TooMany,
}

fn known() -> String {
    KNOWN.map(|(name, _)| name).join(", ")
}

fn shown(text: &str) -> String {
    text.chars().take(SHOWN).collect()
}

impl FileSystem {
    /// Returns the file system that a volume names; ext4 if it names none.
    ///
    /// # Errors
    /// The kernel does not mount this type from a block device.
    pub fn of(name: &str) -> Result<Self, MountRefusal> {
        if name.is_empty() {
            return Ok(DEFAULT);
        }
        let found = KNOWN.iter().find(|(known, _)| *known == name);
        let found = found.map(|&(name, maker)| Self { name, maker });
        found.ok_or_else(|| MountRefusal::FileSystem(shown(name)))
    }

    /// Returns the file system's name for mount(8) and the kernel.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.name
    }

    /// Returns the program that creates the file system.
    #[must_use]
    pub fn maker(self) -> &'static str {
        self.maker
    }
}

impl Default for FileSystem {
    fn default() -> Self {
        DEFAULT
    }
}

/// Joins a volume's mount options into one text for mount(8). An item may hold several options, separated by
/// commas.
///
/// # Errors
/// An option must not be passed to mount(8).
pub fn mount_options<'o>(options: impl IntoIterator<Item = &'o str>) -> Result<String, MountRefusal> {
    let all: Vec<&str> = options.into_iter().collect();
    let joined = all.join(",");
    let parts: Vec<&str> = joined.split(',').filter(|part| !part.is_empty()).collect();
    if parts.len() > MOST_OPTIONS || joined.len() > LONGEST_OPTIONS {
        return Err(MountRefusal::TooMany);
    }
    for part in &parts {
        let name = part.split('=').next().unwrap_or_default().trim().to_ascii_lowercase();
        if part.contains(char::is_control) {
            return Err(MountRefusal::Characters(shown(part)));
        }
        if ACTED_ON.contains(&name.as_str()) || name.starts_with("x-mount.") || name.starts_with("verity.") {
            return Err(MountRefusal::Option(shown(part)));
        }
    }
    Ok(parts.join(","))
}

/// Formats an export of an NFS server for mount(8).
///
/// # Errors
/// The server is neither a name nor an address, or the path has invalid characters.
pub fn export(server: &str, path: &str) -> Result<String, MountRefusal> {
    let is_of_name = |c: char| c.is_ascii_alphanumeric() || ".-_:%[]".contains(c);
    let is_server = !server.is_empty()
        && server.len() <= LONGEST_NAME
        && !server.starts_with('-')
        && server.chars().all(is_of_name);
    if !is_server || path.len() > LONGEST_PATH || path.contains(char::is_control) {
        return Err(MountRefusal::Export(shown(&format!("{}:{}", shown(server), shown(path)))));
    }
    // mount.nfs splits the text at a colon: an IPv6 address contains colons.
    let is_ipv6 = server.parse::<Ipv6Addr>().is_ok();
    Ok(if is_ipv6 { format!("[{server}]:{path}") } else { format!("{server}:{path}") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_export_is_one_of_a_server() {
        let check = |server: &str, path: &str, expected: Option<&str>| {
            assert_eq!(export(server, path).ok().as_deref(), expected, "{server:?} {path:?}");
        };
        check("files.example.com", "/x y", Some("files.example.com:/x y"));
        check("10.0.0.1", "/", Some("10.0.0.1:/"));
        check("fd00::1", "/x", Some("[fd00::1]:/x"));
        check("[fd00::1]", "/x", Some("[fd00::1]:/x"));
        check("fe80::1%eth0", "/x", Some("fe80::1%eth0:/x"));
        for server in ["", "-o", "a b", "a,b", "a/b", "a\nb", "LABEL=x", &"a".repeat(300)] {
            check(server, "/x", None);
        }
        check("files", "/x\ny", None);
        check("files", &"x".repeat(5000), None);
    }

    #[test]
    fn a_disk_is_mounted_as_a_kernel_file_system_and_without_a_helper() {
        let check = |name: &str, expected: Option<&str>| {
            assert_eq!(FileSystem::of(name).ok().map(FileSystem::name), expected, "{name:?}");
        };
        check("", Some("ext4"));
        for name in ["ext2", "ext3", "ext4", "xfs", "btrfs", "vfat", "f2fs", "ntfs3"] {
            check(name, Some(name));
        }
        let helped =
            ["fuse", "fuse.sh", "fuseblk", "fuseblk.sh", "nfs", "nfs4", "cifs", "ntfs", "ntfs-3g", "zfs"];
        let odd = ["ext4,fuse.sh", "fuse.sh,ext4", "-o", "-t", "ext4 ", " ext4", "EXT4", "ext4\0", "ext4\n"];
        let rest =
            ["auto", "none", "noext4", "tmpfs", "overlay", "proc", "bind", "swap", "../ext4", "a/b", ","];
        for name in helped.into_iter().chain(odd).chain(rest) {
            check(name, None);
        }
        let why = FileSystem::of(&"x".repeat(1 << 20)).unwrap_err().to_string();
        assert!(why.len() < 500 && why.contains("ext4"), "{why}");
    }

    #[test]
    fn a_file_system_is_created_by_its_own_program() {
        for (name, maker) in KNOWN {
            assert_eq!(FileSystem::of(name).map(FileSystem::maker), Ok(maker));
            let of_program = maker.strip_prefix("mkfs.").unwrap();
            assert!(of_program == name || (name, of_program) == ("ntfs3", "ntfs"), "{maker}");
        }
        assert_eq!(FileSystem::of("ext4"), Ok(FileSystem::default()));
        assert!(KNOWN.is_sorted());
    }

    #[test]
    fn options_with_further_effects_in_mount_are_refused() {
        let check = |options: &[&str], expected: Result<&str, &str>| {
            let found = mount_options(options.iter().copied());
            match (found, expected) {
                (Ok(found), Ok(expected)) => assert_eq!(found, expected),
                (Err(why), Err(expected)) => assert!(why.to_string().contains(expected), "{why}"),
                (found, _) => panic!("{options:?}: {found:?}"),
            }
        };
        check(&[], Ok(""));
        check(&["noatime", "", "ro"], Ok("noatime,ro"));
        check(&["hard,nfsvers=4.1", "_netdev"], Ok("hard,nfsvers=4.1,_netdev"));
        check(
            &["context=\"system_u:object_r:container_file_t:s0:c1\""],
            Ok("context=\"system_u:object_r:container_file_t:s0:c1\""),
        );
        check(
            &["x-systemd.device-timeout=5", "discard", "usrquota"],
            Ok("x-systemd.device-timeout=5,discard,usrquota"),
        );
        for refused in [
            "helper=sh",
            "uhelper=sh",
            "loop",
            "loop=/dev/loop0",
            "remount",
            "move",
            "X-mount.mkdir",
            "x-mount.owner=0",
            "LOOP",
            "noatime,loop",
        ] {
            check(&["noatime", refused], Err("act on it beyond this mount"));
        }
        check(&["a\nb"], Err("control characters"));
        check(&["a\0b"], Err("control characters"));
        check(&["a"; 65], Err("more than 64"));
        check(&[&"x".repeat(5000)], Err("4000 bytes"));
    }
}
