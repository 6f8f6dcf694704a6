//! `beelet devices`: the devices of this node and their holders.

use std::process::ExitCode;

use beelet_proto::beelet as proto;
use clap::Args;
use serde_json::{Value, json};

use super::args::{Output, ShownArgs};
use super::get::columns::Columns;
use super::print::print;
use super::{finish, plain};
use beelet_client::Client;

const TITLES: &[&str] = &["RESOURCE", "DEVICE", "HEALTH", "NUMA", "POD", "CONTAINER"];

/// Arguments of `beelet devices`.
#[derive(Debug, Args)]
pub struct DevicesArgs {
    /// Show only these resources.
    #[arg(value_name = "RESOURCE")]
    resources: Vec<String>,
    #[command(flatten)]
    shown: ShownArgs,
}

/// Prints the devices.
#[must_use]
pub fn run(args: &DevicesArgs) -> ExitCode {
    finish(devices(args))
}

async fn devices(args: &DevicesArgs) -> anyhow::Result<()> {
    let mut listed = Client::connect(&args.shown.agent.socket).await?.devices.list().await?;
    if let Some(missing) =
        args.resources.iter().find(|name| listed.resources.iter().all(|r| r.name != **name))
    {
        anyhow::bail!("no device plugin has registered {missing:?}; `beelet devices` lists all resources");
    }
    listed.resources.retain(|resource| args.resources.is_empty() || args.resources.contains(&resource.name));
    match args.shown.output {
        Output::Json => Ok(print(&format!("{}\n", serde_json::to_string_pretty(&to_json(&listed))?))?),
        Output::Table => {
            print(&table(&listed.resources))?;
            remarks(&listed);
            Ok(())
        }
    }
}

fn table(resources: &[proto::DeviceResource]) -> String {
    let mut rows = Vec::new();
    for resource in resources {
        for device in &resource.devices {
            let nodes: Vec<String> = device.numa_nodes.iter().map(i64::to_string).collect();
            let nodes = if nodes.is_empty() { "<none>".to_owned() } else { nodes.join(",") };
            let row = |pod: String, container: String| {
                vec![
                    resource.name.clone(),
                    device.id.clone(),
                    health(resource, device).to_owned(),
                    nodes.clone(),
                    pod,
                    container,
                ]
            };
            if device.holders.is_empty() {
                rows.push(row("<none>".to_owned(), "<none>".to_owned()));
            }
            rows.extend(device.holders.iter().map(|holder| row(pod_of(holder), holder.container.clone())));
        }
    }
    Columns::new(TITLES).table(&rows)
}

/// Returns the pod of a holder, or its UID if the pod is not in the table.
fn pod_of(holder: &proto::Holder) -> String {
    if holder.pod.is_empty() {
        holder.pod_uid.clone()
    } else {
        format!("{}/{}", holder.namespace, holder.pod)
    }
}

fn health(resource: &proto::DeviceResource, device: &proto::Device) -> &'static str {
    match (resource.connected, device.healthy) {
        (false, _) => "Unknown",
        (true, true) => "Healthy",
        (true, false) if device.unlisted => "Unlisted",
        (true, false) => "Unhealthy",
    }
}

/// Prints problems to standard error, so that standard output has only devices.
fn remarks(listed: &proto::ListDevicesResponse) {
    if listed.resources.iter().all(|resource| resource.devices.is_empty()) {
        eprintln!("No devices found.");
    }
    for resource in listed.resources.iter().filter(|resource| !resource.connected) {
        match resource.gone_seconds {
            Some(seconds) => eprintln!("{}: device plugin disconnected {seconds} s ago", resource.name),
            None => eprintln!("{}: device plugin has not listed its devices yet", resource.name),
        }
    }
    for pod in &listed.waiting {
        let message = plain::line(&pod.message);
        eprintln!("pod {}/{} waiting for {} s: {message}", pod.namespace, pod.pod, pod.seconds);
    }
    if !listed.trouble.is_empty() {
        eprintln!("device plugins cannot register: {}", listed.trouble);
    }
}

fn to_json(listed: &proto::ListDevicesResponse) -> Value {
    let device = |resource: &proto::DeviceResource, device: &proto::Device| {
        let holders: Vec<Value> = device
            .holders
            .iter()
            .map(|h| json!({ "podUID": h.pod_uid, "namespace": h.namespace, "pod": h.pod, "container": h.container }))
            .collect();
        json!({
            "id": device.id, "health": health(resource, device), "numaNodes": device.numa_nodes, "holders": holders,
        })
    };
    let resources: Vec<Value> = listed
        .resources
        .iter()
        .map(|resource| {
            let devices: Vec<Value> = resource.devices.iter().map(|one| device(resource, one)).collect();
            json!({
                "name": resource.name, "connected": resource.connected, "socket": resource.socket,
                "goneSeconds": resource.gone_seconds, "devices": devices,
            })
        })
        .collect();
    let waiting: Vec<Value> = listed
        .waiting
        .iter()
        .map(
            |w| json!({ "namespace": w.namespace, "pod": w.pod, "message": w.message, "seconds": w.seconds }),
        )
        .collect();
    json!({ "resources": resources, "waiting": waiting, "trouble": listed.trouble })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resource() -> proto::DeviceResource {
        let holder = |uid: &str, pod: &str| proto::Holder {
            pod_uid: uid.to_owned(),
            namespace: "default".to_owned(),
            pod: pod.to_owned(),
            container: "main".to_owned(),
        };
        let device = |id: &str, healthy, holders| proto::Device {
            id: id.to_owned(),
            healthy,
            numa_nodes: vec![1],
            holders,
            unlisted: false,
        };
        proto::DeviceResource {
            name: "example.com/gpu".to_owned(),
            connected: true,
            socket: "/s".to_owned(),
            devices: vec![
                device("a", true, vec![holder("u1", "train")]),
                device("b", false, vec![holder("u2", "")]),
                device("c", true, Vec::new()),
            ],
            gone_seconds: None,
        }
    }

    #[test]
    fn a_device_is_a_line_with_its_holder() {
        let lines: Vec<String> = table(&[resource()])
            .lines()
            .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
            .collect();
        let expected = [
            "RESOURCE DEVICE HEALTH NUMA POD CONTAINER",
            "example.com/gpu a Healthy 1 default/train main",
            "example.com/gpu b Unhealthy 1 u2 main",
            "example.com/gpu c Healthy 1 <none> <none>",
        ];
        assert_eq!(lines, expected);
    }

    #[test]
    fn without_its_plugin_a_devices_health_is_unknown() {
        let away = proto::DeviceResource { connected: false, gone_seconds: Some(3), ..resource() };
        let value = to_json(&proto::ListDevicesResponse { resources: vec![away], ..Default::default() });
        assert_eq!(value["resources"][0]["devices"][0]["health"], "Unknown");
        assert_eq!(value["resources"][0]["goneSeconds"], 3);
        assert_eq!(value["resources"][0]["devices"][0]["holders"][0]["pod"], "train");
    }
}
