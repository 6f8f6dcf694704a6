//! Durable record of the time at which each image was first seen and last used, so that a restart of the
//! agent does not reset image ages.

use std::{collections::BTreeMap, sync::Arc};

use beelet_policy::images::gc::ImageRecord;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tracing::warn;

use beelet_base::blocking::blocking;
use beelet_state::{Loaded, State, StateError};

/// Name of the durable record.
const NAME: &str = "images";

/// Durable record of image ages.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ImageRecords {
    /// Time of the first scan on this machine; None: never.
    pub(super) began: Option<Timestamp>,
    /// Records by image id.
    pub(super) images: BTreeMap<String, ImageRecord>,
}

impl ImageRecords {
    /// Returns all times in the record.
    pub(super) fn times(&mut self) -> impl Iterator<Item = &mut Timestamp> {
        let of_images = self.images.values_mut().flat_map(|record| {
            let ImageRecord { first_detected, last_used, .. } = record;
            first_detected.iter_mut().chain(last_used)
        });
        self.began.iter_mut().chain(of_images)
    }
}

/// Reads the record of an earlier instance. Without a record every image counts as new.
pub(super) async fn load(state: &Arc<State>) -> ImageRecords {
    let state = Arc::clone(state);
    match blocking("reading the record of image ages", move || state.load::<ImageRecords>(NAME)).await {
        Ok(Loaded::Value { value, .. }) => value,
        Ok(Loaded::Absent) => ImageRecords::default(),
        Ok(Loaded::Quarantined { moved_to, reason }) => {
            warn!(?moved_to, %reason, "moved the damaged record of image ages aside; image ages restart");
            ImageRecords::default()
        }
        Err(error) => {
            warn!(%error, "cannot read the record of image ages; image ages restart");
            ImageRecords::default()
        }
    }
}

/// Writes the durable record.
pub(super) async fn store(state: &Arc<State>, known: &ImageRecords) -> Result<(), StateError> {
    let (state, known) = (Arc::clone(state), known.clone());
    blocking("writing the record of image ages", move || state.store(NAME, &known)).await
}
