//! Manifests in, pods or sentences out: one line per case.

use serde_json::{Value, json};

use super::*;
use beelet_codec::error::ManifestError;

/// A valid pod; `%` stands for what a case adds to its container, `@` to its spec.
const POD: &str = "\
apiVersion: v1
kind: Pod
metadata: {name: web}
spec:
  @
  containers:
  - name: main
    image: busybox:1.36
    %
";

fn with_container(lines: &str) -> String {
    POD.replace("  @\n", "").replace('%', &lines.replace('\n', "\n    "))
}

fn with_spec(lines: &str) -> String {
    POD.replace('@', &lines.replace('\n', "\n  ")).replace("    %\n", "")
}

fn pod_of(text: &str) -> Pod {
    match read(text, "web.yaml") {
        Ok(Manifest { object: Object::Pod(pod), .. }) => *pod,
        other => panic!("{text}\n{other:?}"),
    }
}

fn error_of(text: &str) -> ManifestError {
    match read(text, "web.yaml") {
        Err(error) => error,
        Ok(manifest) => panic!("accepted: {text}\n{manifest:?}"),
    }
}

fn check_text(text: &str, expected: &str) {
    let error = error_of(text).to_string();
    assert!(error.contains(expected), "{text}\nsays: {error}\nnot:  {expected}");
}

/// The whole error of a pod whose container has these lines.
fn check_container(lines: &str, expected: &str) {
    assert_eq!(error_of(&with_container(lines)).to_string(), format!("web.yaml:{expected}"), "{lines}");
}

/// The whole error of a pod whose spec has these lines.
fn check_spec(lines: &str, expected: &str) {
    assert_eq!(error_of(&with_spec(lines)).to_string(), format!("web.yaml:{expected}"), "{lines}");
}

fn check_accepted(text: &str) {
    let manifest = read(text, "web.yaml");
    assert!(manifest.as_ref().is_ok_and(|m| m.warnings.is_empty()), "{text}\n{manifest:?}");
}

#[test]
fn a_file_holds_one_pod() {
    check_text("", "web.yaml: there is nothing in the file");
    check_text("# nothing\n", "web.yaml: there is nothing in the file");
    check_text("a: [1\n", "web.yaml:1:4: unclosed bracket '['");
    check_text(
        "just text",
        "web.yaml:1:1: a manifest is a v1 Pod (or a v1 ConfigMap or Secret, a scheduling.k8s.io/v1 PriorityClass, a node.k8s.io/v1 RuntimeClass), a mapping; this is a string",
    );
    check_text("[]", "a mapping; this is a list");
    check_text("spec: {}", "web.yaml:1:1: kind: must be there and be a string");
    check_text("kind: Pod", "web.yaml:1:1: apiVersion: must be there and be a string");
    check_text("apiVersion: 1\nkind: Pod", "web.yaml:1:13: apiVersion: must be there and be a string");
    check_text("apiVersion: v2\nkind: Pod", "web.yaml:1:13: apiVersion: \"v2\" is not known for this kind");
    check_text(
        "apiVersion: v1\nkind: List\nitems: []",
        "web.yaml:2:7: kind: one pod per file: split the list",
    );
    check_text(
        "apiVersion: apps/v1\nkind: Deployment",
        "web.yaml:2:7: kind: \"Deployment\" is not a kind that a node runs",
    );
    check_text(
        "apiVersion: v1\nkind: Pod\n---\napiVersion: v1\nkind: Pod",
        "web.yaml:4:1: one pod per file: this is the second of 2 documents",
    );
    check_text(
        "apiVersion: v1\nkind: Pod",
        "web.yaml:1:1: metadata.name: must be there\nweb.yaml:1:1: spec: must be there",
    );
}

#[test]
fn quantities_may_be_numbers() {
    let requests = |text: &str| {
        let pod = pod_of(&with_container(&format!("resources: {{requests: {{cpu: {text}}}}}")));
        pod.spec.unwrap().containers[0].resources.clone().unwrap().requests.unwrap()["cpu"].0.clone()
    };
    assert_eq!(requests("2"), "2");
    assert_eq!(requests("0.5"), "0.5");
    assert_eq!(requests("250m"), "250m");
    assert_eq!(requests("'1.5'"), "1.5");
    assert_eq!(requests("1e3"), "1000");
}

#[test]
fn whole_numbers_may_have_an_exponent() {
    let text = with_container("ports: [{containerPort: 8080.0}]").replace(
        "spec:\n",
        "spec:\n  terminationGracePeriodSeconds: 1e1\n  securityContext: {runAsUser: 1.00065e+09, fsGroup: 1e+06}\n",
    );
    let spec = pod_of(&text).spec.unwrap();
    assert_eq!(spec.termination_grace_period_seconds, Some(10));
    let context = spec.security_context.unwrap();
    assert_eq!((context.run_as_user, context.fs_group), (Some(1_000_650_000), Some(1_000_000)));
    assert_eq!(spec.containers[0].ports.as_ref().unwrap()[0].container_port, 8080);
}

#[test]
fn a_bad_quantity_is_named_with_its_place() {
    check_container(
        "resources: {requests: {cpu: abc}}",
        "8:33: spec.containers[0].resources.requests.cpu: \"abc\" is not a quantity (use e.g. 250m, 1.5 or 512Mi)",
    );
    check_container(
        "resources: {limits: {cpu: abc}}",
        "8:31: spec.containers[0].resources.limits.cpu: \"abc\" is not a quantity (use e.g. 250m, 1.5 or 512Mi)",
    );
    check_container(
        "resources: {requests: {memory: -1}}",
        "8:36: spec.containers[0].resources.requests.memory: -1 is negative",
    );
    check_container(
        "resources: {requests: {cpu: 2}, limits: {cpu: 1500m}}",
        "8:33: spec.containers[0].resources.requests.cpu: 2 is more than the limit 1500m",
    );
    check_container(
        "resources: {requests: {cpu: [1]}}",
        "8:28: spec.containers[0].resources.requests.cpu: must be a quantity such as 250m or 512Mi, not a list",
    );
    check_container(
        "resources: {limits: {cpu: 1, hugepages-2Mi: 3Mi}}",
        "8:49: spec.containers[0].resources.limits.hugepages-2Mi: 3Mi is not a number of whole pages, as the resource's name has them",
    );
    check_container(
        "resources:\n  limits:\n    example.com/gpu: 500m",
        "10:26: spec.containers[0].resources.limits[\"example.com/gpu\"]: 500m is not a whole number: devices aren't divided",
    );
    check_container(
        "resources: {requests: {example.com/gpu: 1}, limits: {example.com/gpu: 2}}",
        "8:75: spec.containers[0].resources.limits[\"example.com/gpu\"]: is not the same as the request: devices aren't overcommitted",
    );
    check_container(
        "resources:\n  requests:\n    example.com/gpu: 1",
        "8:5: spec.containers[0].resources.limits[\"example.com/gpu\"]: must be there, the same as the request: devices aren't overcommitted",
    );
}

#[test]
fn types_are_explained() {
    check_container(
        "env: [{name: A, value: 80}]",
        "8:28: spec.containers[0].env[0].value: must be a string, not the number 80; put it in quotes",
    );
    check_container(
        "env: [{name: A, value: yes}]",
        "8:28: spec.containers[0].env[0].value: must be a string, not true (yes, on and y mean true in YAML; no, off and n mean false); put it in quotes",
    );
    check_container(
        "ports: [{containerPort: '80'}]",
        "8:29: spec.containers[0].ports[0].containerPort: must be a whole number of at most 32 bits, not \"80\"",
    );
    check_container(
        "ports: {containerPort: 80}",
        "8:5: spec.containers[0].ports: must be a list, not a mapping",
    );
    check_container("command: sleep", "8:14: spec.containers[0].command: must be a list, not \"sleep\"");
    check_container(
        "args: [1]",
        "8:12: spec.containers[0].args[0]: must be a string, not the number 1; put it in quotes",
    );
    check_container("stdin: 1", "8:12: spec.containers[0].stdin: must be true or false, not the number 1");
    check_spec(
        "terminationGracePeriodSeconds: 5s",
        "5:34: spec.terminationGracePeriodSeconds: must be a whole number, not \"5s\"",
    );
    check_text(
        "apiVersion: v1\nkind: Pod\nspec: []",
        "web.yaml:3:1: spec: must be a mapping with the fields of PodSpec, not a list",
    );
    check_text(
        "apiVersion: v1\nkind: Pod\nmetadata: {labels: {a: 1}}",
        "metadata.labels.a: must be a string, not the number 1",
    );
}

#[test]
fn all_errors_come_at_once_in_the_order_of_the_file() {
    let text = "apiVersion: v1\nkind: Pod\nmetadata: {name: Web}\nspec:\n  restartPolicy: Sometimes\n  containers:\n  - name: a\n  - name: a\n    image: x\n    volumeDevices: [{name: a, devicePath: /dev/a}]\n";
    let error = error_of(text).to_string();
    let lines: Vec<_> =
        error.lines().map(|line| line.split(": ").take(2).collect::<Vec<_>>().join(" ")).collect();
    assert_eq!(
        lines,
        [
            "web.yaml:3:18 metadata.name",
            "web.yaml:5:18 spec.restartPolicy",
            "web.yaml:7:5 spec.containers[0].image",
            "web.yaml:8:11 spec.containers[1].name",
            "web.yaml:10:5 spec.containers[1].volumeDevices",
        ],
        "{error}"
    );
}

#[test]
fn type_errors_come_all_at_once_too() {
    let error = error_of(&with_container("stdin: 1\ntty: 2\nargs: 3\ncommand: [4, 5]")).to_string();
    assert_eq!(error.lines().count(), 4, "{error}");
    // A misspelt field has no effect beside right ones. Beside a wrong one it is told with it.
    let error = error_of(&with_container("stdin: 1\nstdinOnse: true")).to_string();
    assert_eq!(error.lines().count(), 2, "{error}");
    assert!(error.contains("spec.containers[0].stdinOnse: there is no such field"), "{error}");
}

#[test]
fn the_number_of_reasons_is_bounded() {
    let ports: String = (0..100).map(|_| "\n- containerPort: 0".to_owned()).collect();
    let error = error_of(&with_container(&format!("ports:{ports}")));
    assert_eq!(error.reasons().len(), 10);
    assert!(error.to_string().ends_with("\nweb.yaml: and 90 more"), "{error}");
}

#[test]
fn names_are_checked() {
    check_text(
        &with_container("").replace("web}", "Web}"),
        "web.yaml:3:18: metadata.name: \"Web\" is not a name: up to 253 of a-z, 0-9, '-' and '.'",
    );
    check_text(
        &with_container("").replace("name: web}", "name: web, namespace: a.b}"),
        "web.yaml:3:34: metadata.namespace: \"a.b\" is not a name",
    );
    check_text(
        &with_container("").replace("name: web}", "name: web, uid: ../x}"),
        "metadata.uid: \"../x\" is not a UID",
    );
    check_text(
        &with_container("").replace("name: web}", "name: web, labels: {a b: c}}"),
        "metadata.labels[\"a b\"]: \"a b\" is not a key",
    );
    check_text(
        &with_container("").replace("name: web}", "name: web, labels: {a: b c}}"),
        "metadata.labels.a: \"b c\" is not a label's value",
    );
    check_text(
        &with_container("").replace("name: main", "name: a.b"),
        "web.yaml:6:11: spec.containers[0].name: \"a.b\" is not a name",
    );
    check_text(
        &with_container("").replace("name: main", "x: y"),
        "web.yaml:6:5: spec.containers[0].name: must be there",
    );
    check_text(
        &with_container("").replace("image: busybox:1.36", "tty: true"),
        "web.yaml:6:5: spec.containers[0].image: must be there",
    );
    check_text(
        &with_container("").replace("busybox:1.36", "\"bad image\""),
        "spec.containers[0].image: \"bad image\" has blanks in it",
    );
    check_spec(
        "initContainers: [{name: main, image: x}]",
        "7:11: spec.containers[0].name: \"main\" is the name of an earlier container",
    );
    check_spec(
        "volumes: [{name: a}, {name: a}]",
        "5:31: spec.volumes[1].name: \"a\" is the name of an earlier volume",
    );
    check_text(
        "apiVersion: v1\nkind: Pod\nmetadata: {name: a}\nspec: {}",
        "web.yaml:4:1: spec.containers: must have at least one container",
    );
}

#[test]
fn ports_are_checked() {
    check_container(
        "ports: [{containerPort: 0}]",
        "8:29: spec.containers[0].ports[0].containerPort: must be from 1 to 65535, not 0",
    );
    check_container(
        "ports: [{containerPort: 65536}]",
        "8:29: spec.containers[0].ports[0].containerPort: must be from 1 to 65535, not 65536",
    );
    check_container(
        "ports: [{containerPort: 80, protocol: ICMP}]",
        "8:43: spec.containers[0].ports[0].protocol: must be TCP, UDP or SCTP, not \"ICMP\"",
    );
    check_container(
        "ports: [{containerPort: 80, name: 80}]",
        "8:39: spec.containers[0].ports[0].name: must be a string, not the number 80; put it in quotes",
    );
    check_container(
        "ports: [{containerPort: 80, name: HTTP}]",
        "8:39: spec.containers[0].ports[0].name: \"HTTP\" is not a port's name: up to 15 of a-z, 0-9 and '-', with a letter in it",
    );
    check_container(
        "ports: [{containerPort: 80, hostIP: here}]",
        "8:41: spec.containers[0].ports[0].hostIP: \"here\" is not an IP address",
    );
    check_container(
        "ports: [{containerPort: 80, hostPort: 8080}, {containerPort: 81, hostPort: 8080}]",
        "8:80: spec.containers[0].ports[1].hostPort: 8080 is taken by an earlier port of the pod",
    );
    check_accepted(&with_container(
        "ports: [{containerPort: 80, hostPort: 80}, {containerPort: 80, hostPort: 80, protocol: UDP}]",
    ));
    let host_network = with_container("ports: [{containerPort: 80, hostPort: 81}]")
        .replace("spec:\n", "spec:\n  hostNetwork: true\n");
    check_text(&host_network, "hostPort: must be the containerPort 80 in a pod with hostNetwork");
}

#[test]
fn probes_are_checked() {
    check_container(
        "readinessProbe: {}",
        "8:5: spec.containers[0].readinessProbe: must say how to probe: tcpSocket or httpGet",
    );
    check_container(
        "readinessProbe: {tcpSocket: {port: 80}, httpGet: {port: 80}}",
        "8:5: spec.containers[0].readinessProbe: must have one way to probe only",
    );
    check_container(
        "readinessProbe: {tcpSocket: {}}",
        "8:22: spec.containers[0].readinessProbe.tcpSocket.port: must be there: a number from 1 to 65535, or a port's name",
    );
    check_container(
        "readinessProbe: {tcpSocket: {port: http}}",
        "8:40: spec.containers[0].readinessProbe.tcpSocket.port: the container has no port of the name \"http\"",
    );
    check_container(
        "readinessProbe: {tcpSocket: {port: 70000}}",
        "8:40: spec.containers[0].readinessProbe.tcpSocket.port: must be from 1 to 65535, not 70000",
    );
    check_container(
        "livenessProbe: {tcpSocket: {port: 80}, successThreshold: 2}",
        "8:62: spec.containers[0].livenessProbe.successThreshold: must be 1, except in a readiness probe",
    );
    check_container(
        "readinessProbe: {tcpSocket: {port: 80}, periodSeconds: -1}",
        "8:60: spec.containers[0].readinessProbe.periodSeconds: must be at least 1, not -1",
    );
    check_container(
        "readinessProbe: {tcpSocket: {port: 80}, terminationGracePeriodSeconds: 5}",
        "8:76: spec.containers[0].readinessProbe.terminationGracePeriodSeconds: is not for readiness probes: they stop nothing",
    );
    check_container(
        "livenessProbe: {httpGet: {port: 80, httpHeaders: [{name: 'a b', value: c}]}}",
        "8:62: spec.containers[0].livenessProbe.httpGet.httpHeaders[0].name: \"a b\" is not a header's name",
    );
    check_spec(
        "initContainers: [{name: i, image: x, readinessProbe: {tcpSocket: {port: 80}}}]",
        "5:40: spec.initContainers[0].readinessProbe: is only for containers and sidecars (restartPolicy: Always), not for init containers",
    );
    check_accepted(&with_spec(
        "initContainers: [{name: i, image: 'x:1', restartPolicy: Always, readinessProbe: {tcpSocket: {port: 80}}}]",
    ));
}

#[test]
fn a_variable_comes_from_a_file_of_an_empty_dir() {
    let from = |volume: &str, path: &str| {
        format!(
            "env: [{{name: A, valueFrom: {{fileKeyRef: {{volumeName: {volume}, path: {path}, key: B}}}}}}]"
        )
    };
    check_container(
        &from("x", "vars"),
        "8:58: spec.containers[0].env[0].valueFrom.fileKeyRef.volumeName: the pod has no emptyDir volume \"x\"",
    );
    let volumes = |container: &str| {
        with_spec(&format!(
            "volumes: [{{name: x, emptyDir: {{}}}}]\ninitContainers: [{{name: i, image: 'x:1', {container}}}]"
        ))
    };
    check_accepted(&volumes(&from("x", "vars")));
    check_spec(
        &format!(
            "volumes: [{{name: x, emptyDir: {{}}}}]\ninitContainers: [{{name: i, image: x, {}}}]",
            from("x", "../vars")
        ),
        "6:102: spec.initContainers[0].env[0].valueFrom.fileKeyRef.path: \"../vars\" must be relative and without '..'",
    );
}

#[test]
fn the_pod_as_a_whole_has_resources_that_its_containers_fit_in() {
    check_accepted(&with_spec("resources: {limits: {cpu: '2', memory: 1Gi}}"));
    check_spec(
        "resources: {limits: {cpu: '2', example.com/gpu: '1'}}",
        "5:51: spec.resources.limits[\"example.com/gpu\"]: can't be had for a pod as a whole: cpu and memory can",
    );
    check_spec(
        "resources: {requests: {cpu: '3'}, limits: {cpu: '2'}}",
        "5:31: spec.resources.requests.cpu: 3 is more than the limit 2",
    );
    check_spec(
        "resources: {requests: {cpu: '1'}}\ninitContainers: [{name: i, image: x, resources: {requests: {cpu: '2'}}}]",
        "5:31: spec.resources.requests.cpu: 1 is less than the 2 that its containers request together",
    );
    check_accepted(&with_spec("resources: {limits: {cpu: '1', hugepages-2Mi: 2Mi}}"));
}

#[test]
fn a_stop_signal_is_one_of_the_pods_operating_system() {
    check_container(
        "lifecycle: {stopSignal: SIGINT}",
        "8:29: spec.containers[0].lifecycle.stopSignal: needs os.name of the pod: signals are an operating system's",
    );
    check_spec(
        "os: {name: linux}\ninitContainers: [{name: i, image: x, restartPolicy: Always, lifecycle: {stopSignal: INT}}]",
        "6:87: spec.initContainers[0].lifecycle.stopSignal: is no signal of Linux (SIGTERM, SIGUSR1, SIGRTMIN+3, ...)",
    );
    check_accepted(&with_spec(
        "os: {name: linux}\ninitContainers: [{name: i, image: 'x:1', restartPolicy: Always, lifecycle: {stopSignal: SIGRTMIN+3}}]",
    ));
}

#[test]
fn what_kubernetes_has_removed_is_refused() {
    check_spec(
        "volumes: [{name: a, rbd: {image: i}}]",
        "5:23: spec.volumes[0].rbd: Kubernetes has removed volumes of this kind: nothing makes them any more; take it out",
    );
}

#[test]
fn a_static_pod_refers_to_nothing_in_an_api_server() {
    check_spec(
        "serviceAccountName: robot",
        "5:23: spec.serviceAccountName: a static pod may not refer to objects of the API server (service accounts); take it out",
    );
    check_spec(
        "volumes: [{name: a, persistentVolumeClaim: {claimName: x}}]",
        "5:23: spec.volumes[0].persistentVolumeClaim: a static pod may not refer to objects of the API server (volume claims); take it out",
    );
}

#[test]
fn variables_and_mounts_are_checked() {
    check_container("env: [{value: x}]", "8:11: spec.containers[0].env[0].name: must be there");
    check_container(
        "env: [{name: a=b}]",
        "8:18: spec.containers[0].env[0].name: \"a=b\" is not a variable's name: printable ASCII without '='",
    );
    check_container(
        "env: [{name: A, valueFrom: {}}]",
        "8:21: spec.containers[0].env[0].valueFrom: must have exactly one source, such as fieldRef",
    );
    check_text(
        &with_container("env: [{name: A, valueFrom: {fieldRef: {fieldPath: spec.color}}}]"),
        "fieldRef.fieldPath: \"spec.color\" is not a field that a variable can show",
    );
    check_accepted(&with_container(
        "env: [{name: A, valueFrom: {fieldRef: {fieldPath: \"metadata.labels['a']\"}}}, {name: B, value: $(A)}]",
    ));
    check_container(
        "volumeMounts: [{name: a, mountPath: /a}]",
        "8:27: spec.containers[0].volumeMounts[0].name: the pod has no volume \"a\"",
    );
    let mounted = |mounts: &str| {
        with_container(&format!("volumeMounts: [{mounts}]"))
            .replace("spec:\n", "spec:\n  volumes: [{name: a}]\n")
    };
    check_text(&mounted("{name: a}"), "volumeMounts[0].mountPath: must be there");
    check_text(
        &mounted("{name: a, mountPath: \"/a\\0b\"}"),
        "mountPath: \"/a\\0b\" must not have a zero byte in it",
    );
    // ValidateVolumeMounts has no rule against these, and folders of registries' certificates have colons.
    check_accepted(&mounted("{name: a, mountPath: \"/etc/containers/certs.d/registry.local:5000\"}"));
    check_accepted(&mounted("{name: a, mountPath: /a/../b}"));
    check_text(
        &mounted("{name: a, mountPath: /a}, {name: a, mountPath: /a}"),
        "volumeMounts[1].mountPath: \"/a\" is the path of an earlier mount",
    );
    check_accepted(&mounted("{name: a, mountPath: /a, readOnly: true}"));
    check_accepted(&mounted("{name: a, mountPath: /a, mountPropagation: HostToContainer}"));
    check_text(
        &mounted("{name: a, mountPath: /a, mountPropagation: Both}"),
        "mountPropagation: must be None, HostToContainer or Bidirectional, not \"Both\"",
    );
    check_text(
        &mounted("{name: a, mountPath: /a, mountPropagation: Bidirectional}"),
        "mountPropagation: Bidirectional is for privileged containers only",
    );
    check_spec(
        "volumes: [{name: a, hostPath: {path: b}}]",
        "5:40: spec.volumes[0].hostPath.path: \"b\" must begin with '/'",
    );
    check_spec(
        "volumes: [{name: a, hostPath: {path: /b/../c}}]",
        "5:40: spec.volumes[0].hostPath.path: \"/b/../c\" must not have '..' in it",
    );
    let long = "/b".repeat(2049);
    check_text(
        &with_spec(&format!("volumes: [{{name: a, hostPath: {{path: {long}}}}}]")),
        "of 4098 bytes is longer than the 4096 bytes that Linux allows; shorten it",
    );
    let parts: Vec<_> = (0..1000).map(|n| format!("{{name: a, mountPath: /{n}, subPath: x}}")).collect();
    let text = mounted(&parts.join(", "));
    check_text(&text, "spec: needs 1001 mounts for its volumes, subPaths and block devices;");
    check_spec(
        "volumes: [{name: a, hostPath: {path: /b}, emptyDir: {}}]",
        "5:13: spec.volumes[0]: must have one source only",
    );
    check_spec(
        "volumes: [{name: a, emptyDir: {sizeLimit: x}}]",
        "5:45: spec.volumes[0].emptyDir.sizeLimit: \"x\" is not a quantity (use e.g. 250m, 1.5 or 512Mi)",
    );
}

#[test]
fn security_is_checked() {
    check_container(
        "securityContext: {runAsUser: -1}",
        "8:34: spec.containers[0].securityContext.runAsUser: must be at least 0, not -1",
    );
    check_container(
        "securityContext: {runAsUser: 9223372036854775807}",
        "8:34: spec.containers[0].securityContext.runAsUser: must be from 0 to 2147483647, not 9223372036854775807",
    );
    check_container(
        "securityContext: {runAsNonRoot: true, runAsUser: 0}",
        "8:54: spec.containers[0].securityContext.runAsUser: is root, but runAsNonRoot is true",
    );
    check_accepted(&with_container("securityContext: {runAsNonRoot: true, runAsGroup: 5}"));
    check_container(
        "securityContext: {privileged: true, allowPrivilegeEscalation: false}",
        "8:67: spec.containers[0].securityContext.allowPrivilegeEscalation: can't be false in a privileged container",
    );
    check_accepted(&with_container(
        "securityContext: {runAsNonRoot: true, runAsUser: 5, runAsGroup: 5, capabilities: {drop: [ALL]}}",
    ));
}

#[test]
fn fields_of_the_spec_are_checked() {
    check_spec(
        "restartPolicy: always",
        "5:18: spec.restartPolicy: must be Always, OnFailure or Never, not \"always\"",
    );
    check_spec(
        "terminationGracePeriodSeconds: -1",
        "5:34: spec.terminationGracePeriodSeconds: must be from 0 to 31622400, not -1",
    );
    check_spec(
        "dnsPolicy: None",
        "5:14: spec.dnsPolicy: None needs at least one of spec.dnsConfig.nameservers",
    );
    check_spec(
        "dnsConfig: {nameservers: [here]}",
        "5:29: spec.dnsConfig.nameservers[0]: \"here\" is not an IP address",
    );
    check_spec("os: {name: windows}", "5:14: spec.os.name: must be linux, not \"windows\"");
    check_spec(
        "hostPID: true\nshareProcessNamespace: true",
        "6:26: spec.shareProcessNamespace: can't be true together with spec.hostPID",
    );
}

#[test]
fn volumes_of_objects_are_checked() {
    check_text(
        &with_spec("volumes: [{name: a, configMap: {name: x, defaultMode: 0o1777}}]"),
        "spec.volumes[0].configMap.defaultMode: must be from 0 to 0777 (in JSON 511)",
    );
    check_text(
        &with_spec("volumes: [{name: a, secret: {secretName: x, items: [{key: k, path: ../y}]}}]"),
        "spec.volumes[0].secret.items[0].path: \"../y\" must not begin with '..'",
    );
    check_text(
        &with_spec(
            "volumes: [{name: a, downwardAPI: {items: [{path: x, fieldRef: {fieldPath: status.podIP}}]}}]",
        ),
        "spec.volumes[0].downwardAPI.items[0].fieldRef.fieldPath: \"status.podIP\" is not a field that a file can show; use metadata.name, metadata.namespace, metadata.uid, metadata.labels, metadata.annotations or one of their keys",
    );
    check_text(
        &with_spec(
            "volumes: [{name: a, downwardAPI: {items: [{path: x, resourceFieldRef: {containerName: none, resource: limits.cpu}}]}}]",
        ),
        "spec.volumes[0].downwardAPI.items[0].resourceFieldRef.containerName: the pod has no container \"none\"",
    );
    check_text(
        &with_spec("volumes: [{name: a, projected: {sources: [{configMap: {name: x}, secret: {name: z}}]}}]"),
        "spec.volumes[0].projected.sources[0]: must have exactly one source",
    );
    check_text(
        &with_spec("volumes: [{name: a, image: {}}]"),
        "spec.volumes[0].image.reference: must be there: the image's name",
    );
    check_accepted(&with_spec(
        "volumes: [{name: a, configMap: {name: x}}, {name: b, image: {reference: 'x:1'}}, {name: c, projected: {sources: [{secret: {name: z}}]}}]",
    ));
}

#[test]
fn sources_of_variables_are_checked() {
    check_text(
        &with_container("env: [{name: A, valueFrom: {resourceFieldRef: {resource: cpu}}}]"),
        "spec.containers[0].env[0].valueFrom.resourceFieldRef.resource: \"cpu\" is not a resource that can be shown: limits or requests, of cpu, memory or ephemeral-storage, such as limits.cpu",
    );
    check_text(
        &with_container("env: [{name: A, valueFrom: {secretKeyRef: {name: x}}}]"),
        "spec.containers[0].env[0].valueFrom.secretKeyRef.key: must be there",
    );
    check_text(
        &with_container("envFrom: [{prefix: A_}]"),
        "spec.containers[0].envFrom[0]: must have exactly one of configMapRef and secretRef",
    );
    check_accepted(&with_container(
        "envFrom: [{secretRef: {name: x}}, {prefix: A_, configMapRef: {name: z, optional: true}}]",
    ));
}

#[test]
fn parts_of_volumes_are_checked() {
    let mounted = |mount: &str| {
        with_container(&format!("volumeMounts: [{{name: a, mountPath: /a, {mount}}}]"))
            .replace("spec:\n", "spec:\n  volumes: [{name: a}]\n")
    };
    check_text(&mounted("subPath: ../x"), "subPath: \"../x\" must be relative and without '..'");
    check_text(&mounted("subPath: /x"), "subPath: \"/x\" must be relative and without '..'");
    check_text(&mounted("subPath: x, subPathExpr: z"), "subPathExpr: can't be there together with subPath");
    check_text(&mounted("recursiveReadOnly: Enabled"), "recursiveReadOnly: needs readOnly: true");
    check_text(&mounted("recursiveReadOnly: Yes"), "recursiveReadOnly: must be a string");
    check_text(&mounted("recursiveReadOnly: Never"), "must be Disabled, Enabled or IfPossible");
    check_accepted(&mounted("subPathExpr: $(A)/x, readOnly: true, recursiveReadOnly: IfPossible"));
}

#[test]
fn names_and_confinement_of_the_pod_are_checked() {
    check_text(
        &with_spec("hostAliases: [{ip: here, hostnames: [A]}]"),
        "spec.hostAliases[0].ip: \"here\" is not an IP address\nweb.yaml:5:40: spec.hostAliases[0].hostnames[0]: \"A\" is not a name: up to 253 of a-z, 0-9, '-' and '.', each part beginning and ending with a letter or digit",
    );
    check_text(
        &with_spec("hostnameOverride: a.b\nsetHostnameAsFQDN: true"),
        "spec.hostnameOverride: can't be there together with setHostnameAsFQDN",
    );
    check_text(
        &with_spec("securityContext: {fsGroupChangePolicy: Never}"),
        "spec.securityContext.fsGroupChangePolicy: must be OnRootMismatch or Always, not \"Never\"",
    );
    check_text(
        &with_spec("securityContext: {seccompProfile: {type: Localhost, localhostProfile: ../x}}"),
        "spec.securityContext.seccompProfile.localhostProfile: \"../x\" must be relative and without '..'",
    );
    check_text(
        &with_spec("securityContext: {appArmorProfile: {type: Unconfined, localhostProfile: web}}"),
        "spec.securityContext.appArmorProfile.localhostProfile: is for the type Localhost only",
    );
    check_accepted(&with_spec(
        "securityContext: {appArmorProfile: {type: Localhost, localhostProfile: web}, seLinuxOptions: {level: s0}}",
    ));
    check_accepted(&with_spec(
        "subdomain: front\nsetHostnameAsFQDN: true\nruntimeClassName: vm\nsecurityContext: {fsGroup: 5, supplementalGroups: [6], supplementalGroupsPolicy: Strict}",
    ));
}

fn check_warning(text: &str, expected: &str) {
    let warnings = read(text, "web.yaml").unwrap().warnings;
    assert_eq!(warnings, [expected], "{text}");
}

#[test]
fn unknown_fields_and_those_without_effect_are_warnings() {
    let unknown = "there is no such field; it has no effect (a misspelling?)";
    check_warning(
        &with_container("imagePullPolicies: Never"),
        &format!("line 8: spec.containers[0].imagePullPolicies: {unknown}"),
    );
    check_warning(&with_spec("hostnetwork: true"), &format!("line 5: spec.hostnetwork: {unknown}"));
    check_warning(
        &with_container("").replace("kind: Pod", "kind: Pod\ncolor: red"),
        &format!("line 3: color: {unknown}"),
    );
    check_warning(
        &with_spec("nodeSelector: {a: b}"),
        "line 5: spec.nodeSelector: has no effect: a standalone node has no scheduler; the pod runs on this node",
    );
    check_accepted(&with_spec("volumes: [{name: a, emptyDir: {sizeLimit: 1Gi}}]"));
    check_accepted(&with_container("resources: {limits: {ephemeral-storage: 1Gi}}"));
    check_accepted(&with_container("lifecycle: {preStop: {httpGet: {port: 1, scheme: HTTPS}}}"));
    check_accepted(&with_spec("volumes: [{name: a, emptyDir: {sizeLimit: 1Gi, medium: Memory}}]"));
    check_accepted(&with_container("env: null\nworkingDir: /"));
    check_accepted(&with_spec("tolerations: []\nhostNetwork: false"));
}

#[test]
fn a_field_under_a_wrong_name_is_told_beside_the_error_that_it_makes() {
    let text = with_container("ports: [{containerport: 80}]");
    let error = read(&text, "web.yaml").unwrap_err().to_string();
    for expected in
        ["ports[0].containerport: there is no such field", "ports[0].containerPort: must be from 1"]
    {
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn defaults_are_those_of_the_api_server() {
    let text = with_container("ports: [{containerPort: 80}]\nresources: {limits: {cpu: 1, memory: 1Gi}, requests: {cpu: 500m}}\nlivenessProbe: {httpGet: {port: 80}}\nreadinessProbe: {tcpSocket: {port: 80}, periodSeconds: 0, timeoutSeconds: 4}\nenv: [{name: A, valueFrom: {fieldRef: {fieldPath: metadata.name}}}]").replace("spec:\n", "spec:\n  volumes: [{name: a}, {name: b, hostPath: {path: /b}}]\n");
    let pod = serde_json::to_value(pod_of(&text)).unwrap();
    let spec = json!({
        "restartPolicy": "Always", "dnsPolicy": "ClusterFirst", "schedulerName": "default-scheduler",
        "preemptionPolicy": "PreemptLowerPriority", "terminationGracePeriodSeconds": 30, "enableServiceLinks": true,
        "securityContext": {},
        "volumes": [{"name": "a", "emptyDir": {}}, {"name": "b", "hostPath": {"path": "/b", "type": ""}}],
        "containers": [{
            "name": "main", "image": "busybox:1.36", "imagePullPolicy": "IfNotPresent",
            "terminationMessagePath": "/dev/termination-log", "terminationMessagePolicy": "File",
            "ports": [{"containerPort": 80, "protocol": "TCP"}],
            "resources": {"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {"cpu": "500m", "memory": "1Gi"}},
            "livenessProbe": {"httpGet": {"port": 80, "path": "/", "scheme": "HTTP"}, "timeoutSeconds": 1, "periodSeconds": 10, "successThreshold": 1, "failureThreshold": 3},
            "readinessProbe": {"tcpSocket": {"port": 80}, "timeoutSeconds": 4, "periodSeconds": 10, "successThreshold": 1, "failureThreshold": 3},
            "env": [{"name": "A", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.name"}}}]
        }]
    });
    assert_eq!(pod["spec"], spec);
    assert_eq!(pod["metadata"], json!({"name": "web", "namespace": "default"}));
}

#[test]
fn host_network_takes_the_containers_ports_on_the_host() {
    let text =
        with_container("ports: [{containerPort: 80}]").replace("spec:\n", "spec:\n  hostNetwork: true\n");
    assert_eq!(pod_of(&text).spec.unwrap().containers[0].ports.as_ref().unwrap()[0].host_port, Some(80));
}

#[test]
fn json_is_read_as_yaml_is() {
    let value: Value = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web"}, "spec": {"containers": [{"name": "main", "image": "busybox:1.36"}]}});
    assert_eq!(pod_of(&value.to_string()), pod_of(&with_container("")));
}

#[test]
fn a_manifest_has_no_say_in_what_is_the_nodes() {
    let text = with_container("").replace("name: web}", "name: web, resourceVersion: '5', deletionTimestamp: 2026-01-01T00:00:00Z, annotations: {kubernetes.io/config.source: file, a: b}}") + "status: {phase: Running}\n";
    let pod = pod_of(&text);
    assert_eq!(
        serde_json::to_value(&pod.metadata).unwrap(),
        json!({"name": "web", "namespace": "default", "annotations": {"a": "b"}})
    );
    assert_eq!(pod.status, None);
}

#[test]
fn the_content_is_the_same_whatever_its_layout() {
    let content = |text: &str| read(text, "web.yaml").unwrap().content;
    let plain = content(&with_container("args: [a, b]"));
    assert_eq!(plain, content(&format!("# hello\n{}", with_container("args:\n- a\n- b"))));
    assert_ne!(plain, content(&with_container("args: [a, c]")));
}

#[test]
fn a_manifest_of_ten_thousand_lines_is_read() {
    let lines: String = (0..10_000).map(|i| format!("\n- name: V{i}\n  value: '{i}'")).collect();
    let pod = pod_of(&with_container(&format!("env:{lines}")));
    assert_eq!(pod.spec.unwrap().containers[0].env.as_ref().map(Vec::len), Some(10_000));
}

proptest::proptest! {
    #[test]
    fn no_change_of_a_manifest_makes_it_panic(at in 0usize..400, bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 1..6)) {
        let mut text = with_container("ports: [{containerPort: 80}]\nresources: {limits: {cpu: 1}}\nlivenessProbe: {httpGet: {port: 80}}").into_bytes();
        let at = at % text.len();
        let end = (at + bytes.len()).min(text.len());
        text.splice(at..end, bytes);
        let _ = read(&String::from_utf8_lossy(&text), "web.yaml").map_err(|error| error.to_string());
    }
}
