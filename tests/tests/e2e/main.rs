//! Tier 3: real pods, end to end, on a containerd of the test's own.

mod by_hand;
mod churn;
mod cluster;
mod confinement;
mod copy;
mod density;
mod devices;
mod fields;
mod harness;
mod hostile;
mod images;
mod kubectl;
mod lifecycle;
mod logs;
mod node;
mod observe;
mod pods;
mod pressure;
mod probes;
mod reboot;
mod restarts;
mod runtime_away;
mod server;
mod tour;
mod tuner;
mod volumes;
