//! Tests of `beelet doctor` on the machine that runs them: the report must fit every machine.
#![allow(clippy::unwrap_used, clippy::panic)] // a failure in a helper fails the test

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use tempfile::TempDir;

fn doctor(dir: &TempDir, ours: &str, kubelet: &str, args: &[&str]) -> Output {
    run(dir, ours, kubelet, args).1
}

/// Returns the doctor's process id and output.
fn run(dir: &TempDir, ours: &str, kubelet: &str, args: &[&str]) -> (u32, Output) {
    let file = dir.path().join("beelet.yaml");
    let path = dir.path().display();
    let config = format!(
        "apiVersion: beelet.dev/v1alpha1\nkind: BeeletConfiguration\nnodeName: node\nstateDir: {path}/state\nrunDir: {path}/run\n{ours}\n\
         ---\napiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n\
         containerRuntimeEndpoint: unix://{path}/runtime.sock\n{kubelet}\n"
    );
    std::fs::write(&file, config).unwrap();
    let child = Command::new(env!("CARGO_BIN_EXE_beelet"))
        .args(["doctor", "--config"])
        .arg(&file)
        .args(args)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    (child.id(), child.wait_with_output().unwrap())
}

fn findings(output: &Output) -> Vec<Value> {
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["canRun"], output.status.success());
    report["findings"].as_array().unwrap().clone()
}

fn find<'a>(findings: &'a [Value], check: &str) -> &'a Value {
    findings
        .iter()
        .find(|finding| finding["check"] == check)
        .unwrap_or_else(|| panic!("{check}: {findings:#?}"))
}

#[test]
fn a_machine_without_a_runtime_cannot_run_the_agent_and_gets_a_remedy() {
    let dir = TempDir::new().unwrap();
    let output = doctor(&dir, "", "healthzPort: 0", &["-o", "json"]);
    assert_eq!(output.status.code(), Some(1));
    let findings = findings(&output);
    let runtime = find(&findings, "runtime");
    assert_eq!(runtime["state"], "missing");
    assert!(runtime["remedy"].as_str().unwrap().contains("containerRuntimeEndpoint"), "{runtime}");
    for finding in &findings {
        let well = finding["state"] == "ok";
        assert_eq!(finding["remedy"].is_null(), well, "only a problem has a remedy: {finding}");
        assert_eq!(finding["consequence"].is_null(), well, "{finding}");
    }
    let root = rustix::process::geteuid().is_root();
    assert_eq!(find(&findings, "user")["state"], if root { "ok" } else { "missing" });
    let btf = Path::new("/sys/kernel/btf/vmlinux").exists();
    assert_eq!(find(&findings, "BTF")["state"], if btf { "ok" } else { "degraded" });
    assert_eq!(find(&findings, "manifests")["state"], "degraded");
    assert_eq!(find(&findings, "state")["state"], "ok");
    assert!(!dir.path().join("state").exists(), "the doctor created a folder");
}

#[test]
fn a_port_in_use_is_found() {
    let dir = TempDir::new().unwrap();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let output = doctor(&dir, "", &format!("healthzPort: {port}"), &["-o", "json"]);
    let findings = findings(&output);
    let finding = find(&findings, "health port");
    assert_eq!(finding["state"], "missing");
    assert!(finding["remedy"].as_str().unwrap().contains("healthzPort"), "{finding}");
}

#[test]
fn the_table_ends_with_the_verdict() {
    let dir = TempDir::new().unwrap();
    let output = doctor(&dir, "", "healthzPort: 0", &[]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.lines().last().unwrap().starts_with("beelet cannot run here: "), "{text}");
    assert!(text.contains("MISSING") && text.contains("Fix: install and start containerd"), "{text}");
}

#[test]
fn bpf_programs_are_loaded_and_removed_again() {
    let dir = TempDir::new().unwrap();
    let (pid, output) = run(&dir, "", "healthzPort: 0", &["--bpf", "-o", "json"]);
    let findings = findings(&output);
    // With and without permission, every program has a line, and no files are left.
    assert!(findings.iter().any(|finding| finding["check"] == "pod_socket" || finding["check"] == "BPF"));
    assert_eq!(leftovers(pid), Vec::<String>::new());
    let off = doctor(&dir, "bpf: off", "healthzPort: 0", &["--bpf", "-o", "json"]);
    let off: Value = serde_json::from_slice(&off.stdout).unwrap();
    assert_eq!(find(off["findings"].as_array().unwrap(), "BPF")["detail"], "turned off by the configuration");
}

#[test]
fn no_check_creates_a_missing_cgroup_root() {
    let dir = TempDir::new().unwrap();
    let root = format!("beelet-misspelt-{}", std::process::id());
    let made = || {
        let hierarchies = std::fs::read_dir("/sys/fs/cgroup").into_iter().flatten().flatten();
        let mounts = hierarchies.map(|entry| entry.path()).chain([PathBuf::from("/sys/fs/cgroup")]);
        mounts.map(|mount| mount.join(&root)).filter(|folder| folder.exists()).collect::<Vec<_>>()
    };
    let output = doctor(&dir, "", &format!("healthzPort: 0\ncgroupRoot: /{root}"), &["--bpf", "-o", "json"]);
    let left = made();
    for folder in &left {
        std::fs::remove_dir(folder).unwrap();
    }
    assert_eq!(left, Vec::<PathBuf>::new());
    let findings = findings(&output);
    assert_eq!(find(&findings, "cgroups")["state"], "missing");
    let bpf = find(&findings, "BPF");
    assert!(bpf["detail"].as_str().unwrap().contains(&root), "{bpf}");
}

#[test]
fn more_reserved_than_the_machine_has_is_found() {
    let dir = TempDir::new().unwrap();
    let output = doctor(&dir, "", "healthzPort: 0\nsystemReserved: {memory: 900Ti}", &["-o", "json"]);
    let findings = findings(&output);
    let finding = find(&findings, "reserved resources");
    assert_eq!(finding["state"], "missing");
    assert!(finding["detail"].as_str().unwrap().contains("lower systemReserved"), "{finding}");
}

#[test]
fn problems_that_prevent_a_start_are_missing_findings() {
    let dir = TempDir::new().unwrap();
    std::fs::write(dir.path().join("state"), "").unwrap();
    let kubelet =
        "healthzPort: 0\nport: 10250\nauthorization: {mode: Webhook}\nresolvConf: /none/resolv.conf";
    let findings = findings(&doctor(&dir, "", kubelet, &["-o", "json"]));
    let check = |check: &str, part: &str| {
        let finding = find(&findings, check);
        assert_eq!(finding["state"], "missing", "{finding}");
        assert!(finding["detail"].as_str().unwrap().contains(part), "{finding}");
    };
    check("stateDir", "/state is not a folder");
    check("kubelet API", "authorization.mode is Webhook");
    assert_eq!(find(&findings, "runDir")["state"], "ok");
    assert_eq!(find(&findings, "resolvConf")["state"], "degraded");
}

/// Returns the leftover mounts and cgroups of the doctor `pid`; doctors of other tests run at the same time.
fn leftovers(pid: u32) -> Vec<String> {
    let name = format!("beelet-doctor-{pid}");
    let mounts = std::fs::read("/proc/self/mounts").unwrap();
    let mounts = String::from_utf8_lossy(&mounts);
    let mut found: Vec<String> =
        mounts.lines().filter(|line| line.contains(&name)).map(str::to_owned).collect();
    let hierarchies =
        std::fs::read_dir("/sys/fs/cgroup").into_iter().flatten().flatten().map(|entry| entry.path());
    let folders = hierarchies
        .chain([PathBuf::from("/sys/fs/cgroup"), std::env::temp_dir()])
        .map(|path| path.join(&name));
    found.extend(folders.filter(|path| path.exists()).map(|path| path.display().to_string()));
    found
}

#[test]
fn a_bad_configuration_is_refused_before_all_checks() {
    let dir = TempDir::new().unwrap();
    let output = doctor(&dir, "", "podPidsLimit: x", &[]);
    assert_eq!(output.status.code(), Some(2));
    assert!(output.stdout.is_empty());
}
