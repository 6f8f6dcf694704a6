//! TLS server with a self-signed version 1 X.509 certificate: probes and hooks must accept it.

use std::sync::Arc;

use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::sign::{CertifiedKey, SingleCertAndKey};

const CERTIFICATE: &[u8] = include_bytes!("server.pem");
const KEY: &[u8] = include_bytes!("server.key");

/// Accepts TLS connections with that certificate.
pub fn acceptor() -> TlsAcceptor {
    let certificate = CertificateDer::from_pem_slice(CERTIFICATE).unwrap();
    let key = ring::sign::any_supported_type(&PrivateKeyDer::from_pem_slice(KEY).unwrap()).unwrap();
    // The certificate is not validated: this side would refuse it.
    let key = SingleCertAndKey::from(CertifiedKey::new(vec![certificate], key));
    let settings = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(key));
    TlsAcceptor::from(Arc::new(settings))
}
