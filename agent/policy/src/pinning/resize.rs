//! Exclusive CPUs of running pods that grow and shrink (KEP-5554, `InPlacePodVerticalScalingExclusiveCPUs`).
//! The kubelet of 1.36 with this gate accepts the amounts, and leaves the CPUs as they are.

use super::{
    cpus::resize::CpuChange,
    error::Refusal,
    needs::{ContainerNeeds, Needs},
    pins::{NO_LOCALITY, Pins},
};

/// The refusal of a resize.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ResizeRefusal {
    /// This pod can't have these amounts while it runs.
    #[error("{0}")]
    Never(String),
    /// Too little is free at present.
    #[error("{0}")]
    Later(String),
}

impl Pins {
    /// Gives a running pod the number of CPUs that `needs` requests instead of `before`. Containers keep as
    /// many of their CPUs as they can. A container that runs in the shared pool stays there. Changes nothing
    /// on an error.
    ///
    /// # Errors
    /// The new numbers are impossible for a running pod, or too few CPUs are free.
    pub fn resize(&mut self, needs: &Needs, before: &Needs) -> Result<(), ResizeRefusal> {
        if self.cpus.allocatable().is_empty() || needs.ignored {
            return Ok(());
        }
        let changed = self.changed(needs, before)?;
        if changed.is_empty() {
            return Ok(());
        }
        if needs.pod_level {
            let message =
                "the exclusive CPUs of a pod with pod-level resources can't change while the pod runs";
            return Err(ResizeRefusal::Never(message.to_owned()));
        }
        let (grows, shrinks): (Vec<_>, Vec<_>) =
            changed.into_iter().partition(|(held, container)| *held < container.cpus);
        let mut new = self.clone();
        // The CPUs that one container gives back are free for another.
        for (_, container) in shrinks {
            let change = CpuChange::new(&mut new.cpus, needs, container);
            let merged = new.topology.merge(&[change.shrink_hints()]);
            change.shrink(merged.hint.nodes.filter(|_| merged.admitted)).map_err(never)?;
        }
        let of_pod = new.is_per_pod();
        for (_, container) in grows {
            let memory = match of_pod {
                true => new.memory.pod_hints(needs),
                false => new.memory.hints(needs, container),
            };
            let change = CpuChange::new(&mut new.cpus, needs, container);
            change.check_whole_cores().map_err(never)?;
            let merged = new.topology.merge(&[change.growth_hints(of_pod), memory]);
            if !merged.admitted {
                return Err(ResizeRefusal::Later(format!("container {}: {NO_LOCALITY}", container.name)));
            }
            change.grow(merged.hint.nodes).map_err(|refusal| ResizeRefusal::Later(refusal.message))?;
        }
        *self = new;
        Ok(())
    }

    /// Returns the containers whose number of exclusive CPUs changes, each with its present number.
    fn changed<'a>(
        &self,
        needs: &'a Needs,
        before: &Needs,
    ) -> Result<Vec<(usize, &'a ContainerNeeds)>, ResizeRefusal> {
        let mut changed = Vec::new();
        for container in &needs.containers {
            let old = before.containers.iter().find(|old| old.name == container.name);
            if old.is_some_and(|old| (old.cpus > 0) != (container.cpus > 0)) {
                return Err(ResizeRefusal::Never(format!(
                    "container {} can't change between exclusive and shared CPUs while it runs",
                    container.name
                )));
            }
            if let Some(held) = self.cpus.of(&needs.uid, &container.name)
                && container.cpus > 0
                && held.len() != container.cpus
            {
                changed.push((held.len(), container));
            }
        }
        Ok(changed)
    }
}

fn never(refusal: Refusal) -> ResizeRefusal {
    ResizeRefusal::Never(refusal.message)
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, sync::Arc};

    use beelet_units::quantity::Quantity;
    use k8s_openapi::api::core::v1::Pod;
    use serde_json::json;

    use super::*;
    use crate::pinning::{
        Cpu, CpuSet, CpuTopology, Gates,
        cpus::{CpuManager, CpuSettings, reclaim::reclaim},
        memory::{MemoryManager, MemorySettings},
        pins::Alignment,
        topology::{Node, TopologyManager, TopologySettings},
    };

    /// Returns two NUMA nodes of four CPUs each, two threads per core: cores 0-1, 2-3, 4-5, 6-7. CPU 0 is
    /// reserved.
    fn pins(topology: &str, option: &str) -> Pins {
        let cpu = |cpu: u32| Cpu { cpu, core: cpu / 2, socket: cpu / 4, numa: cpu / 4, uncore: None };
        let machine = Arc::new(CpuTopology::new(&(0..8).map(cpu).collect::<Vec<_>>()).unwrap());
        let nodes: Vec<Node> = (0..2).map(|id| Node { id, distances: None }).collect();
        let settings = TopologySettings { policy: topology.into(), ..TopologySettings::default() };
        let topology = TopologyManager::new(&settings, &nodes).unwrap();
        let settings = CpuSettings {
            policy: "static".into(),
            options: [option]
                .iter()
                .filter(|name| !name.is_empty())
                .map(|n| ((*n).into(), "true".into()))
                .collect(),
            reserved: CpuSet::parse("0").unwrap(),
            amount: Some(Quantity::from_units(1)),
        };
        let gates = Gates::default();
        let mut cpus = CpuManager::new(&settings, &machine, topology.policy(), gates).unwrap();
        cpus.start(None).unwrap();
        let settings =
            MemorySettings { policy: "None".into(), reserved_memory: Vec::new(), reserved: BTreeMap::new() };
        let mut memory = MemoryManager::new(&settings, &[], gates).unwrap();
        memory.start(None).unwrap();
        Pins { topology, cpus, memory }
    }

    fn needs(name: &str, cpus: &[&str]) -> Needs {
        let container = |(number, cpu): (usize, &&str)| {
            let amounts = json!({"cpu": cpu, "memory": "1Gi"});
            json!({"name": format!("c{number}"), "resources": {"requests": amounts, "limits": amounts}})
        };
        let containers: Vec<_> = cpus.iter().enumerate().map(container).collect();
        let pod: Pod =
            serde_json::from_value(json!({"metadata": {"uid": name}, "spec": {"containers": containers}}))
                .unwrap();
        Needs::read(&pod, Gates::default()).unwrap()
    }

    fn admit(pins: &mut Pins, needs: &Needs) {
        pins.admit(needs, &mut (), &mut Alignment::default()).unwrap();
    }

    fn held(pins: &Pins, container: &str) -> String {
        pins.cpus.of("p", container).map(ToString::to_string).unwrap_or_default()
    }

    #[test]
    fn pinning_resize_keeps_the_cpus_of_a_container_that_grows_and_gives_back_those_of_one_that_shrinks() {
        let mut pins = pins("none", "");
        let one = needs("p", &["1"]);
        admit(&mut pins, &one);
        assert_eq!(held(&pins, "c0"), "1", "the half-used core first");
        let three = needs("p", &["3"]);
        pins.resize(&three, &one).unwrap();
        assert_eq!(
            (held(&pins, "c0").as_str(), pins.cpus.state().shared.to_string().as_str()),
            ("1-3", "0,4-7")
        );
        let two = needs("p", &["2"]);
        pins.resize(&two, &three).unwrap();
        assert_eq!(held(&pins, "c0"), "2-3", "a whole core");
        assert_eq!(pins.cpus.state().shared.to_string(), "0-1,4-7");
        assert!(pins.holds(&two));
    }

    #[test]
    fn pinning_resize_takes_what_another_container_of_the_pod_gives_back() {
        let mut pins = pins("none", "");
        let before = needs("p", &["3", "4"]);
        admit(&mut pins, &before);
        let after = needs("p", &["5", "2"]);
        pins.resize(&after, &before).unwrap();
        assert!(pins.holds(&after));
        assert_eq!(pins.cpus.state().shared.to_string(), "0");
    }

    #[test]
    fn pinning_resize_refuses_what_is_not_free_or_not_possible_and_changes_nothing() {
        let check = |pins: &mut Pins, before: &Needs, after: &Needs, expected: &str| {
            let old = pins.cpus.state().clone();
            let refusal = pins.resize(after, before).unwrap_err();
            let kind = if matches!(refusal, ResizeRefusal::Never(_)) { "never" } else { "later" };
            let text = format!("{kind}: {refusal}");
            assert!(text.contains(expected), "{text}");
            assert_eq!(*pins.cpus.state(), old);
        };
        let mut plain = pins("none", "");
        let two = needs("p", &["2"]);
        admit(&mut plain, &two);
        check(&mut plain, &two, &needs("p", &["8"]), "later: Allocate failed due to not enough cpus");
        check(&mut plain, &two, &needs("p", &["1500m"]), "never: container c0 can't change between");
        let mut cores = pins("none", "full-pcpus-only");
        admit(&mut cores, &two);
        check(
            &mut cores,
            &two,
            &needs("p", &["3"]),
            "never: SMT Alignment Error: requested 3 cpus not multiple",
        );
        let mut near = pins("single-numa-node", "");
        admit(&mut near, &two);
        check(&mut near, &two, &needs("p", &["5"]), "later: container c0: Resources cannot be allocated");
    }

    #[test]
    fn pinning_resize_stays_on_the_numa_node_of_the_container() {
        let mut pins = pins("single-numa-node", "");
        let (two, four) = (needs("p", &["2"]), needs("p", &["4"]));
        admit(&mut pins, &two);
        let before = held(&pins, "c0");
        let other = needs("q", &["1"]);
        admit(&mut pins, &other);
        let grown = pins.resize(&four, &two);
        let on_first = before.starts_with('2');
        assert_eq!(grown.is_ok(), !on_first, "node 0 has three CPUs, node 1 has four: {before}");
    }

    #[test]
    fn pinning_reclaims_the_cpus_of_a_container_whose_state_is_lost() {
        let mut pins = pins("none", "");
        let two = needs("p", &["2"]);
        let set = |list: &str| CpuSet::parse(list).unwrap();
        for list in ["", "4", "0,4", "4-6", "8-9"] {
            assert!(!reclaim(&mut pins.cpus, &two, "c0", &set(list)), "{list}");
        }
        assert!(!reclaim(&mut pins.cpus, &two, "unknown", &set("4-5")));
        assert!(reclaim(&mut pins.cpus, &two, "c0", &set("4-5")));
        assert!(pins.holds(&two) && !reclaim(&mut pins.cpus, &two, "c0", &set("6-7")));
        assert!(!reclaim(&mut pins.cpus, &needs("q", &["2"]), "c0", &set("5-6")), "taken");
        assert_eq!(pins.cpus.state().shared.to_string(), "0-3,6-7");
    }
}
