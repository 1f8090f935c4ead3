"""Sphinx: Markdown through MyST, docstrings through autodoc."""

project = "hetpass"
author = "the hetpass authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
myst_heading_anchors = 3
html_theme = "alabaster"
autodoc_typehints = "description"
