"""How Sphinx makes a site of these pages: `make docs`. Every warning is an error there, and nothing is downloaded."""

import re
from typing import Any

import ckptman

project = "ckptman"
author = copyright = "The ckptman maintainers"
version = release = ckptman.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
myst_heading_anchors = 4
"""Links to headings are those of GitHub."""
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True

default_role = "code"
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_mock_imports = ["accelerate", "lightning", "torchtitan", "transformers"]
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = [("Raises, through DCP on every rank", "Raises")]
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
nitpick_ignore = [("py:class", "ckptman.policies.tiers.AsPath")]
nitpick_ignore_regex = [("py:.*", r"(?!ckptman\.).*|.*\.T")]
"""Types of the standard library and of torch, whose documentation is not here."""

html_theme = "furo"
html_title = f"ckptman {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_search_summary = False
"""Summaries are fetched, which a browser refuses to pages that were opened as files."""
html_copy_source = html_show_sphinx = html_show_copyright = False


def read_docstring(app: object, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Read an indented paragraph as Markdown does: as code. What is returned is a sentence and begins with no type."""
    for number in range(len(lines) - 2, -1, -1):
        if lines[number] in ("Returns:", "Yields:"):
            lines[number + 1] = re.sub(r"(?=\S)", ": ", lines[number + 1], count=1)
        elif number and lines[number - 1][:1].strip() and not lines[number] and lines[number + 1].startswith("    "):
            lines[number:number] = ["", "::"]


def root_is_project(app: object, page: str, source: list[str]) -> None:
    """Have links to pages of the repository's root lead to where the site has those."""
    for name in ("CHANGELOG", "CONTRIBUTING"):
        source[0] = source[0].replace(f"](../{name}.md", f"](project/{name.lower()}.md")


def setup(app: Any) -> None:
    app.connect("source-read", root_is_project)
    app.connect("autodoc-process-docstring", read_docstring, priority=400)  # before napoleon
