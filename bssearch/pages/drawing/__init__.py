"""The figures of a page as SVG: the subset of plotly's figures that `bssearch.pages` makes, drawn without a script."""
