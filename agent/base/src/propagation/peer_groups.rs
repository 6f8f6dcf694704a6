//! Whether what the agent mounts for pods reaches the container runtime.
//!
//! A mount that is made in one mount namespace is seen in another one only through a peer group that both
//! have (mount_namespaces(7), "SHARED SUBTREES"; the kernel's Documentation/filesystems/sharedsubtree.rst).
//! Where it is not, a runtime binds the folder below the mount into containers: Secrets are empty there, and
//! volumes in memory are on the disk. Nothing reports that, so the agent has to look before it runs pods.

/// How one mount takes part in propagation: the numbers of the peer groups in its line of
/// `/proc/<pid>/mountinfo` (`shared:N`, `master:N`). Both are absent for a private mount.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Groups {
    /// The group whose members get each other's mounts.
    pub shared: Option<u64>,
    /// The group whose mounts it gets without giving any back.
    pub master: Option<u64>,
}

/// What is known of the agent's mounts and the runtime's.
#[derive(Clone, Copy, Debug)]
pub struct Sight<'a> {
    /// Both are in one mount namespace. None: the kernel does not say.
    pub same_namespace: Option<bool>,
    /// Of the agent's mount in which the pods' folder is.
    pub own: Groups,
    /// Of all mounts that the runtime has. None: its table cannot be read.
    pub runtime: Option<&'a [Groups]>,
}

/// Whether mounts reach the runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// They do, as far as can be known from here.
    Yes,
    /// They do not.
    No,
    /// Nothing speaks for it, and nothing against it.
    Unknown,
}

/// Judges by what the tables of mounts say. A mount that is `shared` is trusted where the runtime's table
/// cannot be read: that is how a container has it that was given the folder with mountPropagation
/// `Bidirectional`.
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
        (None, _) if sight.same_namespace == Some(false) => Reach::No,
        (None, _) => Reach::Unknown,
    }
}

/// The facts in a sentence, for a verdict that is not [`Reach::Yes`].
#[must_use]
pub fn sentence(reach: Reach, folder: &str, runtime: Option<u32>) -> String {
    let runtime = runtime.map_or_else(String::new, |pid| format!(" (process {pid})"));
    match reach {
        Reach::Yes => format!("the container runtime{runtime} sees what is mounted below {folder}"),
        Reach::No => format!(
            "the container runtime{runtime} does not see what the agent mounts below {folder}: the agent has a mount \
             namespace of its own"
        ),
        Reach::Unknown => format!(
            "cannot find out whether the container runtime{runtime} sees what the agent mounts below {folder}: its \
             process cannot be looked at from here"
        ),
    }
}

/// What becomes of pods where mounts do not reach the runtime.
pub const CONSEQUENCE: &str =
    "Secrets and tokens would be empty in containers, and volumes in memory would be on the disk";

/// What to do about that.
pub const REMEDY: &str = "run the agent in the runtime's mount namespace: take PrivateTmp=, ProtectSystem=, ProtectHome=, \
                          ReadOnlyPaths= and their like out of the unit (`systemctl cat beelet` shows overrides); in a \
                          container, give it the folder with mountPropagation: Bidirectional; under unshare(1), make \
                          the mount shared first (mount --make-rshared /) and add --propagation unchanged";

#[cfg(test)]
mod tests {
    use super::*;

    const PRIVATE: Groups = Groups { shared: None, master: None };
    const SHARED: Groups = Groups { shared: Some(7), master: None };
    const SLAVE: Groups = Groups { shared: None, master: Some(7) };
    /// What systemd makes for a unit with PrivateTmp=: a slave of the machine's, in a new group of its own.
    const OF_SYSTEMD: Groups = Groups { shared: Some(300), master: Some(7) };

    #[track_caller]
    fn check(same_namespace: Option<bool>, own: Groups, runtime: Option<&[Groups]>, expected: Reach) {
        assert_eq!(reach(&Sight { same_namespace, own, runtime }), expected);
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
    fn what_cannot_be_looked_at_is_not_held_against_the_agent() {
        check(None, PRIVATE, None, Reach::Unknown);
        check(None, SLAVE, None, Reach::Unknown);
        check(None, SHARED, None, Reach::Yes);
        check(None, PRIVATE, Some(&[SHARED]), Reach::Unknown);
    }

    #[test]
    fn a_verdict_is_a_sentence_with_the_folder_and_the_process() {
        let said = sentence(Reach::No, "/var/lib/beelet/pods", Some(4711));
        assert!(
            said.contains("(process 4711) does not see") && said.contains("below /var/lib/beelet/pods"),
            "{said}"
        );
        assert!(
            sentence(Reach::Unknown, "/p", None)
                .starts_with("cannot find out whether the container runtime sees")
        );
    }
}
