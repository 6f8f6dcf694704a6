//! Command line of the program under the name `kubelet`: the kubelet's flags, version, errors and folders.
//! [`flags`] maps flags to the same configuration that `beelet run` reads from a file.

mod flags;
mod lock_file;

use std::{
    ffi::{OsStr, OsString},
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::{
    Arg, ArgAction, ArgMatches, Command,
    error::{ContextKind, ContextValue, ErrorKind},
};
use serde_json::{Map, Value, json};

use crate::{
    cluster::{self, ClusterArgs, Membership},
    node::Builder,
    pod_cidr,
    run::{self, LogFormat, ProviderArgs},
};
use beelet_cluster::node::KUBELET_VERSION;
use beelet_config::{Config, Setting, Sources, Warning};
use beelet_policy::node::labels;

use self::{
    flags::{FLAGS, Flag, IGNORED, Shape},
    lock_file::LockFile,
};

/// Program name that selects this command line.
const NAME: &str = "kubelet";
/// Default root of the kubelet's folders.
const ROOT: &str = "/var/lib/kubelet";
/// Folder in which log shippers expect links to containers' logs.
const LOG_LINKS: &str = "/var/log/containers";
/// Flags other than settings of the configuration.
const OWN: [(&str, &str, &str); 14] = [
    ("config", "FILE", "Configuration file"),
    (
        "config-dir",
        "DIR",
        "Directory of drop-in configurations: *.conf files, merged over the configuration in the order of their names",
    ),
    ("kubeconfig", "FILE", "Kubeconfig for the API server. Default: run standalone"),
    (
        "bootstrap-kubeconfig",
        "FILE",
        "Kubeconfig for requesting a client certificate, used if --kubeconfig does not exist",
    ),
    ("cert-dir", "DIR", "Directory of certificates. Default: pki in --root-dir"),
    ("root-dir", "DIR", "Directory of pod volumes, plugins and certificates. Default: /var/lib/kubelet"),
    ("hostname-override", "NAME", "Name of the node. Default: the hostname"),
    ("node-ip", "IP[,IP]", "Addresses of the node, at most one IPv4 and one IPv6"),
    ("node-labels", "KEY=VALUE,...", "Labels to register the Node with"),
    ("cloud-provider", "external", "Set to `external` if a cloud controller sets the Node's addresses"),
    (
        "image-credential-provider-config",
        "FILE",
        "Credential providers for image registries: a CredentialProviderConfig file, or a directory of them",
    ),
    ("image-credential-provider-bin-dir", "DIR", "Directory of the credential provider programs"),
    ("logging-format", "text|json", "Format of log lines"),
    (LOCK_FILE, "FILE", "File that the agent locks before it starts, waiting for the current holder"),
];
const LOCK_FILE: &str = "lock-file";
const EXIT_ON_LOCK_CONTENTION: &str = "exit-on-lock-contention";

/// Returns true if the program was called by the kubelet's name.
pub(crate) fn is_called(program: Option<&OsStr>) -> bool {
    program.and_then(|path| Path::new(path).file_name()).is_some_and(|name| name == NAME)
}

/// Runs the agent with the kubelet's command line.
pub(crate) fn main(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let arguments = arguments.into_iter().map(normalized);
    let matches = match command().try_get_matches_from(arguments) {
        Ok(matches) => matches,
        Err(error) => return refused(&error),
    };
    if text(&matches, "version").is_some_and(|version| version != "false") {
        println!("Kubernetes {KUBELET_VERSION}");
        return ExitCode::SUCCESS;
    }
    let (config, membership, warnings, lock_file) = match read(&matches)
        .and_then(|(config, membership, warnings)| Ok((config, membership, warnings, lock_file(&matches)?)))
    {
        Ok(read) => read,
        Err(error) => {
            eprintln!("Error: {error}");
            return ExitCode::FAILURE;
        }
    };
    let level = text(&matches, "v").and_then(|level| level.parse::<u8>().ok()).unwrap_or_default();
    let verbose = run::verbosity(level);
    let json = text(&matches, "logging-format") == Some("json");
    let format = if json { LogFormat::Json } else { LogFormat::Text };
    let spans = config.tracing.as_ref().map(|tracing| (tracing, config.node_name.as_str()));
    let logging = run::start_logging(format, verbose, spans);
    for warning in &warnings {
        tracing::warn!("{warning}");
    }
    let _lock = match lock_file.as_ref().map(LockFile::acquire).transpose() {
        Ok(lock) => lock,
        Err(error) => {
            eprintln!("Error: {error}");
            return ExitCode::FAILURE;
        }
    };
    let mut builder = Builder::default().verbosity(logging.verbosity.clone());
    builder = match membership {
        Some(membership) => cluster::join(builder, &config, membership),
        None => pod_cidr::configured(builder, &config),
    };
    run::end(run::start(builder, config))
}

fn command() -> Command {
    let value = |name: &'static str| Arg::new(name).long(name).action(ArgAction::Set);
    // Repeated flags add up, as in Go.
    let several = |name: &'static str| Arg::new(name).long(name).action(ArgAction::Append);
    let mut command = Command::new(NAME)
        .about("A node agent that replaces the kubelet (beelet)")
        .disable_version_flag(true)
        .args_override_self(true)
        .max_term_width(110)
        .arg(value("v").short('v').value_name("LEVEL").help("Log verbosity: 4 adds actions, 6 adds reasons"))
        .arg(switch("version").help("Print the version and exit"))
        .arg(
            switch(EXIT_ON_LOCK_CONTENTION)
                .help("End the agent when another process opens or removes --lock-file"),
        );
    for (name, placeholder, help) in OWN {
        let arg = if name == "node-labels" { several(name) } else { value(name) };
        command = command.arg(arg.value_name(placeholder).help(help));
    }
    for Flag { name, field, shape } in FLAGS {
        let arg = match shape {
            Shape::Switch => switch(name),
            shape if shape.has_parts() => several(name),
            _ => value(name),
        };
        command = command.arg(arg.help(format!("Sets {field} of the configuration")));
    }
    for (name, why, is_switch) in IGNORED {
        let arg = if *is_switch { switch(name) } else { value(name) };
        command = command.arg(arg.help(format!("Has no effect: {why}")));
    }
    command
}

/// Returns a flag without a value, or with a value after an equals sign, as in Go.
fn switch(name: &'static str) -> Arg {
    Arg::new(name)
        .long(name)
        .action(ArgAction::Set)
        .num_args(0..=1)
        .require_equals(true)
        .default_missing_value("true")
        .value_name("true|false")
}

/// Replaces underscores in a flag's name by dashes, as in Go.
fn normalized(argument: OsString) -> OsString {
    let Some(text) = argument.to_str().filter(|text| text.starts_with("--")) else { return argument };
    let (name, value) = text.split_once('=').map_or((text, None), |(name, value)| (name, Some(value)));
    let name = name.replace('_', "-");
    value.map_or_else(|| name.clone(), |value| format!("{name}={value}")).into()
}

/// Prints the kubelet's error for an invalid command line, or the help.
fn refused(error: &clap::Error) -> ExitCode {
    let context = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.clone()),
        _ => None,
    };
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            print!("{error}");
            return ExitCode::SUCCESS;
        }
        ErrorKind::UnknownArgument => match context(ContextKind::InvalidArg) {
            Some(flag) if flag.starts_with("--") => {
                eprintln!("Error: failed to parse kubelet flag: unknown flag: {flag}");
            }
            Some(flag) if flag.starts_with('-') => {
                eprintln!("Error: failed to parse kubelet flag: unknown shorthand flag: {flag}");
            }
            Some(word) => eprintln!("Error: unknown command {word:?}"),
            None => eprintln!("{error}"),
        },
        _ => eprintln!("{error}"),
    }
    eprintln!("run `kubelet --help` for the flags");
    ExitCode::FAILURE
}

fn text<'m>(matches: &'m ArgMatches, name: &str) -> Option<&'m str> {
    matches.get_one::<String>(name).map(String::as_str).filter(|text| !text.is_empty())
}

/// Returns all values of a repeated flag, joined by commas.
fn all(matches: &ArgMatches, name: &str) -> Option<String> {
    let said: Vec<&str> = matches.get_many::<String>(name)?.map(String::as_str).collect();
    Some(said.join(","))
}

fn read(matches: &ArgMatches) -> Result<(Config, Option<Membership>, Vec<Warning>), String> {
    let sources = Sources {
        file: text(matches, "config").map(PathBuf::from),
        drop_ins: text(matches, "config-dir").map(PathBuf::from),
        flags: settings(matches)?,
    };
    let (mut config, mut warnings) = Config::layered(sources).map_err(|error| error.to_string())?;
    for (name, why, _) in IGNORED {
        if matches.contains_id(name) {
            warnings.push(Warning::of_flag(name, format!("has no effect: {why}")));
        }
    }
    config.node.external_cloud = match text(matches, "cloud-provider") {
        None => false,
        Some("external") => true,
        Some(other) => {
            return Err(format!(
                "--cloud-provider: {other:?} is not supported; use `external` with the cloud's own controller"
            ));
        }
    };
    config.log_links = Some(LOG_LINKS.into());
    config.put_back_restarts = true;
    let root = text(matches, "root-dir").unwrap_or(ROOT);
    let args = ClusterArgs {
        kubeconfig: text(matches, "kubeconfig").map(PathBuf::from),
        bootstrap_kubeconfig: text(matches, "bootstrap-kubeconfig").map(PathBuf::from),
        cert_dir: Some(text(matches, "cert-dir").map_or_else(|| Path::new(root).join("pki"), PathBuf::from)),
        node_ip: ips(text(matches, "node-ip").unwrap_or_default())?,
        node_labels: labels(&all(matches, "node-labels").unwrap_or_default())?,
    };
    let membership = args.resolve(&mut config)?;
    let providers = ProviderArgs {
        image_credential_provider_config: text(matches, "image-credential-provider-config")
            .map(PathBuf::from),
        image_credential_provider_bin_dir: text(matches, "image-credential-provider-bin-dir")
            .map(PathBuf::from),
    };
    providers.resolve(&mut config)?;
    Ok((config, membership, warnings))
}

/// Returns the lock to take before the start.
fn lock_file(matches: &ArgMatches) -> Result<Option<LockFile>, String> {
    let exit_on_contention = text(matches, EXIT_ON_LOCK_CONTENTION).is_some_and(|value| value != "false");
    match text(matches, LOCK_FILE) {
        Some(path) => Ok(Some(LockFile { path: path.into(), exit_on_contention })),
        None if exit_on_contention => {
            Err("cannot exit on lock file contention: no lock file specified".to_owned())
        }
        None => Ok(None),
    }
}

/// Returns the settings of the flags.
fn settings(matches: &ArgMatches) -> Result<Vec<Setting>, String> {
    let root = text(matches, "root-dir").unwrap_or(ROOT);
    // As the kubelet, the agent always uses the folders below --root-dir.
    let mut ours = Map::new();
    ours.insert("kubeletDir".to_owned(), json!(root));
    ours.insert("podsDir".to_owned(), json!(format!("{root}/pods")));
    ours.insert("seccompProfileRoot".to_owned(), json!(format!("{root}/seccomp")));
    let setting =
        |name: &str, kubelet, beelet| Setting { name: format!("--{name}"), kubelet, beelet, replaces: None };
    let mut settings = vec![setting("root-dir", Map::new(), ours)];
    if let Some(name) = text(matches, "hostname-override") {
        let beelet = Map::from_iter([("nodeName".to_owned(), json!(name.trim().to_lowercase()))]);
        settings.push(setting("hostname-override", Map::new(), beelet));
    }
    for flag in FLAGS {
        if let Some(value) = all(matches, flag.name) {
            let kubelet = flag.fields(&value).map_err(|error| {
                format!("invalid argument {value:?} for \"--{}\" flag: {error}", flag.name)
            })?;
            let replaces = flag.shape.is_map().then_some(flag.field);
            settings.push(Setting { replaces, ..setting(flag.name, kubelet, Map::new()) });
        }
    }
    Ok(settings)
}

fn ips(text: &str) -> Result<Vec<std::net::IpAddr>, String> {
    let each = text.split(',').map(str::trim).filter(|ip| !ip.is_empty());
    each.map(|ip| ip.parse().map_err(|_| format!("--node-ip: {ip:?} is not an IP address"))).collect()
}

/// Parses labels of a Node, and refuses those that a kubelet may not set itself.
fn labels(text: &str) -> Result<Vec<(String, String)>, String> {
    let each = text.split(',').filter(|label| !label.trim().is_empty());
    let pairs: Vec<(String, String)> = each
        .map(|label| match label.trim() {
            label if label.contains('=') => cluster::label(label),
            key => cluster::label(&format!("{key}=")),
        })
        .collect::<Result<_, _>>()
        .map_err(|error| format!("--node-labels: {error}"))?;
    let refused: Vec<&str> =
        pairs.iter().map(|(key, _)| key.as_str()).filter(|key| !labels::may_be_set(key)).collect();
    if refused.is_empty() {
        return Ok(pairs);
    }
    Err(format!(
        "unknown 'kubernetes.io' or 'k8s.io' labels specified with --node-labels: {}\n--node-labels in the 'kubernetes.io' \
         namespace must begin with an allowed prefix ({}) or be in the specifically allowed set ({})",
        refused.join(", "),
        labels::PREFIXES.join(", "),
        labels::ALLOWED.join(", "),
    ))
}

/// Returns a document with the value of a nested field.
fn nested(path: &str, value: Value) -> Map<String, Value> {
    let mut parts: Vec<&str> = path.split('.').collect();
    let top = parts.remove(0).to_owned();
    let value = parts.into_iter().rev().fold(value, |value, part| json!({ part: value }));
    Map::from_iter([(top, value)])
}

#[cfg(test)]
mod tests;
