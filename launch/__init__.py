"""Thin surfaces over the same session: command line and library."""
