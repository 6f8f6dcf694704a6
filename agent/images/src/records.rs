//! When each image was first seen and last used, over restarts of the agent: an image's age must not begin
//! anew with it.

use std::{collections::BTreeMap, sync::Arc};

use beelet_policy::images::gc::ImageRecord;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tracing::warn;

use beelet_base::blocking::blocking;
use beelet_state::{Loaded, State, StateError};

/// The name of the durable record.
const NAME: &str = "images";

/// The durable record of image ages.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ImageRecords {
    /// When images were first looked at on this machine; None: never yet.
    pub(super) began: Option<Timestamp>,
    /// By id.
    pub(super) images: BTreeMap<String, ImageRecord>,
}

impl ImageRecords {
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
pub(super) async fn load(state: &Arc<State>) -> ImageRecords {
    let state = Arc::clone(state);
    match blocking("reading the record of image ages", move || state.load::<ImageRecords>(NAME)).await {
        Ok(Loaded::Value { value, .. }) => value,
        Ok(Loaded::Absent) => ImageRecords::default(),
        Ok(Loaded::Quarantined { moved_to, reason }) => {
            warn!(?moved_to, %reason, "the record of image ages was damaged and set aside; ages begin anew");
            ImageRecords::default()
        }
        Err(error) => {
            warn!(%error, "cannot read the record of image ages; ages begin anew");
            ImageRecords::default()
        }
    }
}

/// Writes the durable record.
pub(super) async fn store(state: &Arc<State>, known: &ImageRecords) -> Result<(), StateError> {
    let (state, known) = (Arc::clone(state), known.clone());
    blocking("writing the record of image ages", move || state.store(NAME, &known)).await
}
