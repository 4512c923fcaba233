"""Finds the checkpoint folders that PLACE or a spec names, and selects one checkpoint in a folder."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import click

from ..output import say

if TYPE_CHECKING:
    from hyperpod_ext.config.checkpoint import CheckpointPolicy, DurableTier
    from hyperpod_ext.jobs.local.store import Submission
    from hyperpod_ext.runtime.storage.inventory import Inventory, InventoryEntry
    from hyperpod_ext.runtime.storage.object_store import ObjectStore

_TIMEOUT_S = 30.0
"""Seconds after which a request to storage fails. A job waits ten minutes, but a user at a terminal should not wait so
long."""
_MOST_FOLDERS = 50


@dataclass(frozen=True)
class CheckpointLocation:
    """The folder with the checkpoints of one job in one durable tier."""

    store: ObjectStore
    job: str | None = None
    """Name of the job that the checkpoints must belong to. None: unknown."""
    tier: DurableTier | None = None
    """The tier in the job's spec, which has the retention policy. None if the job's spec is unknown."""
    secret_file: Path | None = None
    """File with the secret of a local job. None for a job that is not local."""

    @property
    def kind(self) -> str:
        from hyperpod_ext.config.checkpoint import tier_of

        kind = type(self.tier) if self.tier is not None else tier_of(self.store.url)
        return kind.model_fields["kind"].default if kind is not None else ""

    @property
    def shown(self) -> str:
        """URL of the folder for messages; for a directory, its path."""
        return shown(self.store.url)

    def secret(self, named: str | None) -> bytes | None:
        """Return the job's secret from the file `named`, or from the folder of a local job. None without a file."""
        from hyperpod_ext.runtime.ipc.environment import read_secret

        file = Path(named) if named is not None else self.secret_file
        return None if file is None else read_secret(file)

    def inventory(self, secret: bytes | None = None, *, lenient: bool = False) -> Inventory:
        """Return an inventory of the checkpoints in the folder.

        Args:
            secret: secret of the job, to check signatures. None: signatures are not checked.
            lenient: report a damaged claim file on stderr instead of raising an error.

        Raises:
            NotFoundError: the folder contains no checkpoints of a job. The error's hint suggests another folder.
            CorruptSnapshotError: the claim file of a generation, which records the generation's first step, is damaged.
                The claim file is needed to decide which checkpoints are valid.
        """
        from hyperpod_ext.runtime.storage.inventory import take_inventory

        found = take_inventory(self.store, job=self.job, secret=secret, lenient=lenient)
        for error in found.damaged_fences.values():
            say(f"damaged: {error}")
        if not found.seen and self.job is None:
            _explain_empty(self)
        return found


def shown(url: str) -> str:
    """Return the URL of a store for messages; for a directory, return its path."""
    return unquote(urlsplit(url).path) if url.startswith("file:") else url


def open_place(url: str) -> CheckpointLocation:
    """Return the checkpoint folder at a URL or path."""
    from hyperpod_ext.runtime.storage.open import open_store

    return CheckpointLocation(open_store(url, deadline_s=_TIMEOUT_S))


def find_places(
    text: str | None, file: str | None, overrides: Sequence[str]
) -> tuple[list[CheckpointLocation], Submission | None]:
    """Return the checkpoint folders that the argument PLACE or the option `-f` names.

    Args:
        text: value of PLACE, or None.
        file: value of `-f`, or None.

    Returns:
        The checkpoint folders, and the local job if PLACE is the name of a local job.

    Raises:
        ConfigError: the spec has mistakes.
        NotFoundError: the place, the job or the file does not exist.
    """
    if (text is None) == (file is None):
        raise click.UsageError("Name one place, for example s3://bucket/prefix/my-job or -f job.yaml")
    if text is None:
        from ..spec import Specs

        job = Specs(file or "", None, overrides).job
        return places_of(job.checkpoint, job.name), None
    if overrides:
        raise click.UsageError("--set changes a field of a spec: name the spec with -f")
    if (submission := _local_job(text)) is not None:
        return _places_of_local(submission), submission
    return [open_place(text)], None


def durable_places(text: str | None, file: str | None, overrides: Sequence[str]) -> list[CheckpointLocation]:
    """Return the checkpoint folders that `find_places` finds, for commands that need at least one folder.

    Raises:
        NotFoundError: the job has no durable tier, and therefore no checkpoint folder.
    """
    from hyperpod_ext.config.checkpoint import DURABLE
    from hyperpod_ext.errors import NotFoundError

    places, submission = find_places(text, file, overrides)
    if not places:
        more = " `hp-ext checkpoints list` shows the job's memory tier." if submission else ""
        hint = f"Add a tier of kind {' or '.join(sorted(DURABLE, reverse=True))} under checkpoint.tiers.{more}"
        raise NotFoundError(f"{file or text} has no durable tier to read from", hint=hint)
    return places


def _local_job(text: str) -> Submission | None:
    """Return the local job with the name `text`; None if `text` is a path or URL. A text with a slash, such as
    `./name`, is always a path."""
    from hyperpod_ext.config.files.nearest import suggest_or_list
    from hyperpod_ext.errors import NotFoundError
    from hyperpod_ext.jobs.local import store as local_store

    name = text.removeprefix("local://localhost/")
    if any(character in name for character in "/:~") or name in (".", ".."):
        return None
    found = local_store.latest(name)
    if found is None and Path(text).is_dir():
        return None
    if found is None:
        hint = suggest_or_list(name, local_store.names(), "hp-ext list")
        hint += " local jobs; for checkpoints elsewhere, write s3://bucket/prefix/my-job, a path, or -f job.yaml"
        raise NotFoundError(f"`{text}` is neither a local job nor a folder here", hint=hint)
    return found


def _places_of_local(submission: Submission) -> list[CheckpointLocation]:
    job = submission.read_job()
    secret = submission.folder.parent / "secret"
    places = places_of(job.checkpoint, job.name)
    return [replace(place, secret_file=secret) for place in places] if secret.exists() else places


def places_of(policy: CheckpointPolicy, job: str) -> list[CheckpointLocation]:
    """Return the checkpoint folders of a job in the durable tiers that all nodes share, nearest first. Disks of single
    nodes are left out."""
    from hyperpod_ext.runtime.storage.open import open_tier

    return [CheckpointLocation(open_tier(tier, job, deadline_s=_TIMEOUT_S), job, tier) for tier in policy.shared()]


def _explain_empty(place: CheckpointLocation) -> None:
    from hyperpod_ext.config.files.nearest import nearest
    from hyperpod_ext.errors import NotFoundError

    where = place.shown
    parent, _, name = where.rstrip("/").rpartition("/")
    if step := re.fullmatch(r"step-0*(\d+)-g\d+", name):
        ctx = click.get_current_context(silent=True)
        takes_step = ctx is not None and any(one.name == "step" for one in ctx.command.params)
        hint = f"write {parent} --step {step[1]}" if takes_step else f"write {parent}"
        raise NotFoundError(f"{where} is one checkpoint, not a job's folder", hint=hint)
    folders = list(place.store.folders())[:_MOST_FOLDERS]
    if jobs := [f"{where}/{folder}" for folder in folders if _holds_checkpoints(place.store, folder)]:
        raise NotFoundError(f"{where} is not a checkpoint folder", hint=f"did you mean {' or '.join(jobs[:5])}?")
    hint = "write the URL or path of the tier, then / and the job's name, as in s3://bucket/prefix/my-job"
    if parent not in ("", "s3:/"):
        above = open_place(parent).store
        others = [other for other in above.folders() if _holds_checkpoints(above, other)][:_MOST_FOLDERS]
        if near := nearest(name, others):
            hint = f"did you mean {parent}/{near}?"
    raise NotFoundError(f"there are no checkpoints in {where}", hint=hint)


def _holds_checkpoints(store: ObjectStore, folder: str) -> bool:
    return any(name.startswith("step-") for name in store.folders(folder))


def damaged_fences(inventory: Inventory) -> list[dict[str, Any]]:
    """Return the generations whose claim files are damaged, as JSON. A claim file records the first step of a
    generation."""
    from hyperpod_ext.runtime.storage.names import fence_name

    return [
        {"url": f"{inventory.store.url}/{fence_name(number)}", "generation": number, "message": error.message}
        for number, error in inventory.damaged_fences.items()
    ]


def choose(inventory: Inventory, step: int | None) -> InventoryEntry:
    """Return the checkpoint of the step `step`. By default, return the newest checkpoint that is complete or damaged.

    Raises:
        NotFoundError: the folder has no usable checkpoint. If `step` is given, the hint names the nearest steps with
            checkpoints.
    """
    from hyperpod_ext.errors import NotFoundError

    where = shown(inventory.store.url)
    if step is None:
        complete = [one for one in inventory.seen if one.state in ("complete", "damaged")]
        if not complete:
            raise NotFoundError(f"no checkpoint in {where} is complete", hint="`hp-ext checkpoints list` shows why")
        return complete[0]
    if found := inventory.of_step(step):
        if found[0].state == "unfinished":
            raise NotFoundError(f"step {step} in {where} is unfinished: {found[0].detail}", hint=_near(inventory, step))
        return found[0]
    raise NotFoundError(f"there is no checkpoint of step {step} in {where}", hint=_near(inventory, step))


def _near(inventory: Inventory, step: int) -> str:
    steps = {one.found.step for one in inventory.seen if one.state in ("complete", "damaged", "uncertain")} - {step}
    below, above = max((s for s in steps if s < step), default=None), min((s for s in steps if s > step), default=None)
    near = [str(each) for each in (below, above) if each is not None]
    return f"the nearest steps: {' and '.join(near)}" if near else ""
