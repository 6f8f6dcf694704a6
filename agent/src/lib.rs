//! What the node runs and how.
