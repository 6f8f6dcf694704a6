//! Monitoring programs from their packages: Prometheus with the alert rules of this repository and of
//! kubernetes-mixin, and metrics-server behind `kubectl top`.

#![allow(clippy::unwrap_used, clippy::panic)] // a failure in a helper fails the test

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use beelet_tests::agent::{NODE, http_get};
use beelet_tests::guards::Process;
use beelet_tests::pages::PAGES;
use beelet_tests::ports;
use beelet_tests::workdir::{self, PATIENCE, wait_for};
use beelet_tests::{require, requires};
use serde_json::{Value, json};

use crate::kubectl::Member;
use crate::node::script;

/// Returns a pod that works a little, with limits, traffic and a probe, so that every panel has data.
fn busy(name: &str) -> Value {
    let mut pod = script(
        name,
        "mkdir /www; while :; do wget -qO /dev/null http://127.0.0.1:8080/ ; nc -z $(hostname -i) 1; sleep 0.2; done & \
         httpd -f -p 8080 -h /www",
    );
    let container = &mut pod["spec"]["containers"][0];
    container["resources"] = json!({ "limits": { "cpu": "500m", "memory": "100Mi" } });
    container["livenessProbe"] =
        json!({ "tcpSocket": { "port": 1 }, "periodSeconds": 1, "failureThreshold": 1000 });
    pod
}

/// Starts a program of the test's own, with its output in a file of that name.
fn spawn(mut command: Command, dir: &Path, name: &str) -> Process {
    let log = File::create(dir.join(format!("{name}.log"))).unwrap();
    command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
    Process(command.spawn().unwrap())
}

// ---- Prometheus ----

/// A Prometheus that scrapes every page of the node each second, over TLS and with a token.
struct Prometheus {
    address: String,
    _server: Process,
}

impl Prometheus {
    fn watch(node: &Member) -> Prometheus {
        let dir = node.file("prometheus");
        std::fs::create_dir_all(&dir).unwrap();
        let token = node.account_that_reads_numbers("prometheus");
        std::fs::write(dir.join("token"), token).unwrap();
        let scrapes: Vec<Value> = PAGES
            .iter()
            .map(|(page, _)| {
                json!({
                    "job_name": page, "metrics_path": page, "scheme": "https",
                    "tls_config": { "ca_file": node.scene.cluster.authority_file() },
                    "authorization": { "credentials_file": dir.join("token") },
                    "static_configs":
                        [{ "targets": [format!("127.0.0.1:{}", node.port)], "labels": { "job": "kubelet" } }],
                    "relabel_configs":
                        [{ "source_labels": ["__metrics_path__"], "target_label": "metrics_path" }],
                })
            })
            .collect();
        let config = json!({
            "global": { "scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s" },
            "rule_files": rule_files(&dir),
            "scrape_configs": scrapes,
        });
        std::fs::write(dir.join("prometheus.yml"), config.to_string()).unwrap();
        let [port] = ports::free().unwrap();
        let address = format!("127.0.0.1:{port}");
        let mut command = Command::new(requires::PROMETHEUS.given().unwrap());
        command.arg("--config.file").arg(dir.join("prometheus.yml"));
        command
            .arg("--storage.tsdb.path")
            .arg(dir.join("data"))
            .arg(format!("--web.listen-address={address}"));
        let server = spawn(command, &dir, "prometheus");
        Prometheus { address, _server: server }
    }

    fn ask(&self, path: &str) -> Result<Value, String> {
        let (status, body) = http_get(&self.address, path).map_err(|error| format!("{error:#}"))?;
        let answer: Value =
            serde_json::from_str(&body).map_err(|error| format!("{status} {error}: {body}"))?;
        if answer["status"] == "success" { Ok(answer["data"].clone()) } else { Err(answer.to_string()) }
    }

    /// Returns the result of an instant query.
    fn query(&self, query: &str) -> Result<Vec<Value>, String> {
        let encoded: String = query.bytes().map(|byte| format!("%{byte:02x}")).collect();
        let found = self.ask(&format!("/api/v1/query?query={encoded}"))?;
        Ok(found["result"].as_array().cloned().unwrap_or_default())
    }

    /// Waits until the query returns at least `least` series.
    fn until(&self, what: &str, query: &str, least: usize) {
        wait_for(what, PATIENCE, || match self.query(query)? {
            found if found.len() >= least => Ok(()),
            found => Err(format!("{query}: {found:?}")),
        })
        .unwrap();
    }

    /// Returns the names of the firing and pending alerts.
    fn alerts(&self) -> Vec<String> {
        let alerts = self.ask("/api/v1/alerts").unwrap();
        let name = |alert: &Value| alert["labels"]["alertname"].as_str().unwrap_or_default().to_owned();
        alerts["alerts"].as_array().unwrap().iter().map(name).collect()
    }
}

/// Returns the rules of this repository and of kubernetes-mixin, with seconds in the place of minutes:
/// otherwise a test would take half an hour.
fn rule_files(dir: &Path) -> Vec<PathBuf> {
    let repository = workdir::repository();
    ["packaging/prometheus/beelet.rules.yaml", "tests/tests/e2e/data/kubernetes-mixin.rules.yaml"]
        .map(|file| {
            let rules = std::fs::read_to_string(repository.join(file)).unwrap();
            let short = ["5m", "10m", "15m"].iter().fold(rules, |rules, minutes| {
                rules.replace(&format!("[{minutes}]"), "[20s]").replace(&format!("for: {minutes}"), "for: 1s")
            });
            let short = short.replace("for: 2m", "for: 1s").replace("for: 1m", "for: 1s");
            let name = Path::new(file).file_name().unwrap();
            std::fs::write(dir.join(name), short).unwrap();
            dir.join(name)
        })
        .to_vec()
}

/// Returns every query of the dashboard, for all pods.
fn dashboard() -> Vec<String> {
    fn collect(value: &Value, found: &mut Vec<String>) {
        match value {
            Value::Object(fields) => {
                found.extend(fields.get("expr").and_then(Value::as_str).map(str::to_owned));
                fields.values().for_each(|value| collect(value, found));
            }
            Value::Array(values) => values.iter().for_each(|value| collect(value, found)),
            _ => {}
        }
    }
    let file = workdir::repository().join("packaging/grafana/beelet.json");
    let mut found = Vec::new();
    collect(&serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap(), &mut found);
    let all = [("$namespace", ".*"), ("$pod", ".*"), ("$top", "10"), ("$__rate_interval", "20s")];
    found
        .into_iter()
        .map(|query| all.iter().fold(query, |query, (name, value)| query.replace(name, value)))
        .collect()
}

#[test]
fn prometheus_has_no_alert_of_a_healthy_node_and_the_right_ones_of_one_without_a_runtime() {
    require!(containerd, bpf, apiserver, kubectl, prometheus);
    let mut node = Member::start(|options| options);
    node.apply(busy("busy"));
    let prometheus = Prometheus::watch(&node);
    prometheus.until("all pages to be scraped", "up{job=\"kubelet\"} == 1", PAGES.len());
    // Twice the number of samples that the longest alert needs.
    prometheus.until("enough samples", "count_over_time(up{metrics_path=\"/metrics\"}[5m]) > 40", 1);
    assert_eq!(prometheus.alerts(), [""; 0]);
    assert_eq!(prometheus.query("up == 0").unwrap(), [Value::Null; 0]);

    // The mixin's recording rules and the panels' queries have results.
    for record in [
        "node_quantile:kubelet_pleg_relist_duration_seconds:histogram_quantile",
        "node_namespace_pod_container:container_cpu_usage_seconds_total:sum_rate5m",
        "node_namespace_pod_container:container_memory_working_set_bytes",
        "node_namespace_pod_container:container_memory_rss",
        "node_namespace_pod_container:container_memory_cache",
    ] {
        prometheus.until(record, record, 1);
    }
    let counts_stalls = Path::new("/proc/pressure/cpu").exists();
    let queries = dashboard();
    assert!(queries.len() > 15, "{queries:?}");
    for query in queries.iter().filter(|query| counts_stalls || !query.contains("container_pressure_")) {
        prometheus.until(&format!("data for {query}"), query, 1);
    }
    // Each container has one series, and the pod has one of its own.
    for (query, count) in [
        (
            "container_memory_working_set_bytes{metrics_path=\"/metrics/cadvisor\",pod=\"busy\",container!=\"\"}",
            1,
        ),
        (
            "container_memory_working_set_bytes{metrics_path=\"/metrics/cadvisor\",pod=\"busy\",container=\"\"}",
            1,
        ),
        ("container_memory_working_set_bytes{metrics_path=\"/metrics/cadvisor\",id=\"/\"}", 1),
    ] {
        assert_eq!(prometheus.query(query).unwrap().len(), count, "{query}");
    }

    node.scene.containerd.stop().unwrap();
    let fires = "ALERTS{alertname=\"BeeletRuntimeNotAnswering\",alertstate=\"firing\"}";
    prometheus.until("the alert of a runtime that does not answer", fires, 1);
    let known = ["BeeletRuntimeNotAnswering", "BeeletRuntimeErrors"];
    let others: Vec<String> =
        prometheus.alerts().into_iter().filter(|name| !known.contains(&name.as_str())).collect();
    assert_eq!(others, [""; 0]);
    node.scene.containerd.resume().unwrap();
    prometheus.until("the alert to end", &format!("absent({fires})"), 1);
}

// ---- metrics-server ----

/// Starts metrics-server as in its manifest, but on loopback, and registers its API with the API server.
fn metrics_server(node: &Member) -> Process {
    let cluster = &node.scene.cluster;
    let dir = node.file("metrics-server");
    std::fs::create_dir_all(&dir).unwrap();
    let token = node.account_that_reads_numbers("metrics-server");
    node.output(&[
        "create",
        "rolebinding",
        "metrics-server-auth-reader",
        "-n",
        "kube-system",
        "--role=extension-apiserver-authentication-reader",
        "--serviceaccount=kube-system:metrics-server",
    ]);
    node.output(&[
        "create",
        "clusterrole",
        "metrics-lists",
        "--verb=get,list,watch",
        "--resource=pods,nodes",
    ]);
    for (name, role) in [("metrics-lists", "metrics-lists"), ("metrics-delegator", "system:auth-delegator")] {
        let role = format!("--clusterrole={role}");
        node.output(&[
            "create",
            "clusterrolebinding",
            name,
            &role,
            "--serviceaccount=kube-system:metrics-server",
        ]);
    }
    let kubeconfig = dir.join("kubeconfig");
    std::fs::write(&kubeconfig, cluster.kubeconfig_with(&token)).unwrap();
    let [port] = ports::free().unwrap();
    let service = json!({
        "metadata": { "name": "metrics-server", "namespace": "kube-system" },
        "spec": { "type": "ExternalName", "externalName": "localhost", "ports": [{ "port": port }] },
    });
    cluster.create("/api/v1/namespaces/kube-system/services", &service).unwrap();
    let api = json!({
        "metadata": { "name": "v1beta1.metrics.k8s.io" },
        "spec": {
            "group": "metrics.k8s.io", "version": "v1beta1", "insecureSkipTLSVerify": true,
            "groupPriorityMinimum": 100, "versionPriority": 100,
            "service": { "name": "metrics-server", "namespace": "kube-system", "port": port },
        },
    });
    cluster.create("/apis/apiregistration.k8s.io/v1/apiservices", &api).unwrap();
    let mut command = Command::new(requires::METRICS_SERVER.given().unwrap());
    for flag in ["kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig"] {
        command.arg(format!("--{flag}={}", kubeconfig.display()));
    }
    command.arg(format!("--kubelet-certificate-authority={}", cluster.authority_file().display()));
    command.arg(format!("--cert-dir={}", dir.display())).arg(format!("--secure-port={port}"));
    command.args(["--kubelet-preferred-address-types=InternalIP,ExternalIP,Hostname"]);
    command.args([
        "--kubelet-use-node-status-port",
        "--metric-resolution=10s",
        "--kubelet-request-timeout=9s",
    ]);
    spawn(command, &dir, "metrics-server")
}

#[test]
fn kubectl_top_shows_what_metrics_server_reads_of_the_node() {
    require!(containerd, bpf, apiserver, kubectl, metrics_server);
    let node = Member::start(|options| options);
    node.apply(busy("busy"));
    let _server = metrics_server(&node);
    let top = |arguments: &[&str], name: &str| {
        let log = node.file("metrics-server/metrics-server.log");
        // A rate needs two scrapes.
        wait_for(&format!("kubectl {arguments:?}"), PATIENCE, || {
            let (code, out, error) = node.run(arguments);
            match out.lines().find(|line| line.starts_with(name)) {
                Some(line) if code == Some(0) => Ok(line.to_owned()),
                _ => Err(format!("{out}{error}\n{}", std::fs::read_to_string(&log).unwrap_or_default())),
            }
        })
        .unwrap()
    };
    let of_node = top(&["top", "node"], NODE);
    let of_pod = top(&["top", "pod"], "busy");
    let of_container = top(&["top", "pod", "--containers"], "busy");
    eprintln!("{of_node}\n{of_pod}\n{of_container}");
    for (line, unit) in [(&of_node, "Mi"), (&of_pod, "Mi"), (&of_container, "Mi")] {
        assert!(line.contains(unit) && line.split_whitespace().any(|word| word.ends_with('m')), "{line}");
    }
    assert!(of_container.contains("main"), "{of_container}");
    node.scene.nothing_was_forbidden();
}
