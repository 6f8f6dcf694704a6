//! Abilities of container runtimes that depend on the runtime's version. A runtime ignores unknown fields of
//! a container without an error, so the agent refuses the container.

use beelet_cri::Runtime;

use crate::error::{Error, StartError};

/// An ability that runtimes have since a certain version, and do not report.
pub(crate) struct Ability {
    /// Name of the ability, as a verb phrase.
    what: &'static str,
    containerd: (u32, u32),
    crio: (u32, u32),
}

/// Image volumes (KEP-4639).
pub(crate) const IMAGES: Ability = Ability { what: "mount images", containerd: (2, 1), crio: (1, 31) };
/// Sub-paths of image volumes (KEP-4639).
pub(crate) const PARTS_OF_IMAGES: Ability =
    Ability { what: "mount a part of an image", containerd: (2, 2), crio: (1, 33) };
/// Stop signals of containers (KEP-4960).
pub(crate) const STOP_SIGNALS: Ability =
    Ability { what: "set a container's stop signal", containerd: (2, 3), crio: (1, 34) };

impl Ability {
    /// Returns true if a runtime of this version has the ability.
    fn is_of(&self, name: &str, version: &str) -> bool {
        let mut numbers =
            version.trim_start_matches('v').split(['.', '-', '+', '~']).map_while(|n| n.parse::<u32>().ok());
        let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
        match name {
            "containerd" => version >= self.containerd,
            "cri-o" => version >= self.crio,
            _ => false,
        }
    }
}

impl std::fmt::Display for Ability {
    /// `mount images; containerd 2.1 and CRI-O 1.31`
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { what, containerd, crio } = self;
        write!(f, "{what}; containerd {}.{} and CRI-O {}.{}", containerd.0, containerd.1, crio.0, crio.1)
    }
}

/// Returns an error if the runtime would ignore a field; `field` is its name in the error.
pub(crate) async fn require(runtime: &Runtime, field: &str, ability: &Ability) -> Result<(), StartError> {
    let version = runtime.version().await.map_err(StartError::Create)?;
    let (name, version) = (version.runtime_name, version.runtime_version);
    if ability.is_of(&name, &version) {
        return Ok(());
    }
    Err(Error::Spec(format!("{field}: {name} {version} cannot {ability} can")).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn abilities_follow_from_the_runtimes_version() {
        let check = |name: &str, version: &str, expected: [bool; 3]| {
            let found = [IMAGES, PARTS_OF_IMAGES, STOP_SIGNALS].map(|ability| ability.is_of(name, version));
            assert_eq!(found, expected, "{name} {version}");
        };
        check("containerd", "1.6.20~ds1", [false; 3]);
        check("containerd", "v2.0.5", [false; 3]);
        check("containerd", "v2.1.9", [true, false, false]);
        check("containerd", "2.2.0-rc.1", [true, true, false]);
        check("containerd", "v2.3.0", [true; 3]);
        check("cri-o", "1.31.2", [true, false, false]);
        check("cri-o", "1.30.0", [false; 3]);
        check("cri-o", "1.34.0", [true; 3]);
        check("other", "9.9", [false; 3]);
        check("containerd", "", [false; 3]);
        assert_eq!(IMAGES.to_string(), "mount images; containerd 2.1 and CRI-O 1.31");
    }
}
