//! Reads kernel structures whose layout differs between kernels.
//!
//! Each offset is a read-only global that the agent sets from the running kernel's BTF before loading
//! (`beelet_ebpf_abi::fields` has the reason and the table). The verifier checks every read against the
//! kernel's own types. [`ABSENT`] means that this kernel lacks the field.

use aya_ebpf::Global;
use beelet_ebpf_abi::{ABSENT, Address, FAMILY_IPV4, FAMILY_IPV6, kernel_fields};

/// Position of a tracepoint's argument, or offset of a field.
pub(crate) type Position = Global<u32>;

macro_rules! attached {
    (both { $($both:tt)+ } attached { $($attached:tt)+ } check { $($check:tt)+ } scheduler { $($scheduler:tt)+ }) => {
        globals! { $($both)+ $($attached)+ }
        known! { $($both)+ $($attached)+ }
    };
}

kernel_fields!(attached);

/// 1: threads have task storage; 0: the hash `TASKS`.
#[unsafe(no_mangle)]
pub(crate) static USE_TASK_STORAGE: Global<u32> = Global::new(0);

/// Number of this instance of the programs: see [`beelet_ebpf_abi::Meta::instance`].
#[unsafe(no_mangle)]
pub(crate) static INSTANCE: Global<u32> = Global::new(0);

/// A `struct sock *` or `struct tcp_sock *` that the verifier knows as such.
#[derive(Clone, Copy)]
pub(crate) struct Sock(*const u8);

impl Sock {
    /// # Safety
    /// `pointer` is not null, and the verifier tracks it as a pointer to a kernel `sock` (or a type that
    /// begins with one).
    #[inline(always)]
    pub(crate) const unsafe fn new(pointer: *const u8) -> Self {
        Self(pointer)
    }

    /// Reads a field of the socket.
    #[inline(always)]
    fn field<T: Copy>(self, offset: u32) -> T {
        // SAFETY: `Sock::new` requires a typed kernel pointer; the verifier checks reads through one against
        // the type when the program is loaded, and a fault reads as zero (Documentation/bpf/btf.rst,
        // "BTF_KIND_STRUCT" pointers).
        unsafe { read(self.0, offset) }
    }

    /// Returns the IP protocol number, which distinguishes TCP from MPTCP, SCTP and DCCP (which share TCP's
    /// states).
    #[inline(always)]
    pub(crate) fn protocol(self) -> u16 {
        self.field(OFF_SOCK_PROTOCOL.load())
    }

    /// Returns the cgroup2 id of the socket's cgroup, or 0.
    #[inline(always)]
    pub(crate) fn cgroup_id(self) -> u64 {
        let (cgroup, kn, id) = (OFF_SOCK_CGROUP.load(), OFF_CGROUP_KN.load(), OFF_KERNFS_ID.load());
        if cgroup == ABSENT || kn == ABSENT || id == ABSENT {
            return 0;
        }
        let cgroup: *const u8 = self.field(cgroup);
        if cgroup.is_null() {
            return 0;
        }
        // SAFETY: typed kernel pointers, as in `field`; a null `kn` would read as zero.
        unsafe {
            let node: *const u8 = read(cgroup, kn);
            read(node, id)
        }
    }

    /// Returns the socket's bound address. The port is 0 while the kernel hasn't chosen one.
    #[inline(always)]
    pub(crate) fn address(self) -> Option<Address> {
        let net: *const u8 = self.field(OFF_SKC_NET.load());
        // SAFETY: every socket has its network namespace; a typed kernel pointer, as in `field`.
        let netns_cookie = unsafe { read(net, OFF_NET_COOKIE.load()) };
        let mut found = Address {
            netns_cookie,
            address: [0; 16],
            port: self.field(OFF_SKC_NUM.load()),
            family: self.field(OFF_SKC_FAMILY.load()),
            dual_stack: 0,
        };
        if found.family == FAMILY_IPV4 {
            let address: u32 = self.field(OFF_SKC_RCV_SADDR.load());
            set_word(&mut found.address, 0, address);
            return Some(found);
        }
        if found.family != FAMILY_IPV6 || OFF_SKC_V6_RCV_SADDR.load() == ABSENT {
            return None;
        }
        set_word(&mut found.address, 0, self.field(OFF_SKC_V6_RCV_SADDR.load()));
        set_word(&mut found.address, 1, self.field(OFF_SKC_V6_RCV_SADDR.load() + 4));
        set_word(&mut found.address, 2, self.field(OFF_SKC_V6_RCV_SADDR.load() + 8));
        set_word(&mut found.address, 3, self.field(OFF_SKC_V6_RCV_SADDR.load() + 12));
        if OFF_SKC_IPV6ONLY.load() != ABSENT {
            let flags: u8 = self.field(OFF_SKC_IPV6ONLY.load());
            found.dual_stack = u32::from(u32::from(flags) & MASK_SKC_IPV6ONLY.load() == 0);
        }
        Some(found)
    }
}

/// Writes the `index`th 32-bit word (already in network order) of an address.
#[inline(always)]
fn set_word(address: &mut [u8; 16], index: usize, word: u32) {
    // SAFETY: `index` is 0 to 3, and the array is at offset 8 of a type aligned to 8.
    unsafe { address.as_mut_ptr().cast::<u32>().add(index).write(word) };
}

/// # Safety
/// `base` is a typed kernel pointer and `offset` a constant to the verifier, within that type.
#[inline(always)]
pub(crate) unsafe fn read<T: Copy>(base: *const u8, offset: u32) -> T {
    // Volatile: the compiler may neither merge reads (the verifier requires them field by field) nor repeat
    // them. SAFETY: the verifier checks the access against the kernel's type, or refuses the program.
    unsafe { core::ptr::read_volatile(base.add(offset as usize).cast::<T>()) }
}

/// Reads a word of a map value that other CPUs change.
#[inline(always)]
pub(crate) fn load(word: &u64) -> u64 {
    // SAFETY: a reference is aligned and points to a live value.
    unsafe { core::ptr::read_volatile(word) }
}
