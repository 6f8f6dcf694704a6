//! Pressure edges: user space gets one edge when a cgroup's waits rise above its threshold and one when they
//! fall again, and never more than one per second. All other waits are only counted.

use aya_ebpf::bindings::BPF_NOEXIST;
use beelet_ebpf_abi::{
    CgroupKey, PRESSURE_WINDOW_NS, Pressure, PressureEvent, Settings, kind, pressure, qos,
};

use crate::{
    atomic::{atomic_add, exchange},
    events::{header, send},
    kernel::load,
    maps::{PRESSURE, SETTINGS},
};

static CALM: Pressure = Pressure {
    window_ns: [0; pressure::KINDS],
    waited_ns: [0; pressure::KINDS],
    above: [0; pressure::KINDS],
    edge_ns: 0,
};

/// Adds the wait of a cgroup's thread, `waited_ns` until `now`. `KIND` is one of [`pressure`].
#[inline(always)]
pub(crate) fn waited<const KIND: usize>(cgroup_id: u64, class: u32, waited_ns: u64, now: u64) {
    let threshold = threshold::<KIND>(class);
    if threshold == 0 {
        return;
    }
    let Some(entry) = entry(cgroup_id) else { return };
    let began = load(&entry.window_ns[KIND]);
    let age = now.saturating_sub(began);
    let mut sum = waited_ns;
    if age >= PRESSURE_WINDOW_NS {
        if exchange(&mut entry.window_ns[KIND], began, now) != began {
            // Another CPU has just begun a new window: this wait is part of it.
            // SAFETY: a live, aligned element.
            unsafe { atomic_add(&raw mut entry.waited_ns[KIND], waited_ns) };
            return;
        }
        let calm = age >= 2 * PRESSURE_WINDOW_NS || load(&entry.waited_ns[KIND]) < threshold / 2;
        entry.waited_ns[KIND] = waited_ns;
        if calm && load(&entry.above[KIND]) != 0 && waited_ns < threshold {
            send_edge::<KIND>(entry, cgroup_id, false, waited_ns, now);
            return;
        }
    } else {
        // SAFETY: a live, aligned element.
        unsafe { atomic_add(&raw mut entry.waited_ns[KIND], waited_ns) };
        sum = load(&entry.waited_ns[KIND]);
    }
    if sum >= threshold && load(&entry.above[KIND]) == 0 {
        send_edge::<KIND>(entry, cgroup_id, true, sum, now);
    }
}

/// Sends an edge if the cgroup's last one was at least a second ago; otherwise the next wait tries again.
#[inline(always)]
fn send_edge<const KIND: usize>(entry: &mut Pressure, cgroup_id: u64, above: bool, waited_ns: u64, now: u64) {
    let last = load(&entry.edge_ns);
    if now.saturating_sub(last) < PRESSURE_WINDOW_NS || exchange(&mut entry.edge_ns, last, now) != last {
        return;
    }
    entry.above[KIND] = u64::from(above);
    send(PressureEvent {
        header: header(kind::PRESSURE, cgroup_id),
        pressure: KIND as u32,
        above: u32::from(above),
        waited_ns,
    });
}

#[inline(always)]
fn threshold<const KIND: usize>(class: u32) -> u64 {
    let Some(settings) = SETTINGS.get_ptr(0) else { return 0 };
    // SAFETY: the element lives as long as the array; during a change, the old and the new word are both
    // valid.
    let settings: &Settings = unsafe { &*settings };
    let all =
        if KIND == pressure::RUN_QUEUE as usize { &settings.run_queue_wait_ns } else { &settings.reclaim_ns };
    match class {
        qos::GUARANTEED => all[qos::GUARANTEED as usize],
        qos::BURSTABLE => all[qos::BURSTABLE as usize],
        _ => all[qos::BEST_EFFORT as usize],
    }
}

#[inline(always)]
fn entry<'a>(cgroup_id: u64) -> Option<&'a mut Pressure> {
    let key = CgroupKey { cgroup_id };
    let found = match PRESSURE.get_ptr_mut(key) {
        Some(found) => found,
        None => {
            let _ = PRESSURE.insert(key, &CALM, u64::from(BPF_NOEXIST));
            PRESSURE.get_ptr_mut(key)?
        }
    };
    // SAFETY: a live element. Other CPUs also write it: each field is one word, changed atomically where
    // needed.
    Some(unsafe { &mut *found })
}
