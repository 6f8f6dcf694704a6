//! A container's environment: literals, `$(VAR)` references, the downward API, ConfigMaps, Secrets and
//! services.

use std::borrow::Cow;
use std::collections::BTreeMap;

use beelet_policy::pod::variables::{Budget, TooLong, expand};
use beelet_units::{object_name::impossible, shorten::quoted};
use k8s_openapi::api::core::v1 as core;

use super::{Error, downward, services};
use beelet_model::{
    objects::{Objects, Services},
    origin::Origin,
    pod::NodeFacts,
};

/// Variables in the order of their definition; a later definition of the same name wins in place.
#[derive(Clone)]
pub struct Environment {
    order: Vec<String>,
    /// Values as bytes: a Secret's value need not be text.
    values: BTreeMap<String, Vec<u8>>,
    /// Remaining budget for the container's texts. All values ever set count, including replaced ones.
    budget: Budget,
}

impl Default for Environment {
    fn default() -> Self {
        Self { order: Vec::new(), values: BTreeMap::new(), budget: Budget::CONTAINER }
    }
}

impl std::fmt::Debug for Environment {
    /// Shows names only: some values are secret.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Environment").field(&self.order).finish()
    }
}

impl Environment {
    /// Returns a variable as text, for `$(VAR)`: invalid UTF-8 is replaced (U+FFFD).
    pub fn get(&self, name: &str) -> Option<Cow<'_, str>> {
        self.values.get(name).map(|value| String::from_utf8_lossy(value))
    }

    /// Replaces the references in a container's command or its arguments.
    pub(super) fn expand_words(
        &mut self,
        (container, field): (&str, &'static str),
        words: Option<&Vec<String>>,
    ) -> Result<Vec<String>, Error> {
        let (known, mut budget) = (&*self, self.budget);
        let words = words.into_iter().flatten().enumerate().map(|(index, word)| {
            let container = || container.to_owned();
            expand(word, |name| known.get(name), &mut budget).map_err(|cause| Error::Word {
                field,
                index,
                container: container(),
                cause,
            })
        });
        let words = words.collect::<Result<_, _>>()?;
        self.budget = budget;
        Ok(words)
    }

    /// Returns all variables, in order.
    pub(super) fn into_pairs(mut self) -> impl Iterator<Item = (String, Vec<u8>)> {
        self.order.into_iter().filter_map(move |name| self.values.remove(&name).map(|value| (name, value)))
    }

    /// Sets a variable to a text that may refer to those before it, and to `others`.
    fn set_text(&mut self, name: &str, text: &str, others: &BTreeMap<String, String>) -> Result<(), TooLong> {
        let (known, mut budget) = (&*self, self.budget);
        let other = |name: &str| others.get(name).map(|value| Cow::Borrowed(value.as_str()));
        let value = expand(text, |name| known.get(name).or_else(|| other(name)), &mut budget)?;
        // The budget counts it again below, with the name.
        self.set(name, value.into_bytes())
    }

    fn set(&mut self, name: &str, value: Vec<u8>) -> Result<(), TooLong> {
        self.budget.spend(name.len().saturating_add(value.len()))?;
        if self.values.insert(name.to_owned(), value).is_none() {
            self.order.push(name.to_owned());
        }
        Ok(())
    }
}

/// Sources of a container's environment, in addition to its own spec.
#[derive(Clone, Copy)]
pub struct Sources<'a> {
    /// The container's pod.
    pub pod: &'a core::Pod,
    /// The pod's addresses.
    pub pod_ips: &'a [String],
    /// ConfigMaps and Secrets.
    pub objects: &'a Objects,
    /// The node.
    pub node: &'a NodeFacts,
}

impl Sources<'_> {
    /// Builds the environment of a container: first `envFrom`, then its own variables, each of which may
    /// refer to earlier ones and to those of services, which come last and replace none.
    ///
    /// # Errors
    /// Fails if a variable's source is missing, or the variables are too long.
    pub fn environment(&self, container: &core::Container) -> Result<Environment, Error> {
        let mut env = Environment::default();
        for source in container.env_from.iter().flatten() {
            self.add_all_keys(source, &mut env)
                .map_err(|cause| Error::EnvFrom { container: container.name.clone(), cause: cause.into() })?;
        }
        let too_many = |cause| Error::Services { container: container.name.clone(), cause };
        let services = self.services().map_err(too_many)?;
        for variable in container.env.iter().flatten() {
            self.set(container, variable, &services, &mut env).map_err(|cause| Error::Variable {
                variable: shown(&variable.name),
                container: container.name.clone(),
                cause: cause.into(),
            })?;
        }
        for (name, value) in services {
            if !env.values.contains_key(&name) {
                env.set(&name, value.into_bytes()).map_err(too_many)?;
            }
        }
        Ok(env)
    }

    fn set(
        &self,
        container: &core::Container,
        variable: &core::EnvVar,
        services: &BTreeMap<String, String>,
        env: &mut Environment,
    ) -> Result<(), Error> {
        let value = match (&variable.value, &variable.value_from) {
            (_, Some(source)) => self.value(container, source)?,
            (Some(text), None) => return Ok(env.set_text(&variable.name, text, services)?),
            (None, None) => Some(Vec::new()),
        };
        Ok(value.map_or(Ok(()), |value| env.set(&variable.name, value))?)
    }

    /// Returns the variables of the pod's services, within a container's budget.
    fn services(&self) -> Result<BTreeMap<String, String>, TooLong> {
        let links = self.pod.spec.as_ref().and_then(|spec| spec.enable_service_links);
        let mut budget = Budget::CONTAINER;
        let all = services::variables(
            self.objects.services.iter().flat_map(Services::iter),
            self.namespace(),
            links != Some(false),
        );
        all.map(|(name, value)| {
            budget.spend(name.len().saturating_add(value.len()))?;
            Ok((name, value))
        })
        .collect()
    }

    fn namespace(&self) -> &str {
        self.pod.metadata.namespace.as_deref().unwrap_or("default")
    }

    /// Returns the variable's value; None for a missing optional key or object, which leaves it unset.
    fn value(
        &self,
        container: &core::Container,
        source: &core::EnvVarSource,
    ) -> Result<Option<Vec<u8>>, Error> {
        let told = |value: String| Some(value.into_bytes());
        if let Some(field) = &source.field_ref {
            return downward::field(self.pod, &field.field_path, self.pod_ips, self.node).map(told);
        }
        if let Some(selector) = &source.resource_field_ref {
            return downward::resource(self.pod, Some(container), selector, self.node).map(told);
        }
        if let Some(selector) = &source.config_map_key_ref {
            let map = self.objects.config_map(self.namespace(), &selector.name);
            let found = map.map(|map| {
                let text = map.data.as_ref().and_then(|data| data.get(&selector.key));
                text.map(|text| text.clone().into_bytes())
            });
            return self.keyed("ConfigMap", &selector.name, &selector.key, selector.optional, found);
        }
        if let Some(selector) = &source.secret_key_ref {
            let secret = self.objects.secret(self.namespace(), &selector.name);
            let found = secret.map(|secret| {
                let bytes = secret.data.as_ref().and_then(|data| data.get(&selector.key));
                bytes.map(|bytes| bytes.0.clone())
            });
            return self.keyed("Secret", &selector.name, &selector.key, selector.optional, found);
        }
        Err(Error::UnknownSource)
    }

    fn keyed(
        &self,
        kind: &'static str,
        name: &str,
        key: &str,
        optional: Option<bool>,
        found: Option<Option<Vec<u8>>>,
    ) -> Result<Option<Vec<u8>>, Error> {
        match found {
            Some(Some(value)) => Ok(Some(value)),
            _ if optional == Some(true) => Ok(None),
            Some(None) => Err(Error::NoKey { kind, name: name.to_owned(), key: key.to_owned() }),
            None => Err(Error::NoObject(missing(self.pod, kind, name))),
        }
    }

    /// Adds all keys of an object as variables. Skips keys that are invalid names, as in the kubelet.
    fn add_all_keys(&self, source: &core::EnvFromSource, env: &mut Environment) -> Result<(), Error> {
        let prefix = source.prefix.as_deref().unwrap_or_default();
        let mut set = |key: &str, value: Vec<u8>| -> Result<(), TooLong> {
            let name = format!("{prefix}{key}");
            if is_variable_name(&name) {
                return env.set(&name, value);
            }
            tracing::warn!(variable = shown(&name), "skipping a key that is not a valid variable name");
            Ok(())
        };
        if let Some(reference) = &source.config_map_ref {
            match self.objects.config_map(self.namespace(), &reference.name) {
                Some(map) => {
                    for (key, value) in map.data.iter().flatten() {
                        set(key, value.clone().into_bytes())?;
                    }
                }
                None if reference.optional == Some(true) => {}
                None => return Err(Error::NoObject(missing(self.pod, "ConfigMap", &reference.name))),
            }
        }
        if let Some(reference) = &source.secret_ref {
            match self.objects.secret(self.namespace(), &reference.name) {
                Some(secret) => {
                    for (key, bytes) in secret.data.iter().flatten() {
                        set(key, bytes.0.clone())?;
                    }
                }
                None if reference.optional == Some(true) => {}
                None => return Err(Error::NoObject(missing(self.pod, "Secret", &reference.name))),
            }
        }
        Ok(())
    }
}

/// Returns the message for a missing object of a pod: in a cluster the kubelet's, with the reason if the name
/// is impossible.
pub fn missing(pod: &core::Pod, kind: &str, name: &str) -> String {
    if Origin::of(pod).is_api() {
        let (kind, name, why) = (kind.to_lowercase(), quoted(name), impossible(name));
        return match why {
            None => format!("{kind} {name} not found"),
            Some(why) => format!("{kind} {name} not found: {why}"),
        };
    }
    let namespace = pod.metadata.namespace.as_deref().unwrap_or("default");
    format!("{kind} {namespace}/{name} not found; put its manifest next to the pod's")
}

/// Shortens a variable's name for a sentence, since the API does not limit its length.
fn shown(name: &str) -> String {
    const MOST: usize = 256;
    name.char_indices().nth(MOST).map_or_else(|| name.to_owned(), |(end, _)| format!("{}…", &name[..end]))
}

/// Returns true for printable ASCII without '=', as in the API.
fn is_variable_name(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|b| (0x20..0x7f).contains(&b) && b != b'=')
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use serde_json::json;

    use super::*;
    use beelet_model::objects::Object;

    fn objects() -> Objects {
        let mut objects = Objects::default();
        let map =
            json!({"metadata": {"name": "m", "namespace": "shop"}, "data": {"color": "red", "a=b": "x"}});
        let secret = json!({"metadata": {"name": "s", "namespace": "shop"}, "data": {"word": "c2VzYW1l", "raw": "/w=="}});
        let map = Object::ConfigMap(Arc::new(serde_json::from_value(map).unwrap()));
        let secret = Object::Secret(Arc::new(serde_json::from_value(secret).unwrap()));
        objects.add(Path::new("/m/m"), &map);
        objects.add(Path::new("/m/s"), &secret);
        objects
    }

    fn check_container(container: serde_json::Value, expect: Result<&[(&str, &str)], &str>) {
        let container: core::Container = serde_json::from_value(container).unwrap();
        let pod: core::Pod = serde_json::from_value(json!({
            "metadata": {"name": "web", "namespace": "shop", "uid": "u1", "labels": {"app": "w"}}
        }))
        .unwrap();
        let (objects, node) = (objects(), crate::fixtures::node());
        let ips = ["10.0.0.7".to_owned()];
        let sources = Sources { pod: &pod, pod_ips: &ips, objects: &objects, node: &node };
        let pairs = sources.environment(&container).map(|e| e.into_pairs().collect::<Vec<_>>());
        let expect = expect.map(|list| {
            list.iter().map(|(k, v)| ((*k).to_owned(), v.as_bytes().to_vec())).collect::<Vec<_>>()
        });
        assert_eq!(pairs.map_err(|error| error.to_string()), expect.map_err(str::to_owned));
    }

    fn check(env: &str, expect: Result<&[(&str, &str)], &str>) {
        let env: serde_json::Value = serde_json::from_str(env).unwrap();
        check_container(json!({"name": "c", "env": env}), expect);
    }

    #[test]
    fn a_variable_refers_to_those_before_it_only() {
        check(
            r#"[{"name":"A","value":"1"},{"name":"B","value":"$(A)$(C)"},{"name":"C","value":"$$(A)"}]"#,
            Ok(&[("A", "1"), ("B", "1$(C)"), ("C", "$(A)")]),
        );
    }

    #[test]
    fn a_later_definition_wins_in_the_place_of_the_first() {
        check(
            r#"[{"name":"A","value":"1"},{"name":"B","value":"2"},{"name":"A","value":"3"}]"#,
            Ok(&[("A", "3"), ("B", "2")]),
        );
    }

    #[test]
    fn fields_of_the_pod() {
        let field =
            |path: &str| format!(r#"[{{"name":"F","valueFrom":{{"fieldRef":{{"fieldPath":"{path}"}}}}}}]"#);
        check(&field("metadata.name"), Ok(&[("F", "web")]));
        check(&field("metadata.labels['app']"), Ok(&[("F", "w")]));
        check(&field("metadata.labels['none']"), Ok(&[("F", "")]));
        check(&field("status.podIP"), Ok(&[("F", "10.0.0.7")]));
        check(&field("status.hostIP"), Ok(&[("F", "192.0.2.1")]));
        check(&field("status.hostIPs"), Ok(&[("F", "192.0.2.1")]));
        check(
            &field("metadata.color"),
            Err("environment variable F of container c: fieldPath \"metadata.color\" is not known"),
        );
    }

    #[test]
    fn keys_of_config_maps_and_secrets() {
        let of = |kind: &str, name: &str, key: &str, optional: bool| json!({"name": "c", "env": [{"name": "F", "valueFrom": {kind: {"name": name, "key": key, "optional": optional}}}]});
        check_container(of("configMapKeyRef", "m", "color", false), Ok(&[("F", "red")]));
        check_container(of("secretKeyRef", "s", "word", false), Ok(&[("F", "sesame")]));
        check_container(of("secretKeyRef", "s", "none", true), Ok(&[]));
        check_container(of("configMapKeyRef", "none", "x", true), Ok(&[]));
        let wrong = |what: &str| format!("environment variable F of container c: {what}");
        check_container(
            of("configMapKeyRef", "m", "none", false),
            Err(&wrong("the ConfigMap m has no key none")),
        );
        check_container(
            of("secretKeyRef", "none", "x", false),
            Err(&wrong("Secret shop/none not found; put its manifest next to the pod's")),
        );
    }

    #[test]
    fn a_value_that_is_no_text_reaches_the_container_as_it_is_and_is_text_only_where_it_is_expanded() {
        let container: core::Container = serde_json::from_value(json!({"name": "c",
            "envFrom": [{"secretRef": {"name": "s"}, "prefix": "ALL_"}],
            "env": [{"name": "RAW", "valueFrom": {"secretKeyRef": {"name": "s", "key": "raw"}}},
                {"name": "SAID", "value": "<$(RAW)>"}]}))
        .unwrap();
        let pod: core::Pod =
            serde_json::from_value(json!({"metadata": {"name": "web", "namespace": "shop"}})).unwrap();
        let (objects, node) = (objects(), crate::fixtures::node());
        let sources = Sources { pod: &pod, pod_ips: &[], objects: &objects, node: &node };
        let all: BTreeMap<_, _> = sources.environment(&container).unwrap().into_pairs().collect();
        assert_eq!(all["RAW"], [0xff]);
        assert_eq!(all["ALL_raw"], [0xff]);
        assert_eq!(all["SAID"], "<\u{fffd}>".as_bytes());
    }

    #[test]
    fn whole_objects_become_variables_that_own_ones_override_and_refer_to() {
        check_container(
            json!({"name": "c",
                "envFrom": [{"configMapRef": {"name": "m"}, "prefix": "M_"}, {"configMapRef": {"name": "m"}}, {"secretRef": {"name": "none", "optional": true}}],
                "env": [{"name": "color", "value": "not $(M_color)"}]}),
            Ok(&[("M_color", "red"), ("color", "not red")]),
        );
        check_container(
            json!({"name": "c", "envFrom": [{"secretRef": {"name": "none"}}]}),
            Err("envFrom of container c: Secret shop/none not found; put its manifest next to the pod's"),
        );
    }

    /// Checks that error messages name the part that is too long.
    #[test]
    fn an_environment_that_grows_ends_at_its_budget_with_the_variables_name() {
        let check = |container: serde_json::Value, expected: &str| {
            let mut container: core::Container = serde_json::from_value(container).unwrap();
            container.name = "c".to_owned();
            let pod = json!({"metadata": {"name": "web", "namespace": "shop", "annotations": {"a": "x".repeat(200 << 10)}}});
            let pod: core::Pod = serde_json::from_value(pod).unwrap();
            let map =
                json!({"metadata": {"name": "big", "namespace": "shop"}, "data": {"k": "x".repeat(1 << 20)}});
            let (mut objects, node) = (objects(), crate::fixtures::node());
            let map = Object::ConfigMap(Arc::new(serde_json::from_value(map).unwrap()));
            objects.add(Path::new("/m/big"), &map);
            let ports: Vec<_> = (1..=60_000).map(|port| json!({"port": port})).collect();
            let service = json!({"metadata": {"name": "s".repeat(60), "namespace": "shop"}, "spec": {"clusterIP": "10.0.0.9", "ports": ports}});
            objects.services = Some(Services::new(vec![serde_json::from_value(service).unwrap()]));
            let pod = if container.env.is_some() || container.env_from.is_some() {
                let spec = core::PodSpec { enable_service_links: Some(false), ..Default::default() };
                core::Pod { spec: Some(spec), ..pod }
            } else {
                pod
            };
            let sources = Sources { pod: &pod, pod_ips: &[], objects: &objects, node: &node };
            let failed = sources.environment(&container).map(|_| ()).unwrap_err().to_string();
            assert_eq!(failed, expected);
        };
        let alone = "is longer than 1048576 bytes once its references are replaced";
        let together = "makes the total longer than 16777216 bytes";
        let mut doubling = vec![json!({"name": "V0", "value": "0123456789abcdef"})];
        let next = |n: usize| json!({"name": format!("V{n}"), "value": format!("$(V{0})$(V{0})", n - 1)});
        doubling.extend((1..=33).map(next));
        check(
            json!({"name": "c", "env": doubling}),
            &format!("environment variable V17 of container c: its value {alone}"),
        );
        let of_map = |n: usize| json!({"name": format!("V{n}"), "valueFrom": {"configMapKeyRef": {"name": "big", "key": "k"}}});
        check(
            json!({"name": "c", "env": (0..12_000).map(of_map).collect::<Vec<_>>()}),
            &format!("environment variable V15 of container c: its value {together}"),
        );
        let field = |n: usize| json!({"name": format!("V{n}"), "valueFrom": {"fieldRef": {"fieldPath": "metadata.annotations"}}});
        check(
            json!({"name": "c", "env": (0..12_000).map(field).collect::<Vec<_>>()}),
            &format!("environment variable V81 of container c: its value {together}"),
        );
        let whole = |n: usize| json!({"prefix": format!("P{n}_"), "configMapRef": {"name": "big"}});
        check(
            json!({"name": "c", "envFrom": (0..12_000).map(whole).collect::<Vec<_>>()}),
            &format!("envFrom of container c: its value {together}"),
        );
        let prefix = json!({"prefix": "P".repeat(9 << 20), "configMapRef": {"name": "m"}});
        let other = json!({"prefix": "Q".repeat(9 << 20), "configMapRef": {"name": "m"}});
        check(
            json!({"name": "c", "envFrom": [prefix, other]}),
            &format!("envFrom of container c: its value {together}"),
        );
        check(
            json!({"name": "c"}),
            &format!(
                "the variables of services of container c: the last one {together}; set enableServiceLinks: false"
            ),
        );
    }

    #[test]
    fn variables_of_services_come_last_can_be_referred_to_and_replace_none() {
        let service = json!({"metadata": {"name": "db", "namespace": "shop"},
            "spec": {"clusterIP": "10.0.0.9", "ports": [{"port": 5432}]}});
        let mut objects = Objects::default();
        objects.services = Some(Services::new(vec![serde_json::from_value(service).unwrap()]));
        let check = |spec: serde_json::Value, expected: &[(&str, Option<&str>)]| {
            let pod: core::Pod = serde_json::from_value(
                json!({"metadata": {"name": "web", "namespace": "shop"}, "spec": spec}),
            )
            .unwrap();
            let node = crate::fixtures::node();
            let sources = Sources { pod: &pod, pod_ips: &[], objects: &objects, node: &node };
            let env = sources.environment(&pod.spec.as_ref().unwrap().containers[0]).unwrap();
            for (name, value) in expected {
                assert_eq!(env.get(name).as_deref(), *value, "{name}");
            }
        };
        let containers = json!([{"name": "c", "env": [
            {"name": "URL", "value": "pg://$(DB_SERVICE_HOST)"}, {"name": "DB_SERVICE_PORT", "value": "1"}]}]);
        check(
            json!({"containers": containers}),
            &[
                ("URL", Some("pg://10.0.0.9")),
                ("DB_SERVICE_PORT", Some("1")),
                ("DB_PORT", Some("tcp://10.0.0.9:5432")),
            ],
        );
        check(
            json!({"containers": containers, "enableServiceLinks": false}),
            &[("URL", Some("pg://$(DB_SERVICE_HOST)")), ("DB_PORT", None)],
        );
    }
}
