//! Finds kernels and the parts that a guest needs: the kernel's ELF image, which QEMU starts without
//! unpacking by the guest, and its modules.
//!
//! Kernels come from a folder (`BEELET_VM_KERNELS`) with one subfolder per kernel: `vmlinuz`, and optionally
//! `config` and `modules.tar.zst` (a `modules/<release>` tree). Without that variable the distribution's own
//! kernel package is used, unpacked under the target folder; nothing is installed. Kernels for another
//! processor are Debian's, each with the programs of its release.

use anyhow::{Context as _, Result, bail};
use beelet_tests::workdir;
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use xtask::cross::Arch;
use xtask::progress::Step;
use xtask::rootfs::{self, Made};
use xtask::setup;

/// Environment variable that names the folder of kernels.
pub(super) const FOLDER: &str = "BEELET_VM_KERNELS";

/// Debian packages that depend on the newest kernel of their kind; the first is built for virtual machines.
const DEBIAN: &[&str] = &["linux-image-cloud-amd64", "linux-image-amd64"];

/// Debian releases with kernels for another processor, by the kernels' names here.
const FOREIGN: &[(&str, &str)] = &[("debian-12", "bookworm"), ("debian-13", "trixie")];

/// Modules of a distribution's kernel that a guest gets, with their dependencies.
const MODULES: &[&str] = &[
    "br_netfilter",
    "bridge",
    "cls_bpf",
    "dummy",
    "ext4",
    "loop",
    "nf_conntrack",
    "nf_tables",
    "null_blk",
    "overlay",
    "quota_v2",
    "sch_ingress",
    "tcp_diag",
    "tun",
    "veth",
    "virtio_blk",
    "virtio_pci",
    "xt_MASQUERADE",
    "zram",
];

/// Kernel that can boot a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Kernel {
    /// Name on the command line: the folder's name, or `debian`.
    pub(super) name: String,
    vmlinuz: PathBuf,
    modules: Modules,
    /// Folder of the system that it belongs to; None: its guest uses this machine's programs.
    pub(super) system: Option<PathBuf>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Modules {
    None,
    /// Archive of a small `modules/<release>` tree, which is used completely.
    Archive(PathBuf),
    /// Complete `<release>` folder.
    Folder(PathBuf),
}

/// Returns the kernels of these names, or all if no names are given. Packages are unpacked in `work`.
pub(super) fn find(names: &[String], work: &Path, arch: Arch) -> Result<Vec<Kernel>> {
    if arch != Arch::here()? {
        return foreign(names, work, arch);
    }
    let Some(folder) = std::env::var_os(FOLDER) else {
        if let Some(name) = names.iter().find(|name| *name != "debian") {
            bail!(
                "kernel {name}: {FOLDER} is not set, so only \"debian\" is available, the distribution's own kernel; \
                 set {FOLDER} to a folder that contains {name}/vmlinuz"
            );
        }
        return Ok(vec![debian(work)?]);
    };
    let found = in_folder(Path::new(&folder))?;
    if names.is_empty() {
        return Ok(found);
    }
    let there: Vec<&str> = found.iter().map(|kernel| kernel.name.as_str()).collect();
    let of_name = |name: &String| {
        found.iter().find(|kernel| kernel.name == *name).cloned().with_context(|| {
            format!("kernel {name}: {} contains only {}", Path::new(&folder).display(), there.join(", "))
        })
    };
    names.iter().map(of_name).collect()
}

fn in_folder(folder: &Path) -> Result<Vec<Kernel>> {
    let entries = std::fs::read_dir(folder)
        .with_context(|| format!("cannot read the kernel folder {} ({FOLDER})", folder.display()))?;
    let mut found = Vec::new();
    for entry in entries {
        let dir = entry?.path();
        let vmlinuz = dir.join("vmlinuz");
        if vmlinuz.is_file() {
            let archive = dir.join("modules.tar.zst");
            let modules = if archive.is_file() { Modules::Archive(archive) } else { Modules::None };
            let name = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
            found.push(Kernel { name, vmlinuz, modules, system: None });
        }
    }
    if found.is_empty() {
        bail!("{} ({FOLDER}) contains no kernel; a kernel is a folder with a file vmlinuz", folder.display());
    }
    found.sort_by_key(|kernel| version_key(&kernel.name));
    Ok(found)
}

/// Returns a key that sorts 6.1 before 6.12 before 7.3.
fn version_key(name: &str) -> (Vec<u64>, String) {
    let numbers = name.split(|c: char| !c.is_ascii_digit()).filter_map(|part| part.parse().ok()).collect();
    (numbers, name.to_owned())
}

/// Returns Debian's kernels for another processor, with the programs that tests start.
fn foreign(names: &[String], work: &Path, arch: Arch) -> Result<Vec<Kernel>> {
    let known: Vec<&str> = FOREIGN.iter().map(|(name, _)| *name).collect();
    if let Some(name) = names.iter().find(|name| !known.contains(&name.as_str())) {
        bail!("kernel {name}: only Debian's are available for {}: {}", arch.name(), known.join(", "));
    }
    let wanted = FOREIGN.iter().filter(|(name, _)| names.is_empty() || names.iter().any(|n| n == name));
    wanted.map(|(name, release)| of_release(name, release, work, arch)).collect()
}

fn of_release(name: &str, release: &str, work: &Path, arch: Arch) -> Result<Kernel> {
    let work = work.join(arch.name());
    let root = work.join(name);
    if !root.join("boot").is_dir() {
        let packages =
            format!("linux-image-cloud-{},busybox-static,iproute2,runc,bpftool,e2fsprogs", arch.name());
        let archive = rootfs::packages(&work, "system", release, &packages, Made::Unpacked(arch))?;
        let part = work.join(format!("{name}.part"));
        rootfs::unpack(&archive, &part)?;
        let step = Step::start(format!("index the modules of {release}'s kernel"));
        index_modules(&step, &part)?;
        std::fs::rename(&part, &root).with_context(|| format!("cannot create {}", root.display()))?;
        step.done("");
    }
    Ok(Kernel { system: Some(root.clone()), ..unpacked(name, &root)? })
}

/// Returns the kernel of a package unpacked in the folder `root`.
fn unpacked(name: &str, root: &Path) -> Result<Kernel> {
    let folder =
        only_entry(&root.join("lib/modules")).or_else(|_| only_entry(&root.join("usr/lib/modules")))?;
    let release = folder.file_name().unwrap_or_default().to_string_lossy();
    let vmlinuz = root.join("boot").join(format!("vmlinuz-{release}"));
    Ok(Kernel { name: name.to_owned(), vmlinuz, modules: Modules::Folder(folder), system: None })
}

/// Returns the distribution's newest kernel package, downloaded and unpacked below `work`, or the one
/// unpacked earlier.
fn debian(work: &Path) -> Result<Kernel> {
    let dir = work.join("debian");
    let root = dir.join("root");
    if !root.join("boot").is_dir() {
        let step = Step::start("download the distribution's kernel package");
        download(&step, &dir)?;
        step.done("");
    }
    unpacked("debian", &root)
}

fn download(step: &Step, dir: &Path) -> Result<()> {
    let without = format!(
        "{FOLDER} is not set, and the distribution's kernel package cannot be downloaded; set {FOLDER} to a folder \
         of kernels (<name>/vmlinuz and <name>/modules.tar.zst), or run this where apt reaches its mirror, after \
         `apt-get update`"
    );
    if setup::find("apt-get").is_none() || setup::find("dpkg").is_none() {
        bail!("{without} (this is not a Debian-like system)");
    }
    let package = DEBIAN.iter().find_map(|name| kernel_package(name)).context(without.clone())?;
    let part = dir.join("part");
    if part.exists() {
        std::fs::remove_dir_all(&part).with_context(|| format!("cannot remove {}", part.display()))?;
    }
    std::fs::create_dir_all(&part).with_context(|| format!("cannot create {}", part.display()))?;
    step.run(Command::new("apt-get").current_dir(&part).args(["download", &package])).context(without)?;
    let deb = only_entry(&part)?;
    let root = part.join("root");
    step.run(Command::new("dpkg").arg("-x").arg(&deb).arg(&root))?;
    index_modules(step, &root)?;
    std::fs::rename(&root, dir.join("root")).context("cannot keep the unpacked kernel package")?;
    std::fs::remove_dir_all(&part).context("cannot remove the kernel package")
}

/// Returns the package that contains the kernel, a dependency of `name`.
fn kernel_package(name: &str) -> Option<String> {
    let output = Command::new("apt-cache").args(["--no-all-versions", "depends", name]).output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let package = text.lines().find_map(|line| line.trim().strip_prefix("Depends: linux-image-"))?;
    Some(format!("linux-image-{}", package.trim()))
}

/// Decompresses and indexes a package's modules, as its installation would have done.
fn index_modules(step: &Step, root: &Path) -> Result<()> {
    let lib = root.join("lib/modules");
    let (base, modules) = if lib.is_dir() {
        (root.to_path_buf(), lib)
    } else {
        (root.join("usr"), root.join("usr/lib/modules"))
    };
    let release = only_entry(&modules)?;
    let packed: Vec<PathBuf> = files_below(&release)?
        .into_iter()
        .filter(|path| path.extension().is_some_and(|x| x == "xz"))
        .collect();
    for some in packed.chunks(500) {
        step.run(Command::new("xz").arg("--decompress").args(some))?;
    }
    let busybox = beelet_tests::images::busybox()?;
    let name = release.file_name().unwrap_or_default();
    step.run(Command::new(busybox).arg("depmod").arg("-b").arg(base).arg(name)).map(drop)
}

fn only_entry(dir: &Path) -> Result<PathBuf> {
    let mut entries = std::fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))?;
    let first = entries.next().with_context(|| format!("{} is empty", dir.display()))??;
    Ok(first.path())
}

fn files_below(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut folders = vec![dir.to_path_buf()];
    while let Some(folder) = folders.pop() {
        let entries =
            std::fs::read_dir(&folder).with_context(|| format!("cannot read {}", folder.display()))?;
        for entry in entries {
            let entry = entry?;
            let kind = entry.file_type()?;
            if kind.is_dir() {
                folders.push(entry.path());
            } else if kind.is_file() {
                files.push(entry.path());
            }
        }
    }
    files.sort();
    Ok(files)
}

impl Kernel {
    /// Returns the image to start: the ELF file inside the vmlinuz, stored below `work`; the vmlinuz itself,
    /// which starts some seconds later, if its compression is not supported.
    pub(super) fn image(&self, work: &Path) -> Result<PathBuf> {
        let packed = std::fs::read(&self.vmlinuz)
            .with_context(|| format!("cannot read the kernel {}", self.vmlinuz.display()))?;
        let image = work.join("vmlinux");
        match payload(&packed).and_then(|(tool, bytes)| filter(tool, bytes)) {
            Ok(elf) if elf.starts_with(b"\x7fELF") => {
                workdir::write(&image, elf)?;
                Ok(image)
            }
            _ => Ok(self.vmlinuz.clone()),
        }
    }

    /// Returns its modules by their path in a guest.
    pub(super) fn modules(&self, work: &Path) -> Result<BTreeMap<String, PathBuf>> {
        match &self.modules {
            Modules::None => Ok(BTreeMap::new()),
            Modules::Archive(archive) => {
                let dir = work.join("lib");
                if dir.exists() {
                    std::fs::remove_dir_all(&dir)
                        .with_context(|| format!("cannot remove {}", dir.display()))?;
                }
                unpack(archive, &dir)?;
                Ok(files_below(&dir)?.into_iter().map(|file| (in_guest(&dir, &file), file)).collect())
            }
            Modules::Folder(folder) => selection(folder),
        }
    }
}

/// Returns the path of a file of `dir` in the guest's /lib.
fn in_guest(dir: &Path, file: &Path) -> String {
    format!("lib/{}", file.strip_prefix(dir).unwrap_or(file).display())
}

fn unpack(archive: &Path, dir: &Path) -> Result<()> {
    let bytes = std::fs::read(archive).with_context(|| format!("cannot read {}", archive.display()))?;
    let tar = filter("zstd", &bytes).with_context(|| format!("cannot unpack {}", archive.display()))?;
    std::fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    tar::Archive::new(tar.as_slice())
        .unpack(dir)
        .with_context(|| format!("cannot unpack {}", archive.display()))
}

/// Returns [`MODULES`], their dependencies, and the files that modprobe reads.
fn selection(release: &Path) -> Result<BTreeMap<String, PathBuf>> {
    let name = release.file_name().unwrap_or_default().to_string_lossy();
    let dependencies = workdir::read(&release.join("modules.dep"))?;
    let indices = ["modules.dep", "modules.alias", "modules.symbols", "modules.builtin", "modules.softdep"];
    let wanted = with_dependencies(MODULES, &dependencies).into_iter().chain(indices.map(ToOwned::to_owned));
    Ok(wanted
        .map(|path| (format!("lib/modules/{name}/{path}"), release.join(path)))
        .filter(|(_, file)| file.is_file())
        .collect())
}

/// Returns the files of the modules `names` and of all their dependencies, given the lines of a modules.dep:
/// `path: path path …`. A line lists all dependencies or only the direct ones, depending on the tool that
/// wrote it.
fn with_dependencies(names: &[&str], dependencies: &str) -> BTreeSet<String> {
    let lines: BTreeMap<&str, &str> = dependencies.lines().filter_map(|line| line.split_once(':')).collect();
    let is_wanted = |path: &&str| {
        let module = path.rsplit('/').next().and_then(|file| file.split('.').next()).unwrap_or_default();
        names.contains(&module.replace('-', "_").as_str())
    };
    let mut open: Vec<&str> = lines.keys().copied().filter(is_wanted).collect();
    let mut found = BTreeSet::new();
    while let Some(path) = open.pop() {
        if found.insert(path.to_owned()) {
            open.extend(lines.get(path).into_iter().flat_map(|list| list.split_whitespace()));
        }
    }
    found
}

/// Returns the compressed ELF file inside a bzImage, with the program that decompresses it: The Linux/x86
/// Boot Protocol, fields setup_sects, payload_offset and payload_length.
fn payload(image: &[u8]) -> Result<(&'static str, &[u8])> {
    let word = |at: usize| -> Result<usize> {
        let bytes = image.get(at..at + 4).context("the file is too short to be a kernel")?;
        Ok(bytes.iter().rev().fold(0, |value, byte| value << 8 | usize::from(*byte)))
    };
    if image.get(0x202..0x206) != Some(b"HdrS") {
        bail!("the file is not a bzImage");
    }
    let sectors = match image.get(0x1f1).copied() {
        None | Some(0) => 4, // as the protocol says
        Some(sectors) => usize::from(sectors),
    };
    let start = (sectors + 1) * 512 + word(0x248)?;
    let bytes = start.checked_add(word(0x24c)?).and_then(|end| image.get(start..end));
    let bytes = bytes.context("the kernel's payload is outside the file")?;
    // The build appends the uncompressed size, except for gzip, which ends with it anyway.
    let without_size = bytes.get(..bytes.len().saturating_sub(4)).unwrap_or(bytes);
    match bytes {
        [0x28, 0xb5, 0x2f, 0xfd, ..] => Ok(("zstd", without_size)),
        [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => Ok(("xz", without_size)),
        [0x02, 0x21, 0x4c, 0x18, ..] => Ok(("lz4", without_size)),
        [0x1f, 0x8b, ..] => Ok(("gzip", bytes)),
        _ => bail!("unknown compression of the kernel"),
    }
}

/// Returns the output of `tool -dc` for `input`.
fn filter(tool: &str, input: &[u8]) -> Result<Vec<u8>> {
    let missing = || format!("cannot start {tool}; run cargo xtask setup --for vm");
    let program = setup::find(tool).with_context(missing)?;
    let mut child = Command::new(program)
        .arg("-dc")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(missing)?;
    let stdin = child.stdin.take();
    let output = std::thread::scope(|scope| {
        // A write error is caused by the child, whose exit status explains it better.
        scope.spawn(move || stdin.map(|mut pipe| pipe.write_all(input)));
        child.wait_with_output()
    })?;
    if !output.status.success() {
        bail!("{tool} exited with {}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(output.stdout)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a bzImage with only a header and a payload.
    fn image(payload: &[u8], length: u32) -> Vec<u8> {
        let mut image = vec![0; 2 * 512];
        image[0x1f1] = 1;
        image[0x202..0x206].copy_from_slice(b"HdrS");
        image[0x248..0x24c].copy_from_slice(&16_u32.to_le_bytes());
        image[0x24c..0x250].copy_from_slice(&length.to_le_bytes());
        image.extend([0; 16]);
        image.extend(payload);
        image
    }

    #[test]
    fn a_kernels_payload_is_found_by_its_header_and_known_by_its_magic() {
        let packed = b"\x28\xb5\x2f\xfdpacked\x01\x02\x03\x04";
        let image = image(packed, 14);
        assert_eq!(payload(&image).unwrap(), ("zstd", &packed[..10]));
    }

    #[test]
    fn a_gzip_payload_keeps_its_last_bytes() {
        let image = image(b"\x1f\x8bpacked", 8);
        assert_eq!(payload(&image).unwrap(), ("gzip", &b"\x1f\x8bpacked"[..]));
    }

    #[test]
    fn an_invalid_kernel_is_an_error() {
        for bytes in [vec![], vec![0; 4096], image(b"\x1f\x8b", 3), image(b"????", 4), image(b"", u32::MAX)] {
            assert!(payload(&bytes).is_err(), "{} bytes", bytes.len());
        }
    }

    #[test]
    fn modules_come_with_what_they_need_and_nothing_else() {
        let dependencies = "kernel/net/bridge/bridge.ko: kernel/net/802/stp.ko\n\
                            kernel/net/802/stp.ko: kernel/net/llc/llc.ko\n\
                            kernel/net/llc/llc.ko:\n\
                            kernel/fs/xfs/xfs.ko: kernel/lib/libcrc32c.ko\n\
                            kernel/net/br-netfilter.ko.xz: kernel/net/bridge/bridge.ko\n";
        let found = with_dependencies(&["br_netfilter"], dependencies);
        let expected = [
            "kernel/net/802/stp.ko",
            "kernel/net/br-netfilter.ko.xz",
            "kernel/net/bridge/bridge.ko",
            "kernel/net/llc/llc.ko",
        ];
        assert_eq!(found.into_iter().collect::<Vec<_>>(), expected);
    }

    #[test]
    fn kernels_are_found_in_the_order_of_their_versions() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["7.3", "6.12", "6.1"] {
            workdir::write(&dir.path().join(name).join("vmlinuz"), "").unwrap();
        }
        workdir::write(&dir.path().join("6.12/modules.tar.zst"), "").unwrap();
        workdir::write(&dir.path().join("notes/README"), "").unwrap();
        let found = in_folder(dir.path()).unwrap();
        assert_eq!(found.iter().map(|kernel| &*kernel.name).collect::<Vec<_>>(), ["6.1", "6.12", "7.3"]);
        assert_eq!(found[0].modules, Modules::None);
        assert_eq!(found[1].modules, Modules::Archive(dir.path().join("6.12/modules.tar.zst")));
    }

    #[test]
    fn an_empty_folder_of_kernels_is_an_error_that_names_it() {
        let dir = tempfile::tempdir().unwrap();
        let error = in_folder(dir.path()).unwrap_err().to_string();
        assert!(error.contains(&dir.path().display().to_string()), "{error}");
    }
}
