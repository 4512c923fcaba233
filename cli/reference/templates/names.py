"""Checks the names of templates."""

from __future__ import annotations


def known(name: str) -> str:
    """Return `name`, after a check that there is a shipped template with this name.

    Raises:
        NotFoundError: there is no template with this name. The hint has the most similar name.
    """
    from hyperpod_ext.config.files.nearest import suggest
    from hyperpod_ext.errors import NotFoundError
    from hyperpod_ext.jobs.contract.render import template_names

    names = template_names()
    if name not in names:
        raise NotFoundError(f"there is no template {name}", hint=suggest(name, names))
    return name
