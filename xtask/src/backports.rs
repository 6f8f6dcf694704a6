//! Packages from a Debian release's backports, for the one case that needs them: a machine where some package
//! of QEMU came from there already. The release's own QEMU doesn't work beside it, since they share files.
//!
//! The machine's package sources stay as they are: apt is given a copy of them, with the backports added, and
//! lists of its own, both below the target folder and gone afterwards. The mirror is the one that the machine
//! uses.

use crate::progress::Step;
use anyhow::{Context as _, Result};
use beelet_tests::workdir;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The packages that have to come from the same release, and the source package that shows which one it is.
const SOURCE: &str = "qemu";
const FAMILY: &[&str] = &["qemu-system-x86", "qemu-system-common", "qemu-system-data", "seabios"];

const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// Returns true if one of `packages` has to come from the backports.
pub(crate) fn needed(packages: &[&str]) -> bool {
    packages.iter().any(|package| FAMILY.contains(package))
        && query("dpkg-query", &["-W", "-f", "${db:Status-Status} ${source:Package} ${Version}\n"])
            .is_some_and(|text| is_backported(&text))
}

/// Returns true if a package of [`SOURCE`] is installed whose version is a backport's; lines of status,
/// source and version.
fn is_backported(installed: &str) -> bool {
    installed.lines().any(|line| {
        let words: Vec<&str> = line.split(' ').collect();
        matches!(words[..], ["installed", SOURCE, version] if version.contains("~bpo"))
    })
}

/// Installs `packages`: those of the family from the backports, the others as always.
pub(crate) fn install(step: &Step, packages: &[&str]) -> Result<()> {
    let codename = codename(&workdir::read(Path::new("/etc/os-release"))?)
        .context("/etc/os-release has no VERSION_CODENAME, so the backports' name is not known")?;
    let suite = format!("{codename}-backports");
    let targets = query("apt-get", &["indextargets", "--format", "$(CODENAME) $(COMPONENT) $(REPO_URI)"]);
    let mirror = targets.as_deref().and_then(|text| mirror(text, &codename)).with_context(|| {
        format!(
            "apt knows no mirror for {codename}, so {suite} can't be had; add it to apt's sources by hand"
        )
    })?;
    let dir = workdir::target_dir().join("vm").join(workdir::unique("apt"));
    let config = configuration(&dir, &suite, &mirror)?;
    let result = install_with(step, &config, &suite, packages);
    let removed =
        std::fs::remove_dir_all(&dir).with_context(|| format!("could not remove {}", dir.display()));
    result.and(removed)
}

fn install_with(step: &Step, config: &Path, suite: &str, packages: &[&str]) -> Result<()> {
    let apt = || {
        let mut command = Command::new("apt-get");
        command.env("APT_CONFIG", config).env("DEBIAN_FRONTEND", "noninteractive");
        command
    };
    step.run(apt().arg("update"))?;
    let family = FAMILY.iter().map(|package| format!("{package}/{suite}"));
    let others = packages.iter().filter(|package| !FAMILY.contains(package)).map(|name| (*name).to_owned());
    let wanted: Vec<String> = family.chain(others).collect();
    step.run(apt().args(["install", "-y", "--no-install-recommends"]).args(wanted)).map(drop)
}

/// Writes an apt configuration with the machine's sources and `suite` in `dir`; hands back its path.
fn configuration(dir: &Path, suite: &str, mirror: &str) -> Result<PathBuf> {
    let parts = query("apt-config", &["shell", "parts", "Dir::Etc::sourceparts/d"]).unwrap_or_default();
    let parts = parts.split('\'').nth(1).unwrap_or("/etc/apt/sources.list.d/").to_owned();
    for entry in std::fs::read_dir(&parts).into_iter().flatten().filter_map(Result::ok) {
        let path = entry.path();
        if path.extension().is_some_and(|kind| kind == "list" || kind == "sources") {
            workdir::write(&dir.join("sources").join(entry.file_name()), std::fs::read(&path)?)?;
        }
    }
    let signed = if Path::new(KEYRING).exists() { format!("[signed-by={KEYRING}] ") } else { String::new() };
    workdir::write(&dir.join("sources/backports.list"), format!("deb {signed}{mirror} {suite} main\n"))?;
    let lists = dir.join("lists");
    std::fs::create_dir_all(lists.join("partial"))
        .with_context(|| format!("could not make {}", lists.display()))?;
    let config = dir.join("apt.conf");
    let text = format!(
        "Dir::Etc::sourceparts \"{}\";\nDir::State::lists \"{}\";\nAcquire::Languages \"none\";\n",
        dir.join("sources").display(),
        lists.display()
    );
    workdir::write(&config, text)?;
    Ok(config)
}

/// What a program prints, if it ends well.
fn query(program: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program).args(arguments).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

fn codename(os_release: &str) -> Option<String> {
    let value = os_release.lines().find_map(|line| line.strip_prefix("VERSION_CODENAME="))?;
    Some(value.trim_matches('"').to_owned()).filter(|name| !name.is_empty())
}

/// The mirror of a release's main component, in lines of codename, component and address.
fn mirror(targets: &str, codename: &str) -> Option<String> {
    targets.lines().find_map(|line| {
        let words: Vec<&str> = line.split(' ').collect();
        matches!(words[..], [name, "main", _] if name == codename).then(|| words[2].to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_installed_qemu_from_the_backports_asks_for_more_of_it() {
        assert!(is_backported("installed bash 5\ninstalled qemu 1:10.0.2-2~bpo12+1\n"));
        assert!(!is_backported("installed qemu 1:7.2-7\ninstalled systemd 254~bpo12+1\n"));
        assert!(!is_backported("config-files qemu 1:10.0.2-2~bpo12+1\n"));
    }

    #[test]
    fn the_mirror_is_that_of_the_release_itself() {
        let targets =
            "bookworm-security main mirror://s\nbookworm contrib mirror://c\nbookworm main mirror://m\n";
        assert_eq!(mirror(targets, "bookworm").as_deref(), Some("mirror://m"));
        assert_eq!(mirror(targets, "trixie"), None);
    }

    #[test]
    fn the_release_is_named_in_os_release() {
        assert_eq!(codename("ID=debian\nVERSION_CODENAME=bookworm\n").as_deref(), Some("bookworm"));
        assert_eq!(codename("VERSION_CODENAME=\"noble\"\n").as_deref(), Some("noble"));
        assert_eq!(codename("ID=arch\n"), None);
    }
}
