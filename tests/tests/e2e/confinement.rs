//! Identity and rights of the processes of real pods, and their view of the machine: security contexts,
//! namespaces, names, name resolution.

#![allow(clippy::unwrap_used)] // a failure in a helper fails the test

use std::fs;

use crate::node::{Node, check_lines, container, script};
use beelet_tests::images::{self, Entry};
use beelet_tests::require;
use serde_json::{Value, json};

fn with(mut pod: Value, field: &str, value: Value) -> Value {
    pod["spec"][field] = value;
    pod
}

fn with_context(mut pod: Value, value: Value) -> Value {
    pod["spec"]["containers"][0]["securityContext"] = value;
    pod
}

#[test]
fn users_groups_capabilities_and_filters_are_as_the_manifest_says() {
    require!(containerd);
    let node = Node::start(|options| options);
    let caps = "grep -E '^(CapEff|NoNewPrivs|Seccomp):' /proc/self/status | tr '\\t' ' '";
    let plain = script("plain", &format!("id -u; {caps}; touch /x && echo writable"));
    let confined = with(
        with_context(
            script(
                "confined",
                &format!(
                    "id -u; id -g; id -G; {caps}; touch /x || echo read-only; cat /proc/keys > /dev/null && test -s /proc/keys || echo masked"
                ),
            ),
            json!({
                "runAsGroup": 3001, "allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true,
                "capabilities": {"drop": ["ALL"]}, "seccompProfile": {"type": "RuntimeDefault"},
            }),
        ),
        "securityContext",
        json!({"runAsUser": 3000, "supplementalGroups": [3002], "fsGroup": 3003, "runAsNonRoot": true}),
    );
    let added = with_context(
        script("added", &format!("{caps}; ls -d /proc/1/ns/net")),
        json!({"capabilities": {"add": ["NET_ADMIN"], "drop": ["ALL"]}}),
    );
    let privileged = with_context(
        script("privileged", "ls /dev/kmsg; mount -t tmpfs x /tmp && echo mounts"),
        json!({"privileged": true}),
    );
    let unmasked = with_context(
        script("unmasked", "echo masks $(grep -c ' /proc/' /proc/mounts)"),
        json!({"privileged": true}),
    );
    for pod in [&plain, &confined, &added, &privileged, &unmasked] {
        node.apply(pod);
    }
    check_lines(&node.output("plain"), &["0", "NoNewPrivs: 0", "Seccomp: 0", "writable"]);
    check_lines(
        &node.output("confined"),
        &[
            "3000",
            "3001",
            "3001 3002 3003",
            "CapEff: 0000000000000000",
            "NoNewPrivs: 1",
            "Seccomp: 2",
            "read-only",
            "masked",
        ],
    );
    check_lines(&node.output("added"), &["CapEff: 0000000000001000"]);
    check_lines(&node.output("privileged"), &["/dev/kmsg", "mounts"]);
    check_lines(&node.output("unmasked"), &["masks 0"]);
}

#[test]
fn a_container_that_must_not_be_root_is_not_started_as_root() {
    require!(containerd);
    let node = Node::start(|options| options);
    let app = fs::read(images::busybox().unwrap()).unwrap();
    let files = [("bin".to_owned(), Entry::Folder(0o755)), ("bin/sh".to_owned(), Entry::File(app, 0o755))];
    for (name, user) in [("localhost/beelet/named:1", "www"), ("localhost/beelet/numbered:1", "3000:3001")] {
        let image = images::cached(name, &files, &json!({"User": user, "Env": ["PATH=/bin"]})).unwrap();
        node.containerd.import(&image).unwrap();
    }
    let on = |name: &str, image: &str| {
        let mut pod = with(script(name, "true"), "securityContext", json!({"runAsNonRoot": true}));
        pod["spec"]["containers"][0]["image"] = json!(image);
        pod
    };
    node.apply(&on("root", images::APP));
    node.apply(&on("named", "localhost/beelet/named:1"));
    node.apply(&on("numbered", "localhost/beelet/numbered:1"));
    let message = node.waiting("root", "main", "CreateContainerConfigError");
    assert!(message.contains("the image runs as root"), "{message}");
    let message = node.waiting("named", "main", "CreateContainerConfigError");
    assert!(message.contains("the image's user \"www\" has no number"), "{message}");
    node.output("numbered");
}

#[test]
fn namespaces_are_the_pods_own_or_the_machines() {
    require!(containerd);
    let node = Node::start(|options| options);
    let of_host = |namespace: &str| {
        let link = fs::read_link(format!("/proc/self/ns/{namespace}")).unwrap();
        link.display().to_string()
    };
    let show = "for n in net pid ipc uts; do readlink /proc/self/ns/$n; done; hostname";
    let host = with(
        with(with(script("host", show), "hostNetwork", json!(true)), "hostPID", json!(true)),
        "hostIPC",
        json!(true),
    );
    node.apply(&host);
    // In a manifest, two dollars stand for one.
    node.apply(&script("own", &format!("{show}; echo $$$$")));
    let mut shared = with(
        script(
            "shared",
            "sleep 1; ps | grep -q '[s]leep 77' && echo seen; test $$$$ -ne 1 && echo not the first",
        ),
        "shareProcessNamespace",
        json!(true),
    );
    let mut side = container("side", "sleep 77");
    side["restartPolicy"] = json!("Always");
    shared["spec"]["initContainers"] = json!([side]);
    node.apply(&shared);
    let text = node.output("host");
    check_lines(&text, &[&of_host("net"), &of_host("pid"), &of_host("ipc")]);
    let text = node.output("own");
    for namespace in ["net", "pid", "ipc", "uts"] {
        assert!(!text.contains(&of_host(namespace)), "{namespace}:\n{text}");
    }
    check_lines(&text, &["own-testnode", "1"]);
    check_lines(&node.output("shared"), &["seen", "not the first"]);
}

#[test]
fn names_and_name_resolution_are_as_the_manifest_says() {
    require!(containerd);
    let resolver = "nameserver 192.0.2.53\nsearch machine.test\noptions rotate\n";
    let node = Node::start(|options| {
        let file = options.manifests().with_file_name("resolv.conf");
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(&file, resolver).unwrap();
        options
            .kubelet("resolvConf", file.display().to_string())
            .kubelet("clusterDNS", json!(["10.96.0.10"]))
            .kubelet("clusterDomain", "cluster.test")
    });
    let show = "hostname; cat /etc/hosts /etc/resolv.conf; cat /proc/sys/net/ipv4/tcp_syncookies";
    let named = script("named", show);
    let named = with(named, "hostname", json!("www"));
    let named = with(named, "subdomain", json!("front"));
    let named = with(named, "setHostnameAsFQDN", json!(true));
    let named =
        with(named, "hostAliases", json!([{"ip": "192.0.2.9", "hostnames": ["printer", "printer.test"]}]));
    let named = with(
        named,
        "securityContext",
        json!({"sysctls": [{"name": "net.ipv4.ip_unprivileged_port_start", "value": "0"}]}),
    );
    node.apply(&named);
    let none = with(script("none", "cat /etc/resolv.conf"), "dnsPolicy", json!("None"));
    let none = with(
        none,
        "dnsConfig",
        json!({"nameservers": ["192.0.2.1"], "searches": ["x.test"], "options": [{"name": "ndots", "value": "2"}]}),
    );
    node.apply(&none);
    node.apply(&with(script("default", "cat /etc/resolv.conf"), "dnsPolicy", json!("Default")));
    let on_host = with(script("on-host", "cat /etc/hosts /etc/resolv.conf"), "hostNetwork", json!(true));
    node.apply(&with(on_host, "hostAliases", json!([{"ip": "192.0.2.9", "hostnames": ["printer"]}])));

    let text = node.output("named");
    let pod = node.wait("named", "to be known", |_| true);
    let own = format!("{}\twww.front.default.svc.cluster.test\twww", pod.ip().unwrap_or_default());
    check_lines(
        &text,
        &[
            "www.front.default.svc.cluster.test",
            "192.0.2.9\tprinter\tprinter.test",
            "nameserver 10.96.0.10",
            "options ndots:5",
            "search default.svc.cluster.test svc.cluster.test cluster.test machine.test",
        ],
    );
    assert!(pod.ip().is_none() || text.contains(&own), "{own}\n{text}");
    check_lines(&node.output("none"), &["nameserver 192.0.2.1", "search x.test", "options ndots:2"]);
    check_lines(&node.output("default"), &["nameserver 192.0.2.53", "search machine.test", "options rotate"]);
    let text = node.output("on-host");
    check_lines(
        &text,
        &["# Kubernetes-managed hosts file (host network).", "192.0.2.9\tprinter", "nameserver 192.0.2.53"],
    );
}

#[test]
fn the_termination_message_is_in_the_status() {
    require!(containerd);
    let node = Node::start(|options| options);
    let last_words = |name: &str| {
        let pod = node.wait(name, "to fail", |pod| pod.phase() == "Failed");
        let state = pod.container("main").unwrap().state.clone().unwrap().terminated.unwrap();
        (state.exit_code, state.message.unwrap_or_default())
    };
    node.apply(&script("file", "echo -n out of cheese > /dev/termination-log; exit 3"));
    let mut path = script("path", "echo from elsewhere > /tmp/words; exit 4");
    path["spec"]["containers"][0]["terminationMessagePath"] = json!("/tmp/words");
    node.apply(&path);
    let mut log = script("log", "echo a clue; exit 5");
    log["spec"]["containers"][0]["terminationMessagePolicy"] = json!("FallbackToLogsOnError");
    node.apply(&log);
    let mut large = script("large", "yes x | head -c 100000 > /dev/termination-log; exit 6");
    large["spec"]["securityContext"] = json!({"runAsUser": 1000});
    node.apply(&large);
    node.apply(&script("silent", "echo nothing of note; exit 7"));
    assert_eq!(last_words("file"), (3, "out of cheese".to_owned()));
    assert_eq!(last_words("path"), (4, "from elsewhere\n".to_owned()));
    assert_eq!(last_words("log"), (5, "a clue\n".to_owned()));
    let (code, message) = last_words("large");
    assert_eq!((code, message.len()), (6, 4096));
    assert_eq!(last_words("silent"), (7, String::new()));
}

#[test]
fn images_that_cannot_be_had_say_why() {
    require!(containerd);
    let node = Node::start(|options| options);
    let on = |name: &str, image: &str, policy: &str| {
        let mut pod = script(name, "true");
        pod["spec"]["containers"][0]["image"] = json!(image);
        pod["spec"]["containers"][0]["imagePullPolicy"] = json!(policy);
        pod
    };
    node.apply(&on("invalid", "localhost/Beelet/App:1", "IfNotPresent"));
    node.apply(&on("never", "localhost/beelet/none:1", "Never"));
    // No registry serves at this address.
    node.apply(&on("pull", "127.0.0.1:9/beelet/none:1", "IfNotPresent"));
    node.apply(&on("preloaded", images::APP, "IfNotPresent"));
    assert!(node.waiting("invalid", "main", "InvalidImageName").contains("no capital letters"));
    assert!(node.waiting("never", "main", "ErrImageNeverPull").contains("import the image"));
    let message = node.waiting("pull", "main", "ErrImagePull");
    assert!(message.contains("127.0.0.1:9/beelet/none:1"), "{message}");
    node.output("preloaded");
}

#[test]
fn another_runtime_handler_is_asked_for_by_its_class() {
    require!(containerd);
    let node = Node::start(|options| options);
    let class = |name: &str, handler: &str| {
        json!({"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": name}, "handler": handler,
               "overhead": {"podFixed": {"memory": "8Mi"}}})
    };
    node.apply(&class("plain", "runc"));
    node.apply(&with(script("classed", "echo runs"), "runtimeClassName", json!("plain")));
    check_lines(&node.output("classed"), &["runs"]);
    let pod = node.wait("classed", "to be known", |_| true);
    let overhead = pod.pod.spec.unwrap().overhead.unwrap();
    assert_eq!(overhead["memory"].0, "8Mi");
}
