//! Support shared by tests, demo and benches: a private containerd, images built without a registry, the
//! agent as a child process, and guards that remove a test's resources from the machine.
//!
//! Every resource is identified by its own name or path (never "all containers", "all cgroups"), so that
//! tests work next to another containerd or a kubelet, and is removed when its value is dropped, also after a
//! failed assertion. The next test removes leftovers of a killed one.

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
pub mod helper;
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
