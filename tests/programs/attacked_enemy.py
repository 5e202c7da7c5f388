import itertools
import os
import pickle
import secrets
import socket
import sys
from contextlib import suppress
from datetime import timedelta

from tandem.launch import tls_proxy


class Planted:
    def __reduce__(self):
        return os.system, ("touch /checkpoints/was-here /tmp/was-here /run/tandem/was-here",)


bits = pickle.dumps(Planted())
STORE = b"\x3c\x85\xf7\xce"
key = b"tandem/rendezvous"
text = len(key).to_bytes(8, "little") + key
SAID = [
    b"",  # half open
    secrets.token_bytes(3000),
    STORE + bytes(300),
    STORE + b"\0" + text + len(bits).to_bytes(8, "little") + bits,  # set
    b"\x06" + text,  # delete
    b"\x16\x03\x01\x02\0\x01" + bytes(200),
    bits,
    b"GET /../../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /metrics HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n" + bits,
    b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 5000,
    b"\xff" * 65000,
]


def store(address):
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    there = TCPStore(*address, is_master=False, timeout=timedelta(seconds=2), wait_for_workers=False)  # type: ignore[misc]
    for name in ("tandem/rendezvous", "torch.rendezvous.tandem"):
        there.set(name, bits)  # type: ignore[arg-type]
    for name in there.list_keys():
        if "/pulse/" in name or "metrics/" in name:
            there.set(name, bits)  # type: ignore[arg-type]


held, sent = [], 0
secret, stores = sys.argv[2] == "secret", [place for place in sys.argv[3:] if place.endswith(":29500")]
for turn in itertools.count():
    for place in sys.argv[3:]:
        host, kind, port = place.split(":")
        sent, address = sent + 1, (host, int(port))
        with suppress(OSError, RuntimeError, ValueError):
            if kind == "udp":
                with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
                    stranger.sendto(SAID[turn % len(SAID)][:60000], address)
            elif place in stores and not secret and turn % 3 == 0:
                store(address)
            else:
                stranger = socket.create_connection(address, timeout=2)
                held.append(stranger)
                if secret and turn % 12 == 11 and place in stores:
                    tls_proxy.connect_as_node(stranger, b"x" * 32, turn % 65536)
                else:
                    stranger.sendall(SAID[turn % len(SAID)])
        while len(held) > 200:
            held.pop(0).close()
    if turn + 1 == int(sys.argv[1]):
        break
print("sent", sent, flush=True)
