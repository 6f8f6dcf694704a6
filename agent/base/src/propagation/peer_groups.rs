//! Judges whether the agent's mounts for pods reach the container runtime.
//!
//! A mount made in one mount namespace is visible in another only through a peer group of both
//! (mount_namespaces(7), "SHARED SUBTREES"; the kernel's Documentation/filesystems/sharedsubtree.rst).
//! If it is not visible, a runtime binds the folder below the mount into containers: Secrets are empty there,
//! and volumes in memory are on the disk. Nothing reports that, so the agent has to check before it runs
//! pods.

/// Propagation of a mount: the numbers of the peer groups in its line of `/proc/<pid>/mountinfo` (`shared:N`,
/// `master:N`). Both are absent for a private mount.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Groups {
    /// The group whose members get each other's mounts.
    pub shared: Option<u64>,
    /// The group whose mounts this mount receives without sending its own.
    pub master: Option<u64>,
}

/// Known facts about the mounts of the agent and the runtime.
#[derive(Clone, Copy, Debug)]
pub struct Sight<'a> {
    /// True if both are in one mount namespace. `None` if the kernel does not show it.
    pub same_namespace: Option<bool>,
    /// True if the agent is in the mount namespace in which the runtime is by default: see [`at_home`].
    /// `None` if the kernel does not show it.
    pub at_home: Option<bool>,
    /// Groups of the agent's mount that contains the pods' folder.
    pub own: Groups,
    /// Groups of all mounts of the runtime. `None` if its table cannot be read.
    pub runtime: Option<&'a [Groups]>,
}

/// Result of the inspection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The verdict.
    pub reach: Reach,
    /// The process to reconfigure if the verdict is not [`Reach::Yes`].
    pub stranger: Stranger,
}

/// Verdict on whether mounts reach the runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// Mounts reach the runtime, as far as the agent can know.
    Yes,
    /// Mounts do not reach the runtime.
    No,
    /// No evidence for or against it.
    Unknown,
}

/// Known facts about the first process visible to the agent.
#[derive(Clone, Copy, Debug)]
pub struct First {
    /// True if the agent is in the process's mount namespace.
    pub has_agents_mounts: bool,
    /// True if the process is the machine's first process, and not that of a container.
    pub is_machines: bool,
}

/// Returns true if the agent and the runtime share a mount namespace unless the runtime was given one of its
/// own.
///
/// The machine's first process is in the machine's mount namespace, and so is every process without a
/// namespace of its own. In a PID namespace of its own the first process may be the agent itself; sharing its
/// mounts proves something only about processes of the same PID namespace. The kernel reports the runtime's
/// id only if the runtime is one of these (`SO_PEERCRED`, net/core/sock.c), also if /proc hides other
/// processes (`hidepid`). `first` is `None` if /proc hides the first process: the result is unknown then.
#[must_use]
pub fn at_home(first: Option<First>, knows_runtimes_id: bool) -> Option<bool> {
    first.map(|first| first.has_agents_mounts && (first.is_machines || knows_runtimes_id))
}

/// Judges by the tables of mounts. If the runtime's table cannot be read, a `shared` mount is trusted: a
/// container with the folder under mountPropagation `Bidirectional` has one. From any other mount nothing
/// reaches another namespace (a slave sends no mounts), so it suffices only without evidence that the two
/// processes are in different namespaces.
#[must_use]
pub fn reach(sight: &Sight<'_>) -> Reach {
    if sight.same_namespace == Some(true) {
        return Reach::Yes;
    }
    match (sight.own.shared, sight.runtime) {
        (Some(group), Some(mounts)) => {
            let receives = |one: &Groups| one.shared == Some(group) || one.master == Some(group);
            if mounts.iter().any(receives) { Reach::Yes } else { Reach::No }
        }
        (Some(_), None) => Reach::Yes,
        (None, _) if sight.same_namespace == Some(false) || sight.at_home == Some(false) => Reach::No,
        (None, _) => Reach::Unknown,
    }
}

/// The process whose mount namespace is not the machine's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stranger {
    /// The agent.
    Agent,
    /// The runtime.
    Runtime,
}

/// Returns the process that is in another mount namespace than the first process; the agent if that is
/// unknown, because the reader has the agent's unit at hand.
#[must_use]
pub fn stranger(agent_with_first: Option<bool>, runtime_with_first: Option<bool>) -> Stranger {
    match (agent_with_first, runtime_with_first) {
        (Some(true), Some(false)) => Stranger::Runtime,
        _ => Stranger::Agent,
    }
}

/// Returns the facts as a sentence.
#[must_use]
pub fn sentence(finding: Finding, folder: &str, runtime: Option<u32>) -> String {
    let runtime = runtime.map_or_else(String::new, |pid| format!(" (process {pid})"));
    let whose = match finding.stranger {
        Stranger::Agent => "the agent",
        Stranger::Runtime => "the container runtime",
    };
    match finding.reach {
        Reach::Yes => format!("the container runtime{runtime} sees what is mounted below {folder}"),
        Reach::No => format!(
            "the container runtime{runtime} does not see what the agent mounts below {folder}: {whose} has a mount \
             namespace of its own"
        ),
        Reach::Unknown => format!(
            "cannot find out whether the container runtime{runtime} sees what the agent mounts below {folder}: cannot \
             inspect its process"
        ),
    }
}

/// Consequence for pods if mounts do not reach the runtime.
pub const CONSEQUENCE: &str =
    "Secrets and tokens would be empty in containers, and volumes in memory would be on the disk";

/// Returns the remedy if mounts do not reach the runtime.
#[must_use]
pub const fn remedy(stranger: Stranger) -> &'static str {
    match stranger {
        Stranger::Agent => AGENTS_REMEDY,
        Stranger::Runtime => RUNTIMES_REMEDY,
    }
}

const RUNTIMES_REMEDY: &str = "run the container runtime in the machine's mount namespace: remove PrivateTmp=, ProtectSystem=, \
                               ProtectHome=, ReadOnlyPaths= and similar settings from its unit (`systemctl cat containerd` \
                               shows overrides) and restart it";

const AGENTS_REMEDY: &str = "run the agent in the runtime's mount namespace: remove PrivateTmp=, ProtectSystem=, ProtectHome=, \
                          ReadOnlyPaths= and similar settings from the unit (`systemctl cat beelet` shows overrides); in a \
                          container, mount the folder with mountPropagation: Bidirectional; under unshare(1), make \
                          the mount shared first (mount --make-rshared /) and add --propagation unchanged";

#[cfg(test)]
mod tests {
    use super::*;

    const PRIVATE: Groups = Groups { shared: None, master: None };
    const SHARED: Groups = Groups { shared: Some(7), master: None };
    const SLAVE: Groups = Groups { shared: None, master: Some(7) };
    /// Groups of a systemd unit with PrivateTmp=: a slave of the machine's mount, in a new group of its own.
    const OF_SYSTEMD: Groups = Groups { shared: Some(300), master: Some(7) };

    #[track_caller]
    fn check(same_namespace: Option<bool>, own: Groups, runtime: Option<&[Groups]>, expected: Reach) {
        for at_home in [None, Some(true)] {
            assert_eq!(reach(&Sight { same_namespace, at_home, own, runtime }), expected);
        }
    }

    #[test]
    fn in_one_namespace_every_mount_is_seen() {
        for own in [PRIVATE, SHARED, SLAVE] {
            check(Some(true), own, None, Reach::Yes);
            check(Some(true), own, Some(&[PRIVATE]), Reach::Yes);
        }
    }

    #[test]
    fn in_another_namespace_a_mount_is_seen_by_its_peers_and_their_slaves_alone() {
        check(Some(false), SHARED, Some(&[PRIVATE, SHARED]), Reach::Yes);
        check(Some(false), SHARED, Some(&[SLAVE]), Reach::Yes);
        check(Some(false), SHARED, Some(&[OF_SYSTEMD]), Reach::Yes);
        check(Some(false), SHARED, Some(&[PRIVATE]), Reach::No);
        check(Some(false), SHARED, Some(&[]), Reach::No);
        check(Some(false), PRIVATE, Some(&[PRIVATE, SHARED]), Reach::No);
        check(Some(false), SLAVE, Some(&[SHARED]), Reach::No);
        check(Some(false), OF_SYSTEMD, Some(&[SHARED, PRIVATE]), Reach::No);
        check(Some(false), PRIVATE, None, Reach::No);
        check(Some(false), SHARED, None, Reach::Yes);
    }

    #[test]
    fn without_evidence_the_verdict_is_unknown() {
        check(None, PRIVATE, None, Reach::Unknown);
        check(None, SLAVE, None, Reach::Unknown);
        check(None, SHARED, None, Reach::Yes);
        check(None, PRIVATE, Some(&[SHARED]), Reach::Unknown);
    }

    #[test]
    fn away_from_home_only_a_shared_mount_or_a_common_namespace_is_trusted() {
        let check = |same_namespace, own, expected| {
            let sight = Sight { same_namespace, at_home: Some(false), own, runtime: None };
            assert_eq!(reach(&sight), expected, "{sight:?}");
        };
        check(None, PRIVATE, Reach::No);
        check(None, SLAVE, Reach::No);
        check(None, SHARED, Reach::Yes);
        check(Some(true), PRIVATE, Reach::Yes);
        check(Some(false), PRIVATE, Reach::No);
    }

    #[test]
    fn the_agent_is_at_home_with_the_machines_first_process_or_with_a_runtime_of_its_own_container() {
        let check = |has_agents_mounts, is_machines, knows_runtimes_id, expected| {
            let first = First { has_agents_mounts, is_machines };
            assert_eq!(
                at_home(Some(first), knows_runtimes_id),
                Some(expected),
                "{first:?} {knows_runtimes_id}"
            );
        };
        // On the machine itself, with a visible or a hidden runtime.
        check(true, true, true, true);
        check(true, true, false, true);
        // With mounts of its own.
        check(false, true, true, false);
        check(false, true, false, false);
        check(false, false, true, false);
        // With processes of its own: the runtime is one of them, or outside.
        check(true, false, true, true);
        check(true, false, false, false);
        assert_eq!(at_home(None, false), None);
    }

    #[test]
    fn a_sentence_names_the_process_with_a_namespace_of_its_own() {
        let check = |agent, runtime, whose: &str, unit: &str| {
            let stranger = stranger(agent, runtime);
            let said = sentence(Finding { reach: Reach::No, stranger }, "/pods", Some(7));
            assert!(said.ends_with(&format!(": {whose} has a mount namespace of its own")), "{said}");
            assert!(remedy(stranger).contains(unit), "{}", remedy(stranger));
        };
        check(Some(true), Some(false), "the container runtime", "`systemctl cat containerd`");
        check(Some(false), Some(true), "the agent", "`systemctl cat beelet`");
        check(Some(false), Some(false), "the agent", "`systemctl cat beelet`");
        check(None, None, "the agent", "`systemctl cat beelet`");
    }

    #[test]
    fn a_verdict_is_a_sentence_with_the_folder_and_the_process() {
        let of = |reach| Finding { reach, stranger: Stranger::Agent };
        let said = sentence(of(Reach::No), "/var/lib/beelet/pods", Some(4711));
        assert!(
            said.contains("(process 4711) does not see") && said.contains("below /var/lib/beelet/pods"),
            "{said}"
        );
        assert!(
            sentence(of(Reach::Unknown), "/p", None)
                .starts_with("cannot find out whether the container runtime sees")
        );
    }
}
