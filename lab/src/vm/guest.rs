//! Content of a guest: busybox and its applets, the scripts in `guest/`, the test programs, and the kernel's
//! modules.

use super::boot::{self, Machine};
use super::foreign;
use super::initramfs::Tree;
use super::kernels::Kernel;
use super::programs::{self, Programs};
use super::results::Test;
use anyhow::{Context as _, Result};
use beelet_tests::images;
use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;
use xtask::progress::Step;
use xtask::qemu::Qemu;

/// Script that runs a plan, in a guest or elsewhere.
pub(super) const RUN: &str = include_str!("guest/run");

const INIT: &str = include_str!("guest/init");

/// Time limit of a test in seconds. An emulated machine is slow, and slower while another one runs: a test
/// with three thousand cgroups then takes more than five minutes on arm64.
pub(super) const TEST_LIMIT: &str = "900";

/// Modules loaded at the start of every guest. The kernel loads others on demand.
const LOADED: &[&str] =
    &["veth", "dummy", "bridge", "br_netfilter", "overlay", "tun", "tcp_diag", "virtio_pci", "virtio_blk"];

/// Builds a guest with this kernel, with its files below `work`.
pub(super) fn machine(kernel: &Kernel, programs: &Programs, qemu: &Qemu, work: &Path) -> Result<Machine> {
    let step = Step::start(format!("build a guest with kernel {}", kernel.name));
    let dir = work.join("guests").join(&kernel.name);
    std::fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let image = kernel.image(&dir)?;
    let mut tree = tree(programs, kernel.system.as_deref())?;
    for (path, file) in kernel.modules(&dir)? {
        tree.file(&path, &file);
    }
    let initrd = dir.join("initrd");
    let file = std::fs::File::create(&initrd);
    let file = file.with_context(|| format!("cannot create {}", initrd.display()))?;
    let mebibytes = tree.write(std::io::BufWriter::new(file))? >> 20;
    step.done(&format!("{mebibytes} MiB"));
    // Room for the archive, the files unpacked from it, the tests and their files in tmpfs.
    Ok(Machine {
        arch: programs.arch,
        qemu: qemu.clone(),
        image,
        initrd,
        disk: dir.join("disk.img"),
        mebibytes: 768 + 2 * mebibytes,
        console: dir.join("console.log"),
    })
}

/// Returns all files except the modules. Files that beelet does not build come from this machine, or from a
/// foreign system in the folder `system`.
fn tree(programs: &Programs, system: Option<&Path>) -> Result<Tree> {
    let mut tree = Tree::default();
    for folder in ["dev", "proc", "sys", "tmp", "run", "root", "etc", "mnt", "var/lib", "var/log", "usr/bin"]
    {
        tree.folder(folder);
    }
    let borrowed = match system {
        None => programs::from_here()?.into_iter().map(|file| (file.display().to_string(), file)).collect(),
        Some(root) => foreign::programs(root, programs::BORROWED)?,
    };
    for (path, file) in &borrowed {
        tree.file(path, file);
    }
    // Debian's busybox has the same applets everywhere, and this machine can run its own.
    let busybox = images::busybox()?;
    let applets = Command::new(&busybox).arg("--list").output().context("cannot start busybox")?;
    tree.file("bin/busybox", &system.map_or(Ok(busybox), foreign::busybox)?);
    for applet in String::from_utf8_lossy(&applets.stdout).lines().filter(|name| *name != "busybox") {
        tree.link(&format!("bin/{applet}"), "busybox");
    }
    tree.link("sbin/modprobe", "../bin/busybox"); // where the kernel looks for it
    tree.text("etc/passwd", "root:x:0:0:root:/root:/bin/sh\n");
    tree.text("etc/group", "root:x:0:\n");
    tree.text("etc/hosts", "127.0.0.1 localhost\n::1 localhost\n");
    tree.text("init", INIT);
    tree.text("beelet/run", RUN);
    tree.text("beelet/limit", format!("{TEST_LIMIT}\n"));
    tree.text("beelet/results", format!("{}\n", boot::results_line(programs.arch)));
    tree.text("beelet/modules", LOADED.join("\n") + "\n");
    tree.text("beelet/plan", plan(&programs.plan, |program| format!("/{}", in_guest(program))));
    tree.file("beelet/bin/beelet", &programs.agent);
    tree.file("beelet/bin/beelet-testapp", &programs.testapp);
    for helper in &programs.helpers {
        tree.file(&helper.display().to_string(), helper);
    }
    for (name, path) in &programs.tests {
        tree.file(&in_guest(name), path);
    }
    Ok(tree)
}

fn in_guest(program: &str) -> String {
    format!("beelet/tests/{program}")
}

/// Formats the plan for `guest/run`, with each program's path given by `path`.
pub(super) fn plan(tests: &[Test], path: impl Fn(&str) -> String) -> String {
    let mut text = String::new();
    for (number, test) in tests.iter().enumerate() {
        let _ = writeln!(text, "{number}\t{}\t{}", path(&test.program), test.name); // to a String: never fails
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::results::{Transcript, Verdict};
    use super::*;

    /// Program that behaves like a test program for the tests of these names.
    const PROGRAM: &str = r#"#!/bin/sh
case $1 in
passes) echo; echo 'test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured' ;;
skips) echo 'SKIPPED skips: it needs BPF' >>"$BEELET_SKIPPED"; echo 'test result: ok. 1 passed; 0 failed' ;;
ignored) echo 'test result: ok. 0 passed; 0 failed; 1 ignored; 0 measured' ;;
fails) echo 'assertion failed: left == right'; exit 101 ;;
crashes) exec sh -c 'kill -11 $$' ;;
asks) [ "$2" = --exact ] && [ "$#" = 3 ] && echo 'test result: ok. 1 passed; 0 failed' ;;
*) echo 'test result: ok. 0 passed; 0 failed; 0 ignored; 9 filtered out' ;;
esac
"#;

    /// Doctor with a large JSON output.
    const AGENT: &str = "#!/bin/sh\necho \"$@\"\ncase \"$*\" in *json) seq 500 ;; esac\n";

    #[test]
    fn the_script_reports_the_result_of_every_test() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        for (name, text) in [("run", RUN), ("program", PROGRAM), ("agent", AGENT)] {
            std::fs::write(at(name), text).unwrap();
            std::fs::set_permissions(at(name), std::fs::Permissions::from_mode(0o755)).unwrap();
        }
        let names = ["passes", "skips", "ignored", "fails", "crashes", "asks", "missing"];
        let tests = names.map(|name| Test { program: "program".into(), name: name.into() });
        std::fs::write(at("plan"), plan(&tests, |program| at(program).display().to_string())).unwrap();
        let mut command = Command::new("sh");
        command.arg(at("run")).arg(at("plan")).arg("60").env("BEELET_BIN", at("agent"));
        command.env("AFTER_DOCTOR", format!("touch {}", at("after").display()));
        let output = command.output().unwrap();

        let mut transcript = Transcript::default();
        for line in String::from_utf8_lossy(&output.stdout).lines() {
            transcript.line(line);
        }
        let failed = |why: &str, output: &[&str]| {
            Verdict::Failed(why.to_owned(), output.iter().map(|line| (*line).to_owned()).collect())
        };
        let expected = [
            Verdict::Passed,
            Verdict::Skipped("it needs BPF".into()),
            Verdict::Skipped("marked #[ignore]".into()),
            failed("the test failed", &["assertion failed: left == right"]),
            failed("the test was killed by signal 11", &["Segmentation fault"]),
            Verdict::Passed,
            failed(
                "the program succeeded but did not run the test",
                &["test result: ok. 0 passed; 0 failed; 0 ignored; 9 filtered out"],
            ),
        ];
        for (number, verdict) in expected.iter().enumerate() {
            assert_eq!(transcript.verdicts.get(&number), Some(verdict), "{}", names[number]);
        }
        assert!(transcript.done);
        assert_eq!(output.status.code(), Some(1));
        assert_eq!(transcript.doctor, ["doctor --bpf"]);
        assert!(
            transcript.doctor_json.starts_with("doctor --bpf -o json\n1\n"),
            "{}",
            transcript.doctor_json
        );
        assert_eq!(transcript.doctor_json.lines().count(), 501);
        assert!(at("after").exists());
        assert!(!transcript.facts["release"].is_empty());
    }

    #[test]
    fn the_scripts_are_valid_shell() {
        for script in [RUN, INIT] {
            let dir = tempfile::tempdir().unwrap();
            std::fs::write(dir.path().join("script"), script).unwrap();
            let output = Command::new("sh").arg("-n").arg(dir.path().join("script")).output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        }
    }
}
