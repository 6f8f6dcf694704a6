//! Command line of `beelet run`, the agent itself.

use std::io::{self, IsTerminal};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use serde_json::Map;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, Registry, reload};

use crate::{
    cluster::{self, ClusterArgs},
    node::{Builder, facts::check_reservations_here},
    pod_cidr,
    spans::Exporter,
};
use beelet_cli::{USAGE, failed};
use beelet_config::{Config, ConfigFaults, CredentialProviders, Setting, Sources, Tracing};
use beelet_kubelet_api::Verbosity;

/// Arguments of `beelet run`.
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// Configuration file: a KubeletConfiguration, and a BeeletConfiguration for the agent's own settings.
    /// `beelet config init` generates one.
    #[arg(long, value_name = "FILE", env = "BEELET_CONFIG", default_value = beelet_config::DEFAULT_PATH)]
    config: PathBuf,
    #[command(flatten)]
    cluster: ClusterArgs,
    #[command(flatten)]
    providers: ProviderArgs,
    /// Validate the configuration, print all effective values and exit.
    #[arg(long)]
    check: bool,
    /// Stop all pods when the agent exits. By default pods keep running and the next start adopts them.
    #[arg(long)]
    stop_pods_on_exit: bool,
    /// Take over the pods that a kubelet left running on this node. The kubelet must not run.
    #[arg(long)]
    adopt: bool,
    /// Increase verbosity (-v actions, -vv reasons). RUST_LOG overrides it.
    #[arg(short, long, action = clap::ArgAction::Count)]
    verbose: u8,
    /// For development: load this BPF object (from `cargo xtask build-ebpf --log`) and log the messages of
    /// its programs.
    #[arg(long, value_name = "OBJECT", num_args = 0..=1, default_missing_value = "target/bpf/beelet-log.bpf.o")]
    bpf_log: Option<PathBuf>,
    /// Format of log lines.
    #[arg(long, value_enum, default_value_t = LogFormat::Text)]
    log_format: LogFormat,
}

/// Flags for credential providers of image registries.
#[derive(Debug, Default, Args)]
pub(crate) struct ProviderArgs {
    /// Credential providers for image registries: a CredentialProviderConfig file, or a directory of them.
    #[arg(long, value_name = "FILE", requires = "image_credential_provider_bin_dir")]
    pub(crate) image_credential_provider_config: Option<PathBuf>,
    /// Directory of the credential provider programs.
    #[arg(long, value_name = "DIR", requires = "image_credential_provider_config")]
    pub(crate) image_credential_provider_bin_dir: Option<PathBuf>,
}

impl ProviderArgs {
    /// Adds the credential providers of the flags to the configuration.
    ///
    /// # Errors
    /// Only one of the flags is set, or a file is invalid.
    pub(crate) fn resolve(&self, config: &mut Config) -> Result<(), String> {
        config.credential_providers = match (
            &self.image_credential_provider_config,
            &self.image_credential_provider_bin_dir,
        ) {
            (None, None) => None,
            (Some(file), Some(folder)) => {
                Some(CredentialProviders::read(file, folder).map_err(|error| error.to_string())?)
            }
            _ => {
                return Err("`--image-credential-provider-config` and `--image-credential-provider-bin-dir` require each other: \
                                set both"
                        .to_owned());
            }
        };
        Ok(())
    }
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum LogFormat {
    /// Human-readable text.
    Text,
    /// One JSON object per line.
    Json,
}

/// Runs the agent until it is stopped.
#[must_use]
pub(crate) fn run(args: &RunArgs) -> ExitCode {
    let (mut config, warnings) = match Config::layered(args.sources()) {
        Ok(loaded) => loaded,
        Err(faults) => {
            print_faults(&faults, args.check);
            if !args.config.exists() {
                eprintln!("run `beelet config init` to generate a configuration for this machine");
            }
            return ExitCode::from(USAGE);
        }
    };
    config.beelet.bpf_log.clone_from(&args.bpf_log);
    if let Some(object) = &args.bpf_log
        && !object.is_file()
    {
        eprintln!(
            "error: BPF object {} not found: build it with `cargo xtask build-ebpf --log`",
            object.display()
        );
        return ExitCode::from(USAGE);
    }
    let resolved = args.providers.resolve(&mut config);
    let membership = match resolved.and_then(|()| args.cluster.resolve(&mut config)) {
        Ok(membership) => membership,
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::from(USAGE);
        }
    };
    if args.check {
        for warning in &warnings {
            eprintln!("warning: {warning}");
        }
        if let Err(error) = check_reservations_here(&config) {
            eprintln!("error: {error}");
            return ExitCode::from(USAGE);
        }
        print!("{}", config.effective());
        return ExitCode::SUCCESS;
    }
    let spans = config.tracing.as_ref().map(|tracing| (tracing, config.node_name.as_str()));
    let logging = start_logging(args.log_format, args.verbose, spans);
    for warning in &warnings {
        tracing::warn!("{warning}");
    }
    let mut builder = Builder::default().verbosity(logging.verbosity.clone());
    builder = match membership {
        Some(membership) => cluster::join(builder, &config, membership),
        None => pod_cidr::configured(builder, &config),
    };
    end(start(builder, config))
}

/// Prints all faults of a configuration and, with `with_warnings`, all settings without an effect.
pub(crate) fn print_faults(faults: &ConfigFaults, with_warnings: bool) {
    for warning in faults.warnings.iter().filter(|_| with_warnings) {
        eprintln!("warning: {warning}");
    }
    for error in &faults.errors {
        eprintln!("error: {error}");
    }
}

/// Returns the exit code of the program, and prints the error, if any.
pub(crate) fn end(ran: anyhow::Result<()>) -> ExitCode {
    match ran {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let code = failed(&error);
            if is_denied(&error) && !rustix::process::geteuid().is_root() {
                eprintln!(
                    "the agent needs root: start it as root, or through its unit (`systemctl start beelet`)"
                );
            }
            code
        }
    }
}

/// Returns true if the error was caused by missing permissions.
fn is_denied(error: &anyhow::Error) -> bool {
    let denied = |cause: &(dyn std::error::Error + 'static)| {
        let kind = cause.downcast_ref::<io::Error>().map(io::Error::kind);
        kind == Some(io::ErrorKind::PermissionDenied) || cause.to_string().contains("Permission denied")
    };
    error.chain().any(denied)
}

/// Runs a node until it is stopped.
pub(crate) fn start(builder: Builder, config: Config) -> anyhow::Result<()> {
    // Two threads are enough for any node, since nearly all tasks wait most of the time.
    crate::threads::run(2, crate::node::run(builder, config))
}

/// Returns the verbosity for the kubelet's log level: 2 is usual, 4 adds actions, 6 and above add reasons.
pub(crate) fn verbosity(level: u8) -> u8 {
    match level {
        0..=3 => 0,
        4..=5 => 1,
        _ => 2,
    }
}

impl RunArgs {
    /// Returns the configuration file and the settings of flags that override it.
    fn sources(&self) -> Sources {
        let switches = [
            (self.stop_pods_on_exit, "--stop-pods-on-exit", "stopPodsOnExit"),
            (self.adopt, "--adopt", "adoptKubeletPods"),
        ];
        let set = switches.into_iter().filter(|(is_set, ..)| *is_set).map(|(_, flag, field)| Setting {
            name: flag.to_owned(),
            kubelet: Map::new(),
            beelet: Map::from_iter([(field.to_owned(), true.into())]),
            replaces: None,
        });
        let flags = set.collect();
        Sources { file: Some(self.config.clone()), drop_ins: None, flags }
    }
}

fn directives(verbose: u8) -> &'static str {
    match verbose {
        0 => "info",
        1 => "info,beelet=debug",
        _ => "info,beelet=trace",
    }
}

/// Logging and the export of spans for the lifetime of the program.
pub(crate) struct Logging {
    /// Changes the log level.
    pub(crate) verbosity: Verbosity,
    /// Exporter of spans, which sends the last ones when it is dropped.
    _spans: Option<Exporter>,
}

/// Starts logging to standard error, since standard output is for commands' output, and the export of spans,
/// if configured. Without an export, no spans are created.
pub(crate) fn start_logging(format: LogFormat, verbose: u8, spans: Option<(&Tracing, &str)>) -> Logging {
    let filter = match std::env::var("RUST_LOG") {
        Ok(directives) if !directives.is_empty() => {
            EnvFilter::builder().with_default_directive(LevelFilter::INFO.into()).parse_lossy(directives)
        }
        _ => EnvFilter::new(directives(verbose)),
    };
    let (filter, handle) = reload::Layer::new(filter);
    let lines = tracing_subscriber::fmt::layer::<Registry>().with_writer(io::stderr);
    let lines = match format {
        LogFormat::Text => lines.with_ansi(io::stderr().is_terminal()).with_target(verbose > 0).boxed(),
        LogFormat::Json => lines.json().flatten_event(true).boxed(),
    };
    let spans = spans.filter(|(tracing, _)| tracing.per_million > 0);
    let spans = spans.map(|(tracing, node)| Exporter::start(tracing, node)).transpose();
    let layer = spans.as_ref().ok().and_then(Option::as_ref).map(Exporter::layer);
    tracing_subscriber::registry().with(lines.with_filter(filter)).with(layer).init();
    let verbosity = Verbosity::new(move |level| handle.reload(EnvFilter::new(directives(verbosity(level)))));
    if let Err(error) = &spans {
        tracing::warn!("cannot export spans: {error:#}");
    }
    Logging { verbosity, _spans: spans.ok().flatten() }
}
