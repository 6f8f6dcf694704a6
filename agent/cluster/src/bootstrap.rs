//! Creates the node's kubeconfig from a bootstrap kubeconfig, as the kubelet's `bootstrap.LoadClientCert`
//! does. The bootstrap identity may only request the node's certificate.

use std::path::Path;

use beelet_base::blocking::blocking;
use beelet_state::ForeignFile;
use kube::config::{Cluster, Kubeconfig};
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::{
    certificate::{self, Addresses, Store},
    client::Client,
    identity::Options,
    kubeconfig,
};

/// Cause of a failed bootstrap.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("{0}")]
    Kubeconfig(#[from] kubeconfig::Error),
    #[error("{0}")]
    Certificate(#[from] certificate::Error),
    #[error("cannot write the kubeconfig: {0}")]
    Write(String),
}

/// Returns a client with the bootstrap identity.
pub(crate) async fn client(bootstrap: &Path, options: &Options) -> Result<Client, kubeconfig::Error> {
    let (path, requests) = (bootstrap.to_owned(), options.requests.clone());
    let made = blocking("the bootstrap kubeconfig", move || kubeconfig::client(&path, &requests)).await?;
    Ok(Client::new(watch::channel(made).1))
}

/// Requests a certificate, waits until it is issued, and writes a kubeconfig that points to the certificate.
pub(crate) async fn run(bootstrap: &Path, options: &Options) -> Result<(), Error> {
    let client = client(bootstrap, options).await?;
    let store = Store::new(options.cert_dir.clone());
    store.renew(&client, &options.node_name, &Addresses::default()).await?;
    let (bootstrap, target, current) = (bootstrap.to_owned(), options.kubeconfig.clone(), store.current());
    blocking("the kubeconfig", move || write(&bootstrap, &target, &current)).await
}

fn write(bootstrap: &Path, target: &Path, certificate: &Path) -> Result<(), Error> {
    let fail = |cause: &dyn std::fmt::Display| Error::Write(format!("{}: {cause}", target.display()));
    let read = Kubeconfig::read_from(bootstrap).map_err(|error| fail(&error))?;
    let context = read
        .current_context
        .as_ref()
        .and_then(|name| read.contexts.iter().find(|context| context.name == *name)?.context.as_ref());
    let cluster = context.and_then(|context| {
        read.clusters.iter().find(|cluster| cluster.name == context.cluster)?.cluster.as_ref()
    });
    let cluster = cluster.ok_or_else(|| fail(&"the bootstrap kubeconfig has no current context"))?;
    let text = beelet_codec::yaml(&node_kubeconfig(cluster, certificate)).map_err(|error| fail(&error))?;
    let file = ForeignFile::of_node(target.to_owned());
    file.replace(text.as_bytes()).map_err(|error| fail(&error))?;
    file.settle().map_err(|error| fail(&error))
}

/// Returns the node's kubeconfig with the kubelet's names (`writeKubeconfigFromBootstrapping`).
fn node_kubeconfig(cluster: &Cluster, certificate: &Path) -> Value {
    let mut server = json!({ "server": cluster.server });
    if let Some(data) = &cluster.certificate_authority_data {
        server["certificate-authority-data"] = json!(data);
    } else if let Some(path) = &cluster.certificate_authority {
        server["certificate-authority"] = json!(path);
    }
    if let Some(name) = &cluster.tls_server_name {
        server["tls-server-name"] = json!(name);
    }
    if let Some(skip) = cluster.insecure_skip_tls_verify {
        server["insecure-skip-tls-verify"] = json!(skip);
    }
    json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{ "name": "default-cluster", "cluster": server }],
        "contexts": [{
            "name": "default-context",
            "context": { "cluster": "default-cluster", "namespace": "default", "user": "default-auth" },
        }],
        "current-context": "default-context",
        "users": [{
            "name": "default-auth",
            "user": { "client-certificate": certificate, "client-key": certificate },
        }],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nodes_kubeconfig_has_the_bootstrap_ones_cluster_and_its_own_certificate() {
        let dir = tempfile::tempdir().unwrap();
        let (from, to) = (dir.path().join("bootstrap"), dir.path().join("etc/kubelet.conf"));
        std::fs::write(
            &from,
            "apiVersion: v1\nkind: Config\ncurrent-context: c\ncontexts: [{name: c, context: {cluster: k, user: u}}]\n\
             clusters: [{name: k, cluster: {server: 'https://127.0.0.1:6443', certificate-authority-data: QUJD}}]\n\
             users: [{name: u, user: {token: abcdef.0123456789abcdef}}]\n",
        )
        .unwrap();
        write(&from, &to, Path::new("/pki/kubelet-client-current.pem")).unwrap();
        let text = std::fs::read_to_string(&to).unwrap();
        assert!(!text.contains("abcdef"), "{text}");
        let read = Kubeconfig::from_yaml(&text).unwrap();
        let user = read.auth_infos[0].auth_info.as_ref().unwrap();
        assert_eq!(user.client_certificate.as_deref(), Some("/pki/kubelet-client-current.pem"));
        let cluster = read.clusters[0].cluster.as_ref().unwrap();
        assert_eq!(cluster.certificate_authority_data.as_deref(), Some("QUJD"));
        assert_eq!(read.current_context.as_deref(), Some("default-context"));
    }
}
