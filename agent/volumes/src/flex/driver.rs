//! The drivers of `flexVolume`: programs that root installed in a folder of the machine. The agent runs a
//! driver without a shell, with a time limit and a maximum size of the output: drivers may be faulty in any
//! way.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsStr,
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use beelet_base::program::{Ended, Program};
use beelet_policy::volumes::flex_volume::{self as policy, Answer, Capabilities, Refusal};

use crate::{Error, disk};

/// Time limit for a driver's `init`, which returns its capabilities.
const INIT: Duration = Duration::from_secs(30);
/// Time limit for other commands: the time that the kubelet waits for a volume to be attached.
const LONG: Duration = Duration::from_secs(600);
/// Commands that may format, repair or write back a file system: they have the time limit of the agent's own
/// tools.
const OF_DISK: [&str; 4] = ["mountdevice", "mount", "unmount", "unmountdevice"];
/// Maximum size of an answer in bytes.
const ANSWER: usize = 64 << 10;

/// The drivers in a folder.
#[derive(Debug)]
pub(crate) struct Drivers {
    folder: PathBuf,
    known: Mutex<BTreeMap<String, Arc<Driver>>>,
}

/// A driver whose `init` has returned its capabilities.
#[derive(Debug)]
pub(crate) struct Driver {
    program: PathBuf,
    version: Version,
    pub(crate) capabilities: Capabilities,
    /// Commands that the driver does not support.
    unsupported: Mutex<BTreeSet<&'static str>>,
}

/// Facts about a program's file that change if another program replaces it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Version {
    file: (u64, u64),
    size: u64,
    changed: (i64, i64),
}

impl Version {
    /// Returns the version of the program at `path`; None if the program is missing.
    fn of(path: &Path) -> Option<Self> {
        let found = fs::metadata(path).ok().filter(fs::Metadata::is_file)?;
        let (file, changed) = ((found.dev(), found.ino()), (found.ctime(), found.ctime_nsec()));
        Some(Self { file, size: found.size(), changed })
    }
}

impl Drivers {
    pub(crate) fn new(folder: &Path) -> Self {
        Self { folder: folder.to_owned(), known: Mutex::default() }
    }

    fn known(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Driver>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a driver by its name, after calling the `init` of a new or replaced driver.
    pub(crate) fn get(&self, name: &str) -> Result<Arc<Driver>, Error> {
        let folder = policy::folder_of(name).ok_or_else(|| no_driver(name, "invalid name of a driver"))?;
        let program = self.folder.join(&folder).join(policy::program_of(&folder));
        let Some(version) = Version::of(&program) else {
            self.known().remove(name);
            return Err(no_driver(name, &format!("{} is missing", program.display())));
        };
        if let Some(known) = self.known().get(name).filter(|known| known.version == version) {
            return Ok(Arc::clone(known));
        }
        let mut driver =
            Driver { program, version, capabilities: Capabilities::default(), unsupported: Mutex::default() };
        let said = driver.call("init", &[]).map_err(|why| no_driver(name, &why.to_string()))?;
        let said = said.ok_or_else(|| no_driver(name, "init is not supported"))?;
        driver.capabilities = said.capabilities;
        let driver = Arc::new(driver);
        self.known().insert(name.to_owned(), Arc::clone(&driver));
        Ok(driver)
    }
}

/// Returns the kubelet's message with the cause.
fn no_driver(name: &str, why: &str) -> Error {
    Error::unmet(format!("no volume plugin matched (flexVolume driver {name:?}: {why})"))
}

/// Returns the time limit for a command.
fn time_for(command: &str) -> Duration {
    match command {
        "init" => INIT,
        command if OF_DISK.contains(&command) => disk::LONG,
        _ => LONG,
    }
}

impl Driver {
    fn unsupported(&self) -> MutexGuard<'_, BTreeSet<&'static str>> {
        self.unsupported.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs a command without secrets among its arguments. Returns None if the driver does not support the
    /// command.
    pub(crate) fn call(&self, command: &'static str, arguments: &[&OsStr]) -> Result<Option<Answer>, Error> {
        self.call_with(command, arguments, &[])
    }

    /// Runs a command. Returns None if the driver does not support the command. Errors, which become events,
    /// never contain the `secrets` of the arguments, although a driver may print them (a shell's `set -x`
    /// does).
    pub(crate) fn call_with(
        &self,
        command: &'static str,
        arguments: &[&OsStr],
        secrets: &[String],
    ) -> Result<Option<Answer>, Error> {
        if self.unsupported().contains(command) {
            return Ok(None);
        }
        // A driver reads its arguments by position, so no argument can become an option.
        let program = Program::at(&self.program).flag(command).positional(arguments);
        let Ended { status, output, .. } = disk::run(&program, time_for(command), ANSWER)?;
        match policy::read_answer(command, &output, secrets) {
            Ok(answer) if status.success() => Ok(Some(answer)),
            Ok(_) => {
                Err(Error::unmet(format!("{command} command failed ({status}) although it reported Success")))
            }
            Err(Refusal::NotSupported) => {
                self.unsupported().insert(command);
                Ok(None)
            }
            Err(Refusal::Failed(why)) if status.success() => Err(Error::unmet(why)),
            Err(Refusal::Failed(why)) => Err(Error::unmet(format!("{why} ({status})"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn install(folder: &Path, script: &str) {
        let place = folder.join("v~d");
        fs::create_dir_all(&place).unwrap();
        // A new file each time: a running program cannot be written.
        let temporary = place.join("new");
        fs::write(&temporary, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&temporary, fs::Permissions::from_mode(0o755)).unwrap();
        fs::rename(temporary, place.join("d")).unwrap();
    }

    #[test]
    fn init_runs_once_per_version_of_a_driver() {
        let dir = tempfile::tempdir().unwrap();
        let drivers = Drivers::new(dir.path());
        let none = drivers.get("v/d").unwrap_err().to_string();
        assert!(none.starts_with("no volume plugin matched") && none.contains("v~d/d"), "{none}");
        assert!(drivers.get("../d").unwrap_err().to_string().contains("invalid name of a driver"));
        let calls = dir.path().join("calls");
        let says = |answer: &str| format!("echo \"$@\" >> {}; echo '{answer}'", calls.display());
        install(dir.path(), &says(r#"{"status": "Success", "capabilities": {"attach": false}}"#));
        assert!(!drivers.get("v/d").unwrap().capabilities.attach);
        assert!(!drivers.get("v/d").unwrap().capabilities.attach);
        assert_eq!(fs::read_to_string(&calls).unwrap(), "init\n");
        install(dir.path(), &says(r#"{"status": "Success"}"#));
        assert!(drivers.get("v/d").unwrap().capabilities.attach);
        install(dir.path(), "exit 1");
        let broken = drivers.get("v/d").unwrap_err().to_string();
        assert!(broken.contains("cannot be read"), "{broken}");
    }

    #[test]
    fn unsupported_commands_are_called_once_and_failures_have_a_cause() {
        let dir = tempfile::tempdir().unwrap();
        let drivers = Drivers::new(dir.path());
        let calls = dir.path().join("calls");
        let script = format!(
            "echo $1 >> {}\ncase $1 in\ninit) echo '{{\"status\": \"Success\"}}';;\n\
             mount) echo '{{\"status\": \"Failure\", \"message\": \"no disk\"}}'; exit 1;;\n\
             unmount) echo '{{\"status\": \"Success\"}}'; exit 3;;\n\
             waitforattach) head -c 1000000 /dev/zero; exit 0;;\n\
             *) echo '{{\"status\": \"Not supported\"}}'; exit 1;;\nesac",
            calls.display()
        );
        install(dir.path(), &script);
        let driver = drivers.get("v/d").unwrap();
        let fails = |command: &'static str, words: &str| {
            let why = driver.call(command, &[OsStr::new("secret")]).unwrap_err().to_string();
            assert!(why.contains(words) && !why.contains("secret") && why.len() < 3000, "{why}");
        };
        fails("mount", "mount command failed, status: Failure, reason: no disk (exit status: 1)");
        fails("unmount", "although it reported Success");
        fails("waitforattach", "cannot be read");
        assert_eq!(driver.call("attach", &[]).unwrap(), None);
        assert_eq!(driver.call("attach", &[]).unwrap(), None);
        let called = fs::read_to_string(&calls).unwrap();
        assert_eq!(called.matches("\nattach\n").count(), 1, "{called}");
    }

    #[test]
    fn commands_that_may_format_have_the_time_limit_of_tools() {
        let check =
            |command: &str, seconds: u64| assert_eq!(time_for(command).as_secs(), seconds, "{command}");
        check("init", 30);
        for command in ["attach", "waitforattach", "detach"] {
            check(command, 600);
        }
        for command in ["mountdevice", "mount", "unmount", "unmountdevice"] {
            check(command, 3600);
        }
    }

    #[test]
    fn a_driver_that_prints_its_arguments_reveals_no_secret() {
        let dir = tempfile::tempdir().unwrap();
        let drivers = Drivers::new(dir.path());
        let script = r#"case $1 in
            init) echo '{"status": "Success"}';;
            mount) set -x; true "$@"; exit 1;;
            *) echo "{\"status\": \"Failure\", \"message\": \"$2 is wrong\"}"; exit 1;;
            esac"#;
        install(dir.path(), script);
        let driver = drivers.get("v/d").unwrap();
        let fails = |command: &'static str, secrets: &[String]| {
            driver.call_with(command, &[OsStr::new("aHVzaA==")], secrets).unwrap_err().to_string()
        };
        assert!(fails("mount", &[]).contains("aHVzaA=="), "the driver says it");
        assert!(fails("unmount", &[]).contains("aHVzaA=="), "the driver says it");
        let secrets = ["aHVzaA==".to_owned()];
        let why = fails("mount", &secrets);
        assert!(why.contains("cannot be read") && !why.contains("aHVz") && !why.contains("true"), "{why}");
        let why = fails("unmount", &secrets);
        assert!(why.contains("reason: *** is wrong"), "{why}");
    }
}
