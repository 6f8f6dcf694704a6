//! The target for the mount table, as the layout of cgroups reads it.

use beelet_cgroups::layout::{Version, parse, parse_for_reading};

/// Tests `/proc/self/mountinfo`: a layout has hierarchies, at most one is unified, and that is the last one.
pub fn mountinfo(input: &[u8]) {
    for layout in [parse(input), parse_for_reading(input)].into_iter().flatten() {
        let (v1, v2): (Vec<_>, Vec<_>) = layout.hierarchies.iter().partition(|h| !h.is_v2);
        assert!(v2.len() <= 1 && v2.iter().all(|h| h.controllers.is_empty()));
        assert_eq!(v2.first().copied(), layout.hierarchies.last().filter(|h| h.is_v2));
        match layout.version {
            Version::V1 => assert!(!v1.is_empty() && v2.is_empty()),
            Version::Hybrid => assert!(!v1.is_empty() && !v2.is_empty()),
            Version::V2 => assert!(v1.is_empty() && !v2.is_empty()),
        }
    }
}
