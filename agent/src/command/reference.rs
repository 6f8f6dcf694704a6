//! Generates docs/cli.md from the definition of the command line.
//! `BEELET_BLESS=1 cargo test -p beelet --lib cli_page` writes the page.

use std::fmt::Write as _;

use clap::{Arg, Command, CommandFactory as _};

use super::Cli;

const HEAD: &str = "\
# Commands

This page is generated from the code (`BEELET_BLESS=1 cargo test -p beelet --lib cli_page`); a test fails if it is outdated.

All commands except `run`, `observe`, `doctor`, `config`, `version`, `cordon`, `uncordon`, `drain`, `bpf`, `plan`, `completions` and `man` use the
agent's socket, so only root on the node can run them. `--socket PATH` (`BEELET_SOCKET`) names another socket than `/run/beelet/beelet.sock`. `beelet COMMAND --help` and the manual pages
have the long texts; [pods](pods.md#commands) explains the commands for pods. Called as `kubelet`, the program takes the kubelet's flags
([cluster](cluster.md#in-the-kubelets-place)).
";

/// The page's sections, with the commands of each.
const SECTIONS: &[(&str, &[&str])] = &[
    ("The agent", &["run", "observe", "doctor", "config", "version"]),
    (
        "Pods",
        &[
            "get",
            "describe",
            "apply",
            "diff",
            "delete",
            "wait",
            "restart",
            "logs",
            "exec",
            "attach",
            "cp",
            "port-forward",
            "debug",
        ],
    ),
    ("Measurements", &["top", "events", "probe", "tune", "devices", "bpf"]),
    ("The node", &["cordon", "uncordon", "drain", "handover"]),
    ("Images and garbage", &["images", "gc"]),
    ("Decisions", &["plan"]),
    ("The shell", &["completions", "man"]),
];

/// Arguments of all commands, which the page's head explains.
const COMMON: [&str; 3] = ["help", "version", "socket"];

fn page() -> String {
    let mut cli = Cli::command();
    cli.build();
    let mut text = HEAD.to_owned();
    for (title, names) in SECTIONS {
        let _ = write!(text, "\n## {title}\n");
        for command in names.iter().filter_map(|name| cli.find_subcommand(name)) {
            section(&mut text, command);
        }
    }
    text
}

fn section(text: &mut String, command: &Command) {
    let name = command.get_bin_name().unwrap_or_default();
    let _ = write!(text, "\n### {name}\n\n{}.\n\n    {}\n", about(command), usage(command));
    arguments(text, command);
    let examples = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    if let Some(examples) = examples.trim().strip_prefix("Examples:") {
        text.push('\n');
        for line in examples.lines().map(str::trim).filter(|line| !line.is_empty()) {
            let _ = writeln!(text, "    {line}");
        }
    }
    let subcommands: Vec<&Command> =
        command.get_subcommands().filter(|one| one.get_name() != "help").collect();
    if subcommands.is_empty() {
        return;
    }
    text.push_str("\n| command | effect |\n| --- | --- |\n");
    for one in &subcommands {
        let name = one.get_bin_name().unwrap_or_default();
        let aliases: Vec<&str> = one.get_visible_aliases().collect();
        let aliases = match aliases.len() {
            0 => String::new(),
            1 => format!(" [alias: {}]", aliases[0]),
            _ => format!(" [aliases: {}]", aliases.join(", ")),
        };
        let _ = writeln!(text, "| `{name}` | {}{aliases} |", cell(&about(one)));
    }
    for one in subcommands.into_iter().filter(|one| shown(one).next().is_some()) {
        let _ = write!(text, "\nOptions of `{}`:\n", usage(one));
        arguments(text, one);
    }
}

fn about(command: &Command) -> String {
    command.get_about().map(ToString::to_string).unwrap_or_default()
}

/// Returns the line after `Usage: `.
fn usage(command: &Command) -> String {
    let usage = command.clone().render_usage().to_string();
    usage.trim().trim_start_matches("Usage: ").lines().map(str::trim).collect::<Vec<_>>().join(" ")
}

fn shown(command: &Command) -> impl Iterator<Item = &Arg> {
    command.get_arguments().filter(|one| !one.is_hide_set() && !COMMON.contains(&one.get_id().as_str()))
}

/// Adds a table of the command's own arguments: positional ones first.
fn arguments(text: &mut String, command: &Command) {
    let (positional, options): (Vec<&Arg>, Vec<&Arg>) = shown(command).partition(|one| one.is_positional());
    if positional.is_empty() && options.is_empty() {
        return;
    }
    text.push_str("\n| argument or option | meaning |\n| --- | --- |\n");
    for one in positional.into_iter().chain(options) {
        let short = one.get_short().filter(|_| one.get_long().is_some());
        let short = short.map(|letter| format!("-{letter}, ")).unwrap_or_default();
        let help = one.get_help().map(ToString::to_string).unwrap_or_default();
        let _ = writeln!(text, "| `{short}{}` | {}{} |", cell(&one.to_string()), cell(&help), notes(one));
    }
}

/// Returns the variable, the default and the possible values of an argument that takes a value.
fn notes(argument: &Arg) -> String {
    let mut notes = String::new();
    if !argument.get_action().takes_values() {
        return notes;
    }
    if let Some(variable) = argument.get_env() {
        let _ = write!(notes, " (variable: `{}`)", variable.to_string_lossy());
    }
    let defaults = argument.get_default_values();
    if !defaults.is_empty() && !argument.is_hide_default_value_set() {
        let values: Vec<_> = defaults.iter().map(|value| value.to_string_lossy()).collect();
        let _ = write!(notes, " (default: `{}`)", values.join(" "));
    }
    let possible = argument.get_possible_values();
    let possible: Vec<&str> = possible
        .iter()
        .filter(|one| !one.is_hide_set())
        .map(clap::builder::PossibleValue::get_name)
        .collect();
    if !possible.is_empty() && !argument.is_hide_possible_values_set() {
        let _ = write!(notes, " [possible values: {}]", possible.join(", "));
    }
    notes
}

/// Returns the text for a cell of a table.
fn cell(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|")
}

#[test]
fn the_cli_page_is_what_the_code_says() {
    beelet_testing::page::check("docs/cli.md", &page(), "cargo test -p beelet --lib cli_page");
}

#[test]
fn every_command_is_in_a_section_of_the_cli_page() {
    let cli = Cli::command();
    let listed: Vec<&str> = SECTIONS.iter().flat_map(|(_, names)| names.iter().copied()).collect();
    for command in cli.get_subcommands() {
        assert!(listed.contains(&command.get_name()), "{} has no section", command.get_name());
    }
}
