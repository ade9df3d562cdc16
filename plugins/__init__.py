"""Worked examples of every kind of plugin; plugins/README.md lists them."""
