//! Subordinate user and group ids of the user `kubelet` for the pods' user namespaces, read by the tool
//! `getsubids` as in the kubelet (`getKubeletMappings`), if the user and the tool exist.

use std::{fs, time::Duration};

use anyhow::{Context, Result, bail};
use beelet_base::program::{Bounds, Complaints, Program};
use beelet_policy::resources::user_namespaces::{IdPool, IdRange};

/// Owner of the ids.
const USER: &str = "kubelet";
/// Tool that reads the ids from all sources.
const TOOL: &str = "getsubids";
/// Limits of the tool's time (it may query a directory service) and output.
const BOUNDS: Bounds =
    Bounds { within: Duration::from_secs(60), output: 64 << 10, complaints: Complaints::Apart(1024) };

/// Returns the ids for pods with their own user namespaces: those of the user `kubelet`, or else all ids of
/// the machine except the first ones. Blocking.
pub(super) fn pool(per_pod: u32, max_pods: u32) -> Result<IdPool> {
    let of_user = if has_user(&fs::read("/etc/passwd").unwrap_or_default()) { ask()? } else { None };
    IdPool::new(of_user, per_pod, max_pods).context(
        "userNamespaces: change the lines of the user kubelet in /etc/subuid and /etc/subgid, or set userNamespaces.idsPerPod",
    )
}

fn has_user(passwd: &[u8]) -> bool {
    passwd.split(|b| *b == b'\n').any(|line| line.split(|b| *b == b':').next() == Some(USER.as_bytes()))
}

/// Returns the ids of the user; None without the tool.
fn ask() -> Result<Option<IdRange>> {
    let Some(users) = output_of(&Program::tool(TOOL).operand(USER))? else { return Ok(None) };
    let groups = output_of(&Program::tool(TOOL).flag("-g").operand(USER))?.unwrap_or_default();
    if users != groups {
        bail!(
            "the subordinate user and group ids of the user {USER} differ; set the same range in /etc/subuid and /etc/subgid"
        );
    }
    parse(&users).map(Some)
}

/// Returns the tool's output; None without the tool.
fn output_of(tool: &Program) -> Result<Option<String>> {
    let ended = match tool.run_blocking(BOUNDS) {
        Err(error) if error.is_missing() => return Ok(None),
        ended => ended?,
    };
    if !ended.status.success() {
        let why = String::from_utf8_lossy(&ended.complaints);
        bail!(
            "{TOOL} found no subordinate ids of the user {USER} ({}); add a range to /etc/subuid and /etc/subgid",
            why.trim().chars().take(200).collect::<String>()
        );
    }
    Ok(Some(String::from_utf8_lossy(&ended.output).into_owned()))
}

/// Parses the tool's output, e.g. `0: kubelet 65536 7208960`: exactly one line.
fn parse(text: &str) -> Result<IdRange> {
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    let words = lines.first().map(|line| line.split_whitespace().collect::<Vec<_>>()).unwrap_or_default();
    let range = match (lines.len(), &words[..]) {
        (1, [_, _, first, length]) => first.parse().ok().zip(length.parse().ok()),
        _ => None,
    };
    let (first, length) = range.with_context(|| {
        format!("the user {USER} must have exactly one range of subordinate ids in /etc/subuid; {TOOL} printed {text:?}")
    })?;
    Ok(IdRange { first, length })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_user_kubelet_has_one_range() {
        let check = |text: &str, expected: Option<(u32, u32)>| {
            let range = parse(text).ok().map(|range| (range.first, range.length));
            assert_eq!(range, expected, "{text:?}");
        };
        check("0: kubelet 65536 7208960\n", Some((65_536, 7_208_960)));
        check("0: kubelet 65536 65536\n1: kubelet 655360 65536\n", None);
        check("", None);
        check("0: kubelet 65536\n", None);
        check("0: kubelet 65536 4294967296\n", None);
        assert!(has_user(b"root:x:0:0\nkubelet:x:999:999::/:/bin/false\n"));
        assert!(!has_user(b"root:x:0:0\nkubelet2:x:999:999\n\xff\n"));
    }
}
