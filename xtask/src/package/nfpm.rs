//! Packages for distributions with RPM, and for Alpine, made by nFPM from the same files as the Debian
//! package.

use super::{layout, tree, version, with_tilde};
use crate::cross::Arch;
use crate::{shell, tools};
use anyhow::{Context as _, Result};
use beelet_tests_base::{images::Entry, workdir};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A format of packages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    /// Fedora, RHEL, openSUSE.
    Rpm,
    /// Alpine.
    Apk,
}

/// Files of the repository that only Alpine's package has, with their installed paths and modes: OpenRC's
/// services.
const OPENRC: &[(&str, &str, u32)] = &[
    ("packaging/apk/beelet.initd", "etc/init.d/beelet", 0o755),
    ("packaging/apk/beelet-observe.initd", "etc/init.d/beelet-observe", 0o755),
];
/// The folder of zsh's completions: Debian's, and the one of all others.
const ZSH: (&str, &str) = ("usr/share/zsh/vendor-completions/", "usr/share/zsh/site-functions/");
const UNITS: &str = "usr/lib/systemd/";

/// Makes the package of these files, whose binary is static, in the folder `out`; all its times are `seconds`
/// since 1970.
pub(super) fn build(
    format: Format,
    files: &[(String, Entry)],
    arch: Arch,
    revision: &str,
    out: &Path,
    seconds: u64,
) -> Result<PathBuf> {
    let files = of_format(format, files)?;
    let (name, folder) = match format {
        Format::Rpm => (format!("beelet-{}-{revision}.{}.rpm", with_tilde(version()), arch.machine()), "rpm"),
        Format::Apk => {
            let version = of_alpine(version()).replacen('-', "_", 1);
            (format!("beelet-{version}-r{revision}.{}.apk", arch.machine()), "apk")
        }
    };
    let (root, package) = (out.join(folder), out.join(name));
    tree::make(&root, &files)?;
    let recipe = out.join(format!("{folder}.json"));
    let scripts = out.join(format!("{folder}-scripts"));
    copy_scripts(folder, &scripts, seconds)?;
    workdir::write(&recipe, recipe_of(format, &files, arch, revision, [&root, &scripts]).to_string())?;
    let mut command = Command::new(tools::NFPM.ensure()?);
    command.args(["package", "--packager", folder, "--config"]).arg(&recipe).arg("--target").arg(&package);
    shell::run(command.env("SOURCE_DATE_EPOCH", seconds.to_string()).stdout(std::process::Stdio::null()))?;
    std::fs::remove_file(&recipe).with_context(|| format!("could not remove {}", recipe.display()))?;
    for folder in [root, scripts] {
        std::fs::remove_dir_all(&folder).with_context(|| format!("could not remove {}", folder.display()))?;
    }
    Ok(package)
}

/// Returns the version from which nFPM makes Alpine's, e.g. `1.0.0_rc1`: a pre-release has no dot there
/// (apk-package(5)). From the other spelling nFPM makes rpm's, e.g. `1.0.0~rc.1`.
fn of_alpine(version: &str) -> String {
    match version.split_once('-') {
        Some((release, pre)) => format!("{release}-{}", pre.replace('.', "")),
        None => version.to_owned(),
    }
}

/// Copies the scripts of packaging/`from` to a folder. nFPM puts the files' times into Alpine's package.
fn copy_scripts(from: &str, to: &Path, seconds: u64) -> Result<()> {
    let time = std::time::UNIX_EPOCH + std::time::Duration::from_secs(seconds);
    let from = workdir::repository().join("packaging").join(from);
    for entry in std::fs::read_dir(&from).with_context(|| format!("could not list {}", from.display()))? {
        let path = entry?.path();
        let copy = to.join(path.file_name().unwrap_or_default());
        workdir::write(&copy, workdir::read(&path)?)?;
        std::fs::File::options()
            .write(true)
            .open(&copy)
            .and_then(|file| file.set_modified(time))
            .with_context(|| format!("could not set the time of {}", copy.display()))?;
    }
    Ok(())
}

/// Returns the files with the paths of these distributions.
fn of_format(format: Format, files: &[(String, Entry)]) -> Result<Vec<(String, Entry)>> {
    let kept = files.iter().filter(|(path, _)| format == Format::Rpm || !path.starts_with(UNITS));
    let mut all: Vec<(String, Entry)> =
        kept.map(|(path, entry)| (path.replace(ZSH.0, ZSH.1), entry.clone())).collect();
    if format == Format::Apk {
        for (from, to, mode) in OPENRC {
            let path = workdir::repository().join(from);
            let content =
                std::fs::read(&path).with_context(|| format!("could not read {}", path.display()))?;
            all.push(((*to).to_owned(), Entry::File(content, *mode)));
        }
    }
    all.sort_by(|(a, _), (b, _)| a.cmp(b));
    Ok(all)
}

/// Returns nFPM's description of the package. YAML contains JSON.
fn recipe_of(
    format: Format,
    files: &[(String, Entry)],
    arch: Arch,
    revision: &str,
    [root, scripts]: [&Path; 2],
) -> Value {
    let folders = own_folders(files);
    let folders = folders.iter().map(|path| content(path, &Entry::Folder(0o755), root));
    let contents: Vec<Value> =
        folders.chain(files.iter().map(|(path, entry)| content(path, entry, root))).collect();
    let script = |name: &str| Value::from(scripts.join(name).display().to_string());
    let mut recipe = json!({
        "name": "beelet",
        "arch": arch.name(),
        "platform": "linux",
        "version": match format { Format::Rpm => version().to_owned(), Format::Apk => of_alpine(version()) },
        "release": match format { Format::Rpm => revision.to_owned(), Format::Apk => format!("r{revision}") },
        "maintainer": "The beelet authors <packages@beelet.dev>",
        "description": "node agent that runs a machine's pods",
        "homepage": "https://beelet.dev",
        "license": "Apache-2.0",
        "contents": contents,
    });
    match format {
        Format::Rpm => {
            recipe["rpm"] = json!({
                "summary": "node agent that runs a machine's pods",
                "compression": "xz",
                "buildhost": "beelet.dev",
            });
            recipe["recommends"] = json!(["containerd", "runc", "containernetworking-plugins"]);
            let names = ["postinstall", "preremove", "postremove"];
            recipe["scripts"] = names.iter().map(|name| ((*name).to_owned(), script(name))).collect();
        }
        Format::Apk => {
            recipe["scripts"] = json!({ "preremove": script("preremove") });
            recipe["apk"] = json!({ "scripts": { "postupgrade": script("postupgrade") } });
        }
    }
    recipe
}

/// Returns the folders that a removal of the package must remove, as dpkg does by itself: those of beelet's
/// name and below, if `files` has no entry for them.
fn own_folders(files: &[(String, Entry)]) -> BTreeSet<String> {
    let above = files.iter().flat_map(|(path, _)| Path::new(path).ancestors().skip(1));
    let own = above.filter(|folder| folder.iter().any(|part| part == "beelet"));
    let own: BTreeSet<String> = own.map(|folder| folder.display().to_string()).collect();
    own.into_iter().filter(|folder| files.iter().all(|(path, _)| path != folder)).collect()
}

fn content(path: &str, entry: &Entry, root: &Path) -> Value {
    let owned = |mode: u32| json!({ "mode": mode, "owner": "root", "group": "root" });
    let dst = format!("/{path}");
    match entry {
        Entry::File(_, mode) => {
            let kind = if layout::CONFIGURATION.contains(&path) { "config|noreplace" } else { "" };
            json!({ "src": root.join(path), "dst": dst, "type": kind, "file_info": owned(*mode) })
        }
        Entry::Folder(mode) => json!({ "dst": dst, "type": "dir", "file_info": owned(*mode) }),
        Entry::Link(target) => json!({ "src": target, "dst": dst, "type": "symlink" }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alpines_package_has_services_instead_of_units() {
        let files = [
            ("usr/bin/beelet".to_owned(), Entry::File(b"x".to_vec(), 0o755)),
            ("usr/lib/systemd/system/beelet.service".to_owned(), Entry::File(b"x".to_vec(), 0o644)),
            ("usr/share/zsh/vendor-completions/_beelet".to_owned(), Entry::File(b"x".to_vec(), 0o644)),
        ];
        let names = |format| {
            let files = of_format(format, &files).unwrap();
            files.into_iter().map(|(path, _)| path).collect::<Vec<_>>()
        };
        assert_eq!(
            names(Format::Apk),
            [
                "etc/init.d/beelet",
                "etc/init.d/beelet-observe",
                "usr/bin/beelet",
                "usr/share/zsh/site-functions/_beelet"
            ]
        );
        assert_eq!(
            names(Format::Rpm),
            [
                "usr/bin/beelet",
                "usr/lib/systemd/system/beelet.service",
                "usr/share/zsh/site-functions/_beelet"
            ]
        );
    }

    #[test]
    fn alpines_pre_release_has_no_dot() {
        assert_eq!(of_alpine("1.0.0"), "1.0.0");
        assert_eq!(of_alpine("1.0.0-rc.1"), "1.0.0-rc1");
    }

    #[test]
    fn a_package_owns_the_folders_of_its_name() {
        let file = |path: &str| (path.to_owned(), Entry::File(Vec::new(), 0o644));
        let folder = ("etc/beelet/manifests".to_owned(), Entry::Folder(0o755));
        let files = [
            file("etc/beelet/beelet.yaml"),
            folder,
            file("usr/bin/beelet"),
            file("usr/share/doc/beelet/x/y"),
        ];
        let own: Vec<String> = own_folders(&files).into_iter().collect();
        assert_eq!(own, ["etc/beelet", "usr/share/doc/beelet", "usr/share/doc/beelet/x"]);
    }

    #[test]
    fn the_scripts_of_the_packages_are_valid_shell() {
        for folder in ["rpm", "apk"] {
            let folder = workdir::repository().join("packaging").join(folder);
            for entry in std::fs::read_dir(&folder).unwrap() {
                let path = entry.unwrap().path();
                let output = Command::new("sh").arg("-n").arg(&path).output().unwrap();
                assert!(
                    output.status.success(),
                    "{}: {}",
                    path.display(),
                    String::from_utf8_lossy(&output.stderr)
                );
            }
        }
    }
}
