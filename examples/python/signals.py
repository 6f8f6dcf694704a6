#!/usr/bin/env python3
"""Print the kernel's counters and events for this node's containers (service beelet.v1.Signals).

    python3 -m venv venv && venv/bin/pip install grpcio grpcio-tools
    sudo venv/bin/python signals.py snapshot          # the node as it is now
    sudo venv/bin/python signals.py top               # the busiest containers, once per tick
    sudo venv/bin/python signals.py watch             # edges as they happen
    sudo venv/bin/python signals.py watch --type OOM_KILLED --type EXITED --namespace shop

The messages are documented in agent/proto/proto/beelet/signals.proto. Only root can connect to the socket.
"""

import argparse
import importlib
import pathlib
import sys
import tempfile

import grpc
from grpc_tools import protoc

PROTO = pathlib.Path(__file__).resolve().parents[2] / "agent/proto/proto/beelet/signals.proto"


def generated(proto: pathlib.Path):
    """Returns the modules that protoc generates from the .proto file: messages and stubs."""
    folder = tempfile.TemporaryDirectory()
    arguments = ["protoc", f"-I{proto.parent}", f"--python_out={folder.name}", f"--grpc_python_out={folder.name}"]
    if protoc.main([*arguments, str(proto)]) != 0:
        sys.exit(f"{proto} could not be compiled")
    sys.path.insert(0, folder.name)
    modules = importlib.import_module("signals_pb2"), importlib.import_module("signals_pb2_grpc")
    folder.cleanup()
    return modules


def number(message, field: str) -> str:
    """Formats a number that may be unknown: an optional field is then absent, not 0."""
    return f"{getattr(message, field):.3g}" if message.HasField(field) else "-"


def snapshot(stub, messages, arguments) -> None:
    node = stub.Snapshot(messages.SignalSnapshotRequest(namespace=arguments.namespace))
    source = "kernel programs" if node.by_kernel else "files"
    print(f"{node.node} ({node.mode}, by {source}): {len(node.pods)} pods, {node.machine.cpus} CPUs")
    for pod in node.pods:
        for container in pod.containers:
            used = container.usage
            limit = used.memory_limit_bytes if used.HasField("memory_limit_bytes") else None
            print(
                f"  {pod.namespace}/{pod.name} {container.name}: {container.state}, "
                f"{used.cpu_seconds:.1f} CPU seconds, {used.working_set_bytes >> 20} MiB"
                + (f" of {limit >> 20} MiB" if limit else "")
            )


def top(stub, messages, arguments) -> None:
    request = messages.SignalSnapshotRequest(namespace=arguments.namespace)
    for node in stub.WatchSnapshots(request):
        rows = [
            (container.last_10s, f"{pod.namespace}/{pod.name} {container.name}")
            for pod in node.pods
            for container in pod.containers
            if container.HasField("last_10s")
        ]
        rows.sort(key=lambda row: row[0].cpu, reverse=True)
        print(f"--- {node.node}")
        for rates, name in rows[:10]:
            print(
                f"{rates.cpu * 100:6.1f} % CPU   waits for a CPU, p99: {number(rates, 'runqueue_p99_ns'):>8} ns   "
                f"CPU pressure: {number(rates, 'cpu_some'):>6}   {name}"
            )


def watch(stub, messages, arguments) -> None:
    kinds = messages.SignalEdge.Type
    request = messages.SignalWatchRequest(
        types=[kinds.Value(name) for name in arguments.type], namespace=arguments.namespace
    )
    for edge in stub.Watch(request):
        who = f"{edge.namespace}/{edge.pod} {edge.container}" if edge.pod else f"cgroup {edge.cgroup_id}"
        what = {
            kinds.LISTENER_OPENED: f"listens at {edge.address}",
            kinds.LISTENER_CLOSED: f"stopped listening at {edge.address}",
            kinds.EXITED: f"process {edge.pid} ended: "
            + (f"signal {edge.signal}" if edge.signal else f"exit code {edge.exit_code}"),
            kinds.OOM_KILLED: f"process {edge.pid} was killed for lack of memory ({edge.rss_bytes >> 20} MiB)",
            kinds.PRESSURE_ROSE: f"waits for {edge.resource}: {edge.waited_ns / 1e6:.1f} ms in a second",
            kinds.PRESSURE_FELL: f"no longer waits for {edge.resource}",
        }.get(edge.type, kinds.Name(edge.type))
        print(f"{edge.at_ns / 1e9:14.6f}  {who}: {what}" if edge.type != kinds.LOST else "edges were lost", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["snapshot", "top", "watch"])
    parser.add_argument("--socket", default="/run/beelet/beelet.sock")
    parser.add_argument("--namespace", default="")
    parser.add_argument("--type", action="append", default=[], help="for watch: only edges of this type; may be repeated")
    parser.add_argument("--proto", type=pathlib.Path, default=PROTO)
    arguments = parser.parse_args()
    messages, stubs = generated(arguments.proto)
    # gRPC would send the socket's path as the authority, which HTTP/2 servers refuse.
    options = [("grpc.default_authority", "localhost"), ("grpc.max_receive_message_length", 256 << 20)]
    with grpc.insecure_channel(f"unix:{arguments.socket}", options=options) as channel:
        stub = stubs.SignalsStub(channel)
        try:
            {"snapshot": snapshot, "top": top, "watch": watch}[arguments.command](stub, messages, arguments)
        except grpc.RpcError as error:
            sys.exit(f"{error.code().name}: {error.details()}")
        except (KeyboardInterrupt, BrokenPipeError):
            pass


if __name__ == "__main__":
    main()
