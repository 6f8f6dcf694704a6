//! The change of agents under running pods: from a kubelet to beelet, and back.
//!
//! [`adoption`] decides which pods of a kubelet the agent takes over at its start, [`check`] which pods would
//! keep running if the other agent took over, and [`container_hash`] is the kubelet's digest of a container,
//! which both write. The names of labels, annotations and files are the kubelet's
//! (`pkg/kubelet/kuberuntime/labels.go` of Kubernetes 1.36).

mod adopt;
mod check;
mod found;
mod hash;
mod places;
mod reason;
#[cfg(test)]
mod tests;

pub use adopt::{Adoption, LeftAlone, Sources, adoption, is_same_manifest};
pub use check::{Loss, Outcome, Wanted, check, forgets_readiness, loss};
pub use found::{Found, FoundContainer, FoundSandbox, Maker, Source};
pub use hash::{container_hash, container_hash_of};
pub use places::Places;
pub use reason::{Next, Reason};
