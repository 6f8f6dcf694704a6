//! Garbage collection of images and dead containers, and pods' access to pulled images.

pub mod containers;
pub mod credentials;
pub mod gc;
