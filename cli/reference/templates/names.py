"""Names of templates, as people give them."""

from __future__ import annotations


def known(name: str) -> str:
    """`name`, if there is such a template.

    Raises:
        NotFoundError: there is none; names the nearest.
    """
    from hyperpod_ext.config.files.nearest import suggest
    from hyperpod_ext.errors import NotFoundError
    from hyperpod_ext.jobs.contract.render import template_names

    names = template_names()
    if name not in names:
        raise NotFoundError(f"there is no template {name}", hint=suggest(name, names))
    return name
