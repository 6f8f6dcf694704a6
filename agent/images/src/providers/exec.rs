//! Runs a credential provider (`execPlugin` of the kubelet): writes a request of
//! `credentialprovider.kubelet.k8s.io` to its standard input and reads the response from its standard output.
//! The response is bounded in size and time, and never logged.

use std::{collections::BTreeMap, path::Path, time::Duration};

use beelet_base::program::{Bounds, Complaints, Program, ProgramError};
use beelet_codec::data;
use beelet_config::{CredentialProvider, ProviderVersion};
use serde::{Deserialize, Serialize};

/// Maximum run time of a program.
const PATIENCE: Duration = Duration::from_secs(60);
/// Maximum size of a response.
const LONGEST_ANSWER: usize = 1 << 20;
/// Maximum length of standard error in a message.
const LONGEST_COMPLAINT: usize = 1 << 10;
const BOUNDS: Bounds =
    Bounds { within: PATIENCE, output: LONGEST_ANSWER, complaints: Complaints::Apart(LONGEST_COMPLAINT) };

/// Request to a program.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Request<'a> {
    kind: &'static str,
    api_version: &'static str,
    image: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    service_account_token: &'a str,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    service_account_annotations: &'a BTreeMap<String, String>,
}

impl<'a> Request<'a> {
    pub(super) fn new(
        version: ProviderVersion,
        image: &'a str,
        service_account_token: &'a str,
        service_account_annotations: &'a BTreeMap<String, String>,
    ) -> Self {
        let (kind, api_version) = ("CredentialProviderRequest", version.as_str());
        Self { kind, api_version, image, service_account_token, service_account_annotations }
    }
}

/// Response of a program.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Response {
    kind: String,
    api_version: String,
    pub(super) cache_key_type: CacheKeyType,
    /// Duration in Go's format.
    #[serde(default)]
    cache_duration: Option<String>,
    #[serde(default)]
    pub(super) auth: Option<BTreeMap<String, Login>>,
}

/// Scope of a cached response.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub(super) enum CacheKeyType {
    /// This image.
    Image,
    /// All images of its registry.
    Registry,
    /// All images that the program is asked for.
    Global,
}

/// User and password.
#[derive(Clone, Deserialize)]
#[serde(default)]
#[derive(Default)]
pub(super) struct Login {
    pub(super) username: String,
    pub(super) password: String,
}

/// Error of a call to a program.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum ExecError {
    /// The program cannot be run.
    #[error("cannot be run: {0}")]
    Start(String),
    /// The program exceeded its maximum run time.
    #[error("has not answered within {} s", PATIENCE.as_secs())]
    Deadline,
    /// The program exited with a failure.
    #[error("failed ({status}): {complaint}")]
    Failed {
        /// Exit status.
        status: String,
        /// Standard error.
        complaint: String,
    },
    /// The response is too long.
    #[error("answered with more than {LONGEST_ANSWER} bytes")]
    TooLong,
    /// The response is of another type. Its text may be secret.
    #[error("did not answer with a CredentialProviderResponse of {0} in JSON")]
    Form(&'static str),
    /// The response has an invalid cache duration.
    #[error("answered with an invalid `cacheDuration`")]
    Duration,
}

impl Response {
    /// Returns the cache duration; None if the response has none.
    pub(super) fn holds(&self) -> Result<Option<Duration>, ExecError> {
        let text = self.cache_duration.as_deref().filter(|text| !text.is_empty());
        text.map(|text| beelet_units::duration::parse(text).map_err(|_| ExecError::Duration)).transpose()
    }
}

/// Runs the program at `path` with a request.
pub(super) async fn ask(
    path: &Path,
    provider: &CredentialProvider,
    request: &Request<'_>,
) -> Result<Response, ExecError> {
    let mut input = serde_json::to_vec(request).map_err(|error| ExecError::Start(error.to_string()))?;
    input.push(b'\n');
    let program = Program::at(path).configured(&provider.args).input(input);
    let program = provider.env.iter().fold(program, |program, (name, value)| program.env(name, value));
    let ended = program.run(BOUNDS).await.map_err(|error| match error {
        ProgramError::Late { .. } => ExecError::Deadline,
        ProgramError::Start { cause, .. } => ExecError::Start(cause.to_string()),
        ProgramError::Option { .. } => ExecError::Start(error.to_string()),
    })?;
    if !ended.status.success() {
        let complaint = String::from_utf8_lossy(&ended.complaints).trim().to_owned();
        return Err(ExecError::Failed { status: ended.status.to_string(), complaint });
    }
    if ended.is_cut {
        return Err(ExecError::TooLong);
    }
    parse(&ended.output, provider.version)
}

fn parse(answer: &[u8], version: ProviderVersion) -> Result<Response, ExecError> {
    let form = || ExecError::Form(version.as_str());
    let response: Response = data::from_json(answer).map_err(|_| form())?;
    let right = response.kind == "CredentialProviderResponse" && response.api_version == version.as_str();
    if right { Ok(response) } else { Err(form()) }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn answer(change: impl FnOnce(&mut Value)) -> Vec<u8> {
        let mut answer = json!({
            "kind": "CredentialProviderResponse", "apiVersion": "credentialprovider.kubelet.k8s.io/v1",
            "cacheKeyType": "Registry", "cacheDuration": "6h",
            "auth": {"registry.test": {"username": "me", "password": "hush"}},
        });
        change(&mut answer);
        answer.to_string().into_bytes()
    }

    #[test]
    fn an_answer_is_read_or_refused_without_its_words() {
        let good = parse(&answer(|_| {}), ProviderVersion::V1).ok().unwrap();
        assert_eq!(good.holds(), Ok(Some(Duration::from_secs(6 * 3600))));
        assert_eq!(good.auth.unwrap()["registry.test"].password, "hush");
        let check = |answer: Vec<u8>, version: ProviderVersion| {
            let error = parse(&answer, version).err().unwrap().to_string();
            assert!(error.contains(version.as_str()) && !error.contains("hush"), "{error}");
        };
        check(answer(|_| {}), ProviderVersion::V1Beta1);
        check(answer(|answer| answer["kind"] = "Other".into()), ProviderVersion::V1);
        check(answer(|answer| answer["cacheKeyType"] = "Never".into()), ProviderVersion::V1);
        check(b"hush".to_vec(), ProviderVersion::V1);
        check(Vec::new(), ProviderVersion::V1);
        let none = parse(&answer(|answer| answer["auth"] = Value::Null), ProviderVersion::V1).ok().unwrap();
        assert!(none.auth.is_none());
        let odd = parse(&answer(|answer| answer["cacheDuration"] = "long".into()), ProviderVersion::V1);
        assert_eq!(odd.ok().unwrap().holds(), Err(ExecError::Duration));
    }

    #[test]
    fn a_request_has_the_kubelets_form() {
        let annotations = BTreeMap::from([("a.test/role".to_owned(), "web".to_owned())]);
        let text = |token: &str, annotations: &BTreeMap<String, String>| {
            serde_json::to_value(Request::new(ProviderVersion::V1, "registry.test/app", token, annotations))
                .unwrap()
        };
        let mut expected = json!({"kind": "CredentialProviderRequest", "image": "registry.test/app",
            "apiVersion": "credentialprovider.kubelet.k8s.io/v1"});
        assert_eq!(text("", &BTreeMap::new()), expected);
        expected["serviceAccountToken"] = "t".into();
        expected["serviceAccountAnnotations"] = json!({"a.test/role": "web"});
        assert_eq!(text("t", &annotations), expected);
    }
}
