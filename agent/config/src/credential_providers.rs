//! Reads and checks `kind: CredentialProviderConfig` (kubelet.config.k8s.io) as the kubelet does
//! (`pkg/credentialprovider/plugin/config.go`): programs that return the node's credentials for image
//! registries.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    time::Duration,
};

use beelet_codec::{
    data,
    document::{self, Document, Limits},
};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{
    ConfigError,
    error::Problem,
    load::{error_at, read},
    values::GoDuration,
};

/// API group of the file.
const GROUP: &str = "kubelet.config.k8s.io";
/// Supported API versions.
const VERSIONS: [&str; 3] = ["v1", "v1beta1", "v1alpha1"];
const KIND: &str = "CredentialProviderConfig";
/// Maximum number of files in a folder.
const FILES: usize = 256;

/// Credential providers and their folder.
#[derive(Debug, Clone, PartialEq)]
pub struct CredentialProviders {
    /// Folder of the programs.
    pub bin_dir: PathBuf,
    /// The providers, in the order of their requests.
    pub providers: Vec<CredentialProvider>,
}

/// A program that returns credentials.
#[derive(Debug, Clone, PartialEq)]
pub struct CredentialProvider {
    /// Name of the provider and of its file.
    pub name: String,
    /// Patterns of the images for which the provider has credentials.
    pub match_images: Vec<String>,
    /// Lifetime of answers without a lifetime of their own.
    pub default_cache_duration: Duration,
    /// API version of requests and answers.
    pub version: ProviderVersion,
    /// Arguments of the program.
    pub args: Vec<String>,
    /// Environment variables in addition to the agent's own.
    pub env: Vec<(String, String)>,
    /// Use of the pods' service accounts, if any (KEP-4412).
    pub tokens: Option<TokenAttributes>,
}

/// Version of `credentialprovider.kubelet.k8s.io`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ProviderVersion {
    /// `v1`.
    #[serde(rename = "credentialprovider.kubelet.k8s.io/v1")]
    V1,
    /// `v1beta1`.
    #[serde(rename = "credentialprovider.kubelet.k8s.io/v1beta1")]
    V1Beta1,
    /// `v1alpha1`.
    #[serde(rename = "credentialprovider.kubelet.k8s.io/v1alpha1")]
    V1Alpha1,
}

impl ProviderVersion {
    /// Returns the version with its group.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::V1 => "credentialprovider.kubelet.k8s.io/v1",
            Self::V1Beta1 => "credentialprovider.kubelet.k8s.io/v1beta1",
            Self::V1Alpha1 => "credentialprovider.kubelet.k8s.io/v1alpha1",
        }
    }
}

/// Use of the service account of the pod that needs an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenAttributes {
    /// Audience of the account's token.
    pub audience: String,
    /// True to skip the provider for pods without an account.
    pub require_service_account: bool,
    /// Annotations without which the provider is skipped for an account.
    pub required_annotations: Vec<String>,
    /// Annotations that the provider gets if the account has them.
    pub optional_annotations: Vec<String>,
    /// True to cache answers per token instead of per account.
    pub cache_by_token: bool,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct ConfigWire {
    #[serde(rename = "apiVersion")]
    _api_version: String,
    #[serde(rename = "kind")]
    _kind: String,
    #[serde(default)]
    providers: Vec<ProviderWire>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct ProviderWire {
    name: String,
    #[serde(default)]
    match_images: Vec<String>,
    default_cache_duration: Option<GoDuration>,
    api_version: ProviderVersion,
    #[serde(default)]
    args: Vec<String>,
    #[serde(default)]
    env: Vec<VariableWire>,
    token_attributes: Option<TokenWire>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct VariableWire {
    name: String,
    value: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct TokenWire {
    #[serde(default)]
    service_account_token_audience: String,
    cache_type: CacheType,
    require_service_account: Option<bool>,
    #[serde(default)]
    required_service_account_annotation_keys: Vec<String>,
    #[serde(default)]
    optional_service_account_annotation_keys: Vec<String>,
}

#[derive(Deserialize, PartialEq)]
enum CacheType {
    ServiceAccount,
    Token,
}

impl CredentialProviders {
    /// Reads a file, or the `*.json`, `*.yaml` and `*.yml` files of a folder in the order of their names.
    /// `bin_dir` is the folder of the programs.
    ///
    /// # Errors
    /// A file is unreadable or invalid.
    pub fn read(path: &Path, bin_dir: &Path) -> Result<Self, ConfigError> {
        let mut providers: Vec<CredentialProvider> = Vec::new();
        for file in files(path)? {
            for provider in parse(&file, &read(&file)?)? {
                if providers.iter().any(|other| other.name == provider.name) {
                    let message = format!("two providers have the name {:?}; keep one", provider.name);
                    return Err(error_at(&file, None, "providers", message));
                }
                providers.push(provider);
            }
        }
        if providers.is_empty() {
            return Err(error_at(path, None, "providers", "must have at least one provider"));
        }
        Ok(Self { bin_dir: bin_dir.to_owned(), providers })
    }
}

fn files(path: &Path) -> Result<Vec<PathBuf>, ConfigError> {
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let fail =
        |why: &dyn std::fmt::Display| error_at(path, None, "", format!("cannot read the folder: {why}"));
    let mut files = Vec::new();
    for entry in std::fs::read_dir(path).map_err(|error| fail(&error))? {
        let file = entry.map_err(|error| fail(&error))?.path();
        let ending = file.extension().and_then(std::ffi::OsStr::to_str).unwrap_or_default();
        if matches!(ending, "json" | "yaml" | "yml") && !file.is_dir() {
            files.push(file);
        }
        if files.len() > FILES {
            return Err(fail(&format_args!("more than {FILES} files")));
        }
    }
    files.sort();
    if files.is_empty() {
        return Err(fail(&"no .json, .yaml or .yml files"));
    }
    Ok(files)
}

fn parse(file: &Path, text: &str) -> Result<Vec<CredentialProvider>, ConfigError> {
    let documents = document::parse_within(text, Limits::MANIFEST)
        .map_err(|error| error_at(file, Some((error.line, error.column)), "", error.message))?;
    let [document] = &documents[..] else {
        return Err(error_at(
            file,
            None,
            "",
            format!("must be one {KIND}, not {} documents", documents.len()),
        ));
    };
    check_kind(file, document)?;
    let at =
        |problem: Problem| error_at(file, document.locate(&problem.field), &problem.field, problem.message);
    let wire: ConfigWire = data::read(&document.value).map_err(|p| at(Problem::new(&p.path, p.message)))?;
    let each = wire.providers.into_iter().enumerate();
    each.map(|(index, wire)| provider(&format!("providers[{index}]"), wire).map_err(at)).collect()
}

fn check_kind(file: &Path, document: &Document) -> Result<(), ConfigError> {
    let field = |name: &str| document.value.get(name).and_then(Value::as_str).unwrap_or_default();
    let (version, kind) = (field("apiVersion"), field("kind"));
    let known =
        version.split_once('/').is_some_and(|(group, version)| group == GROUP && VERSIONS.contains(&version));
    if known && kind == KIND {
        return Ok(());
    }
    let message = format!("must be a {KIND} of {GROUP}/v1, not kind {kind:?} of {version:?}");
    Err(error_at(file, Some(document.start()), "", message))
}

fn provider(path: &str, wire: ProviderWire) -> Result<CredentialProvider, Problem> {
    let problem = |field: &str, message: &str| Err(Problem::new(format!("{path}.{field}"), message));
    if wire.name.is_empty() || wire.name.contains(['/', ' ', '\0']) || wire.name == "." || wire.name == ".." {
        return problem("name", "must be a file name without '/' and spaces");
    }
    if wire.match_images.is_empty() {
        return problem("matchImages", "must name at least one image");
    }
    let wrong =
        |image: &String| image.is_empty() || image.contains(|c: char| c.is_whitespace() || c.is_control());
    if let Some(index) = wire.match_images.iter().position(wrong) {
        return problem(&format!("matchImages[{index}]"), "must be a registry, with or without a path");
    }
    let Some(GoDuration(default_cache_duration)) = wire.default_cache_duration else {
        return problem("defaultCacheDuration", "must be set, e.g. 12h");
    };
    if let Some(index) = wire.env.iter().position(|v| v.name.is_empty() || v.name.contains(['=', '\0'])) {
        return problem(&format!("env[{index}].name"), "is not the name of an environment variable");
    }
    let tokens = match wire.token_attributes {
        Some(_) if wire.api_version != ProviderVersion::V1 => {
            return problem("tokenAttributes", "needs apiVersion credentialprovider.kubelet.k8s.io/v1");
        }
        Some(tokens) => Some(token_attributes(&format!("{path}.tokenAttributes"), tokens)?),
        None => None,
    };
    Ok(CredentialProvider {
        name: wire.name,
        match_images: wire.match_images,
        default_cache_duration,
        version: wire.api_version,
        args: wire.args,
        env: wire.env.into_iter().map(|variable| (variable.name, variable.value)).collect(),
        tokens,
    })
}

fn token_attributes(path: &str, wire: TokenWire) -> Result<TokenAttributes, Problem> {
    let problem = |field: &str, message: &str| Err(Problem::new(format!("{path}.{field}"), message));
    if wire.service_account_token_audience.is_empty() {
        return problem("serviceAccountTokenAudience", "must be set: the token's audience");
    }
    let Some(require_service_account) = wire.require_service_account else {
        return problem("requireServiceAccount", "must be set: true or false");
    };
    let (required, optional) =
        (wire.required_service_account_annotation_keys, wire.optional_service_account_annotation_keys);
    if !require_service_account && !required.is_empty() {
        return problem(
            "requiredServiceAccountAnnotationKeys",
            "can't be set if requireServiceAccount is false",
        );
    }
    let mut seen = BTreeSet::new();
    if let Some(twice) = required.iter().chain(&optional).find(|key| !seen.insert(key.as_str())) {
        return Err(Problem::new(path, format!("the annotation {twice:?} is listed twice")));
    }
    Ok(TokenAttributes {
        audience: wire.service_account_token_audience,
        require_service_account,
        required_annotations: required,
        optional_annotations: optional,
        cache_by_token: wire.cache_type == CacheType::Token,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_one(providers: &str) -> Result<Vec<CredentialProvider>, String> {
        let text = format!("apiVersion: kubelet.config.k8s.io/v1\nkind: {KIND}\nproviders:\n{providers}");
        parse(Path::new("providers.yaml"), &text).map_err(|error| error.to_string())
    }

    const ECR: &str = "- name: ecr\n  matchImages: ['*.registry.test']\n  defaultCacheDuration: 12h\n  \
                       apiVersion: credentialprovider.kubelet.k8s.io/v1\n";

    #[test]
    fn a_provider_is_read_with_all_that_it_says() {
        let more = "  args: [get]\n  env: [{name: A, value: '1'}]\n  tokenAttributes: {serviceAccountTokenAudience: reg, \
                    cacheType: Token, requireServiceAccount: true, requiredServiceAccountAnnotationKeys: [a.test/role]}\n";
        let provider = read_one(&format!("{ECR}{more}")).unwrap().remove(0);
        assert_eq!((provider.name.as_str(), provider.version), ("ecr", ProviderVersion::V1));
        assert_eq!(provider.default_cache_duration, Duration::from_secs(12 * 3600));
        assert_eq!(
            (provider.args, provider.env),
            (vec!["get".to_owned()], vec![("A".to_owned(), "1".to_owned())])
        );
        let tokens = provider.tokens.unwrap();
        assert!(tokens.cache_by_token && tokens.require_service_account);
        assert_eq!(tokens.required_annotations, ["a.test/role"]);
    }

    #[test]
    fn what_can_not_be_is_told_with_its_line() {
        let check = |providers: &str, expected: &str| {
            let error = read_one(providers).unwrap_err();
            assert!(error.contains(expected), "{error}");
        };
        check(&ECR.replace("ecr", "../ecr"), "4:9: providers[0].name: must be a file name");
        check(&ECR.replace("['*.registry.test']", "[]"), "matchImages: must name at least one image");
        check(&ECR.replace("  defaultCacheDuration: 12h\n", ""), "defaultCacheDuration: must be set");
        check(&ECR.replace("k8s.io/v1", "k8s.io/v2"), "unknown variant");
        check(&format!("{ECR}  tokens: {{}}\n"), "unknown field `tokens`");
        let beta = ECR.replace("k8s.io/v1", "k8s.io/v1beta1");
        let tokens = "  tokenAttributes: {serviceAccountTokenAudience: r, cacheType: Token, requireServiceAccount: false}\n";
        check(&format!("{beta}{tokens}"), "needs apiVersion credentialprovider.kubelet.k8s.io/v1");
        let keys = tokens.replace("false}", "false, requiredServiceAccountAnnotationKeys: [a]}");
        check(&format!("{ECR}{keys}"), "can't be set if requireServiceAccount is false");
        let other = parse(Path::new("x"), "apiVersion: v1\nkind: Pod\n").unwrap_err().to_string();
        assert!(other.contains("must be a CredentialProviderConfig of kubelet.config.k8s.io/v1"), "{other}");
    }

    #[test]
    fn the_files_of_a_folder_are_read_in_their_order() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, provider: &str| {
            let text = format!("apiVersion: kubelet.config.k8s.io/v1\nkind: {KIND}\nproviders:\n{provider}");
            std::fs::write(dir.path().join(name), text).unwrap();
        };
        let read = || CredentialProviders::read(dir.path(), Path::new("/bin"));
        assert!(read().unwrap_err().to_string().contains("no .json, .yaml or .yml files"));
        file("b.yaml", ECR);
        file("a.yml", &ECR.replace("ecr", "acr"));
        file("c.conf", "nothing");
        let names: Vec<String> = read().unwrap().providers.into_iter().map(|one| one.name).collect();
        assert_eq!(names, ["acr", "ecr"]);
        file("d.json", ECR);
        assert!(read().unwrap_err().to_string().contains("two providers have the name \"ecr\""));
    }
}
