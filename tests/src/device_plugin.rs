//! The sample device plugin (`src/bin/sample_device_plugin.rs`) as a child process: told what to do by lines,
//! and heard.

use std::io::{BufRead as _, Write as _};
use std::path::Path;
use std::process::{ChildStdin, Command, Stdio};
use std::sync::mpsc;

use anyhow::{Context as _, Result, bail};

use crate::guards::Process;
use crate::workdir::{PATIENCE, stretched};

/// A running plugin. Dropped, it is killed.
#[derive(Debug)]
pub struct SamplePlugin {
    child: Process,
    stdin: Option<ChildStdin>,
    lines: mpsc::Receiver<String>,
    heard: Vec<String>,
}

impl SamplePlugin {
    /// Starts the binary, on the folder `device-plugins` of an agent, with these arguments.
    pub fn start(binary: &Path, dir: &Path, arguments: &[&str]) -> Result<Self> {
        let mut child = Command::new(binary)
            .arg("--dir")
            .arg(dir)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("could not start {}", binary.display()))?;
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

    /// Starts it and waits until it has registered.
    pub fn registered(binary: &Path, dir: &Path, arguments: &[&str]) -> Result<Self> {
        let mut plugin = Self::start(binary, dir, arguments)?;
        plugin.hear("registered")?;
        Ok(plugin)
    }

    /// Tells it something, and waits until it has heard.
    pub fn tell(&mut self, line: &str) -> Result<()> {
        let stdin = self.stdin.as_mut().context("the plugin was told to quit")?;
        writeln!(stdin, "{line}").context("the plugin has ended")?;
        if line != "quit" {
            self.hear("done")?;
        }
        Ok(())
    }

    /// Waits for a line that begins so; the rest of it.
    pub fn hear(&mut self, beginning: &str) -> Result<String> {
        loop {
            if let Some(at) = self.heard.iter().position(|line| line.starts_with(beginning)) {
                let line = self.heard.remove(at);
                return Ok(line[beginning.len()..].trim().to_owned());
            }
            match self.lines.recv_timeout(stretched(PATIENCE)) {
                Ok(line) => self.heard.push(line),
                Err(_) => bail!("the plugin never said {beginning:?}; it said {:?}", self.heard),
            }
        }
    }

    /// The lines that begin so and haven't been heard, without waiting.
    pub fn heard(&mut self, beginning: &str) -> Vec<String> {
        self.heard.extend(self.lines.try_iter());
        self.heard.iter().filter(|line| line.starts_with(beginning)).cloned().collect()
    }

    /// Kills it at once.
    pub fn kill9(self) {
        drop(self.child);
    }

    /// Has it end in order, its socket removed.
    pub fn quit(mut self) -> Result<()> {
        self.tell("quit")?;
        self.stdin = None;
        self.child.0.wait().context("the plugin does not end")?;
        Ok(())
    }
}
