//! Tools for every part of the agent: the clock, locks, TLS, blocking work, the doors to programs and to
//! files in shared folders, walks by descriptor, tar archives, the size of file systems, the machine's
//! memory, counters with the kubelet's names, the kernel's release. Must never know about pods.

pub mod archive;
pub mod blocking;
pub mod chance;
pub mod clock;
pub mod cpus;
mod error;
pub mod filesystem;
pub mod folder;
pub mod kernel_file;
pub mod kernel_release;
pub mod kubelet_counter;
pub mod lock;
pub mod machine_memory;
pub mod mountinfo;
pub mod own_file;
pub mod pieces;
pub mod process;
pub mod program;
pub mod propagation;
pub mod redirect;
pub mod room;
pub mod shared_folder;
pub mod simulation;
pub mod spans;
pub mod tls;
pub mod walk;
pub mod work;

pub use self::error::Error;
