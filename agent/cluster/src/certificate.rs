//! The node's client and serving certificates: requests, files, lifetimes.
//!
//! Files and names are the kubelet's (`certificate.FileStore`): `kubelet-client-TIME.pem` holds a certificate
//! and its key, and `kubelet-client-current.pem` points to the certificate in use, so a kubelet that replaces
//! the agent on this node can use that certificate.

use std::{
    collections::BTreeSet,
    fs, io,
    net::IpAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use beelet_base::folder::make_folder;
use beelet_codec::ApiType;
use beelet_state::ForeignFile;
use jiff::Timestamp;
use k8s_openapi::{
    ByteString,
    api::certificates::v1::{CertificateSigningRequest, CertificateSigningRequestSpec},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair, PublicKeyData, SanType};
use sha2::{Digest, Sha256};
use tokio::time::{Instant, sleep};
use x509_parser::{certificate::X509Certificate, extensions::GeneralName, pem::Pem};

use crate::client::{self, Client};

/// The collection of certificate requests.
const REQUESTS: &str = "/apis/certificates.k8s.io/v1/certificatesigningrequests";
/// Maximum wait for the approval of a request before the next one.
const PATIENCE: Duration = Duration::from_secs(900);
/// Interval of polls of a pending request.
const CHECK_PERIOD: Duration = Duration::from_secs(2);
/// Number of previous certificates that are kept.
const KEPT: usize = 3;
/// Mode of the folder, which contains keys.
const FOLDER: u32 = 0o700;

/// Cause of a failed request.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file can't be read or written.
    #[error("{path}: {cause}", path = .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The cause.
        cause: String,
    },
    /// The API server rejected the request or did not answer.
    #[error("{0}")]
    Api(#[from] client::Error),
    /// The request was denied or failed.
    #[error("certificate request {name} was refused ({reason}): {message}")]
    Refused {
        /// The request's name.
        name: String,
        /// Reason, a single word.
        reason: String,
        /// Message, a sentence.
        message: String,
    },
    /// The request was not approved in time.
    #[error(
        "certificate request {name} was not approved within {} s; check `kubectl get csr` and the controller manager, or run \
         `kubectl certificate approve {name}`",
        PATIENCE.as_secs()
    )]
    Unanswered {
        /// The request's name.
        name: String,
    },
    /// The issued certificate does not match the key, or is not a certificate.
    #[error("cannot use the certificate of request {name}: {cause}")]
    Unusable {
        /// The request's name.
        name: String,
        /// The cause.
        cause: String,
    },
}

/// Purpose of a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    Client,
    Serving,
}

impl Purpose {
    /// Returns the prefix of file names.
    fn prefix(self) -> &'static str {
        match self {
            Self::Client => "kubelet-client",
            Self::Serving => "kubelet-server",
        }
    }

    /// Returns the prefix of request names.
    fn request(self) -> &'static str {
        match self {
            Self::Client => "node-csr",
            Self::Serving => "csr",
        }
    }

    fn signer(self) -> &'static str {
        match self {
            Self::Client => "kubernetes.io/kube-apiserver-client-kubelet",
            Self::Serving => "kubernetes.io/kubelet-serving",
        }
    }

    /// Returns the key usages to request. Older signers of client certificates demand all three, newer ones
    /// accept them. The serving certificate omits key encipherment: an elliptic-curve key can't encipher
    /// keys.
    fn usages(self) -> &'static [&'static str] {
        match self {
            Self::Client => &["digital signature", "key encipherment", "client auth"],
            Self::Serving => &["digital signature", "server auth"],
        }
    }

    /// Returns the name of the link to the certificate in use.
    fn current(self) -> String {
        format!("{}-current.pem", self.prefix())
    }

    /// Returns the file name of a pending request's key. A restarted agent continues this request.
    fn pending(self) -> String {
        format!("{}.key.tmp", self.prefix())
    }
}

/// Subject alternative names of a certificate.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Addresses {
    /// DNS names.
    pub names: BTreeSet<String>,
    /// IP addresses.
    pub ips: BTreeSet<IpAddr>,
}

impl Addresses {
    fn of(certificate: &X509Certificate<'_>) -> Self {
        let mut found = Self::default();
        let extension = certificate.subject_alternative_name().ok().flatten();
        for name in extension.iter().flat_map(|extension| &extension.value.general_names) {
            match name {
                GeneralName::DNSName(name) => drop(found.names.insert((*name).to_owned())),
                GeneralName::IPAddress(bytes) => {
                    let v4 = <[u8; 4]>::try_from(*bytes).map(IpAddr::from);
                    let ip = v4.or_else(|_| <[u8; 16]>::try_from(*bytes).map(IpAddr::from));
                    found.ips.extend(ip);
                }
                _ => {}
            }
        }
        found
    }
}

/// A PEM text without a readable certificate.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PemError {
    /// The text has no certificate.
    #[error("the file has no certificate")]
    NoCertificate,
    /// The certificate can't be parsed.
    #[error("{0}")]
    Unreadable(String),
}

/// Validity period of a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lifetime {
    /// `notBefore` of the certificate.
    pub from: Timestamp,
    /// `notAfter` of the certificate.
    pub until: Timestamp,
}

impl Lifetime {
    /// Returns the lifetime of the first certificate in a PEM text.
    ///
    /// # Errors
    /// The text has no readable certificate.
    pub fn of(pem: &[u8]) -> Result<Self, PemError> {
        Ok(first(pem)?.lifetime)
    }

    /// Returns true if the certificate is valid at `now`.
    #[must_use]
    pub fn covers(self, now: Timestamp) -> bool {
        self.from <= now && now < self.until
    }

    /// Returns the time of the rotation: after this part of the lifetime (0.7 to 0.9, as in the kubelet's
    /// `nextRotationDeadline`).
    #[must_use]
    pub fn rotation(self, part: f64) -> Timestamp {
        let whole: Duration = self.until.duration_since(self.from).try_into().unwrap_or_default();
        self.from.checked_add(whole.mul_f64(part)).unwrap_or(self.until)
    }
}

/// The parsed parts of a certificate.
struct Read {
    lifetime: Lifetime,
    public_key: Vec<u8>,
    addresses: Addresses,
}

/// Parses the first certificate of a PEM text.
fn first(pem: &[u8]) -> Result<Read, PemError> {
    let mut blocks = Pem::iter_from_buffer(pem);
    let found = blocks.find_map(|block| block.ok().filter(|block| block.label == "CERTIFICATE"));
    let found = found.ok_or(PemError::NoCertificate)?;
    let certificate = found.parse_x509().map_err(|error| PemError::Unreadable(error.to_string()))?;
    let time = |at: i64| Timestamp::from_second(at).unwrap_or(Timestamp::MAX);
    let validity = certificate.validity();
    let lifetime =
        Lifetime { from: time(validity.not_before.timestamp()), until: time(validity.not_after.timestamp()) };
    let public_key = certificate.public_key().raw.to_vec();
    Ok(Read { lifetime, public_key, addresses: Addresses::of(&certificate) })
}

/// Folder with the certificates of one purpose.
#[derive(Clone, Debug)]
pub struct Store {
    dir: PathBuf,
    purpose: Purpose,
}

impl Store {
    /// Creates a store of client certificates in `dir`, without touching the folder.
    #[must_use]
    pub fn new(dir: PathBuf) -> Self {
        Self { dir, purpose: Purpose::Client }
    }

    /// Creates a store of serving certificates in `dir`, without touching the folder.
    #[must_use]
    pub fn serving(dir: PathBuf) -> Self {
        Self { dir, purpose: Purpose::Serving }
    }

    /// Returns the lifetime and the names of the certificate in use, if readable. Blocking.
    #[must_use]
    pub fn in_use(&self) -> Option<(Lifetime, Addresses)> {
        let read = first(&fs::read(self.current()).ok()?).ok()?;
        Some((read.lifetime, read.addresses))
    }

    /// Returns the path of the link to the certificate in use.
    #[must_use]
    pub fn current(&self) -> PathBuf {
        self.dir.join(self.purpose.current())
    }

    /// Stores a certificate with its key and points the link to it. Blocking.
    pub(crate) fn install(&self, certificate: &str, key: &str, now: Timestamp) -> Result<(), Error> {
        let fail = |path: &Path, cause: &dyn std::fmt::Display| Error::File {
            path: path.to_owned(),
            cause: cause.to_string(),
        };
        make_folder(&self.dir, FOLDER).map_err(|error| fail(&self.dir, &error))?;
        let name = format!("{}-{}.pem", self.purpose.prefix(), now.strftime("%Y-%m-%d-%H-%M-%S"));
        let path = self.dir.join(&name);
        let file = ForeignFile::of_node(path.clone());
        let text = format!("{}\n{}\n", certificate.trim_end(), key.trim_end());
        file.replace(text.as_bytes()).map_err(|error| fail(&path, &error))?;
        file.settle().map_err(|error| fail(&path, &error))?;
        let (link, fresh) = (self.current(), self.dir.join(format!("{}.tmp", self.purpose.current())));
        let point = || -> io::Result<()> {
            match fs::remove_file(&fresh) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            std::os::unix::fs::symlink(&path, &fresh)?;
            fs::rename(&fresh, &link)
        };
        point().map_err(|error| fail(&link, &error))?;
        // A crash that loses the link also undoes the removals below.
        self.forget_pending();
        self.sweep(&name);
        Ok(())
    }

    /// Removes old certificates, on a best-effort basis: leaving one behind is harmless.
    fn sweep(&self, newest: &str) {
        let Ok(entries) = fs::read_dir(&self.dir) else { return };
        // The link's name has no digit there.
        let prefix = format!("{}-2", self.purpose.prefix());
        let mut old: Vec<_> = entries
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .filter(|name| name != newest && name.starts_with(&prefix) && name.ends_with(".pem"))
            .collect();
        old.sort_unstable();
        for name in old.iter().rev().skip(KEPT) {
            let _ = fs::remove_file(self.dir.join(name));
        }
    }

    /// Returns the key of the pending request, or generates and stores a key. Blocking.
    fn pending(&self) -> Result<KeyPair, Error> {
        let path = self.dir.join(self.purpose.pending());
        let fail =
            |cause: &dyn std::fmt::Display| Error::File { path: path.clone(), cause: cause.to_string() };
        make_folder(&self.dir, FOLDER).map_err(|error| fail(&error))?;
        let file = ForeignFile::of_node(path.clone());
        let known = file.read().map_err(|error| fail(&error))?;
        let known = known.and_then(|text: Vec<u8>| KeyPair::from_pem(std::str::from_utf8(&text).ok()?).ok());
        if let Some(key) = known {
            return Ok(key);
        }
        let key = KeyPair::generate().map_err(|error| fail(&error))?;
        file.replace(key.serialize_pem().as_bytes()).map_err(|error| fail(&error))?;
        Ok(key)
    }

    /// Removes the pending key, so that the next request uses a new one. Blocking.
    fn forget_pending(&self) {
        let _ = fs::remove_file(self.dir.join(self.purpose.pending()));
    }

    /// Requests a certificate for these addresses, waits for the signature, and installs the certificate.
    ///
    /// # Errors
    /// See [`Error`]. A repeated call continues to wait for the same request, unless that was refused.
    pub async fn renew(
        &self,
        client: &Client,
        node_name: &str,
        addresses: &Addresses,
    ) -> Result<Lifetime, Error> {
        let store = self.clone();
        let key = beelet_base::blocking::blocking("a key", move || store.pending()).await?;
        let name = request_name(self.purpose, &key);
        let signed = match request(self.purpose, &name, node_name, addresses, &key) {
            Ok(request) => ask(client, &name, &request, &key).await,
            Err(error) => Err(Error::Unusable { name: name.clone(), cause: error.to_string() }),
        };
        if matches!(signed, Err(Error::Refused { .. } | Error::Unanswered { .. } | Error::Unusable { .. })) {
            self.forget_pending();
        }
        let certificate = signed?;
        let lifetime = first(certificate.as_bytes())
            .map_err(|cause| Error::Unusable { name, cause: cause.to_string() })?
            .lifetime;
        let (store, key) = (self.clone(), key.serialize_pem());
        let install = move || store.install(&certificate, &key, Timestamp::now());
        beelet_base::blocking::blocking("a certificate", install).await?;
        Ok(lifetime)
    }
}

/// Returns a name derived from the key, so that a restarted agent finds its request.
fn request_name(purpose: Purpose, key: &KeyPair) -> String {
    let digest = Sha256::digest(key.subject_public_key_info());
    let hex: String = digest.iter().take(20).map(|byte| format!("{byte:02x}")).collect();
    format!("{}-{hex}", purpose.request())
}

fn request(
    purpose: Purpose,
    name: &str,
    node_name: &str,
    addresses: &Addresses,
    key: &KeyPair,
) -> Result<CertificateSigningRequest, rcgen::Error> {
    let mut params = CertificateParams::new(addresses.names.iter().cloned().collect::<Vec<_>>())?;
    params.subject_alt_names.extend(addresses.ips.iter().copied().map(SanType::IpAddress));
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::OrganizationName, "system:nodes");
    params.distinguished_name.push(DnType::CommonName, format!("system:node:{node_name}"));
    let text = params.serialize_request(key)?.pem()?;
    Ok(CertificateSigningRequest {
        metadata: ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() },
        spec: CertificateSigningRequestSpec {
            request: ByteString(text.into_bytes()),
            signer_name: purpose.signer().to_owned(),
            usages: Some(purpose.usages().iter().map(|usage| (*usage).to_owned()).collect()),
            ..CertificateSigningRequestSpec::default()
        },
        status: None,
    })
}

/// Creates the request unless it exists, and returns the signed certificate as PEM.
async fn ask(
    client: &Client,
    name: &str,
    request: &CertificateSigningRequest,
    key: &KeyPair,
) -> Result<String, Error> {
    let unusable = |cause: String| Error::Unusable { name: name.to_owned(), cause };
    match client.create(REQUESTS, &request.to_value()).await {
        // An earlier attempt created the request.
        Err(error) if !error.is_conflict() => return Err(error.into()),
        _ => {}
    }
    let path = format!("{REQUESTS}/{name}");
    let since = Instant::now();
    loop {
        let found = CertificateSigningRequest::from_value(&client.get(&path).await?)
            .map_err(|problem| client::Error::unreachable(&path, &problem))?;
        let status = found.status.unwrap_or_default();
        for condition in status.conditions.unwrap_or_default() {
            if matches!(condition.type_.as_str(), "Denied" | "Failed") {
                return Err(Error::Refused {
                    name: name.to_owned(),
                    reason: condition.reason.unwrap_or(condition.type_),
                    message: condition.message.unwrap_or_default(),
                });
            }
        }
        if let Some(ByteString(signed)) = status.certificate.filter(|signed| !signed.0.is_empty()) {
            let public = first(&signed).map_err(|cause| unusable(cause.to_string()))?.public_key;
            if public != key.subject_public_key_info() {
                return Err(unusable("the certificate is for another key".to_owned()));
            }
            return String::from_utf8(signed).map_err(|error| unusable(error.to_string()));
        }
        if since.elapsed() >= PATIENCE {
            return Err(Error::Unanswered { name: name.to_owned() });
        }
        sleep(CHECK_PERIOD).await;
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::certificates::v1::{
        CertificateSigningRequestCondition, CertificateSigningRequestStatus,
    };
    use rcgen::{CertificateSigningRequestParams, Issuer};

    use super::*;
    use crate::testing::Server;

    /// Sets the status of the only request.
    fn answer(
        server: &Server,
        status: impl Fn(&CertificateSigningRequest) -> CertificateSigningRequestStatus,
    ) {
        let path = server.paths().into_iter().find(|path| path.starts_with(REQUESTS)).unwrap();
        let mut found = CertificateSigningRequest::from_value(&server.object(&path).unwrap()).unwrap();
        found.status = Some(status(&found));
        server.set(&path, found.to_value());
    }

    fn signed(request: &CertificateSigningRequest) -> CertificateSigningRequestStatus {
        let key = KeyPair::generate().unwrap();
        let issuer = Issuer::new(CertificateParams::default(), key);
        let text = std::str::from_utf8(&request.spec.request.0).unwrap();
        let mut params = CertificateSigningRequestParams::from_pem(text).unwrap();
        params.params.not_before = rcgen::date_time_ymd(2026, 1, 1);
        params.params.not_after = rcgen::date_time_ymd(2027, 1, 1);
        let certificate = params.signed_by(&issuer).unwrap().pem();
        CertificateSigningRequestStatus {
            certificate: Some(ByteString(certificate.into_bytes())),
            ..CertificateSigningRequestStatus::default()
        }
    }

    fn asking(server: &Server, dir: &Path) -> tokio::task::JoinHandle<Result<Lifetime, Error>> {
        let (store, client) = (Store::new(dir.join("pki")), server.client());
        tokio::spawn(async move { store.renew(&client, "n1", &Addresses::default()).await })
    }

    async fn asked(server: &Server) {
        server.until(|requests| requests.iter().any(|request| request.starts_with("GET"))).await;
    }

    #[tokio::test]
    async fn a_certificate_is_asked_for_once_and_put_in_use() {
        use std::os::unix::fs::PermissionsExt;
        let (server, dir) = (Server::default(), tempfile::tempdir().unwrap());
        let first_try = asking(&server, dir.path());
        asked(&server).await;
        // A restarted agent uses the same request.
        first_try.abort();
        let second_try = asking(&server, dir.path());
        answer(&server, signed);
        let lifetime = second_try.await.unwrap().unwrap();
        assert_eq!(server.paths().len(), 1);
        assert_eq!(lifetime.until.to_string(), "2027-01-01T00:00:00Z");
        let store = Store::new(dir.path().join("pki"));
        let text = fs::read(store.current()).unwrap();
        assert_eq!(Lifetime::of(&text), Ok(lifetime));
        assert!(
            KeyPair::from_pem(
                std::str::from_utf8(&text)
                    .unwrap()
                    .split_once("-----BEGIN PRIVATE")
                    .map(|(_, key)| format!("-----BEGIN PRIVATE{key}"))
                    .unwrap()
                    .as_str()
            )
            .is_ok()
        );
        assert_eq!(fs::metadata(store.current()).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::metadata(dir.path().join("pki")).unwrap().permissions().mode() & 0o777, 0o700);
        assert!(!dir.path().join("pki/kubelet-client.key.tmp").exists());
    }

    #[tokio::test]
    async fn a_serving_certificate_is_asked_for_by_its_addresses_of_its_own_signer() {
        let (server, dir) = (Server::default(), tempfile::tempdir().unwrap());
        let addresses = Addresses {
            names: ["n1".to_owned()].into(),
            ips: ["192.0.2.7", "2001:db8::7"].map(|ip| ip.parse().unwrap()).into(),
        };
        let store = Store::serving(dir.path().to_owned());
        let (asking, client, wanted) = (store.clone(), server.client(), addresses.clone());
        let trying = tokio::spawn(async move { asking.renew(&client, "n1", &wanted).await });
        asked(&server).await;
        answer(&server, |request| {
            assert_eq!(request.spec.signer_name, "kubernetes.io/kubelet-serving");
            assert_eq!(request.spec.usages.as_deref().unwrap(), ["digital signature", "server auth"]);
            signed(request)
        });
        let lifetime = trying.await.unwrap().unwrap();
        assert_eq!(store.in_use(), Some((lifetime, addresses)));
        assert_eq!(store.current(), dir.path().join("kubelet-server-current.pem"));
        assert_eq!(Store::new(dir.path().to_owned()).in_use(), None);
    }

    #[tokio::test]
    async fn a_refused_request_is_an_error_and_the_next_one_is_for_another_key() {
        let (server, dir) = (Server::default(), tempfile::tempdir().unwrap());
        let trying = asking(&server, dir.path());
        asked(&server).await;
        answer(&server, |_| CertificateSigningRequestStatus {
            conditions: Some(vec![CertificateSigningRequestCondition {
                type_: "Denied".to_owned(),
                status: "True".to_owned(),
                reason: Some("Stranger".to_owned()),
                message: Some("who is it?".to_owned()),
                ..CertificateSigningRequestCondition::default()
            }]),
            ..CertificateSigningRequestStatus::default()
        });
        let error = trying.await.unwrap().unwrap_err().to_string();
        assert!(error.contains("was refused (Stranger): who is it?"), "{error}");
        let again = asking(&server, dir.path());
        server
            .until(|requests| requests.iter().filter(|request| request.starts_with("POST")).count() == 2)
            .await;
        again.abort();
        assert_eq!(server.paths().len(), 2);
    }

    #[test]
    fn it_is_time_for_the_next_certificate_before_the_old_one_ends() {
        let at = |second: i64| Timestamp::from_second(second).unwrap();
        let lifetime = Lifetime { from: at(1000), until: at(2000) };
        assert_eq!((lifetime.rotation(0.7), lifetime.rotation(0.9)), (at(1700), at(1900)));
        assert!(lifetime.covers(at(1000)) && !lifetime.covers(at(999)) && !lifetime.covers(at(2000)));
        assert!(Lifetime::of(b"nothing").is_err());
    }
}
