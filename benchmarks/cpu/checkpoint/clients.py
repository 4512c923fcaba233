"""One S3 client in a process of its own: puts the same bytes, whenever a line of JSON asks.

python -m checkpoint.clients '{"client": "boto3.put_object", "url": ..., "nbytes": ..., "parent": ...}'
"""

from __future__ import annotations

import http.client
import io
import json
import mmap
import os
import sys
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from hyperpod_ext.processes import die_with_parent

BUCKET = "bench"
_CREDENTIALS = {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench", "AWS_DEFAULT_REGION": "us-east-1"}

Put = Callable[[str, memoryview], None]


class View(io.RawIOBase):
    """A file over memory, which is what clients that refuse a memoryview take."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, len(self._data))[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        taken = self._data[self._at : self._at + len(buffer)]
        buffer[: len(taken)] = taken
        self._at += len(taken)
        return len(taken)


def _raw(url: str) -> Put:
    """One PUT over one connection, sent straight from memory."""
    line = http.client.HTTPConnection(urlsplit(url).netloc, blocksize=1 << 20)

    def put(key: str, data: memoryview) -> None:
        line.putrequest("PUT", f"/{BUCKET}/{key}")
        line.putheader("Content-Length", str(len(data)))
        line.endheaders()
        line.sock.sendall(data)
        answer = line.getresponse()
        answer.read()
        assert answer.status == 200

    return put


def _boto3(url: str, **config: Any) -> Any:
    import boto3
    from botocore.config import Config

    return boto3.client("s3", endpoint_url=url, config=Config(s3={"addressing_style": "path"}, **config))


def _put_object(url: str) -> Put:
    """Unsigned and without a checksum: the least that boto3 does."""
    from botocore import UNSIGNED

    client = _boto3(url, signature_version=UNSIGNED, request_checksum_calculation="when_required")
    return lambda key, data: client.put_object(Bucket=BUCKET, Key=key, Body=View(data), ContentLength=len(data))


def _upload_fileobj(url: str) -> Put:
    client = _boto3(url)
    return lambda key, data: client.upload_fileobj(View(data), BUCKET, key)


def _obstore(url: str) -> Put:
    import obstore
    from obstore.store import S3Store

    store = S3Store(BUCKET, endpoint=url, virtual_hosted_style_request=False, client_options={"allow_http": True})
    return lambda key, data: obstore.put(store, key, data)


def _s3torchconnector(url: str) -> Put:
    from s3torchconnector import S3ClientConfig
    from s3torchconnector._s3client import S3Client

    client = S3Client("us-east-1", endpoint=url, s3client_config=S3ClientConfig(force_path_style=True))

    def put(key: str, data: memoryview) -> None:
        with client.put_object(BUCKET, key) as writer:
            for start in range(0, len(data), 16 << 20):
                writer.write(data[start : start + (16 << 20)])

    return put


CLIENTS: dict[str, Callable[[str], Put]] = {
    "raw PUT": _raw,
    "boto3 put_object, unsigned": _put_object,
    "boto3 upload_fileobj": _upload_fileobj,
    "obstore": _obstore,
    "s3torchconnector": _s3torchconnector,
}


def main() -> None:
    settings = json.loads(sys.argv[1])
    die_with_parent(settings["parent"])
    os.environ |= _CREDENTIALS
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        put = CLIENTS[settings["client"]](settings["url"])
        data = memoryview(mmap.mmap(-1, settings["nbytes"]))
        data[:] = bytes(1 << 20) * (len(data) >> 20) + bytes(len(data) & ((1 << 20) - 1))
        put("first", data[: 1 << 20])
        answers.write("{}\n")
        for line in sys.stdin:
            least_s, start, cpu, puts = json.loads(line)["least_s"], time.monotonic(), time.process_time(), 0
            while not puts or time.monotonic() - start < least_s:
                put(f"{puts}", data)
                puts += 1
            seconds, cpu = time.monotonic() - start, time.process_time() - cpu
            answers.write(json.dumps({"wall": seconds / puts, "cpu": cpu / puts, "puts": puts}) + "\n")
    except Exception as error:
        answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"[:300]}) + "\n")
        raise


if __name__ == "__main__":
    main()
