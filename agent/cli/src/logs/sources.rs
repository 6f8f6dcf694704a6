//! Selection of the containers whose logs are printed.

use anyhow::bail;
use beelet_model::pod::{container_names, default_container};
use beelet_model::table::{PodEntry, PodName, PodTable};
use beelet_proto::beelet as proto;
use beelet_units::selector::Selector;

/// A container whose log is printed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Source {
    pub(super) pod: PodName,
    pub(super) container: String,
}

impl Source {
    /// Returns the prefix of the container's lines, as in kubectl.
    pub(super) fn prefix(&self) -> String {
        format!("[pod/{}/{}] ", self.pod.name, self.container)
    }

    /// Returns the container as the agent's API names it.
    pub(super) fn target(&self) -> proto::ContainerTarget {
        proto::ContainerTarget {
            namespace: self.pod.namespace.clone(),
            pod: self.pod.name.clone(),
            container: self.container.clone(),
        }
    }
}

/// Selection of pods and their containers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Choice<'a> {
    /// Name of the pod; None for all pods that the selector matches.
    pub(super) pod: Option<&'a str>,
    pub(super) selector: &'a Selector,
    /// Namespace; empty for any.
    pub(super) namespace: &'a str,
    pub(super) containers: Containers<'a>,
}

/// Selection of a pod's containers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Containers<'a> {
    /// The pod's default container, else its first.
    Default,
    /// The container with this name, in all pods that have one.
    Named(&'a str),
    All,
}

impl Choice<'_> {
    /// Returns the containers, those of a pod in start order.
    ///
    /// # Errors
    /// Fails if the pod is missing, its name is ambiguous, or no pod has the container.
    pub(super) fn of(&self, table: &PodTable) -> anyhow::Result<Vec<Source>> {
        let pods = match self.pod {
            Some(name) => vec![table.find(self.namespace, name).map_err(anyhow::Error::msg)?],
            None => table.chosen(self.namespace, self.selector).collect(),
        };
        if pods.is_empty() {
            bail!("no pod matches the selector; `beelet get pods -o json` shows the labels of all pods");
        }
        let sources: Vec<_> = pods.iter().flat_map(|(name, entry)| self.containers(name, entry)).collect();
        if let (Containers::Named(container), true) = (self.containers, sources.is_empty()) {
            bail!("no container {container:?} in these pods; use `--all-containers` for all containers");
        }
        Ok(sources)
    }

    fn containers(&self, name: &PodName, entry: &PodEntry) -> Vec<Source> {
        let mut names = entry.pod.spec.as_ref().map(container_names).unwrap_or_default();
        match self.containers {
            Containers::All => {}
            Containers::Default => names = vec![default_container(&entry.pod)],
            Containers::Named(wanted) => names.retain(|one| *one == wanted),
        }
        let source = |container: &str| Source { pod: name.clone(), container: container.to_owned() };
        names.into_iter().map(source).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn table() -> PodTable {
        let mut table = PodTable::default();
        let mut add = |namespace: &str, name: &str, app: &str, spec: serde_json::Value| {
            let pod = json!({"metadata": {"name": name, "namespace": namespace, "labels": {"app": app}},
                             "spec": spec});
            let entry = PodEntry::of(serde_json::from_value(pod).unwrap());
            table.pods.insert(PodName::of(&entry.pod), entry.into());
        };
        let of = |names: &[&str]| names.iter().map(|name| json!({"name": name})).collect::<Vec<_>>();
        let web = json!({"initContainers": of(&["setup"]), "containers": of(&["main", "side"]),
                         "ephemeralContainers": of(&["look"])});
        add("default", "web-n1", "shop", web);
        add("default", "db-n1", "shop", json!({"containers": of(&["main"])}));
        add("other", "db-n2", "bank", json!({"containers": of(&["main", "side"])}));
        table
    }

    #[test]
    fn a_pod_or_a_selector_and_which_containers_say_whose_logs_are_meant() {
        let table = table();
        let shop: Selector = "app=shop".parse().unwrap();
        let check = |pod: Option<&str>, containers: Containers<'_>, expected: &[&str]| {
            let choice = Choice { pod, selector: &shop, namespace: "", containers };
            let found: Vec<_> = choice.of(&table).unwrap().iter().map(Source::prefix).collect();
            let expected: Vec<_> = expected.iter().map(|name| format!("[pod/{name}] ")).collect();
            assert_eq!(found, expected);
        };
        check(Some("web-n1"), Containers::Default, &["web-n1/main"]);
        check(Some("web-n1"), Containers::Named("side"), &["web-n1/side"]);
        let all = ["web-n1/setup", "web-n1/main", "web-n1/side", "web-n1/look"];
        check(Some("web-n1"), Containers::All, &all);
        check(None, Containers::Default, &["db-n1/main", "web-n1/main"]);
        check(None, Containers::Named("side"), &["web-n1/side"]);
    }

    #[test]
    fn nothing_that_fits_is_an_error() {
        let (table, shop) = (table(), "app=shop".parse().unwrap());
        let choice = Choice { pod: None, selector: &shop, namespace: "other", containers: Containers::All };
        assert!(choice.of(&table).unwrap_err().to_string().starts_with("no pod matches the selector"));
        let choice = Choice { namespace: "default", containers: Containers::Named("x"), ..choice };
        assert!(choice.of(&table).unwrap_err().to_string().contains("no container \"x\""));
        let choice = Choice { pod: Some("none"), ..choice };
        assert!(choice.of(&table).unwrap_err().to_string().contains("pod \"none\" not found"));
    }
}
