"""Headstart trains speculative-decoding draft models, and proves at every step that what it made is right."""

__version__ = "0.1.0"
