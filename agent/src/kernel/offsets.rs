//! Which fields of which kernel structures the programs read, as data; and where this kernel has them.
//!
//! Each entry sets one read-only global of the object (`ebpf/src/kernel.rs` has the same names). What a kernel lacks
//! keeps its default, [`beelet_ebpf_abi::ABSENT`], and the programs do without.

use super::btf::{Argument, Btf, BtfError};

/// A field that the programs want to read.
pub(super) struct Wanted {
    /// The read-only global that gets its offset.
    global: &'static str,
    /// The read-only global that gets its bit mask, for a bit field.
    mask: Option<&'static str>,
    structure: &'static str,
    path: &'static str,
}

const fn field(global: &'static str, structure: &'static str, path: &'static str) -> Wanted {
    Wanted { global, mask: None, structure, path }
}

/// Every field, of every hook family.
pub(super) const FIELDS: &[Wanted] = &[
    field("OFF_SOCK_CGROUP", "sock", "sk_cgrp_data.cgroup"),
    field("OFF_SOCK_PROTOCOL", "sock", "sk_protocol"),
    field("OFF_CGROUP_KN", "cgroup", "kn"),
    field("OFF_KERNFS_ID", "kernfs_node", "id"),
    field("OFF_SKC_NET", "sock_common", "skc_net.net"),
    field("OFF_NET_COOKIE", "net", "net_cookie"),
    field("OFF_SKC_FAMILY", "sock_common", "skc_family"),
    field("OFF_SKC_NUM", "sock_common", "skc_num"),
    field("OFF_SKC_RCV_SADDR", "sock_common", "skc_rcv_saddr"),
    field("OFF_SKC_V6_RCV_SADDR", "sock_common", "skc_v6_rcv_saddr"),
    Wanted {
        global: "OFF_SKC_IPV6ONLY",
        mask: Some("MASK_SKC_IPV6ONLY"),
        structure: "sock_common",
        path: "skc_ipv6only",
    },
];

/// The globals without which the listener programs stay idle (`socket_offsets_known` in ebpf/src/kernel.rs).
pub(super) const LISTENER_FIELDS: &[&str] = &[
    "OFF_SOCK_PROTOCOL",
    "OFF_SKC_NET",
    "OFF_NET_COOKIE",
    "OFF_SKC_FAMILY",
    "OFF_SKC_NUM",
    "OFF_SKC_RCV_SADDR",
];

/// What this kernel has.
#[derive(Debug, Default)]
pub(super) struct Offsets {
    /// The values of the read-only globals.
    pub(super) globals: Vec<(&'static str, u32)>,
    /// What is missing: the global, and why.
    missing: Vec<(&'static str, BtfError)>,
}

impl Offsets {
    /// Looks every field up.
    pub(super) fn resolve(btf: &Btf) -> Offsets {
        let mut offsets = Offsets::default();
        for wanted in FIELDS {
            match btf.field(wanted.structure, wanted.path) {
                Ok(found) => {
                    offsets.globals.push((wanted.global, found.offset));
                    if let Some(mask) = wanted.mask {
                        offsets.globals.push((mask, 1 << found.bit));
                    }
                }
                Err(error) => offsets.missing.push((wanted.global, error)),
            }
        }
        offsets
    }

    /// Fails with the first of `globals` that this kernel lacks.
    pub(super) fn require(&self, globals: &[&str]) -> Result<(), String> {
        match self.missing.iter().find(|(global, _)| globals.contains(global)) {
            Some((_, error)) => Err(error.to_string()),
            None => Ok(()),
        }
    }
}

/// Checks that `inet_sock_set_state` still passes (sk, oldstate, newstate), by name where the BTF has names, by type
/// where not: the program reads them by position.
pub(super) fn check_set_state(btf: &Btf) -> Result<(), String> {
    let arguments = btf.tracepoint("inet_sock_set_state").map_err(|error| error.to_string())?;
    let fits = |argument: &Argument, name: &str| argument.name.as_deref().is_none_or(|found| found == name);
    match arguments.as_slice() {
        [sk, old, new, ..]
            if sk.points_to.as_deref() == Some("sock")
                && old.integer
                && new.integer
                && fits(sk, "sk")
                && fits(old, "oldstate")
                && fits(new, "newstate") =>
        {
            Ok(())
        }
        _ => Err(
            "the tracepoint inet_sock_set_state does not begin with (sk, oldstate, newstate) in this kernel"
                .to_owned(),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_running_kernel_has_every_field() {
        // Any kernel with BTF at all since 5.15 has them; without BTF there is nothing to check.
        let Ok(bytes) = std::fs::read("/sys/kernel/btf/vmlinux") else {
            eprintln!(
                "SKIPPED the_running_kernel_has_every_field: this kernel has no /sys/kernel/btf/vmlinux"
            );
            return;
        };
        let btf = Btf::parse(bytes).unwrap();
        let offsets = Offsets::resolve(&btf);
        assert!(offsets.missing.is_empty(), "{:?}", offsets.missing);
        assert_eq!(offsets.globals.len(), FIELDS.len() + 1);
        assert_eq!(offsets.require(LISTENER_FIELDS), Ok(()));
        assert_eq!(check_set_state(&btf), Ok(()));
    }

    #[test]
    fn a_missing_field_is_named() {
        let offsets = Offsets {
            globals: Vec::new(),
            missing: vec![("OFF_NET_COOKIE", BtfError::NoField("net.net_cookie".to_owned()))],
        };
        assert_eq!(offsets.require(&["OFF_SKC_NUM"]), Ok(()));
        assert_eq!(
            offsets.require(LISTENER_FIELDS),
            Err("the kernel's BTF has no field net.net_cookie".to_owned())
        );
    }
}
