"""Changes the text of pages where GitHub and MkDocs read Markdown differently, and links names to the reference."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping

TOKEN = re.compile(
    r"^```.*?^```$|^#.*?$|\[(?:[^\[\]]|`[^`]*`)*\]\([^)]*\)|(?P<code>`[^`\n]+`)", re.MULTILINE | re.DOTALL
)
"""A code block, a heading, a link or a code span. The first three are matched to leave them as they are."""


SITE_ONLY = re.compile(r"<!-- site: (.*?) -->", re.DOTALL)
"""Text of a committed page that only the site shows, because it links to generated pages: `[text][path]`."""


def for_site(text: str) -> str:
    """Return the text of a committed page with the parts that only the site shows."""
    return SITE_ONLY.sub(lambda found: re.sub(r"\]\[([^\]]+)\]", r"](\1)", found[1]), text)


def slug(title: str, separator: str) -> str:
    """Return the anchor of a heading, as GitHub makes it."""
    kept = re.sub(r"[^\w\- ]", "", re.sub(r"<[^>]*>", "", title).strip().lower())
    return kept.replace(" ", separator)


def without_escapes(text: str) -> str:
    """Return the text with `|` for `\\|` in the code spans of tables: GitHub removes the backslash, MkDocs does not."""
    lines = text.split("\n")
    return "\n".join(
        re.sub(r"`[^`]*`", lambda span: span[0].replace("\\|", "|"), line) if line.startswith("|") else line
        for line in lines
    )


def with_links(text: str, page: str, places: Mapping[str, str]) -> str:
    """Return the text with a link to the reference around the first mention of each known name in code.

    Args:
        page: path of the page on the site.
        places: path and anchor on the site of each name.
    """
    linked: set[str] = set()

    def replace(found: re.Match[str]) -> str:
        code = found["code"]
        name = code.strip("`") if code else ""
        place = places.get(name) or places.get(" ".join(name.split(" ")[:2]) if name.startswith("hp-ext ") else "")
        if place is None or place in linked or place.partition("#")[0] == page:
            return found[0]
        linked.add(place)
        path, _, anchor = place.partition("#")
        target = posixpath.relpath(path, posixpath.dirname(page) or ".")
        return f"[{code}]({target}#{anchor})" if anchor else f"[{code}]({target})"

    return TOKEN.sub(replace, text)
