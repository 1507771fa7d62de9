"""Model families, one folder each (family.py defines the interface), and shared code."""
