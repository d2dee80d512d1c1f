"""A small decoder-only transformer on the bytes of real text."""
