//! The APT repository: the packages, their list, and the signed checksums of the list (deb-src is left out).
//! <https://wiki.debian.org/DebianRepository/Format> describes the files.

use super::sign::Gpg;
use crate::package::sha256;
use anyhow::{Context as _, Result, bail};
use beelet_tests_base::workdir;
use flate2::{Compression, GzBuilder};
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The suite and its only component, as in `deb [signed-by=KEY] URL stable main`.
const SUITE: &str = "stable";
const COMPONENT: &str = "main";

/// Makes the repository in the folder `root` from these packages, one per processor (in Debian's spelling).
/// `date` is the time of the release (RFC 5322, in UTC).
pub(super) fn build(root: &Path, packages: &[(&str, PathBuf)], date: &str, key: Option<&Gpg>) -> Result<()> {
    let suite = root.join("dists").join(SUITE);
    let mut lists = Vec::new();
    for (arch, package) in packages {
        let name = package.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let pool = format!("pool/{COMPONENT}/b/beelet/{name}");
        let content =
            std::fs::read(package).with_context(|| format!("could not read {}", package.display()))?;
        workdir::write(&root.join(&pool), &content)?;
        let list = entry(&control(package)?, &pool, content.len(), &sha256(package)?);
        let folder = format!("{COMPONENT}/binary-{arch}");
        workdir::write(&suite.join(&folder).join("Packages"), &list)?;
        let mut packed = GzBuilder::new().mtime(0).write(Vec::new(), Compression::best());
        packed.write_all(list.as_bytes())?;
        workdir::write(&suite.join(&folder).join("Packages.gz"), packed.finish()?)?;
        lists.extend([format!("{folder}/Packages"), format!("{folder}/Packages.gz")]);
    }
    let archs: Vec<&str> = packages.iter().map(|(arch, _)| *arch).collect();
    let mut text = format!(
        "Origin: beelet\nLabel: beelet\nSuite: {SUITE}\nCodename: {SUITE}\nDate: {date}\nArchitectures: {}\n\
         Components: {COMPONENT}\nDescription: beelet, a node agent\nSHA256:\n",
        archs.join(" ")
    );
    for list in &lists {
        let path = suite.join(list);
        let size =
            std::fs::metadata(&path).with_context(|| format!("could not read {}", path.display()))?.len();
        let _ = writeln!(text, " {} {size} {list}", sha256(&path)?);
    }
    let release = suite.join("Release");
    workdir::write(&release, text)?;
    if let Some(key) = key {
        key.clear_sign(&release, &suite.join("InRelease"))?;
        key.detach_sign(&release, &suite.join("Release.gpg"))?;
    }
    Ok(())
}

/// Returns the package's own fields.
fn control(package: &Path) -> Result<String> {
    let mut command = Command::new("dpkg-deb");
    let output = command.arg("--field").arg(package).output().context("could not start dpkg-deb")?;
    if !output.status.success() {
        bail!("dpkg-deb cannot read {}: {}", package.display(), String::from_utf8_lossy(&output.stderr));
    }
    String::from_utf8(output.stdout)
        .with_context(|| format!("the fields of {} are no text", package.display()))
}

/// Returns the entry of a list: the package's own fields, and those that find and check its file.
fn entry(control: &str, path: &str, size: usize, sha256: &str) -> String {
    format!("{}\nFilename: {path}\nSize: {size}\nSHA256: {sha256}\n\n", control.trim_end())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::setup::find;
    use std::io::Read as _;
    use std::net::TcpListener;

    /// Makes a package without scripts, whose only file has this content.
    fn package(folder: &Path, content: &str) -> PathBuf {
        let (root, deb) = (folder.join("root"), folder.join("beelet_1.0.0-1_all.deb"));
        workdir::write(&root.join("usr/share/beelet/file"), content).unwrap();
        let control = "Package: beelet\nVersion: 1.0.0-1\nArchitecture: all\nMaintainer: x <x@example.com>\n\
                       Description: test\n";
        workdir::write(&root.join("DEBIAN/control"), control).unwrap();
        let status =
            Command::new("dpkg-deb").args(["--root-owner-group", "--build"]).arg(&root).arg(&deb).output();
        assert!(status.unwrap().status.success());
        deb
    }

    /// Makes a key, and returns the file with its secret part.
    fn key(folder: &Path) -> PathBuf {
        let home = folder.join("maker");
        std::fs::create_dir_all(&home).unwrap();
        let gpg = |arguments: &[&str]| {
            let mut command = Command::new("gpg");
            command.args(["--batch", "--quiet", "--passphrase", "", "--homedir"]).arg(&home).args(arguments);
            assert!(command.status().unwrap().success(), "{arguments:?}");
        };
        std::fs::set_permissions(&home, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
        gpg(&[
            "--faked-system-time",
            "1600000000",
            "--quick-gen-key",
            "beelet test <x@example.com>",
            "ed25519",
            "sign",
            "never",
        ]);
        let file = folder.join("key.asc");
        gpg(&["--armor", "--export-secret-keys", "--output", file.to_str().unwrap()]);
        let _ = Command::new("gpgconf").arg("--homedir").arg(&home).args(["--kill", "all"]).status();
        file
    }

    /// Serves the files of a folder until the test ends; returns the address.
    fn serve(folder: PathBuf) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (mut stream, mut text) = (stream.unwrap(), Vec::new());
                let mut byte = [0];
                while !text.ends_with(b"\r\n\r\n") && stream.read(&mut byte).is_ok_and(|count| count == 1) {
                    text.push(byte[0]);
                }
                let text = String::from_utf8_lossy(&text).into_owned();
                let path = text.split(' ').nth(1).unwrap_or("/").trim_start_matches('/').to_owned();
                let answer = match std::fs::read(folder.join(path)) {
                    Ok(content) => {
                        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n", content.len());
                        [head.as_bytes(), b"Connection: close\r\n\r\n", &content].concat()
                    }
                    Err(_) => {
                        b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".to_vec()
                    }
                };
                let _ = stream.write_all(&answer);
            }
        });
        address
    }

    /// Runs apt-get with all its folders below `root`, and returns its exit status and its output.
    fn apt(root: &Path, source: &str, arguments: &[&str]) -> (bool, String) {
        for folder in ["state/lists/partial", "cache/archives/partial", "etc", "got"] {
            std::fs::create_dir_all(root.join(folder)).unwrap();
        }
        workdir::write(&root.join("etc/sources.list"), source).unwrap();
        workdir::write(&root.join("status"), "").unwrap();
        let set = |name: &str, path: &str| format!("{name}={}", root.join(path).display());
        let mut command = Command::new("apt-get");
        for setting in [
            set("Dir::State", "state"),
            set("Dir::State::status", "status"),
            set("Dir::Cache", "cache"),
            set("Dir::Etc", "etc"),
            "APT::Sandbox::User=root".to_owned(),
            "APT::Architecture=amd64".to_owned(),
            "Acquire::http::Proxy=false".to_owned(),
        ] {
            command.args(["-o", &setting]);
        }
        let output =
            command.args(arguments).current_dir(root.join("got")).env("LC_ALL", "C").output().unwrap();
        let both = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8_lossy(&both).into_owned())
    }

    #[test]
    fn apt_installs_from_the_repository_and_refuses_a_changed_one() {
        // gpg itself has no secret keys: gpg-agent keeps them, a package of its own.
        if ["apt-get", "dpkg-deb", "gpg", "gpg-agent"].iter().any(|tool| find(tool).is_none()) {
            return eprintln!("apt-get, dpkg-deb, gpg or gpg-agent is missing");
        }
        let folder = tempfile::tempdir().unwrap();
        let (web, root) = (folder.path().join("web"), folder.path().join("apt"));
        let gpg = Gpg::import(&key(folder.path()), 1_700_000_000).unwrap();
        let deb = package(folder.path(), "hello\n");
        let date = "Tue, 14 Nov 2023 22:13:20 UTC";
        build(&web, &[("amd64", deb.clone())], date, Some(&gpg)).unwrap();
        let keyring = folder.path().join("key.pub.asc");
        gpg.export(&keyring).unwrap();
        let source =
            format!("deb [signed-by={}] http://{} stable main\n", keyring.display(), serve(web.clone()));
        let (updated, said) = apt(&root, &source, &["update"]);
        assert!(updated && !said.contains("W:"), "{said}");
        let (got, said) = apt(&root, &source, &["download", "beelet"]);
        assert!(got, "{said}");
        assert_eq!(
            std::fs::read(root.join("got/beelet_1.0.0-1_all.deb")).unwrap(),
            std::fs::read(&deb).unwrap()
        );
        // Equal files have equal signatures.
        let signed = std::fs::read(web.join("dists/stable/InRelease")).unwrap();
        build(&web, &[("amd64", deb)], date, Some(&gpg)).unwrap();
        assert!(std::fs::read(web.join("dists/stable/InRelease")).unwrap() == signed);
        // A list that the signature does not cover is refused.
        let list = web.join("dists/stable/main/binary-amd64/Packages.gz");
        std::fs::remove_file(&list).unwrap();
        workdir::write(&web.join("dists/stable/main/binary-amd64/Packages"), "Package: evil\n").unwrap();
        std::fs::remove_dir_all(root.join("state")).unwrap();
        let (updated, said) = apt(&root, &source, &["update"]);
        assert!(!updated, "{said}");
    }
}
