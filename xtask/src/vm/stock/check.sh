#!/bin/sh
# Runs in a stock machine, from a unit: an agent with the systemd driver, and what must hold of it.
# Prints `ok NAME`, `FAIL NAME: why` and, for people, `# …`. The last line is `done`.
export LC_ALL=C PATH=/usr/sbin:/usr/bin:/sbin:/bin
cd /check || exit 1
top=/sys/fs/cgroup
kube=$top/kubepods.slice
burstable=$kube/kubepods-burstable.slice
besteffort=$kube/kubepods-besteffort.slice
manifests=/etc/beelet/manifests

ok() { echo "ok $1"; }
fail() { echo "FAIL $1: $2"; }
same() { if [ "$2" = "$3" ]; then ok "$1"; else fail "$1" "expected \"$2\", found \"$3\""; fi; }
# Waits until the command says so. Emulated machines are slow.
until_true() {
    what=$1; shift; tries=0
    until "$@" >/dev/null 2>&1; do
        tries=$((tries + 1))
        if [ $tries -ge 240 ]; then fail "$what" "it did not come within 120 s"; return 1; fi
        sleep 0.5
    done
    ok "$what"
}
holds() { [ "$(cat "$1" 2>/dev/null)" = "$2" ]; }
pod_of() { ls -d "$1"/*-pod*.slice 2>/dev/null | head -n 1; }
has_pod() { [ -n "$(pod_of "$1")" ] && ls -d "$(pod_of "$1")"/*.scope | [ "$(wc -l)" -ge 2 ]; }
# The unit's property, as systemd has it.
property() { systemctl show --value -p "$2" "$1"; }
# All that is set anywhere below the pods' slice.
values() {
    find $kube -name 'c*' -o -name 'm*' -o -name 'p*' | sort | while read -r file; do
        case ${file##*/} in
        cpu.weight | cpu.max | cpu.max.burst | cpu.idle | memory.min | memory.low | memory.high | memory.max | memory.swap.max | \
            memory.oom.group | pids.max | cpuset.cpus | cpuset.mems | cgroup.subtree_control)
            echo "${file#"$top"/} $(cat "$file")" ;;
        esac
    done
}
manifest() { # NAME RESOURCES
    cat >$manifests/.new <<POD
apiVersion: v1
kind: Pod
metadata: {name: $1}
spec:
  hostNetwork: true
  terminationGracePeriodSeconds: 1
  containers:
  - name: main
    image: localhost/beelet/app:1
    imagePullPolicy: Never
    command: [sleep, "100000"]
    resources: $2
POD
    mv $manifests/.new $manifests/"$1".yaml
}
agent() { property beelet.service MainPID; }
containers() { ctr -n k8s.io tasks ls -q | sort | tr '\n' ' '; }

echo "# $(uname -r), $(systemctl --version | head -n 1), $(containerd --version)"
until_true "containerd is up" ctr version
for image in images/*.tar; do ctr -n k8s.io images import "$image" >/dev/null || fail "image" "$image"; done
ip link add pods0 type dummy && ip addr add 192.0.2.10/24 dev pods0 && ip link set pods0 up && ip route add default dev pods0

# What a daemon-reload takes back: values in files alone, and values that are properties.
busctl call org.freedesktop.systemd1 /org/freedesktop/systemd1 org.freedesktop.systemd1.Manager StartTransientUnit \
    'ssa(sv)a(sa(sv))' probe.slice replace 3 CPUAccounting b true MemoryAccounting b true TasksAccounting b true 0 >/dev/null
sleep 1
probe() { for f in $tried; do printf '%s=%s ' "$f" "$(cat $top/probe.slice/"$f" 2>/dev/null)"; done; }
tried="cpu.weight cpu.max cpu.max.burst memory.min memory.low memory.high memory.max memory.swap.max memory.oom.group pids.max cpu.idle"
for value in cpu.weight=77 "cpu.max=50000 100000" cpu.max.burst=1000 memory.min=4096 memory.low=8192 memory.high=104857600 \
    memory.max=209715200 memory.swap.max=0 memory.oom.group=1 pids.max=99; do
    echo "${value#*=}" >$top/probe.slice/"${value%%=*}"
done
echo "# files alone:          $(probe)"
systemctl daemon-reload; sleep 1
echo "# after daemon-reload:  $(probe)"
systemctl set-property --runtime probe.slice CPUWeight=33 MemoryMax=300M TasksMax=55; sleep 1
echo "# after set-property:   $(probe)"
echo 1 >$top/probe.slice/cpu.idle
systemctl daemon-reload; sleep 1
echo "# idle, after reload:   $(probe)"
systemctl set-property --runtime probe.slice CPUWeight=idle; sleep 1
systemctl daemon-reload; sleep 1
echo "# CPUWeight=idle:       $(probe)"
systemctl stop probe.slice

# A pod of each class.
mkdir -p $manifests
manifest guaranteed '{limits: {cpu: 500m, memory: 64Mi}}'
manifest burstable '{requests: {cpu: 250m, memory: 32Mi}, limits: {cpu: 250m, memory: 128Mi}}'
manifest besteffort '{}'
systemctl start beelet.service || fail "the agent starts" "$(systemctl status beelet.service | tail -n 5)"
until_true "a Guaranteed pod runs" has_pod $kube
until_true "a Burstable pod runs" has_pod $burstable
until_true "a BestEffort pod runs" has_pod $besteffort
g=$(pod_of $kube) b=$(pod_of $burstable) e=$(pod_of $besteffort)
echo "# $g"
until_true "values are in force" holds $burstable/cpu.weight 10
same "weight of a Guaranteed pod" 20 "$(cat "$g"/cpu.weight)"
same "quota of a Guaranteed pod" "50000 100000" "$(cat "$g"/cpu.max)"
same "limit of a Guaranteed pod" 67108864 "$(cat "$g"/memory.max)"
same "quota of a Burstable pod" "25000 100000" "$(cat "$b"/cpu.max)"
same "limit of a Burstable pod" 134217728 "$(cat "$b"/memory.max)"
same "weight of a BestEffort pod" 1 "$(cat "$e"/cpu.weight)"
same "the same as systemd knows it" "20 500ms 67108864" \
    "$(property "${g##*/}" CPUWeight) $(property "${g##*/}" CPUQuotaPerSecUSec) $(property "${g##*/}" MemoryMax)"
same "memory QoS and processes" "67108864 33554432 512" "$(cat "$g"/memory.min) $(cat "$b"/memory.low) $(cat "$b"/pids.max)"
same "the same of a slice that had to be changed" "$(cat $kube/memory.min)" "$(property kubepods.slice MemoryMin)"
same "kubepods as systemd knows it" "$(cat $kube/cpu.weight) $(cat $kube/memory.max)" \
    "$(property kubepods.slice CPUWeight) $(property kubepods.slice MemoryMax)"
same "the runtime's scopes are in the pod's slice" "${b##*/}" "$(property "$(basename "$(ls -d "$b"/*.scope | head -n 1)")" Slice)"

# What is a property is not taken back by a daemon-reload, with the agent held so that it can't mend anything. No properties
# in systemd 252: memory.oom.group, and runc's own memory.swap.max (it makes none of a 0).
kept() { values | grep -v -e /memory.oom.group -e '\.scope/memory.swap.max'; }
kept >before
kill -STOP "$(agent)"; systemctl daemon-reload; sleep 2; kept >after; kill -CONT "$(agent)"
if cmp -s before after; then ok "a daemon-reload takes no property back"; else
    fail "a daemon-reload takes no property back" "$(diff before after | tr '\n' ' ')"; fi
in_scopes() { grep -qx "$3" "$1"/*.scope/"$2"; }
until_true "what is no property is set right again" in_scopes "$g" memory.oom.group 1

# systemd makes a quota whole percents when it reloads.
manifest burstable '{requests: {cpu: 250m, memory: 32Mi}, limits: {cpu: 255m, memory: 128Mi}}'
until_true "a quota that is no whole percent" holds "$b"/cpu.max "25500 100000"
sleep 10; systemctl daemon-reload; sleep 4
same "it is set right again at once after a daemon-reload" "25500 100000" "$(cat "$b"/cpu.max)"

# What somebody else changes is set right again, and known to systemd.
echo 77 >"$g"/cpu.weight
until_true "a changed file is set right again" holds "$g"/cpu.weight 20
systemctl set-property --runtime "${g##*/}" CPUWeight=88
until_true "a changed property is set right again" holds "$g"/cpu.weight 20
same "also with systemd" 20 "$(property "${g##*/}" CPUWeight)"

# In place, in both directions.
before=$(containers)
manifest guaranteed '{limits: {cpu: 700m, memory: 96Mi}}'
until_true "a resize up reaches the pod" holds "$g"/memory.max 100663296
until_true "and its container" in_scopes "$g" memory.max 100663296
same "a resize is a property" "700ms 100663296" "$(property "${g##*/}" CPUQuotaPerSecUSec) $(property "${g##*/}" MemoryMax)"
manifest guaranteed '{limits: {cpu: 400m, memory: 64Mi}}'
until_true "a resize down reaches the pod" holds "$g"/memory.max 67108864
until_true "quota down" holds "$g"/cpu.max "40000 100000"
same "no container was restarted by a resize" "$before" "$(containers)"

# The bus is away: stopped, it answers nobody.
bus=$(property dbus.service MainPID)
kill -STOP "$bus"
manifest burstable '{requests: {cpu: 250m, memory: 32Mi}, limits: {cpu: 300m, memory: 160Mi}}'
sleep 25
same "without the bus nothing is half done" "25500 100000" "$(cat "$b"/cpu.max)"
kill -CONT "$bus"
until_true "once the bus is back what waited is done" holds "$b"/memory.max 167772160
until_true "and its quota" holds "$b"/cpu.max "30000 100000"

# systemd executes itself anew.
systemctl daemon-reexec &
manifest burstable '{requests: {cpu: 250m, memory: 32Mi}, limits: {cpu: 320m, memory: 192Mi}}'
wait
until_true "a resize over a daemon-reexec" holds "$b"/memory.max 201326592
same "the agent is the same process" active "$(property beelet.service ActiveState)"

# kill -9: the next one takes over what runs.
before=$(containers) old=$(agent)
kill -9 "$old"
until_true "the agent is back" sh -c "pid=\$(systemctl show --value -p MainPID beelet.service); [ \"\$pid\" != 0 ] && [ \"\$pid\" != $old ]"
until_true "and ready" sh -c '[ "$(systemctl show --value -p ActiveState beelet.service)" = active ]'
manifest burstable '{requests: {cpu: 250m, memory: 32Mi}, limits: {cpu: 320m, memory: 224Mi}}'
until_true "an adopted pod is resized" holds "$b"/memory.max 234881024
same "no container was restarted by kill -9" "$before" "$(containers)"

# The end of pods.
rm $manifests/besteffort.yaml $manifests/guaranteed.yaml
gone() { [ ! -e "$1" ]; }
until_true "a removed Guaranteed pod's slice is gone" gone "$g"
until_true "a removed BestEffort pod's slice is gone" gone "$e"
same "no unit is left of them" "" "$(systemctl list-units --all --plain --no-legend "${g##*/}" "${e##*/}")"
manifest besteffort '{}'
until_true "it comes again" has_pod $besteffort
systemctl stop beelet.service
has_pod $burstable && ok "pods outlive the agent" || fail "pods outlive the agent" "they are gone"
journalctl -u beelet.service --no-pager -o cat >agent.log
grep -c . agent.log | sed 's/^/# lines of the agent: /'
grep -E '"level":"(ERROR|WARN)"| (ERROR|WARN) ' agent.log | head -n 40 | sed 's/^/# /'
echo done
