//! Which images and dead containers the node removes, and which pods may use a pulled image.

pub mod containers;
pub mod credentials;
pub mod gc;
