"""A slow cable: carries packets between two devices of the switch's network.

cable.py SWITCH MACHINE MILLISECONDS PERCENT: packets from SWITCH to MACHINE are delayed, and PERCENT of them are
lost; packets in the other direction pass at once. The packets keep their header of offloads (PACKET_VNET_HDR in
packet(7)), so that neither large segments nor checksums that a device was to compute get lost.
"""

import heapq
import random
import select
import socket
import struct
import sys
import time

ETH_P_ALL = 3
SOL_PACKET, ADD_MEMBERSHIP, VNET_HDR, IGNORE_OUTGOING = 263, 1, 15, 23
PROMISCUOUS = 1


def opened(name):
    device = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    device.setsockopt(SOL_PACKET, VNET_HDR, 1)
    device.setsockopt(SOL_PACKET, IGNORE_OUTGOING, 1)
    device.bind((name, ETH_P_ALL))
    request = struct.pack("IHH8x", socket.if_nametoindex(name), PROMISCUOUS, 0)
    device.setsockopt(SOL_PACKET, ADD_MEMBERSHIP, request)
    device.setblocking(False)
    return device


def send(device, packet):
    try:
        device.send(packet)
    except OSError:
        pass  # a full queue, or a device that is down, loses packets


switch, machine = opened(sys.argv[1]), opened(sys.argv[2])
delay, loss = float(sys.argv[3]) / 1e3, float(sys.argv[4]) / 100
waiting, count = [], 0
while True:
    now = time.monotonic()
    while waiting and waiting[0][0] <= now:
        send(machine, heapq.heappop(waiting)[2])
    timeout = max(0, waiting[0][0] - now) if waiting else None
    for device in select.select([switch, machine], [], [], timeout)[0]:
        for _ in range(64):
            try:
                packet = device.recv(1 << 17)
            except OSError:
                break
            if device is machine:
                send(switch, packet)
            elif random.random() >= loss:
                count += 1
                heapq.heappush(waiting, (time.monotonic() + delay, count, packet))
