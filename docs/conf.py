"""How `make docs` builds the pages: Sphinx with MyST, from the same Markdown as on a code host."""

project = "megatron_cp_plugin"
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
root_doc = "index"
exclude_patterns = ["data/**", "models/*.yaml", "open.md"]
myst_heading_anchors = 4
html_theme = "furo"
html_title = "megatron_cp_plugin"
# Links to files of the repository beside the pages stay as they are.
suppress_warnings = ["myst.xref_missing"]
