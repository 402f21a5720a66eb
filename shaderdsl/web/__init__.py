"""Compiled functions for browsers: a folder that `navigator.gpu` runs without Python."""

from .demo import export_demo
from .export import Exported, export_web

__all__ = ["Exported", "export_demo", "export_web"]
