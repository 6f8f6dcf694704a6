//! Rules for hooks and for restart policies of containers.

use k8s_openapi::api::core::v1::{Container, LifecycleHandler, PodSpec};

use super::{Problems, probes};

/// Maximum number of restart rules per container: the API's own limit.
const RULES_MAX: usize = 20;
/// Maximum number of exit codes per rule: the API's own limit.
const CODES_MAX: usize = 255;

/// Checks the hooks of a container; `plain_init` is true for an init container that is not a sidecar.
pub(super) fn hooks(
    path: &str,
    container: &Container,
    spec: &PodSpec,
    plain_init: bool,
    problems: &mut Problems,
) {
    let Some(lifecycle) = &container.lifecycle else { return };
    if plain_init {
        problems.add(
            format!("{path}.lifecycle"),
            "is only for containers and sidecars (restartPolicy: Always), not for init containers",
        );
    }
    if let Some(signal) = &lifecycle.stop_signal {
        let path = format!("{path}.lifecycle.stopSignal");
        if spec.os.is_none() {
            problems.add(&path, "needs the pod's os.name, since signals depend on the operating system");
        }
        if beelet_spec::signals::parse(signal).is_none() {
            problems.add(&path, "unknown signal; use e.g. SIGTERM, SIGUSR1 or SIGRTMIN+3");
        }
    }
    let grace = spec.termination_grace_period_seconds.unwrap_or(30);
    for (field, hook) in [("postStart", &lifecycle.post_start), ("preStop", &lifecycle.pre_stop)] {
        if let Some(hook) = hook {
            handler(&format!("{path}.lifecycle.{field}"), container, hook, grace, problems);
        }
    }
}

fn handler(path: &str, container: &Container, hook: &LifecycleHandler, grace: i64, problems: &mut Problems) {
    if hook.tcp_socket.is_some() {
        problems.add(format!("{path}.tcpSocket"), "has never been supported; use exec, httpGet or sleep");
    }
    let handlers =
        [hook.exec.is_some(), hook.http_get.is_some(), hook.sleep.is_some(), hook.tcp_socket.is_some()];
    match handlers.into_iter().filter(|there| *there).count() {
        1 => {}
        0 => problems.add(path, "must have one of exec, httpGet or sleep"),
        _ => problems.add(path, "must have only one of exec, httpGet or sleep"),
    }
    if let Some(exec) = &hook.exec
        && exec.command.as_ref().is_none_or(Vec::is_empty)
    {
        problems.add(format!("{path}.exec.command"), "must be set to the command and its arguments");
    }
    if let Some(sleep) = &hook.sleep {
        problems.within(&format!("{path}.sleep.seconds"), Some(sleep.seconds), 0..=grace);
    }
    if let Some(http) = &hook.http_get {
        probes::http_get(&format!("{path}.httpGet"), container, http, problems);
    }
}

/// Checks a container's own restart policy and its rules (KEP-753, KEP-5307, KEP-5532).
pub(super) fn restarts(path: &str, container: &Container, problems: &mut Problems) {
    let policies = ["Always", "OnFailure", "Never"];
    let policy = format!("{path}.restartPolicy");
    problems.one_of(&policy, container.restart_policy.as_deref(), &policies);
    let rules = container.restart_policy_rules.as_deref().unwrap_or_default();
    if !rules.is_empty() && container.restart_policy.is_none() {
        problems.add(&policy, "must be set together with restartPolicyRules");
    }
    if rules.len() > RULES_MAX {
        problems.add(format!("{path}.restartPolicyRules"), format!("must have at most {RULES_MAX} rules"));
    }
    for (i, rule) in rules.iter().enumerate() {
        let path = format!("{path}.restartPolicyRules[{i}]");
        problems.one_of(&format!("{path}.action"), Some(&rule.action), &["Restart", "RestartAllContainers"]);
        let Some(codes) = &rule.exit_codes else {
            problems.add(format!("{path}.exitCodes"), "must be set");
            continue;
        };
        problems.one_of(&format!("{path}.exitCodes.operator"), Some(&codes.operator), &["In", "NotIn"]);
        let values = codes.values.as_deref().unwrap_or_default();
        if values.is_empty() || values.len() > CODES_MAX {
            problems
                .add(format!("{path}.exitCodes.values"), format!("must have 1 to {CODES_MAX} exit codes"));
        }
        for value in values {
            problems.within(&format!("{path}.exitCodes.values"), Some(i64::from(*value)), 0..=255);
        }
    }
}
