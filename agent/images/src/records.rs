//! When each image was first seen and last used, over restarts of the agent: an image's age must not begin anew with it.

use std::{collections::BTreeMap, sync::Arc};

use beelet_policy::image_gc::ImageRecord;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tokio::task::spawn_blocking;
use tracing::warn;

use beelet_state::{Loaded, State};

/// The name of the durable record.
const NAME: &str = "images";

/// What is kept.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Known {
    /// When images were first looked at on this machine; None: never yet.
    pub(super) began: Option<Timestamp>,
    /// By id.
    pub(super) images: BTreeMap<String, ImageRecord>,
}

impl Known {
    /// All times in it.
    pub(super) fn times(&mut self) -> impl Iterator<Item = &mut Timestamp> {
        let of_images = self.images.values_mut().flat_map(|record| {
            let ImageRecord { first_detected, last_used, .. } = record;
            first_detected.iter_mut().chain(last_used)
        });
        self.began.iter_mut().chain(of_images)
    }
}

/// Reads what an earlier instance knew. Without it every image is as if it were seen for the first time.
pub(super) async fn load(state: &Arc<State>) -> Known {
    let state = Arc::clone(state);
    let loaded = spawn_blocking(move || state.load::<Known>(NAME)).await;
    match loaded {
        Ok(Ok(Loaded::Value { value, .. })) => value,
        Ok(Ok(Loaded::Absent)) => Known::default(),
        Ok(Ok(Loaded::Quarantined { moved_to, reason })) => {
            warn!(?moved_to, %reason, "the record of image ages was damaged and set aside; ages begin anew");
            Known::default()
        }
        Ok(Err(error)) => {
            warn!(%error, "the record of image ages can't be read; ages begin anew");
            Known::default()
        }
        Err(error) => {
            warn!(%error, "the record of image ages was not read; ages begin anew");
            Known::default()
        }
    }
}

/// Keeps it. A sentence if it could not be.
pub(super) async fn store(state: &Arc<State>, known: &Known) -> Result<(), String> {
    let (state, known) = (Arc::clone(state), known.clone());
    let stored = spawn_blocking(move || state.store(NAME, &known).map_err(|e| e.to_string()));
    stored.await.unwrap_or_else(|e| Err(format!("an internal task failed: {e}")))
}
