//! Tests of manifests and their pods or messages, one line per case.

mod validity;

use serde_json::{Value, json};

use super::*;
use beelet_codec::error::ManifestError;

/// A valid pod; `%` stands for a case's additions to its container, `@` to its spec.
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

/// Checks the whole error of a pod whose container has these lines.
fn check_container(lines: &str, expected: &str) {
    assert_eq!(error_of(&with_container(lines)).to_string(), format!("web.yaml:{expected}"), "{lines}");
}

/// Checks the whole error of a pod whose spec has these lines.
fn check_spec(lines: &str, expected: &str) {
    assert_eq!(error_of(&with_spec(lines)).to_string(), format!("web.yaml:{expected}"), "{lines}");
}

fn check_accepted(text: &str) {
    let manifest = read(text, "web.yaml");
    assert!(manifest.as_ref().is_ok_and(|m| m.warnings.is_empty()), "{text}\n{manifest:?}");
}

#[test]
fn a_file_holds_one_pod() {
    check_text("", "web.yaml: the file has no object");
    check_text("# nothing\n", "web.yaml: the file has no object");
    check_text("a: [1\n", "web.yaml:1:4: unclosed bracket '['");
    check_text(
        "just text",
        "web.yaml:1:1: a manifest is a v1 Pod (or a v1 ConfigMap or Secret, a scheduling.k8s.io/v1 PriorityClass, a node.k8s.io/v1 RuntimeClass), a mapping; this is a string",
    );
    check_text("[]", "a mapping; this is a list");
    check_text("spec: {}", "web.yaml:1:1: kind: must be set to a string");
    check_text("kind: Pod", "web.yaml:1:1: apiVersion: must be set to a string");
    check_text("apiVersion: 1\nkind: Pod", "web.yaml:1:13: apiVersion: must be set to a string");
    check_text("apiVersion: v2\nkind: Pod", "web.yaml:1:13: apiVersion: \"v2\" is unknown for this kind");
    check_text(
        "apiVersion: v1\nkind: List\nitems: []",
        "web.yaml:2:7: kind: lists are not supported; split the list",
    );
    check_text(
        "apiVersion: apps/v1\nkind: Deployment",
        "web.yaml:2:7: kind: \"Deployment\" is not supported: a manifest is",
    );
    check_text(
        "apiVersion: v1\nkind: Pod\n---\napiVersion: v1\nkind: Pod",
        "web.yaml:4:1: one pod per file: this is the second of 2 documents",
    );
    check_text(
        "apiVersion: v1\nkind: Pod",
        "web.yaml:1:1: metadata.name: must be set\nweb.yaml:1:1: spec: must be set",
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
        "8:49: spec.containers[0].resources.limits.hugepages-2Mi: 3Mi is not a multiple of the page size in the resource's name",
    );
    check_container(
        "resources:\n  limits:\n    example.com/gpu: 500m",
        "10:26: spec.containers[0].resources.limits[\"example.com/gpu\"]: 500m is not a whole number: devices aren't divided",
    );
    check_container(
        "resources: {requests: {example.com/gpu: 1}, limits: {example.com/gpu: 2}}",
        "8:75: spec.containers[0].resources.limits[\"example.com/gpu\"]: must equal the request: devices aren't overcommitted",
    );
    check_container(
        "resources:\n  requests:\n    example.com/gpu: 1",
        "8:5: spec.containers[0].resources.limits[\"example.com/gpu\"]: must be set and equal the request: devices aren't overcommitted",
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
    // A misspelled field alone has no effect. Together with an invalid one, both are reported.
    let error = error_of(&with_container("stdin: 1\nstdinOnse: true")).to_string();
    assert_eq!(error.lines().count(), 2, "{error}");
    assert!(error.contains("spec.containers[0].stdinOnse: unknown field"), "{error}");
}

#[test]
fn the_number_of_reasons_is_bounded() {
    let ports: String = (0..100).map(|_| "\n- containerPort: 0".to_owned()).collect();
    let error = error_of(&with_container(&format!("ports:{ports}")));
    assert_eq!(error.reasons().len(), 10);
    assert!(error.to_string().ends_with("\nweb.yaml: and 90 more"), "{error}");
}

fn check_warning(text: &str, expected: &str) {
    let warnings = read(text, "web.yaml").unwrap().warnings;
    assert_eq!(warnings, [expected], "{text}");
}

#[test]
fn unknown_fields_and_those_without_effect_are_warnings() {
    let unknown = "unknown field; has no effect";
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
    for expected in ["ports[0].containerport: unknown field", "ports[0].containerPort: must be from 1"] {
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
