use super::*;

/// Returns the configuration of a command line, without a kubeconfig, and the warnings.
fn read_line(line: &[&str]) -> Result<(Config, Vec<String>), String> {
    let arguments = std::iter::once("kubelet").chain(line.iter().copied());
    let matches = command().try_get_matches_from(arguments.map(|word| normalized(word.into())));
    let (config, _, warnings) = read(&matches.map_err(|error| error.to_string())?)?;
    Ok((config, warnings.iter().map(ToString::to_string).collect()))
}

#[test]
fn only_the_kubelets_name_makes_it_one() {
    let called = |name: &str| is_called(Some(OsStr::new(name)));
    assert!(called("kubelet") && called("/usr/bin/kubelet"));
    assert!(!called("beelet") && !called("/opt/kubelet/beelet") && !is_called(None));
}

#[test]
fn a_command_line_of_kubeadm_is_taken() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("config.yaml");
    let text = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\nmaxPods: 10\n\
                rotateCertificates: true\nvolumeStatsAggPeriod: 0s\n";
    std::fs::write(&file, text).unwrap();
    let config = format!("--config={}", file.display());
    let (config, warnings) = read_line(&[
        &config,
        "--container-runtime-endpoint=unix:///run/containerd/containerd.sock",
        "--pod-infra-container-image=registry.k8s.io/pause:3.10",
        "--hostname-override",
        "Node-1",
        "--node_ip=10.0.0.1,fd00::1",
        "--node-labels=pool=blue,node.kubernetes.io/zone=a",
        "--max-pods=20",
        "--max-pods=30",
        "--cloud-provider=external",
        "--register-node",
        "--rotate-certificates=false",
        "-v4",
    ])
    .unwrap();
    assert_eq!(config.node_name, "node-1");
    assert_eq!(config.max_pods, 30);
    assert_eq!((config.node.ips.len(), config.node.labels.len()), (2, 2));
    assert!(config.node.external_cloud && config.node.register && !config.node.rotate_certificates);
    assert_eq!(config.beelet.pods_dir, Path::new("/var/lib/kubelet/pods"));
    assert_eq!(warnings.len(), 1);
    assert!(warnings[0].starts_with("--pod-infra-container-image: has no effect: "), "{}", warnings[0]);
}

#[test]
fn what_a_flag_says_again_is_added_and_a_map_takes_the_place_of_the_files() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("config.yaml");
    let text = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n\
                systemReserved: {memory: 1Gi}\nclusterDNS: [10.0.0.9]\n";
    std::fs::write(&file, text).unwrap();
    let config = format!("--config={}", file.display());
    let (config, _) = read_line(&[
        &config,
        "--node-labels=a=1",
        "--node-labels=b=2,c",
        "--system-reserved=cpu=1",
        "--system-reserved=pid=100",
        "--cluster-dns=10.0.0.1",
        "--cluster-dns=10.0.0.2",
    ])
    .unwrap();
    let labels: Vec<_> = config.node.labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
    assert_eq!(labels, ["a=1", "b=2", "c="]);
    assert_eq!(config.system_reserved.keys().collect::<Vec<_>>(), ["cpu", "pid"]);
    assert_eq!(config.cluster_dns.len(), 2);
}

#[test]
fn the_roots_folders_follow_the_root() {
    let (config, _) = read_line(&["--root-dir=/data/kubelet", "--fail-swap-on=false"]).unwrap();
    assert_eq!(config.beelet.pods_dir, Path::new("/data/kubelet/pods"));
    assert_eq!(config.beelet.kubelet_dir, Path::new("/data/kubelet"));
    let (_, warnings) = read_line(&["--kube-api-qps=9"]).unwrap();
    assert!(warnings[0].starts_with("--kube-api-qps: kubeAPIQPS: has no effect: "), "{}", warnings[0]);
}

#[test]
fn what_the_kubelet_refuses_is_refused() {
    let error = |line: &[&str]| read_line(line).unwrap_err();
    assert!(error(&["--max-pods=x"]).contains("invalid argument \"x\" for \"--max-pods\" flag"));
    assert!(error(&["--node-labels=kubernetes.io/mine=1"]).contains("unknown 'kubernetes.io'"));
    assert!(error(&["--node-ip=10.0.0.1,10.0.0.2"]).contains("one IPv4 and one IPv6"));
    assert!(error(&["--cloud-provider=aws"]).contains("external"));
    assert!(error(&["--nonsense"]).contains("--nonsense"));
}
