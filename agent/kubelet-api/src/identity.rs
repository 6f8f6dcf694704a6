//! User of a client certificate: the common name is the user, each organization a group, as in the kubelet
//! (`CommonNameUserConversion` of apiserver's x509 authenticator).

use beelet_model::review::User;
use x509_parser::prelude::{FromDer, X509Certificate};

/// Group of all authenticated users.
pub(crate) const AUTHENTICATED: &str = "system:authenticated";

/// Returns the user of a certificate, or None without a common name. The certificate is not verified here.
pub(crate) fn user_of(certificate: &[u8]) -> Option<User> {
    let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
    let subject = certificate.subject();
    // The last common name is the most specific one, which Go takes too.
    let name = subject.iter_common_name().last()?.as_str().ok()?.to_owned();
    let mut groups: Vec<String> =
        subject.iter_organization().filter_map(|group| Some(group.as_str().ok()?.to_owned())).collect();
    groups.push(AUTHENTICATED.to_owned());
    (!name.is_empty()).then(|| User { name, groups, ..User::default() })
}

const ANONYMOUS: &str = "system:anonymous";

/// Returns true for the user without credentials.
pub(crate) fn is_anonymous(user: &User) -> bool {
    user.name == ANONYMOUS
}

/// Returns the user without credentials.
pub(crate) fn anonymous() -> User {
    User { name: ANONYMOUS.to_owned(), groups: vec!["system:unauthenticated".to_owned()], ..User::default() }
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, DnType, KeyPair};

    use super::*;

    #[test]
    fn the_common_name_is_the_user_and_organizations_are_groups() {
        let check = |names: &[(DnType, &str)], expected: Option<(&str, &[&str])>| {
            let mut params = CertificateParams::default();
            params.distinguished_name = rcgen::DistinguishedName::new();
            for (kind, value) in names {
                params.distinguished_name.push(kind.clone(), *value);
            }
            let certificate = params.self_signed(&KeyPair::generate().unwrap()).unwrap();
            let user = user_of(certificate.der());
            let found = user.as_ref().map(|user| (user.name.as_str(), user.groups.clone()));
            let expected = expected
                .map(|(name, groups)| (name, groups.iter().map(ToString::to_string).collect::<Vec<_>>()));
            assert_eq!(found, expected);
        };
        let (name, group) = (DnType::CommonName, DnType::OrganizationName);
        check(
            &[(name.clone(), "kube-apiserver-kubelet-client"), (group.clone(), "system:masters")],
            Some(("kube-apiserver-kubelet-client", &["system:masters", AUTHENTICATED])),
        );
        check(&[(name, "jane")], Some(("jane", &[AUTHENTICATED])));
        check(&[(group, "a")], None);
        assert_eq!(user_of(b"no certificate"), None);
    }
}
