//! The node of a cluster. Nothing else knows that there is an API server: here is the only door to it ([`client`]), and
//! what a kubelet says through it.

pub mod client;
