//! Lists of CPUs in the kernel's format: `0-3,8` (cpuset(7)).

use std::collections::BTreeSet;

/// Limit of CPU numbers, above that of any machine.
const MOST: u32 = 1 << 16;

/// Parses a list of CPUs; `None` if the text is not a list.
#[must_use]
pub fn parse(list: &str) -> Option<BTreeSet<u32>> {
    let mut cpus = BTreeSet::new();
    for part in list.split(',') {
        let (first, last) = part.trim().split_once('-').unwrap_or((part.trim(), part.trim()));
        let (first, last) = (first.parse::<u32>().ok()?, last.parse::<u32>().ok()?);
        if first > last || last >= MOST {
            return None;
        }
        cpus.extend(first..=last);
    }
    Some(cpus)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_as_the_kernel_writes_them() {
        let check = |list: &str, expected: Option<&[u32]>| {
            let expected = expected.map(|cpus| cpus.iter().copied().collect());
            assert_eq!(parse(list), expected, "{list:?}");
        };
        check("0", Some(&[0]));
        check("0-2,5, 7-7", Some(&[0, 1, 2, 5, 7]));
        for wrong in ["", "a", "1-", "3-1", "-1", "0-4294967295", "1,,2"] {
            check(wrong, None);
        }
    }
}
