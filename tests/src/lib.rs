//! What the tests, the demo and the benches share: a private containerd, images made without a registry, the
//! agent as a child process, and guards that take back what a test made on the machine.
//!
//! Everything made here is found again by its own name or path (never "all containers", "all cgroups"), so it
//! works beside another containerd or a kubelet, and is taken back when the value that stands for it is
//! dropped, after a failed assertion too. What a killed test left behind is swept up by the next one that
//! starts.

pub mod agent;
pub mod apiserver;
pub mod cgroup_values;
pub mod cluster;
pub mod confine;
pub mod containerd;
pub mod cri;
pub mod csi_driver;
pub mod device_plugin;
pub mod dra_driver;
pub mod exec;
pub mod faults;
pub mod guards;
pub mod kubelet;
pub mod load;
pub mod machine;
pub mod manifests;
pub mod oom;
pub mod pages;
pub mod pods;
pub mod ports;
pub mod registry;
pub mod requires;
pub mod traces;

pub use beelet_tests_base::{images, workdir};
