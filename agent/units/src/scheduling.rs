//! Parts of the CPU that the tuner's own scheduler gives to pods.

/// A pod's place in the order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SchedulingClass {
    /// Before all others, and at once when it wakes up.
    Latency,
    /// By weight, together with the machine's own threads.
    Shared,
    /// The rest of the time.
    BestEffort,
}

/// A pod's part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchedulingShare {
    /// Its place.
    pub class: SchedulingClass,
    /// Its weight beside others of [`SchedulingClass::Shared`]: 100 for a request of one CPU; at least 1.
    pub weight: u32,
}
