//! Finds credentials for registries: the `imagePullSecrets` of a pod (docker configuration files in Secrets),
//! a docker configuration file on the node, and credential providers. Entries match images as in the
//! kubelet's `pkg/credentialprovider`. Must never log a credential.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use beelet_base::blocking::blocking;
use beelet_codec::data;
use beelet_policy::images::credentials::{Credentials, OfPod, PullAccount, PullSecret};
use beelet_proto::cri;
use beelet_units::go_json;
use k8s_openapi::api::core::v1::Secret;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use tracing::debug;

use super::providers::{Asker, Providers};
use super::{Error, reference};

/// Maximum size of the node's docker configuration file.
const LONGEST_FILE: u64 = 1 << 20;

/// Registry of image names without a host.
const DOCKER_HUB: &str = "docker.io";

/// Entry of docker's configuration for a registry.
#[derive(Clone, Default, Deserialize)]
#[serde(default)]
struct Entry {
    username: String,
    password: String,
    auth: String,
    email: String,
    #[serde(rename = "identitytoken")]
    identity_token: String,
    #[serde(rename = "registrytoken")]
    registry_token: String,
}

#[derive(Deserialize)]
struct DockerConfigJson {
    #[serde(default)]
    auths: BTreeMap<String, Entry>,
}

/// Owner of credentials.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// The node: any pod may use them.
    Node,
    /// A Secret.
    Secret(PullSecret),
    /// A service account.
    Account(PullAccount),
}

/// Credentials for a registry.
#[derive(Clone, PartialEq)]
pub struct Credential {
    /// Credentials in the runtime's form.
    pub auth: cri::AuthConfig,
    /// Owner of the credentials.
    pub source: Source,
}

impl Credential {
    /// Returns the record of an image pulled with `used`; None stands for an anonymous pull.
    pub(super) fn record(used: Option<&Self>) -> Credentials {
        let mut record = Credentials::default();
        match used.map(|credential| &credential.source) {
            None | Some(Source::Node) => record.node_pods_accessible = true,
            Some(Source::Secret(secret)) => record.kubernetes_secrets.push(secret.clone()),
            Some(Source::Account(account)) => record.kubernetes_service_accounts.push(account.clone()),
        }
        record
    }
}

/// Selects the owners that belong to the pod only.
pub(super) fn of_pod(all: &[Credential]) -> OfPod {
    let mut own = OfPod::default();
    for credential in all {
        match &credential.source {
            Source::Node => {}
            Source::Secret(secret) => own.secrets.push(secret.clone()),
            Source::Account(account) => drop(own.account.get_or_insert_with(|| account.clone())),
        }
    }
    own
}

/// The node's own sources of credentials.
#[derive(Debug, Default)]
pub struct Keys {
    /// Credential provider plugins.
    pub providers: Providers,
    /// Candidate paths of docker's configuration; the first that can be read counts.
    pub files: Vec<PathBuf>,
}

impl Keys {
    /// Returns the paths at which the kubelet looks for docker's configuration: its own folder, the user's
    /// home, the root.
    #[must_use]
    pub fn files_of(kubelet_dir: &Path, home: Option<&Path>) -> Vec<PathBuf> {
        let home = home.filter(|home| home.is_absolute());
        let json = [kubelet_dir.to_owned()].into_iter().chain(home.map(|home| home.join(".docker")));
        let old = [kubelet_dir].into_iter().chain(home);
        json.chain(["/.docker".into()])
            .map(|folder| folder.join("config.json"))
            .chain(old.chain([Path::new("/")]).map(|folder| folder.join(".dockercfg")))
            .collect()
    }

    /// Returns the credentials for an image: of the pod's Secrets, the node's files and the providers, in
    /// this order.
    pub(super) async fn of(
        &self,
        image: &str,
        secrets: &[&Secret],
        asker: &Asker,
    ) -> Result<Vec<Credential>, Error> {
        let mut all = of_secrets(image, secrets)?;
        all.extend(self.of_files(image).await);
        let mut given: Vec<(usize, Credential)> = Vec::new();
        for login in self.providers.logins(image, asker).await {
            let Some(length) = fit(&login.registry, image) else { continue };
            // The registry's name is omitted, as in `auth`.
            let auth =
                cri::AuthConfig { username: login.username, password: login.password, ..Default::default() };
            let source = login.account.map_or(Source::Node, Source::Account);
            given.push((length, Credential { auth, source }));
        }
        all.extend(closest_first(given));
        Ok(all)
    }

    async fn of_files(&self, image: &str) -> Vec<Credential> {
        if self.files.is_empty() {
            return Vec::new();
        }
        let files = self.files.clone();
        let entries =
            blocking("reading docker's configuration", move || files.iter().find_map(|file| read(file)));
        let fits = entries.await.unwrap_or_default().into_iter().filter_map(|(registry, entry)| {
            let length = fit(&registry, image)?;
            let auth = auth(&registry, entry).ok()?;
            Some((length, Credential { auth, source: Source::Node }))
        });
        closest_first(fits.collect())
    }
}

/// Sorts the longest match first.
fn closest_first(mut fits: Vec<(usize, Credential)>) -> Vec<Credential> {
    fits.sort_by_key(|(length, _)| std::cmp::Reverse(*length));
    fits.into_iter().map(|(_, credential)| credential).collect()
}

/// Reads a file in docker's new or old format.
fn read(path: &Path) -> Option<BTreeMap<String, Entry>> {
    let file = std::fs::File::open(path).ok()?;
    let mut text = Vec::new();
    let read = std::io::Read::read_to_end(&mut std::io::Read::take(file, LONGEST_FILE), &mut text);
    let entries = read.ok().and_then(|_| match path.extension() {
        Some(_) => data::from_json::<DockerConfigJson>(&text).ok().map(|config| config.auths),
        None => data::from_json(&text).ok(),
    });
    if entries.is_none() {
        debug!(path = %path.display(), "ignoring a file that is not a docker configuration in JSON");
    }
    entries
}

/// Returns the credentials of Secrets for an image, best match first; empty if none matches.
///
/// # Errors
/// A Secret is not a docker configuration.
pub fn of_secrets(image: &str, secrets: &[&Secret]) -> Result<Vec<Credential>, Error> {
    let mut fits: Vec<(usize, Credential)> = Vec::new();
    for secret in secrets {
        for (registry, entry) in entries(secret)? {
            if let Some(length) = fit(&registry, image) {
                let email = entry.email.clone();
                let auth = auth(&registry, entry)?;
                let text = |text: &Option<String>| text.clone().unwrap_or_default();
                let source = Source::Secret(PullSecret {
                    namespace: text(&secret.metadata.namespace),
                    name: text(&secret.metadata.name),
                    uid: text(&secret.metadata.uid),
                    credential_hash: digest(&auth.username, &auth.password, &email),
                });
                fits.push((length, Credential { auth, source }));
            }
        }
    }
    Ok(closest_first(fits))
}

/// Returns the kubelet's digest of credentials (`hashAuthConfig`), which covers their JSON as Go writes it.
fn digest(username: &str, password: &str, email: &str) -> String {
    #[derive(Serialize)]
    struct AuthConfig<'a> {
        #[serde(skip_serializing_if = "str::is_empty")]
        username: &'a str,
        #[serde(skip_serializing_if = "str::is_empty")]
        password: &'a str,
        #[serde(skip_serializing_if = "str::is_empty")]
        email: &'a str,
    }
    let json = data::to_value(&AuthConfig { username, password, email }).unwrap_or_default().to_string();
    Sha256::digest(go_json::escaped(&json)).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn entries(secret: &Secret) -> Result<BTreeMap<String, Entry>, Error> {
    let name = secret.metadata.name.clone().unwrap_or_default();
    let value = |key: &str| secret.data.as_ref().and_then(|data| data.get(key));
    let unreadable = |key| Error::NotDockerConfig { secret: name.clone(), key };
    if let Some(json) = value(".dockerconfigjson") {
        let config: DockerConfigJson =
            data::from_json(&json.0).map_err(|_| unreadable(".dockerconfigjson"))?;
        return Ok(config.auths);
    }
    if let Some(json) = value(".dockercfg") {
        return data::from_json(&json.0).map_err(|_| unreadable(".dockercfg"));
    }
    Err(Error::NotAPullSecret(name))
}

/// Builds the credentials for the runtime. The registry's name is omitted, as by the kubelet: containerd
/// parses the name as a URL and, if the name lacks a scheme or is an alias of the registry, finds no match
/// and pulls without credentials.
fn auth(registry: &str, entry: Entry) -> Result<cri::AuthConfig, Error> {
    let mut auth = cri::AuthConfig {
        username: entry.username,
        password: entry.password,
        identity_token: entry.identity_token,
        registry_token: entry.registry_token,
        ..Default::default()
    };
    if auth.username.is_empty() && !entry.auth.is_empty() {
        let wrong = || Error::NotBase64(registry.to_owned());
        let text = STANDARD.decode(entry.auth.trim()).map_err(|_| wrong())?;
        let text = String::from_utf8(text).map_err(|_| wrong())?;
        let (user, password) = text.split_once(':').ok_or_else(wrong)?;
        (auth.username, auth.password) = (user.to_owned(), password.trim_end_matches('\0').to_owned());
    }
    Ok(auth)
}

/// Returns the length of the match between an entry's registry and an image, or None if they do not match.
fn fit(registry: &str, image: &str) -> Option<usize> {
    let image = reference::parse(image).ok()?;
    let plain = registry.trim_start_matches("https://").trim_start_matches("http://");
    let (host, path) = plain.split_once('/').unwrap_or((plain, ""));
    // Docker's own entries end with its API version.
    let path = path.trim_end_matches('/');
    let path = if path == "v1" || path == "v2" { "" } else { path };
    let of_image = image.host.unwrap_or(DOCKER_HUB);
    let same_host = if is_hub(of_image) { is_hub(host) } else { host_fits(host, of_image) };
    let below = image.path.strip_prefix(path)?;
    let whole_parts = path.is_empty() || below.is_empty() || below.starts_with('/');
    (same_host && whole_parts).then_some(host.len() + path.len())
}

fn is_hub(host: &str) -> bool {
    matches!(host, "docker.io" | "index.docker.io" | "registry-1.docker.io")
}

/// Compares label by label; `*` matches one label or a part of one. The port must be equal.
fn host_fits(pattern: &str, host: &str) -> bool {
    let split = |text: &'_ str| -> (String, String) {
        match text.rsplit_once(':') {
            Some((name, port)) => (name.to_owned(), port.to_owned()),
            None => (text.to_owned(), String::new()),
        }
    };
    let ((pattern, pattern_port), (host, port)) = (split(pattern), split(host));
    let labels = (pattern.split('.'), host.split('.'));
    pattern_port == port
        && labels.0.clone().count() == labels.1.clone().count()
        && labels.0.zip(labels.1).all(|(pattern, label)| label_fits(pattern, label))
}

fn label_fits(pattern: &str, label: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == label,
        Some((start, end)) => {
            label.len() >= start.len() + end.len() && label.starts_with(start) && label.ends_with(end)
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn secret(auths: serde_json::Value) -> Secret {
        let text = json!({ "auths": auths }).to_string();
        let data = json!({".dockerconfigjson": STANDARD.encode(text)});
        serde_json::from_value(json!({"metadata": {"name": "s"}, "data": data})).unwrap()
    }

    #[test]
    fn entries_fit_by_host_and_path() {
        let check = |registry: &str, image: &str, fits: bool| {
            assert_eq!(fit(registry, image).is_some(), fits, "{registry} {image}");
        };
        check("registry.test", "registry.test/app:1", true);
        check("https://registry.test/v2/", "registry.test/app:1", true);
        check("registry.test", "other.test/app:1", false);
        check("registry.test:5000", "registry.test/app:1", false);
        check("registry.test:5000", "registry.test:5000/app:1", true);
        check("registry.test/team", "registry.test/team/app:1", true);
        check("registry.test/team", "registry.test/teams/app:1", false);
        check("https://index.docker.io/v1/", "busybox", true);
        check("docker.io", "me/app:1", true);
        check("*.registry.test", "eu.registry.test/app", true);
        check("*.registry.test", "a.eu.registry.test/app", false);
        check("eu-*.registry.test", "eu-1.registry.test/app", true);
    }

    #[test]
    fn the_closest_entry_comes_first() {
        let auths = json!({
            "registry.test": {"username": "all", "password": "1"},
            "registry.test/team": {"auth": STANDARD.encode("team:2:3")},
        });
        let secret = secret(auths);
        let names = |image: &str| -> Vec<(String, String)> {
            let found = of_secrets(image, &[&secret]).unwrap();
            found.into_iter().map(|one| (one.auth.username, one.auth.password)).collect()
        };
        let all = ("all".to_owned(), "1".to_owned());
        assert_eq!(names("registry.test/team/app"), [("team".to_owned(), "2:3".to_owned()), all.clone()]);
        assert_eq!(names("registry.test/app"), [all]);
        assert_eq!(names("busybox"), []);
    }

    #[test]
    fn a_digest_is_that_of_gos_json() {
        let check = |user: &str, password: &str, json: &str| {
            let expected: String = Sha256::digest(json).iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(digest(user, password, ""), expected, "{json}");
        };
        check("me", "hush", r#"{"username":"me","password":"hush"}"#);
        check("me", "a<b&c>\"", r#"{"username":"me","password":"a\u003cb\u0026c\u003e\""}"#);
        check("", "", "{}");
    }

    #[tokio::test]
    async fn the_nodes_own_file_is_for_everybody_after_the_pods_secrets() {
        let dir = tempfile::tempdir().unwrap();
        let auth = STANDARD.encode("node:1");
        let text = json!({"auths": {"registry.test": {"auth": auth}}}).to_string();
        std::fs::write(dir.path().join("config.json"), text).unwrap();
        let keys = Keys { files: Keys::files_of(dir.path(), None), ..Keys::default() };
        let secret = secret(json!({"registry.test": {"username": "all", "password": "1"}}));
        let found = keys.of("registry.test/app", &[&secret], &Asker::default()).await.ok().unwrap();
        let names: Vec<_> = found.iter().map(|one| one.auth.username.as_str()).collect();
        assert_eq!(names, ["all", "node"]);
        assert!(matches!(&found[0].source, Source::Secret(secret) if secret.name == "s"));
        assert_eq!((&found[1].source, of_pod(&found).secrets.len()), (&Source::Node, 1));
        assert!(Credential::record(found.get(1)).node_pods_accessible);
        std::fs::write(dir.path().join("config.json"), "hush").unwrap();
        assert!(keys.of("registry.test/app", &[], &Asker::default()).await.ok().unwrap().is_empty());
    }

    #[test]
    fn a_secret_that_is_no_docker_configuration_is_named_but_not_quoted() {
        let opaque: Secret =
            serde_json::from_value(json!({"metadata": {"name": "s"}, "data": {"x": "aHVzaA=="}})).unwrap();
        assert_eq!(of_secrets("busybox", &[&opaque]).err(), Some(Error::NotAPullSecret("s".to_owned())));
        let broken =
            json!({"metadata": {"name": "s"}, "data": {".dockerconfigjson": STANDARD.encode("hush")}});
        let error =
            of_secrets("busybox", &[&serde_json::from_value(broken).unwrap()]).err().unwrap().to_string();
        assert!(error.contains("docker's configuration") && !error.contains("hush"), "{error}");
    }
}
