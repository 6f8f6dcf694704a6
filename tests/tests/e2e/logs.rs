//! Logs of real pods, and the `beelet` commands for pods: logs, exec, apply, delete.

#![allow(clippy::unwrap_used)] // a failure in a helper fails the test

use std::fs;
use std::io::{Read, Write};
use std::process::Stdio;

use crate::node::{Node, container, on_every_containerd, script};
use beelet_tests::require;
use beelet_tests::workdir::{PATIENCE, wait_for};
use serde_json::json;

#[test]
fn large_logs_are_rotated_compressed_and_bounded_and_none_of_the_last_lines_is_lost() {
    require!(containerd);
    let node = Node::start(|options| {
        options
            .kubelet("containerLogMaxSize", "16Ki")
            .kubelet("containerLogMaxFiles", 3)
            .kubelet("containerLogMonitorInterval", "1s")
    });
    let chatter = "i=0; while true; do i=$((i+1)); echo line $i of many that fill the log; test $((i % 100)) -eq 0 && sleep 0.5; done";
    node.apply(&script("chatter", chatter));
    let pod = node.wait("chatter", "to run", beelet_tests::pods::PodView::ready);
    let folder = node.pod_logs(&pod).join("main");
    let names = || {
        let mut names: Vec<String> =
            fs::read_dir(&folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    };
    let rotated = wait_for("a compressed log and a rotated one", PATIENCE, || {
        let names = names();
        let compressed = names.iter().filter(|name| name.ends_with(".gz")).count();
        if names.len() == 3 && compressed == 1 { Ok(names) } else { Err(format!("{names:?}")) }
    })
    .unwrap();
    assert!(rotated[0] == "0.log", "{rotated:?}");
    for _ in 0..20 {
        assert!(names().iter().filter(|name| !name.ends_with(".tmp")).count() <= 4, "{:?}", names());
    }
    // The lines of all files are in order, without a gap.
    let (code, text, error) = node.cli(&["logs", "chatter"]);
    assert_eq!(code, Some(0), "{error}");
    let numbers: Vec<u64> =
        text.lines().map(|line| line.split(' ').nth(1).unwrap().parse().unwrap()).collect();
    assert!(numbers.len() > 100 && numbers.windows(2).all(|pair| pair[1] == pair[0] + 1), "{numbers:?}");
    let (_, tail, _) = node.cli(&["logs", "chatter", "--tail", "5", "-c", "main"]);
    assert_eq!(tail.lines().count(), 5);
    node.remove("chatter");
    node.wait_gone("chatter");
    assert!(!node.pod_logs(&pod).exists());
}

#[test]
fn logs_are_followed_to_the_containers_end_and_those_of_the_one_before_are_kept() {
    require!(containerd);
    let node = Node::start(|options| options);
    // The loop also waits for the end of `touch`, which would be killed with the container.
    let wait = "until test -e /tmp/go && ! pidof touch; do sleep 0.05; done >/dev/null";
    let mut pod = script("web", &format!("echo start >&2; {wait}; echo end; exit 1"));
    pod["spec"]["restartPolicy"] = json!("Always");
    pod["spec"]["containers"].as_array_mut().unwrap().push(container("other", "echo other; sleep 1000"));
    node.apply(&pod);
    node.wait("web", "to run", beelet_tests::pods::PodView::ready);
    let mut follow = node.agent.cli(&["logs", "-f", "web"]).stdout(Stdio::piped()).spawn().unwrap();
    let (code, _, error) = node.cli(&["exec", "web", "--", "touch", "/tmp/go"]);
    assert_eq!(code, Some(0), "{error}");
    let mut text = String::new();
    follow.stdout.take().unwrap().read_to_string(&mut text).unwrap();
    assert!(follow.wait().unwrap().success());
    assert_eq!(text, "start\nend\n");
    node.wait("web", "to be restarted", |pod| pod.restarts() == 1 && pod.ready());
    let check = |arguments: &[&str], expected: &str| {
        let (code, text, error) = node.cli(arguments);
        assert_eq!((code, text.as_str()), (Some(0), expected), "{arguments:?}: {error}");
    };
    check(&["logs", "web"], "start\n");
    check(&["logs", "--previous", "web-testnode"], "start\nend\n");
    check(&["logs", "web", "-c", "other"], "other\n");
    check(&["logs", "web", "--since", "1h", "-n", "default"], "start\n");
    check(&["logs", "web", "--since-time", "2100-01-01T00:00:00Z"], "");
    let (_, timed, _) = node.cli(&["logs", "web", "--timestamps"]);
    assert!(timed.starts_with("20") && timed.ends_with(" start\n"), "{timed}");
    let (code, _, error) = node.cli(&["logs", "none"]);
    assert!(code == Some(1) && error.contains("pod \"none\" not found"), "{error}");
}

#[test]
fn commands_run_in_containers_with_their_streams_and_their_exit_codes() {
    require!(containerd);
    on_every_containerd(|containerd| {
        let node = Node::on(containerd, |options| options);
        node.apply(&script("box", "sleep 1000"));
        node.wait("box", "to run", beelet_tests::pods::PodView::ready);
        let (code, out, error) =
            node.cli(&["exec", "box", "--", "/bin/sh", "-c", "echo out; echo err >&2; exit 7"]);
        assert_eq!((code, out.as_str(), error.as_str()), (Some(7), "out\n", "err\n"));
        let (code, _, error) = node.cli(&["exec", "box", "--", "/none"]);
        assert!(code == Some(1) && error.contains("/none"), "{code:?} {error}");

        // The command sees the end of piped input.
        let mut command = node.agent.cli(&["exec", "-i", "box", "--", "wc", "-c"]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(&vec![b'x'; 1_000_000]).unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!(
            (output.status.code(), String::from_utf8_lossy(&output.stdout).trim()),
            (Some(0), "1000000")
        );

        // A large output arrives complete.
        let (code, out, _) =
            node.cli(&["exec", "box", "--", "/bin/sh", "-c", "yes 0123456789 | head -n 100000"]);
        assert_eq!((code, out.len()), (Some(0), 1_100_000));

        // With a terminal, lines end with CR LF, and the command sees the terminal.
        let (code, out, _) =
            node.cli(&["exec", "-t", "box", "--", "/bin/sh", "-c", "test -t 1 && echo a terminal"]);
        assert_eq!((code, out.as_str()), (Some(0), "a terminal\r\n"));
        // The command sees the end of input from a file.
        let piped = ["exec", "-it", "box", "--", "/bin/sh", "-c", "cat; test -t 1 || echo no terminal"];
        let (code, out, error) = node.cli(&piped);
        assert_eq!((code, out.as_str()), (Some(0), "no terminal\n"), "{error}");
    });
}

#[test]
fn manifests_are_applied_and_deleted_by_the_command_line() {
    require!(containerd);
    let node = Node::start(|options| options);
    let file = node.agent.dir().join("both.yaml");
    let text = |value: &str| {
        let mut pod = script("web", "cat /conf/color; sleep 1000");
        pod["spec"]["volumes"] = json!([{"name": "conf", "configMap": {"name": "conf"}}]);
        pod["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "conf", "mountPath": "/conf"}]);
        let map = crate::node::object("ConfigMap", "conf", &json!({ "color": value }));
        format!("# both\n{map}\n---\n{pod}\n")
    };
    let apply = |text: &str| {
        fs::write(&file, text).unwrap();
        node.cli(&["apply", "-f", file.to_str().unwrap()])
    };
    // The agent accepts manifests once the runtime has answered.
    let applied = wait_for("the agent to accept manifests", PATIENCE, || {
        let (code, out, error) = apply(&text("red"));
        if code == Some(0) { Ok(out) } else { Err(error) }
    });
    assert_eq!(applied.unwrap(), "configmap/conf created\npod/web created\n");
    node.wait("web", "to run", beelet_tests::pods::PodView::ready);
    let (_, out, _) = apply(&text("blue"));
    assert_eq!(out, "configmap/conf configured\npod/web unchanged\n");
    let broken = text("red").replace("\"kind\":\"Pod\"", "\"kind\":\"Pud\"");
    let (code, out, error) = apply(&broken);
    assert!(code == Some(2) && out.is_empty() && error.contains("\"Pud\" is not supported"), "{error}");

    let (code, out, error) = node.cli(&["delete", "pod", "web", "--keep-manifest", "--grace-period", "0"]);
    assert!(code == Some(0) && out.contains("pod/web-testnode deleted"), "{out}{error}");
    assert!(
        node.agent.inspect(|watch| watch.pod("web").is_none()).unwrap(),
        "the command returned before the pod's removal"
    );
    let kept = node.agent.manifests().join("web.yaml.bak");
    fs::rename(&kept, node.agent.manifests().join("web.yaml")).unwrap();
    node.wait("web", "to run again", beelet_tests::pods::PodView::ready);
    let (code, _, error) = node.cli(&["delete", "pod", "web-testnode"]);
    assert_eq!(code, Some(0), "{error}");
    let (code, _, error) = node.cli(&["delete", "configmap", "conf"]);
    assert_eq!(code, Some(0), "{error}");
    assert_eq!(fs::read_dir(node.agent.manifests()).unwrap().count(), 0);
    let (code, _, error) = node.cli(&["delete", "pod", "web"]);
    assert!(code == Some(1) && error.contains("no manifest describes the Pod default/web"), "{error}");
}
