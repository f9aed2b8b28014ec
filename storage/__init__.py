"""Stores: durable places for immutable bytes, behind one interface.

Owns `Store`, its implementations, and their errors. Knows nothing of checkpoints and imports
nothing of ours, and no torch. Entry point: `storage.locate.open_store`.
"""
