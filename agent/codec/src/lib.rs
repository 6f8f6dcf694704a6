//! Text to Kubernetes objects and back: the only crate that reads and writes them, with the line and the path of each
//! error.
pub mod decode;
pub mod document;
pub mod error;
