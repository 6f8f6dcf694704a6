//! The running kernel's release.

/// Returns the kernel's release, major and minor; (0, 0) if it can't be parsed.
#[must_use]
pub fn running() -> (u32, u32) {
    parsed(&rustix::system::uname().release().to_string_lossy())
}

fn parsed(release: &str) -> (u32, u32) {
    let mut numbers = release.split(['.', '-', '+']).map_while(|part| part.parse().ok());
    numbers.next().zip(numbers.next()).unwrap_or((0, 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_release_is_its_first_two_numbers() {
        for (text, expected) in
            [("6.18.5", (6, 18)), ("6.1.0-44-cloud-amd64", (6, 1)), ("7.0-rc1+", (7, 0)), ("own", (0, 0))]
        {
            assert_eq!(parsed(text), expected, "{text}");
        }
    }
}
