//! Who to be at a registry: the `imagePullSecrets` of a pod, docker's own configuration files in Secrets.
//! Which entry fits which image follows the kubelet's `pkg/credentialprovider`. Pure; nothing here is ever
//! logged.

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use beelet_codec::data;
use beelet_proto::cri;
use k8s_openapi::api::core::v1::Secret;
use serde::Deserialize;

use super::{Error, reference};

/// The registry of images that name none.
const DOCKER_HUB: &str = "docker.io";

/// One entry of docker's configuration.
#[derive(Clone, Default, Deserialize)]
#[serde(default)]
struct Entry {
    username: String,
    password: String,
    auth: String,
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

/// The credentials for an image, best fit first; empty where none fits.
///
/// # Errors
/// A secret is no docker configuration.
pub fn of_secrets(image: &str, secrets: &[&Secret]) -> Result<Vec<cri::AuthConfig>, Error> {
    let mut fits: Vec<(usize, cri::AuthConfig)> = Vec::new();
    for secret in secrets {
        for (registry, entry) in entries(secret)? {
            if let Some(length) = fit(&registry, image) {
                fits.push((length, auth(&registry, entry)?));
            }
        }
    }
    // The longest path is the closest fit.
    fits.sort_by_key(|(length, _)| std::cmp::Reverse(*length));
    Ok(fits.into_iter().map(|(_, auth)| auth).collect())
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

fn auth(registry: &str, entry: Entry) -> Result<cri::AuthConfig, Error> {
    let mut auth = cri::AuthConfig {
        username: entry.username,
        password: entry.password,
        server_address: registry.to_owned(),
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

/// How closely an entry's registry fits an image, if it does: the length of what is the same.
fn fit(registry: &str, image: &str) -> Option<usize> {
    let image = reference::parse(image).ok()?;
    let plain = registry.trim_start_matches("https://").trim_start_matches("http://");
    let (host, path) = plain.split_once('/').unwrap_or((plain, ""));
    // Docker's own entries end with the version of its API.
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

/// Label by label; `*` stands for any one label, a part of it too. The port must be the same.
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
            found.into_iter().map(|auth| (auth.username, auth.password)).collect()
        };
        let all = ("all".to_owned(), "1".to_owned());
        assert_eq!(names("registry.test/team/app"), [("team".to_owned(), "2:3".to_owned()), all.clone()]);
        assert_eq!(names("registry.test/app"), [all]);
        assert_eq!(names("busybox"), []);
    }

    #[test]
    fn a_secret_that_is_no_docker_configuration_is_named_but_not_quoted() {
        let opaque: Secret =
            serde_json::from_value(json!({"metadata": {"name": "s"}, "data": {"x": "aHVzaA=="}})).unwrap();
        assert_eq!(of_secrets("busybox", &[&opaque]), Err(Error::NotAPullSecret("s".to_owned())));
        let broken =
            json!({"metadata": {"name": "s"}, "data": {".dockerconfigjson": STANDARD.encode("hush")}});
        let error =
            of_secrets("busybox", &[&serde_json::from_value(broken).unwrap()]).unwrap_err().to_string();
        assert!(error.contains("docker's configuration") && !error.contains("hush"), "{error}");
    }
}
