"""The queue of studies that nodes serve: who is served next, and what a node lets itself be asked to run."""
