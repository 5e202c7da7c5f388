"""Read an epoch of numbered samples over http in this process, from a server that may have a fault.

    fault_reads.py READER ADDRESS CACHE SAMPLES

READER: a key of READERS. CACHE: an empty folder. SAMPLES: a file that gets a line for each sample read: its
number, and 1 if its bytes are as they were written, else 0. Prints a line of JSON: {}, or the "error" and all
that its traceback "said". The readers are those of remote_reads.py, with the checks and limits of their own
libraries. litdata gets its downloads through obstore, as it reads S3, with the options that it sets there.
"""

import json
import os
import random
import sys
import traceback
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import remote_reads

BATCH = 48
BYTES = 1500


def payload(number: int) -> bytes:
    """Return the bytes of a sample."""
    return random.Random(number).randbytes(BYTES)


def over_obstore(address: str, path: str) -> None:
    """Write a whole file with obstore's own retries."""
    import obstore
    from obstore.store import HTTPStore

    parts = urlsplit(address)
    store = HTTPStore.from_url(
        f"{parts.scheme}://{parts.netloc}", client_options={"timeout": "200s", "allow_http": True}
    )
    new = f"{path}.{os.getpid()}.part"
    with open(new, "wb") as file:
        for chunk in obstore.get(store, parts.path.lstrip("/")).stream():
            file.write(chunk)
    os.replace(new, path)


READERS = {
    "tandem": remote_reads.tandem,
    "webdataset": remote_reads.webdataset,
    "litdata": partial(remote_reads.litdata, over_obstore),
    "datasets-tar": remote_reads.datasets_tar,
    "datasets-parquet": remote_reads.datasets_parquet,
    "mosaic": remote_reads.mosaic,
    "mosaic-hashed": partial(remote_reads.mosaic, validate_hash="xxh64"),
}


def main(name: str, address: str, cache: str, samples: str) -> None:
    remote_reads.BATCH = BATCH
    found = {}
    with open(samples, "a", buffering=1) as lines:
        try:
            for data, number in READERS[name]()(address, Path(cache)):
                lines.write(f"{number} {int(data == payload(number))}\n")
        except Exception as error:
            said = "".join(traceback.format_exception(error))
            found = {"error": f"{type(error).__name__}: {error}".splitlines()[0], "said": said}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
