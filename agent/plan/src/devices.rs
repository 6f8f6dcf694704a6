//! `plan devices`: assignment of devices over a sequence of events.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    time::Duration,
};

use k8s_openapi::api::core::v1::Pod;
use serde::{
    Deserialize, Deserializer, Serialize,
    de::{MapAccess, Visitor, value::MapAccessDeserializer},
};
use serde_json::{Value, json};

use crate::{Scenario, number, pod_name};
use beelet_policy::devices::{
    ContainerRequest, Device, Devices, PluginOptions,
    admission::{Admission, Circumstances, Next},
    container_requests,
};
use beelet_units::field::FieldError;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DevicesScenario {
    name: String,
    steps: Vec<Step>,
}

/// Fields of all steps; [`Step::check`] checks those of each op.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Step {
    op: Op,
    #[serde(default)]
    resource: Option<String>,
    #[serde(default)]
    options: Option<PluginOptions>,
    #[serde(default)]
    preferred: Option<Vec<String>>,
    #[serde(default)]
    fail_allocate: Option<bool>,
    #[serde(default)]
    devices: Option<Vec<Device>>,
    #[serde(default, deserialize_with = "number::optional")]
    at: Option<u64>,
    #[serde(default)]
    pod: Option<PodOrName>,
    #[serde(default)]
    container: Option<String>,
    #[serde(default)]
    running: Option<Vec<String>>,
}

#[derive(Deserialize, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
enum Op {
    Register,
    Devices,
    EndpointStopped,
    Admit,
    InitEnds,
    Remove,
    Restart,
    Capacity,
}

/// `admit` has a pod, `remove` and `initEnds` a pod's name.
pub(crate) enum PodOrName {
    Pod(Box<Pod>),
    Name(String),
}

impl<'de> Deserialize<'de> for PodOrName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;
        impl<'de> Visitor<'de> for Either {
            type Value = PodOrName;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a Pod (to admit) or its namespace/name (to remove)")
            }

            fn visit_str<E>(self, name: &str) -> Result<PodOrName, E> {
                Ok(PodOrName::Name(name.to_owned()))
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<PodOrName, A::Error> {
                Pod::deserialize(MapAccessDeserializer::new(map)).map(|pod| PodOrName::Pod(Box::new(pod)))
            }
        }
        deserializer.deserialize_any(Either)
    }
}

impl Step {
    /// Checks that the step has only fields of its op.
    fn check(&self) -> Result<(), FieldError> {
        let fields = [
            (
                "resource",
                self.resource.is_some(),
                matches!(self.op, Op::Register | Op::Devices | Op::EndpointStopped),
            ),
            ("options", self.options.is_some(), self.op == Op::Register),
            ("preferred", self.preferred.is_some(), self.op == Op::Register),
            ("failAllocate", self.fail_allocate.is_some(), self.op == Op::Register),
            ("devices", self.devices.is_some(), self.op == Op::Devices),
            ("at", self.at.is_some(), matches!(self.op, Op::EndpointStopped | Op::Capacity)),
            ("pod", self.pod.is_some(), matches!(self.op, Op::Admit | Op::InitEnds | Op::Remove)),
            ("container", self.container.is_some(), self.op == Op::InitEnds),
            ("running", self.running.is_some(), self.op == Op::Restart),
        ];
        let wrong = fields.into_iter().find(|(_, given, allowed)| *given && !allowed);
        wrong.map_or(Ok(()), |(field, ..)| Err(FieldError::new(field, "does not belong to this op")))
    }

    fn resource(&self) -> Result<&str, FieldError> {
        self.resource.as_deref().ok_or_else(|| FieldError::new("resource", "is missing; this op needs it"))
    }
}

#[derive(Serialize)]
pub(crate) struct DevicesOutput {
    results: Vec<Value>,
}

impl Scenario for DevicesScenario {
    type Output = DevicesOutput;

    fn name(&self) -> &str {
        &self.name
    }

    fn decide(&self) -> Result<DevicesOutput, FieldError> {
        let mut node = Node::default();
        let step = |(i, step): (usize, &Step)| {
            let result = step.check().and_then(|()| node.play(step));
            result.map_err(|error| error.under(&format!("steps[{i}]")))
        };
        Ok(DevicesOutput { results: self.steps.iter().enumerate().map(step).collect::<Result<_, _>>()? })
    }
}

/// A plugin of the scenario.
#[derive(Default)]
struct Plugin {
    preferred: Vec<String>,
    fails: bool,
}

/// A node with its plugins and pods.
#[derive(Default)]
struct Node {
    devices: Devices,
    plugins: BTreeMap<String, Plugin>,
    /// Active pods: name and uid.
    active: BTreeMap<String, String>,
    /// Pods whose last admission failed: they have ended permanently and do not count as running.
    refused: BTreeSet<String>,
    /// Running pods after a restart, while the desired pods are unknown.
    running: Option<BTreeSet<String>>,
    /// True if a pod with devices may have become inactive: the search for these takes time with many pods.
    stale: bool,
    now: Duration,
}

impl Node {
    fn play(&mut self, step: &Step) -> Result<Value, FieldError> {
        self.advance(step.at)?;
        match step.op {
            Op::Register => self.register(step)?,
            Op::Devices => {
                let devices = step
                    .devices
                    .as_ref()
                    .ok_or_else(|| FieldError::new("devices", "is missing; this op needs it"))?;
                self.devices.inventory.list(step.resource()?, devices.iter().cloned());
            }
            Op::EndpointStopped => self.devices.inventory.stopped(step.resource()?, self.now),
            Op::Admit => return self.admit(step),
            Op::InitEnds => self.init_ends(step)?,
            Op::Remove => match &step.pod {
                Some(PodOrName::Name(name)) => {
                    self.active.remove(name);
                    self.stale = true;
                }
                _ => return Err(FieldError::new("pod", "must be the namespace/name of the pod to remove")),
            },
            Op::Restart => self.restart(step.running.as_deref())?,
            Op::Capacity => {
                let capacity = self.devices.inventory.capacity(self.now);
                return Ok(json!({
                    "ok": true, "capacity": capacity.capacity, "allocatable": capacity.allocatable, "removed": capacity.removed,
                }));
            }
        }
        Ok(json!({"ok": true}))
    }

    /// Handles the permanent end of an init container: devices that no later container holds become free.
    fn init_ends(&mut self, step: &Step) -> Result<(), FieldError> {
        let Some(PodOrName::Name(name)) = &step.pod else {
            return Err(FieldError::new("pod", "must be the namespace/name of the init container's pod"));
        };
        let missing = || FieldError::new("container", "is missing; this op needs it");
        let container = step.container.as_deref().ok_or_else(missing)?;
        if let Some(uid) = self.active.get(name) {
            self.devices.holders.release(uid, container);
        }
        Ok(())
    }

    fn advance(&mut self, at: Option<u64>) -> Result<(), FieldError> {
        let Some(at) = at.map(Duration::from_secs) else { return Ok(()) };
        if at < self.now {
            let message = format!("{} is before the previous step ({})", at.as_secs(), self.now.as_secs());
            return Err(FieldError::new("at", message));
        }
        self.now = at;
        Ok(())
    }

    fn register(&mut self, step: &Step) -> Result<(), FieldError> {
        let resource = step.resource()?;
        let plugin = Plugin {
            preferred: step.preferred.clone().unwrap_or_default(),
            fails: step.fail_allocate.unwrap_or(false),
        };
        self.plugins.insert(resource.to_owned(), plugin);
        self.devices.inventory.register(resource, step.options.unwrap_or_default());
        Ok(())
    }

    /// Keeps only the content of the checkpoint file.
    fn restart(&mut self, running: Option<&[String]>) -> Result<(), FieldError> {
        let round_trip = self.devices.checkpoint().write().and_then(|file| Devices::read(&file, self.now));
        self.devices = round_trip.map_err(|error| FieldError::new("", error.to_string()))?;
        // The runtime may still list containers of a refused pod, but no admission has assigned devices to
        // them.
        let admitted = |name: &&String| !self.refused.contains(*name);
        self.running = running.map(|names| names.iter().filter(admitted).cloned().collect());
        self.plugins.clear();
        Ok(())
    }

    fn admit(&mut self, step: &Step) -> Result<Value, FieldError> {
        let Some(PodOrName::Pod(pod)) = &step.pod else {
            return Err(FieldError::new("pod", "must be the Pod to admit"));
        };
        let name = pod_name(pod).map_err(|error| error.under("pod"))?;
        let requests = container_requests(pod).map_err(|error| error.under("pod"))?;
        let uid = pod.metadata.uid.clone().filter(|uid| !uid.is_empty()).unwrap_or_else(|| name.clone());
        let before = self.active.insert(name.clone(), uid.clone());
        self.stale |= before.is_some_and(|before| before != uid);
        if let Err(error) = self.serve(&name, &uid, requests) {
            // Its earlier devices are freed with those of removed pods.
            self.active.remove(&name);
            self.refused.insert(name);
            self.stale |= self.devices.holders.held(&uid).is_some();
            return Ok(json!({"ok": false, "error": error}));
        }
        self.refused.remove(&name);
        let mut allocations: BTreeMap<&str, BTreeMap<&str, BTreeSet<String>>> = BTreeMap::new();
        for (container, held) in self.devices.holders.held(&uid).into_iter().flatten() {
            let ids = held.iter().map(|(resource, held)| (resource.as_str(), held.ids()));
            allocations.insert(container, ids.collect());
        }
        Ok(json!({"ok": true, "allocations": allocations}))
    }

    fn serve(&mut self, name: &str, uid: &str, wishes: Vec<ContainerRequest<'_>>) -> Result<(), String> {
        let already_running = self.running.as_ref().is_some_and(|running| running.contains(name));
        let running =
            wishes.iter().filter(|_| already_running).map(|wish| wish.container.to_owned()).collect();
        let circumstances = Circumstances { running, ..Circumstances::default() };
        let mut admission = Admission::new(uid, wishes, circumstances);
        loop {
            match admission.next(&mut self.devices).map_err(|error| error.to_string())? {
                Next::Free => self.free_inactive(),
                Next::Ask { resource, question } => {
                    let plugin = self.plugins.get(&resource);
                    admission.preferred(question, plugin.map_or(&[][..], |plugin| &plugin.preferred));
                }
                Next::Allocate { resource, .. } => {
                    if self.plugins.get(&resource).is_some_and(|plugin| plugin.fails) {
                        self.devices.holders.recount();
                        return Err(format!("the device plugin of {resource} failed to allocate"));
                    }
                    admission.allocated(&mut self.devices, Vec::new());
                }
                Next::Done => return Ok(()),
            }
        }
    }

    fn free_inactive(&mut self) {
        if self.stale && self.running.is_none() {
            let active: BTreeSet<&str> = self.active.values().map(String::as_str).collect();
            self.devices.holders.free_inactive(|uid| active.contains(uid));
            self.stale = false;
        }
    }
}
