//! Tests of the judgement of faults, and of the conditions.

use super::*;

const SECOND: Duration = Duration::from_secs(1);

fn log(lines: &[&str]) -> KernelLog {
    let mut log = KernelLog::default();
    lines.iter().for_each(|line| log.add(&format!("4,7,100000000,-;{line}")));
    log
}

fn reasons(log: &KernelLog, now: u32) -> Vec<Reason> {
    log.faults(SECOND * now, log.oops.is_some(), None).into_iter().map(|fault| fault.reason).collect()
}

#[test]
fn a_line_of_the_kernel_log_is_a_fault_of_its_kind() {
    let check = |line: &str, expected: &[Reason]| assert_eq!(reasons(&log(&[line]), 101), expected, "{line}");
    check("Oops: 0000 [#1] PREEMPT SMP NOPTI", &[Reason::KernelOops]);
    check("invalid opcode: 0000 [#12] SMP", &[Reason::KernelOops]);
    check("Internal error: Oops: 0000000096000004 [#1] PREEMPT SMP", &[Reason::KernelOops]);
    check("watchdog: BUG: soft lockup - CPU#3 stuck for 23s! [kworker:12]", &[Reason::CpuLockup]);
    check("NMI watchdog: BUG: soft lockup - CPU#3 stuck for 23s! [kworker:12]", &[Reason::CpuLockup]);
    check("watchdog: Watchdog detected hard LOCKUP on cpu 5", &[Reason::CpuLockup]);
    check("watchdog: CPU2: Watchdog detected hard LOCKUP on cpu 5", &[Reason::CpuLockup]);
    check("INFO: task kworker/u8:3:1234 blocked for more than 120 seconds.", &[Reason::TaskHung]);
    check("INFO: task dd:77 blocked in I/O wait for more than 122 seconds.", &[Reason::TaskHung]);
    for harmless in [
        "",
        "INFO: task dd:77 blocked on a mutex likely owned by task x:78.",
        "INFO: task dd blocked for more than 120 seconds.",
        "traps: app[12] general protection fault ip:1 sp:2 error:0",
        "app [#] and [#x] and [#",
        "EXT4-fs (sda1): mounted filesystem",
        "EXT4-fs (sda1): Remounting filesystem read-only",
        // Names that a program chose: of itself, and of the mapped file in which it fails.
        "INFO: task a[77]: segfault at 0 ip 0 error 4 in y:77 blocked for more than 120 seconds.[55+1]",
        "a[77]: segfault at 0 ip 0 error 4 in BUG: soft lockup - CPU#3[55+1]",
        "watchdog: a[77]: segfault at 0 ip 0 error 4 in Watchdog detected hard LOCKUP on cpu 5[55+1]",
    ] {
        check(harmless, &[]);
    }
}

#[test]
fn a_program_can_not_write_a_fault_into_the_log() {
    let mut log = KernelLog::default();
    for record in [
        // The facility of programs, and invalid records.
        "12,7,100000000,-;Oops: 0000 [#1] SMP",
        "Oops: 0000 [#1] SMP",
        "x,7,1,-;Oops: 0000 [#1] SMP",
        "4,7;Oops: 0000 [#1] SMP",
        " SUBSYSTEM=block;Oops: 0000 [#1] SMP",
        ";",
    ] {
        log.add(record);
    }
    assert_eq!(log, KernelLog::default());
}

#[test]
fn a_programs_name_in_a_record_of_the_kernel_is_no_oops() {
    let log = log(&["a[#1][77]: segfault at 0 ip 0000000000000000 sp 00007ffd error 14"]);
    assert_eq!(log.faults(SECOND * 101, false, None), []);
}

#[test]
fn an_oops_counts_without_its_line_and_an_unreadable_log_is_unknown() {
    let found = KernelLog::default().faults(SECOND, true, Some("EPERM"));
    let found: Vec<_> = found.iter().map(|fault| (fault.reason, fault.message.as_str())).collect();
    assert_eq!(
        found,
        [
            (Reason::KernelOops, "the kernel's taint flags show an oops since boot"),
            (
                Reason::KernelLogUnreadable,
                "the kernel's log cannot be read, so its faults are unknown: EPERM"
            ),
        ]
    );
}

#[test]
fn a_shut_down_file_system_works_again_once_it_is_mounted_again() {
    let device = |log: &KernelLog| log.file_systems.keys().cloned().collect::<Vec<_>>();
    let shut = "XFS (dm-0): Log I/O Error (0x2) detected at xlog_ioend_work+0x64/0xc0 (fs/xfs/xfs_log.c:1378).  \
                Shutting down filesystem.";
    assert_eq!(device(&log(&[shut])), ["dm-0"]);
    assert_eq!(device(&log(&[shut, "XFS (dm-1): Mounting V5 Filesystem 2b7c"])), ["dm-0"]);
    assert_eq!(device(&log(&[shut, "XFS (dm-0): Mounting V5 Filesystem 2b7c"])), [""; 0]);
    assert_eq!(device(&log(&[shut, "XFS (dm-0): Unmounting Filesystem 2b7c"])), [""; 0]);
    for forged in [
        "overlayfs: failed to resolve '(sda1): Shutting down filesystem': -2",
        "XFS (sda): a[77]: segfault at 0 ip 0 sp 0 error 4 in Shutting down filesystem[55d0+1000]",
        "EXT4-fs (sda1): a[77]: segfault at 0 error 4 in Remounting filesystem read-only[55d0+1000]",
    ] {
        assert_eq!(device(&log(&[forged])), [""; 0], "{forged}");
    }
}

#[test]
fn an_oops_lasts_until_the_next_boot_and_other_faults_end() {
    let mut log = log(&[
        "Oops: 0000 [#1] SMP",
        "watchdog: BUG: soft lockup - CPU#3 stuck for 23s! [x:1]",
        "INFO: task dd:77 blocked for more than 120 seconds.",
    ]);
    assert_eq!(reasons(&log, 101), [Reason::KernelOops, Reason::CpuLockup, Reason::TaskHung]);
    assert_eq!(reasons(&log, 189), [Reason::KernelOops, Reason::CpuLockup, Reason::TaskHung]);
    assert_eq!(reasons(&log, 190), [Reason::KernelOops, Reason::TaskHung]);
    assert_eq!(log.hung_tasks().collect::<Vec<_>>(), [77]);
    log.retain_hung(|tid| tid != 77);
    assert_eq!(reasons(&log, u32::MAX), [Reason::KernelOops]);
}

#[test]
fn the_memory_of_the_log_is_bounded() {
    let mut log = KernelLog::default();
    for number in 0..1000 {
        log.add(&format!("4,7,1,-;INFO: task a:{number} blocked for more than 120 seconds."));
        log.add(&format!("4,7,1,-;EXT4-fs (sd{number}): Remounting filesystem read-only"));
    }
    log.add(&format!("4,7,1,-;Oops: 0000 [#1] {}", "x".repeat(100_000)));
    assert_eq!((log.hung.len(), log.file_systems.len()), (MOST, MOST));
    assert_eq!(log.oops.unwrap().chars().count(), LONGEST);
}

#[test]
fn a_disk_that_takes_no_writes_is_a_fault() {
    let measured = |read_only, available, inodes_free| DiskState::Measured {
        read_only,
        capacity: 1000,
        available,
        inodes: 100,
        inodes_free,
    };
    let lines = [
        "XFS (dm-0): Log I/O Error Detected. Shutting down filesystem",
        "EXT4-fs (sda1): Remounting filesystem read-only",
        "BTRFS info (device sdb state EA): forced readonly",
    ];
    let log = log(&lines);
    let check = |device: &str, state: DiskState, expected: Option<(Reason, &str)>| {
        let found = disk(&Disk { folder: "/f".to_owned(), device: device.to_owned(), state }, &log);
        let found = found.map(|fault| (fault.reason, fault.message));
        let expected = expected.map(|(reason, words)| (reason, format!("the file system of /f {words}")));
        assert_eq!(found, expected);
    };
    check("sda1", measured(false, 10, 1), None);
    check(
        "sda1",
        measured(true, 500, 1),
        Some((Reason::FilesystemIsReadOnly, &format!("is read-only: {}", lines[1]))),
    );
    check(
        "sdb",
        measured(true, 500, 1),
        Some((Reason::FilesystemIsReadOnly, &format!("is read-only: {}", lines[2]))),
    );
    check("", measured(true, 500, 1), Some((Reason::FilesystemIsReadOnly, "is read-only")));
    check(
        "dm-0",
        measured(false, 500, 1),
        Some((Reason::FilesystemIsShutDown, &format!("was shut down by the kernel: {}", lines[0]))),
    );
    check(
        "sdc",
        measured(false, 9, 1),
        Some((Reason::FilesystemIsFull, "is full: less than 1 % of 1000 bytes is available")),
    );
    check(
        "sdc",
        measured(false, 500, 0),
        Some((Reason::FilesystemIsFull, "is full: none of 100 inodes is free")),
    );
    check("sdc", DiskState::Hangs, Some((Reason::FilesystemHangs, "does not answer")));
    check("sdc", DiskState::Fails("EIO".to_owned()), Some((Reason::FilesystemFails, "fails: EIO")));
    let empty =
        DiskState::Measured { read_only: false, capacity: 0, available: 0, inodes: 0, inodes_free: 0 };
    check("", empty, None);
}

#[test]
fn conditions_have_the_names_and_the_sense_of_their_convention() {
    let check = |convention, faults: &[Fault], expected: &[(&str, Option<bool>, &str)]| {
        let found = conditions(convention, faults);
        let found: Vec<_> = found.iter().map(|one| (one.name, one.holds, one.reason.as_str())).collect();
        assert_eq!(found, expected);
    };
    let fault = |reason| Fault { reason, message: "m".to_owned() };
    check(
        Convention::Eks,
        &[],
        &[
            ("ContainerRuntimeReady", Some(true), "ContainerRuntimeIsReady"),
            ("StorageReady", Some(true), "StorageIsReady"),
            ("KernelReady", Some(true), "KernelIsReady"),
            ("NetworkingReady", Some(true), "NetworkingIsReady"),
        ],
    );
    let all = [
        fault(Reason::FilesystemIsFull),
        fault(Reason::TaskHung),
        fault(Reason::KernelOops),
        fault(Reason::PodNetworkNotReady),
        runtime(SILENT).unwrap(),
    ];
    check(
        Convention::Eks,
        &all,
        &[
            ("ContainerRuntimeReady", Some(false), "ContainerRuntimeNotAnswering"),
            ("StorageReady", Some(false), "FilesystemIsFull"),
            ("KernelReady", Some(false), "KernelOops"),
            ("NetworkingReady", Some(false), "PodNetworkNotReady"),
        ],
    );
    check(
        Convention::NodeProblemDetector,
        &all,
        &[
            ("KernelDeadlock", Some(true), "TaskHung"),
            ("ReadonlyFilesystem", Some(false), "FilesystemIsNotReadOnly"),
            ("ContainerRuntimeUnhealthy", Some(true), "ContainerRuntimeNotAnswering"),
        ],
    );
    let kernel = |convention, faults: &[Fault]| {
        let found = conditions(convention, faults).into_iter().find(|one| one.name.starts_with("Kernel"));
        found.map(|one| (one.holds, one.reason)).unwrap()
    };
    let unknown = fault(Reason::KernelLogUnreadable);
    for convention in [Convention::Eks, Convention::NodeProblemDetector] {
        let expected = (None, "KernelLogUnreadable".to_owned());
        assert_eq!(kernel(convention, std::slice::from_ref(&unknown)), expected);
    }
    let oops = [unknown, fault(Reason::KernelOops)];
    assert_eq!(kernel(Convention::Eks, &oops), (Some(false), "KernelOops".to_owned()));
    check(
        Convention::NodeProblemDetector,
        &[fault(Reason::FilesystemIsReadOnly)],
        &[
            ("KernelDeadlock", Some(false), "KernelHasNoDeadlock"),
            ("ReadonlyFilesystem", Some(true), "FilesystemIsReadOnly"),
            ("ContainerRuntimeUnhealthy", Some(false), "ContainerRuntimeIsHealthy"),
        ],
    );
}

#[test]
fn a_runtime_is_hung_after_fifteen_seconds_and_a_network_needs_an_address() {
    assert_eq!(runtime(SECOND * 14), None);
    assert!(runtime(SILENT).unwrap().message.ends_with("for 15 s or longer"));
    assert_eq!(network(None, true), []);
    let found = network(Some("no CNI configuration"), false);
    let found: Vec<_> = found.iter().map(|fault| fault.reason).collect();
    assert_eq!(found, [Reason::PodNetworkNotReady, Reason::NoAddress]);
}
