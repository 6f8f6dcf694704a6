//! From the kernel programs' counters to ours.

use beelet_ebpf_abi::{Counters, WAIT_BUCKETS};

use super::model::{KernelCounters, Net, RUNQ_BUCKETS};

const _: () = assert!(RUNQ_BUCKETS == WAIT_BUCKETS);

impl From<&Counters> for KernelCounters {
    fn from(of: &Counters) -> Self {
        Self {
            on_cpu_ns: of.on_cpu_ns,
            runq_wait_ns: of.run_queue_wait_ns,
            runq: of.run_queue_waits,
            switches: of.switches,
            preempted: [of.preempted_by_same_pod, of.preempted_by_other_pod, of.preempted_by_system],
            reclaim_ns: of.memcg_reclaim_ns + of.direct_reclaim_ns,
            reclaims: of.memcg_reclaims + of.direct_reclaims,
            established: of.established,
            net: Net {
                rx_bytes: of.rx_bytes,
                rx_packets: of.rx_packets,
                tx_bytes: of.tx_bytes,
                tx_packets: of.tx_packets,
                retransmits: of.retransmits,
                ..Net::default()
            },
            rtt_us: of.rtt_us,
            rtt_samples: of.rtt_samples,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::rates::bucket_bounds;
    use super::*;
    use beelet_bpf::wait_bucket_floor_ns;

    #[test]
    fn both_halves_mean_the_same_by_a_bucket() {
        for bucket in 0..WAIT_BUCKETS {
            assert_eq!(bucket_bounds(bucket).0, wait_bucket_floor_ns(bucket) as f64, "{bucket}");
        }
    }
}
