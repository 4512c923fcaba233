"""Hook of MkDocs: adds generated pages to the site, and changes the text of pages for the site."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
if str(DOCS) not in sys.path:  # so that the package `generator` can be imported
    sys.path.insert(0, str(DOCS))

from generator import links, markdown, nav, reference, snippets  # noqa: E402
from mkdocs.config.defaults import MkDocsConfig  # noqa: E402
from mkdocs.structure.files import File, Files, InclusionLevel  # noqa: E402
from mkdocs.structure.pages import Page  # noqa: E402

ROOT = DOCS.parent
REFERENCE: dict[str, str] = {}
PLACES: dict[str, str] = {}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Make the pages of the reference, and put them into the navigation."""
    REFERENCE.update(reference.pages())
    PLACES.update(reference.places(REFERENCE))
    config.nav = nav.expand(config.nav or [], list(REFERENCE))
    config.mdx_configs.setdefault("toc", {})["slugify"] = markdown.slug
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to the site."""
    texts = {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    project = {name: (ROOT / name).read_text(encoding="utf-8") for name in links.PAGES if name != "README.md"}
    for name, text in project.items():
        files.append(File.generated(config, links.PAGES[name], content=text))
    for path, text in REFERENCE.items():
        files.append(File.generated(config, path, content=text))
    for path, text in links.source_pages(texts | project, ROOT).items():
        files.append(File.generated(config, path, content=text, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(text: str, page: Page, **_: Any) -> str:
    """Rewrite the links of a page, and link names to the reference."""
    path = page.file.src_uri
    if path.startswith(f"{links.SOURCE}/"):
        return text
    included = {place: name for name, place in links.PAGES.items() if name != "README.md"}
    in_repository = included.get(path, f"docs/{path}")
    if path not in REFERENCE and not (ROOT / in_repository).exists():
        return text
    if path not in REFERENCE:
        text = snippets.with_reasons(markdown.for_site(text), in_repository)
        text = links.rewrite(text, in_repository, ROOT)
    return markdown.with_links(markdown.without_escapes(text), path, PLACES)
