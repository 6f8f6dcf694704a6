//! Checks of the container runtime, which is queried once.

use std::collections::BTreeSet;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use beelet_proto::cri;

use super::{Finding, Patient};
use beelet_base::propagation::{self, Reach, inspect};
use beelet_cgroups::Cgroups;
use beelet_config::Config;
use beelet_cri::ownership;
use beelet_cri::{Error, Runtime, sandbox_image};
use beelet_units::cgroup_driver::CgroupDriver;

/// Longer than a healthy runtime needs for any of these answers.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Answers of the runtime.
pub(super) struct Facts {
    endpoint: String,
    version: Result<cri::VersionResponse, Error>,
    status: Result<cri::StatusResponse, Error>,
    driver: Result<Option<CgroupDriver>, Error>,
    /// Requested images that the runtime lacks; None without an answer.
    missing: Option<Vec<String>>,
    /// The sandbox image if the runtime reports it, and the same image again if the runtime lacks it.
    sandbox: Option<(BTreeSet<String>, Vec<String>)>,
    /// Pinned images; None without an answer.
    pinned: Option<Vec<String>>,
    /// Processes of the runtime and of the agent that runs here.
    process: Option<u32>,
    agent: Option<u32>,
}

impl Facts {
    /// Returns the runtime's status, if it answered.
    pub(super) fn status(&self) -> Option<&cri::StatusResponse> {
        self.status.as_ref().ok()
    }

    /// Returns true if an agent runs on this machine.
    pub(super) fn has_agent(&self) -> bool {
        self.agent.is_some()
    }

    /// Returns the runtime's cgroup driver, if reported.
    pub(super) fn driver(&self) -> Option<CgroupDriver> {
        self.driver.as_ref().ok().copied().flatten()
    }

    /// Returns the images of pods that the runtime lacks, or None without an answer.
    pub(super) fn missing_images(&self) -> Option<&[String]> {
        self.missing.as_deref()
    }
}

/// Queries the runtime, including for these images.
pub(super) fn facts(config: &Config, images: &BTreeSet<String>) -> anyhow::Result<Facts> {
    crate::block_on(async {
        let runtime = Runtime::new(&config.runtime_endpoint, TIMEOUT)?;
        let status = runtime.status(true).await;
        let sandbox: BTreeSet<String> = status.as_ref().ok().and_then(sandbox_image).into_iter().collect();
        Ok(Facts {
            endpoint: config.runtime_endpoint.clone(),
            version: runtime.version().await,
            driver: runtime.runtime_config().await,
            missing: missing(&runtime, images).await.ok(),
            sandbox: missing(&runtime, &sandbox).await.ok().map(|missing| (sandbox, missing)),
            pinned: runtime.images.list().await.ok().map(|images| pinned(&images)),
            status,
            process: ownership::listener(runtime.socket()).await,
            agent: ownership::listener(&config.socket()).await,
        })
    })
}

/// Returns the names of images that the runtime never removes, the sandbox image among them.
fn pinned(images: &[cri::Image]) -> Vec<String> {
    let name = |image: &cri::Image| image.repo_tags.first().unwrap_or(&image.id).clone();
    images.iter().filter(|image| image.pinned).map(name).collect()
}

async fn missing(runtime: &Runtime, images: &BTreeSet<String>) -> Result<Vec<String>, Error> {
    let mut missing = Vec::new();
    for image in images {
        if runtime.images.status(image).await?.is_none() {
            missing.push(image.clone());
        }
    }
    Ok(missing)
}

pub(super) fn answers(patient: &Patient) -> Vec<Finding> {
    let facts = &patient.runtime;
    vec![match &facts.version {
        Ok(version) => Finding::ok(
            "runtime",
            format!(
                "{} {} (CRI {}) at {}",
                version.runtime_name, version.runtime_version, version.runtime_api_version, facts.endpoint
            ),
        ),
        Err(error) => Finding::missing(
            "runtime",
            error.to_string(),
            "the agent cannot start pods; it waits for the runtime and then continues",
            "install and start containerd or CRI-O, or set `containerRuntimeEndpoint` to its socket",
        ),
    }]
}

pub(super) fn conditions(patient: &Patient) -> Vec<Finding> {
    // The runtime check reports a missing answer.
    let Ok(answer) = &patient.runtime.status else { return Vec::new() };
    let conditions = answer.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    [
        ("RuntimeReady", "the agent cannot start pods", "see the runtime's log"),
        (
            "NetworkReady",
            "only pods with `hostNetwork` can start",
            "install the CNI plugins (bridge, host-local, loopback, portmap) and a network configuration in \
             /etc/cni/net.d; docs/operating.md has an example",
        ),
    ]
    .into_iter()
    .map(|(name, consequence, remedy)| judge_condition(name, conditions, consequence, remedy))
    .collect()
}

pub(super) fn sandbox(patient: &Patient) -> Vec<Finding> {
    let check = "sandbox image";
    let Some((present, missing)) = &patient.runtime.sandbox else { return Vec::new() };
    let here = present.iter().map(|image| Finding::ok(check, format!("{image} is present")));
    match missing.first() {
        None if present.is_empty() => {
            let version = patient.runtime.version.as_ref().ok();
            version
                .zip(patient.runtime.pinned.as_ref())
                .and_then(|(of, pinned)| guess(of, pinned))
                .into_iter()
                .collect()
        }
        None => here.collect(),
        Some(image) => vec![Finding::degraded(
            check,
            format!("{image} is missing"),
            "every pod waits until the image is pulled, forever without a registry",
            "run `beelet images pull IMAGE`, import the image, or set `sandbox_image` in the runtime's configuration",
        )],
    }
}

/// Guesses the sandbox image: containerd 2 does not report its name, but pins it once it is present.
fn guess(version: &cri::VersionResponse, pinned: &[String]) -> Option<Finding> {
    let is_silent = version.runtime_name == "containerd"
        && version.runtime_version.trim_start_matches('v').starts_with("2.");
    if !is_silent {
        return None;
    }
    let check = "sandbox image";
    if pinned.is_empty() {
        return Some(Finding::degraded(
            check,
            "probably missing: the runtime does not report its name, and has no pinned image",
            "every pod waits until the image is pulled, forever without a registry",
            "import the image under the name in the runtime's configuration (`sandbox` below `pinned_images`; default: \
             registry.k8s.io/pause); see docs/air-gapped.md",
        ));
    }
    Some(Finding::ok(check, format!("pinned by the runtime: {}", pinned.join(", "))))
}

fn judge_condition(
    name: &'static str,
    conditions: &[cri::RuntimeCondition],
    consequence: &str,
    remedy: &str,
) -> Finding {
    match conditions.iter().find(|condition| condition.r#type == name) {
        Some(condition) if condition.status => Finding::ok(name, "reported by the runtime"),
        Some(condition) => {
            let detail = format!("{}: {}", condition.reason, condition.message);
            Finding { check: name, ..Finding::degraded(name, detail, consequence, remedy) }
        }
        None => Finding::degraded(name, "not reported by the runtime", consequence, remedy),
    }
}

pub(super) fn cgroup_driver(patient: &Patient) -> Vec<Finding> {
    let Ok(reported) = patient.runtime.driver else { return Vec::new() };
    let configured = patient.config.cgroup_driver;
    let driver = reported.or(configured).unwrap_or_default();
    let by = match (reported, configured) {
        (Some(reported), Some(configured)) if reported != configured => {
            format!(
                "reported by the runtime; `cgroupDriver: {configured}` of the configuration has no effect"
            )
        }
        (Some(_), _) => "reported by the runtime".to_owned(),
        (None, Some(_)) => {
            "as configured; this runtime does not report its driver (containerd 2.0 does)".to_owned()
        }
        (None, None) => "assumed; this runtime does not report its driver (containerd 2.0 does): set \
                         `cgroupDriver: systemd` if the runtime has `SystemdCgroup = true`"
            .to_owned(),
    };
    vec![match Cgroups::discover(&patient.config.cgroup_root, driver) {
        Ok(_) => Finding::ok("cgroup driver", format!("{driver}, {by}")),
        Err(error) => Finding::missing(
            "cgroup driver",
            error.to_string(),
            "the agent refuses to start",
            "set `SystemdCgroup = false` in the runtime's configuration, or boot with cgroup v2 and systemd",
        ),
    }]
}

pub(super) fn owner(patient: &Patient) -> Vec<Finding> {
    let Ok(runtime) = Runtime::new(&patient.config.runtime_endpoint, TIMEOUT) else { return Vec::new() };
    let is_ours = UnixStream::connect(patient.config.socket()).is_ok();
    if let Some(why) = ownership::beelet_on(runtime.socket()).filter(|_| !is_ours) {
        return vec![Finding::missing(
            "one owner",
            why,
            "the agent refuses to start",
            "stop that agent, or give this one a runtime of its own (`containerRuntimeEndpoint`)",
        )];
    }
    vec![match ownership::kubelet_on(runtime.socket()) {
        Ok(None) => Finding::ok("one owner", "no kubelet is connected to this runtime"),
        Ok(Some(kubelet)) => Finding::missing(
            "one owner",
            format!("{} (process {}) drives this runtime", kubelet.program, kubelet.pid),
            "the agent and the kubelet would stop each other's pods; the agent refuses to start",
            "stop the kubelet (`systemctl disable --now kubelet`), or give beelet a runtime of its own",
        ),
        Err(error) => Finding::degraded(
            "one owner",
            format!("cannot list the runtime's clients: {error}"),
            "the agent cannot detect a kubelet on the same runtime",
            "run a kernel with `CONFIG_UNIX_DIAG`, and make sure that no kubelet runs",
        ),
    }]
}

/// Checks that the runtime sees the mounts made for pods: by the running agent, or else by an agent started
/// as the doctor was.
pub(super) fn mounts(patient: &Patient) -> Vec<Finding> {
    let (check, facts) = ("mounts", &patient.runtime);
    if facts.version.is_err() {
        // The runtime check reports a missing answer.
        return Vec::new();
    }
    let folder = &patient.config.beelet.pods_dir;
    let own = facts.agent.unwrap_or_else(std::process::id);
    let found = inspect(folder, own, facts.process);
    let remedy = propagation::remedy(found.stranger);
    let detail = propagation::sentence(found, &folder.display().to_string(), facts.process);
    vec![match found.reach {
        Reach::Yes => Finding::ok(check, detail),
        Reach::No => {
            let consequence = format!("{}; the agent refuses to start", propagation::CONSEQUENCE);
            Finding::missing(check, detail, consequence, remedy)
        }
        Reach::Unknown => {
            let consequence = format!("if the runtime does not see them, {}", propagation::CONSEQUENCE);
            Finding::degraded(check, detail, consequence, remedy)
        }
    }]
}

#[cfg(test)]
mod tests {
    use super::super::State;
    use super::*;

    #[test]
    fn a_condition_is_judged_by_what_the_runtime_says_of_it() {
        let condition = |kind: &str, status| cri::RuntimeCondition {
            r#type: kind.into(),
            status,
            reason: "Why".into(),
            message: "so".into(),
        };
        let judge =
            |conditions: &[cri::RuntimeCondition]| judge_condition("NetworkReady", conditions, "c", "r");
        assert_eq!(
            judge(&[condition("RuntimeReady", false), condition("NetworkReady", true)]).state,
            State::Ok
        );
        let unready = judge(&[condition("NetworkReady", false)]);
        assert_eq!((unready.state, unready.detail.as_str()), (State::Degraded, "Why: so"));
        assert_eq!(judge(&[]).state, State::Degraded);
    }
}
