//! The Debian package, made by dpkg-deb (docs/decisions/0021-packages.md has the reasons against cargo-deb).

use super::{layout, tree, version, with_tilde};
use crate::{cross::Arch, setup, shell};
use anyhow::{Context as _, Result, bail};
use beelet_tests_base::{images::Entry, workdir};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The scripts that dpkg runs, in packaging/deb.
const SCRIPTS: &[&str] = &["postinst", "prerm", "postrm"];
/// The programs that make the package.
const TOOLS: &[(&str, &str)] = &[("dpkg-deb", "dpkg"), ("objdump", "binutils"), ("md5sum", "coreutils")];

/// Checks that this machine has the programs that make the package.
///
/// # Errors
/// A program is missing; the message names the program and its package.
pub(super) fn require() -> Result<()> {
    for (tool, package) in TOOLS {
        if setup::find(tool).is_none() {
            bail!(
                "{tool} is missing, and a Debian package cannot be made without it: apt-get install {package}"
            );
        }
    }
    Ok(())
}

/// The compression of a package, by dpkg-deb.
#[derive(Clone, Copy, Debug)]
pub enum Packed {
    /// The smallest package, which takes a minute: for a release.
    Xz,
    /// No compression: for a temporary machine.
    Not,
}

/// Makes the package of these files in the folder `out`; all its times are `seconds` since 1970.
pub fn build(
    files: &[(String, Entry)],
    arch: Arch,
    revision: &str,
    packed: Packed,
    out: &Path,
    seconds: u64,
) -> Result<PathBuf> {
    let root = out.join("deb");
    tree::make(&root, files)?;
    let name = format!("{}-{revision}", with_tilde(version()));
    let control = root.join("DEBIAN");
    workdir::write(&control.join("md5sums"), sums(&root, files)?)?;
    workdir::write(&control.join("conffiles"), conffiles())?;
    workdir::write(
        &control.join("control"),
        self::control(&name, arch, &root.join("usr/bin/beelet"), files)?,
    )?;
    for script in SCRIPTS {
        let content = fs::read(workdir::repository().join("packaging/deb").join(script))
            .with_context(|| format!("could not read packaging/deb/{script}"))?;
        tree::place(&root, &format!("DEBIAN/{script}"), &Entry::File(content, 0o755))?;
    }
    let deb = out.join(format!("beelet_{name}_{}.deb", arch.name()));
    let mut command = Command::new("dpkg-deb");
    let compression = match packed {
        Packed::Xz => "-Zxz",
        Packed::Not => "-Znone",
    };
    command.args(["--root-owner-group", compression, "--build"]).arg(&root).arg(&deb);
    shell::run(command.env("SOURCE_DATE_EPOCH", seconds.to_string()))?;
    fs::remove_dir_all(&root).with_context(|| format!("could not remove {}", root.display()))?;
    Ok(deb)
}

/// Returns the checksums in the format of `md5sum --check`, with which `dpkg --verify` compares the files.
fn sums(root: &Path, files: &[(String, Entry)]) -> Result<Vec<u8>> {
    let regular = files.iter().filter(|(_, entry)| matches!(entry, Entry::File(..))).map(|(path, _)| path);
    let mut command = Command::new("md5sum");
    let output = command.args(regular).current_dir(root).output().context("could not start md5sum")?;
    if !output.status.success() {
        bail!("md5sum ended with {}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    }
    Ok(output.stdout)
}

fn conffiles() -> String {
    layout::CONFIGURATION.iter().map(|path| format!("/{path}\n")).collect()
}

/// Returns the package's name, relations and description (deb-control(5)).
fn control(name: &str, arch: Arch, binary: &Path, files: &[(String, Entry)]) -> Result<String> {
    let bytes: usize = files
        .iter()
        .map(|(_, entry)| if let Entry::File(content, _) = entry { content.len() } else { 0 })
        .sum();
    let mut text = format!("Package: beelet\nVersion: {name}\nArchitecture: {}\n", arch.name());
    text += "Maintainer: The beelet authors <packages@beelet.dev>\nSection: admin\nPriority: optional\n";
    let _ = writeln!(text, "Installed-Size: {}", bytes.div_ceil(1024));
    if let Some(libc) = needed_libc(binary)? {
        let _ = writeln!(text, "Depends: libc6 (>= {libc}), libgcc-s1");
    }
    text += "Recommends: containerd (>= 1.6) | cri-o, runc | crun, containernetworking-plugins\n\
             Suggests: apparmor, xfsprogs\n\
             Homepage: https://beelet.dev\n\
             Description: node agent that runs a machine's pods\n \
             beelet does the kubelet's job on one machine: it runs Kubernetes' pods on a container\n \
             runtime (CRI), on its own or as a node of a cluster. eBPF programs report the events\n \
             that other agents poll for. beelet observe measures the pods of a kubelet, read-only.\n";
    Ok(text)
}

/// Returns the version of glibc that the binary's symbols need; None if the binary is static.
fn needed_libc(binary: &Path) -> Result<Option<String>> {
    let output = Command::new("objdump").arg("-T").arg(binary).output().context("could not start objdump")?;
    Ok(newest_glibc(&String::from_utf8_lossy(&output.stdout)))
}

/// Returns the newest version in lines such as `… (GLIBC_2.34) pthread_create`.
fn newest_glibc(symbols: &str) -> Option<String> {
    let versions = symbols.split("GLIBC_").skip(1).filter_map(|rest| {
        let word: String = rest.chars().take_while(|c| c.is_ascii_digit() || *c == '.').collect();
        word.split('.').map(str::parse).collect::<Result<Vec<u32>, _>>().ok()
    });
    let newest = versions.max()?;
    Some(newest.iter().map(u32::to_string).collect::<Vec<_>>().join("."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pre_release_is_older_than_its_release() {
        assert_eq!(with_tilde("1.0.0"), "1.0.0");
        assert_eq!(with_tilde("1.0.0-rc.1"), "1.0.0~rc.1");
    }

    #[test]
    fn the_newest_glibc_of_the_symbols_is_found() {
        let text = "0 DF *UND* 0 (GLIBC_2.2.5) read\n0 DF *UND* 0 (GLIBC_2.34) dlsym\n0 (GLIBC_2.9) pipe2\n";
        assert_eq!(newest_glibc(text).as_deref(), Some("2.34"));
        assert_eq!(newest_glibc("no symbols\n"), None);
    }

    #[test]
    fn the_scripts_are_valid_shell_with_an_interpreter_line() {
        for script in SCRIPTS {
            let path = workdir::repository().join("packaging/deb").join(script);
            let output = Command::new("sh").arg("-n").arg(&path).output().unwrap();
            assert!(output.status.success(), "{script}: {}", String::from_utf8_lossy(&output.stderr));
            assert!(fs::read_to_string(&path).unwrap().starts_with("#!/bin/sh\n"), "{script}");
        }
    }

    #[test]
    fn a_package_has_the_files_with_their_modes_and_lists_its_conffiles() {
        if require().is_err() {
            return eprintln!("no dpkg-deb here");
        }
        let out = tempfile::tempdir().unwrap();
        let files = [
            ("etc/beelet/beelet.yaml".to_owned(), Entry::File(b"a: b\n".to_vec(), 0o644)),
            ("usr/bin/beelet".to_owned(), Entry::File(b"#!/bin/sh\n".to_vec(), 0o755)),
        ];
        let first = build(&files, Arch::here().unwrap(), "7", Packed::Xz, out.path(), 1_700_000_000).unwrap();
        let start = format!("beelet_{}-7_", with_tilde(version()));
        assert!(first.file_name().unwrap().to_string_lossy().starts_with(&start));
        let bytes = fs::read(&first).unwrap();
        let ask = |arguments: &[&str], part: &[&str]| {
            let output = Command::new("dpkg-deb").args(arguments).arg(&first).args(part).output().unwrap();
            String::from_utf8(output.stdout).unwrap()
        };
        let listed = ask(&["--contents"], &[]);
        assert!(listed.contains("-rwxr-xr-x root/root") && listed.contains("./usr/bin/beelet"), "{listed}");
        assert_eq!(ask(&["--info"], &["conffiles"]), "/etc/beelet/beelet.yaml\n");
        // A second build has the same bytes.
        build(&files, Arch::here().unwrap(), "7", Packed::Xz, out.path(), 1_700_000_000).unwrap();
        assert!(fs::read(&first).unwrap() == bytes);
    }
}
