"""Converts a dataset to a token store during training. One process per node converts; all ranks read the converted
part.

Every rank calls `follow`. One rank of the node gets the store's lock and starts the converter process; the other ranks
wait for the lock. If the converter dies together with its rank, the kernel releases the lock, and another rank
continues the conversion.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hyperpod_ext.errors import DatasetChangedError, HyperpodExtError, JobFailedError, WaitTimeoutError
from hyperpod_ext.runtime.data.convert.convert import Prepared, Recipe, prepare, run
from hyperpod_ext.runtime.data.token_store.files import FileLock, make_folder
from hyperpod_ext.runtime.data.token_store.reader import TokenStore
from hyperpod_ext.runtime.data.token_store.writer import ABOUT, DONE, LOCK

_NICE = 10
_POLL_S = 0.02


def follow(
    sources: str | Path | Sequence[str | Path],
    *,
    place: str | Path | None = None,
    budget_bytes: int | None = None,
    on_bytes: Callable[[int], None] = lambda nbytes: None,
    **options: Any,
) -> Conversion:
    """Start the conversion of a dataset to a token store, unless this store is already finished. Returns the
    conversion.

    `options` are the fields of `Recipe`. The conversion runs in a separate process at low priority. If the tokenizer is
    a function object, which another process cannot load by name, the conversion runs in a thread of this process.

    Raises:
        ConfigError, NotFoundError: the dataset cannot be read with these options.
    """
    many = [sources] if isinstance(sources, str | Path) else sources
    prepared = prepare(Recipe(tuple(map(str, many)), **options), place)
    conversion = Conversion(prepared, budget_bytes, on_bytes)
    if not (prepared.folder / DONE).exists():
        conversion.start()
    return conversion


class Conversion:
    """The conversion of one dataset, which may still be running, and the store that it writes."""

    def __init__(self, prepared: Prepared, budget_bytes: int | None, on_bytes: Callable[[int], None]) -> None:
        self.folder = prepared.folder
        self._prepared, self._budget_bytes, self._on_bytes = prepared, budget_bytes, on_bytes
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._error: HyperpodExtError | None = None
        self._stopped = False

    def start(self) -> None:
        """Start to convert in the background. While another process converts, only wait for the store's lock, and
        continue the conversion if the other process dies."""
        make_folder(self.folder)
        # this thread must live as long as the converter process, which the kernel kills when its starting thread ends
        self._thread = threading.Thread(target=self._watch, name="hpx-convert", daemon=True)
        self._thread.start()

    def store(self, timeout_s: float = 60.0) -> TokenStore:
        """Return the token store that is being written, which may have no segment (file of documents) yet.

        Raises:
            HyperpodExtError: the conversion failed.
        """
        self._until(lambda: (self.folder / ABOUT).exists(), timeout_s)
        return TokenStore(self.folder)

    def wait(self, timeout_s: float | None = None) -> TokenStore:
        """Wait until the whole dataset is converted, and return the finished token store.

        Raises:
            HyperpodExtError: the conversion failed.
            WaitTimeoutError: the conversion is still running.
        """
        self._until(lambda: (self.folder / DONE).exists() and not self._converts(), timeout_s)
        return TokenStore(self.folder)

    def _converts(self) -> bool:
        """Return whether this object has started a converter process that is still running."""
        return self._process is not None and self._thread is not None and self._thread.is_alive()

    def stop(self) -> None:
        """Kill the converter that this object has started. Published segments stay, and the next conversion continues
        after the last of them."""
        self._stopped = True
        if (process := self._process) is not None:
            process.kill()
        if self._thread is not None and self._process is not None:
            self._thread.join()

    def _until(self, done: Callable[[], bool], timeout_s: float | None) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not done():
            if self._error is not None:
                raise self._error
            if self._stopped:
                raise JobFailedError(
                    f"the conversion into {self.folder} was stopped",
                    hint="Start it again: it continues after the newest segment.",
                )
            if deadline is not None and time.monotonic() > deadline:
                raise WaitTimeoutError(f"{self.folder} is still being written")
            time.sleep(_POLL_S)

    def _watch(self) -> None:
        lock = FileLock(self.folder / LOCK)
        try:
            lock.acquire(wait=True)  # blocks while another process converts
            if self._stopped or (self.folder / DONE).exists():
                return
            if self._prepared.tokenizer.name is None:
                run(self._prepared, lock=lock, budget_bytes=self._budget_bytes, on_bytes=self._on_bytes)
            else:
                self._run_process(lock)
        except HyperpodExtError as error:
            self._error = error
        except Exception as error:
            self._error = JobFailedError(f"{self.folder}: conversion failed: {type(error).__name__}: {error}")
        finally:
            lock.release()

    def _run_process(self, lock: FileLock) -> None:
        order = {
            "recipe": asdict(self._prepared.recipe),
            "folder": str(self.folder),
            "budget_bytes": self._budget_bytes,
            "lock": lock.fileno(),
            "parent": os.getpid(),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hyperpod_ext.runtime.data.convert.background"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[lock.fileno()],
        )
        failure = None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._process as process, self._process.stdin as orders, self._process.stdout as answers:
            orders.write(json.dumps(order).encode())
            orders.close()
            for line in answers:
                reported = json.loads(line)
                self._on_bytes(int(reported.get("nbytes", 0)))
                failure = reported.get("error", failure)
        if failure is not None:
            raise JobFailedError(str(failure["message"]), hint=str(failure["hint"]))
        if process.returncode and not self._stopped:
            ended = (
                f"killed by signal {-process.returncode}" if process.returncode < 0 else f"code {process.returncode}"
            )
            raise JobFailedError(
                f"the process that converts into {self.folder} ended early ({ended})",
                hint="Start the conversion again: it continues after the newest segment. After signal 9, check whether "
                "the node was short of memory.",
            )


def main() -> None:
    """Main function of the converter process. Reads its settings from stdin as JSON, and writes progress and at most
    one error to stdout, as lines of JSON."""
    from hyperpod_ext.processes import die_with_parent

    order = json.loads(sys.stdin.buffer.read())
    die_with_parent(order["parent"])
    # the training process handles Ctrl-C; this process ends together with it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(_NICE)
    folder = Path(order["folder"])
    recipe = Recipe(**{**order["recipe"], "sources": tuple(order["recipe"]["sources"])})
    lock = FileLock(folder / LOCK)
    lock.adopt(order["lock"])
    try:
        prepared = prepare(recipe, folder.parent)
        if prepared.folder != folder:
            raise DatasetChangedError(
                "the dataset was changed before its conversion began", hint="Start the conversion again."
            )
        run(prepared, lock=lock, budget_bytes=order["budget_bytes"], on_bytes=_report)
    except HyperpodExtError as error:
        _write({"error": error.to_json()})
        sys.exit(1)


def _report(nbytes: int) -> None:
    if nbytes:
        _write({"nbytes": nbytes})


def _write(message: object) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
