//! Configuration of a private containerd and its network.

use super::Names;
use crate::{guards, images, requires, workdir};
use anyhow::{Context as _, Result, bail};
use beelet_units::cgroup_driver::CgroupDriver;
use serde_json::json;
use std::net::Ipv4Addr;
use std::path::Path;

/// Private address ranges (RFC 1918) for test networks, the first two bytes.
const RANGES: [[u8; 2]; 4] = [[10, 88], [172, 29], [192, 168], [10, 213]];

/// Writes the configuration of containerd and the network into the instance's folder, and creates the bridge.
pub(super) fn write(names: &Names, version: (u32, u32), driver: CgroupDriver) -> Result<()> {
    let systemd = driver == CgroupDriver::Systemd;
    let text = match version {
        (1, 6..) => version_2(names, systemd)?,
        (2, _) => version_3(names, systemd)?,
        (major, minor) => bail!("containerd {major}.{minor} is too old; 1.6 or newer (CRI v1) is required"),
    };
    workdir::write(&names.dir.join("config.toml"), text)?;
    let cdi = names.cdi_dir();
    std::fs::create_dir_all(&cdi).with_context(|| format!("cannot create {}", cdi.display()))?;
    network(names)
}

/// Formats a string as a TOML value. JSON's strings are TOML's basic strings.
fn quoted(path: impl AsRef<Path>) -> String {
    json!(path.as_ref()).to_string()
}

/// Returns the settings shared by both format versions. The disabled plugins need folders of the machine
/// (/opt) or storage that does not exist.
fn head(names: &Names, format: u32, disabled: &[&str]) -> String {
    let dir = &names.dir;
    format!(
        "version = {format}\nroot = {root}\nstate = {state}\ndisabled_plugins = {disabled}\n\
         [grpc]\naddress = {socket}\n",
        root = quoted(dir.join("root")),
        state = quoted(dir.join("state")),
        disabled = json!(disabled),
        socket = quoted(names.socket()),
    )
}

fn version_2(names: &Names, systemd: bool) -> Result<String> {
    let disabled = [
        "io.containerd.internal.v1.opt",
        "io.containerd.internal.v1.restart",
        "io.containerd.snapshotter.v1.aufs",
        "io.containerd.snapshotter.v1.btrfs",
        "io.containerd.snapshotter.v1.devmapper",
        "io.containerd.snapshotter.v1.zfs",
    ];
    let cri = r#"plugins."io.containerd.grpc.v1.cri""#;
    Ok(format!(
        "{head}\
         [{cri}]\nsandbox_image = {pause}\nrestrict_oom_score_adj = true\nnetns_mounts_under_state_dir = true\n\
         disable_tcp_service = true\nstream_server_port = \"0\"\n\
         [{cri}.cni]\nbin_dir = {cni_bin}\nconf_dir = {cni_conf}\n\
         [{cri}.containerd.runtimes.runc]\nruntime_type = \"io.containerd.runc.v2\"\n\
         [{cri}.containerd.runtimes.runc.options]\nSystemdCgroup = {systemd}\nRoot = {runc}\n",
        head = head(names, 2, &disabled),
        pause = json!(images::PAUSE),
        cni_bin = quoted(cni_bin_dir()?),
        cni_conf = quoted(names.dir.join("net.d")),
        runc = quoted(names.dir.join("runc")),
    ))
}

fn version_3(names: &Names, systemd: bool) -> Result<String> {
    let disabled = [
        "io.containerd.internal.v1.opt",
        "io.containerd.monitor.container.v1.restart",
        "io.containerd.snapshotter.v1.blockfile",
        "io.containerd.snapshotter.v1.btrfs",
        "io.containerd.snapshotter.v1.devmapper",
        "io.containerd.snapshotter.v1.erofs",
        "io.containerd.snapshotter.v1.zfs",
    ];
    let runtime = "plugins.'io.containerd.cri.v1.runtime'";
    Ok(format!(
        "{head}\
         [plugins.'io.containerd.cri.v1.images'.pinned_images]\nsandbox = {pause}\n\
         [plugins.'io.containerd.grpc.v1.cri']\ndisable_tcp_service = true\nstream_server_port = \"0\"\n\
         [plugins.'io.containerd.nri.v1.nri']\ndisable = true\n\
         [{runtime}]\nrestrict_oom_score_adj = true\nnetns_mounts_under_state_dir = true\n\
         enable_cdi = true\ncdi_spec_dirs = [{cdi}]\n\
         [{runtime}.cni]\nbin_dirs = [{cni_bin}]\nconf_dir = {cni_conf}\n\
         [{runtime}.containerd.runtimes.runc]\nruntime_type = \"io.containerd.runc.v2\"\n\
         [{runtime}.containerd.runtimes.runc.options]\nSystemdCgroup = {systemd}\nRoot = {runc}\n",
        head = head(names, 3, &disabled),
        pause = json!(images::PAUSE),
        cdi = quoted(names.cdi_dir()),
        cni_bin = quoted(cni_bin_dir()?),
        cni_conf = quoted(names.dir.join("net.d")),
        runc = quoted(names.dir.join("runc")),
    ))
}

fn cni_bin_dir() -> Result<std::path::PathBuf> {
    requires::cni_bin_dir().context("no CNI plugins are installed: `cargo xtask setup --for demo`")
}

/// Creates a bridge with its own address, and a pod network on it. Host and pods reach each other; there are
/// no further routes and no masquerading, so the machine's forwarding stays unchanged.
fn network(names: &Names) -> Result<()> {
    let [first, second, third] = free_subnet(&routes()?, &names.id)?;
    let prefix = format!("{first}.{second}.{third}");
    let bridge = names.bridge();
    guards::ip(&["link", "add", &bridge, "type", "bridge"])?;
    guards::ip(&["addr", "add", &format!("{prefix}.1/22"), "dev", &bridge])?;
    guards::ip(&["link", "set", &bridge, "up"])?;
    let network = json!({
        "cniVersion": "0.4.0",
        "name": names.network(),
        "plugins": [{
            "type": "bridge",
            "bridge": bridge,
            "isGateway": false,
            "ipMasq": false,
            "hairpinMode": true,
            "ipam": {
                "type": "host-local",
                "dataDir": names.dir.join("ipam"),
                "ranges": [[{
                    "subnet": format!("{prefix}.0/22"),
                    "rangeStart": format!("{prefix}.10"),
                    "gateway": format!("{prefix}.1"),
                }]],
            },
        }],
    });
    workdir::write(&names.dir.join("net.d/10-beelet.conflist"), network.to_string())
}

/// Route of the machine: network and mask.
type Route = (Ipv4Addr, Ipv4Addr);

/// Returns the machine's IPv4 routes without the default route.
fn routes() -> Result<Vec<Route>> {
    Ok(parse_routes(&workdir::read(Path::new("/proc/net/route"))?))
}

/// Parses /proc/net/route: the second and eighth column are network and mask, hexadecimal, in memory byte
/// order.
fn parse_routes(text: &str) -> Vec<Route> {
    let address = |column: &str| Some(Ipv4Addr::from(u32::from_str_radix(column, 16).ok()?.to_le_bytes()));
    let all = text.lines().skip(1).filter_map(|line| {
        let columns: Vec<&str> = line.split_whitespace().collect();
        Some((address(columns.get(1)?)?, address(columns.get(7)?)?))
    });
    all.filter(|(_, mask)| !mask.is_unspecified()).collect()
}

/// Returns the first three bytes of a /22 (room for a thousand pods) without overlap with the machine's
/// routes. `id` spreads the choices of instances that start at the same time.
fn free_subnet(routes: &[Route], id: &str) -> Result<[u8; 3]> {
    let start = u8::from_str_radix(id.get(..2).unwrap_or_default(), 16).unwrap_or(0);
    for [first, second] in RANGES {
        for offset in (0..=u8::MAX).step_by(4) {
            let third = start.wrapping_add(offset) & 0xfc;
            let candidate = u32::from(Ipv4Addr::new(first, second, third, 0));
            let touches = |(network, mask): &Route| {
                let narrower = u32::from(*mask) & 0xffff_fc00;
                candidate & narrower == u32::from(*network) & narrower
            };
            if !routes.iter().any(touches) {
                return Ok([first, second, third]);
            }
        }
    }
    bail!(
        "no free /22 found in 10.88/16, 172.29/16, 192.168/16 and 10.213/16: the machine has routes for all of them"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROUTES: &str = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n\
        eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n\
        eth0\t0000580A\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0\n";

    #[test]
    fn the_routing_table_is_read_without_the_default_route() {
        assert_eq!(parse_routes(ROUTES), [(Ipv4Addr::new(10, 88, 0, 0), Ipv4Addr::new(255, 255, 0, 0))]);
    }

    #[test]
    fn a_subnet_is_chosen_that_no_route_touches() {
        let check = |routes: &[(&str, &str)], expected: Option<[u8; 3]>| {
            let parse = |text: &str| text.parse::<Ipv4Addr>().unwrap();
            let routes: Vec<Route> = routes.iter().map(|(net, mask)| (parse(net), parse(mask))).collect();
            assert_eq!(free_subnet(&routes, "05").ok(), expected, "{routes:?}");
        };
        check(&[], Some([10, 88, 4]));
        check(&[("10.88.5.0", "255.255.255.0")], Some([10, 88, 8]));
        check(&[("10.88.7.128", "255.255.255.128")], Some([10, 88, 8]));
        check(&[("10.0.0.0", "255.0.0.0")], Some([172, 29, 4]));
        check(
            &[("10.0.0.0", "254.0.0.0"), ("172.16.0.0", "255.240.0.0"), ("192.168.0.0", "255.255.0.0")],
            None,
        );
    }
}
