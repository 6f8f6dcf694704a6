//! The server's certificate and its clients' CA: from files, which are read again after changes, or
//! self-signed and stored next to the kubelet's other keys.
//!
//! The handshake requests a client certificate without verifying it: authentication happens per request, as
//! in the kubelet. A client with a certificate of another CA gets an answer (401) instead of a broken
//! connection, and a certificate that expires during a long connection is rejected from then on.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use jiff::Timestamp;
use rcgen::{CertificateParams, DnType, ExtendedKeyUsagePurpose, KeyPair, KeyUsagePurpose};
use tokio::time::Instant;
use tokio_rustls::rustls::{
    self, DigitallySignedStruct, DistinguishedName, RootCertStore, ServerConfig, SignatureScheme,
    client::danger::HandshakeSignatureValid,
    crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature},
    pki_types::{CertificateDer, PrivateKeyDer, UnixTime, pem::PemObject},
    server::{
        WebPkiClientVerifier,
        danger::{ClientCertVerified, ClientCertVerifier},
    },
};
use tracing::{info, warn};
use x509_parser::prelude::{FromDer, X509Certificate};

use beelet_base::blocking::blocking;
use beelet_base::folder::{PRIVATE, make_folder};
use beelet_base::own_file;
use beelet_config::{Server, TlsFiles, TlsVersion};

use crate::metrics::Expiry;

/// Minimum interval between two checks of the files, made by the next connection.
const CHECK_PERIOD: Duration = Duration::from_secs(1);
/// Maximum bytes of a file with certificates or a key.
const FILE_MAX: u64 = 4 << 20;
/// Validity of a self-signed certificate, and the remaining validity at which it is renewed.
const VALID: jiff::SignedDuration = jiff::SignedDuration::from_hours(365 * 24);
const RENEW: jiff::SignedDuration = jiff::SignedDuration::from_hours(30 * 24);

/// Verifier of client certificates.
pub(crate) type Clients = Arc<dyn ClientCertVerifier>;

/// The current keys.
#[derive(Clone)]
pub(crate) struct Keys {
    /// TLS configuration of connections; None while the certificate is missing.
    pub(crate) server: Option<Arc<ServerConfig>>,
    /// Verifier of client certificates; None ignores certificates.
    pub(crate) clients: Option<Clients>,
}

/// Source and cache of the current keys.
pub(crate) struct Keyring {
    source: Source,
    loaded: Mutex<Loaded>,
    /// Exports the expiry of each new certificate.
    expiry: Expiry,
}

struct Source {
    files: TlsFiles,
    /// Name for a self-signed certificate; None if other processes own the files.
    own_name: Option<String>,
    /// True if the files may appear later.
    awaited: bool,
    client_ca: Option<PathBuf>,
    min_version: TlsVersion,
    suites: Vec<String>,
}

struct Loaded {
    keys: Keys,
    stamps: Vec<Option<Stamp>>,
    looked: Instant,
}

/// Values that change with a file: inode, size, and time of modification.
type Stamp = (u64, u64, i64, i64);

/// Rejects configured files that [`Keyring::open`] could not use; creates none.
pub(crate) fn check(config: &Server) -> Result<()> {
    match config.tls_files {
        // Configured files are only read.
        Some(_) => Keyring::open(config, Path::new(""), "", Expiry::default()).map(drop),
        None => config.client_ca_file.as_deref().map_or(Ok(()), |file| authority(file).map(drop)),
    }
}

impl Keyring {
    /// Reads the configured files, or else creates a certificate for `node` in `folder`. Blocking.
    ///
    /// # Errors
    /// A file is unreadable or invalid; the error names it.
    pub(crate) fn open(config: &Server, folder: &Path, node: &str, expiry: Expiry) -> Result<Self> {
        let awaited = config.tls_bootstrap && config.tls_files.is_none();
        let signed = folder.join("kubelet-server-current.pem");
        let own = if awaited {
            TlsFiles { certificate: signed.clone(), key: signed }
        } else {
            TlsFiles { certificate: folder.join("kubelet.crt"), key: folder.join("kubelet.key") }
        };
        let source = Source {
            own_name: (config.tls_files.is_none() && !awaited).then(|| node.to_owned()),
            awaited,
            files: config.tls_files.clone().unwrap_or(own),
            client_ca: config.client_ca_file.clone(),
            min_version: config.min_version,
            suites: config.cipher_suites.clone(),
        };
        let stamps = source.stamps();
        let keys = source.load()?;
        expiry.set(source.end());
        let loaded = Mutex::new(Loaded { keys, stamps, looked: Instant::now() });
        Ok(Self { source, loaded, expiry })
    }

    /// Returns the current keys.
    pub(crate) async fn newest(self: &Arc<Self>) -> Keys {
        if let Some(keys) = self.fresh() {
            return keys;
        }
        let ring = Arc::clone(self);
        blocking("reading the server's certificates", move || ring.reload()).await
    }

    /// Returns the keys if the files were checked recently.
    fn fresh(&self) -> Option<Keys> {
        let loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        (loaded.looked.elapsed() < CHECK_PERIOD).then(|| loaded.keys.clone())
    }

    /// Reads changed files. Unusable files change nothing.
    fn reload(&self) -> Keys {
        let stamps = self.source.stamps();
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        loaded.looked = Instant::now();
        if stamps == loaded.stamps && !self.source.is_ending() {
            return loaded.keys.clone();
        }
        match self.source.load() {
            Ok(keys) => {
                info!("reloaded the server's certificates");
                loaded.keys = keys;
                self.expiry.set(self.source.end());
            }
            Err(error) => warn!("cannot use the server's new certificates; keeping the old ones: {error:#}"),
        }
        // The load may have written a new self-signed certificate.
        loaded.stamps = if self.source.own_name.is_some() { self.source.stamps() } else { stamps };
        loaded.keys.clone()
    }
}

impl Source {
    fn stamps(&self) -> Vec<Option<Stamp>> {
        let files = [Some(&self.files.certificate), Some(&self.files.key), self.client_ca.as_ref()];
        let stamp = |path: &PathBuf| {
            let found = fs::metadata(path).ok()?;
            Some((found.ino(), found.size(), found.mtime(), found.mtime_nsec()))
        };
        files.into_iter().flatten().map(stamp).collect()
    }

    /// Returns true if a self-signed certificate needs renewal.
    fn is_ending(&self) -> bool {
        self.own_name.is_some() && self.end().is_none_or(|end| end < Timestamp::now() + RENEW)
    }

    /// Returns the expiry of the certificate in the file, or None without one.
    fn end(&self) -> Option<Timestamp> {
        let chain = certificates(&self.files.certificate).ok()?;
        let (_, parsed) = X509Certificate::from_der(chain.first()?).ok()?;
        Timestamp::from_second(parsed.validity().not_after.timestamp()).ok()
    }

    fn load(&self) -> Result<Keys> {
        let clients = self.client_ca.as_deref().map(authority).transpose()?;
        if let Some(name) = &self.own_name {
            let usable = !self.is_ending() && self.server(clients.as_ref()).is_ok();
            if !usable {
                self_sign(&self.files, name)?;
            }
        }
        if self.awaited && !self.files.certificate.exists() {
            return Ok(Keys { server: None, clients });
        }
        Ok(Keys { server: Some(Arc::new(self.server(clients.as_ref())?)), clients })
    }

    fn server(&self, clients: Option<&Clients>) -> Result<ServerConfig> {
        let chain = certificates(&self.files.certificate)?;
        let key = &self.files.key;
        let read_key = PrivateKeyDer::from_pem_slice(&read(key)?)
            .map_err(|error| anyhow::anyhow!("{}: no private key in PEM: {error}", key.display()))?;
        let provider = Arc::new(provider(&self.suites));
        let versions: &[&rustls::SupportedProtocolVersion] = match self.min_version {
            TlsVersion::Tls12 => &[&rustls::version::TLS13, &rustls::version::TLS12],
            TlsVersion::Tls13 => &[&rustls::version::TLS13],
        };
        let anybody = Anybody {
            provider: Arc::clone(&provider),
            hints: clients.map(|clients| clients.root_hint_subjects().to_vec()).unwrap_or_default(),
        };
        let mut server = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(versions)?
            .with_client_cert_verifier(Arc::new(anybody))
            .with_single_cert(chain, read_key)
            .with_context(|| {
                format!(
                    "the certificate {} and the key {} do not match",
                    self.files.certificate.display(),
                    key.display()
                )
            })?;
        // Streams of terminals and ports need connections of their own; one protocol version suffices for the
        // rest.
        server.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(server)
    }
}

/// Returns the cryptography provider with the configured suites. TLS 1.3's are always enabled, as in Go.
fn provider(suites: &[String]) -> CryptoProvider {
    let mut provider = ring::default_provider();
    if !suites.is_empty() {
        provider.cipher_suites.retain(|suite| {
            suite.tls13().is_some()
                || suite.suite().as_str().is_some_and(|name| suites.iter().any(|wanted| wanted == name))
        });
    }
    provider
}

fn read(path: &Path) -> Result<Vec<u8>> {
    let file = fs::File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    let mut bytes = Vec::new();
    file.take(FILE_MAX).read_to_end(&mut bytes).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(bytes)
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&read(path)?).collect();
    let all = all.map_err(|error| anyhow::anyhow!("{}: no certificates in PEM: {error}", path.display()))?;
    if all.is_empty() {
        bail!("{} has no certificate", path.display());
    }
    Ok(all)
}

/// Returns a verifier for client certificates of the CA in the file.
fn authority(path: &Path) -> Result<Clients> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path)? {
        roots.add(certificate).with_context(|| format!("{} has no usable CA certificate", path.display()))?;
    }
    let provider = Arc::new(ring::default_provider());
    WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
        .build()
        .with_context(|| format!("cannot use {}", path.display()))
}

/// Creates a key and a certificate for this node's server, as the kubelet does without configured files.
fn self_sign(files: &TlsFiles, node: &str) -> Result<()> {
    let now = Timestamp::now();
    let key = KeyPair::generate()?;
    let mut params = CertificateParams::new(vec![node.to_owned()])?;
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, format!("{node}@{}", now.as_second()));
    // Clocks may differ.
    params.not_before = std::time::SystemTime::from(now - jiff::SignedDuration::from_hours(1)).into();
    params.not_after = std::time::SystemTime::from(now + VALID).into();
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    let certificate = params.self_signed(&key)?;
    let folder = files.key.parent().unwrap_or(Path::new("/"));
    make_folder(folder, PRIVATE).map_err(anyhow::Error::msg)?;
    write(&files.key, 0o600, key.serialize_pem().as_bytes())?;
    write(&files.certificate, 0o644, certificate.pem().as_bytes())?;
    info!("made a self-signed certificate for the server on {}: {}", node, files.certificate.display());
    Ok(())
}

/// Replaces a file atomically.
fn write(path: &Path, mode: u32, bytes: &[u8]) -> Result<()> {
    let temporary = path.with_extension("new");
    let written = || {
        let mut file = own_file::own(&temporary)?;
        file.set_len(0)?;
        own_file::permit(&file, mode)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&temporary, path)
    };
    written().with_context(|| format!("cannot write {}", path.display()))
}

/// Accepts any client certificate, or none. The handshake verifies the client's possession of the key; each
/// request verifies the rest.
#[derive(Debug)]
struct Anybody {
    provider: Arc<CryptoProvider>,
    /// Subjects of accepted CAs, sent as hints.
    hints: Vec<DistinguishedName>,
}

impl ClientCertVerifier for Anybody {
    fn client_auth_mandatory(&self) -> bool {
        false
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &self.hints
    }

    fn verify_client_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn source(dir: &Path) -> Source {
        Source {
            files: TlsFiles { certificate: dir.join("pki/kubelet.crt"), key: dir.join("pki/kubelet.key") },
            own_name: Some("n1".to_owned()),
            awaited: false,
            client_ca: None,
            min_version: TlsVersion::Tls12,
            suites: Vec::new(),
        }
    }

    #[test]
    fn a_self_signed_certificate_is_made_once_and_again_when_its_key_is_lost() {
        let dir = tempfile::tempdir().unwrap();
        let source = source(dir.path());
        source.load().unwrap();
        let certificate = fs::read(&source.files.certificate).unwrap();
        assert_eq!(fs::metadata(&source.files.key).unwrap().permissions().mode() & 0o777, 0o600);
        source.load().unwrap();
        assert_eq!(fs::read(&source.files.certificate).unwrap(), certificate);
        fs::write(&source.files.key, "noise").unwrap();
        source.load().unwrap();
        assert_ne!(fs::read(&source.files.certificate).unwrap(), certificate);
    }

    #[test]
    fn a_certificate_near_its_end_is_replaced_by_a_new_one() {
        let dir = tempfile::tempdir().unwrap();
        let source = source(dir.path());
        source.load().unwrap();
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec!["n1".to_owned()]).unwrap();
        let soon = Timestamp::now() + RENEW - jiff::SignedDuration::from_hours(1);
        params.not_after = std::time::SystemTime::from(soon).into();
        write(&source.files.key, 0o600, key.serialize_pem().as_bytes()).unwrap();
        let ending = params.self_signed(&key).unwrap().pem();
        write(&source.files.certificate, 0o644, ending.as_bytes()).unwrap();
        assert!(source.is_ending());
        source.load().unwrap();
        assert!(!source.is_ending());
    }

    #[test]
    fn files_that_are_no_certificates_are_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("ca.crt");
        let check = |content: Option<&str>, part: &str| {
            let _ = content.map(|content| fs::write(&file, content).unwrap());
            let error = format!("{:#}", authority(&file).unwrap_err());
            assert!(error.contains("ca.crt") && error.contains(part), "{error}");
        };
        check(None, "cannot open");
        check(Some("noise"), "has no certificate");
        check(
            Some("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"),
            "no usable CA certificate",
        );
    }

    #[test]
    fn chosen_suites_are_the_only_ones_of_tls_1_2() {
        for name in beelet_config::CIPHER_SUITES {
            let chosen = provider(&[name.to_owned()]);
            let old: Vec<_> = chosen.cipher_suites.iter().filter(|suite| suite.tls13().is_none()).collect();
            assert_eq!(old.len(), 1, "{name}");
            assert!(chosen.cipher_suites.len() > 1);
        }
    }
}
