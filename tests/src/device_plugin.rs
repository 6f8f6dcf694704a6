//! Sample device plugin (`src/bin/sample_device_plugin.rs`) as a child process, controlled and observed by
//! lines of text.

use std::io::{BufRead as _, Write as _};
use std::path::Path;
use std::process::{ChildStdin, Command, Stdio};
use std::sync::mpsc;

use anyhow::{Context as _, Result, bail};

use crate::guards::Process;
use crate::workdir::{PATIENCE, stretched};

/// Running plugin, killed on drop.
#[derive(Debug)]
pub struct SamplePlugin {
    child: Process,
    stdin: Option<ChildStdin>,
    lines: mpsc::Receiver<String>,
    heard: Vec<String>,
}

impl SamplePlugin {
    /// Starts the binary on the folder `device-plugins` of an agent, with these arguments.
    pub fn start(binary: &Path, dir: &Path, arguments: &[&str]) -> Result<Self> {
        let mut child = Command::new(binary)
            .arg("--dir")
            .arg(dir)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {}", binary.display()))?;
        let stdin = child.stdin.take();
        let stdout = child.stdout.take().context("the plugin has no standard output")?;
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in std::io::BufReader::new(stdout).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Ok(Self { child: Process(child), stdin, lines, heard: Vec::new() })
    }

    /// Starts the plugin and waits until it has registered.
    pub fn registered(binary: &Path, dir: &Path, arguments: &[&str]) -> Result<Self> {
        let mut plugin = Self::start(binary, dir, arguments)?;
        plugin.hear("registered")?;
        Ok(plugin)
    }

    /// Runs a command and waits for its end.
    pub fn run(&mut self, line: &str) -> Result<()> {
        let stdin = self.stdin.as_mut().context("the plugin has quit")?;
        writeln!(stdin, "{line}").context("the plugin has ended")?;
        if line != "quit" {
            self.hear("done")?;
        }
        Ok(())
    }

    /// Waits for a line with this prefix; returns the rest of the line.
    pub fn hear(&mut self, beginning: &str) -> Result<String> {
        loop {
            if let Some(at) = self.heard.iter().position(|line| line.starts_with(beginning)) {
                let line = self.heard.remove(at);
                return Ok(line[beginning.len()..].trim().to_owned());
            }
            match self.lines.recv_timeout(stretched(PATIENCE)) {
                Ok(line) => self.heard.push(line),
                Err(_) => bail!(
                    "the plugin printed no line starting with {beginning:?}; its output: {:?}",
                    self.heard
                ),
            }
        }
    }

    /// Returns the lines with this prefix that were not consumed yet, without waiting.
    pub fn heard(&mut self, beginning: &str) -> Vec<String> {
        self.heard.extend(self.lines.try_iter());
        self.heard.iter().filter(|line| line.starts_with(beginning)).cloned().collect()
    }

    /// Kills the plugin with SIGKILL.
    pub fn kill9(self) {
        drop(self.child);
    }

    /// Ends the plugin in an orderly way, which removes its socket.
    pub fn quit(mut self) -> Result<()> {
        self.run("quit")?;
        self.stdin = None;
        self.child.0.wait().context("the plugin does not end")?;
        Ok(())
    }
}
