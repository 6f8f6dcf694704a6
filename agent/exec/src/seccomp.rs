//! OCI seccomp profiles (`config-linux.md`, "Seccomp") as filters of the kernel.
//!
//! seccompiler's filters know two actions each: for calls that match, and for all others. A profile with more
//! actions becomes several filters: the kernel runs all of them, and the strictest result counts
//! (seccomp(2)). The last filter is runc's stub (libcontainer/seccomp/patchbpf): a call newer than the newest
//! of the profile fails with ENOSYS, so that C libraries use an older call instead.
//!
//! The filters cover the machine's own architecture. A process of another one ends with SIGSYS, and the
//! runtime then runs the container's commands.

use std::{
    collections::{BTreeMap, BTreeSet},
    str::FromStr as _,
};

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch, sock_filter,
};
use serde_json::Value;
use syscalls::Sysno;

/// Bit in the number of a call of the x32 ABI (kernel: `__X32_SYSCALL_BIT`).
const X32: u32 = 0x4000_0000;

/// Reason why the filters can't reproduce a profile.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ProfileError {
    #[error("the seccomp profile has the action `{0}`")]
    Action(String),
    #[error("the seccomp profile has two actions for the call `{0}`")]
    TwoActions(String),
    #[error("the seccomp profile has the field `{0}`")]
    Field(String),
    #[error("the seccomp profile is malformed: {0}")]
    Malformed(String),
    #[error("the seccomp profile can't be compiled: {0}")]
    Compiler(String),
}

/// Rules of the calls that have the same action.
type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// Compiles a profile into filters, in the order of their installation; none without a profile.
pub(crate) fn compile(profile: &Value) -> Result<Vec<BpfProgram>, ProfileError> {
    let Some(fields) = profile.as_object() else { return Ok(Vec::new()) };
    // Flags of seccomp(2) change logging and mitigations, not what a call does.
    let known = ["defaultAction", "defaultErrnoRet", "architectures", "flags", "syscalls"];
    if let Some((name, _)) =
        fields.iter().find(|(name, value)| !known.contains(&name.as_str()) && !value.is_null())
    {
        return Err(ProfileError::Field(name.clone()));
    }
    let default = action(&profile["defaultAction"], &profile["defaultErrnoRet"])?;
    // runc's stub is stronger than these defaults, and a filter of its own is weaker.
    if !matches!(default, SeccompAction::Allow | SeccompAction::Log | SeccompAction::Errno(_)) {
        return Err(ProfileError::Action(format!("{default:?}, for all other calls")));
    }
    let groups = groups(profile, &default)?;
    let filter = |rules: &Rules, others: &SeccompAction, matching: &SeccompAction| {
        let arch = TargetArch::try_from(std::env::consts::ARCH);
        let built = arch.and_then(|arch| {
            SeccompFilter::new(rules.clone(), others.clone(), matching.clone(), arch)?.try_into()
        });
        built.map_err(|error| ProfileError::Compiler(error.to_string()))
    };
    let mut filters: Vec<BpfProgram> = Vec::new();
    if default != SeccompAction::Allow {
        // Calls of every other action pass this filter; a filter of their own decides about them.
        let all = groups.iter().flat_map(|(_, rules)| rules.clone()).collect();
        filters.push(filter(&all, &default, &SeccompAction::Allow)?);
    }
    for (action, rules) in groups.iter().filter(|(action, _)| *action != SeccompAction::Allow) {
        filters.push(filter(rules, &SeccompAction::Allow, action)?);
    }
    if matches!(default, SeccompAction::Errno(_)) {
        filters.extend(newest(profile).map(stub));
    }
    Ok(filters)
}

/// Returns the profile's rules by action, without those of the default action.
fn groups(profile: &Value, default: &SeccompAction) -> Result<Vec<(SeccompAction, Rules)>, ProfileError> {
    let mut groups: Vec<(SeccompAction, Rules)> = Vec::new();
    for entry in profile["syscalls"].as_array().map(Vec::as_slice).unwrap_or_default() {
        let action = action(&entry["action"], &entry["errnoRet"])?;
        if action == *default {
            continue;
        }
        let rules = rules(entry["args"].as_array().map(Vec::as_slice).unwrap_or_default())?;
        for name in names(entry) {
            // Calls of other architectures and of newer kernels: libseccomp skips them too.
            let Ok(call) = Sysno::from_str(name) else { continue };
            let number = i64::from(call.id());
            let other = |(of, rules): &(SeccompAction, Rules)| *of != action && rules.contains_key(&number);
            if groups.iter().any(other) {
                return Err(ProfileError::TwoActions(name.to_owned()));
            }
            let place = groups.iter().position(|(of, _)| *of == action).unwrap_or_else(|| {
                groups.push((action.clone(), Rules::new()));
                groups.len() - 1
            });
            let Some((_, of_action)) = groups.get_mut(place) else { continue };
            match of_action.get_mut(&number) {
                // An empty list stands for any arguments.
                Some(known) if known.is_empty() || rules.is_empty() => known.clear(),
                Some(known) => known.extend(rules.iter().cloned()),
                None => drop(of_action.insert(number, rules.clone())),
            }
        }
    }
    Ok(groups)
}

fn names(entry: &Value) -> impl Iterator<Item = &str> {
    entry["names"].as_array().into_iter().flatten().filter_map(Value::as_str)
}

/// Reads an action; `errno` is the error of a refused call, EPERM by default.
fn action(action: &Value, errno: &Value) -> Result<SeccompAction, ProfileError> {
    let errno = || match errno {
        Value::Null => Ok(libc::EPERM.unsigned_abs()),
        errno => errno
            .as_u64()
            .and_then(|errno| u32::try_from(errno).ok())
            .filter(|errno| *errno <= 0xfff)
            .ok_or_else(|| ProfileError::Malformed(format!("error number {errno}"))),
    };
    Ok(match action.as_str().unwrap_or_default() {
        "SCMP_ACT_ALLOW" => SeccompAction::Allow,
        "SCMP_ACT_ERRNO" => SeccompAction::Errno(errno()?),
        "SCMP_ACT_KILL" | "SCMP_ACT_KILL_THREAD" => SeccompAction::KillThread,
        "SCMP_ACT_KILL_PROCESS" => SeccompAction::KillProcess,
        "SCMP_ACT_LOG" => SeccompAction::Log,
        "SCMP_ACT_TRAP" => SeccompAction::Trap,
        // SCMP_ACT_NOTIFY needs the runtime's agent, SCMP_ACT_TRACE a tracer.
        other => return Err(ProfileError::Action(other.to_owned())),
    })
}

/// Reads the conditions of an entry. All must hold; but if two are about the same argument, any suffices
/// (runc: libcontainer/seccomp, `matchCall`).
fn rules(conditions: &[Value]) -> Result<Vec<SeccompRule>, ProfileError> {
    let malformed = |condition: &Value| ProfileError::Malformed(format!("condition {condition}"));
    let mut read = Vec::new();
    let mut indices = BTreeSet::new();
    let mut is_any = false;
    for condition in conditions {
        let number = |name: &str| match &condition[name] {
            Value::Null => Some(0),
            value => value.as_u64(),
        };
        let index = number("index").and_then(|index| u8::try_from(index).ok());
        let (Some(index), Some(value), Some(second)) = (index, number("value"), number("valueTwo")) else {
            return Err(malformed(condition));
        };
        is_any |= !indices.insert(index);
        let (operator, value) = match condition["op"].as_str().unwrap_or_default() {
            "SCMP_CMP_NE" => (SeccompCmpOp::Ne, value),
            "SCMP_CMP_LT" => (SeccompCmpOp::Lt, value),
            "SCMP_CMP_LE" => (SeccompCmpOp::Le, value),
            "SCMP_CMP_EQ" => (SeccompCmpOp::Eq, value),
            "SCMP_CMP_GE" => (SeccompCmpOp::Ge, value),
            "SCMP_CMP_GT" => (SeccompCmpOp::Gt, value),
            "SCMP_CMP_MASKED_EQ" => (SeccompCmpOp::MaskedEq(value), second),
            _ => return Err(malformed(condition)),
        };
        let condition = SeccompCondition::new(index, SeccompCmpArgLen::Qword, operator, value)
            .map_err(|error| ProfileError::Compiler(error.to_string()))?;
        read.push(condition);
    }
    let rule =
        |conditions| SeccompRule::new(conditions).map_err(|error| ProfileError::Compiler(error.to_string()));
    match (read.is_empty(), is_any) {
        (true, _) => Ok(Vec::new()),
        (false, true) => read.into_iter().map(|condition| rule(vec![condition])).collect(),
        (false, false) => Ok(vec![rule(read)?]),
    }
}

/// Returns the highest number of a call that the profile names.
fn newest(profile: &Value) -> Option<u32> {
    let entries = profile["syscalls"].as_array().into_iter().flatten();
    let calls = entries.flat_map(names).filter_map(|name| Sysno::from_str(name).ok());
    calls.filter_map(|call| u32::try_from(call.id()).ok()).max()
}

/// Returns the filter that lets calls up to `newest` pass and fails all others with ENOSYS, as a kernel that
/// does not know them. Calls of x32 have higher numbers.
fn stub(newest: u32) -> BpfProgram {
    let instruction =
        |code: u32, jt, jf, k| sock_filter { code: u16::try_from(code).unwrap_or_default(), jt, jf, k };
    let refused = libc::SECCOMP_RET_ERRNO | libc::ENOSYS.unsigned_abs();
    debug_assert!(newest < X32);
    vec![
        // Offset 0 of `struct seccomp_data`: the call's number.
        instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        instruction(libc::BPF_JMP | libc::BPF_JGT | libc::BPF_K, 1, 0, newest),
        instruction(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
        instruction(libc::BPF_RET | libc::BPF_K, 0, 0, refused),
    ]
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn check(profile: &Value, expected: Result<usize, &str>) {
        let found = compile(profile).map(|filters| filters.len()).map_err(|error| error.to_string());
        assert_eq!(found, expected.map_err(str::to_owned), "{profile}");
    }

    #[test]
    fn a_profile_becomes_one_filter_per_action_and_a_stub() {
        let profile = |default: &str, calls: Value| json!({"defaultAction": default, "syscalls": calls});
        check(&Value::Null, Ok(0));
        let allow = json!({"names": ["read", "write", "no_such_call"], "action": "SCMP_ACT_ALLOW"});
        check(&profile("SCMP_ACT_ERRNO", json!([allow])), Ok(2));
        let refuse = json!({"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": 38});
        check(&profile("SCMP_ACT_ERRNO", json!([allow, refuse])), Ok(3));
        let kill = json!({"names": ["ptrace"], "action": "SCMP_ACT_KILL"});
        check(&profile("SCMP_ACT_ALLOW", json!([refuse, kill, allow])), Ok(2));
        let masked = json!({"names": ["clone"], "action": "SCMP_ACT_ALLOW",
            "args": [{"index": 0, "value": 2_114_060_288, "op": "SCMP_CMP_MASKED_EQ"}]});
        check(&profile("SCMP_ACT_ERRNO", json!([allow, masked])), Ok(2));
    }

    #[test]
    fn a_profile_that_filters_cannot_express_is_refused() {
        let profile = |calls: Value| json!({"defaultAction": "SCMP_ACT_ERRNO", "syscalls": calls});
        let notify = json!({"names": ["mkdir"], "action": "SCMP_ACT_NOTIFY"});
        check(&profile(json!([notify])), Err("the seccomp profile has the action `SCMP_ACT_NOTIFY`"));
        let twice = json!([{"names": ["read"], "action": "SCMP_ACT_ALLOW"}, {"names": ["read"], "action": "SCMP_ACT_KILL"}]);
        check(&profile(twice), Err("the seccomp profile has two actions for the call `read`"));
        check(
            &json!({"defaultAction": "SCMP_ACT_ALLOW", "listenerPath": "/run/x"}),
            Err("the seccomp profile has the field `listenerPath`"),
        );
        check(&json!({"defaultAction": "x"}), Err("the seccomp profile has the action `x`"));
    }
}
