//! `beelet bpf`: the agent's BPF programs and maps, for machines without bpftool.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Subcommand};
use comfy_table::{Table, presets};
use serde_json::json;

use super::{USAGE, failed};
use beelet_bpf::{MapMemory, Pinned, PinnedProgram};
use beelet_config::Config;

/// Arguments of `beelet bpf`.
#[derive(Debug, Args)]
pub struct BpfArgs {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List the BPF programs and maps that an agent has pinned.
    Ls {
        #[command(flatten)]
        place: Place,
        /// Print one JSON object instead of tables.
        #[arg(long)]
        json: bool,
    },
    /// Print the entries of a map, one JSON object per line.
    Dump {
        /// Name of the map, as printed by `beelet bpf ls`.
        map: String,
        #[command(flatten)]
        place: Place,
    },
}

/// Location of an agent's pins.
#[derive(Debug, Args)]
struct Place {
    /// Configuration file of the agent. Default: built-in defaults.
    #[arg(long, value_name = "FILE", env = "BEELET_CONFIG")]
    config: Option<PathBuf>,
    /// BPF file system. Default: from the configuration.
    #[arg(long, value_name = "DIR")]
    bpffs: Option<PathBuf>,
    /// Directory of the pins in the BPF file system. Default: from the configuration.
    #[arg(long, value_name = "NAME")]
    pin_name: Option<String>,
}

impl Place {
    fn resolve(&self) -> Result<(PathBuf, String), String> {
        let loaded = match &self.config {
            Some(path) => Config::load(path),
            None => Config::with_defaults(),
        };
        let (config, _) = loaded.map_err(|error| error.to_string())?;
        let bpffs = self.bpffs.clone().unwrap_or(config.beelet.bpffs);
        Ok((bpffs, self.pin_name.clone().unwrap_or(config.beelet.pin_name)))
    }
}

/// Reads the pins and prints them.
#[must_use]
pub fn run(args: &BpfArgs) -> ExitCode {
    let place = match &args.command {
        Command::Ls { place, .. } | Command::Dump { place, .. } => place,
    };
    let (bpffs, pin_name) = match place.resolve() {
        Ok(found) => found,
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::from(USAGE);
        }
    };
    let text = match &args.command {
        Command::Ls { json, .. } => beelet_bpf::pinned(&bpffs, &pin_name)
            .map(|found| if *json { as_json(&found) } else { tables(&found) }),
        Command::Dump { map, .. } => beelet_bpf::dump(&bpffs, &pin_name, map)
            .map(|entries| entries.iter().map(|entry| format!("{entry}\n")).collect()),
    };
    match text {
        Ok(text) => {
            use std::io::Write as _;
            // A closed standard output is not a failure: its reader has seen enough.
            let _ = std::io::stdout().lock().write_all(text.as_bytes());
            ExitCode::SUCCESS
        }
        Err(error) => failed(&error.into()),
    }
}

fn as_json(found: &Pinned) -> String {
    let program = |program: &PinnedProgram| {
        json!({
            "name": program.name, "hook": program.hook, "id": program.id,
            "verifiedInstructions": program.verified_instructions, "jittedBytes": program.jitted_bytes,
            "runs": program.runs, "runNs": program.run_ns,
        })
    };
    let map = |map: &MapMemory| {
        json!({
            "name": map.map, "entries": map.entries, "entryBytes": map.entry_bytes, "copies": map.copies,
            "bytes": map.bytes,
        })
    };
    let all = json!({
        "dir": found.dir, "digest": found.digest,
        "programs": found.programs.iter().map(program).collect::<Vec<_>>(),
        "maps": found.maps.iter().map(map).collect::<Vec<_>>(),
    });
    format!("{all:#}\n")
}

fn tables(found: &Pinned) -> String {
    let mut programs = Table::new();
    programs.load_style(presets::NOTHING).set_header(["PROGRAM", "HOOK", "ID", "VERIFIED", "CODE"]);
    for program in &found.programs {
        programs.add_row([
            program.name.to_owned(),
            program.hook.clone(),
            program.id.to_string(),
            program.verified_instructions.to_string(),
            format!("{} B", program.jitted_bytes),
        ]);
    }
    let mut maps = Table::new();
    maps.load_style(presets::NOTHING).set_header(["MAP", "ENTRIES", "BYTES EACH", "COPIES", "KIB"]);
    for map in &found.maps {
        let kib = map.bytes.div_ceil(1024);
        maps.add_row([
            map.map.to_owned(),
            map.entries.to_string(),
            map.entry_bytes.to_string(),
            map.copies.to_string(),
            kib.to_string(),
        ]);
    }
    let trimmed = |table: &Table| -> String {
        table.to_string().lines().map(|line| format!("{}\n", line.trim_end())).collect()
    };
    format!(
        "{}, from the object {}\n\n{}\n{}",
        found.dir.display(),
        found.digest.get(..12).unwrap_or_default(),
        trimmed(&programs),
        trimmed(&maps)
    )
}
