//! The read-only globals of an object, from the table of both halves (`kernel_fields` in
//! ebpf/abi/src/fields.rs).

/// Makes a global for each row of an object.
macro_rules! globals {
    ($($(#[$doc:meta])* $name:ident $(or $other:ident)? : $kind:ident ($($arg:expr),+) [$($group:ident)*];)+) => {
        $(
            #[doc = concat!(stringify!($kind), "(", stringify!($($arg),+), ")")]
            $(#[$doc])*
            #[unsafe(no_mangle)]
            pub(crate) static $name: aya_ebpf::Global<u32> = aya_ebpf::Global::new(beelet_ebpf_abi::ABSENT);
        )+
    };
}

/// Makes the check whether a group of an object's rows is complete.
macro_rules! known {
    ($($(#[$doc:meta])* $name:ident $(or $other:ident)? : $kind:ident ($($arg:expr),+) [$($group:ident)*];)+) => {
        /// Returns true if this kernel has every field of `GROUP`. Otherwise the verifier drops the code
        /// behind the check, so that the object loads under any loader and stays idle.
        #[inline(always)]
        pub(crate) fn known<const GROUP: u32>() -> bool {
            use beelet_ebpf_abi::{ABSENT, fields::group};
            $(
                if (0 $(| group::$group)*) & GROUP != 0 && $name.load() == ABSENT $(&& $other.load() == ABSENT)? {
                    return false;
                }
            )+
            true
        }
    };
}
