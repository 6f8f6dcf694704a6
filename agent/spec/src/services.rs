//! Environment variables of services: one set per service with an address of its own, in the format of Docker
//! links (kubelet: `pkg/kubelet/envvars`, `pkg/kubelet/kubelet_pods.go`, `getServiceEnvVarMap`).

use k8s_openapi::api::core::v1::{Service, ServicePort};

/// Namespace of the API server's own service, whose variables every pod gets.
const MASTER_NAMESPACE: &str = "default";
const MASTER: &str = "kubernetes";

/// Returns the variables for a pod of `namespace`. Without `links` only the API server's service has any.
pub fn variables<'s>(
    services: impl Iterator<Item = &'s Service>,
    namespace: &str,
    links: bool,
) -> impl Iterator<Item = (String, String)> {
    let mut told: Vec<(&str, &str, &Service)> = services
        .filter(|service| address(service).is_some())
        .map(|service| {
            let metadata = &service.metadata;
            let name = metadata.name.as_deref().unwrap_or_default();
            (name, metadata.namespace.as_deref().unwrap_or_default(), service)
        })
        .filter(|(name, of, _)| links && *of == namespace || (*of, *name) == (MASTER_NAMESPACE, MASTER))
        .collect();
    // A service of the pod's own namespace has precedence over the API server's of the same name.
    told.sort_by_key(|(name, of, _)| (*name, *of != namespace));
    told.dedup_by_key(|(name, ..)| *name);
    told.into_iter().flat_map(|(name, _, service)| of_service(name, service))
}

/// Returns the service's own address; headless services have none.
fn address(service: &Service) -> Option<&str> {
    let address = service.spec.as_ref()?.cluster_ip.as_deref()?;
    (!address.is_empty() && address != "None").then_some(address)
}

fn of_service(name: &str, service: &Service) -> Vec<(String, String)> {
    let (Some(address), Some(ports)) =
        (address(service), service.spec.as_ref().and_then(|spec| spec.ports.as_ref()))
    else {
        return Vec::new();
    };
    let Some(first) = ports.first() else { return Vec::new() };
    let name = as_variable(name);
    let mut all = vec![
        (format!("{name}_SERVICE_HOST"), address.to_owned()),
        (format!("{name}_SERVICE_PORT"), first.port.to_string()),
    ];
    for port in ports {
        if let Some(of) = port.name.as_deref().filter(|of| !of.is_empty()) {
            all.push((format!("{name}_SERVICE_PORT_{}", as_variable(of)), port.port.to_string()));
        }
    }
    all.push((format!("{name}_PORT"), url(address, first)));
    for port in ports {
        let of = format!("{name}_PORT_{}_{}", port.port, protocol(port).to_uppercase());
        all.push((of.clone(), url(address, port)));
        all.push((format!("{of}_PROTO"), protocol(port)));
        all.push((format!("{of}_PORT"), port.port.to_string()));
        all.push((format!("{of}_ADDR"), address.to_owned()));
    }
    all
}

fn url(address: &str, port: &ServicePort) -> String {
    let host = if address.contains(':') { format!("[{address}]") } else { address.to_owned() };
    format!("{}://{host}:{}", protocol(port), port.port)
}

fn protocol(port: &ServicePort) -> String {
    port.protocol.as_deref().unwrap_or("TCP").to_lowercase()
}

fn as_variable(name: &str) -> String {
    name.replace('-', "_").to_uppercase()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn service(namespace: &str, name: &str, address: &str, ports: Value) -> Service {
        serde_json::from_value(json!({
            "metadata": {"namespace": namespace, "name": name}, "spec": {"clusterIP": address, "ports": ports},
        }))
        .unwrap()
    }

    fn all() -> Vec<Service> {
        let port = |port: i32| json!([{"port": port}]);
        vec![
            service("default", "kubernetes", "10.0.0.1", json!([{"name": "https", "port": 443}])),
            service(
                "shop",
                "web-ui",
                "10.0.0.2",
                json!([{"name": "a-b", "port": 80}, {"name": "dns", "port": 53, "protocol": "UDP"}]),
            ),
            service("shop", "headless", "None", port(1)),
            service("shop", "external", "", port(2)),
            service("bank", "vault", "10.0.0.3", port(3)),
            service("default", "other", "10.0.0.4", port(4)),
        ]
    }

    fn names(namespace: &str, links: bool) -> Vec<String> {
        let all = all();
        let hosts = variables(all.iter(), namespace, links);
        hosts.filter(|(name, _)| name.ends_with("_SERVICE_HOST")).map(|(_, host)| host).collect()
    }

    #[test]
    fn a_pod_is_told_its_namespaces_services_and_the_master() {
        assert_eq!(names("shop", true), ["10.0.0.1", "10.0.0.2"]);
        assert_eq!(names("shop", false), ["10.0.0.1"]);
        assert_eq!(names("bank", true), ["10.0.0.1", "10.0.0.3"]);
        assert_eq!(names("default", true), ["10.0.0.1", "10.0.0.4"]);
    }

    #[test]
    fn a_service_of_the_masters_name_goes_before_it() {
        let own = service("shop", "kubernetes", "10.0.0.9", json!([{"port": 1}]));
        let services = [all().remove(0), own];
        let hosts = |links| variables(services.iter(), "shop", links).next().unwrap().1;
        assert_eq!((hosts(true), hosts(false)), ("10.0.0.9".to_owned(), "10.0.0.1".to_owned()));
    }

    #[test]
    fn a_service_is_a_set_of_variables() {
        let services = all();
        let told: Vec<_> = variables(services[1..2].iter(), "shop", true).collect();
        let told: Vec<String> = told.into_iter().map(|(name, value)| format!("{name}={value}")).collect();
        assert_eq!(
            told,
            [
                "WEB_UI_SERVICE_HOST=10.0.0.2",
                "WEB_UI_SERVICE_PORT=80",
                "WEB_UI_SERVICE_PORT_A_B=80",
                "WEB_UI_SERVICE_PORT_DNS=53",
                "WEB_UI_PORT=tcp://10.0.0.2:80",
                "WEB_UI_PORT_80_TCP=tcp://10.0.0.2:80",
                "WEB_UI_PORT_80_TCP_PROTO=tcp",
                "WEB_UI_PORT_80_TCP_PORT=80",
                "WEB_UI_PORT_80_TCP_ADDR=10.0.0.2",
                "WEB_UI_PORT_53_UDP=udp://10.0.0.2:53",
                "WEB_UI_PORT_53_UDP_PROTO=udp",
                "WEB_UI_PORT_53_UDP_PORT=53",
                "WEB_UI_PORT_53_UDP_ADDR=10.0.0.2",
            ]
        );
    }
}
