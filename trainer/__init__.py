"""The built-in 3D trainer: a Llama-type decoder over data, tensor and pipeline axes.

Imported by nothing of ours but `cli.py`.
"""
