"""Layers for a stack of clients at once, where vmap's own form of them is slow."""
