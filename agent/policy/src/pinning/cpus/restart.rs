//! A start although the state file is of another policy, another machine or other settings. The kubelet
//! refuses to start there until an administrator deletes the file.

use super::{
    super::{cpu_set::CpuSet, error::PinningError},
    CpuManager, CpuState, Policy,
};

/// Starts a manager with an empty state, and gives pods back the CPUs of the file that may still be given
/// away. Returns the pods that lose theirs. A file that can't be read has no pods.
///
/// # Errors
/// The settings leave nothing to start with.
pub fn recover(manager: &mut CpuManager, file: &str) -> Result<Vec<String>, PinningError> {
    let old = CpuState::read_of_any(file, manager.pod_level)
        .or_else(|_| CpuState::read_of_any(file, !manager.pod_level))
        .map(|(_, old)| old)
        .unwrap_or_default();
    manager.start(None)?;
    let mut lost = Vec::new();
    for (uid, containers) in old.containers {
        let of_pod = old.pods.get(&uid).filter(|_| manager.pod_level);
        let cpus = containers.values().chain(of_pod).fold(CpuSet::default(), |all, set| all.union(set));
        let free = match &manager.policy {
            Policy::None => CpuSet::default(),
            Policy::Static(own) => own.available(&manager.state),
        };
        if cpus.is_subset(&free) && !cpus.is_empty() {
            manager.state.shared = manager.state.shared.difference(&cpus);
            manager.state.pods.extend(of_pod.map(|cpus| (uid.clone(), cpus.clone())));
            manager.state.containers.insert(uid, containers);
        } else if !cpus.is_empty() {
            lost.push(uid);
        }
    }
    Ok(lost)
}
