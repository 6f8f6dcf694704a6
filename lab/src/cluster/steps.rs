//! Steps of `cargo xtask cluster test`, each checked and timed, and what they share.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use beelet_tests::images::APP;
use beelet_tests::workdir;
use serde_json::{Value, json};

use super::kubeadm::{connect, get, kubectl, until_ready};
use super::machine::Machine;

/// Maximum time of a step that waits for controllers.
pub(super) const PATIENCE: Duration = Duration::from_secs(420);
/// Maximum time until a ready application is reachable.
const REACHED: Duration = Duration::from_secs(60);
/// Number of replicas of the application.
const REPLICAS: usize = 20;

/// Row of the result.
struct Row {
    step: &'static str,
    took: Duration,
    /// Measurements that the step has noted.
    note: String,
}

/// The cluster under test.
pub(super) struct Life {
    pub(super) machines: Vec<Machine>,
    rows: Vec<Row>,
    note: String,
}

impl Life {
    /// Takes the existing machines, if any.
    pub(super) fn new() -> Self {
        Self { machines: Machine::all(), rows: Vec::new(), note: String::new() }
    }

    /// Prints the table of the steps so far.
    pub(super) fn print(&self) {
        println!("\n| step | result | seconds |\n| --- | --- | --- |");
        for row in &self.rows {
            println!("| {} | {} | {:.1} |", row.step, row.note, row.took.as_secs_f64());
        }
    }

    /// Runs a step and records its duration.
    pub(super) fn step(
        &mut self,
        name: &'static str,
        work: impl FnOnce(&mut Self) -> Result<()>,
    ) -> Result<()> {
        eprintln!("== {name}");
        let began = Instant::now();
        work(self).with_context(|| format!("step {name:?}"))?;
        let (took, note) = (began.elapsed(), std::mem::take(&mut self.note));
        eprintln!("== {name}: {note} {:.1} s", took.as_secs_f64());
        self.rows.push(Row { step: name, took, note });
        Ok(())
    }

    /// Adds a measurement to the row of the current step.
    pub(super) fn add_note(&mut self, text: &str) {
        if !self.note.is_empty() {
            self.note.push_str("; ");
        }
        self.note.push_str(text);
    }

    pub(super) fn machine(&self, index: usize) -> Result<&Machine> {
        self.machines.get(index).context("the machine does not exist")
    }

    pub(super) fn first(&self) -> Result<&Machine> {
        self.machine(0)
    }

    /// Applies objects.
    pub(super) fn apply(&self, objects: &[Value]) -> Result<()> {
        let first = self.first()?;
        let list = json!({ "apiVersion": "v1", "kind": "List", "items": objects });
        let file = first.file("apply.json", &list.to_string())?;
        kubectl(first, &["apply", "-f", &file]).map(drop)
    }

    /// Waits until the whole deployment runs its newest template.
    pub(super) fn rolled_out(&self) -> Result<()> {
        self.rolled_out_of("deployment/web")
    }

    /// Waits until all pods of a workload, `KIND/NAME`, run its newest template.
    pub(super) fn rolled_out_of(&self, workload: &str) -> Result<()> {
        let timeout = format!("--timeout={}s", PATIENCE.as_secs());
        kubectl(self.first()?, &["rollout", "status", workload, &timeout]).map(drop)
    }

    /// Waits until the API server of the first machine answers.
    pub(super) fn answers(&self) -> Result<()> {
        let first = self.first()?;
        workdir::wait_for("the API server to answer", PATIENCE, || {
            kubectl(first, &["get", "--raw", "/readyz"]).map(drop)
        })
    }

    /// Waits until machines that were off work again, with the application on them.
    pub(super) fn recovered(&self) -> Result<()> {
        let first = self.first()?;
        // The routes of the network are in memory only.
        connect(first, &self.machines)?;
        until_ready(first, &self.machines, "True")?;
        self.rolled_out()?;
        self.reachable()
    }

    /// Waits until every machine reaches the application by its Service and by a port of the node.
    pub(super) fn reachable(&self) -> Result<()> {
        let first = self.first()?;
        let service = get(first, &["service", "web"])?;
        let address = service["spec"]["clusterIP"].as_str().context("clusterIP")?.to_owned();
        for machine in &self.machines {
            for place in [format!("{address}/80"), format!("{}/30080", machine.address)] {
                // A client that every machine with bash has.
                let ask = format!(
                    "exec 3<>/dev/tcp/{place}; printf 'GET / HTTP/1.0\\r\\n\\r\\n' >&3; grep -q 'hello from beelet' <&3"
                );
                let asked = || machine.run(&["timeout", "3", "bash", "-c", &ask]);
                workdir::wait_for(&format!("{place} from {}", machine.name), REACHED, asked)?;
            }
        }
        Ok(())
    }

    /// Returns the application's pods.
    pub(super) fn pods(&self) -> Result<Vec<Value>> {
        let pods = get(self.first()?, &["pods", "-l", "app=web"])?;
        Ok(pods["items"].as_array().cloned().unwrap_or_default())
    }
}

/// Returns the application: a web server of busybox, ready when it answers.
pub(super) fn deployment(version: &str) -> Value {
    json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": { "name": "web" },
        "spec": {
            "replicas": REPLICAS,
            "selector": { "matchLabels": { "app": "web" } },
            "template": {
                "metadata": { "labels": { "app": "web" } },
                "spec": {
                    "terminationGracePeriodSeconds": 5,
                    "containers": [{
                        "name": "web", "image": APP, "imagePullPolicy": "IfNotPresent",
                        "command": ["/bin/httpd", "-f", "-p", "8080", "-h", "/www"],
                        "env": [{ "name": "VERSION", "value": version }],
                        "ports": [{ "containerPort": 8080 }],
                        "readinessProbe": { "httpGet": { "path": "/", "port": 8080 }, "periodSeconds": 2 },
                        "resources": { "requests": { "cpu": "10m", "memory": "10Mi" } },
                    }],
                },
            },
        },
    })
}

pub(super) fn service() -> Value {
    json!({
        "apiVersion": "v1", "kind": "Service", "metadata": { "name": "web" },
        "spec": {
            "type": "NodePort", "selector": { "app": "web" },
            "ports": [{ "port": 80, "targetPort": 8080, "nodePort": 30080 }],
        },
    })
}
