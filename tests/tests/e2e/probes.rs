//! Probes of real pods, from the users' point of view.

#![allow(clippy::unwrap_used)] // a failure in a helper fails the test

use crate::node::installed;
use beelet_tests::agent::Agent;
use beelet_tests::containerd::Containerd;
use beelet_tests::manifests::{self, PORT};
use beelet_tests::pods::PodView;
use beelet_tests::require;
use beelet_tests::workdir::{PATIENCE, stretched, unique, wait_for};
use serde_json::{Value, json};
use std::os::unix::fs::PermissionsExt as _;
use std::process::Output;
use std::time::Duration;

fn start() -> (Containerd, Agent) {
    let containerd = Containerd::start_for_test().unwrap();
    let agent = Agent::start(installed(&containerd)).unwrap();
    (containerd, agent)
}

fn ready(agent: &Agent, name: &str) -> PodView {
    agent
        .until(&format!("{name} to be ready"), |watch| watch.pod(name).filter(|pod| pod.ready()).cloned())
        .unwrap()
}

fn probe(agent: &Agent, arguments: &[&str]) -> Output {
    agent.cli(&[&["probe"], arguments].concat()).output().unwrap()
}

fn list(agent: &Agent) -> Vec<Value> {
    let output = probe(agent, &["ls", "-o", "json"]);
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice::<Vec<Value>>(&output.stdout).unwrap()
}

/// Returns the processes of the machine whose command line has this word.
fn processes(word: &str) -> Vec<String> {
    let all = std::fs::read_dir("/proc").unwrap().flatten();
    let lines = all.filter_map(|entry| std::fs::read(entry.path().join("cmdline")).ok());
    lines
        .map(|line| String::from_utf8_lossy(&line).replace('\0', " "))
        .filter(|line| line.split(' ').any(|one| one == word))
        .collect()
}

#[test]
fn a_command_that_is_out_of_time_leaves_no_process_behind() {
    require!(containerd);
    let (_containerd, agent) = start();
    let scripts = agent.dir().join("scripts");
    std::fs::create_dir_all(&scripts).unwrap();
    let script = scripts.join("probe");
    std::fs::write(&script, "#!/bin/testapp script\n").unwrap();
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    // A child; another program in the process's place; a script, which runs as its interpreter; a child
    // without a parent and with a session of its own.
    let commands: [(&str, &[&str]); 4] = [
        ("hangs", &["/bin/testapp", "probe", "hang"]),
        ("becomes", &["/bin/testapp", "probe", "become"]),
        ("script", &["/scripts/probe", "hang"]),
        ("leaves", &["/bin/testapp", "probe", "leave"]),
    ];
    // The command's processes must exist before its timeout.
    let timeout = stretched(Duration::from_secs(5)).as_secs();
    let marks: Vec<String> = commands
        .iter()
        .map(|(name, command)| {
            let mark = unique(name);
            let words: Vec<&str> = command.iter().copied().chain([mark.as_str()]).collect();
            let mut pod = manifests::pod(name, &["/bin/testapp", "pause"]);
            pod["spec"]["volumes"] = json!([{ "name": "scripts", "hostPath": { "path": scripts } }]);
            let mounts = json!([{ "name": "scripts", "mountPath": "/scripts", "readOnly": true }]);
            let pod = manifests::with(pod, "volumeMounts", mounts);
            // Periods are long: after one probe there is time to count the processes that it left.
            let probe = json!({
                "exec": { "command": words }, "timeoutSeconds": timeout, "periodSeconds": 600, "failureThreshold": 1,
            });
            agent
                .apply(&format!("{name}.yaml"), manifests::with(pod, "readinessProbe", probe).to_string())
                .unwrap();
            mark
        })
        .collect();
    for mark in &marks {
        wait_for("the probe and its processes to run", PATIENCE, || match processes(mark).len() {
            2.. => Ok(()),
            found => Err(format!("{found} processes of {mark}: {}", agent.log())),
        })
        .unwrap();
    }
    for (name, _) in commands {
        let failed = wait_for("the probe to fail", PATIENCE, || {
            let list = list(&agent);
            let of_pod = list.iter().find(|probe| probe["pod"].as_str().unwrap().starts_with(name));
            match of_pod.map(|probe| &probe["last"]) {
                Some(last) if last["outcome"] == "failure" => Ok(last.clone()),
                _ => Err(format!("{list:?}")),
            }
        })
        .unwrap();
        let expected = format!("timed out after {timeout} s");
        assert!(failed["detail"].as_str().unwrap().contains(&expected), "{name}: {failed}");
    }
    for mark in &marks {
        assert_eq!(processes(mark), Vec::<String>::new());
    }
}

#[test]
fn exit_codes_distinguish_commands() {
    require!(containerd);
    let (_containerd, agent) = start();
    for (name, word) in [("good", "ok"), ("bad", "fail")] {
        let pod = manifests::pod(name, &["/bin/testapp", "pause"]);
        let exec = json!({ "command": ["/bin/testapp", "probe", word] });
        // A busy machine starts processes slowly.
        let probe = json!({ "exec": exec, "timeoutSeconds": 60, "periodSeconds": 1 });
        agent
            .apply(&format!("{name}.yaml"), manifests::with(pod, "readinessProbe", probe).to_string())
            .unwrap();
    }
    ready(&agent, "good");
    let bad = wait_for("a result of the bad probe", PATIENCE, || {
        let found = list(&agent).into_iter().find(|probe| {
            probe["pod"].as_str().unwrap().starts_with("bad") && probe["last"]["outcome"] == "failure"
        });
        found.ok_or_else(|| "not yet".to_owned())
    })
    .unwrap();
    assert_eq!(bad["last"]["detail"], "it went wrong\n");
    assert_eq!(bad["result"], "failure");
    let run = probe(&agent, &["run", "bad", "main", "readiness"]);
    assert_eq!(run.status.code(), Some(1), "{run:?}");
}

#[test]
fn probe_ls_and_run_show_the_kernels_answers() {
    require!(containerd);
    require!(bpf);
    let (_containerd, agent) = start();
    agent.apply("web.yaml", manifests::serving("web").to_string()).unwrap();
    ready(&agent, "web");
    let all = list(&agent);
    assert_eq!(all.len(), 1, "{all:?}");
    assert_eq!((&all[0]["mode"], &all[0]["result"]), (&json!("kernel"), &json!("success")), "{all:?}");
    assert_eq!(all[0]["target"], format!("tcp pod:{PORT}"));
    assert_eq!(all[0]["fallback"], Value::Null);
    let table = String::from_utf8(probe(&agent, &["ls"]).stdout).unwrap();
    assert!(table.starts_with("NAMESPACE") && table.contains("kernel"), "{table}");
    let run = probe(&agent, &["run", "web", "main", "readiness"]);
    let text = String::from_utf8(run.stdout).unwrap();
    assert!(run.status.success(), "{text}");
    assert!(text.contains("1 listener(s)"), "{text}");
    let missing = probe(&agent, &["run", "web", "main", "startup"]);
    assert_eq!(missing.status.code(), Some(1));
    let text = String::from_utf8(missing.stderr).unwrap();
    assert!(text.contains("has no startup probe here"), "{text}");
}
