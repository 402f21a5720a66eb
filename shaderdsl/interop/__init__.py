"""Bridges to other libraries, each imported when it is used."""
