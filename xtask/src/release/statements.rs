//! Statements about the files of a release: their origin (in-toto, SLSA), and vulnerabilities that do not
//! affect them (OpenVEX).

use crate::package::{Commit, sha256, version};
use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// The origin of the files, as an in-toto statement with SLSA's predicate. The builder is the maintainer's
/// machine, so the statement meets SLSA's build level 1; the release workflow of CI attests by itself.
/// <https://slsa.dev/spec/v1.0/provenance>
pub(super) fn provenance(folder: &Path, files: &[PathBuf], commit: &Commit, rustc: &str) -> Result<Value> {
    let subject = |path: &PathBuf| {
        let name = path.strip_prefix(folder).unwrap_or(path).display().to_string();
        Ok(json!({ "name": name, "digest": { "sha256": sha256(path)? } }))
    };
    let subjects: Vec<Value> = files.iter().map(subject).collect::<Result<_>>()?;
    let sources = commit
        .hash
        .as_ref()
        .map(|hash| json!({ "uri": "git+https://beelet.dev", "digest": { "gitCommit": hash } }));
    Ok(json!({
        "_type": "https://in-toto.io/Statement/v1",
        "subject": subjects,
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "https://beelet.dev/cargo-xtask-release/v1",
                "externalParameters": { "version": version() },
                "internalParameters": { "rustc": rustc },
                "resolvedDependencies": sources.into_iter().collect::<Vec<_>>(),
            },
            "runDetails": { "builder": { "id": "https://beelet.dev/maintainer" } },
        },
    }))
}

/// Returns the OpenVEX document of this version from the statements in packaging/vex.json; None without
/// statements. <https://github.com/openvex/spec>
pub(super) fn vex(statements: &str, time: &str) -> Result<Option<Value>> {
    let kept: Value = serde_json::from_str(statements).context("could not parse packaging/vex.json")?;
    let mut statements = kept["statements"].as_array().cloned().unwrap_or_default();
    for statement in &mut statements {
        statement["products"] = json!([{ "@id": format!("pkg:generic/beelet@{}", version()) }]);
    }
    Ok((!statements.is_empty()).then(|| {
        json!({
            "@context": "https://openvex.dev/ns/v0.2.0",
            "@id": format!("https://beelet.dev/vex/beelet-{}", version()),
            "author": "The beelet authors",
            "timestamp": time,
            "version": 1,
            "statements": statements,
        })
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use beelet_tests_base::workdir;

    #[test]
    fn each_statement_about_a_vulnerability_is_complete() {
        let kept = workdir::read(&workdir::repository().join("packaging/vex.json")).unwrap();
        let document = vex(&kept, "2026-12-01T00:00:00Z").unwrap().unwrap();
        for statement in document["statements"].as_array().unwrap() {
            assert!(statement["vulnerability"]["name"].as_str().is_some_and(|name| !name.is_empty()));
            if statement["status"] == "not_affected" {
                assert!(statement["justification"].is_string() && statement["impact_statement"].is_string());
            }
        }
        assert_eq!(vex("{\"statements\": []}", "").unwrap(), None);
    }

    #[test]
    fn the_origin_names_each_file_with_its_checksum() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("apt/x");
        workdir::write(&file, "x").unwrap();
        let commit = Commit { name: None, hash: Some("abc".to_owned()), seconds: 0 };
        let statement = provenance(folder.path(), &[file], &commit, "rustc 1.95.0").unwrap();
        assert_eq!(statement["subject"][0]["name"], "apt/x");
        let sum = "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881";
        assert_eq!(statement["subject"][0]["digest"]["sha256"], sum);
        let source = &statement["predicate"]["buildDefinition"]["resolvedDependencies"][0];
        assert_eq!(source["digest"]["gitCommit"], "abc");
    }
}
