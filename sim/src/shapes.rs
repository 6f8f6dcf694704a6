//! Pods of a simulation: their specs for the API and for the judge, and the behaviour of their processes,
//! which the container's own arguments describe.

use beelet_judge::trace;
use beelet_judge::trace::{ProbeKind, Restart, Role};
use fastrand::Rng;
use serde_json::{Value, json};

/// Name of the node.
pub(crate) const NODE: &str = "n1";
/// The image of every container.
pub(crate) const IMAGE: &str = "busybox:1.36";
/// Longest grace period of a manifest, in seconds.
const GRACE: u64 = 40;

/// A container.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Shape {
    pub(crate) name: String,
    pub(crate) role: Role,
    /// Requested CPU in thousandths.
    pub(crate) cpu: u64,
    /// Seconds until the process ends by itself, and its exit code.
    pub(crate) lives: Option<(u64, i32)>,
    /// Seconds from SIGTERM to the end of the process; None: the process ignores SIGTERM.
    pub(crate) stops: Option<u64>,
    /// Probes: kind, period in seconds, failure threshold.
    pub(crate) probes: Vec<(ProbeKind, u64, u32)>,
    /// True for a container with a preStop hook.
    pub(crate) hook: bool,
}

/// A pod.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Pod {
    pub(crate) name: String,
    pub(crate) uid: String,
    pub(crate) restart: Restart,
    pub(crate) grace: u64,
    pub(crate) deadline: Option<u64>,
    /// True for a static pod of a manifest, false for a pod of the API server.
    pub(crate) is_static: bool,
    pub(crate) containers: Vec<Shape>,
}

fn role_name(role: Role, number: usize) -> String {
    match role {
        Role::Init => format!("init{number}"),
        Role::Sidecar => format!("side{number}"),
        Role::Main => format!("main{number}"),
    }
}

fn shape(rng: &mut Rng, role: Role, number: usize, restart: Restart) -> Shape {
    let code = if rng.f64() < 0.3 { 1 + rng.i32(0..3) } else { 0 };
    let lives = match (role, restart) {
        (Role::Init, _) => Some((rng.u64(1..10), if rng.f64() < 0.1 { 1 } else { 0 })),
        (Role::Sidecar, _) if rng.f64() < 0.8 => None,
        (_, Restart::Always) if rng.f64() < 0.7 => None,
        (Role::Main, Restart::OnFailure | Restart::Never) if rng.f64() < 0.2 => None,
        _ => Some((if rng.bool() { rng.u64(1..30) } else { rng.u64(30..900) }, code)),
    };
    let mut probes = Vec::new();
    if role != Role::Init {
        for (kind, chance) in
            [(ProbeKind::Startup, 0.15), (ProbeKind::Liveness, 0.3), (ProbeKind::Readiness, 0.3)]
        {
            if rng.f64() < chance {
                probes.push((kind, rng.u64(5..20), rng.u32(1..4)));
            }
        }
    }
    let stops = (rng.f64() < 0.8).then(|| if rng.bool() { 0 } else { rng.u64(1..30) });
    // Some pods are large, so that the node is full at times.
    let cpu = 50 * if rng.f64() < 0.7 { rng.u64(1..8) } else { rng.u64(8..24) };
    let hook = role != Role::Init && rng.f64() < 0.1;
    Shape { name: role_name(role, number), role, cpu, lives, stops, probes, hook }
}

impl Pod {
    /// Returns a random pod.
    pub(crate) fn random(rng: &mut Rng, number: usize, is_static: bool) -> Self {
        let restart = match rng.u8(0..10) {
            0..=5 => Restart::Always,
            6..=7 => Restart::OnFailure,
            _ => Restart::Never,
        };
        let mut containers = Vec::new();
        for (role, most) in [(Role::Init, 2), (Role::Sidecar, 1), (Role::Main, 2)] {
            let least = usize::from(role == Role::Main);
            let count = if rng.bool() { least } else { rng.usize(least..=most) };
            containers.extend((0..count).map(|number| shape(rng, role, number, restart)));
        }
        let grace = match rng.u8(0..20) {
            0 if !is_static => u64::try_from(i64::MAX).unwrap_or(u64::MAX),
            0..=3 => 0,
            _ => rng.u64(1..GRACE),
        };
        let deadline = (restart != Restart::Always && rng.f64() < 0.2).then(|| rng.u64(30..600));
        // The API server gives its pods other ones.
        let uid = format!("00000000-0000-4000-8000-9{number:011}");
        Self { name: format!("p{number}"), uid, restart, grace, deadline, is_static, containers }
    }

    /// Returns the pod as the judge sees it.
    pub(crate) fn judged(&self) -> trace::Pod {
        let container = |shape: &Shape| trace::Container {
            name: shape.name.clone(),
            role: shape.role,
            cpu: shape.cpu,
            devices: 0,
            probes: shape.probes.iter().map(|(kind, _, failures)| (*kind, *failures)).collect(),
        };
        trace::Pod {
            uid: self.uid.clone(),
            name: self.name.clone(),
            restart: self.restart,
            grace: self.grace,
            deadline: self.deadline,
            containers: self.containers.iter().map(container).collect(),
        }
    }

    /// Returns the pod as the API server or its manifest has it.
    pub(crate) fn object(&self) -> Value {
        let of = |roles: &[Role]| -> Vec<Value> {
            self.containers.iter().filter(|shape| roles.contains(&shape.role)).map(Shape::object).collect()
        };
        let restart = match self.restart {
            Restart::Always => "Always",
            Restart::OnFailure => "OnFailure",
            Restart::Never => "Never",
        };
        let mut pod = json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": { "name": self.name, "namespace": "default", "uid": self.uid },
            "spec": {
                "restartPolicy": restart,
                "terminationGracePeriodSeconds": self.grace,
                "initContainers": of(&[Role::Init, Role::Sidecar]),
                "containers": of(&[Role::Main]),
            },
        });
        if let Some(deadline) = self.deadline {
            pod["spec"]["activeDeadlineSeconds"] = json!(deadline);
        }
        if !self.is_static {
            pod["spec"]["nodeName"] = json!(NODE);
        }
        pod
    }
}

impl Shape {
    fn object(&self) -> Value {
        let mut args = Vec::new();
        if let Some((seconds, code)) = self.lives {
            args.push(format!("lives={seconds}"));
            args.push(format!("code={code}"));
        }
        if let Some(seconds) = self.stops {
            args.push(format!("stops={seconds}"));
        }
        let mut object = json!({
            "name": self.name,
            "image": IMAGE,
            "args": args,
            "resources": { "requests": { "cpu": format!("{}m", self.cpu) } },
        });
        if self.role == Role::Sidecar {
            object["restartPolicy"] = json!("Always");
        }
        for (kind, period, failures) in &self.probes {
            let (field, word) = match kind {
                ProbeKind::Startup => ("startupProbe", "startup"),
                ProbeKind::Liveness => ("livenessProbe", "liveness"),
                ProbeKind::Readiness => ("readinessProbe", "readiness"),
            };
            object[field] = json!({
                "exec": { "command": ["probe", word] },
                "periodSeconds": period,
                "failureThreshold": failures,
                "timeoutSeconds": 4,
            });
        }
        if self.hook {
            object["lifecycle"] = json!({ "preStop": { "exec": { "command": ["hook"] } } });
        }
        object
    }
}

/// Behaviour of a process, from its arguments.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Behaviour {
    pub(crate) lives: Option<(u64, i32)>,
    pub(crate) stops: Option<u64>,
}

impl Behaviour {
    /// Reads the arguments of [`Shape::object`].
    pub(crate) fn of(args: &[String]) -> Self {
        let value = |key: &str| {
            args.iter().find_map(|arg| arg.strip_prefix(key)?.strip_prefix('=')?.parse::<u64>().ok())
        };
        let code = value("code").and_then(|code| i32::try_from(code).ok()).unwrap_or(0);
        Self { lives: value("lives").map(|seconds| (seconds, code)), stops: value("stops") }
    }
}
