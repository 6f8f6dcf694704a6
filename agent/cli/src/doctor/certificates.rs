//! Remaining validity of the certificates that a node of a cluster presents and trusts, as far as they are
//! files.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use jiff::{SignedDuration, Timestamp};
use x509_parser::pem::Pem;

use super::{Finding, Patient};

const CHECK: &str = "certificates";
/// Maximum bytes read from a file.
const MOST: u64 = 1 << 20;
/// Remaining validity at which a certificate should already have been renewed.
const SOON: SignedDuration = SignedDuration::from_hours(7 * 24);

/// A certificate file, and the effect of its expiry.
struct Use {
    what: &'static str,
    path: PathBuf,
    consequence: &'static str,
    remedy: &'static str,
}

pub(super) fn expiry(patient: &Patient) -> Vec<Finding> {
    let config = &patient.config;
    let folder = config.cert_dir();
    let serving = "clients cannot get logs, metrics or a shell from this node";
    let approve = "check that its requests are approved (`kubectl get csr`) and that the clock is right";
    let of_cluster = [
        Use {
            what: "the client certificate",
            path: folder.join("kubelet-client-current.pem"),
            consequence: "the API server rejects this node",
            remedy: "set `rotateCertificates`, and check that its requests are approved (`kubectl get csr`) and that the clock is right",
        },
        Use {
            what: "the serving certificate",
            path: folder.join("kubelet-server-current.pem"),
            consequence: serving,
            remedy: approve,
        },
    ];
    // On a standalone node these files are leftovers of a kubelet and unused.
    let mut uses: Vec<Use> = of_cluster.into_iter().filter(|_| patient.in_cluster).collect();
    if let Some(files) = &config.server.tls_files {
        let (path, remedy) =
            (files.certificate.clone(), "replace the files of `tlsCertFile` and `tlsPrivateKeyFile`");
        uses.push(Use { what: "the serving certificate", path, consequence: serving, remedy });
    }
    if let Some(path) = config.server.client_ca_file.clone() {
        uses.push(Use {
            what: "the client CA certificate",
            path,
            consequence: "this node rejects all requests of the API server",
            remedy: "replace the file of `clientCAFile`",
        });
    }
    uses.iter().filter_map(|one| judge(one, read(&one.path)?, Timestamp::now())).collect()
}

/// Returns the earliest expiry of the certificates in the file, or None without a file.
fn read(path: &Path) -> Option<Result<Timestamp, String>> {
    let mut text = Vec::new();
    match File::open(path).and_then(|file| file.take(MOST).read_to_end(&mut text)) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return None,
        Err(error) => return Some(Err(error.to_string())),
        Ok(_) => {}
    }
    Some(first_end(&text))
}

fn first_end(text: &[u8]) -> Result<Timestamp, String> {
    let mut first = None;
    for pem in Pem::iter_from_buffer(text) {
        let pem = pem.map_err(|error| error.to_string())?;
        if pem.label != "CERTIFICATE" {
            continue;
        }
        let certificate = pem.parse_x509().map_err(|error| error.to_string())?;
        let end = certificate.validity().not_after.timestamp();
        first = Some(first.map_or(end, |known: i64| known.min(end)));
    }
    let end = first.ok_or("the file contains no certificate")?;
    Timestamp::from_second(end).map_err(|error| error.to_string())
}

fn judge(of: &Use, end: Result<Timestamp, String>, now: Timestamp) -> Option<Finding> {
    let Use { what, path, consequence, remedy } = of;
    let path = path.display();
    let end = match end {
        Ok(end) => end,
        Err(why) => {
            let detail = format!("cannot read {what} {path}: {why}");
            return Some(Finding::degraded(CHECK, detail, *consequence, *remedy));
        }
    };
    let left = end.duration_since(now);
    let days = left.as_hours().abs() / 24;
    let finding = if left.is_negative() {
        let detail = format!("{what} {path} expired {days} days ago ({end})");
        Finding::degraded(CHECK, detail, *consequence, *remedy)
    } else if left < SOON {
        let detail = format!("{what} {path} expires in {days} days ({end})");
        Finding::degraded(CHECK, detail, format!("after its expiry, {consequence}"), *remedy)
    } else {
        Finding::ok(CHECK, format!("{what} is valid for {days} days"))
    };
    Some(finding)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::State;

    #[test]
    fn a_certificate_is_well_until_its_last_week() {
        let of =
            Use { what: "the client certificate", path: "/pki/c.pem".into(), consequence: "c", remedy: "r" };
        let check = |end: Result<&str, &str>, state: State, part: &str| {
            let end = end.map(|end| end.parse().unwrap()).map_err(str::to_owned);
            let finding = judge(&of, end, "2026-06-01T00:00:00Z".parse().unwrap()).unwrap();
            assert_eq!(finding.state, state, "{finding:?}");
            assert!(finding.detail.contains(part), "{finding:?}");
        };
        check(Ok("2027-06-01T00:00:00Z"), State::Ok, "is valid for 365 days");
        check(Ok("2026-06-04T00:00:00Z"), State::Degraded, "/pki/c.pem expires in 3 days");
        check(Ok("2026-05-22T00:00:00Z"), State::Degraded, "expired 10 days ago");
        check(Err("denied"), State::Degraded, "/pki/c.pem: denied");
    }

    #[test]
    fn only_what_is_there_is_judged() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(read(&dir.path().join("none")), None);
        let path = dir.path().join("file");
        std::fs::write(&path, "no PEM").unwrap();
        assert_eq!(read(&path), Some(Err("the file contains no certificate".to_owned())));
    }
}
