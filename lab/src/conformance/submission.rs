//! `cargo xtask conformance --cluster`: the conformance tests on a cluster of several nodes, with the files
//! of a submission to the CNCF (github.com/cncf/k8s-conformance, instructions.md): `e2e.log`,
//! `junit_01.xml`, `PRODUCT.yaml`, `README.md`.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};
use beelet_tests::workdir;

use super::ledger::{Outcome, Row};
use super::{Args, junit, ledger, named, write};
use crate::cluster::Playground;
use xtask::progress::Step;

/// Runs the suite, and writes the files.
pub(super) fn run(args: &Args) -> Result<()> {
    let suite = named("E2E_TEST")?;
    let images = std::env::var_os("E2E_IMAGES").map(PathBuf::from);
    let playground = Playground::find_or_create()?;
    if let Some(images) = &images {
        let step = Step::start(format!("import {}", images.display()));
        playground.import(images)?;
        step.done("");
    }
    let version = playground.version()?;
    let short: String = version.split('.').take(2).collect::<Vec<_>>().join(".");
    let folder = workdir::target_dir().join("conformance").join(&short).join("beelet");
    std::fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let log = File::create(folder.join("e2e.log")).context("cannot create e2e.log")?;
    let step = Step::start(format!("{} against {}", suite.display(), args.focus()));
    // The suite needs the nodes' network, so it runs on the first of them.
    let mut command = playground.command(&words(args, &suite, &folder))?;
    command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    let ended = command.status().context("cannot start the suite")?;
    step.done(&ended.to_string());
    let junit = merged(&folder)?;
    let rows = junit::read(&workdir::read(&junit)?)?;
    write(&folder.join("PRODUCT.yaml"), &product(&version))?;
    write(&folder.join("README.md"), &readme(&version, args, &rows, &playground.nodes()?))?;
    println!("{}\n{}", folder.display(), ledger::counts(rows.iter()));
    for row in rows.iter().filter(|row| row.outcome == Outcome::Fail) {
        println!("failed: {}\n        {}", row.test, row.reason);
    }
    if rows.is_empty() || rows.iter().any(|row| row.outcome != Outcome::Pass) {
        bail!("not every test passed: see {}", folder.join("e2e.log").display());
    }
    Ok(())
}

/// Returns the suite's file of results, under the name that a submission needs.
fn merged(folder: &Path) -> Result<PathBuf> {
    let file = folder.join("junit_01.xml");
    if !file.exists() {
        bail!("the suite left no results: see {}", folder.join("e2e.log").display());
    }
    Ok(file)
}

/// Returns the suite's command line; through ginkgo if it is given.
fn words(args: &Args, suite: &Path, folder: &Path) -> Vec<String> {
    let ginkgo = std::env::var("GINKGO").ok().filter(|_| args.procs > 1);
    let prefix = if ginkgo.is_some() { "--" } else { "--ginkgo." };
    // ginkgo needs a working folder other than the root.
    let mut words = vec!["env".to_owned(), format!("--chdir={}", folder.display())];
    words.extend(ginkgo.clone());
    let suite = suite.display().to_string();
    if ginkgo.is_none() {
        words.push(suite.clone());
    }
    words.extend([
        format!("{prefix}focus={}", args.focus()),
        format!("{prefix}skip={}", args.skip()),
        format!("{prefix}timeout={}m", args.minutes),
        format!("{prefix}no-color"),
    ]);
    if ginkgo.is_some() {
        let results =
            [format!("--output-dir={}", folder.display()), "--junit-report=junit_01.xml".to_owned()];
        words.extend([format!("--procs={}", args.procs), "--keep-going".to_owned()]);
        words.extend(results.into_iter().chain([suite, "--".to_owned()]));
    } else {
        words.push(format!("--ginkgo.junit-report={}", folder.join("junit_01.xml").display()));
    }
    let kubeconfig = format!("--kubeconfig={}", crate::cluster::ADMIN);
    words.extend([kubeconfig, "--provider=skeleton".to_owned(), "--allowed-not-ready-nodes=0".to_owned()]);
    words.push("--minStartupPods=0".to_owned());
    // A master without the taint's toleration runs no test pods.
    words.push("--non-blocking-taints=node-role.kubernetes.io/control-plane".to_owned());
    words.extend(args.suite_arg.iter().cloned());
    words
}

/// Returns the description of the product (instructions.md).
fn product(version: &str) -> String {
    let agent = agent_version();
    format!(
        "vendor: beelet\nname: beelet in the kubelet's place, on a kubeadm cluster\nversion: {agent}\n\
         website_url: https://beelet.dev\ndocumentation_url: https://beelet.dev/cluster-kubeadm.html\n\
         type: installer\ndescription: Kubernetes {version} by kubeadm, with beelet as the node agent of every node.\n"
    )
}

/// Returns the agent's version.
fn agent_version() -> String {
    let agent = beelet_tests::agent::binary().ok();
    let output = agent.and_then(|agent| Command::new(agent).arg("--version").output().ok());
    output.map_or_else(String::new, |output| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Returns the instructions for a repetition, with what this run was.
fn readme(version: &str, args: &Args, rows: &[Row], nodes: &str) -> String {
    let counts = ledger::counts(rows.iter());
    let (focus, skip) = (args.focus(), args.skip());
    // A time limit that ends the run cuts the tests that run then.
    let ended = !rows.is_empty() && rows.iter().all(|row| row.outcome != Outcome::Cut);
    let whole = if focus == r"\[Conformance\]" && skip.is_empty() && ended {
        "These are all conformance tests."
    } else {
        "These are not all conformance tests, so the files are no submission."
    };
    format!(
        "# Conformance of beelet on Kubernetes {version}\n\n\
         A kubeadm cluster whose every node, the control plane's too, runs beelet in the kubelet's place.\n\n\
         Result: {counts}. {whole}\n\n\
         Focus: `{focus}`; skipped: `{skip}`.\n\n```\n{nodes}\n```\n\n\
         ## Repeat it\n\n\
         Get the programs of the release (`kubernetes-server-linux-amd64.tar.gz`, `kubernetes-test-linux-amd64.tar.gz`, \
         etcd, containerd), name them as `cargo xtask cluster --help` says, and run:\n\n\
         ```\nE2E_TEST=./e2e.test cargo xtask conformance --cluster\n```\n\n\
         On machines: docs/cluster-kubeadm.md, then Hydrophone or Sonobuoy as on any cluster.\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_the_tests_is_not_called_a_submission() {
        let part = |focus: Option<&str>| Args {
            focus: focus.map(str::to_owned),
            skip: None,
            cluster: true,
            suite: super::super::Suite::Cluster,
            procs: 1,
            minutes: 60,
            suite_arg: Vec::new(),
            results: Vec::new(),
        };
        let row = |outcome| Row { test: "t".to_owned(), outcome, seconds: 1.0, reason: String::new() };
        let all = "These are all conformance tests.";
        let check = |focus, outcome, whole| {
            assert_eq!(readme("v1.36.2", &part(focus), &[row(outcome)], "").contains(all), whole);
        };
        check(None, Outcome::Pass, true);
        check(None, Outcome::Cut, false);
        check(Some("sig-apps"), Outcome::Pass, false);
        assert!(readme("v1.36.2", &part(None), &[], "").contains("no submission"));
        let words = words(&part(None), Path::new("/e2e.test"), Path::new("/out"));
        assert_eq!(words[..4], ["env", "--chdir=/out", "/e2e.test", r"--ginkgo.focus=\[Conformance\]"]);
        assert!(words.contains(&"--ginkgo.junit-report=/out/junit_01.xml".to_owned()));
    }
}
