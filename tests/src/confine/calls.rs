//! System calls that a unit allows, with their arguments, and the seccomp filter made from them.

use anyhow::{Context as _, Result, bail};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};
use std::collections::{BTreeMap, BTreeSet};
use std::str::FromStr as _;
use syscalls::Sysno;

/// Systemd's `@…` groups.
const GROUPS: &str = include_str!("groups.txt");

/// Condition on one argument: its index, mask, and value under the mask.
pub(super) type Argument = (u8, u32, u32);

/// Allowed calls with their alternatives: a call without alternatives is allowed with any arguments,
/// otherwise only if one of them matches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Calls {
    allowed: BTreeMap<Sysno, Vec<Vec<Argument>>>,
    /// Calls whose arguments a filter cannot see. Systemd answers ENOSYS, so that libraries avoid them.
    pub(super) absent: BTreeSet<Sysno>,
}

impl Calls {
    /// Returns a set of all calls.
    pub(super) fn all() -> Calls {
        Calls { allowed: Sysno::iter().map(|call| (call, Vec::new())).collect(), absent: BTreeSet::new() }
    }

    /// Returns the calls that a `SystemCallFilter=` allows, a list of calls and groups.
    pub(super) fn of(filter: &str) -> Result<Calls> {
        if filter.starts_with('~') {
            bail!("SystemCallFilter={filter}: a deny list is not supported; list the allowed calls");
        }
        let groups = groups();
        let mut allowed = members(&groups, "@default")?;
        for word in filter.split_whitespace() {
            if word.starts_with('@') {
                allowed.extend(members(&groups, word)?);
            } else {
                let call = Sysno::from_str(word);
                allowed.insert(
                    call.ok().with_context(|| format!("SystemCallFilter= has an unknown call {word}"))?,
                );
            }
        }
        let allowed = allowed.into_iter().map(|call| (call, Vec::new())).collect();
        Ok(Calls { allowed, absent: BTreeSet::new() })
    }

    /// Removes the calls of a group.
    pub(super) fn deny_group(&mut self, group: &str) -> Result<()> {
        for call in members(&groups(), group)? {
            self.allowed.remove(&call);
        }
        Ok(())
    }

    /// Removes a call, if this architecture has it.
    pub(super) fn deny(&mut self, name: &str) {
        if let Ok(call) = Sysno::from_str(name) {
            self.allowed.remove(&call);
        }
    }

    /// Makes a call look missing from the kernel.
    pub(super) fn make_absent(&mut self, name: &str) {
        if let Ok(call) = Sysno::from_str(name) {
            self.allowed.remove(&call);
            self.absent.insert(call);
        }
    }

    /// Restricts an allowed call to these alternatives; other calls stay denied.
    pub(super) fn only(&mut self, name: &str, ways: &[Vec<Argument>]) {
        if let Ok(call) = Sysno::from_str(name)
            && let Some(known) = self.allowed.get_mut(&call)
        {
            known.extend_from_slice(ways);
        }
    }

    /// Returns true if a call is allowed with some arguments.
    #[cfg(test)]
    pub(super) fn allows(&self, call: Sysno) -> bool {
        self.allowed.contains_key(&call)
    }

    /// Returns the filter, which passes every other call to the owner of the listener.
    pub(super) fn program(&self) -> Result<BpfProgram> {
        let rules = self.allowed.iter().map(|(call, ways)| {
            let rules: Result<Vec<_>> = ways.iter().map(|way| rule(way)).collect();
            Ok((i64::from(call.id()), rules?))
        });
        let rules: Result<BTreeMap<_, _>> = rules.collect();
        // seccompiler has no action for a listener; RET_TRACE, otherwise unused here, is its placeholder.
        let refused = SeccompAction::Trace(0);
        let arch = std::env::consts::ARCH.try_into()?;
        let filter = SeccompFilter::new(rules?, refused.clone(), SeccompAction::Allow, arch)?;
        let mut program = BpfProgram::try_from(filter)?;
        let (stand_in, returns) = (u32::from(refused), 0x06); // BPF_RET | BPF_K
        for instruction in program.iter_mut().filter(|one| one.code == returns && one.k == stand_in) {
            instruction.k = libc::SECCOMP_RET_USER_NOTIF;
        }
        Ok(program)
    }
}

fn rule(way: &[Argument]) -> Result<SeccompRule> {
    let conditions: Result<Vec<_>, _> = way
        .iter()
        .map(|(index, mask, value)| {
            let operator = SeccompCmpOp::MaskedEq(u64::from(*mask));
            SeccompCondition::new(*index, SeccompCmpArgLen::Dword, operator, u64::from(*value))
        })
        .collect();
    Ok(SeccompRule::new(conditions?)?)
}

/// Returns the groups with their members as written: calls and other groups.
fn groups() -> BTreeMap<&'static str, Vec<&'static str>> {
    let lines = GROUPS.lines().filter(|line| !line.starts_with('#'));
    lines
        .filter_map(|line| {
            let (name, members) = line.split_once(':')?;
            Some((name, members.split_whitespace().collect()))
        })
        .collect()
}

/// Returns the calls of a group that this architecture has.
fn members(groups: &BTreeMap<&'static str, Vec<&'static str>>, group: &str) -> Result<BTreeSet<Sysno>> {
    let mut found = BTreeSet::new();
    let (mut seen, mut left) = (BTreeSet::new(), vec![group]);
    while let Some(group) = left.pop() {
        let members = groups.get(group).with_context(|| format!("unknown system call group {group}"))?;
        for member in members {
            match Sysno::from_str(member) {
                Ok(call) => drop(found.insert(call)),
                Err(()) if member.starts_with('@') && seen.insert(*member) => left.push(member),
                Err(()) => {}
            }
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_have_the_calls_of_the_groups_in_them() {
        let service = members(&groups(), "@system-service").unwrap();
        for call in [Sysno::read, Sysno::fchownat, Sysno::setns, Sysno::execve, Sysno::openat2] {
            assert!(service.contains(&call), "{call}");
        }
        for call in [Sysno::bpf, Sysno::mount, Sysno::init_module, Sysno::quotactl_fd] {
            assert!(!service.contains(&call), "{call}");
        }
        assert!(members(&groups(), "@nothing").is_err());
    }

    #[test]
    fn a_filter_allows_its_calls_and_those_of_every_program() {
        let calls = Calls::of("@mount bpf").unwrap();
        let allowed = [Sysno::bpf, Sysno::umount2, Sysno::execve];
        assert!(allowed.iter().all(|call| calls.allows(*call)));
        assert!(!calls.allows(Sysno::read));
        assert!(Calls::of("raed").unwrap_err().to_string().contains("raed"));
        assert!(Calls::of("~@mount").is_err());
    }

    #[test]
    fn refused_calls_reach_the_listener() {
        let mut calls = Calls::of("@system-service").unwrap();
        calls.only("socket", &[vec![(0, u32::MAX, 1)]]);
        let program = calls.program().unwrap();
        let ends: BTreeSet<u32> = program.iter().filter(|one| one.code == 6).map(|one| one.k).collect();
        let expected =
            [libc::SECCOMP_RET_ALLOW, libc::SECCOMP_RET_USER_NOTIF, libc::SECCOMP_RET_KILL_PROCESS];
        assert_eq!(ends, BTreeSet::from(expected));
        assert!(program.len() < 4096);
    }
}
