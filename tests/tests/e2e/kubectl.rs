//! A person's daily work with kubectl on a node, through a stock API server that checks the node's
//! certificate and presents its own.

#![allow(clippy::unwrap_used, clippy::panic)] // a failure in a helper fails the test

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{BufReader, Read as _, Write as _};
use std::net::{Ipv4Addr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Barrier;

use beelet_tests::agent::{NODE, Options};
use beelet_tests::cluster::{self, Cluster};
use beelet_tests::containerd::block_on;
use beelet_tests::exec::{CLOSE, frame};
use beelet_tests::guards::Process;
use beelet_tests::workdir::{PATIENCE, wait_for};
use beelet_tests::{images, machine, ports, require, requires};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::cluster::Scene;
use crate::node::{container, script};

/// Bytes that pass through a command and back.
const MUCH: usize = 16 << 20;
/// Bytes that fit into a pipe without a reader.
const LITTLE: usize = 32 << 10;
/// Lines that a container prints while its log is followed over rotations, and the lines of one burst.
const LINES: usize = 300_000;
const AT_ONCE: usize = 5_000;
/// Connections through one port-forward.
const CONNECTIONS: usize = 100;

/// A node of a cluster that kubectl reaches.
pub(crate) struct Member {
    pub(crate) scene: Scene,
    kubectl: PathBuf,
    pub(crate) port: u16,
}

impl Member {
    pub(crate) fn start(change: impl FnOnce(Options) -> Options) -> Member {
        let [port] = ports::free().unwrap();
        let scene = Scene::start_at("127.0.0.1", |options, cluster| {
            let (certificate, key) = cluster.serving_files(NODE).unwrap();
            let authority = json!({ "x509": { "clientCAFile": cluster.authority_file() } });
            let options = options.kubelet("address", "127.0.0.1").kubelet("port", port);
            let options = options.kubelet("tlsCertFile", certificate.display().to_string());
            let options = options.kubelet("tlsPrivateKeyFile", key.display().to_string());
            change(options.kubelet("authentication", authority))
        });
        Member { scene, kubectl: requires::KUBECTL.given().unwrap(), port }
    }

    /// Returns a kubectl command with these arguments, as an admin.
    fn kubectl(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.kubectl);
        let home = self.scene.agent.dir().join("home");
        command.arg("--kubeconfig").arg(self.scene.cluster.kubeconfig()).args(arguments).env("HOME", home);
        command.stdin(Stdio::null());
        command
    }

    /// Runs kubectl. Returns exit code, standard output and standard error.
    pub(crate) fn run(&self, arguments: &[&str]) -> (Option<i32>, String, String) {
        let output = self.kubectl(arguments).output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    }

    /// Runs kubectl, which must succeed, and returns its standard output.
    pub(crate) fn output(&self, arguments: &[&str]) -> String {
        let (code, out, error) = self.run(arguments);
        assert_eq!(code, Some(0), "kubectl {arguments:?}: {error}\n{}", self.scene.agent.log());
        out
    }

    /// Starts kubectl with pipes for its standard input and output.
    fn begin(&self, arguments: &[&str]) -> Child {
        let mut command = self.kubectl(arguments);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap()
    }

    /// Creates a pod on this node, and waits until it is ready.
    pub(crate) fn apply(&self, mut pod: Value) {
        pod["spec"]["automountServiceAccountToken"] = false.into();
        pod["spec"]["enableServiceLinks"] = false.into();
        self.scene.cluster.run(NODE, &pod).unwrap();
        self.scene.until_ready(pod["metadata"]["name"].as_str().unwrap(), true);
    }

    /// Returns a token of an account that may read only the metrics of nodes.
    pub(crate) fn account_that_reads_numbers(&self, name: &str) -> String {
        let token = self.scene.cluster.account(name).unwrap();
        let role = format!("reads-numbers-{name}");
        self.output(&["create", "clusterrole", &role, "--verb=get", "--resource=nodes/metrics"]);
        let (of, account) = (format!("--clusterrole={role}"), format!("--serviceaccount=kube-system:{name}"));
        self.output(&["create", "clusterrolebinding", &role, &of, &account]);
        token
    }

    /// Returns the path of a file of the test's own.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.scene.agent.dir().join(name)
    }

    /// Starts kubectl in a terminal of `rows` and `columns`. The terminal changes to 40 rows and 100 columns
    /// when the file `resize` exists.
    fn in_terminal(&self, (rows, columns): (u32, u32), arguments: &str, resize: &Path) -> Child {
        let command = format!(
            "stty rows {rows} cols {columns}; \
             (until test -e {}; do sleep 0.1; done; stty -F /dev/tty rows 40 cols 100) & \
             {} --kubeconfig {} {arguments}; code=$?; kill %1 2>/dev/null; exit $code",
            resize.display(),
            self.kubectl.display(),
            self.scene.cluster.kubeconfig().display(),
        );
        let mut script = Command::new(requires::find_program("script").unwrap());
        script.args(["-qefc", &command, "/dev/null"]).env("HOME", self.file("home"));
        script.env("SHELL", "/bin/bash").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap()
    }

    /// Returns the agent's highest memory usage, in bytes.
    fn memory_peak(&self) -> u64 {
        machine::peak_kib(self.scene.agent.pid().unwrap()).unwrap() << 10
    }
}

/// Returns bytes without a pattern, the same at each call.
fn noise(count: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let words = std::iter::repeat_with(move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    });
    words.flatten().take(count).collect()
}

fn digest(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Reads lines until `wanted` is true for one. Returns all lines that were read.
fn read_until(from: &mut impl std::io::BufRead, wanted: impl Fn(&str) -> bool) -> Vec<String> {
    let mut lines = Vec::new();
    loop {
        let mut line = String::new();
        assert!(
            from.read_line(&mut line).unwrap() > 0,
            "the output ended before; last line: {:?}",
            lines.last()
        );
        let line = line.trim_end_matches(['\r', '\n']).to_owned();
        lines.push(line);
        if wanted(lines.last().unwrap()) {
            return lines;
        }
    }
}

#[test]
fn exec_carries_streams_and_exit_codes_by_both_protocols() {
    require!(containerd, bpf, apiserver, kubectl);
    let node = Member::start(|options| options);
    node.apply(script("box", "sleep 1000"));
    let much = noise(MUCH);
    let file = node.file("much");
    fs::write(&file, &much).unwrap();
    let little = node.file("little");
    fs::write(&little, &much[..LITTLE]).unwrap();
    for websockets in ["true", "false"] {
        let kubectl = |arguments: &[&str]| {
            let mut command = node.kubectl(arguments);
            command.env("KUBECTL_REMOTE_COMMAND_WEBSOCKETS", websockets);
            command
        };
        let shell = "echo out; echo err >&2; exit 7";
        let output = kubectl(&["exec", "box", "--", "sh", "-c", shell]).output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!((output.status.code(), &output.stdout[..]), (Some(7), &b"out\n"[..]), "{error}");
        assert!(error.starts_with("err\n"), "{error}");

        // A large input passes through the command and back, and the command sees its end.
        let shell = "cat; echo done >&2; exit 3";
        let mut command = kubectl(&["exec", "-i", "box", "--", "sh", "-c", shell]);
        let output = command.stdin(File::open(&file).unwrap()).output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(3), "{error}");
        assert!(error.contains("done"), "{error}");
        assert!(output.stdout == much, "{} bytes came back, or different ones", output.stdout.len());

        // A command that stops reading its input still has its output transferred to the end. The unread rest
        // fits into a pipe: containerd 1.6 waits for ever until a larger rest is read (attachDone in its
        // container_execsync.go).
        let mut command =
            kubectl(&["exec", "-i", "box", "--", "sh", "-c", "head -c 5 >/dev/null; echo late"]);
        let output = command.stdin(File::open(&little).unwrap()).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "late\n");
    }
    let (code, _, error) = node.run(&["exec", "box", "--", "/none"]);
    assert!(code != Some(0) && error.contains("/none"), "{code:?} {error}");
    let (code, _, error) = node.run(&["exec", "box", "-c", "other", "--", "true"]);
    assert!(code != Some(0) && error.contains("other"), "{code:?} {error}");

    // The command ends with its pod.
    let child = Process(node.begin(&["exec", "box", "--", "sh", "-c", "echo here; sleep 1000"]));
    let mut child = child;
    let mut output = BufReader::new(child.0.stdout.take().unwrap());
    read_until(&mut output, |line| line == "here");
    node.scene.cluster.delete(&Cluster::pod("box"), Some(0)).unwrap();
    wait_for("exec to end", PATIENCE, || child.0.try_wait().unwrap().ok_or("still running")).unwrap();
    node.scene.nothing_was_forbidden();
}

#[test]
fn exec_in_a_terminal_has_its_size_and_follows_its_changes() {
    require!(containerd, bpf, apiserver, kubectl);
    let node = Member::start(|options| options);
    node.apply(script("box", "sleep 1000"));
    let resize = node.file("resize");
    // The terminal's size arrives after the start of the command.
    let until = |size: &str, then: &str| {
        format!("until test \"$(stty size)\" = \"{size}\"; do sleep 0.1; done; {then}")
    };
    let shell = until("33 77", "echo sized; ") + &until("40 100", "echo grown; exit 9");
    let arguments = format!("exec -it box -- sh -c '{shell}'");
    let mut child = Process(node.in_terminal((33, 77), &arguments, &resize));
    let mut output = BufReader::new(child.0.stdout.take().unwrap());
    read_until(&mut output, |line| line == "sized");
    fs::write(&resize, "").unwrap();
    read_until(&mut output, |line| line == "grown");
    let status =
        wait_for("the terminal to end", PATIENCE, || child.0.try_wait().unwrap().ok_or("still running"));
    assert_eq!(status.unwrap().code(), Some(9));
}

#[test]
fn a_followed_log_loses_and_doubles_nothing_over_rotations() {
    require!(containerd, bpf, apiserver, kubectl);
    let node = Member::start(|options| {
        let options = options.kubelet("containerLogMaxSize", "4Mi").kubelet("containerLogMaxFiles", 20);
        options.kubelet("containerLogMonitorInterval", "1s")
    });
    let rounds = LINES / AT_ONCE;
    node.apply(script(
        "chatter",
        &format!(
            "until test -e /tmp/go; do sleep 0.1; done; i=0; while test $i -lt {rounds}; do \
             seq $((i * {AT_ONCE} + 1)) $((i * {AT_ONCE} + {AT_ONCE})); i=$((i + 1)); sleep 0.1; done; \
             echo end; sleep 1000"
        ),
    ));
    let mut child = Process(node.begin(&["logs", "-f", "chatter"]));
    node.output(&["exec", "chatter", "--", "touch", "/tmp/go"]);
    let mut output = BufReader::new(child.0.stdout.take().unwrap());
    let lines = read_until(&mut output, |line| line == "end");
    assert_eq!(lines.len(), LINES + 1);
    for (index, line) in lines[..LINES].iter().enumerate() {
        assert_eq!(*line, (index + 1).to_string());
    }
    let pod = node.scene.cluster.get(&Cluster::pod("chatter")).unwrap();
    let folder = format!("logs/default_chatter_{}/main", pod["metadata"]["uid"].as_str().unwrap());
    let files = fs::read_dir(node.file(&folder)).unwrap().count();
    assert!(files > 2, "the log was not rotated often enough: {files} files");

    let last = format!("{}\n{LINES}\nend\n", LINES - 1);
    assert_eq!(node.output(&["logs", "chatter", "--tail=3"]), last);
    assert_eq!(node.output(&["logs", "chatter"]).lines().count(), LINES + 1);
}

#[test]
fn logs_are_shown_in_all_forms() {
    require!(containerd, bpf, apiserver, kubectl);
    let node = Member::start(|options| options);
    // The container's first run ends by itself, the second one stays.
    let lives = "if test -e /life/second; then echo two; sleep 1000; fi; touch /life/second; \
                 echo one; echo wrong >&2; exit 1";
    let mut pod = script("web", lives);
    pod["spec"]["restartPolicy"] = json!("Always");
    pod["spec"]["volumes"] = json!([{ "name": "life", "emptyDir": {} }]);
    pod["spec"]["containers"][0]["volumeMounts"] = json!([{ "name": "life", "mountPath": "/life" }]);
    let other = container("other", "seq 1 9; sleep 1000");
    pod["spec"]["containers"].as_array_mut().unwrap().push(other);
    pod["spec"]["automountServiceAccountToken"] = false.into();
    pod["spec"]["enableServiceLinks"] = false.into();
    node.scene.cluster.run(NODE, &pod).unwrap();
    node.scene.until("the second run", &Cluster::pod("web"), |pod| {
        let statuses = pod["status"]["containerStatuses"].as_array();
        statuses.is_some_and(|all| all.iter().any(|one| one["restartCount"] == 1 && one["ready"] == true))
    });
    let check = |arguments: &[&str], expected: &str| {
        assert_eq!(node.output(&[&["logs", "web"][..], arguments].concat()), expected, "{arguments:?}");
    };
    check(&["-c", "main"], "two\n");
    // The runtime reads the two streams in no fixed order.
    let previous = node.output(&["logs", "web", "-c", "main", "--previous"]);
    let mut previous: Vec<&str> = previous.lines().collect();
    previous.sort_unstable();
    assert_eq!(previous, ["one", "wrong"]);
    check(&["-c", "other", "--tail=2"], "8\n9\n");
    check(&["-c", "other", "--tail=0"], "");
    check(&["-c", "other", "--limit-bytes=5"], "1\n2\n3");
    check(&["-c", "other", "--since=1h", "--tail=1"], "9\n");
    check(&["-c", "other", "--since-time=2100-01-01T00:00:00Z"], "");
    // kubectl requests the containers one after the other, in no fixed order.
    let all = node.output(&["logs", "web", "--all-containers", "--prefix", "--tail=1"]);
    let all: BTreeSet<&str> = all.lines().collect();
    assert_eq!(all, ["[pod/web/main] two", "[pod/web/other] 9"].into());
    let timed = node.output(&["logs", "web", "-c", "main", "--timestamps"]);
    let (time, text) = timed.split_once(' ').unwrap();
    assert_eq!(text, "two\n");
    time.parse::<jiff::Timestamp>().unwrap();
    let (code, _, error) = node.run(&["logs", "web", "-c", "other", "--previous"]);
    assert!(code == Some(1) && error.contains("previous terminated container \"other\""), "{error}");

    // A container that never starts has an error with the reason.
    let mut pod = script("none", "true");
    pod["spec"]["automountServiceAccountToken"] = false.into();
    pod["spec"]["containers"][0]["image"] = "localhost/there/is:none".into();
    pod["spec"]["containers"][0]["imagePullPolicy"] = "Never".into();
    node.scene.cluster.run(NODE, &pod).unwrap();
    let waits = |pod: &Value| {
        pod["status"]["containerStatuses"][0]["state"]["waiting"]["reason"] == "ErrImageNeverPull"
    };
    node.scene.until("none to wait", &Cluster::pod("none"), waits);
    let (code, _, error) = node.run(&["logs", "none"]);
    assert!(code == Some(1) && error.contains("is waiting to start: ErrImageNeverPull"), "{error}");
}

/// Returns a container's log as the API server passes it on over a WebSocket, which kubectl never requests.
async fn log_by_websocket(cluster: &Cluster, pod: &str) -> String {
    let request = http::Request::builder()
        .uri(format!("{}/log", Cluster::pod(pod)))
        .header("Connection", "Upgrade")
        .header("Upgrade", "websocket")
        .header("Sec-WebSocket-Version", "13")
        .header("Sec-WebSocket-Key", "AAAAAAAAAAAAAAAAAAAAAA==")
        .header("Sec-WebSocket-Protocol", "binary.k8s.io")
        .body(kube::client::Body::empty())
        .unwrap();
    let answer = Cluster::client(&cluster.kubeconfig()).unwrap().send(request).await.unwrap();
    assert_eq!(answer.status(), 101);
    let mut socket = TokioIo::new(hyper::upgrade::on(answer).await.unwrap());
    let (mut log, mut payload) = (Vec::new(), Vec::new());
    while frame(&mut socket, &mut payload).await.unwrap() != CLOSE {
        log.append(&mut payload);
    }
    String::from_utf8(log).unwrap()
}

#[test]
fn a_log_over_a_websocket_is_whole() {
    require!(containerd, bpf, apiserver, kubectl);
    let node = Member::start(|options| options);
    node.apply(script("box", "echo container is alive; sleep 1000"));
    wait_for("the first line", PATIENCE, || {
        let log = node.output(&["logs", "box"]);
        if log.is_empty() { Err("the log is empty") } else { Ok(()) }
    })
    .unwrap();
    for _ in 0..20 {
        let log = block_on(async { Ok(log_by_websocket(&node.scene.cluster, "box").await) }).unwrap();
        assert_eq!(log, "container is alive\n");
    }
}

#[test]
fn attach_speaks_to_the_containers_own_process() {
    require!(containerd, bpf, apiserver, kubectl);
    let node = Member::start(|options| options);
    let mut talk = script("talk", "while read line; do echo got $line; done; echo bye; exit 5");
    talk["spec"]["containers"][0]["stdin"] = true.into();
    talk["spec"]["containers"][0]["stdinOnce"] = true.into();
    node.apply(talk);
    let mut child = Process(node.begin(&["attach", "-i", "talk"]));
    let mut input = child.0.stdin.take().unwrap();
    let mut output = BufReader::new(child.0.stdout.take().unwrap());
    for word in ["one", "two"] {
        writeln!(input, "{word}").unwrap();
        read_until(&mut output, |line| line == format!("got {word}"));
    }
    drop(input);
    read_until(&mut output, |line| line == "bye");
    wait_for("attach to end", PATIENCE, || child.0.try_wait().unwrap().ok_or("still running")).unwrap();
    let ended =
        node.scene.until("talk to end", &Cluster::pod("talk"), |pod| pod["status"]["phase"] == "Failed");
    let state = &ended["status"]["containerStatuses"][0]["state"]["terminated"];
    assert_eq!(state["exitCode"], 5, "{state}");

    // kubectl first sends a size that is larger by one, so that programs redraw.
    let looks = "read line; until stty size | grep '21 55'; do sleep 0.1; done; echo got $line; sleep 1000";
    let mut terminal = script("terminal", looks);
    terminal["spec"]["containers"][0]["stdin"] = true.into();
    terminal["spec"]["containers"][0]["tty"] = true.into();
    node.apply(terminal);
    let mut child = Process(node.in_terminal((21, 55), "attach -it terminal", Path::new("/none")));
    let mut input = child.0.stdin.take().unwrap();
    let mut output = BufReader::new(child.0.stdout.take().unwrap());
    // The script asks for the size as soon as it starts; earlier input waits for the script.
    writeln!(input, "three").unwrap();
    let lines = read_until(&mut output, |line| line == "got three");
    assert!(lines.iter().any(|line| line == "21 55"), "{lines:?}");
}

#[test]
fn a_large_file_is_copied_both_ways_and_the_agent_does_not_grow() {
    require!(containerd, bpf, apiserver, kubectl);
    let bytes = if requires::long().is_ok() { 1 << 30 } else { 64 << 20 };
    let node = Member::start(|options| options);
    node.apply(script("box", "sleep 1000"));
    let (there, back) = (node.file("there"), node.file("back"));
    let content = noise(bytes);
    fs::write(&there, &content).unwrap();
    node.output(&["exec", "box", "--", "true"]);
    let before = node.memory_peak();
    node.output(&["cp", &there.display().to_string(), "box:/tmp/big"]);
    let seen = node.output(&["exec", "box", "--", "sha256sum", "/tmp/big"]);
    assert_eq!(seen.split(' ').next().unwrap(), digest(&content));
    node.output(&["cp", "box:/tmp/big", &back.display().to_string()]);
    assert!(fs::read(&back).unwrap() == content);
    let grown = node.memory_peak() - before;
    assert!(grown < 24 << 20, "the agent took {grown} bytes more while {bytes} went through it");
    fs::remove_file(&there).unwrap();
    fs::remove_file(&back).unwrap();
}

#[test]
fn a_forwarded_port_takes_many_connections_at_once() {
    require!(containerd, bpf, apiserver, kubectl);
    let node = Member::start(|options| options);
    let mut pod = script("web", "");
    pod["spec"]["containers"][0]["command"] = json!(["/bin/testapp", "serve", "--http", "80"]);
    node.apply(pod);
    for websockets in ["true", "false"] {
        let mut command = node.kubectl(&["port-forward", "pod/web", ":80", "--address", "127.0.0.1"]);
        command.env("KUBECTL_PORT_FORWARD_WEBSOCKETS", websockets).stdout(Stdio::piped());
        let mut child = Process(command.spawn().unwrap());
        let mut output = BufReader::new(child.0.stdout.take().unwrap());
        let said = read_until(&mut output, |line| line.starts_with("Forwarding from "));
        let port: u16 = said.last().unwrap().split([':', ' ']).find_map(|word| word.parse().ok()).unwrap();
        // kubectl prints a line for each connection.
        std::thread::spawn(move || std::io::copy(&mut output, &mut std::io::sink()));
        let all = Barrier::new(CONNECTIONS);
        let answers: Vec<String> = std::thread::scope(|scope| {
            let ask = || {
                let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
                stream.set_read_timeout(Some(PATIENCE)).unwrap();
                all.wait();
                stream.write_all(b"GET / HTTP/1.1\r\nHost: pod\r\nConnection: close\r\n\r\n").unwrap();
                let mut answer = String::new();
                stream.read_to_string(&mut answer).unwrap();
                answer
            };
            let asking: Vec<_> = (0..CONNECTIONS).map(|_| scope.spawn(ask)).collect();
            asking.into_iter().map(|one| one.join().unwrap()).collect()
        });
        let good = answers.iter().filter(|answer| answer.starts_with("HTTP/1.1 200")).count();
        assert_eq!(good, CONNECTIONS, "websockets: {websockets}");
    }
}

#[test]
fn a_debugger_of_kubectl_sees_the_processes_of_its_target() {
    require!(containerd, bpf, apiserver, kubectl);
    if cluster::minor_version().unwrap() < 25 {
        requires::skip(&requires::missing(
            "kubectl debug needs an API server of 1.25 or newer",
            "set KUBE_APISERVER to the path of a newer one",
        ));
        return;
    }
    let node = Member::start(|options| options);
    node.apply(script("box", "sleep 7654"));
    node.output(&[
        "debug",
        "box",
        "--image",
        images::APP,
        "--image-pull-policy=Never",
        "--target=main",
        "-c",
        "look",
        "--",
        "sh",
        "-c",
        "ps -o args; sleep 1000",
    ]);
    let runs = |pod: &Value| pod["status"]["ephemeralContainerStatuses"][0]["state"]["running"].is_object();
    node.scene.until("the debugger", &Cluster::pod("box"), runs);
    let printed = wait_for("the debugger's output", PATIENCE, || {
        let printed = node.output(&["logs", "box", "-c", "look"]);
        if printed.contains("sleep 1000") { Ok(printed) } else { Err(printed) }
    })
    .unwrap();
    assert!(printed.contains("sleep 7654"), "{printed}");
    assert_eq!(node.output(&["exec", "box", "-c", "look", "--", "echo", "me"]), "me\n");
}

#[test]
fn users_and_monitors_can_read_a_node() {
    require!(containerd, bpf, apiserver, kubectl);
    let node = Member::start(|options| options);
    node.apply(script("box", "echo hello; sleep 1000"));
    let check = |arguments: &[&str], parts: &[&str]| {
        let text = node.output(arguments);
        for part in parts {
            assert!(text.contains(part), "kubectl {arguments:?} lacks {part:?}:\n{text}");
        }
    };
    check(&["get", "nodes", "-o", "wide"], &[NODE, " Ready ", "127.0.0.1", "containerd://"]);
    let capacity = ["Capacity:", "Allocatable:", "MemoryPressure", "KubeletReady", "Non-terminated Pods:"];
    check(&["describe", "node", NODE], &capacity);
    check(&["describe", "pod", "box"], &["Status:", "Running", "Ready", "Container ID:"]);
    wait_for("the events of the pod", PATIENCE, || {
        let events = node.output(&["get", "events", "--field-selector", "involvedObject.name=box"]);
        let all = ["Pulled", "Created", "Started"].iter().all(|reason| events.contains(reason));
        if all { Ok(()) } else { Err(events) }
    })
    .unwrap();
    let raw = |page: &str| format!("/api/v1/nodes/{NODE}/proxy/{page}");
    let pages: &[(&str, &[&str])] = &[
        ("healthz", &["ok"]),
        ("pods", &["\"name\":\"box\"", "\"kind\":\"PodList\""]),
        ("runningpods/", &["\"box\""]),
        ("configz", &["\"kubeletconfig\""]),
        ("stats/summary", &["\"nodeName\"", "\"box\""]),
        ("metrics", &["kubelet_running_pods", "rest_client_requests_total"]),
        ("metrics/cadvisor", &["container_cpu_usage_seconds_total{", "pod=\"box\""]),
        ("metrics/resource", &["pod_memory_working_set_bytes{", "node_cpu_usage_seconds_total"]),
        ("metrics/probes", &["# "]),
        ("metrics/slis", &["kubernetes_healthcheck"]),
        ("containerLogs/default/box/main", &["hello\n"]),
        ("logs/", &["<pre>"]),
    ];
    for (page, parts) in pages {
        check(&["get", "--raw", &raw(page)], parts);
    }
    let (code, _, error) = node.run(&["get", "--raw", &raw("none")]);
    assert!(code == Some(1) && error.contains("NotFound"), "{error}");
    node.scene.nothing_was_forbidden();
}

/// Scrapes the node's server as metrics-server does, with the token of a service account. Returns status and
/// body.
fn scrape(node: &Member, token: &str) -> (u16, String) {
    let authority = fs::read(node.scene.cluster.authority_file()).unwrap();
    let authority = base64::Engine::encode(&base64::engine::general_purpose::STANDARD, authority);
    let server = format!("https://127.0.0.1:{}", node.port);
    let kubeconfig = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "node",
        "contexts": [{ "name": "node", "context": { "cluster": "node", "user": "it" } }],
        "clusters": [{ "name": "node", "cluster": { "server": server, "certificate-authority-data": authority } }],
        "users": [{ "name": "it", "user": { "token": token } }],
    });
    let kubeconfig = kube::config::Kubeconfig::from_yaml(&kubeconfig.to_string()).unwrap();
    block_on(async {
        let mut config = kube::Config::try_from(kubeconfig)?;
        config.default_retry = false;
        let client = kube::Client::try_from(config)?;
        let request = http::Request::builder().uri("/metrics/resource").body(kube::client::Body::empty())?;
        let answer = client.send(request).await?;
        let status = answer.status().as_u16();
        let body = http_body_util::BodyExt::collect(answer.into_body()).await?.to_bytes();
        Ok((status, String::from_utf8_lossy(&body).into_owned()))
    })
    .unwrap()
}

#[test]
fn only_metrics_servers_token_reads_its_metrics() {
    require!(containerd, bpf, apiserver, kubectl);
    let node = Member::start(|options| options);
    node.apply(script("box", "sleep 1000"));
    let token = node.scene.cluster.account("metrics-server").unwrap();
    assert_eq!(scrape(&node, "nobody's").0, 401);
    let (status, refusal) = scrape(&node, &token);
    assert_eq!(status, 403, "{refusal}");
    assert!(refusal.contains("system:serviceaccount:kube-system:metrics-server"), "{refusal}");

    // The account has the same right as in metrics-server's own manifest. A refusal is cached for 30 s, so
    // another account is used.
    let token = node.account_that_reads_numbers("metrics-reader");
    let page = wait_for("the right to read", PATIENCE, || {
        let (status, page) = scrape(&node, &token);
        let has_pod = page.contains("pod=\"box\"");
        if status == 200 && has_pod { Ok(page) } else { Err(format!("{status} {page}")) }
    })
    .unwrap();
    // metrics-server's decoder needs these families (pkg/scraper/client/resource/decode.go), each with a
    // timestamp.
    let families: BTreeSet<&str> = page
        .lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| line.split(['{', ' ']).next())
        .collect();
    for family in [
        "node_cpu_usage_seconds_total",
        "node_memory_working_set_bytes",
        "container_cpu_usage_seconds_total",
        "container_memory_working_set_bytes",
        "container_start_time_seconds",
    ] {
        assert!(families.contains(family), "{family} is missing:\n{page}");
        let sample = page.lines().find(|line| line.starts_with(family)).unwrap();
        let after = sample.rsplit('}').next().unwrap();
        assert!(after.split_whitespace().last().unwrap().parse::<i64>().is_ok(), "no timestamp: {sample}");
    }
}
