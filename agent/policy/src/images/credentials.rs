//! Access to images that are already on the node (KEP-2535; `pkg/kubelet/images/pullmanager`), and the images
//! that a credential provider serves (`pkg/credentialprovider`).
//!
//! An image pulled with credentials is not available to every pod: a pod must have the same credentials, or
//! pull the image again. Records have the kubelet's form. Must never hold credentials themselves, only their
//! digests.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// Maximum number of tracked Secrets of one image while pods use it; with that many tracked, a pod with a
/// further one must pull (`writeRecordWhileMatchingLimit`).
const TRACKED_SECRETS: usize = 100;

/// The images whose credentials are verified; the values have the names of KubeletConfiguration's
/// `imagePullCredentialsVerificationPolicy`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Policy {
    /// No images: every pod on the node may use every image on the node.
    NeverVerify,
    /// Images that were pulled for pods; not images that came to the node in another way.
    #[default]
    NeverVerifyPreloadedImages,
    /// All images but listed ones.
    NeverVerifyAllowlistedImages,
    /// All images.
    AlwaysVerify,
}

/// Verification of credentials, and its exceptions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verification {
    /// The general policy.
    pub policy: Policy,
    /// Images that every pod may use, without tag and digest, or all below a path (`registry.test/team/*`).
    pub allowlist: Vec<String>,
}

impl Verification {
    /// Returns true if a pod must prove its access to an image. `repository` is the pod's name for the image,
    /// without tag and digest.
    #[must_use]
    pub fn is_needed(&self, repository: &str, pulled_by_us: bool) -> bool {
        match self.policy {
            Policy::NeverVerify => false,
            Policy::NeverVerifyPreloadedImages => pulled_by_us,
            Policy::NeverVerifyAllowlistedImages => {
                !self.allowlist.iter().any(|entry| allows(entry, repository))
            }
            Policy::AlwaysVerify => true,
        }
    }
}

fn allows(entry: &str, repository: &str) -> bool {
    match entry.strip_suffix('*') {
        Some(prefix) => repository.starts_with(prefix),
        None => entry == repository,
    }
}

/// Returns what is wrong with an entry of the list, as the rest of a sentence that begins with the entry.
#[must_use]
pub fn wrong_entry(entry: &str) -> Option<&'static str> {
    let (prefix, below) = match entry.strip_suffix("/*") {
        Some(prefix) => (prefix, true),
        None => (entry, false),
    };
    let last = prefix.rsplit('/').next().unwrap_or_default();
    match () {
        () if entry.trim() != entry => Some("must not begin or end with a space"),
        () if prefix.is_empty() => Some("is too short: it needs at least a registry"),
        () if prefix.contains('*') => Some("has a * in the middle: only an entry's end may be /*"),
        () if !below && (last.contains(['@', ':'])) => Some("must have neither tag nor digest"),
        () => None,
    }
}

/// A Secret whose credentials an image was pulled with.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PullSecret {
    /// The Secret's namespace.
    pub namespace: String,
    /// The Secret's name.
    pub name: String,
    /// The Secret's UID; empty on a node without an API server.
    pub uid: String,
    /// A digest of the credentials.
    pub credential_hash: String,
}

impl PullSecret {
    fn is_same_object(&self, other: &Self) -> bool {
        (&self.namespace, &self.name, &self.uid) == (&other.namespace, &other.name, &other.uid)
    }
}

/// A service account whose token a credential provider gave credentials for.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PullAccount {
    /// The service account's namespace.
    pub namespace: String,
    /// The service account's name.
    pub name: String,
    /// The service account's UID.
    pub uid: String,
}

/// The owners of the credentials that an image was pulled with.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Credentials {
    /// Owning Secrets.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kubernetes_secrets: Vec<PullSecret>,
    /// Owning service accounts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kubernetes_service_accounts: Vec<PullAccount>,
    /// True for the node's own credentials, or for none at all: every pod has those.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub node_pods_accessible: bool,
}

/// The record of a pulled image (`ImagePulledRecord`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PulledRecord {
    /// Time of the last change.
    pub last_updated_time: Timestamp,
    /// The runtime's identifier of the image.
    pub image_ref: String,
    /// Credentials by the pods' name for the image, without tag and digest.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub credential_mapping: BTreeMap<String, Credentials>,
}

/// A pod's credentials for an image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OfPod {
    /// The matching Secrets.
    pub secrets: Vec<PullSecret>,
    /// The service account known to a credential provider.
    pub account: Option<PullAccount>,
}

/// Decision about a pod's access to an image on the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The pod may use the image.
    Granted,
    /// The pod may use the image, and this Secret also has the credentials.
    GrantedBy(PullSecret),
    /// The pod must pull the image.
    MustPull,
}

impl PulledRecord {
    /// Creates the record of a new image, pulled in unknown circumstances.
    #[must_use]
    pub fn new(image_ref: &str, now: Timestamp) -> Self {
        Self { last_updated_time: now, image_ref: image_ref.to_owned(), credential_mapping: BTreeMap::new() }
    }

    /// Returns true if every pod on the node may use the image.
    #[must_use]
    pub fn is_for_all(&self, repository: &str) -> bool {
        self.credential_mapping.get(repository).is_some_and(|known| known.node_pods_accessible)
    }

    /// Decides whether a pod with these credentials may use the image (`MustAttemptImagePull`).
    #[must_use]
    pub fn verdict(&self, repository: &str, of_pod: &OfPod) -> Verdict {
        let Some(known) = self.credential_mapping.get(repository) else { return Verdict::MustPull };
        if known.node_pods_accessible {
            return Verdict::Granted;
        }
        let tracked = known.kubernetes_secrets.len() < TRACKED_SECRETS;
        for own in &of_pod.secrets {
            for other in &known.kubernetes_secrets {
                let same_hash =
                    !other.credential_hash.is_empty() && own.credential_hash == other.credential_hash;
                match (same_hash, own.is_same_object(other)) {
                    (true, true) => return Verdict::Granted,
                    (true, false) if tracked => return Verdict::GrantedBy(own.clone()),
                    (true, false) => return Verdict::Granted,
                    // The Secret was changed: rotated, not withdrawn from its owner.
                    (false, true) if tracked => return Verdict::GrantedBy(own.clone()),
                    (false, _) => {}
                }
            }
        }
        match &of_pod.account {
            Some(account) if known.kubernetes_service_accounts.contains(account) => Verdict::Granted,
            _ => Verdict::MustPull,
        }
    }

    /// Records that the image was pulled with these credentials (`pulledRecordMergeNewCreds`). Returns true
    /// if that is new.
    pub fn merge(&mut self, repository: &str, new: Credentials, now: Timestamp) -> bool {
        let nothing = Credentials::default();
        if new == nothing {
            return false;
        }
        let known = self.credential_mapping.entry(repository.to_owned()).or_default();
        let before = known.clone();
        if before.node_pods_accessible {
            return false;
        }
        if new.node_pods_accessible {
            *known = Credentials { node_pods_accessible: true, ..nothing };
        } else {
            for secret in new.kubernetes_secrets {
                known.kubernetes_secrets.retain(|other| !other.is_same_object(&secret));
                known.kubernetes_secrets.push(secret);
            }
            known.kubernetes_service_accounts.extend(new.kubernetes_service_accounts);
            known.kubernetes_secrets.sort();
            known.kubernetes_service_accounts.sort();
            known.kubernetes_service_accounts.dedup();
        }
        let changed = *known != before;
        if changed {
            self.last_updated_time = now;
        }
        changed
    }
}

/// Returns true if an image (`registry.test:5000/team/app`) matches a pattern: each part of the host's name
/// matches, where `*` stands for any text; the port is equal; the path begins with the pattern's
/// (`URLsMatch`).
#[must_use]
pub fn matches(pattern: &str, image: &str) -> bool {
    let ((host, port, path), (of_host, of_port, of_path)) = (split(pattern), split(image));
    port == of_port
        && of_path.starts_with(path)
        && host.split('.').count() == of_host.split('.').count()
        && host.split('.').zip(of_host.split('.')).all(|(part, of_part)| glob(part, of_part))
}

/// Splits into host, port and path; the path begins with a slash.
fn split(image: &str) -> (&str, &str, &str) {
    let (host, path) = image.split_at(image.find('/').unwrap_or(image.len()));
    match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) => (name, port, path),
        _ => (host, "", path),
    }
}

/// Matches a text: the piece before the first `*` must begin the text, the one after the last must end it,
/// and the others must follow in order in between.
fn glob(pattern: &str, text: &str) -> bool {
    let Some((first, rest)) = pattern.split_once('*') else { return pattern == text };
    let (middle, last) = rest.rsplit_once('*').unwrap_or(("", rest));
    let Some(text) = text.strip_prefix(first).and_then(|text| text.strip_suffix(last)) else { return false };
    let mut left = text;
    middle.split('*').all(|piece| match left.find(piece) {
        Some(at) => {
            left = &left[at + piece.len()..];
            true
        }
        None => false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn time(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn secret(name: &str, uid: &str, hash: &str) -> PullSecret {
        PullSecret {
            namespace: "shop".into(),
            name: name.into(),
            uid: uid.into(),
            credential_hash: hash.into(),
        }
    }

    fn account(name: &str) -> PullAccount {
        PullAccount { namespace: "shop".into(), name: name.into(), uid: "a1".into() }
    }

    #[test]
    fn the_policy_decides_which_pods_must_show_credentials() {
        let check = |policy: Policy, image: &str, ours: bool, expected: bool| {
            let allowlist = vec!["registry.test/free".to_owned(), "mirror.test/team/*".to_owned()];
            let verification = Verification { policy, allowlist };
            assert_eq!(verification.is_needed(image, ours), expected, "{policy:?} {image} {ours}");
        };
        for ours in [true, false] {
            check(Policy::NeverVerify, "registry.test/app", ours, false);
            check(Policy::NeverVerifyPreloadedImages, "registry.test/app", ours, ours);
            check(Policy::AlwaysVerify, "registry.test/free", ours, true);
            check(Policy::NeverVerifyAllowlistedImages, "registry.test/app", ours, true);
            check(Policy::NeverVerifyAllowlistedImages, "registry.test/free", ours, false);
            check(Policy::NeverVerifyAllowlistedImages, "registry.test/free/app", ours, true);
            check(Policy::NeverVerifyAllowlistedImages, "mirror.test/team/a/b", ours, false);
            check(Policy::NeverVerifyAllowlistedImages, "mirror.test/teams/a", ours, true);
        }
    }

    #[test]
    fn entries_of_the_list_are_names_without_tags_or_all_below_a_path() {
        for good in [
            "busybox",
            "registry.test/app",
            "registry.test:5000/app",
            "registry.test/*",
            "registry.test:5000/*",
        ] {
            assert_eq!(wrong_entry(good), None, "{good}");
        }
        for bad in [
            "",
            "/*",
            "*",
            "registry.test/*/app",
            "registry.test/a*",
            "registry.test/app:1",
            "app@sha256:1",
            " app",
        ] {
            assert!(wrong_entry(bad).is_some(), "{bad}");
        }
    }

    #[test]
    fn an_image_is_available_to_pods_with_the_credentials_of_its_pull() {
        let mut record = PulledRecord::new("sha256:1", time(1));
        let of = |secrets: Vec<PullSecret>, account: Option<PullAccount>| OfPod { secrets, account };
        let app = "registry.test/app";
        assert_eq!(record.verdict(app, &of(vec![secret("s", "1", "h")], None)), Verdict::MustPull);
        let with =
            |secrets: Vec<PullSecret>| Credentials { kubernetes_secrets: secrets, ..Default::default() };
        assert!(record.merge(app, with(vec![secret("s", "1", "h")]), time(2)));
        assert!(!record.merge(app, with(vec![secret("s", "1", "h")]), time(3)));
        assert_eq!(record.last_updated_time, time(2));
        let check = |record: &PulledRecord,
                     secrets: Vec<PullSecret>,
                     account: Option<PullAccount>,
                     expected: Verdict| {
            assert_eq!(record.verdict(app, &of(secrets.clone(), account)), expected, "{secrets:?}");
        };
        check(&record, vec![], None, Verdict::MustPull);
        check(&record, vec![secret("s", "1", "h")], None, Verdict::Granted);
        check(&record, vec![secret("t", "2", "h")], None, Verdict::GrantedBy(secret("t", "2", "h")));
        check(&record, vec![secret("s", "1", "new")], None, Verdict::GrantedBy(secret("s", "1", "new")));
        check(&record, vec![secret("t", "2", "other")], None, Verdict::MustPull);
        assert_eq!(
            record.verdict("other.test/app", &of(vec![secret("s", "1", "h")], None)),
            Verdict::MustPull
        );
        let accounts =
            Credentials { kubernetes_service_accounts: vec![account("web")], ..Default::default() };
        assert!(record.merge(app, accounts, time(3)));
        check(&record, vec![], Some(account("web")), Verdict::Granted);
        check(&record, vec![], Some(account("db")), Verdict::MustPull);
        let all = || Credentials { node_pods_accessible: true, ..Default::default() };
        assert!(record.merge(app, all(), time(4)) && record.is_for_all(app));
        check(&record, vec![], None, Verdict::Granted);
        assert!(!record.merge(app, with(vec![secret("s", "1", "h")]), time(5)));
    }

    #[test]
    fn a_record_has_the_kubelets_form() {
        let text = r#"{"lastUpdatedTime":"2026-01-01T00:00:00Z","imageRef":"sha256:1","credentialMapping":{"app":{"kubernetesSecrets":[{"namespace":"shop","name":"s","uid":"1","credentialHash":"h"}]},"all":{"nodePodsAccessible":true}}}"#;
        let record: PulledRecord = serde_json::from_str(text).unwrap();
        assert!(record.is_for_all("all") && !record.is_for_all("app"));
        let again: PulledRecord = serde_json::from_str(&serde_json::to_string(&record).unwrap()).unwrap();
        assert_eq!(again, record);
    }

    #[test]
    fn providers_are_asked_for_the_images_that_they_name() {
        let check = |pattern: &str, image: &str, expected: bool| {
            assert_eq!(matches(pattern, image), expected, "{pattern} {image}");
        };
        check("registry.test", "registry.test/app", true);
        check("*.registry.test", "eu.registry.test/app", true);
        check("*.registry.test", "a.eu.registry.test/app", false);
        check("*.*.registry.test", "a.eu.registry.test/app", true);
        check("eu-*-1.registry.test", "eu-west-1.registry.test/app", true);
        check("eu-*-1.registry.test", "eu-1.registry.test/app", false);
        check("a*b*c.test", "aXbYc.test/app", true);
        check("a*b*c.test", "acb.test/app", false);
        check("registry.test/team", "registry.test/team/app", true);
        check("registry.test/team", "registry.test/other/app", false);
        check("registry.test:5000", "registry.test:5000/app", true);
        check("registry.test:5000", "registry.test/app", false);
        check("registry.test", "registry.test:5000/app", false);
        check("*", "localhost/app", true);
        check("docker.io/library", "docker.io/library/busybox", true);
    }
}
