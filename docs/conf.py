"""Sphinx's settings for the documentation site; `make docs` builds it (tools/docs_site.py)."""

project = "megatron-opd"
html_title = "megatron-opd"
extensions = ["myst_parser"]
exclude_patterns = ["conf.py"]

# GitHub's anchors, so that links work there and here
myst_heading_anchors = 6
highlight_language = "text"

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_favicon = "_static/icon.svg"
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
pygments_style = "friendly"
pygments_dark_style = "monokai"
