//! Joins what several sources of pods want into one value for the pods' manager.

use std::{future::pending, sync::Arc};

use beelet_model::desired::Desired;
use futures::{FutureExt, future::select_all};
use tokio::sync::watch;

/// What all sources want together, and the work that keeps it so until nobody listens. If two
/// sources name the same pod or object, the first one counts. The last word of a source that has ended
/// stands.
pub(super) fn join(
    mut sources: Vec<watch::Receiver<Arc<Desired>>>,
) -> (watch::Receiver<Arc<Desired>>, impl Future<Output = ()> + Send) {
    let (joined, receiver) = watch::channel(Arc::new(newest(&mut sources)));
    let work = async move {
        loop {
            let changes = sources.iter_mut().map(|source| changed(source).boxed());
            tokio::select! {
                _ = select_all(changes) => {}
                () = joined.closed() => return,
            }
            joined.send_replace(Arc::new(newest(&mut sources)));
        }
    };
    (receiver, work)
}

async fn changed(source: &mut watch::Receiver<Arc<Desired>>) {
    if source.changed().await.is_err() {
        pending::<()>().await;
    }
}

fn newest(sources: &mut [watch::Receiver<Arc<Desired>>]) -> Desired {
    let all: Vec<Arc<Desired>> = sources.iter_mut().map(|one| Arc::clone(&one.borrow_and_update())).collect();
    Desired::joined(&all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use beelet_model::table::PodName;
    use k8s_openapi::api::core::v1::Pod;

    fn wanting(names: &[&str]) -> Arc<Desired> {
        let pod = |name: &&str| {
            (PodName { namespace: "default".into(), name: (*name).into() }, Arc::new(Pod::default()))
        };
        Arc::new(Desired { pods: names.iter().map(pod).collect(), ..Desired::default() })
    }

    fn names(desired: &Desired) -> Vec<String> {
        desired.pods.keys().map(|name| name.name.clone()).collect()
    }

    #[tokio::test]
    async fn a_change_of_any_source_shows_and_one_that_ended_keeps_its_pods() {
        let (files, of_files) = watch::channel(wanting(&["a"]));
        let (api, of_api) = watch::channel(wanting(&["b"]));
        let (mut joined, work) = join(vec![of_files, of_api]);
        let working = tokio::spawn(work);
        assert_eq!(names(&joined.borrow_and_update()), ["a", "b"]);
        api.send_replace(wanting(&["b", "c"]));
        joined.changed().await.unwrap();
        assert_eq!(names(&joined.borrow_and_update()), ["a", "b", "c"]);
        drop(api);
        files.send_replace(wanting(&[]));
        joined.changed().await.unwrap();
        assert_eq!(names(&joined.borrow_and_update()), ["b", "c"]);
        drop(joined);
        working.await.unwrap();
    }
}
