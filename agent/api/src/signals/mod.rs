//! The service `beelet.v1.Signals`: containers' numbers and the kernel's edges for other programs, `beelet
//! top` among them (`agent/proto/proto/beelet/signals.proto`). Read only.

mod convert;
pub mod feed;
mod server;

pub use self::server::{Mode, service};
