//! Checks of a plugin's registration, as the kubelet makes them
//! (`pkg/kubelet/cm/devicemanager/plugin/v1beta1`), with its messages.

use beelet_units::object_name::is_subdomain;

/// The only version of the device plugin API.
pub const VERSION: &str = "v1beta1";

/// Maximum lengths of a DNS name and of the name behind its slash (`IsQualifiedName`).
const PREFIX_MAX: usize = 253;
const NAME_MAX: usize = 63;
/// Prefix of quota names; it counts towards a name's length.
const QUOTA_PREFIX: &str = "requests.";

/// A reason to refuse a registration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RegistrationError {
    /// The plugin speaks another version.
    #[error("requested API version {0:?} is not supported by kubelet. Supported version is {VERSION:?}")]
    Version(String),
    /// The plugin's resource name is invalid.
    #[error(
        "the ResourceName {0:?} is invalid: an extended resource has a name like vendor.example/thing, outside kubernetes.io"
    )]
    ResourceName(String),
}

/// Checks a plugin's registration. If the plugin names several versions, one must be [`VERSION`].
///
/// # Errors
/// The first check that failed.
pub fn check<S: AsRef<str>>(versions: &[S], resource: &str) -> Result<(), RegistrationError> {
    if !versions.iter().any(|version| version.as_ref() == VERSION) {
        let all: Vec<&str> = versions.iter().map(AsRef::as_ref).collect();
        return Err(RegistrationError::Version(all.join(", ")));
    }
    if is_extended_resource_name(resource) {
        Ok(())
    } else {
        Err(RegistrationError::ResourceName(resource.to_owned()))
    }
}

/// Returns true if a resource may come from a device plugin (`IsExtendedResourceName` in
/// `pkg/apis/core/v1/helper`).
#[must_use]
pub fn is_extended_resource_name(name: &str) -> bool {
    if name.contains("kubernetes.io/") || name.starts_with(QUOTA_PREFIX) {
        return false;
    }
    let Some((prefix, name)) = name.split_once('/') else { return false };
    prefix.len() + QUOTA_PREFIX.len() <= PREFIX_MAX && is_subdomain(prefix) && is_name(name)
}

/// Accepts letters, digits, `-`, `_` and `.`, with a letter or a digit at each end.
fn is_name(text: &str) -> bool {
    let end = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    let inner = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    text.len() <= NAME_MAX && end(text.chars().next()) && end(text.chars().last()) && text.chars().all(inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extended_resources_have_a_vendors_name() {
        let check = |name: &str, expected| assert_eq!(is_extended_resource_name(name), expected, "{name:?}");
        for name in ["example.com/gpu", "nvidia.com/mig-1g.10gb", "a/B_c.d-e", "x.kubernetes.io.example/y"] {
            check(name, true);
        }
        for name in [
            "",
            "gpu",
            "cpu",
            "/gpu",
            "example.com/",
            "example.com/a/b",
            "Example.com/gpu",
            "kubernetes.io/gpu",
            "node.kubernetes.io/gpu",
            "requests.example.com/gpu",
            "example.com/-gpu",
            "example..com/gpu",
            "example.com/gp u",
        ] {
            check(name, false);
        }
        check(&format!("example.com/{}", "x".repeat(63)), true);
        check(&format!("example.com/{}", "x".repeat(64)), false);
        check(&format!("{}/x", "a".repeat(244)), true);
        check(&format!("{}/x", "a".repeat(245)), false);
    }

    #[test]
    fn another_version_is_refused_in_the_kubelets_words() {
        let error = check(&["v1alpha"], "example.com/gpu").unwrap_err().to_string();
        assert_eq!(
            error,
            "requested API version \"v1alpha\" is not supported by kubelet. Supported version is \"v1beta1\""
        );
        assert_eq!(check(&["v1alpha", "v1beta1"], "example.com/gpu"), Ok(()));
        assert!(
            check(&["v1beta1"], "gpu")
                .unwrap_err()
                .to_string()
                .contains("the ResourceName \"gpu\" is invalid")
        );
    }
}
