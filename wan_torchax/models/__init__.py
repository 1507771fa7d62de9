"""Families of models, a folder each (family.py says what one is), and what they share."""
