//! The list of the binary's components as SPDX 2.3 (JSON), made from the CycloneDX list, so that the two
//! agree.

use super::{Commit, version};
use anyhow::{Context as _, Result};
use beelet_tests_base::workdir;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Makes the list in the folder `out` from the CycloneDX list `from`.
pub(super) fn build(from: &Path, out: &Path, commit: &Commit) -> Result<PathBuf> {
    let text = workdir::read(from)?;
    let list: Value =
        serde_json::from_str(&text).with_context(|| format!("could not parse {}", from.display()))?;
    let path = out.join(format!("beelet-{}.spdx.json", version()));
    workdir::write(&path, format!("{:#}\n", convert(&list, commit.hash.as_deref().unwrap_or("unknown"))))?;
    Ok(path)
}

/// Converts a CycloneDX document: one package per component, with its licence, checksum and dependencies.
fn convert(list: &Value, commit: &str) -> Value {
    let array = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let main = list["metadata"]["component"].clone();
    let components: Vec<Value> = std::iter::once(main).chain(array(&list["components"])).collect();
    let ids: BTreeMap<String, String> = (0..)
        .zip(&components)
        .map(|(index, one)| {
            (text(&one["bom-ref"]), format!("SPDXRef-{index}-{}", identifier(&text(&one["name"]))))
        })
        .collect();
    let id = |reference: &Value| ids.get(&text(reference)).cloned();
    let mut relations: Vec<Value> = Vec::new();
    let mut relate = |from: String, kind: &str, to: String| {
        relations.push(json!({ "spdxElementId": from, "relationshipType": kind, "relatedSpdxElement": to }));
    };
    if let Some(main) = components.first().and_then(|main| id(&main["bom-ref"])) {
        relate("SPDXRef-DOCUMENT".to_owned(), "DESCRIBES", main);
    }
    for dependency in array(&list["dependencies"]) {
        let Some(from) = id(&dependency["ref"]) else { continue };
        for to in array(&dependency["dependsOn"]).iter().filter_map(id) {
            relate(from.clone(), "DEPENDS_ON", to);
        }
    }
    let packages: Vec<Value> =
        components.iter().filter_map(|one| Some(package(one, &id(&one["bom-ref"])?))).collect();
    json!({
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": format!("beelet-{}", version()),
        "documentNamespace": format!("https://beelet.dev/spdx/beelet-{}-{commit}", version()),
        "creationInfo": {
            // CycloneDX permits fractions of a second, SPDX does not.
            "created": format!("{}Z", text(&list["metadata"]["timestamp"]).chars().take(19).collect::<String>()),
            "creators": ["Organization: The beelet authors", "Tool: cargo-cyclonedx", "Tool: cargo xtask package"],
        },
        "packages": packages,
        "relationships": relations,
    })
}

fn package(component: &Value, id: &str) -> Value {
    let license = match text(&component["licenses"][0]["expression"]) {
        none if none.is_empty() => "NOASSERTION".to_owned(),
        // Old manifests separate a choice with a slash. SPDX's own tool does not know `MPL-2.0+` ("or
        // later").
        license => license.replace('/', " OR ").replace("MPL-2.0+", "MPL-2.0"),
    };
    let purl = text(&component["purl"]);
    let is_own = purl.contains("download_url=file:");
    let mut package = json!({
        "SPDXID": id,
        "name": component["name"],
        "versionInfo": component["version"],
        "downloadLocation": "NOASSERTION",
        "filesAnalyzed": false,
        "licenseConcluded": "NOASSERTION",
        "licenseDeclared": license,
        "copyrightText": "NOASSERTION",
    });
    if !is_own {
        package["externalRefs"] = json!([{
            "referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl", "referenceLocator": purl,
        }]);
    }
    let checksum = text(&component["hashes"][0]["content"]);
    if !checksum.is_empty() {
        package["checksums"] = json!([{ "algorithm": "SHA256", "checksumValue": checksum }]);
    }
    package
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// Returns the name with the characters that SPDX permits in an identifier.
fn identifier(name: &str) -> String {
    name.chars().map(|c| if c.is_ascii_alphanumeric() || c == '.' { c } else { '-' }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_component_becomes_a_package_with_its_dependencies() {
        let list = json!({
            "metadata": {
                "timestamp": "2023-11-14T22:13:20.000000000Z",
                "component": {
                    "bom-ref": "m", "name": "beelet", "version": "1.0.0",
                    "purl": "pkg:cargo/beelet@1.0.0?download_url=file://.",
                },
            },
            "components": [{
                "bom-ref": "a", "name": "a_b", "version": "2.0.0", "purl": "pkg:cargo/a_b@2.0.0",
                "licenses": [{ "expression": "MIT/Apache-2.0" }], "hashes": [{ "alg": "SHA-256", "content": "00" }],
            }],
            "dependencies": [{ "ref": "m", "dependsOn": ["a"] }, { "ref": "a" }],
        });
        let made = convert(&list, "abc");
        assert_eq!(made["creationInfo"]["created"], "2023-11-14T22:13:20Z");
        let package = &made["packages"][1];
        assert_eq!(
            (&package["SPDXID"], &package["licenseDeclared"]),
            (&json!("SPDXRef-1-a-b"), &json!("MIT OR Apache-2.0"))
        );
        assert_eq!(package["checksums"][0]["checksumValue"], "00");
        assert!(made["packages"][0].get("externalRefs").is_none());
        let kinds: Vec<&str> = made["relationships"]
            .as_array()
            .unwrap()
            .iter()
            .map(|one| one["relationshipType"].as_str().unwrap())
            .collect();
        assert_eq!(kinds, ["DESCRIBES", "DEPENDS_ON"]);
    }
}
