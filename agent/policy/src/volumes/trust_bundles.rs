//! The content of a projected `clusterTrustBundle`: `pkg/kubelet/clustertrustbundle` of Kubernetes 1.36.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::{
    api::{certificates::v1beta1::ClusterTrustBundle, core::v1::ClusterTrustBundleProjection},
    apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement},
};
use pem::{EncodeConfig, LineEnding, Pem};

/// The tag of a certificate's PEM block.
const CERTIFICATE: &str = "CERTIFICATE";

/// A projection without a file. The texts are the kubelet's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TrustBundleError {
    /// The projection chooses no bundle.
    #[error("ClusterTrustBundle projection requires either name or signerName to be set")]
    NoChoice,
    /// The named bundle does not exist.
    #[error("while getting ClusterTrustBundle: clustertrustbundle.certificates.k8s.io {name:?} not found")]
    Missing {
        /// Name of the bundle.
        name: String,
    },
    /// No bundle of the signer is selected.
    #[error("combination of signerName and labelSelector matched zero ClusterTrustBundles")]
    NoneSelected,
    /// The certificates of a bundle cannot be parsed.
    #[error("while normalizing trust anchors of {name}: {error}")]
    Malformed {
        /// Name of the bundle.
        name: String,
        /// Error of the parser. The text contains it, so it is not a source, which would be printed again.
        error: String,
    },
}

/// Returns the file of a projection: the certificates of the named bundle, or of the signer's selected
/// bundles, each once, without other text. Sorted: readers must not depend on another order.
///
/// # Errors
/// The bundle is missing, and the projection is not optional; or a bundle cannot be parsed.
pub fn file(
    source: &ClusterTrustBundleProjection,
    bundles: &BTreeMap<String, ClusterTrustBundle>,
) -> Result<Vec<u8>, TrustBundleError> {
    let optional = source.optional == Some(true);
    let chosen: Vec<&ClusterTrustBundle> = match (&source.name, &source.signer_name) {
        (Some(name), _) => bundles.get(name).into_iter().collect(),
        (None, Some(signer)) => {
            let of_signer = bundles.values().filter(|one| one.spec.signer_name.as_ref() == Some(signer));
            of_signer.filter(|one| selects(source.label_selector.as_ref(), one)).collect()
        }
        (None, None) => {
            return Err(TrustBundleError::NoChoice);
        }
    };
    if chosen.is_empty() && !optional {
        let name = source.name.clone();
        return Err(name.map_or(TrustBundleError::NoneSelected, |name| TrustBundleError::Missing { name }));
    }
    let mut anchors = BTreeSet::new();
    for bundle in chosen {
        let name = bundle.metadata.name.as_deref().unwrap_or_default();
        let blocks = pem::parse_many(&bundle.spec.trust_bundle).map_err(|error| {
            TrustBundleError::Malformed { name: name.to_owned(), error: error.to_string() }
        })?;
        anchors.extend(blocks.into_iter().map(Pem::into_contents));
    }
    let blocks: Vec<Pem> = anchors.into_iter().map(|anchor| Pem::new(CERTIFICATE, anchor)).collect();
    let config = EncodeConfig::new().set_line_ending(LineEnding::LF);
    Ok(blocks.iter().map(|block| pem::encode_config(block, config)).collect::<String>().into_bytes())
}

/// Returns true if a selector matches a bundle: a missing selector matches none, an empty one all.
fn selects(selector: Option<&LabelSelector>, bundle: &ClusterTrustBundle) -> bool {
    let Some(selector) = selector else { return false };
    let none = BTreeMap::new();
    let labels = bundle.metadata.labels.as_ref().unwrap_or(&none);
    let mut equal = selector.match_labels.iter().flatten();
    let mut expressions = selector.match_expressions.iter().flatten();
    equal.all(|(key, value)| labels.get(key) == Some(value)) && expressions.all(|one| holds(one, labels))
}

/// Returns true if a requirement of a selector holds (`labels.Requirement.Matches`).
fn holds(requirement: &LabelSelectorRequirement, labels: &BTreeMap<String, String>) -> bool {
    let value = labels.get(&requirement.key);
    let is_in = || value.is_some_and(|value| requirement.values.iter().flatten().any(|one| one == value));
    match requirement.operator.as_str() {
        "In" => is_in(),
        "NotIn" => !is_in(),
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn block(text: &str) -> String {
        format!("-----BEGIN CERTIFICATE-----\n{text}\n-----END CERTIFICATE-----\n")
    }

    #[test]
    fn a_projection_has_the_certificates_of_its_bundles_once() {
        let bundle = |name: &str, signer: Option<&str>, labels: Value, text: String| {
            let made = json!({
                "metadata": {"name": name, "labels": labels}, "spec": {"signerName": signer, "trustBundle": text},
            });
            (name.to_owned(), serde_json::from_value::<ClusterTrustBundle>(made).unwrap())
        };
        let (one, two, three) = (block("AQID"), block("BAUG"), block("BwgJ"));
        let bundles: BTreeMap<_, _> = [
            bundle("plain", None, json!({}), format!("Words.\n{two}more words\n{one}{two}")),
            bundle("a", Some("x/y"), json!({"rank": "1"}), two.clone()),
            bundle("b", Some("x/y"), json!({"rank": "2"}), format!("{three}{two}")),
            bundle("c", Some("x/z"), json!({"rank": "1"}), one.clone()),
            bundle("broken", None, json!({}), "-----BEGIN CERTIFICATE-----\nAQID\n".to_owned()),
        ]
        .into();
        let check = |source: Value, expected: Result<String, &str>| {
            let mut projection = source.clone();
            projection["path"] = json!("ca.pem");
            let projection = serde_json::from_value(projection).unwrap();
            let found = file(&projection, &bundles).map(|bytes| String::from_utf8(bytes).unwrap());
            match (found, expected) {
                (Ok(found), Ok(expected)) => assert_eq!(found, expected, "{source}"),
                (Err(found), Err(expected)) => {
                    assert!(found.to_string().contains(expected), "{source}: {found}");
                }
                (found, expected) => panic!("{source}: {found:?}, {expected:?}"),
            }
        };
        check(json!({"name": "plain"}), Ok(format!("{one}{two}")));
        check(json!({"name": "gone"}), Err("\"gone\" not found"));
        check(json!({"name": "gone", "optional": true}), Ok(String::new()));
        check(json!({}), Err("either name or signerName"));
        let of = |selector: Value| json!({"signerName": "x/y", "labelSelector": selector});
        check(of(json!({})), Ok(format!("{two}{three}")));
        check(of(json!({"matchLabels": {"rank": "1"}})), Ok(two.clone()));
        let expression = |operator: &str, values: Value| {
            of(json!({"matchExpressions": [{"key": "rank", "operator": operator, "values": values}]}))
        };
        check(expression("In", json!(["2", "3"])), Ok(format!("{two}{three}")));
        check(expression("NotIn", json!(["2", "3"])), Ok(two.clone()));
        check(expression("Exists", json!([])), Ok(format!("{two}{three}")));
        check(expression("DoesNotExist", json!([])), Err("matched zero ClusterTrustBundles"));
        check(json!({"signerName": "x/y"}), Err("matched zero ClusterTrustBundles"));
        check(json!({"signerName": "x/y", "optional": true}), Ok(String::new()));
        check(json!({"name": "broken", "optional": true}), Ok(String::new()));
    }
}
