//! Hostile targets of probes.

use std::collections::BTreeMap;
use std::time::Duration;

use beelet_tests::manifests;
use beelet_tests::require;
use beelet_tests::workdir::{PATIENCE, wait_for};
use serde_json::{Value, json};

use super::scene::{Allowance, Scene};

/// Time for which all probes run again and again.
const ASKED: Duration = Duration::from_secs(10);

fn listed(scene: &Scene) -> Vec<Value> {
    let (code, out, error) = scene.node.cli(&["probe", "ls", "-o", "json"]);
    assert_eq!(code, Some(0), "{error}");
    serde_json::from_str(&out).unwrap()
}

/// Waits until a probe of each pod has been answered, and returns the answers.
fn answers(scene: &Scene, pods: &[&str]) -> BTreeMap<String, Value> {
    wait_for("an answer to each probe", PATIENCE, || {
        let all = listed(scene);
        let of = |name: &str| {
            let prefix = format!("{name}-");
            let mut found =
                all.iter().filter(|probe| probe["pod"].as_str().is_some_and(|pod| pod.starts_with(&prefix)));
            found.find(|probe| probe["last"]["outcome"].is_string()).map(|probe| probe["last"].clone())
        };
        let found: BTreeMap<_, _> =
            pods.iter().filter_map(|name| Some(((*name).to_owned(), of(name)?))).collect();
        if found.len() == pods.len() { Ok(found) } else { Err(format!("{all:#?}")) }
    })
    .unwrap()
}

/// Returns the number of the machine's processes whose command line has this word.
fn processes(word: &str) -> usize {
    let all = std::fs::read_dir("/proc").unwrap().flatten();
    let lines = all.filter_map(|entry| std::fs::read(entry.path().join("cmdline")).ok());
    lines.filter(|line| line.split(|byte| *byte == 0).any(|one| one == word.as_bytes())).count()
}

#[test]
fn commands_that_never_end_or_never_stop_talking_or_leave_a_daemon_cost_their_own_pod_alone() {
    require!(containerd);
    const LIMIT: usize = 100;
    let scene = Scene::start(|options| options.kubelet("podPidsLimit", LIMIT));
    let words = ["never", "shout", "daemon"].map(beelet_tests::workdir::unique);
    let shout = (1 << 30).to_string();
    let commands = [
        ("never", vec!["/bin/testapp", "hurt", "probe", "never", &words[0]]),
        ("shout", vec!["/bin/testapp", "hurt", "shout", &shout, &words[1]]),
        ("daemon", vec!["/bin/testapp", "hurt", "probe", "daemon", &words[2]]),
    ];
    for (name, command) in &commands {
        let probe = json!({
            "exec": { "command": command }, "periodSeconds": 2, "timeoutSeconds": 2, "failureThreshold": 1,
        });
        let pod = manifests::pod(name, &["/bin/testapp", "pause"]);
        scene.node.apply(&manifests::with(pod, "readinessProbe", probe));
    }
    let found = answers(&scene, &["never", "shout", "daemon"]);
    assert!(found["never"]["detail"].as_str().unwrap().contains("timed out"), "{found:?}");
    assert_eq!(found["never"]["outcome"], "failure", "{found:?}");
    let detail = |name: &str| found[name]["detail"].as_str().unwrap_or_default().len();
    assert!(detail("shout") <= 64 << 10, "{} bytes are kept of the command's output", detail("shout"));
    std::thread::sleep(ASKED);
    // The current command with its two children, and one that is being ended.
    assert!(processes(&words[0]) <= 6, "{} processes of a probe that never ends", processes(&words[0]));
    // A process that has left the probe's session and pipes belongs to the application, up to the pod's
    // limit.
    assert!(processes(&words[2]) <= LIMIT);
    scene.another_comes_and_goes();
    // The search for a probe's processes reads all processes of the machine several times.
    scene.end(&["never", "shout", "daemon"], Allowance { cpu: ASKED / 2, ..Allowance::default() });
    assert_eq!([processes(&words[0]), processes(&words[1]), processes(&words[2])], [0, 0, 0]);
}

#[test]
fn servers_that_answer_without_end_or_not_at_all_cost_their_own_probe_alone() {
    require!(containerd);
    let scene = Scene::start(|options| options);
    let kinds = ["drip", "header", "line", "circle", "mute", "flood"];
    let mut command = vec!["/bin/testapp".to_owned(), "hurt".to_owned(), "http".to_owned()];
    for (port, kind) in (8001..).zip(kinds) {
        command.extend([kind.to_owned(), port.to_string()]);
    }
    let command: Vec<&str> = command.iter().map(String::as_str).collect();
    for (port, kind) in (8001..).zip(kinds) {
        let scheme = if kind == "mute" { "HTTPS" } else { "HTTP" };
        let probe = json!({
            "httpGet": { "path": "/", "port": port, "scheme": scheme },
            "periodSeconds": 1, "timeoutSeconds": 1, "failureThreshold": 1,
        });
        scene.node.apply(&manifests::with(manifests::pod(kind, &command), "readinessProbe", probe));
    }
    // The first probes may be earlier than the server.
    let wanted = [
        ("drip", "no answer within 1 s"),
        ("header", ""),
        ("line", ""),
        ("circle", "stopped after 10 redirects"),
        ("mute", "no answer within 1 s"),
    ];
    let found = wait_for("each probe's answer", PATIENCE, || {
        let found = answers(&scene, &kinds);
        let fits = |(kind, part): &(&str, &str)| {
            let last = &found[*kind];
            let detail = last["detail"].as_str().unwrap_or_default();
            last["outcome"] == "failure" && detail.contains(part) && !detail.contains("refused")
        };
        let all = wanted.iter().all(fits) && found["flood"]["outcome"] == "success";
        if all { Ok(found) } else { Err(format!("{found:#?}")) }
    })
    .unwrap();
    let longest = found.values().map(|last| last["detail"].as_str().unwrap_or_default().len()).max();
    assert!(longest <= Some(64 << 10), "{longest:?} bytes are kept of an answer");
    std::thread::sleep(ASKED);
    scene.another_comes_and_goes();
    // Endless headers are read until the probe's timeout or until the client refuses more.
    scene.end(&kinds, Allowance { cpu: ASKED / 2, ..Allowance::default() });
}
