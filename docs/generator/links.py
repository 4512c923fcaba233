"""Rewrites the links of pages, which work in the repository, so that they work on the site.

The site has only docs/. A link to another file of the repository, such as `../examples/01-local/train.py`, becomes a
link to a page with the content of this file.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

SOURCE = "source"
"""Folder of the site for pages with files of the repository."""
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security-policy.md",
}
"""Pages of the site for pages outside of docs/."""
TOKEN = re.compile(r"^```.*?^```$|`[^`\n]+`|\]\((?P<link>[^)\s]+)", re.MULTILINE | re.DOTALL)
"""A code block, a code span or the target of a link. The first two are matched to skip links in code."""
SKIPPED = {"__pycache__", "node_modules", "cdk.out"}
LARGEST = 200_000


def rewrite(text: str, page: str, root: Path) -> str:
    """Return the text of a page with links for the site.

    Args:
        page: path of the page in the repository, or, for a generated page, `docs/` and its path on the site.
        root: folder of the repository.
    """

    def replace(found: re.Match[str]) -> str:
        if (link := found["link"]) is None or is_external(link):
            return found[0]
        path, mark, anchor = link.partition("#")
        repository_path = posixpath.normpath(posixpath.join(posixpath.dirname(page), path))
        target = on_site(repository_path, root)
        return f"]({_relative(target, site_path(page))}{mark}{anchor}"

    return TOKEN.sub(replace, text)


def is_external(link: str) -> bool:
    """Return whether a link leads to another site, or to a heading of its own page."""
    return "://" in link or link.startswith(("#", "mailto:"))


def site_path(page: str) -> str:
    """Return the path on the site of a page with this path in the repository."""
    return PAGES.get(page) or page.removeprefix("docs/")


def on_site(path: str, root: Path) -> str:
    """Return the path on the site for a path in the repository."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/") and not path.startswith("docs/generator"):
        return path.removeprefix("docs/")
    return f"{SOURCE}/{path}/index.md" if (root / path).is_dir() else f"{SOURCE}/{path}.md"


def _relative(target: str, page: str) -> str:
    return posixpath.relpath(target, posixpath.dirname(page) or ".")


def linked_files(text: str, page: str, root: Path) -> Iterator[str]:
    """Yield the paths of files and folders outside of docs/ that the page links to."""
    for found in TOKEN.finditer(text):
        if (link := found["link"]) is None or is_external(link):
            continue
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page), link.partition("#")[0]))
        if on_site(path, root).startswith(f"{SOURCE}/") and (root / path).exists():
            yield path


def source_pages(texts: dict[str, str], root: Path) -> dict[str, str]:
    """Return a page for every file that `texts` link to, by the page's path on the site.

    Args:
        texts: texts of pages, by their paths in the repository.
    """
    pages: dict[str, str] = {}
    pending = [path for page, text in texts.items() for path in linked_files(text, page, root)]
    while pending:
        path = pending.pop()
        if (name := on_site(path, root)) in pages:
            continue
        file = root / path
        if file.is_dir():
            inner = sorted(_listed(file), key=lambda one: (one.is_dir(), one.name))
            pages[name] = _folder_page(path, inner, root)
            pending += [str(one.relative_to(root)) for one in inner]
        else:
            pages[name] = _file_page(path, file)
    return pages


def _listed(folder: Path) -> Iterator[Path]:
    for one in folder.iterdir():
        if one.name in SKIPPED or one.name.startswith("."):
            continue
        if one.is_dir() or (one.stat().st_size <= LARGEST and _is_text(one)):
            yield one


def _is_text(file: Path) -> bool:
    try:
        file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return False
    return True


HEAD = "---\nsearch:\n  exclude: true\nhide:\n  - navigation\n---\n\n"


def _folder_page(path: str, inner: list[Path], root: Path) -> str:
    links = []
    for one in inner:
        target = _relative(on_site(str(one.relative_to(root)), root), f"{SOURCE}/{path}/index.md")
        links.append(f"- [`{one.name}{'/' * one.is_dir()}`]({target})")
    return f"{HEAD}# {path}\n\nFiles of the folder `{path}` in the repository:\n\n" + "\n".join(links) + "\n"


LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".sh": "bash", ".sbatch": "bash"}


def _file_page(path: str, file: Path) -> str:
    text = file.read_text(encoding="utf-8", errors="replace")
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    language = LANGUAGES.get(file.suffix, "text")
    note = f"The file `{path}` of the repository:"
    return f"{HEAD}# {path}\n\n{note}\n\n{fence}{language}\n{text.rstrip()}\n{fence}\n"
