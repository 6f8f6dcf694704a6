//! Certificate authority, in place of the API server's signers and kube-controller-manager.

use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DnType, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};

/// Certificate authority of a test.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

impl Authority {
    /// Creates an authority of this name, with its own key.
    ///
    /// # Errors
    /// The key cannot be generated.
    pub fn new(name: &str) -> Result<Authority, rcgen::Error> {
        let mut params = CertificateParams::new(Vec::new())?;
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        let key = KeyPair::generate()?;
        let pem = params.self_signed(&key)?.pem();
        Ok(Authority { issuer: Issuer::new(params, key), pem })
    }

    /// Returns the authority's certificate.
    #[must_use]
    pub fn pem(&self) -> &str {
        &self.pem
    }

    /// Issues a certificate for `params`, with a new key.
    ///
    /// # Errors
    /// The key cannot be generated.
    pub fn issue(&self, params: &CertificateParams) -> Result<(String, String), rcgen::Error> {
        let key = KeyPair::generate()?;
        Ok((params.signed_by(&key, &self.issuer)?.pem(), key.serialize_pem()))
    }

    /// Signs a certificate request in PEM, valid for this time.
    ///
    /// # Errors
    /// The request is invalid.
    pub fn sign(&self, request: &str, valid: std::time::Duration) -> Result<String, rcgen::Error> {
        let mut request = CertificateSigningRequestParams::from_pem(request)?;
        let now = std::time::SystemTime::now();
        // Like the signers, to tolerate clock differences.
        request.params.not_before = (now - std::time::Duration::from_secs(300)).into();
        request.params.not_after = (now + valid).into();
        Ok(request.signed_by(&self.issuer)?.pem())
    }
}
