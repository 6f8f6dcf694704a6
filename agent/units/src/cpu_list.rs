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

/// The list of these numbers, which must come in ascending order; nothing: the empty text.
#[must_use]
pub fn format(numbers: impl IntoIterator<Item = u32>) -> String {
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    for number in numbers {
        match ranges.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(number) => *last = number,
            _ => ranges.push((number, number)),
        }
    }
    let range = |(first, last): &(u32, u32)| match first == last {
        true => first.to_string(),
        false => format!("{first}-{last}"),
    };
    ranges.iter().map(range).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_written_as_the_kernel_writes_them() {
        let check = |numbers: &[u32], expected: &str| assert_eq!(format(numbers.iter().copied()), expected);
        check(&[], "");
        check(&[0], "0");
        check(&[0, 1, 2, 5, 7, 8], "0-2,5,7-8");
        check(&[u32::MAX - 1, u32::MAX], "4294967294-4294967295");
    }

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
