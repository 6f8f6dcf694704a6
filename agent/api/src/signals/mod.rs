//! The service `beelet.v1.Signals`: container measurements and kernel edges for other programs, including
//! `beelet top` (`agent/proto/proto/beelet/signals.proto`). Read only.

mod convert;
pub mod feed;
mod server;

pub use self::server::{Mode, service};
