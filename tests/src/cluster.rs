//! Control plane for a test: etcd and a real kube-apiserver on loopback, with TLS, the Node authorizer, RBAC,
//! NodeRestriction and an audit log. The control plane has no controllers and no scheduler: tests do their
//! work, or start them ([`Controllers`]).
//!
//! `KUBE_APISERVER` names the API server, `ETCD` the etcd; otherwise the machine's etcd is used. All files
//! are in one folder. Dropping the value kills both; the next test removes leftovers of a killed one.

use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use base64::Engine as _;
use beelet_cluster::client::{Client, Event};
use futures::StreamExt as _;
use http::Method;
use jiff::Timestamp;
use rcgen::{CertificateParams, DnType, ExtendedKeyUsagePurpose, KeyPair, SanType};
use serde_json::{Value, json};

use crate::agent::monotonic_ns;
use crate::apiserver::Authority;
use crate::containerd::{self, block_on, teardown, write_pid};
use crate::guards::Process;
use crate::ports;
use crate::requires::{self, Missing, missing};
use crate::workdir::{self, PATIENCE, wait_for};

/// Returns the etcd that `ETCD` names, or else the machine's.
///
/// # Errors
/// etcd is not installed.
pub fn etcd() -> Result<PathBuf, Missing> {
    let named = std::env::var_os("ETCD").filter(|path| !path.is_empty()).map(PathBuf::from);
    let found = named.filter(|path| path.is_file()).or_else(|| requires::find_program("etcd"));
    found.ok_or_else(|| missing("etcd is not installed", "cargo xtask setup --for cluster"))
}

/// First minor version that serves ClusterTrustBundles as v1beta1.
pub const TRUST_BUNDLES: u32 = 33;
/// First minor version that serves ResourceClaims as v1.
pub const RESOURCE_CLAIMS: u32 = 34;
/// Common name of the API server's client certificate for kubelets, as kubeadm sets it.
const KUBELET_CLIENT: &str = "kube-apiserver-kubelet-client";

/// Common name of the API server's client certificate for aggregated API servers.
const FRONT_CLIENT: &str = "front-proxy-client";

/// Client of the API server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum User {
    /// Administrator, in `system:masters`.
    Admin,
    /// Node of this name, in `system:nodes`.
    Node(String),
    /// The API server as a client of kubelets.
    Server,
    /// The API server as a client of aggregated API servers.
    Front,
}

/// Running control plane.
pub struct Cluster {
    /// Folder of logs and pids, which an instance's teardown reads.
    instance: PathBuf,
    dir: PathBuf,
    authority: Authority,
    address: String,
    etcd: Option<Process>,
    server: Option<Process>,
    arguments: Vec<String>,
    /// Lock of the instance if the cluster owns it.
    own: Option<std::fs::File>,
    keep: bool,
}

impl Cluster {
    /// Starts a control plane in its own folder under the target folder. Waits while another test has one.
    ///
    /// # Errors
    /// A program is missing or does not start.
    pub fn start_for_test() -> Result<Cluster> {
        let parent = workdir::target_dir().join("cluster");
        std::fs::create_dir_all(&parent).with_context(|| format!("cannot create {}", parent.display()))?;
        let lock = containerd::lock(&parent)?;
        containerd::sweep(&parent)?;
        let instance = parent.join(workdir::unique("plane"));
        workdir::write(&instance.join(containerd::MARKER), "")?;
        let mut cluster = Cluster::start(&instance)?;
        cluster.own = Some(lock);
        Ok(cluster)
    }

    /// Starts a control plane in the folder of an instance, whose teardown also removes it.
    ///
    /// # Errors
    /// A program is missing or does not start.
    pub fn start(instance: &Path) -> Result<Cluster> {
        let dir = instance.join("cluster");
        std::fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
        let [client, peer, secure] = ports::free()?;
        let mut cluster = Cluster {
            instance: instance.to_path_buf(),
            authority: Authority::new("cluster")?,
            address: format!("127.0.0.1:{secure}"),
            etcd: None,
            server: None,
            arguments: Vec::new(),
            own: None,
            keep: false,
            dir,
        };
        cluster.start_etcd(client, peer)?;
        cluster.write_keys()?;
        cluster.arguments = cluster.flags(client, secure)?;
        cluster.start_server()?;
        cluster.authorize_the_server_at_kubelets()?;
        Ok(cluster)
    }

    /// Grants the API server access to the whole API of kubelets, as kubeadm does.
    fn authorize_the_server_at_kubelets(&self) -> Result<()> {
        let binding = json!({
            "metadata": { "name": "kube-apiserver-kubelets" },
            "roleRef": {
                "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "system:kubelet-api-admin",
            },
            "subjects": [{ "apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": KUBELET_CLIENT }],
        });
        let path = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings";
        self.create(path, &binding).map(drop)
    }

    fn start_etcd(&mut self, client: u16, peer: u16) -> Result<()> {
        let (client, peer) = (format!("http://127.0.0.1:{client}"), format!("http://127.0.0.1:{peer}"));
        let mut command = Command::new(etcd().map_err(|missing| anyhow::anyhow!("{missing}"))?);
        command.arg("--data-dir").arg(self.dir.join("etcd"));
        command.args(["--listen-client-urls", &client, "--advertise-client-urls", &client]);
        command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
        command.args(["--initial-cluster", &format!("default={peer}"), "--logger", "zap"]);
        self.etcd = Some(self.spawn("etcd", command)?);
        Ok(())
    }

    fn write_keys(&self) -> Result<()> {
        let mut server =
            CertificateParams::new(vec!["localhost".to_owned(), "kubernetes.default".to_owned()])?;
        server.subject_alt_names.push(SanType::IpAddress(IpAddr::V4(Ipv4Addr::LOCALHOST)));
        server.distinguished_name.push(DnType::CommonName, "kube-apiserver");
        server.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let (certificate, key) = self.authority.issue(&server)?;
        let (client, client_key) = self.certificate(&User::Server)?;
        let (front, front_key) = self.certificate(&User::Front)?;
        // Signing key for tokens of service accounts.
        let accounts = KeyPair::generate()?;
        let files = [
            ("ca.crt", self.authority.pem().to_owned()),
            ("server.crt", certificate),
            ("server.key", key),
            ("kubelets.crt", client),
            ("kubelets.key", client_key),
            ("front.crt", front),
            ("front.key", front_key),
            ("accounts.key", accounts.serialize_pem()),
            ("accounts.pub", accounts.public_key_pem()),
            ("audit.yaml", audit_policy()),
        ];
        for (name, text) in files {
            workdir::write(&self.dir.join(name), text)?;
        }
        workdir::write(&self.kubeconfig(), self.kubeconfig_of(&User::Admin)?)
    }

    fn flags(&self, client: u16, secure: u16) -> Result<Vec<String>> {
        let file = |name: &str| self.dir.join(name).display().to_string();
        let flags = [
            ("etcd-servers", format!("http://127.0.0.1:{client}")),
            ("bind-address", "127.0.0.1".to_owned()),
            ("advertise-address", "127.0.0.1".to_owned()),
            ("secure-port", secure.to_string()),
            ("cert-dir", file("certs")),
            ("client-ca-file", file("ca.crt")),
            ("tls-cert-file", file("server.crt")),
            ("tls-private-key-file", file("server.key")),
            ("kubelet-certificate-authority", file("ca.crt")),
            ("kubelet-client-certificate", file("kubelets.crt")),
            ("kubelet-client-key", file("kubelets.key")),
            ("kubelet-preferred-address-types", "InternalIP".to_owned()),
            ("service-account-issuer", "https://kubernetes.default.svc.cluster.local".to_owned()),
            ("service-account-key-file", file("accounts.pub")),
            ("service-account-signing-key-file", file("accounts.key")),
            // Identity of the API server towards aggregated APIs (metrics.k8s.io).
            ("requestheader-client-ca-file", file("ca.crt")),
            ("requestheader-allowed-names", FRONT_CLIENT.to_owned()),
            ("requestheader-username-headers", "X-Remote-User".to_owned()),
            ("requestheader-group-headers", "X-Remote-Group".to_owned()),
            ("requestheader-extra-headers-prefix", "X-Remote-Extra-".to_owned()),
            ("proxy-client-cert-file", file("front.crt")),
            ("proxy-client-key-file", file("front.key")),
            ("service-cluster-ip-range", "10.96.0.0/16".to_owned()),
            ("authorization-mode", "Node,RBAC".to_owned()),
            ("enable-admission-plugins", "NodeRestriction".to_owned()),
            // No controller creates the accounts that this plugin requires.
            ("disable-admission-plugins", "ServiceAccount".to_owned()),
            ("endpoint-reconciler-type", "none".to_owned()),
            ("allow-privileged", "true".to_owned()),
            ("audit-policy-file", file("audit.yaml")),
            ("audit-log-path", file("audit.json")),
        ];
        let mut flags: Vec<String> =
            flags.into_iter().map(|(name, value)| format!("--{name}={value}")).collect();
        // Off by default until 1.23, unknown since 1.27.
        if minor_version()? < 23 {
            flags.push("--feature-gates=EphemeralContainers=true".to_owned());
        }
        if minor_version()? >= TRUST_BUNDLES {
            flags
                .push("--feature-gates=ClusterTrustBundle=true,ClusterTrustBundleProjection=true".to_owned());
            let served = "certificates.k8s.io/v1beta1/clustertrustbundles";
            flags.push(format!("--runtime-config={served}=true"));
        }
        Ok(flags)
    }

    /// Starts the API server if it is stopped, and waits until it is ready.
    ///
    /// # Errors
    /// The server does not start.
    pub fn start_server(&mut self) -> Result<()> {
        let mut command =
            Command::new(requires::kube_apiserver().map_err(|missing| anyhow::anyhow!("{missing}"))?);
        command.args(&self.arguments);
        self.server = Some(self.spawn("apiserver", command)?);
        wait_for("the API server to be ready", PATIENCE, || {
            for (name, child) in [("etcd", &mut self.etcd), ("apiserver", &mut self.server)] {
                if let Some(child) = child
                    && let Ok(Some(status)) = child.0.try_wait()
                {
                    return Ok(Err(format!("{name} exited with {status}")));
                }
            }
            self.get("/readyz").and_then(|_| self.get("/api/v1/namespaces/default")).map(|_| Ok(()))
        })?
        .map_err(|ended| {
            let log = workdir::read(&self.instance.join("apiserver.log")).unwrap_or_default();
            let last: Vec<&str> = log.lines().rev().take(20).collect();
            anyhow::anyhow!(
                "{ended}; last lines of its log:\n{}",
                last.into_iter().rev().collect::<Vec<_>>().join("\n")
            )
        })
    }

    /// Kills the API server: every connection breaks, new ones are refused.
    pub fn kill_server(&mut self) {
        self.server = None; // dropping the guard kills the process and waits
    }

    /// Returns the process ids of the API server and of etcd; None while they are stopped.
    pub fn pids(&self) -> (Option<u32>, Option<u32>) {
        let pid = |process: &Option<Process>| process.as_ref().map(|process| process.0.id());
        (pid(&self.server), pid(&self.etcd))
    }

    fn spawn(&self, name: &str, mut command: Command) -> Result<Process> {
        use std::os::unix::process::CommandExt as _;
        let path = self.instance.join(format!("{name}.log"));
        let log = std::fs::OpenOptions::new().append(true).create(true).open(&path);
        let log = log.with_context(|| format!("cannot open {}", path.display()))?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        // Ctrl-C in a demo's terminal must reach only the demo.
        let child = command.process_group(0).spawn().with_context(|| format!("cannot start {name}"))?;
        let child = Process(child);
        write_pid(&self.instance, name, child.0.id())?;
        Ok(child)
    }

    // ---- Clients ----

    /// Returns the path of the admin's kubeconfig.
    pub fn kubeconfig(&self) -> PathBuf {
        self.dir.join("admin.kubeconfig")
    }

    /// Writes a node's kubeconfig and returns its path.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn node_kubeconfig(&self, node: &str) -> Result<PathBuf> {
        let path = self.dir.join(format!("{node}.kubeconfig"));
        workdir::write(&path, self.kubeconfig_of(&User::Node(node.to_owned()))?)?;
        Ok(path)
    }

    /// Returns the path of the cluster authority's certificate.
    pub fn authority_file(&self) -> PathBuf {
        self.dir.join("ca.crt")
    }

    /// Returns the address of the API server.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Writes a certificate with its key for a node's server on loopback; returns their paths.
    ///
    /// # Errors
    /// The files cannot be written.
    pub fn serving_files(&self, node: &str) -> Result<(PathBuf, PathBuf)> {
        let mut params = CertificateParams::new(vec![node.to_owned()])?;
        params.subject_alt_names.push(SanType::IpAddress(IpAddr::V4(Ipv4Addr::LOCALHOST)));
        params.distinguished_name.push(DnType::OrganizationName, "system:nodes");
        params.distinguished_name.push(DnType::CommonName, format!("system:node:{node}"));
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let (certificate, key) = self.authority.issue(&params)?;
        let paths = (self.dir.join(format!("{node}.crt")), self.dir.join(format!("{node}.key")));
        workdir::write(&paths.0, certificate)?;
        workdir::write(&paths.1, key)?;
        Ok(paths)
    }

    fn certificate(&self, user: &User) -> Result<(String, String)> {
        let mut params = CertificateParams::new(Vec::new())?;
        let (group, name) = match user {
            User::Admin => ("system:masters", "admin".to_owned()),
            User::Node(name) => ("system:nodes", format!("system:node:{name}")),
            User::Server => ("beelet:tests", KUBELET_CLIENT.to_owned()),
            User::Front => ("beelet:tests", FRONT_CLIENT.to_owned()),
        };
        params.distinguished_name.push(DnType::OrganizationName, group);
        params.distinguished_name.push(DnType::CommonName, name);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        Ok(self.authority.issue(&params)?)
    }

    /// Returns a token of the service account of this name in `kube-system`, which is created if it is
    /// missing.
    ///
    /// # Errors
    /// The server cannot be reached, or refuses.
    pub fn account(&self, name: &str) -> Result<String> {
        let accounts = "/api/v1/namespaces/kube-system/serviceaccounts";
        if self.get(&format!("{accounts}/{name}")).is_err() {
            self.create(accounts, &json!({ "metadata": { "name": name } }))?;
        }
        let request = json!({
            "apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest",
            "spec": { "expirationSeconds": 3600 },
        });
        let token = self.create(&format!("{accounts}/{name}/token"), &request)?;
        token["status"]["token"].as_str().map(str::to_owned).context("the response has no token")
    }

    /// Returns a kubeconfig with a token.
    pub fn kubeconfig_with(&self, token: &str) -> String {
        let authority = base64::engine::general_purpose::STANDARD.encode(self.authority.pem());
        let cluster =
            json!({ "server": format!("https://{}", self.address), "certificate-authority-data": authority });
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{ "name": "test", "cluster": cluster }],
            "users": [{ "name": "test", "user": { "token": token } }],
            "contexts": [{ "name": "test", "context": { "cluster": "test", "user": "test" } }],
        });
        format!("{config:#}\n")
    }

    /// Returns a kubeconfig with a new certificate.
    ///
    /// # Errors
    /// The key cannot be generated.
    pub fn kubeconfig_of(&self, user: &User) -> Result<String> {
        let (certificate, key) = self.certificate(user)?;
        let encoded = |text: &str| base64::engine::general_purpose::STANDARD.encode(text);
        let cluster = json!({
            "server": format!("https://{}", self.address),
            "certificate-authority-data": encoded(self.authority.pem()),
        });
        let user =
            json!({ "client-certificate-data": encoded(&certificate), "client-key-data": encoded(&key) });
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{ "name": "test", "cluster": cluster }],
            "users": [{ "name": "test", "user": user }],
            "contexts": [{ "name": "test", "context": { "cluster": "test", "user": "test" } }],
        });
        Ok(format!("{config:#}\n"))
    }

    /// Returns a client with the identity of the kubeconfig at `path`. Must be called within a runtime.
    ///
    /// # Errors
    /// The kubeconfig is invalid.
    pub fn client(path: &Path) -> Result<kube::Client> {
        let mut config = kube::Config::try_from(kube::config::Kubeconfig::read_from(path)?)?;
        // No retries: every request must appear once.
        config.default_retry = false;
        Ok(kube::Client::try_from(config)?)
    }

    // ---- Requests of an admin ----

    /// Reads the object at `path`.
    ///
    /// # Errors
    /// The server cannot be reached, or refuses.
    pub fn get(&self, path: &str) -> Result<Value> {
        self.ask(Method::GET, path, "", &Value::Null)
    }

    /// Creates an object in the collection at `path`.
    ///
    /// # Errors
    /// The server cannot be reached, or refuses.
    pub fn create(&self, path: &str, object: &Value) -> Result<Value> {
        self.ask(Method::POST, path, "application/json", object)
    }

    /// Changes an object with a strategic merge patch.
    ///
    /// # Errors
    /// The server cannot be reached, or refuses.
    pub fn patch(&self, path: &str, patch: &Value) -> Result<Value> {
        self.ask(Method::PATCH, path, "application/strategic-merge-patch+json", patch)
    }

    /// Deletes an object; `grace` overrides the grace period of a pod.
    ///
    /// # Errors
    /// The server cannot be reached, or refuses.
    pub fn delete(&self, path: &str, grace: Option<u32>) -> Result<Value> {
        let mut options = json!({ "apiVersion": "v1", "kind": "DeleteOptions" });
        if let Some(grace) = grace {
            options["gracePeriodSeconds"] = grace.into();
        }
        self.ask(Method::DELETE, path, "application/json", &options)
    }

    fn ask(&self, method: Method, path: &str, kind: &str, body: &Value) -> Result<Value> {
        let kubeconfig = self.kubeconfig();
        block_on(async move { ask(&Cluster::client(&kubeconfig)?, method, path, kind, body).await })
    }

    /// Creates a pod in the namespace `default` and assigns it to a node, as a scheduler would.
    ///
    /// # Errors
    /// The server cannot be reached, or refuses.
    pub fn run(&self, node: &str, pod: &Value) -> Result<Value> {
        let mut pod = pod.clone();
        pod["spec"]["nodeName"] = node.into();
        self.create("/api/v1/namespaces/default/pods", &pod)
    }

    /// Returns the path of a pod in the namespace `default`.
    #[must_use]
    pub fn pod(name: &str) -> String {
        format!("/api/v1/namespaces/default/pods/{name}")
    }

    /// Follows the object at `path` until `found` returns a value; the object is null while it does not
    /// exist.
    ///
    /// # Errors
    /// `found` returns no value in time.
    pub fn until<T: Send>(
        &self,
        what: &str,
        path: &str,
        mut found: impl FnMut(&Value) -> Option<T> + Send,
    ) -> Result<T> {
        let kubeconfig = self.kubeconfig();
        let mut last = Value::Null;
        let followed = block_on(async {
            let follow = follow(&kubeconfig, path, &mut last, &mut found);
            Ok(tokio::time::timeout(PATIENCE, follow).await)
        })?;
        match followed {
            Ok(result) => result,
            Err(_) => bail!("waited {} s for {what}; its last state was {last:#}", PATIENCE.as_secs()),
        }
    }

    /// Follows the object at `path` from now on, on a separate thread, with a timestamp per state.
    ///
    /// # Errors
    /// The object cannot be read now.
    pub fn watch(&self, path: &str) -> Result<Watcher> {
        let (kubeconfig, path) = (self.kubeconfig(), path.to_owned());
        let (out, seen) = std::sync::mpsc::channel();
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let Ok(runtime) = runtime else { return };
            runtime.block_on(async {
                let mut last = Value::Null;
                // A dropped receiver ends the thread, like `stop`.
                let mut send = |object: &Value| out.send((monotonic_ns(), object.clone())).err();
                tokio::select! {
                    _ = stopped => {}
                    _ = follow(&kubeconfig, &path, &mut last, &mut send) => {}
                }
            });
        });
        Ok(Watcher { seen, _stop: stop })
    }

    // ---- Received requests ----

    /// Returns the events of the audit log so far, oldest first.
    ///
    /// # Errors
    /// The log cannot be read.
    pub fn audit(&self) -> Result<Vec<Value>> {
        let log = workdir::read(&self.dir.join("audit.json"))?;
        // The last line may be incomplete.
        Ok(log.lines().filter_map(|line| serde_json::from_str(line).ok()).collect())
    }

    /// Returns the audit log's events of a node.
    fn audit_of(&self, node: &str) -> Result<impl Iterator<Item = Value> + use<>> {
        let name = format!("system:node:{node}");
        Ok(self.audit()?.into_iter().filter(move |event| event["user"]["username"] == name))
    }

    /// Returns a node's requests so far: verb, resource with its subresource, status code.
    ///
    /// # Errors
    /// The audit log cannot be read.
    pub fn asked_by(&self, node: &str) -> Result<Vec<(String, String, u64)>> {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let asked = self.audit_of(node)?.map(|event| {
            let object = &event["objectRef"];
            let mut resource = match object["resource"].as_str() {
                Some(resource) => resource.to_owned(),
                None => text(&event["requestURI"]),
            };
            if let Some(subresource) = object["subresource"].as_str() {
                resource = format!("{resource}/{subresource}");
            }
            (text(&event["verb"]), resource, event["responseStatus"]["code"].as_u64().unwrap_or(0))
        });
        Ok(asked.collect())
    }

    /// Returns the renewal times of a node's lease, oldest first, by the API server's clock.
    ///
    /// # Errors
    /// The audit log cannot be read.
    pub fn renewals(&self, node: &str) -> Result<Vec<Timestamp>> {
        let is_renewal = |event: &Value| {
            event["verb"] == "update"
                && event["objectRef"]["resource"] == "leases"
                && event["responseStatus"]["code"] == 200
        };
        let renewals = self.audit_of(node)?.filter(is_renewal);
        renewals.map(|event| Ok(event["stageTimestamp"].as_str().unwrap_or_default().parse()?)).collect()
    }

    /// Leaves the control plane running when the value is dropped; the instance's teardown ends it.
    pub fn keep(&mut self) {
        self.keep = true;
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if self.keep {
            std::mem::forget((self.etcd.take(), self.server.take()));
            return;
        }
        (self.server, self.etcd) = (None, None);
        if self.own.is_some() {
            if std::thread::panicking() {
                containerd::keep_logs(&self.instance);
            }
            if let Err(error) = teardown(&self.instance) {
                eprintln!("cannot remove the cluster in {}: {error:#}", self.instance.display());
            }
        }
    }
}

/// Kubernetes' controller manager and scheduler, which a [`Cluster`] lacks; dropping the value kills both.
pub struct Controllers {
    _processes: [Process; 2],
}

impl Controllers {
    /// Starts the programs that `KUBE_CONTROLLER_MANAGER` and `KUBE_SCHEDULER` name. They serve nothing, and
    /// give the nodes no addresses for pods.
    ///
    /// # Errors
    /// A program is missing or does not start.
    pub fn start(cluster: &Cluster) -> Result<Controllers> {
        let start = |program: requires::Program, name: &str, more: &[&str]| {
            let found = program.given().map_err(|missing| anyhow::anyhow!("{missing}"))?;
            let mut command = Command::new(found);
            command.arg("--kubeconfig").arg(cluster.kubeconfig());
            command.args(["--leader-elect=false", "--secure-port=0"]).args(more);
            cluster.spawn(name, command)
        };
        let manager = start(requires::CONTROLLER_MANAGER, "controllers", &["--allocate-node-cidrs=false"])?;
        Ok(Controllers { _processes: [manager, start(requires::SCHEDULER, "scheduler", &[])?] })
    }
}

/// Followed object.
pub struct Watcher {
    seen: std::sync::mpsc::Receiver<(u64, Value)>,
    _stop: tokio::sync::oneshot::Sender<()>,
}

impl Watcher {
    /// Waits until `wanted` accepts the object; returns the time at which it was seen, in nanoseconds of
    /// CLOCK_MONOTONIC, and the object, which is null while it does not exist.
    ///
    /// # Errors
    /// `wanted` does not accept the object in time.
    pub fn until(&self, what: &str, wanted: impl Fn(&Value) -> bool) -> Result<(u64, Value)> {
        let deadline = std::time::Instant::now() + PATIENCE;
        loop {
            let left = deadline.saturating_duration_since(std::time::Instant::now());
            let seen = self.seen.recv_timeout(left);
            let (at, object) = seen.with_context(|| format!("waited {} s for {what}", PATIENCE.as_secs()))?;
            if wanted(&object) {
                return Ok((at, object));
            }
        }
    }
}

/// Returns the API server's minor version: the 20 of 1.20.2.
///
/// # Errors
/// The version cannot be queried.
pub fn minor_version() -> Result<u32> {
    let output = Command::new(requires::kube_apiserver().map_err(|missing| anyhow::anyhow!("{missing}"))?)
        .arg("--version")
        .output()
        .context("cannot query the API server's version")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let minor = text.trim().strip_prefix("Kubernetes v1.").and_then(|rest| rest.split('.').next());
    minor
        .and_then(|minor| minor.parse().ok())
        .with_context(|| format!("cannot parse the API server's version {text:?}"))
}

/// Sends a request; returns the response, or null if it is not JSON.
///
/// # Errors
/// The server cannot be reached, or refuses.
pub async fn ask(
    client: &kube::Client,
    method: Method,
    path: &str,
    kind: &str,
    body: &Value,
) -> Result<Value> {
    let bytes = if body.is_null() { Vec::new() } else { body.to_string().into_bytes() };
    let request = http::Request::builder().method(&method).uri(path);
    let request = if kind.is_empty() { request } else { request.header(http::header::CONTENT_TYPE, kind) };
    let answer = client.request_text(request.body(bytes)?).await;
    let answer = answer.with_context(|| format!("{method} {path}"))?;
    Ok(serde_json::from_str(&answer).unwrap_or(Value::Null))
}

/// Reads and watches the object at `path` until `found` returns a value. Reconnects to a server that was
/// away.
async fn follow<T>(
    kubeconfig: &Path,
    path: &str,
    last: &mut Value,
    found: &mut (impl FnMut(&Value) -> Option<T> + Send),
) -> Result<T> {
    let (collection, name) = path.rsplit_once('/').context("the path does not name an object")?;
    let client = Cluster::client(kubeconfig)?;
    let client = Client::new(tokio::sync::watch::channel(client).1);
    let selector = format!("fieldSelector=metadata.name%3D{name}");
    loop {
        // Without the pause, an absent server would be polled in a busy loop.
        let pause = tokio::time::sleep(Duration::from_millis(100));
        if let Ok(list) = client.get(&format!("{collection}?{selector}")).await {
            *last = list["items"][0].clone();
            if let Some(found) = found(last) {
                return Ok(found);
            }
            let version = list["metadata"]["resourceVersion"].as_str().unwrap_or_default().to_owned();
            let watched =
                client.watch(&format!("{collection}?watch=1&{selector}&resourceVersion={version}")).await;
            if let Ok(mut events) = watched {
                while let Some(Ok(event)) = events.next().await {
                    *last = match event {
                        Event::Applied(object) => object,
                        Event::Deleted(_) => Value::Null,
                        Event::Bookmark(_) | Event::Complete(_) => continue,
                    };
                    if let Some(found) = found(last) {
                        return Ok(found);
                    }
                }
            }
        }
        pause.await;
    }
}

/// Returns true if a pod's condition is true.
#[must_use]
pub fn condition(object: &Value, kind: &str) -> bool {
    let all = object["status"]["conditions"].as_array();
    all.is_some_and(|all| all.iter().any(|one| one["type"] == kind && one["status"] == "True"))
}

/// Audit policy: each request is logged once, when it was answered, without bodies.
fn audit_policy() -> String {
    let policy = json!({
        "apiVersion": "audit.k8s.io/v1", "kind": "Policy",
        "omitStages": ["RequestReceived"],
        "rules": [{ "level": "Metadata" }],
    });
    policy.to_string()
}
