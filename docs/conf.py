"""The site: Sphinx with MyST (Markdown and notebooks) and the Book theme. `make docs` builds it without a network.

jax, flax, optax, orbax and grain use the same three packages, so their pages and ours link and look alike. MkDocs
Material, the usual alternative, is in maintenance only since November 2025, and has no check of anchors between pages
and no directive for docstrings; Sphinx 9, MyST-NB 1.4 and the theme 1.4 were released in the last twelve months.
"""

import os
import re
import sys
from pathlib import Path
from typing import Any

from spmdkit.foundation import garbage
from spmdkit.foundation.version import __version__

DOCS = Path(__file__).parent.resolve()
ROOT = DOCS.parent
sys.path.insert(0, str(DOCS))

import generate  # noqa: E402

garbage.collect_rarely()  # a sixth of the build
project = "spmdkit"
author = "the spmdkit maintainers"
release = version = __version__

extensions = ["myst_nb", "sphinx_copybutton", "sphinx_design"]
exclude_patterns = ["_build", "**/.ipynb_checkpoints", "api_examples.md"]
suppress_warnings = ["toc.empty_glob"]

# Notebooks are run by tests/docs; the site shows their stored output.
nb_execution_mode = "off"
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
copybutton_prompt_text = "$ "

html_theme = "sphinx_book_theme"
html_title = "spmdkit"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
html_theme_options = {
    "use_download_button": False,
    "home_page_in_toc": True,
    "show_toc_level": 2,
    "collapse_navbar": True,  # all pages in each page take a third of the build
}

REPOSITORY = os.environ.get("READTHEDOCS_GIT_CLONE_URL", "").removesuffix(".git")
LINK = re.compile(r"\[([^\]\n]+)\]\(((?:\.\./)+[^)#\s]*)(#[^)\s]*)?\)")


def link_repository(page: Path, text: str) -> str:
    """Returns a page with its links to files outside of docs/ as links to the repository, or as text offline."""

    def replaced(link: re.Match[str]) -> str:
        path = (page.parent / link[2]).resolve()
        if path.is_relative_to(DOCS) or not path.exists():
            return link[0]
        return f"[{link[1]}]({REPOSITORY}/blob/HEAD/{path.relative_to(ROOT)}{link[3] or ''})" if REPOSITORY else link[1]

    return LINK.sub(replaced, text)


def setup(app: Any) -> None:
    def read(app: Any, name: str, source: list[str]) -> None:
        source[0] = link_repository(Path(app.env.doc2path(name)), generate.fill(source[0]))

    app.connect("source-read", read)
