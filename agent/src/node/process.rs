//! Settings of the agent's own process.

use std::fs;

use rustix::fs::Mode;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit, umask};

/// Protects the agent from the OOM killer by `oom_score_adj`, and raises its limit of open files to
/// `max_open_files`. Returns messages about failures, which do not prevent the agent from running.
///
/// Sets the umask to 022, regardless of the unit or shell: pods' files are for containers of any user.
/// Private files set their mode when they are created.
#[must_use]
pub fn prepare(oom_score_adj: i32, max_open_files: u64) -> Vec<String> {
    umask(UMASK);
    [set_oom_score_adj(oom_score_adj), raise_open_files(max_open_files)].into_iter().flatten().collect()
}

/// Umask that lets only the owner write.
const UMASK: Mode = Mode::from_raw_mode(0o022);

/// Raises only the limit of open files. Returns messages about failures.
#[must_use]
pub fn allow_open_files(files: u64) -> Vec<String> {
    raise_open_files(files).into_iter().collect()
}

fn set_oom_score_adj(value: i32) -> Option<String> {
    let error = fs::write("/proc/self/oom_score_adj", value.to_string()).err()?;
    Some(format!(
        "cannot set the agent's oom_score_adj to {value}: {error}; lower values need CAP_SYS_RESOURCE. On memory \
         shortage, the kernel may kill the agent before pods"
    ))
}

fn raise_open_files(wanted: u64) -> Option<String> {
    let now = getrlimit(Resource::Nofile);
    let at_least = |limit: Option<u64>| limit.is_none_or(|limit| limit >= wanted);
    if at_least(now.current) {
        return None;
    }
    let maximum = if at_least(now.maximum) { now.maximum } else { Some(wanted) };
    if setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum }).is_ok() {
        return None;
    }
    // The agent may not raise the maximum, or the kernel's own (fs.nr_open) is lower: use the maximum.
    let lifted = setrlimit(Resource::Nofile, Rlimit { current: now.maximum, maximum: now.maximum });
    let got = if lifted.is_ok() { now.maximum } else { now.current };
    Some(format!(
        "the agent may open {} files, not {wanted} (maxOpenFiles), which needs CAP_SYS_RESOURCE and a higher fs.nr_open",
        got.map_or_else(|| "any number of".to_owned(), |got| got.to_string())
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_holds_already_is_no_trouble() {
        let value = fs::read_to_string("/proc/self/oom_score_adj").unwrap().trim().parse().unwrap();
        assert_eq!(prepare(value, 1), Vec::<String>::new());
    }

    #[test]
    fn what_the_agent_makes_is_readable_whatever_umask_it_was_given() {
        let strict = ["sh", "-c", "umask 077; exec \"$0\" \"$@\""];
        let name = "what_the_agent_makes_is_readable_whatever_umask_it_was_given";
        if !beelet_testing::again::in_child(module_path!(), name, &strict) {
            return;
        }
        let _ = prepare(0, 1);
        assert_eq!(umask(Mode::empty()), UMASK);
    }

    #[test]
    fn what_the_kernel_refuses_is_said() {
        let trouble = prepare(5000, 1);
        assert!(trouble.len() == 1 && trouble[0].contains("oom_score_adj"), "{trouble:?}");
    }
}
