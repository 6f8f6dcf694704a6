//! The server's certificate, and the authority of its clients: from files, which are read again when they
//! change, or self-signed and kept beside the kubelet's other keys.
//!
//! A client's certificate is asked for and not judged in the handshake: who it names, and whether that is to
//! be believed, is decided per request, as by the kubelet. A client with a certificate of another authority
//! gets an answer (401) instead of a broken connection, and one that expires in the midst of a long
//! connection is refused from then on.

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

/// How often files are looked at again, at most: by the next connection.
const LOOK: Duration = Duration::from_secs(1);
/// Most bytes of a file with certificates or a key.
const FILE_MAX: u64 = 4 << 20;
/// How long a self-signed certificate is valid, and how long before its end there is a new one.
const VALID: jiff::SignedDuration = jiff::SignedDuration::from_hours(365 * 24);
const RENEW: jiff::SignedDuration = jiff::SignedDuration::from_hours(30 * 24);

/// Checks clients' certificates against an authority.
pub(crate) type Clients = Arc<dyn ClientCertVerifier>;

/// The newest keys.
#[derive(Clone)]
pub(crate) struct Keys {
    /// What connections are accepted with; None: the certificate is yet to come.
    pub(crate) server: Option<Arc<ServerConfig>>,
    /// What their clients are judged by; None: no certificate says anything.
    pub(crate) clients: Option<Clients>,
}

/// Where keys come from. Hands out the newest.
pub(crate) struct Keyring {
    source: Source,
    loaded: Mutex<Loaded>,
    /// Told of each new certificate.
    expiry: Expiry,
}

struct Source {
    files: TlsFiles,
    /// The name in a self-signed certificate; None: the files are somebody else's.
    own_name: Option<String>,
    /// The files may come later.
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

/// What tells that a file is another one, or has changed.
type Stamp = (u64, u64, i64, i64);

/// Refuses files that the configuration names and that [`Keyring::open`] could not use; makes none.
pub(crate) fn check(config: &Server) -> Result<()> {
    match config.tls_files {
        // Given ones are only read.
        Some(_) => Keyring::open(config, Path::new(""), "", Expiry::default()).map(drop),
        None => config.client_ca_file.as_deref().map_or(Ok(()), |file| authority(file).map(drop)),
    }
}

impl Keyring {
    /// Reads the files that the configuration names; without any, makes a certificate for `node` in `folder`.
    /// Blocking.
    ///
    /// # Errors
    /// A file can't be read or holds something else; the sentence says which.
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

    /// The keys to be used from now on.
    pub(crate) async fn newest(self: &Arc<Self>) -> Keys {
        if let Some(keys) = self.fresh() {
            return keys;
        }
        let ring = Arc::clone(self);
        blocking("reading the server's certificates", move || ring.look()).await
    }

    /// The keys, where the files were looked at a moment ago.
    fn fresh(&self) -> Option<Keys> {
        let loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        (loaded.looked.elapsed() < LOOK).then(|| loaded.keys.clone())
    }

    /// Reads files that have changed. Those that can't be used change nothing.
    fn look(&self) -> Keys {
        let stamps = self.source.stamps();
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        loaded.looked = Instant::now();
        if stamps == loaded.stamps && !self.source.is_ending() {
            return loaded.keys.clone();
        }
        match self.source.load() {
            Ok(keys) => {
                info!("the server's certificates were read again");
                loaded.keys = keys;
                self.expiry.set(self.source.end());
            }
            Err(error) => warn!("the server's new certificates can't be used, the old ones stay: {error:#}"),
        }
        // Its own certificate may just have been written.
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

    /// A self-signed certificate ends soon.
    fn is_ending(&self) -> bool {
        self.own_name.is_some() && self.end().is_none_or(|end| end < Timestamp::now() + RENEW)
    }

    /// When the certificate in the file ends; None where there is none.
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
                format!("{} and {} are no pair", self.files.certificate.display(), key.display())
            })?;
        // A terminal's or a port's bytes need a connection of their own; for the rest one version is enough.
        server.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(server)
    }
}

/// The cryptography with the suites that were chosen. TLS 1.3's are always there, as in Go.
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
    let file = fs::File::open(path).with_context(|| format!("{} can't be opened", path.display()))?;
    let mut bytes = Vec::new();
    file.take(FILE_MAX)
        .read_to_end(&mut bytes)
        .with_context(|| format!("{} can't be read", path.display()))?;
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

/// What checks that a client's certificate is of the authority in the file.
fn authority(path: &Path) -> Result<Clients> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path)? {
        roots.add(certificate).with_context(|| format!("{} has no usable authority", path.display()))?;
    }
    let provider = Arc::new(ring::default_provider());
    WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
        .build()
        .with_context(|| format!("{} can't be used", path.display()))
}

/// Makes a key and a certificate for the server of the node of this name, as the kubelet does where it is
/// given none.
fn self_sign(files: &TlsFiles, node: &str) -> Result<()> {
    let now = Timestamp::now();
    let key = KeyPair::generate()?;
    let mut params = CertificateParams::new(vec![node.to_owned()])?;
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, format!("{node}@{}", now.as_second()));
    // Clocks differ.
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

/// Replaces a file at once: a reader sees the old one or the new one.
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
    written().with_context(|| format!("{} can't be written", path.display()))
}

/// Takes any client's certificate, or none. That the client holds its key is checked; the rest is for each
/// request.
#[derive(Debug)]
struct Anybody {
    provider: Arc<CryptoProvider>,
    /// The authorities whose certificates make sense.
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
        check(None, "can't be opened");
        check(Some("noise"), "has no certificate");
        check(Some("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"), "no usable authority");
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
