//! What follows the agent goes on when it comes back: a watch, a followed log.

use std::path::Path;
use std::time::Duration;

use beelet_client::{Client, ClientError};

/// That it is waited for the agent, and why.
fn waiting(why: &ClientError) -> String {
    match why {
        // What its sentence advises is being done.
        ClientError::Gone => "the agent stopped, or was started anew; waiting for it".to_owned(),
        why => format!("{why}; waiting for it"),
    }
}

/// The pause between two tries to reach it.
const PAUSE: Duration = Duration::from_millis(500);

/// Connects again to an agent that went away (`why`), however long that takes, and waits until it knows its
/// pods. Says that it waits, and when that is over.
///
/// # Errors
/// It is not away: the same would fail again.
pub(super) async fn again(socket: &Path, why: ClientError) -> Result<Client, ClientError> {
    if !why.is_transient() {
        return Err(why);
    }
    eprintln!("{}", waiting(&why));
    loop {
        tokio::time::sleep(PAUSE).await;
        let back = async {
            let mut client = Client::connect(socket).await?;
            client.pods().await?;
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
        assert_eq!(waiting(&ClientError::Gone), "the agent stopped, or was started anew; waiting for it");
        assert!(waiting(&ClientError::Hangs).ends_with("its log; waiting for it"));
    }
}
