"""Compiled functions for browsers: folders that `navigator.gpu` runs, no Python."""

from .demo import export_demo
from .export import Exported, export_web

__all__ = ["Exported", "export_demo", "export_web"]
