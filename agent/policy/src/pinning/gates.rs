//! The feature gates that change the managers' decisions.

/// Gates with Kubernetes' names; the defaults are those of 1.36.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gates {
    /// `CPUManagerPolicyAlphaOptions`
    pub cpu_alpha_options: bool,
    /// `CPUManagerPolicyBetaOptions`
    pub cpu_beta_options: bool,
    /// `PodLevelResources`
    pub pod_level_resources: bool,
    /// `PodLevelResourceManagers` (KEP-5526)
    pub pod_level_managers: bool,
    /// `InPlacePodVerticalScalingExclusiveCPUs` (KEP-5554)
    pub resize_exclusive_cpus: bool,
}

impl Default for Gates {
    fn default() -> Self {
        Self {
            cpu_alpha_options: false,
            cpu_beta_options: true,
            pod_level_resources: true,
            pod_level_managers: false,
            resize_exclusive_cpus: false,
        }
    }
}

impl Gates {
    /// Sets the gate of this name; ignores a gate that no manager uses.
    pub fn set(&mut self, name: &str, enabled: bool) {
        match name {
            "CPUManagerPolicyAlphaOptions" => self.cpu_alpha_options = enabled,
            "CPUManagerPolicyBetaOptions" => self.cpu_beta_options = enabled,
            "PodLevelResources" => self.pod_level_resources = enabled,
            "PodLevelResourceManagers" => self.pod_level_managers = enabled,
            "InPlacePodVerticalScalingExclusiveCPUs" => self.resize_exclusive_cpus = enabled,
            _ => {}
        }
    }
}
