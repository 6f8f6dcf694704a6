#!/bin/sh
# Runs in a stock machine, as a unit, at each of its two boots: checks the agent's package, and an agent with
# the machine's cgroup driver. Prints `ok NAME`, `FAIL NAME: why`, `skip NAME: why` and `# …` for comments. The last
# line of the second boot is `done`.
export LC_ALL=C PATH=/usr/sbin:/usr/bin:/sbin:/bin
cd /check || exit 1
rm -f going-down
. ./machine
boot=$(cat boot 2>/dev/null || echo 1)
top=/sys/fs/cgroup
kube=$top/kubepods.slice
burstable=$kube/kubepods-burstable.slice
besteffort=$kube/kubepods-besteffort.slice
manifests=/etc/beelet/manifests

ok() { echo "ok $1"; }
fail() { echo "FAIL $1: $2"; }
skip() { echo "skip $1: $2"; }
same() { if [ "$2" = "$3" ]; then ok "$1"; else fail "$1" "expected \"$2\", found \"$3\""; fi; }
# Waits until the command succeeds. Emulated machines are slow.
patience=240
until_true() {
    what=$1; shift; tries=0
    until "$@" >/dev/null 2>&1; do
        tries=$((tries + 1))
        if [ $tries -ge $patience ]; then fail "$what" "not true after $patience polls, each of half a second or more"; return 1; fi
        sleep 0.5
    done
    ok "$what"
}
holds() { [ "$(cat "$1" 2>/dev/null)" = "$2" ]; }
pod_of() { ls -d "$1"/*-pod*.slice 2>/dev/null | head -n 1; }
has_pod() { [ -n "$(pod_of "$1")" ] && ls -d "$(pod_of "$1")"/*.scope | [ "$(wc -l)" -ge 2 ]; }
# The unit's property in systemd.
property() { systemctl show --value -p "$2" "$1"; }
# All values set below the pods' slice.
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

begin() {
    echo "fact $(uname -r), $(systemctl --version | head -n 1 | cut -d ' ' -f 1,2), $(containerd --version | cut -d ' ' -f 1,3)"
    until_true "containerd is up" ctr version
    for image in images/*.tar; do ctr -n k8s.io images import "$image" >/dev/null || fail "image" "$image"; done
}
network() {
    ip link add pods0 type dummy && ip addr add 192.0.2.10/24 dev pods0 && ip link set pods0 up && ip route add default dev pods0
}
state_of() { property "$1" ActiveState; }
agent_answers() { beelet get pods; }
no_pods() { listed=$(beelet get pods) && ! echo "$listed" | grep -q '^ *default '; }

# ---- The package ----

install_package() {
    # The recommended packages (another runtime, plugins) are installed already, and no mirror can be reached.
    if apt-get install -y --no-install-recommends ./beelet.deb >apt.log 2>&1; then ok "apt installs the package"; else
        fail "apt installs the package" "$(tail -n 3 apt.log | tr '\n' ' ')"; fi
    same "the package starts no unit by itself" "inactive inactive" \
        "$(state_of beelet.service) $(state_of beelet-observe.service)"
    same "dpkg verifies all files" "" "$(dpkg --verify beelet)"
    echo "# $(beelet --version)"
    beelet run --check --config /etc/beelet/beelet.yaml >check.log 2>&1 && ok "the package's configuration is valid" ||
        fail "the package's configuration is valid" "$(tail -n 2 check.log)"
    cp agent.yaml /etc/beelet/beelet.yaml
    beelet doctor >doctor.log 2>&1 && ok "the doctor finds that beelet can run here" ||
        fail "the doctor finds that beelet can run here" "$(tail -n 1 doctor.log)"
    sed 's/^/# doctor: /' doctor.log
}

# ---- Features of a complete machine ----

machine_extras() {
    finding() { beelet doctor -v 2>/dev/null | tr -s ' ' | grep -A 2 -- "$1"; }
    case $(finding "volume sizes") in
    *"counted by the kernel"*) ok "the kernel counts the usage of volumes by project" ;;
    *) fail "the kernel counts the usage of volumes by project" "$(finding "volume sizes" | head -n 1)" ;;
    esac
    ss_diag=$(modprobe tcp_diag 2>&1) && ok "tcp_diag is loaded" || fail "tcp_diag is loaded" "$ss_diag"
    same "two NUMA nodes" "0-1" "$(cat /sys/devices/system/node/online)"
    fallocate -l 128M /swapfile && chmod 600 /swapfile && mkswap /swapfile >/dev/null && swapon /swapfile &&
        ok "swap is enabled" || fail "swap is enabled" "$(cat /proc/swaps)"
    same "huge pages are reserved" 32 "$(cat /proc/sys/vm/nr_hugepages)"
    beelet get node -o json | grep -q '"hugepages-2Mi": "64Mi"' && ok "the node reports huge pages" ||
        fail "the node reports huge pages" "$(beelet get node -o json | grep -m 1 hugepages)"
    # Containers have a profile, sandboxes have none.
    profile=$(for pid in $(ctr -n k8s.io tasks ls | awk '$3 == "RUNNING" {print $2}'); do
        cat /proc/"$pid"/attr/current
    done 2>/dev/null | grep -m 1 cri-containerd)
    case $(cat /sys/module/apparmor/parameters/enabled 2>/dev/null) in
    Y) same "AppArmor enforces the runtime's profile" "cri-containerd.apparmor.d (enforce)" "$profile" ;;
    *) skip "AppArmor enforces the runtime's profile" "this kernel has no AppArmor" ;;
    esac
    # Tests that are skipped on every kernel without modules.
    for test in $(./kernel --list --format terse 2>/dev/null | sed -n 's/^\(quota::.*\): test$/\1/p'); do
        rm -f skipped
        BEELET_SKIPPED=$PWD/skipped BEELET_BIN=/usr/bin/beelet BEELET_TESTAPP=$PWD/testapp \
            ./kernel "$test" --exact --nocapture >test.log 2>&1
        status=$?
        if [ -s skipped ]; then skip "test $test" "$(head -n 1 skipped)"
        elif [ $status = 0 ]; then ok "test $test"
        else fail "test $test" "$(tail -n 4 test.log | tr '\n' ' ')"; fi
    done
}

# ---- An upgrade under running pods ----

upgrade() {
    count=20
    for n in $(seq $count); do
        cat >$manifests/.new <<POD
apiVersion: v1
kind: Pod
metadata: {name: up-$n}
spec:
  hostNetwork: true
  terminationGracePeriodSeconds: 1
  containers:
  - name: main
    image: localhost/beelet/app:1
    imagePullPolicy: Never
    command: [/bin/testapp, serve, --tcp, "$((20000 + n))", --control, "$((21000 + n))"]
    readinessProbe: {tcpSocket: {port: $((20000 + n))}, periodSeconds: 1, failureThreshold: 1}
POD
        mv $manifests/.new $manifests/up-"$n".yaml
    done
    all_ready() { [ "$(beelet get pods | grep -c '^ *default *up-.* 1/1 ')" = $count ]; }
    patience=1200
    until_true "$count pods are ready" all_ready
    patience=240
    # Fields that a restart or a flip would change.
    seen() { beelet get pods -o json | grep -E '"(restartCount|containerID|lastTransitionTime|startedAt|uid)"'; }
    seen >before; old=$(agent)
    apt-get install -y --no-install-recommends ./upgrade.deb >apt.log 2>&1 || fail "apt upgrades" "$(tail -n 3 apt.log)"
    until_true "another agent runs" sh -c "[ \"\$(systemctl show --value -p MainPID beelet.service)\" != $old ] && beelet get pods"
    until_true "all pods are ready after the upgrade" all_ready
    # Time for several runs of each probe.
    sleep 10
    seen >after
    same "the other version is installed" 2 "$(dpkg-query -W -f '${Version}' beelet | sed 's/.*-//')"
    if cmp -s before after; then ok "an upgrade under $count pods restarts no pod and flips no readiness"; else
        fail "an upgrade under $count pods restarts no pod and flips no readiness" "$(diff before after | head -n 8 | tr '\n' ' ')"; fi
    rm $manifests/up-*.yaml
    patience=1200
    until_true "pods are removed with their manifests after the upgrade" no_pods
    patience=240
}

# ---- Shutdown and boot ----

# A field of one of the agent's records on disk, and the pods' UIDs.
record() { grep -o "\"$2\": *\"[^\"]*\"" /var/lib/beelet/"$1".json | head -n 1 | cut -d '"' -f 4; }
uids() { beelet get pods -o json | grep -o '"uid": *"[^"]*"' | sort -u; }
this_boot() { cat /proc/sys/kernel/random/boot_id; }
# A pod that records the time of its termination, and takes a moment to terminate.
ending_pod() { # NAME PRIORITY SECONDS
    cat >$manifests/.new <<POD
apiVersion: v1
kind: Pod
metadata: {name: $1}
spec:
  hostNetwork: true
  priority: $2
  terminationGracePeriodSeconds: 50
  volumes:
  - {name: ends, hostPath: {path: /check/ends}}
  - {name: scratch, emptyDir: {}}
  containers:
  - name: main
    image: localhost/beelet/app:1
    imagePullPolicy: Never
    command:
    - sh
    - -c
    - |
      trap 'cat /proc/uptime >/ends/$1.told; sleep $3; cat /proc/uptime >/ends/$1.ended; exit 0' TERM
      cat /proc/sys/kernel/random/boot_id >>/scratch/boots
      cp /scratch/boots /ends/$1.boots
      while :; do sleep 100000 & wait \$!; done
    volumeMounts:
    - {name: ends, mountPath: /ends}
    - {name: scratch, mountPath: /scratch}
POD
    mv $manifests/.new $manifests/"$1".yaml
}
go_down() {
    ending_pod usual 0 4
    ending_pod critical 2000000000 1
    both_run() { [ -s ends/usual.boots ] && [ -s ends/critical.boots ]; }
    until_true "pods that take time to terminate run" both_run
    systemd-inhibit --list --no-pager >inhibitors 2>&1
    grep -q 'beelet.*shutdown.*delay' inhibitors && ok "logind lists the inhibitor of a shutdown" ||
        fail "logind lists the inhibitor of a shutdown" "$(tr '\n' ' ' <inhibitors)"
    echo "# $(busctl get-property org.freedesktop.login1 /org/freedesktop/login1 org.freedesktop.login1.Manager InhibitDelayMaxUSec)"
    beelet get pods | sed 's/^/# /'
    this_boot >first-boot; uids >first-uids; record images began >first-began
    echo 2 >boot
    touch going-down
    sync
    systemctl poweroff
}
came_up() {
    before() { [ -s "$1" ] && [ -s "$2" ] && [ "$(cut -d ' ' -f 1 "$1" | tr -d .)" -le "$(cut -d ' ' -f 1 "$2" | tr -d .)" ]; }
    before ends/usual.told ends/usual.ended && ok "a usual pod had its grace period before the shutdown" ||
        fail "a usual pod had its grace period before the shutdown" "$(ls ends | tr '\n' ' ')"
    before ends/usual.ended ends/critical.told && ok "a critical pod was terminated only afterwards" ||
        fail "a critical pod was terminated only afterwards" "$(cat ends/usual.ended ends/critical.told 2>&1 | tr '\n' ' ')"
    before ends/critical.told ends/critical.ended && ok "a critical pod had its grace period" || fail "a critical pod had its grace period" "$(ls ends | tr '\n' ' ')"
    journalctl -b -1 -u beelet.service --no-pager -o cat >last-boot.log 2>/dev/null
    grep -q 'the machine may go down' last-boot.log && ok "the machine waited for the agent" ||
        fail "the machine waited for the agent" "$(tail -n 2 last-boot.log | tr '\n' ' ')"
    grep -iE 'shut|pods have ended|may go down|logind' last-boot.log | tail -n 12 | sed 's/^/# /'
    record=/var/lib/beelet/node-shutdown.json
    grep -q '"ended": *"' $record && ok "the record of the shutdown is complete" ||
        fail "the record of the shutdown is complete" "$(cat $record 2>&1)"
    for file in ends/*.boots; do mv "$file" "$file".first; done
    same "the records on disk are of the last boot" "$(cat first-boot)" "$(record pods boot)"
    network
    systemctl start beelet.service || fail "the agent starts after the boot" "$(systemctl status beelet.service | tail -n 5)"
    again() { [ -s ends/usual.boots ] && [ -s ends/critical.boots ]; }
    until_true "static pods run again after the boot" again
    same "their volumes of the last boot were removed" "$(this_boot)" "$(cat ends/usual.boots)"
    running_pods() { beelet get pods | grep -c ' 1/1 *Running'; }
    two_run() { [ "$(running_pods)" = 2 ]; }
    until_true "the agent reports them running" two_run
    same "they are the same pods" "$(cat first-uids)" "$(uids)"
    early() {
        booted=$(sed -n 's/^btime //p' /proc/stat)
        beelet get pods -o json | tr -d ' \n' | grep -o '"running":{"startedAt":"[^"]*"' | cut -d '"' -f 6 |
            while read -r at; do [ "$(date -d "$at" +%s)" -ge "$booted" ] || echo "$at"; done
    }
    same "container records of the last boot are not trusted" "" "$(early)"
    of_this_boot() { [ "$(record pods boot)" = "$(this_boot)" ]; }
    until_true "the records are rewritten" of_this_boot
    same "images keep their ages" "$(cat first-began)" "$(record images began)"
}
purge() {
    rm -f $manifests/*.yaml
    none_left() { [ "$(beelet get pods | grep -c Running)" = 0 ] && [ -z "$(containers)" ]; }
    until_true "pods are removed with their manifests" none_left
    dpkg --purge beelet >apt.log 2>&1 && ok "the package is purged" || fail "the package is purged" "$(tail -n 2 apt.log)"
    left=$(ls -d /usr/bin/beelet /etc/beelet /var/lib/beelet /run/beelet /sys/fs/bpf/beelet $kube $top/*/kubepods 2>/dev/null)
    same "nothing is left behind" "" "$(echo $left)"
}
log_of_agent() {
    journalctl -b -u beelet.service --no-pager -o cat >agent.log
    grep -c . agent.log | sed 's/^/# lines of the agent: /'
    grep -E '"level":"(ERROR|WARN)"| (ERROR|WARN) ' agent.log | head -n 40 | sed 's/^/# /'
}

# ---- A pod of each class on version 1 ----

on_version_1() {
    manifest guaranteed '{limits: {cpu: 500m, memory: 64Mi}}'
    manifest burstable '{requests: {cpu: 250m, memory: 32Mi}, limits: {cpu: 250m, memory: 128Mi}}'
    manifest besteffort '{}'
    systemctl start beelet.service || fail "the agent starts" "$(systemctl status beelet.service | tail -n 5)"
    three_run() { [ "$(beelet get pods | grep -c ' 1/1 *Running')" = 3 ]; }
    until_true "a pod of each class runs" three_run
    pod_v1() { ls -d "$top"/"$1"/kubepods"$2"/pod* | head -n 1; }
    g_cpu=$(pod_v1 cpu "") g_memory=$(pod_v1 memory "") b_cpu=$(pod_v1 cpu /burstable) e_cpu=$(pod_v1 cpu /besteffort)
    same "shares of a Guaranteed pod" 512 "$(cat "$g_cpu"/cpu.shares)"
    same "quota of a Guaranteed pod" 50000 "$(cat "$g_cpu"/cpu.cfs_quota_us)"
    same "limit of a Guaranteed pod" 67108864 "$(cat "$g_memory"/memory.limit_in_bytes)"
    same "quota of a Burstable pod" 25000 "$(cat "$b_cpu"/cpu.cfs_quota_us)"
    same "shares of a BestEffort pod" 2 "$(cat "$e_cpu"/cpu.shares)"
    echo 77 >"$g_cpu"/cpu.shares
    until_true "a changed file is restored" holds "$g_cpu"/cpu.shares 512
    before=$(containers) old=$(agent)
    kill -9 "$old"
    until_true "the agent is back" sh -c "pid=\$(systemctl show --value -p MainPID beelet.service); [ \"\$pid\" != 0 ] && [ \"\$pid\" != $old ]"
    until_true "the agent answers again" agent_answers
    same "no container was restarted by kill -9" "$before" "$(containers)"
    rm $manifests/*.yaml
}

# ---- cgroup v2 and systemd's driver ----

systemd_driver() {
    # Shows the effect of a daemon-reload on values in files only, and on values that are properties.
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
    manifest guaranteed '{limits: {cpu: 500m, memory: 64Mi}}'
    manifest burstable '{requests: {cpu: 250m, memory: 32Mi}, limits: {cpu: 250m, memory: 128Mi}}'
    manifest besteffort '{}'
    systemctl start beelet.service || fail "the agent starts" "$(systemctl status beelet.service | tail -n 5)"
    until_true "a Guaranteed pod runs" has_pod $kube
    until_true "a Burstable pod runs" has_pod $burstable
    until_true "a BestEffort pod runs" has_pod $besteffort
    g=$(pod_of $kube) b=$(pod_of $burstable) e=$(pod_of $besteffort)
    echo "# $g"
    until_true "values are applied" holds $burstable/cpu.weight 10
    same "weight of a Guaranteed pod" 20 "$(cat "$g"/cpu.weight)"
    same "quota of a Guaranteed pod" "50000 100000" "$(cat "$g"/cpu.max)"
    same "limit of a Guaranteed pod" 67108864 "$(cat "$g"/memory.max)"
    same "quota of a Burstable pod" "25000 100000" "$(cat "$b"/cpu.max)"
    same "limit of a Burstable pod" 134217728 "$(cat "$b"/memory.max)"
    same "weight of a BestEffort pod" 1 "$(cat "$e"/cpu.weight)"
    same "systemd has the same values" "20 500ms 67108864" \
        "$(property "${g##*/}" CPUWeight) $(property "${g##*/}" CPUQuotaPerSecUSec) $(property "${g##*/}" MemoryMax)"
    same "memory QoS and processes" "67108864 33554432 512" "$(cat "$g"/memory.min) $(cat "$b"/memory.low) $(cat "$b"/pids.max)"
    same "systemd has the value of a changed slice" "$(cat $kube/memory.min)" "$(property kubepods.slice MemoryMin)"
    same "systemd has the values of kubepods" "$(cat $kube/cpu.weight) $(cat $kube/memory.max)" \
        "$(property kubepods.slice CPUWeight) $(property kubepods.slice MemoryMax)"
    same "the runtime's scopes are in the pod's slice" "${b##*/}" "$(property "$(basename "$(ls -d "$b"/*.scope | head -n 1)")" Slice)"

    # A daemon-reload reverts no property; the agent is stopped, so it cannot restore any. In systemd 252,
    # memory.oom.group is not a property, nor is runc's own memory.swap.max (runc sets no property for 0).
    kept() { values | grep -v -e /memory.oom.group -e '\.scope/memory.swap.max'; }
    kept >before
    kill -STOP "$(agent)"; systemctl daemon-reload; sleep 2; kept >after; kill -CONT "$(agent)"
    if cmp -s before after; then ok "a daemon-reload reverts no property"; else
        fail "a daemon-reload reverts no property" "$(diff before after | tr '\n' ' ')"; fi
    in_scopes() { grep -qx "$3" "$1"/*.scope/"$2"; }
    until_true "values without a property are restored" in_scopes "$g" memory.oom.group 1

    # systemd rounds a quota to whole percents when it reloads.
    manifest burstable '{requests: {cpu: 250m, memory: 32Mi}, limits: {cpu: 255m, memory: 128Mi}}'
    until_true "a quota with a fraction of a percent" holds "$b"/cpu.max "25500 100000"
    sleep 10; systemctl daemon-reload; sleep 4
    same "the quota is restored at once after a daemon-reload" "25500 100000" "$(cat "$b"/cpu.max)"

    # Foreign changes are reverted, also in systemd.
    echo 77 >"$g"/cpu.weight
    until_true "a changed file is restored" holds "$g"/cpu.weight 20
    systemctl set-property --runtime "${g##*/}" CPUWeight=88
    until_true "a changed property is restored" holds "$g"/cpu.weight 20
    same "systemd has the restored property" 20 "$(property "${g##*/}" CPUWeight)"

    # A pod is resized in place, in both directions.
    before=$(containers)
    manifest guaranteed '{limits: {cpu: 700m, memory: 96Mi}}'
    until_true "a resize up reaches the pod" holds "$g"/memory.max 100663296
    until_true "a resize up reaches its container" in_scopes "$g" memory.max 100663296
    same "a resize is a property" "700ms 100663296" "$(property "${g##*/}" CPUQuotaPerSecUSec) $(property "${g##*/}" MemoryMax)"
    manifest guaranteed '{limits: {cpu: 400m, memory: 64Mi}}'
    until_true "a resize down reaches the pod" holds "$g"/memory.max 67108864
    until_true "a lower quota reaches the pod" holds "$g"/cpu.max "40000 100000"
    same "no container was restarted by a resize" "$before" "$(containers)"

    # A stopped bus does not answer.
    bus=$(property dbus.service MainPID)
    kill -STOP "$bus"
    manifest burstable '{requests: {cpu: 250m, memory: 32Mi}, limits: {cpu: 300m, memory: 160Mi}}'
    sleep 25
    same "without the bus no change is half applied" "25500 100000" "$(cat "$b"/cpu.max)"
    kill -CONT "$bus"
    until_true "pending changes are applied when the bus is back" holds "$b"/memory.max 167772160
    until_true "the pending quota is applied too" holds "$b"/cpu.max "30000 100000"

    # systemd re-executes itself.
    systemctl daemon-reexec &
    manifest burstable '{requests: {cpu: 250m, memory: 32Mi}, limits: {cpu: 320m, memory: 192Mi}}'
    wait
    until_true "a resize over a daemon-reexec" holds "$b"/memory.max 201326592
    same "the agent is the same process" active "$(property beelet.service ActiveState)"

    # kill -9: the next agent adopts the running pods.
    before=$(containers) old=$(agent)
    kill -9 "$old"
    until_true "the agent is back" sh -c "pid=\$(systemctl show --value -p MainPID beelet.service); [ \"\$pid\" != 0 ] && [ \"\$pid\" != $old ]"
    until_true "the agent is ready again" sh -c '[ "$(systemctl show --value -p ActiveState beelet.service)" = active ]'
    manifest burstable '{requests: {cpu: 250m, memory: 32Mi}, limits: {cpu: 320m, memory: 224Mi}}'
    until_true "an adopted pod is resized" holds "$b"/memory.max 234881024
    same "no container was restarted by kill -9" "$before" "$(containers)"

    # Pods are terminated.
    rm $manifests/besteffort.yaml $manifests/guaranteed.yaml
    gone() { [ ! -e "$1" ]; }
    until_true "a removed Guaranteed pod's slice is removed" gone "$g"
    until_true "a removed BestEffort pod's slice is removed" gone "$e"
    same "their units are removed" "" "$(systemctl list-units --all --plain --no-legend "${g##*/}" "${e##*/}")"
    manifest besteffort '{}'
    until_true "a restored BestEffort pod runs again" has_pod $besteffort
    systemctl stop beelet.service
    has_pod $burstable && ok "pods outlive the agent" || fail "pods outlive the agent" "the pods were removed"
}

case $boot in
1)
    begin
    network
    install_package
    case $cgroups in v1) on_version_1 ;; *) systemd_driver ;; esac
    systemctl start beelet.service
    rm -f $manifests/*.yaml
    manifest extra '{requests: {cpu: 10m}}'
    until_true "a pod runs" sh -c "beelet get pods | grep -q 'extra.* 1/1 *Running'"
    machine_extras
    rm $manifests/extra.yaml
    until_true "a pod is removed with its manifest" no_pods
    upgrade
    log_of_agent
    go_down
    ;;
2)
    came_up
    log_of_agent
    purge
    echo done
    ;;
esac
