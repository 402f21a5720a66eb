"""Compiled functions for browsers: folders that `navigator.gpu` runs, no Python."""

from .demo import DemoSite, export_decode, export_demo
from .export import Exported, export_web

__all__ = ["DemoSite", "Exported", "export_decode", "export_demo", "export_web"]
