"""Settings of the site that ``make docs`` builds: Sphinx reads the Markdown pages as they are.

The source is the whole repository, so that a page may link to the README, a notebook or a picture of ``research/`` as
it does on a code host.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE / "_site")]

from lgmml_torch import __version__  # noqa: E402

project = "lgmml_torch"
author = "the authors of lgmml_torch"
version = release = __version__
root_doc = "docs/index"

extensions = [
    "myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton",
    "formulas", "notebook_pages", "reference",
]  # fmt: skip
include_patterns = ["README.md", "CHANGELOG.md", "SECURITY.md", "docs/*.md", "docs/api/*.md", "notebooks/*.ipynb"]
exclude_patterns = [
    ".*",
    "build",
    "dist",
    "outputs",
    "multirun",
    "tests",
    "docs/results",
    "lgmml_torch",
    "research",
    "tools",
]

myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_fence_as_directive = ["math"]
myst_heading_anchors = 4
myst_links_external_new_tab = True

# Docstrings name other objects in single backticks; `reference` says where those lead.
default_role = "py:obj"
nitpicky = True
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # shapes stand in the docstrings; types of Tensor, str and int would only be noise
autodoc_class_signature = "mixed"
autodoc_default_options = {"members": True}
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_maximum_signature_line_length = 140

html_theme = "furo"
pygments_dark_style = "github-dark"
html_title = f"lgmml_torch {release}"
html_static_path = ["_site/static"]
html_css_files = ["site.css"]
templates_path = ["_site/templates"]
html_additional_pages = {"index": "to_docs.html"}
html_show_sourcelink = html_show_copyright = False
html_copy_source = False
html_math_renderer = "mathml"
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#2b5c99", "color-brand-content": "#2b5c99"},
    "dark_css_variables": {"color-brand-primary": "#8ab8ee", "color-brand-content": "#8ab8ee"},
}
copybutton_prompt_text = ">>> "
copybutton_exclude = ".linenos, .gp, .go"
