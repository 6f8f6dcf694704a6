//! The identity of a container's processes, as its OCI spec describes it (runtime-spec, `config.md` and
//! `config-linux.md`): the part that a command in the container shares with the container's first process.
//!
//! [`Plan::read`] refuses every field that the helper cannot reproduce, and every field that it does not
//! know: the runtime then runs the command. Must never guess.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Runtime types that start containers with runc (containerd's `runtimeType`).
const RUNC: [&str; 2] = ["io.containerd.runc.v2", "io.containerd.runc.v1"];
/// Names of the capabilities by number (kernel: include/uapi/linux/capability.h).
const CAPABILITIES: [&str; 41] = [
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_DAC_READ_SEARCH",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_SETGID",
    "CAP_SETUID",
    "CAP_SETPCAP",
    "CAP_LINUX_IMMUTABLE",
    "CAP_NET_BIND_SERVICE",
    "CAP_NET_BROADCAST",
    "CAP_NET_ADMIN",
    "CAP_NET_RAW",
    "CAP_IPC_LOCK",
    "CAP_IPC_OWNER",
    "CAP_SYS_MODULE",
    "CAP_SYS_RAWIO",
    "CAP_SYS_CHROOT",
    "CAP_SYS_PTRACE",
    "CAP_SYS_PACCT",
    "CAP_SYS_ADMIN",
    "CAP_SYS_BOOT",
    "CAP_SYS_NICE",
    "CAP_SYS_RESOURCE",
    "CAP_SYS_TIME",
    "CAP_SYS_TTY_CONFIG",
    "CAP_MKNOD",
    "CAP_LEASE",
    "CAP_AUDIT_WRITE",
    "CAP_AUDIT_CONTROL",
    "CAP_SETFCAP",
    "CAP_MAC_OVERRIDE",
    "CAP_MAC_ADMIN",
    "CAP_SYSLOG",
    "CAP_WAKE_ALARM",
    "CAP_BLOCK_SUSPEND",
    "CAP_AUDIT_READ",
    "CAP_PERFMON",
    "CAP_BPF",
    "CAP_CHECKPOINT_RESTORE",
];
/// Limits by number (kernel: include/uapi/asm-generic/resource.h), with their names in `/proc/PID/limits`.
pub(crate) const LIMITS: [(&str, &str); 16] = [
    ("RLIMIT_CPU", "Max cpu time"),
    ("RLIMIT_FSIZE", "Max file size"),
    ("RLIMIT_DATA", "Max data size"),
    ("RLIMIT_STACK", "Max stack size"),
    ("RLIMIT_CORE", "Max core file size"),
    ("RLIMIT_RSS", "Max resident set"),
    ("RLIMIT_NPROC", "Max processes"),
    ("RLIMIT_NOFILE", "Max open files"),
    ("RLIMIT_MEMLOCK", "Max locked memory"),
    ("RLIMIT_AS", "Max address space"),
    ("RLIMIT_LOCKS", "Max file locks"),
    ("RLIMIT_SIGPENDING", "Max pending signals"),
    ("RLIMIT_MSGQUEUE", "Max msgqueue size"),
    ("RLIMIT_NICE", "Max nice priority"),
    ("RLIMIT_RTPRIO", "Max realtime priority"),
    ("RLIMIT_RTTIME", "Max realtime timeout"),
];
/// Fields of `process` that the helper applies, or that have no effect on a command without a terminal.
const PROCESS: [&str; 13] = [
    "terminal",
    "consoleSize",
    "user",
    "args",
    "commandLine",
    "env",
    "cwd",
    "capabilities",
    "rlimits",
    "noNewPrivileges",
    "oomScoreAdj",
    "apparmorProfile",
    "selinuxLabel",
];
/// Fields of `process.user`. `username` is for Windows.
const USER: [&str; 5] = ["uid", "gid", "umask", "additionalGids", "username"];
/// Fields of `linux` that the helper applies, or that the container's namespaces and cgroups already have.
const LINUX: [&str; 12] = [
    "uidMappings",
    "gidMappings",
    "sysctl",
    "resources",
    "cgroupsPath",
    "namespaces",
    "devices",
    "netDevices",
    "seccomp",
    "rootfsPropagation",
    "maskedPaths",
    "readonlyPaths",
];
/// Maximum length of the name of an AppArmor profile, in bytes: the kernel accepts a page.
const MAX_PROFILE: usize = 4000;
/// Namespaces that a command joins; a container without one of them shares the machine's.
const NAMESPACES: [&str; 6] = ["pid", "network", "ipc", "uts", "mount", "cgroup"];

/// Reason why the runtime must run a container's commands: a clause for `probe ls`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unsupported {
    /// The runtime's verbose status lacks a part that containerd's has.
    #[error("the runtime reports no {0} (only containerd does)")]
    Unreported(&'static str),
    /// Another runtime than runc runs the container.
    #[error("the container's runtime is `{0}`, not runc")]
    Runtime(String),
    /// The container has something that the helper does not reproduce.
    #[error("the helper does not reproduce {0}")]
    Feature(String),
    /// The spec has a field that the helper does not know.
    #[error("the helper does not know the field `{0}` of the container's spec")]
    UnknownField(String),
    /// A field of the spec is malformed.
    #[error("the container's spec is malformed: {0}")]
    Malformed(String),
}

/// A limit of resources.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Limit {
    /// Number of the resource.
    pub resource: u8,
    pub soft: u64,
    pub hard: u64,
}

/// The five sets of capabilities, as bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Capabilities {
    pub bounding: u64,
    pub effective: u64,
    pub permitted: u64,
    pub inheritable: u64,
    pub ambient: u64,
}

/// The identity of a container's processes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
// A helper of an earlier version must not leave out a part that it does not know.
#[serde(deny_unknown_fields)]
pub struct Plan {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) groups: Vec<u32>,
    pub(crate) umask: Option<u32>,
    pub(crate) env: Vec<String>,
    pub(crate) cwd: String,
    pub(crate) capabilities: Capabilities,
    pub(crate) limits: Vec<Limit>,
    pub(crate) no_new_privileges: bool,
    pub(crate) oom_score_adj: i32,
    /// AppArmor profile; empty without one.
    pub(crate) apparmor: String,
    /// `linux.seccomp`, unread; null without a profile.
    pub(crate) seccomp: Value,
}

/// A container's first process and its [`Plan`], from the runtime's verbose status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Described {
    /// Pid of the first process, on the machine.
    pub pid: u32,
    /// Its identity.
    pub plan: Plan,
}

impl Described {
    /// Reads the `info` of containerd's verbose status of a running container.
    ///
    /// # Errors
    /// The runtime must run the container's commands, for this reason.
    pub fn read(info: &str) -> Result<Self, Unsupported> {
        let info: Value =
            serde_json::from_str(info).map_err(|error| Unsupported::Malformed(error.to_string()))?;
        let runtime = info["runtimeType"].as_str().ok_or(Unsupported::Unreported("runtime type"))?;
        if !RUNC.contains(&runtime) {
            return Err(Unsupported::Runtime(runtime.to_owned()));
        }
        // runc's own options (containerd: runtime/v2/runc/options), in two spellings.
        let options = &info["runtimeOptions"];
        for name in ["BinaryName", "binary_name"] {
            let binary = options[name].as_str().unwrap_or_default();
            if !binary.is_empty() && binary.rsplit('/').next() != Some("runc") {
                return Err(Unsupported::Runtime(binary.to_owned()));
            }
        }
        let pid = info["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok()).filter(|pid| *pid > 0);
        let pid = pid.ok_or(Unsupported::Unreported("process of the container"))?;
        let spec = info["runtimeSpec"].as_object().ok_or(Unsupported::Unreported("spec of the container"))?;
        Ok(Self { pid, plan: Plan::read(spec)? })
    }
}

impl Plan {
    /// Reads an OCI spec.
    fn read(spec: &Map<String, Value>) -> Result<Self, Unsupported> {
        let empty = Map::new();
        let part = |name: &str| spec.get(name).and_then(Value::as_object).unwrap_or(&empty);
        let (process, linux) = (part("process"), part("linux"));
        let user = process.get("user").and_then(Value::as_object).unwrap_or(&empty);
        known("process", process, &PROCESS)?;
        known("process.user", user, &USER)?;
        known("linux", linux, &LINUX)?;
        let text = |name: &str| process.get(name).and_then(Value::as_str).unwrap_or_default();
        let apparmor = text("apparmorProfile");
        if apparmor.len() > MAX_PROFILE || apparmor.contains(char::is_control) {
            return Err(Unsupported::Malformed(
                "`process.apparmorProfile` is not a profile's name".to_owned(),
            ));
        }
        if !text("selinuxLabel").is_empty() {
            return Err(Unsupported::Feature("SELinux labels".to_owned()));
        }
        for namespace in list(linux, "namespaces")? {
            let kind = namespace["type"].as_str().unwrap_or_default();
            if !NAMESPACES.contains(&kind) {
                return Err(Unsupported::Feature(format!("{kind} namespaces")));
            }
        }
        let numbers = |name: &str| -> Result<Vec<u32>, Unsupported> {
            list(user, name)?.iter().map(|value| number(value, "process.user")).collect()
        };
        let words = |name: &str| -> Result<Vec<String>, Unsupported> {
            list(process, name)?.iter().map(|value| word(value, "process.env")).collect()
        };
        let oom_score_adj = process.get("oomScoreAdj").and_then(Value::as_i64);
        let oom_score_adj = oom_score_adj.and_then(|adj| i32::try_from(adj).ok());
        // The runtime would let the command inherit the shim's score.
        let oom_score_adj = oom_score_adj
            .ok_or_else(|| Unsupported::Feature("a container without an OOM score".to_owned()))?;
        Ok(Self {
            uid: user.get("uid").map_or(Ok(0), |uid| number(uid, "process.user.uid"))?,
            gid: user.get("gid").map_or(Ok(0), |gid| number(gid, "process.user.gid"))?,
            groups: numbers("additionalGids")?,
            umask: user.get("umask").map(|mask| number(mask, "process.user.umask")).transpose()?,
            env: words("env")?,
            cwd: text("cwd").to_owned(),
            capabilities: Capabilities::read(process.get("capabilities").unwrap_or(&Value::Null))?,
            limits: list(process, "rlimits")?.iter().map(Limit::read).collect::<Result<_, _>>()?,
            no_new_privileges: process.get("noNewPrivileges").and_then(Value::as_bool).unwrap_or(false),
            oom_score_adj,
            apparmor: apparmor.to_owned(),
            seccomp: linux.get("seccomp").cloned().unwrap_or(Value::Null),
        })
    }
}

impl Capabilities {
    fn read(sets: &Value) -> Result<Self, Unsupported> {
        let set = |name: &str| -> Result<u64, Unsupported> {
            let mut bits = 0;
            for capability in sets[name].as_array().map(Vec::as_slice).unwrap_or_default() {
                let name = capability.as_str().unwrap_or_default();
                let place = CAPABILITIES.iter().position(|known| *known == name);
                let place = place.ok_or_else(|| Unsupported::Feature(format!("capability `{name}`")))?;
                bits |= 1 << place;
            }
            Ok(bits)
        };
        Ok(Self {
            bounding: set("bounding")?,
            effective: set("effective")?,
            permitted: set("permitted")?,
            inheritable: set("inheritable")?,
            ambient: set("ambient")?,
        })
    }
}

impl Limit {
    fn read(limit: &Value) -> Result<Self, Unsupported> {
        let name = limit["type"].as_str().unwrap_or_default();
        let resource = LIMITS.iter().position(|(known, _)| *known == name);
        let resource = resource.and_then(|place| u8::try_from(place).ok());
        let value = |name: &str| limit[name].as_u64();
        match (resource, value("soft"), value("hard")) {
            (Some(resource), Some(soft), Some(hard)) => Ok(Self { resource, soft, hard }),
            _ => Err(Unsupported::Malformed(format!("`process.rlimits` has {limit}"))),
        }
    }
}

/// Refuses fields outside `names`, unless they are empty.
fn known(place: &str, object: &Map<String, Value>, names: &[&str]) -> Result<(), Unsupported> {
    let is_empty = |value: &Value| match value {
        Value::Null => true,
        Value::Array(values) => values.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        Value::String(text) => text.is_empty(),
        Value::Bool(_) | Value::Number(_) => false,
    };
    match object.iter().find(|(name, value)| !names.contains(&name.as_str()) && !is_empty(value)) {
        Some((name, _)) => Err(Unsupported::UnknownField(format!("{place}.{name}"))),
        None => Ok(()),
    }
}

/// Returns the array in a field; an absent field is an empty array.
fn list<'a>(object: &'a Map<String, Value>, name: &str) -> Result<&'a [Value], Unsupported> {
    match object.get(name) {
        None | Some(Value::Null) => Ok(&[]),
        Some(Value::Array(values)) => Ok(values),
        Some(_) => Err(Unsupported::Malformed(format!("`{name}` is not an array"))),
    }
}

fn number(value: &Value, name: &str) -> Result<u32, Unsupported> {
    let number = value.as_u64().and_then(|number| u32::try_from(number).ok());
    number.ok_or_else(|| Unsupported::Malformed(format!("`{name}` has {value}")))
}

fn word(value: &Value, name: &str) -> Result<String, Unsupported> {
    let text = value.as_str().filter(|text| !text.contains('\0'));
    text.map(str::to_owned).ok_or_else(|| Unsupported::Malformed(format!("`{name}` has {value}")))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn info() -> Value {
        json!({
            "pid": 4711, "runtimeType": "io.containerd.runc.v2", "runtimeOptions": {"systemd_cgroup": true},
            "runtimeSpec": {
                "ociVersion": "1.0.2",
                "process": {
                    "user": {"uid": 1000, "gid": 100, "additionalGids": [100, 7]},
                    "args": ["/bin/app"], "env": ["PATH=/bin", "A=b"], "cwd": "/srv",
                    "capabilities": {"bounding": ["CAP_CHOWN", "CAP_KILL"], "effective": ["CAP_KILL"]},
                    "rlimits": [{"type": "RLIMIT_NOFILE", "soft": 10, "hard": 20}],
                    "noNewPrivileges": true, "oomScoreAdj": -997, "apparmorProfile": "cri-containerd.apparmor.d",
                },
                "linux": {
                    "namespaces": [{"type": "pid"}, {"type": "network", "path": "/proc/1/ns/net"}],
                    "resources": {"cpu": {"shares": 2}}, "cgroupsPath": "/kubepods/x",
                },
            },
        })
    }

    fn check(change: impl FnOnce(&mut Value), expected: &str) {
        let mut info = info();
        change(&mut info);
        let found = Described::read(&info.to_string()).unwrap_err().to_string();
        assert_eq!(found, expected, "{info}");
    }

    #[test]
    fn the_identity_of_a_containers_processes_is_read_from_its_spec() {
        let described = Described::read(&info().to_string()).unwrap();
        let capabilities =
            Capabilities { bounding: 1 | 1 << 5, effective: 1 << 5, ..Capabilities::default() };
        let plan = Plan {
            uid: 1000,
            gid: 100,
            groups: vec![100, 7],
            umask: None,
            env: vec!["PATH=/bin".to_owned(), "A=b".to_owned()],
            cwd: "/srv".to_owned(),
            capabilities,
            limits: vec![Limit { resource: 7, soft: 10, hard: 20 }],
            no_new_privileges: true,
            oom_score_adj: -997,
            apparmor: "cri-containerd.apparmor.d".to_owned(),
            seccomp: Value::Null,
        };
        assert_eq!(described, Described { pid: 4711, plan });
    }

    #[test]
    fn all_that_the_helper_cannot_reproduce_is_refused_with_its_name() {
        let process = |name: &'static str, value: Value| {
            move |info: &mut Value| info["runtimeSpec"]["process"][name] = value
        };
        let linux = |name: &'static str, value: Value| {
            move |info: &mut Value| info["runtimeSpec"]["linux"][name] = value
        };
        check(
            |info| info["runtimeType"] = json!("io.containerd.runsc.v1"),
            "the container's runtime is `io.containerd.runsc.v1`, not runc",
        );
        check(
            |info| info["runtimeOptions"] = json!({"BinaryName": "/usr/bin/crun"}),
            "the container's runtime is `/usr/bin/crun`, not runc",
        );
        check(
            |info| info["runtimeType"] = Value::Null,
            "the runtime reports no runtime type (only containerd does)",
        );
        check(
            |info| info["pid"] = json!(0),
            "the runtime reports no process of the container (only containerd does)",
        );
        let malformed =
            "the container's spec is malformed: `process.apparmorProfile` is not a profile's name";
        check(process("apparmorProfile", json!("a\nb")), malformed);
        check(
            process("oomScoreAdj", Value::Null),
            "the helper does not reproduce a container without an OOM score",
        );
        check(process("selinuxLabel", json!("a:b")), "the helper does not reproduce SELinux labels");
        check(
            process("ioPriority", json!({"class": "IOPRIO_CLASS_IDLE"})),
            "the helper does not know the field `process.ioPriority` of the container's spec",
        );
        check(
            linux("namespaces", json!([{"type": "user"}])),
            "the helper does not reproduce user namespaces",
        );
        check(
            linux("namespaces", json!([{"type": "time"}])),
            "the helper does not reproduce time namespaces",
        );
        check(
            linux("personality", json!({"domain": "LINUX32"})),
            "the helper does not know the field `linux.personality` of the container's spec",
        );
        check(
            process("capabilities", json!({"bounding": ["CAP_FUTURE"]})),
            "the helper does not reproduce capability `CAP_FUTURE`",
        );
        check(
            process("env", json!(["a\u{0}b"])),
            "the container's spec is malformed: `process.env` has \"a\\u0000b\"",
        );
        assert!(Described::read("no json").is_err());
        assert!(Described::read("{}").is_err());
    }
}
