//! Faults of containers, volumes and other parts of a pod's spec, each with its place.

use super::*;

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
        "web.yaml:6:5: spec.containers[0].name: must be set",
    );
    check_text(
        &with_container("").replace("image: busybox:1.36", "tty: true"),
        "web.yaml:6:5: spec.containers[0].image: must be set",
    );
    check_text(
        &with_container("").replace("busybox:1.36", "\"bad image\""),
        "spec.containers[0].image: \"bad image\" contains blanks",
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
        "8:5: spec.containers[0].readinessProbe: must have one of exec, grpc, httpGet or tcpSocket",
    );
    check_container(
        "readinessProbe: {tcpSocket: {port: 80}, httpGet: {port: 80}}",
        "8:5: spec.containers[0].readinessProbe: must have only one of exec, grpc, httpGet or tcpSocket",
    );
    check_container(
        "readinessProbe: {tcpSocket: {}}",
        "8:22: spec.containers[0].readinessProbe.tcpSocket.port: must be set to a number from 1 to 65535, or a port's name",
    );
    check_container(
        "readinessProbe: {tcpSocket: {port: http}}",
        "8:40: spec.containers[0].readinessProbe.tcpSocket.port: the container has no port \"http\"",
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
        "8:76: spec.containers[0].readinessProbe.terminationGracePeriodSeconds: can't be set in a readiness probe, which stops no container",
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
        "5:51: spec.resources.limits[\"example.com/gpu\"]: is not a pod-level resource; cpu and memory are",
    );
    check_spec(
        "resources: {requests: {cpu: '3'}, limits: {cpu: '2'}}",
        "5:31: spec.resources.requests.cpu: 3 is more than the limit 2",
    );
    check_spec(
        "resources: {requests: {cpu: '1'}}\ninitContainers: [{name: i, image: x, resources: {requests: {cpu: '2'}}}]",
        "5:31: spec.resources.requests.cpu: 1 is less than 2, the sum of its containers' requests",
    );
    check_accepted(&with_spec("resources: {limits: {cpu: '1', hugepages-2Mi: 2Mi}}"));
}

#[test]
fn a_stop_signal_is_one_of_the_pods_operating_system() {
    check_container(
        "lifecycle: {stopSignal: SIGINT}",
        "8:29: spec.containers[0].lifecycle.stopSignal: needs the pod's os.name, since signals depend on the operating system",
    );
    check_spec(
        "os: {name: linux}\ninitContainers: [{name: i, image: x, restartPolicy: Always, lifecycle: {stopSignal: INT}}]",
        "6:87: spec.initContainers[0].lifecycle.stopSignal: unknown signal; use e.g. SIGTERM, SIGUSR1 or SIGRTMIN+3",
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
    check_container("env: [{value: x}]", "8:11: spec.containers[0].env[0].name: must be set");
    check_container(
        "env: [{name: a=b}]",
        "8:18: spec.containers[0].env[0].name: \"a=b\" is not a variable's name: printable ASCII without '='",
    );
    check_container(
        "env: [{name: A, valueFrom: {}}]",
        "8:21: spec.containers[0].env[0].valueFrom: must have exactly one source, e.g. fieldRef",
    );
    check_text(
        &with_container("env: [{name: A, valueFrom: {fieldRef: {fieldPath: spec.color}}}]"),
        "fieldRef.fieldPath: \"spec.color\" is not supported in a variable",
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
    check_text(&mounted("{name: a}"), "volumeMounts[0].mountPath: must be set");
    check_text(
        &mounted("{name: a, mountPath: \"/a\\0b\"}"),
        "mountPath: \"/a\\0b\" must not contain a zero byte",
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
        "mountPropagation: Bidirectional needs a privileged container",
    );
    check_spec(
        "volumes: [{name: a, hostPath: {path: b}}]",
        "5:40: spec.volumes[0].hostPath.path: \"b\" must begin with '/'",
    );
    check_spec(
        "volumes: [{name: a, hostPath: {path: /b/../c}}]",
        "5:40: spec.volumes[0].hostPath.path: \"/b/../c\" must not contain '..'",
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
        "5:13: spec.volumes[0]: must have only one source",
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
        "spec.volumes[0].downwardAPI.items[0].fieldRef.fieldPath: \"status.podIP\" is not supported in a file; use metadata.name, metadata.namespace, metadata.uid, metadata.labels, metadata.annotations or one of their keys",
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
        "spec.volumes[0].image.reference: must be set to the image's name",
    );
    check_accepted(&with_spec(
        "volumes: [{name: a, configMap: {name: x}}, {name: b, image: {reference: 'x:1'}}, {name: c, projected: {sources: [{secret: {name: z}}]}}]",
    ));
}

#[test]
fn sources_of_variables_are_checked() {
    check_text(
        &with_container("env: [{name: A, valueFrom: {resourceFieldRef: {resource: cpu}}}]"),
        "spec.containers[0].env[0].valueFrom.resourceFieldRef.resource: \"cpu\" is not supported; use limits or requests of cpu, memory or ephemeral-storage, e.g. limits.cpu",
    );
    check_text(
        &with_container("env: [{name: A, valueFrom: {secretKeyRef: {name: x}}}]"),
        "spec.containers[0].env[0].valueFrom.secretKeyRef.key: must be set",
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
    check_text(&mounted("subPath: x, subPathExpr: z"), "subPathExpr: can't be set together with subPath");
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
        "spec.hostnameOverride: can't be set together with setHostnameAsFQDN",
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
