//! Joins the sources of pods, i.e. the static manifests and those that are built elsewhere, into one value
//! for the pods' manager.

use std::{future::pending, sync::Arc};

use beelet_manifests::source::{ManifestSource, Options, Rules};
use beelet_model::desired::Desired;
use futures::{FutureExt, future::select_all};
use tokio::sync::watch;
use tracing::warn;

use super::{services::Services, tasks::Tasks};

/// Starts the static manifests and joins them with `others`. Returns the desired pods of all sources.
pub(super) async fn start(
    services: &Services,
    mut others: Vec<watch::Receiver<Arc<Desired>>>,
    tasks: &mut Tasks,
) -> watch::Receiver<Arc<Desired>> {
    let manifests = start_manifests(services, tasks).await;
    if others.is_empty() {
        return manifests;
    }
    others.insert(0, manifests);
    let (joined, joining) = join(others);
    // The API's services subscribe until the end, so stop explicitly.
    let stop = tasks.stop();
    tasks.spawn_optional("sources of pods", async move {
        stop.run_until_cancelled(joining).await;
    });
    joined
}

/// Starts the source of static pods. Without a static pod path, no static pods are desired and running ones
/// are left alone.
async fn start_manifests(services: &Services, tasks: &mut Tasks) -> watch::Receiver<Arc<Desired>> {
    let config = &services.config;
    let Some(path) = &config.static_pod_path else {
        warn!("staticPodPath is not set: starting no static pods and leaving running ones alone");
        let nothing = Desired { without_folder: true, ..Desired::default() };
        return watch::channel(Arc::new(nothing)).1;
    };
    let options = Options {
        check_frequency: config.file_check_frequency,
        rules: manifest_rules(services),
        put_back_restarts: config.put_back_restarts,
        events: services.events.clone(),
        cancel: tasks.stop(),
    };
    let (desired, watching) = ManifestSource::open(path.clone(), config.node_name.clone(), options).await;
    tasks.spawn_optional("manifests", watching);
    desired
}

/// Returns the settings for the pods of manifests.
pub(super) fn manifest_rules(services: &Services) -> Rules {
    Rules {
        critical_static_pods: services.config.beelet.critical_static_pods,
        allowed_unsafe_sysctls: services.config.allowed_unsafe_sysctls.clone(),
        state: Some(Arc::clone(&services.state)),
    }
}

/// Joins `sources`. Returns the joined value, and a future that keeps it current until the last receiver is
/// dropped. If two sources have the same pod or object, the first source wins. A source that has ended keeps
/// its last value.
fn join(
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
