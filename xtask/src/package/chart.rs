//! The Helm chart, made of the DaemonSet in packaging/kubernetes, so that the two cannot differ: the values
//! replace texts of that file.

use super::{archive, version};
use anyhow::{Context as _, Result, bail};
use beelet_tests_base::{images::Entry, workdir};
use std::path::{Path, PathBuf};

/// Texts of the DaemonSet's file, and the chart's text for each.
const VALUES: &[(&str, &str)] = &[
    ("namespace: beelet\n", "namespace: {{ .Release.Namespace }}\n"),
    ("imagePullPolicy: IfNotPresent", "imagePullPolicy: {{ .Values.image.pullPolicy }}"),
    (
        "--runtime-endpoint=unix:///run/containerd/containerd.sock",
        "--runtime-endpoint=unix://{{ .Values.runtimeSocket }}",
    ),
    ("mountPath: /run/containerd/containerd.sock", "mountPath: {{ .Values.runtimeSocket }}"),
    (
        "hostPath: {path: /run/containerd/containerd.sock, type: Socket}",
        "hostPath: {path: {{ .Values.runtimeSocket | quote }}, type: Socket}",
    ),
    ("requests: {cpu: 20m, memory: 48Mi}", "requests: {{ toJson .Values.resources.requests }}"),
    ("limits: {memory: 256Mi}", "limits: {{ toJson .Values.resources.limits }}"),
];

const DEFAULTS: &str = "\
# The image with the beelet program alone. An empty tag is the chart's version.
image:
  repository: localhost/beelet
  tag: \"\"
  pullPolicy: IfNotPresent
# The container runtime's socket on the nodes.
runtimeSocket: /run/containerd/containerd.sock
resources:
  requests: {cpu: 20m, memory: 48Mi}
  limits: {memory: 256Mi}
";

/// Makes the chart in the folder `out`; all its times are `seconds` since 1970.
pub(super) fn build(out: &Path, seconds: u64) -> Result<PathBuf> {
    let path = out.join(format!("beelet-{}.tgz", version()));
    let daemon_set = workdir::read(&workdir::repository().join("packaging/kubernetes/observe.yaml"))?;
    let license = workdir::read(&workdir::repository().join("LICENSE"))?;
    let files = [
        ("Chart.yaml", description()),
        ("LICENSE", license),
        ("templates/daemonset.yaml", template(&daemon_set, version())?),
        ("values.yaml", DEFAULTS.to_owned()),
    ];
    let files: Vec<_> =
        files.map(|(name, text)| (format!("beelet/{name}"), Entry::File(text.into_bytes(), 0o644))).into();
    archive::write(&files, &path, seconds)?;
    Ok(path)
}

fn description() -> String {
    let version = version();
    format!(
        "apiVersion: v2\nname: beelet\ntype: application\nversion: {version}\nappVersion: \"{version}\"\n\
         description: beelet observe on every node measures the pods of its kubelet and changes nothing\n\
         home: https://beelet.dev\nkubeVersion: \">=1.25.0-0\"\n"
    )
}

/// Returns the chart's template. The chart does not create its namespace: Helm does (`--create-namespace`).
fn template(file: &str, version: &str) -> Result<String> {
    let (_, set) = file.split_once("\n---\n").context("observe.yaml has no second document")?;
    let mut text = set.to_owned();
    let image = format!("image: localhost/beelet:{version}\n");
    let own =
        "image: \"{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}\"\n";
    for (old, new) in VALUES.iter().copied().chain([(image.as_str(), own)]) {
        if !text.contains(old) {
            bail!("packaging/kubernetes/observe.yaml lacks `{}`, which the chart replaces", old.trim());
        }
        text = text.replace(old, new);
    }
    Ok(format!(
        "# The namespace must permit hostPath and hostPID: pod-security.kubernetes.io/enforce: privileged\n{text}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_template_has_every_value_and_no_other_text_of_the_file() {
        let file = workdir::read(&workdir::repository().join("packaging/kubernetes/observe.yaml")).unwrap();
        let template = template(&file, version()).unwrap();
        for value in
            ["image.repository", "image.tag", "image.pullPolicy", "runtimeSocket", "resources.limits"]
        {
            assert!(template.contains(&format!(".Values.{value}")), "{value}");
        }
        assert!(!template.contains("containerd.sock") && !template.contains("kind: Namespace"), "{template}");
        let error =
            super::template(&file.replace("requests:", "request:"), version()).unwrap_err().to_string();
        assert!(error.contains("lacks `requests: {cpu"), "{error}");
    }
}
