"""A device plugin on Python's grpcio, written without the kubelet's or beelet's code.

    device_plugin.py DEVICE_PLUGINS_DIR RESOURCE DEVICE...

No generated classes: the few messages it needs are put together by hand, so grpcio is all that it asks for.
"""

import os
import sys
import threading
from concurrent import futures

import grpc


def varint(number):
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def field(number, content):
    """A length-delimited field."""
    if isinstance(content, str):
        content = content.encode()
    return varint(number << 3 | 2) + varint(len(content)) + content


def fields(message):
    """The length-delimited fields of a message, as (number, bytes)."""
    at = 0

    def number():
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(message):
        key = number()
        if key & 7 == 2:
            length = number()
            yield key >> 3, message[at : at + length]
            at += length
        else:
            number()


def main():
    folder, resource, *devices = sys.argv[1:]
    endpoint = "python.sock"
    done = threading.Event()

    def list_and_watch(_request, _context):
        yield b"".join(field(1, field(1, device) + field(2, "Healthy")) for device in devices)
        done.wait()

    def allocate(request, _context):
        answers = b""
        for _, container in fields(request):
            ids = [device.decode() for _, device in fields(container)]
            print("allocate", *ids, flush=True)
            env = field(1, "PYTHON_DEVICES") + field(2, ",".join(ids))
            node = field(1, "/dev/python") + field(2, "/dev/null") + field(3, "rw")
            answers += field(1, field(1, env) + field(3, node))
        return answers

    def nothing(_request, _context):
        return b""

    unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
    handlers = {
        "GetDevicePluginOptions": unary(nothing),
        "ListAndWatch": stream(list_and_watch),
        "Allocate": unary(allocate),
        "PreStartContainer": unary(nothing),
    }
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=4))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("v1beta1.DevicePlugin", handlers),))
    server.add_insecure_port("unix://" + os.path.join(folder, endpoint))
    server.start()
    with grpc.insecure_channel("unix://" + os.path.join(folder, "kubelet.sock")) as channel:
        request = field(1, "v1beta1") + field(2, endpoint) + field(3, resource)
        channel.unary_unary("/v1beta1.Registration/Register")(request, timeout=30)
    print("registered", flush=True)
    sys.stdin.read()
    done.set()
    server.stop(None)


main()
