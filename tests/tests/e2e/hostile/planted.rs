//! Links, FIFOs, sockets and folders at every path that the agent opens. Most of these paths are below
//! folders of the agent's own: a container reaches them by a hostPath, which log shippers and backups have in
//! good faith.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use beelet_tests::agent::Options;
use beelet_tests::guards::Process;
use beelet_tests::require;
use beelet_tests::workdir::{PATIENCE, wait_for};
use serde_json::{Value, json};

use super::scene::{Allowance, Scene, hostile, with_volumes};
use crate::node::{container, object};

/// Content of the secret: a line of a log, which `beelet logs` would show.
const SECRET: &str = "2026-11-21T19:00:00.000000001Z stderr F hush-hush\n";
/// Kinds of planted files; `link` leads to the secret.
const KINDS: [&str; 4] = ["link", "fifo", "socket", "folder"];

/// A file of the machine that no container may read or change.
struct Secret {
    path: PathBuf,
}

impl Secret {
    fn make(scene: &Scene) -> Secret {
        let path = scene.node.agent.dir().join("secret/file");
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, SECRET).unwrap();
        fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        Secret { path }
    }

    /// Returns the argument of [`testapp hurt plant`].
    fn kind(&self, kind: &str) -> String {
        if kind == "link" { format!("link={}", self.path.display()) } else { kind.to_owned() }
    }

    /// Checks that the file is unchanged.
    fn check(&self) {
        let found = fs::metadata(&self.path).unwrap();
        assert_eq!(fs::read_to_string(&self.path).unwrap(), SECRET);
        assert_eq!((found.mode() & 0o7777, found.uid(), found.gid()), (0o600, 0, 0));
    }
}

/// Sets options for restarts without delay and an early rotation of logs.
fn quick(options: Options) -> Options {
    options
        .kubelet("crashLoopBackOff", json!({ "maxContainerRestartPeriod": "1s" }))
        .kubelet("containerLogMaxSize", "64Ki")
        .kubelet("containerLogMaxFiles", 4)
        .kubelet("containerLogMonitorInterval", "1s")
}

/// Returns the pod with the agent's folders in its container: `$P` is the pod's own folder, `$L` that of
/// `main`'s logs.
fn with_folders(scene: &Scene, mut pod: Value) -> Value {
    let dir = scene.node.agent.dir();
    let mut volumes = pod["spec"]["volumes"].as_array().cloned().unwrap_or_default();
    let main = &mut pod["spec"]["containers"][0];
    let mut mounts = main["volumeMounts"].as_array().cloned().unwrap_or_default();
    for name in ["pods", "logs"] {
        volumes.push(json!({ "name": name, "hostPath": { "path": dir.join(name) } }));
        mounts.push(json!({ "name": name, "mountPath": format!("/{name}") }));
    }
    main["volumeMounts"] = Value::Array(mounts);
    main["env"] = json!([
        { "name": "ID", "valueFrom": { "fieldRef": { "fieldPath": "metadata.uid" } } },
        { "name": "POD", "valueFrom": { "fieldRef": { "fieldPath": "metadata.name" } } },
        { "name": "P", "value": "/pods/$(ID)" },
        { "name": "L", "value": "/logs/default_$(POD)_$(ID)/main" },
    ]);
    pod["spec"]["volumes"] = Value::Array(volumes);
    pod
}

/// Returns a pod that does its harm once and fails.
fn failing(name: &str, harm: &str) -> Value {
    let mut pod = hostile(name, &format!("{harm}; exit 1"));
    pod["spec"]["restartPolicy"] = json!("Never");
    pod
}

/// Returns the message in a failed pod's status about its container's end.
fn last_words(scene: &Scene, name: &str) -> String {
    let pod = scene.node.wait(name, "to fail", |pod| pod.phase() == "Failed");
    let state = pod.container("main").unwrap().state.clone().unwrap();
    state.terminated.unwrap().message.unwrap_or_default()
}

/// Returns the output of `beelet logs`, which must end by itself.
fn logs(scene: &Scene, name: &str) -> String {
    let out = scene.node.agent.dir().join(format!("{name}.out"));
    let file = fs::File::create(&out).unwrap();
    let mut command: Command = scene.node.agent.cli(&["logs", name]);
    let child = command.stdout(file.try_clone().unwrap()).stderr(file).stdin(Stdio::null()).spawn().unwrap();
    let mut child = Process(child);
    wait_for(&format!("`beelet logs {name}` to end"), PATIENCE, || match child.0.try_wait() {
        Ok(Some(_)) => Ok(()),
        other => Err(format!("{other:?}")),
    })
    .unwrap();
    String::from_utf8_lossy(&fs::read(&out).unwrap()).into_owned()
}

fn names(prefix: &str) -> Vec<String> {
    KINDS.iter().map(|kind| format!("{prefix}-{kind}")).collect()
}

fn end(scene: &Scene, pods: &[String]) {
    let pods: Vec<&str> = pods.iter().map(String::as_str).collect();
    // The cost of a dozen pods that start and end at once is higher.
    let cpu = Duration::from_millis(100) * u32::try_from(pods.len()).unwrap();
    scene.end(&pods, Allowance { cpu, ..Allowance::default() });
}

#[test]
fn termination_messages_are_read_only_from_plain_files() {
    require!(containerd);
    let mut scene = Scene::start(quick);
    let secret = Secret::make(&scene);
    let mut pods = names("words");
    for (kind, name) in KINDS.iter().zip(&pods) {
        let plant = format!("testapp hurt plant {} $P/containers/main/0", secret.kind(kind));
        scene.node.apply(&with_folders(&scene, failing(name, &plant)));
    }
    // These pods have a volume at the path, without the machine's folders.
    for kind in ["fifo", "folder"] {
        let mut pod = with_volumes(
            failing(&format!("taken-{kind}"), "true"),
            json!([{ "name": "v", "emptyDir": {} }]),
            json!([{ "name": "v", "mountPath": "/dev/termination-log", "subPath": "words" }]),
        );
        let mut init = container("init", &format!("testapp hurt plant {kind} /v/words"));
        init["volumeMounts"] = json!([{ "name": "v", "mountPath": "/v" }]);
        pod["spec"]["initContainers"] = json!([init]);
        scene.node.apply(&pod);
        pods.push(format!("taken-{kind}"));
    }
    pods.iter().for_each(|name| assert_eq!(last_words(&scene, name), "", "{name}"));
    // An agent that starts reads the files again.
    scene.restart_agent();
    pods.iter().for_each(|name| assert_eq!(last_words(&scene, name), "", "{name}"));
    secret.check();
    end(&scene, &pods);
}

#[test]
fn files_that_the_agent_makes_for_a_containers_next_instance_are_its_own() {
    require!(containerd);
    let scene = Scene::start(quick);
    let secret = Secret::make(&scene);
    let pods = names("next");
    for (kind, name) in KINDS.iter().zip(&pods) {
        let kind = secret.kind(kind);
        // Files of the second instance: its termination message, the pod's hosts file, its log.
        let plant = format!(
            "testapp hurt plant {kind} $P/containers/main/1 $P/etc-hosts $L/1.log; touch $P/harmed; exit 1"
        );
        let harm = format!("test -e $P/harmed || {{ {plant}; }}; test -f /etc/hosts");
        scene.node.apply(&with_folders(&scene, hostile(name, &harm)));
    }
    for name in &pods {
        let pod = scene.harmed(name);
        assert!(pod.restarts() >= 1, "{name}");
        // The pod is ready before the runtime has written its output.
        wait_for(&format!("the log of {name} to have its first line"), PATIENCE, || {
            let text = logs(&scene, name);
            if text.contains("serving") { Ok(()) } else { Err(text) }
        })
        .unwrap();
    }
    secret.check();
    end(&scene, &pods);
}

#[test]
fn logs_are_read_and_rotated_from_plain_files_alone() {
    require!(containerd);
    let scene = Scene::start(quick);
    let secret = Secret::make(&scene);
    let (own, ended, rotated) = (names("own"), names("ended"), names("rotated"));
    for (index, kind) in KINDS.iter().enumerate() {
        let kind = secret.kind(kind);
        // The file replaces the current log, of a container that runs and of one that fails.
        let plant = format!("testapp hurt plant {kind} $L/0.log");
        scene.node.apply(&with_folders(&scene, hostile(&own[index], &plant)));
        let mut pod = failing(&ended[index], &plant);
        pod["spec"]["containers"][0]["terminationMessagePolicy"] = json!("FallbackToLogsOnError");
        scene.node.apply(&with_folders(&scene, pod));
        // The files replace rotated logs; then there is output to rotate.
        let plant = format!(
            "testapp hurt plant {kind} $L/0.log.20200101-000000 $L/0.log.20200101-000001.gz \
             $L/0.log.20200101-000002 $L/0.log.20200101-000003.gz.tmp; \
             yes shouting | head -c 100000; sleep 3; yes again | head -c 100000"
        );
        scene.node.apply(&with_folders(&scene, hostile(&rotated[index], &plant)));
    }
    for name in own.iter().chain(&rotated) {
        scene.harmed(name);
        let text = logs(&scene, name);
        assert!(!text.contains("hush"), "{name}: {text}");
    }
    for name in &ended {
        let words = last_words(&scene, name);
        assert!(!words.contains("hush"), "{name}: {words}");
    }
    for name in &rotated {
        let pod = scene.harmed(name);
        let current = scene.node.log_path(&pod, "main", 0);
        wait_for(&format!("the log of {name} to be rotated"), PATIENCE, || match fs::metadata(&current) {
            Ok(found) if found.len() < 64 << 10 => Ok(()),
            other => Err(format!("{other:?}; {:?}", listed(current.parent().unwrap()))),
        })
        .unwrap();
        assert!(!logs(&scene, name).contains("hush"), "{name}");
    }
    secret.check();
    end(&scene, &[own, ended, rotated].concat());
}

fn listed(folder: &Path) -> Vec<PathBuf> {
    fs::read_dir(folder).unwrap().flatten().map(|entry| entry.path()).collect()
}

#[test]
fn volumes_with_special_files_are_owned_counted_and_mounted_in_parts() {
    require!(containerd);
    let scene = Scene::start(quick);
    let secret = Secret::make(&scene);
    let parts = names("part");
    for (kind, name) in KINDS.iter().zip(&parts) {
        let kind = secret.kind(kind);
        // The part is replaced while it is mounted; the container's next instance mounts it again.
        let harm =
            format!("test -e /v/harmed || {{ testapp hurt plant {kind} /v/part; touch /v/harmed; exit 1; }}");
        let pod = with_volumes(
            hostile(name, &harm),
            json!([{ "name": "v", "emptyDir": { "sizeLimit": "64Mi" } }]),
            json!([
                { "name": "v", "mountPath": "/v" }, { "name": "v", "mountPath": "/part", "subPath": "part" },
            ]),
        );
        scene.node.apply(&pod);
    }
    // The volume has all kinds of files, whose group is set when the volume is set up again.
    let everything = format!(
        "mkdir -p /v/deep; cd /v/deep; ln -sfn {secret} link; ln -sfn / root; ln -sfn link loop; ln -sfn loop link2; \
         test -p fifo || testapp hurt plant fifo fifo; testapp hurt plant socket socket; \
         test -e zero || mknod zero c 1 5 || true; test -e disk || mknod disk b 7 0 || true; \
         touch file; chmod 6755 file; ln -f file hard; ln -sfn {secret} /v/top; cd /",
        secret = secret.path.display()
    );
    let mut pod = with_volumes(
        hostile("everything", &everything),
        json!([{ "name": "v", "emptyDir": { "sizeLimit": "64Mi" } }]),
        json!([{ "name": "v", "mountPath": "/v" }]),
    );
    pod["spec"]["securityContext"] = json!({ "fsGroup": 2000 });
    let view = scene.run(&pod);
    scene.lose_sandbox(&view);
    let folder = scene.node.folder(&view).join("volumes/v/deep");
    assert_eq!(fs::metadata(folder.join("file")).unwrap().gid(), 2000);
    let message = scene.node.waiting("part-link", "main", "CreateContainerConfigError");
    assert!(message.contains("leads out of the volume"), "{message}");
    // A FIFO, a socket and a folder are mounted as such.
    for name in parts.iter().filter(|name| *name != "part-link") {
        let ready = scene.harmed(name);
        assert!(ready.restarts() >= 1, "{name}");
    }
    secret.check();
    end(&scene, &[parts, vec!["everything".to_owned()]].concat());
}

#[test]
fn links_in_place_of_a_volumes_content_are_never_followed() {
    require!(containerd);
    let scene = Scene::start(quick);
    let secret = Secret::make(&scene);
    let outside = secret.path.parent().unwrap();
    scene.node.apply(&object("ConfigMap", "colors", &json!({ "color": "red" })));
    let cases = [
        // The current set of files leads out of the volume, or the next set's path is occupied.
        ("data-link", format!("testapp hurt plant link={} $V/..data", outside.display())),
        ("data-up", "testapp hurt plant link=/ $V/..data".to_owned()),
        ("data-fifo", "testapp hurt plant fifo $V/..data".to_owned()),
        ("data-folder", "testapp hurt plant folder $V/..data".to_owned()),
        ("next-folder", "testapp hurt plant folder $V/..data_tmp".to_owned()),
        // The planted file replaces the set itself, or a name at the top level.
        ("set-link", format!("testapp hurt plant link={} $V/$(readlink $V/..data)", outside.display())),
        ("set-deep", "testapp hurt deep $V/$(readlink $V/..data) 20000".to_owned()),
        ("key-fifo", "testapp hurt plant fifo $V/..data/color $V/color".to_owned()),
        ("key-folder", "testapp hurt plant folder $V/color $V/..2020".to_owned()),
        // The planted link replaces the volume's own folder.
        ("volume-link", format!("mv $V $V.old; testapp hurt plant link={} $V", outside.display())),
    ];
    for (name, harm) in &cases {
        let pod = with_volumes(
            hostile(name, &format!("V=$P/volumes/colors; {harm}")),
            json!([{ "name": "colors", "configMap": { "name": "colors" } }]),
            json!([{ "name": "colors", "mountPath": "/colors" }]),
        );
        scene.node.apply(&with_folders(&scene, pod));
    }
    let watcher = with_volumes(
        hostile("watcher", "true"),
        json!([{ "name": "colors", "configMap": { "name": "colors" } }]),
        json!([{ "name": "colors", "mountPath": "/colors" }]),
    );
    let watcher = scene.run(&watcher);
    cases.iter().for_each(|(name, _)| drop(scene.harmed(name)));
    scene.node.apply(&object("ConfigMap", "colors", &json!({ "color": "blue", "shape": "round" })));
    // The other pods' volumes show the change.
    let shown = scene.node.folder(&watcher).join("volumes/colors/color");
    scene.node.wait_file(&shown, |text| text == "blue");
    scene.another_comes_and_goes();
    secret.check();
    assert_eq!(listed(outside), std::slice::from_ref(&secret.path));
    let pods: Vec<String> =
        cases.iter().map(|(name, _)| (*name).to_owned()).chain(["watcher".to_owned()]).collect();
    scene.node.agent.remove("configmap-colors.yaml").unwrap();
    end(&scene, &pods);
}

#[test]
fn a_volume_is_not_set_up_through_a_link_in_its_folders_place() {
    require!(containerd);
    let scene = Scene::start(quick);
    let secret = Secret::make(&scene);
    let outside = secret.path.parent().unwrap();
    fs::set_permissions(outside, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    scene.node.apply(&object("ConfigMap", "colors", &json!({ "color": "red" })));
    let volumes = [
        ("disk", json!({ "name": "v", "emptyDir": {} })),
        ("content", json!({ "name": "v", "configMap": { "name": "colors" } })),
    ];
    for (name, volume) in &volumes {
        let harm = format!(
            "V=$P/volumes/v; test -L $V || {{ mv $V $V.old; testapp hurt plant link={} $V; }}",
            outside.display()
        );
        let pod =
            with_volumes(hostile(name, &harm), json!([volume]), json!([{ "name": "v", "mountPath": "/v" }]));
        let mut pod = with_folders(&scene, pod);
        pod["spec"]["securityContext"] = json!({ "fsGroup": 2000 });
        let view = scene.run(&pod);
        scene.kill_sandbox(&view);
    }
    // A refused set-up sends no event: after this time both have been set up, or attempted, several times.
    std::thread::sleep(Duration::from_secs(5));
    let found = fs::metadata(outside).unwrap();
    assert_eq!((found.mode() & 0o7777, found.gid()), (0o700, 0));
    assert_eq!(listed(outside), std::slice::from_ref(&secret.path));
    secret.check();
    scene.node.agent.remove("configmap-colors.yaml").unwrap();
    scene.end(&["disk", "content"], Allowance::default());
    assert_eq!(listed(outside), std::slice::from_ref(&secret.path));
}
