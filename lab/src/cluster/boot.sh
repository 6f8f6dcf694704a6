# The first steps of a machine, inside its own namespaces. NAME, ADDRESS, CONTROLS, DIR and SWITCH come from machine.rs.
set -e
mount --make-rshared /
# A sysfs of the own network, with the machine's control groups and a bpffs of its own.
mount -t sysfs sysfs "$DIR/sys"
for part in fs/cgroup kernel/debug kernel/tracing; do
    if mountpoint -q "/sys/$part"; then mount --rbind "/sys/$part" "$DIR/sys/$part"; fi
done
mount -t bpf bpf "$DIR/sys/fs/bpf"
mount --rbind "$DIR/sys" /sys
mount -t tmpfs tmpfs /run
mkdir -p /run/containerd /run/netns /run/lock /run/units
# Own folders in the place of the host's; the overlays keep new folders off the host's disk.
for part in etc usr/libexec var/lib opt; do
    mkdir -p "$DIR/$part.upper" "$DIR/$part.work"
    mount -t overlay overlay -o "lowerdir=/$part,upperdir=$DIR/$part.upper,workdir=$DIR/$part.work" "/$part"
done
for part in etc/kubernetes etc/cni var/lib/kubelet var/lib/beelet var/lib/etcd var/lib/containerd var/lib/cni var/log opt/cni; do
    mkdir -p "$DIR/$part" "/$part"
    mount --bind "$DIR/$part" "/$part"
done
mount --make-shared /var/lib/kubelet
mkdir -p /etc/cni/net.d
hostname "$NAME"
echo "$NAME" > /etc/hostname
printf '127.0.0.1 localhost\n%s %s\n' "$ADDRESS" "$NAME" > /etc/hosts
# The stable name of the API servers, with all their addresses: clients try one after the other.
for control in $CONTROLS; do echo "$control control-plane"; done >> /etc/hosts
echo 'nameserver 10.88.0.254' > /etc/resolv.conf
rm -f /etc/machine-id
printf '%s' "$NAME" | md5sum | cut -c1-32 > /etc/machine-id
ip link set lo up
ip link add eth0 type veth peer name "v$NAME" netns "$SWITCH"
ip addr add "$ADDRESS/24" dev eth0
ip link set eth0 up
nsenter -t "$SWITCH" -n ip link set "v$NAME" master br0 up
ip route add default via 10.88.0.254
sysctl -qw net.ipv4.ip_forward=1 net.ipv4.conf.all.rp_filter=0
sysctl -qw net.bridge.bridge-nf-call-iptables=1 || true
