//! A TLS server with nobody's certificate, of no authority: what probes and hooks must put up with.

use std::sync::Arc;

use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

const CERTIFICATE: &[u8] = include_bytes!("server.pem");
const KEY: &[u8] = include_bytes!("server.key");

/// Accepts TLS connections with that certificate.
pub fn acceptor() -> TlsAcceptor {
    let certificate = CertificateDer::from_pem_slice(CERTIFICATE).unwrap();
    let settings = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate], PrivateKeyDer::from_pem_slice(KEY).unwrap())
        .unwrap();
    TlsAcceptor::from(Arc::new(settings))
}
