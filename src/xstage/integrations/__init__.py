"""Thin bridges from other libraries to the operators; each is a module named after its library, imported by its full name."""
