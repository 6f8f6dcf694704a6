//! The machine's CPUs, including those that this process may not use.

use crate::kernel_file;

/// Returns the number of online CPUs, regardless of this process's affinity or quota.
#[must_use]
pub fn count() -> usize {
    let online = kernel_file::read_to_string("/sys/devices/system/cpu/online");
    online.ok().and_then(|list| count_in(list.trim())).unwrap_or_else(|| {
        // No sysfs: at least those that this process may use.
        std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get)
    })
}

/// Returns the number of CPUs in a list of the kernel's form, `0-3,8`.
fn count_in(list: &str) -> Option<usize> {
    let in_part = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        last.parse::<usize>().ok()?.checked_sub(first.parse().ok()?)?.checked_add(1)
    };
    list.split(',').map(in_part).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_list_is_counted() {
        assert_eq!(["0", "0-2,5,7-8", "", "3-1", "x"].map(count_in), [Some(1), Some(6), None, None, None]);
        assert!(count() > 0);
    }
}
