"""Finds templates by name."""

from __future__ import annotations


def known(name: str) -> str:
    """Return `name` if there is a template of this name.

    Raises:
        NotFoundError: there is no such template. The hint has the nearest name.
    """
    from hyperpod_ext.config.files.nearest import suggest
    from hyperpod_ext.errors import NotFoundError
    from hyperpod_ext.jobs.contract.render import template_names

    names = template_names()
    if name not in names:
        raise NotFoundError(f"there is no template {name}", hint=suggest(name, names))
    return name
