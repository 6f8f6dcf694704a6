//! Lets user space read and write the records as plain bytes.

use crate::{
    Address, AddressCount, Ancestry, CgroupKey, Counters, Drops, ExitedKey, ListenerRecord, Meta, Pressure,
    Running, Settings, Shares, Slot, SocketCookie, TaskKey, TaskState, scheduler,
};

macro_rules! pod {
    ($($name:ty),+) => {$(
        // SAFETY: `repr(C)`, made of integers and arrays of them, without padding (the sizes are asserted in
        // lib.rs): any bit pattern is a value and every byte is initialised.
        unsafe impl aya::Pod for $name {}
    )+};
}

pod!(
    Address,
    AddressCount,
    Ancestry,
    CgroupKey,
    Counters,
    Drops,
    ExitedKey,
    ListenerRecord,
    Meta,
    Pressure,
    Running,
    Settings,
    Shares,
    Slot,
    SocketCookie,
    TaskKey,
    TaskState,
    scheduler::Share,
    scheduler::Limit,
    scheduler::Turn,
    scheduler::End
);
