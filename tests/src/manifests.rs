//! Manifests of test pods, on the standard image.

use crate::images;
use serde_json::{Value, json};

/// The port that a [`serving`] pod's test app listens on.
pub const PORT: u16 = 8080;
/// The port that it takes commands on.
pub const CONTROL: u16 = 9000;

/// A pod with one container, `main`, that runs `command`; told to stop, it has two seconds.
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

/// A pod whose test app listens on [`PORT`], with a readiness probe on it that looks once in ten seconds:
/// whatever happens sooner, the kernel reported.
pub fn serving(name: &str) -> Value {
    let command = serving_command();
    let pod = pod(name, &command.iter().map(String::as_str).collect::<Vec<_>>());
    with(pod, "readinessProbe", json!({ "tcpSocket": { "port": PORT }, "periodSeconds": 10 }))
}

/// What a [`serving`] pod's container runs.
pub fn serving_command() -> Vec<String> {
    let (port, control) = (PORT.to_string(), CONTROL.to_string());
    ["/bin/testapp", "serve", "--tcp", &port, "--control", &control].map(str::to_owned).to_vec()
}

/// A pod whose test app answers HTTP on [`PORT`], with a liveness probe that gives up at the first failure,
/// and that a busy machine does not fail.
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

/// The pod with a field of its container set.
pub fn with(mut pod: Value, field: &str, value: Value) -> Value {
    pod["spec"]["containers"][0][field] = value;
    pod
}

/// The pod with its container's resources: `("250m", "64Mi")`, or nothing for one that is empty.
pub fn with_resources(pod: Value, requests: (&str, &str), limits: (&str, &str)) -> Value {
    let list = |(cpu, memory): (&str, &str)| {
        let named = [("cpu", cpu), ("memory", memory)];
        let given = named.into_iter().filter(|(_, amount)| !amount.is_empty());
        given.map(|(name, amount)| (name.to_owned(), json!(amount))).collect::<serde_json::Map<_, _>>()
    };
    with(pod, "resources", json!({ "requests": list(requests), "limits": list(limits) }))
}
