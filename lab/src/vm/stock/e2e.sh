#!/bin/sh
# Runs in a stock machine, as a unit, instead of check.sh: end-to-end tests, each with its own containerd,
# which is the machine's program, or a bench. Results are written to the second serial line, in the format of
# guest/run.
export LC_ALL=C HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin
export BEELET_BIN=/check/e2e/beelet BEELET_TESTAPP=/check/testapp
set -a
. /check/environment
cd /check/e2e || exit 1
# A node has an address and a default route.
ip link add pods0 type dummy && ip addr add 192.0.2.10/24 dev pods0 && ip link set pods0 up && ip route add default dev pods0
# Each test has its own containerd; the machine's own is for the doctor, and is stopped afterwards.
for image in /check/images/*.tar; do ctr -n k8s.io images import "$image" >/dev/null; done
export AFTER_DOCTOR="systemctl stop containerd.service"
stty -F /dev/ttyS1 raw -echo
exec >/dev/ttyS1
echo "fact up $(cut -d ' ' -f 1 /proc/uptime)"
if [ -e /check/bench ]; then
  systemctl stop containerd.service
  # The emulator has one thread, which gives its processors turns of a tenth of a second: with one of them,
  # every wait is the kernel's own.
  echo 0 >/sys/devices/system/cpu/cpu1/online
  # shellcheck disable=SC2046 # its words are the arguments
  { /check/e2e/lab bench --agent "$BEELET_BIN" $(cat /check/bench) 2>&1; echo $? >/check/status; } | sed -u 's/^/said /'
  echo "fact status $(cat /check/status)"
  echo "done 0"
  exit
fi
sh /check/run /check/plan "$(cat /check/limit)"
