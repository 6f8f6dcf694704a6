//! A certificate authority: what the API server's signers and kube-controller-manager have.

use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DnType, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};

/// A certificate authority of a test's own.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

impl Authority {
    /// An authority of this name, with a key of its own.
    ///
    /// # Errors
    /// No key can be made.
    pub fn new(name: &str) -> Result<Authority, rcgen::Error> {
        let mut params = CertificateParams::new(Vec::new())?;
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        let key = KeyPair::generate()?;
        let pem = params.self_signed(&key)?.pem();
        Ok(Authority { issuer: Issuer::new(params, key), pem })
    }

    /// Its certificate.
    #[must_use]
    pub fn pem(&self) -> &str {
        &self.pem
    }

    /// Certificate and key of what `params` describe.
    ///
    /// # Errors
    /// No key can be made.
    pub fn issue(&self, params: &CertificateParams) -> Result<(String, String), rcgen::Error> {
        let key = KeyPair::generate()?;
        Ok((params.signed_by(&key, &self.issuer)?.pem(), key.serialize_pem()))
    }

    /// The certificate that a request in PEM asks for, valid for so long.
    ///
    /// # Errors
    /// It is no request.
    pub fn sign(&self, request: &str, valid: std::time::Duration) -> Result<String, rcgen::Error> {
        let mut request = CertificateSigningRequestParams::from_pem(request)?;
        let now = std::time::SystemTime::now();
        // As the signers do: clocks differ.
        request.params.not_before = (now - std::time::Duration::from_secs(300)).into();
        request.params.not_after = (now + valid).into();
        Ok(request.signed_by(&self.issuer)?.pem())
    }
}
