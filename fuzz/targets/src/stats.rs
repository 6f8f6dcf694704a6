//! Parsers of files in cgroups and in /proc, for the target `proc_files`.

use beelet_base::machine_memory;
use beelet_stats::parse;

/// Tests a file with each parser.
pub(crate) fn files(text: &str) {
    let _ = (parse::keyed(text).count(), parse::limit(text), parse::cpu_max(text), parse::stalls(text));
    let _ = (parse::io_stat(text), parse::blkio(text), parse::faults(text), parse::retransmits(text));
    let interfaces = parse::interfaces(text, 32);
    assert!(interfaces.len() <= 32 && interfaces.iter().all(|(name, _)| name != "lo"));
    let name = text.split([':', ' ', '\n']).next().unwrap_or_default();
    let _ = (machine_memory::meminfo(text, name), parse::machine_cpu(text, 100), parse::load(text));
}
