//! Manifests of test pods, on the standard image.

use crate::images;
use serde_json::{Value, json};

/// Port on which a [`serving`] pod's test app listens.
pub const PORT: u16 = 8080;
/// Port for commands to the test app.
pub const CONTROL: u16 = 9000;

/// Returns a pod with one container, `main`, that runs `command`, and a grace period of two seconds.
pub fn pod(name: &str, command: &[&str]) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": { "name": name },
        "spec": {
            "terminationGracePeriodSeconds": 2,
            "containers": [{ "name": "main", "image": images::APP, "command": command }],
        },
    })
}

/// Returns a pod whose test app listens on [`PORT`], with a readiness probe every ten seconds: any faster
/// reaction comes from the kernel.
pub fn serving(name: &str) -> Value {
    let command = serving_command();
    let pod = pod(name, &command.iter().map(String::as_str).collect::<Vec<_>>());
    with(pod, "readinessProbe", json!({ "tcpSocket": { "port": PORT }, "periodSeconds": 10 }))
}

/// Returns the command of a [`serving`] pod's container.
pub fn serving_command() -> Vec<String> {
    let (port, control) = (PORT.to_string(), CONTROL.to_string());
    ["/bin/testapp", "serve", "--tcp", &port, "--control", &control].map(str::to_owned).to_vec()
}

/// Returns a pod whose test app answers HTTP on [`PORT`], with a liveness probe that fails at the first
/// failure, but not on a busy machine.
pub fn answering(name: &str) -> Value {
    let (port, control) = (PORT.to_string(), CONTROL.to_string());
    let pod = pod(name, &["/bin/testapp", "serve", "--http", &port, "--control", &control]);
    let get = json!({ "path": "/healthz", "port": PORT });
    with(
        pod,
        "livenessProbe",
        json!({ "httpGet": get, "periodSeconds": 1, "timeoutSeconds": 30, "failureThreshold": 1 }),
    )
}

/// Returns the pod with a field of its container set.
pub fn with(mut pod: Value, field: &str, value: Value) -> Value {
    pod["spec"]["containers"][0][field] = value;
    pod
}

/// Returns the pod with resources of its container: `("250m", "64Mi")`, where an empty amount is omitted.
pub fn with_resources(pod: Value, requests: (&str, &str), limits: (&str, &str)) -> Value {
    let list = |(cpu, memory): (&str, &str)| {
        let named = [("cpu", cpu), ("memory", memory)];
        let given = named.into_iter().filter(|(_, amount)| !amount.is_empty());
        given.map(|(name, amount)| (name.to_owned(), json!(amount))).collect::<serde_json::Map<_, _>>()
    };
    with(pod, "resources", json!({ "requests": list(requests), "limits": list(limits) }))
}
