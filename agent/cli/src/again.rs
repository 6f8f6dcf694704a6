//! Reconnection of watches and followed logs after the agent restarts.

use std::path::Path;
use std::time::Duration;

use beelet_client::{Client, ClientError};

/// Returns the line that announces the wait for the agent and the reason for it.
fn waiting(why: &ClientError) -> String {
    match why {
        // The error's own text advises to run the command again, which happens here.
        ClientError::Gone => "the agent stopped or was restarted; waiting for it".to_owned(),
        why => format!("{why}; waiting for it"),
    }
}

/// Pause between two connection attempts.
const PAUSE: Duration = Duration::from_millis(500);

/// Reconnects to an agent that became unreachable (`why`), without a time limit, and waits until the agent
/// knows its pods. Prints a line when the wait begins and one when it ends.
///
/// # Errors
/// Returns `why` if the failure is permanent, because a retry would fail again.
pub(super) async fn again(socket: &Path, why: ClientError) -> Result<Client, ClientError> {
    if !why.is_transient() {
        return Err(why);
    }
    eprintln!("{}", waiting(&why));
    loop {
        tokio::time::sleep(PAUSE).await;
        let back = async {
            let mut client = Client::connect(socket).await?;
            client.pods.list().await?;
            Ok::<_, ClientError>(client)
        };
        match back.await {
            Ok(client) => {
                eprintln!("the agent is back");
                return Ok(client);
            }
            Err(error) if error.is_transient() => {}
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_is_told_to_ask_again_while_that_is_done() {
        assert_eq!(waiting(&ClientError::Gone), "the agent stopped or was restarted; waiting for it");
        assert!(waiting(&ClientError::Hangs).ends_with("its log; waiting for it"));
    }
}
