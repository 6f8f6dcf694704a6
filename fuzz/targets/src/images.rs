//! The targets for images' names, and for docker's configuration in Secrets.

use std::collections::BTreeMap;

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use serde_json::Value;

use beelet_images::{credentials, reference};

/// Tests an image's name: its host and path alone are a name too, with the same parts.
pub fn image_reference(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    let Ok(read) = reference::parse(text) else { return };
    let name = read.host.map_or_else(|| read.path.to_owned(), |host| format!("{host}/{}", read.path));
    assert!(text.starts_with(&name), "{text:?} is of {name:?}");
    assert_eq!(reference::parse(&name), Ok(read), "{text:?}");
}

/// Tests `.dockerconfigjson` and `.dockercfg`: no image matches more entries than exist, and no error quotes
/// a secret.
pub fn credentials(input: &[u8]) {
    // The agent finds an entry even if unused parts are not UTF-8; this test replaces them to know all
    // entries.
    let json: Value = serde_json::from_str(&String::from_utf8_lossy(input)).unwrap_or_default();
    let registries = json.get("auths").unwrap_or(&json).as_object();
    let mut images = vec!["busybox".to_owned(), "eu-1.registry.test:5000/team/app:1".to_owned()];
    images.extend(registries.into_iter().flatten().map(|(name, _)| format!("{name}/app")).take(4));
    for key in [".dockerconfigjson", ".dockercfg"] {
        let data = BTreeMap::from([(key.to_owned(), ByteString(input.to_vec()))]);
        let secret = Secret { data: Some(data), ..Secret::default() };
        for image in &images {
            match credentials::of_secrets(image, &[&secret]) {
                Ok(found) => {
                    let known = registries.map_or(0, serde_json::Map::len);
                    assert!(found.len() <= known, "{} of {known} entries fit {image}", found.len());
                }
                Err(error) => {
                    let quoted = registries.into_iter().flatten().flat_map(|(_, entry)| secrets_of(entry));
                    for secret in quoted.filter(|secret| secret.len() >= 12 && !json_names(&json, secret)) {
                        assert!(!error.to_string().contains(secret), "{error}");
                    }
                }
            }
        }
    }
}

fn secrets_of(entry: &Value) -> impl Iterator<Item = &str> {
    ["password", "auth", "identitytoken", "registrytoken"]
        .into_iter()
        .filter_map(|field| entry.get(field).and_then(Value::as_str))
}

/// Returns true if the text is also part of a registry's name, or of the error message itself.
fn json_names(json: &Value, text: &str) -> bool {
    let registries = json.get("auths").unwrap_or(json).as_object();
    registries.into_iter().flatten().any(|(name, _)| name.contains(text))
        || "the entry for : `auth` is not the base64 form of `user:password`".contains(text)
}
