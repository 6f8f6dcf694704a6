//! The part of a simulation that decides about calls.

use tonic::Status;

use super::calls::Asked;
use super::world::World;

/// Decides about each call to the runtime of a simulation: its delays, its failures, its effects beyond the
/// runtime's own state.
#[tonic::async_trait]
pub trait Director: Send + Sync {
    /// Waits before the call takes effect. An error is the answer, without an effect.
    async fn before(&self, asked: &Asked) -> Result<(), Status>;

    /// Prepares the world for the effect of the call.
    fn prepare(&self, world: &mut World, asked: &Asked);

    /// Follows the changes of the world after the effect of the call.
    fn follow(&self, world: &mut World, asked: &Asked);

    /// Waits before the answer. An error replaces the answer.
    async fn after(&self, asked: &Asked) -> Result<(), Status>;
}
