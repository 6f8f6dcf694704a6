//! Test of the node's serving certificate from the cluster's signer.

use std::sync::Arc;
use std::time::Duration;

use beelet_tests::apiserver::{FakeApi, Verb};
use beelet_tests::cri::PATIENCE;
use beelet_tests::{ports, require};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use super::scene::Member;

const REQUESTS: &str = "/apis/certificates.k8s.io/v1/certificatesigningrequests";

/// Returns the certificate of the server on this port for a client that trusts the authority and verifies
/// the node's address; `None` if the client rejects the certificate.
async fn shown(port: u16, authority: &str) -> Option<Vec<u8>> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(authority.as_bytes()).unwrap()).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let stream = TcpStream::connect(("127.0.0.1", port)).await.ok()?;
    let name = ServerName::try_from("192.0.2.7").unwrap();
    let tls = TlsConnector::from(Arc::new(config)).connect(name, stream).await.ok()?;
    Some(tls.get_ref().1.peer_certificates()?.first()?.to_vec())
}

async fn until_shown(port: u16, authority: &str, wanted: impl Fn(&[u8]) -> bool) -> Vec<u8> {
    let polling = async {
        loop {
            if let Some(found) = shown(port, authority).await.filter(|found| wanted(found)) {
                return found;
            }
            // The server checks its files once per second.
            sleep(Duration::from_millis(200)).await;
        }
    };
    timeout(PATIENCE, polling).await.unwrap()
}

#[tokio::test]
async fn the_server_uses_the_certificates_of_the_clusters_signer_and_their_successors() {
    require!(root);
    let api = FakeApi::start();
    // The certificates are so short-lived that the agent renews each at once.
    api.sign_certificates(Duration::from_secs(30));
    let [port] = ports::free().unwrap();
    let member = Member::start(api, |options| {
        options.kubelet("serverTLSBootstrap", true).kubelet("port", port).kubelet("address", "127.0.0.1")
    })
    .await;
    let asked = member.until_done(0, Verb::Create, REQUESTS).await;
    let spec = &asked.body["spec"];
    assert_eq!(spec["signerName"], "kubernetes.io/kubelet-serving");
    assert_eq!(spec["usages"], serde_json::json!(["digital signature", "server auth"]));
    let authority = member.api.authority().unwrap();
    let first = until_shown(port, &authority, |_| true).await;
    until_shown(port, &authority, |found| found != first).await;
}
