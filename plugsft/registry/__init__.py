"""Plugins: discovered, checked, ordered and called."""
