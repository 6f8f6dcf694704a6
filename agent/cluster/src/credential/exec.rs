//! Runs a credential plugin: the request is an `ExecCredential` in the environment, the answer an
//! `ExecCredential` on standard output. Output is bounded in size and time, and never logged.

use std::{collections::HashMap, path::Path, sync::Arc, time::Duration};

use base64::{Engine, engine::general_purpose::STANDARD};
use beelet_base::program::{Bounds, Complaints, Program, ProgramError};
use beelet_codec::data;
use http::HeaderValue;
use jiff::Timestamp;
use kube::config::{AuthInfo, ExecConfig, ExecInteractiveMode};
use serde::Deserialize;
use serde_json::json;
use tokio::time::Instant;

use super::{Credential, Pair};

/// Timeout of a run.
const PATIENCE: Duration = Duration::from_secs(60);
/// Maximum size of standard output, in bytes.
const LONGEST_ANSWER: usize = 1 << 20;
/// Maximum size of standard error that is read and shown, in bytes.
const LONGEST_COMPLAINT: usize = 1 << 10;
/// Supported API versions.
const VERSIONS: [&str; 2] = ["client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1"];

/// Cause of a missing credential.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The kubeconfig's description of the plugin is invalid.
    #[error("the credential plugin (exec) {0}")]
    Described(String),
    /// The plugin can't be started, or took too long.
    #[error("the kubeconfig's credential plugin: {0}{1}")]
    Run(Arc<ProgramError>, String),
    /// The plugin failed.
    #[error("the credential plugin {0} failed ({1}): {2}")]
    Failed(String, String, String),
    /// The plugin's answer is invalid. The error omits the answer, which may be secret.
    #[error("the credential plugin {0} {1}")]
    Answer(String, &'static str),
    /// The runtime of the request that started the run has ended.
    #[error("the credential plugin was interrupted")]
    Interrupted,
}

/// A plugin and its request.
pub(crate) struct Exec {
    command: String,
    program: Program,
    version: &'static str,
    hint: String,
    pub(super) patience: Duration,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Answer {
    kind: String,
    api_version: String,
    status: Option<Status>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", default)]
#[derive(Default)]
struct Status {
    expiration_timestamp: Option<String>,
    token: Option<String>,
    client_certificate_data: Option<String>,
    client_key_data: Option<String>,
}

impl Exec {
    /// Checks the plugin of a kubeconfig as client-go does (`GetAuthenticator`).
    pub(crate) fn new(exec: ExecConfig) -> Result<Self, Error> {
        let wrong = |why: &str| Error::Described(why.to_owned());
        let command = exec.command.filter(|command| !command.is_empty());
        let command = command.ok_or_else(|| wrong("has no command"))?;
        let named = exec.api_version.unwrap_or_default();
        let version = VERSIONS.into_iter().find(|known| *known == named);
        let version = version.ok_or_else(|| {
            let known = VERSIONS.join(" or ");
            Error::Described(format!("{command} has the unsupported apiVersion {named:?}; set {known}"))
        })?;
        if exec.interactive_mode == Some(ExecInteractiveMode::Always) {
            return Err(Error::Described(format!(
                "{command} has `interactiveMode: Always`, but a daemon has no terminal; set Never or IfAvailable"
            )));
        }
        let cluster = exec.cluster.filter(|_| exec.provide_cluster_info);
        let cluster = cluster.as_ref().map(data::to_value).transpose();
        let cluster = cluster.map_err(|error| Error::Described(error.to_string()))?;
        let spec = match cluster {
            Some(cluster) => json!({ "interactive": false, "cluster": cluster }),
            None => json!({ "interactive": false }),
        };
        let info = json!({ "kind": "ExecCredential", "apiVersion": version, "spec": spec });
        let pair = |mut one: HashMap<String, String>| Some((one.remove("name")?, one.remove("value")?));
        let env = exec.env.into_iter().flatten().filter_map(pair);
        let program = Program::at(Path::new(&command)).configured(exec.args.unwrap_or_default());
        let program = env.fold(program, |program, (name, value)| program.env(name, value));
        let program = program.env("KUBERNETES_EXEC_INFO", info.to_string());
        Ok(Self {
            command,
            program,
            version,
            hint: exec.install_hint.unwrap_or_default(),
            patience: PATIENCE,
        })
    }

    pub(super) fn name(&self) -> &str {
        &self.command
    }

    /// Runs the plugin. Kills the plugin and its child processes when `patience` is over.
    pub(super) async fn run(&self) -> Result<Credential, Error> {
        let complaints = Complaints::Apart(LONGEST_COMPLAINT);
        let bounds = Bounds { within: self.patience, output: LONGEST_ANSWER, complaints };
        let ended = self.program.run(bounds).await.map_err(|error| {
            let hint = Some(&self.hint).filter(|hint| error.is_missing() && !hint.is_empty());
            Error::Run(Arc::new(error), hint.map_or_else(String::new, |hint| format!(" ({hint})")))
        })?;
        if !ended.status.success() {
            let complaint = String::from_utf8_lossy(&ended.complaints).trim().to_owned();
            return Err(Error::Failed(self.command.clone(), ended.status.to_string(), complaint));
        }
        if ended.is_cut {
            return Err(Error::Answer(self.command.clone(), "answered with more than 1 MiB"));
        }
        self.read(&ended.output, Timestamp::now())
    }

    fn read(&self, answer: &[u8], now: Timestamp) -> Result<Credential, Error> {
        let wrong = |why: &'static str| Error::Answer(self.command.clone(), why);
        let answer: Answer =
            data::from_json(answer).map_err(|_| wrong("did not answer with an ExecCredential in JSON"))?;
        if answer.kind != "ExecCredential" || answer.api_version != self.version {
            return Err(wrong("did not answer with an ExecCredential of the kubeconfig's apiVersion"));
        }
        let status = answer.status.ok_or_else(|| wrong("answered without a status"))?;
        let some = |text: Option<String>| text.filter(|text| !text.is_empty());
        let pair = match (some(status.client_certificate_data), some(status.client_key_data)) {
            (Some(certificate), Some(key)) => Some(Pair { certificate, key }),
            (None, None) => None,
            _ => return Err(wrong("answered with only one of certificate and key")),
        };
        let token = some(status.token).map(|token| HeaderValue::try_from(format!("Bearer {token}")));
        let mut token = token
            .transpose()
            .map_err(|_| wrong("answered with a token that is invalid in an HTTP header"))?;
        token.iter_mut().for_each(|token| token.set_sensitive(true));
        if token.is_none() && pair.is_none() {
            return Err(wrong("answered with neither a token nor a certificate and its key"));
        }
        let expires = some(status.expiration_timestamp).map(|text| text.parse::<Timestamp>()).transpose();
        let expires = expires.map_err(|_| wrong("answered with an invalid expirationTimestamp"))?;
        Ok(Credential { token, pair, expires, given: (now, Instant::now()) })
    }
}

/// Returns a kubeconfig user with this certificate.
pub(super) fn user_of(pair: &Pair) -> Result<AuthInfo, String> {
    let user = json!({
        "client-certificate-data": STANDARD.encode(&pair.certificate),
        "client-key-data": STANDARD.encode(&pair.key),
    });
    data::read(&user).map_err(|problem| problem.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plugin(change: impl FnOnce(&mut serde_json::Value)) -> Result<Exec, String> {
        let mut exec = json!({
            "apiVersion": VERSIONS[0], "command": "/bin/helper", "args": ["get"],
            "env": [{ "name": "WHO", "value": "me" }, { "name": "HALF" }],
            "interactiveMode": "IfAvailable",
        });
        change(&mut exec);
        Exec::new(serde_json::from_value(exec).unwrap()).map_err(|error| error.to_string())
    }

    #[test]
    fn a_plugin_is_asked_in_its_version_or_refused_with_the_cause() {
        assert_eq!(plugin(|_| {}).unwrap().program.arguments(), ["get"]);
        let check = |field: &str, value: serde_json::Value, part: &str| {
            let error = plugin(|exec| exec[field] = value).err().unwrap();
            assert!(error.contains(part), "{error}");
        };
        check("apiVersion", json!("client.authentication.k8s.io/v1alpha1"), "apiVersion");
        check("apiVersion", serde_json::Value::Null, "apiVersion");
        check("command", serde_json::Value::Null, "no command");
        check("interactiveMode", json!("Always"), "terminal");
    }

    #[test]
    fn an_answer_is_read_or_refused_without_its_words() {
        let plugin = plugin(|_| {}).unwrap();
        let answer = |status: serde_json::Value| json!({ "kind": "ExecCredential", "apiVersion": VERSIONS[0], "spec": {}, "status": status });
        let read =
            |value: &serde_json::Value| plugin.read(value.to_string().as_bytes(), Timestamp::UNIX_EPOCH);
        let token = json!({ "token": "hush", "expirationTimestamp": "1970-01-01T01:00:00Z" });
        let good = read(&answer(token.clone())).ok().unwrap();
        assert_eq!(good.token.as_ref().unwrap().to_str().unwrap(), "Bearer hush");
        let at = |seconds| Timestamp::from_second(seconds).unwrap();
        assert!(good.holds(at(3599)) && !good.holds(at(3600)));
        assert!(!good.is_ending(at(3000)) && good.is_ending(at(3301)));
        let both = read(&answer(json!({ "clientCertificateData": "c", "clientKeyData": "k" }))).ok().unwrap();
        assert!(both.pair.is_some() && both.token.is_none() && both.holds(Timestamp::MAX));
        let refused = |value: &serde_json::Value| {
            let error = read(value).err().unwrap().to_string();
            assert!(
                error.starts_with("the credential plugin /bin/helper ") && !error.contains("hush"),
                "{error}"
            );
        };
        for status in [
            json!(null),
            json!("hush"),
            json!({}),
            json!({ "token": "" }),
            json!({ "token": "hush\n" }),
            json!({ "token": 7 }),
            json!({ "clientKeyData": "hush" }),
            json!({ "token": "hush", "clientCertificateData": "c" }),
            json!({ "token": "hush", "expirationTimestamp": "hush" }),
        ] {
            refused(&answer(status));
        }
        let mut other = answer(token.clone());
        other["apiVersion"] = json!(VERSIONS[1]);
        for value in [json!("hush"), json!([]), json!({}), json!({ "kind": "hush", "apiVersion": 1 }), other]
        {
            refused(&value);
        }
    }

    #[test]
    fn a_certificate_becomes_a_kubeconfigs_user() {
        let user = user_of(&Pair { certificate: "c".to_owned(), key: "k".to_owned() }).unwrap();
        assert_eq!(user.client_certificate_data.as_deref(), Some("Yw=="));
        assert!(user.client_key_data.is_some());
    }
}
