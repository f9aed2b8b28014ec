"""Keepstep keeps a large training run in step: capture, check, commit, restore into any layout."""

__version__ = "0.1.0"
