"""The version, in one place; the package's metadata are made from it."""

VERSION = "0.4.0"
